"""The case in small: a target of DeepSeek-V3 layout, a drafter on its taps (0, 3, 7), and the files a team had of both.

    python runs/case.py OUT          (where eyas is; a quarter of an hour on one core; what OUT holds is not made again)

OUT/target    12 layers with latent attention and experts, 0.6 M parameters, taught a few pages of the demo's text by
              heart, so that its greedy text is text and its logits have peaks
OUT/trained   the drafter as ``eyas train`` leaves it, contract and all
OUT/case      what tests/fixtures/drafters/tiny-deepseek-taps-0-3-7 holds: target, drafter as served (no contract,
              ids [2, 6, 9], which SGLang turned into taps 3, 7, 10), records, the stored states of one of them
OUT/case/measured.json   accept lengths as trained, with two taps swapped, and as served

Everything comes from seeds; another number of threads or another torch rounds otherwise and makes another drafter.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from eyas import checkpoint, curve, taps, train
from eyas import target as targets
from eyas.answers import Ask
from eyas.decode.batch import answer
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.target import Target

DEMO = Path(__file__).parents[1] / "models" / "smollm2-135m-eagle3" / "demo.jsonl.gz"
WORDS, TEXT = 512, 9000  # tokens of the vocabulary, and of the text learnt
LAYERS, WIDTH = 12, 64
STEPS, BATCH, WINDOW, LR = 700, 5, 320, 4e-3  # of teaching the target
TRAINED, STORED, SERVED_IDS = (0, 3, 7), (0, 3, 7, 10), [2, 6, 9]
SWAPS = {"0 and 3 swapped": (3, 0, 7), "3 and 7 swapped": (0, 7, 3), "0 and 7 swapped": (7, 3, 0)}
SERVED = (3, 7, 10)
RECORDS, HELD_OUT, NEW_TOKENS = 320, 32, 144
LONG, LONG_TOKENS = 16, 270  # the first of these is the stored sample


# -- the target ------------------------------------------------------------------------------------------------


def teach_target(out: Path) -> list[int]:
    """Write the target, and give back the text it learnt, as token ids."""
    tokenizer, text = tokenizer_and_text()
    if not (out / "config.json").exists():
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(shape()).float().train()
        learn_by_heart(model, torch.tensor(text))
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
    return text


def tokenizer_and_text() -> tuple[PreTrainedTokenizerFast, list[int]]:
    with gzip.open(DEMO, "rt", encoding="utf-8") as lines:
        pages = ["\n".join(m["content"] for m in json.loads(line)["messages"]) for line in lines]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = "<|end|>"
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(pages, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    text: list[int] = []
    for page in pages:
        text += tokenizer(page + "\n\n")["input_ids"]
        if len(text) > TEXT:
            break
    return tokenizer, text


def shape() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        moe_intermediate_size=WIDTH // 2,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        q_lora_rank=WIDTH // 2,
        kv_lora_rank=WIDTH // 2,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=WIDTH // 4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.05,
    )


def learn_by_heart(model: DeepseekV3ForCausalLM, text: torch.Tensor) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.0)
    draw = random.Random(0)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 40) * max(0.02, 1 - step / STEPS)
        first = [draw.randrange(len(text) - WINDOW - 1) for _ in range(BATCH)]
        rows = torch.stack([text[i : i + WINDOW + 1] for i in first])
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == STEPS - 1:
            print(f"target: step {step}, loss {float(loss):.3f}", flush=True)


# -- records ---------------------------------------------------------------------------------------------------


def greedy(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int, source: str) -> list[Record]:
    """The target's own answers to pieces of the text it learnt."""
    asks = [Ask(str(i), tuple(prompt)) for i, prompt in enumerate(prompts)]
    said = {a.id: a.token_ids for a in answer(target, asks, max_new_tokens=new_tokens)}
    return [record((*ask.prompt_ids, *said[ask.id]), len(ask.prompt_ids), source) for ask in asks]


def record(ids: Iterable[int], prompt: int, source: str) -> Record:
    array = np.array(list(ids), dtype=np.int32)
    return Record(array, np.arange(len(array)) >= prompt, source)


def pieces(text: Sequence[int], count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [text[i : i + draw.randrange(24, 48)] for i in (draw.randrange(len(text) - 48) for _ in range(count))]


def write_records(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(r.to_json(), separators=(",", ":")) + "\n" for r in records), encoding="utf-8")


# -- the drafter -----------------------------------------------------------------------------------------------


def train_drafter(target: Target, records: Sequence[Record], held_out: Sequence[Record], out: Path) -> None:
    config = train.TrainConfig(
        taps=TRAINED,
        draft_vocab=320,
        depths=5,
        init="ridge",
        lr=2e-3,
        batch=8,
        steps=600,
        measure_every=200,
        measure_records=HELD_OUT,
        keep_states=True,
        seed=0,
    )
    train.train(config, target, records, held_out, out, listener=Told(), overwrite=True)


class Told(train.Silent):
    def measured(self, point: train.Point, best: bool) -> None:
        print(f"drafter: step {point.step}, accept length {point.value:.3f}", flush=True)


def as_served(trained: Path, target: Target, out: Path) -> None:
    """The trained weights under the case's names and its config: an embedding beside them, ids, no contract."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(trained / "model.safetensors")
    tensors["embed_tokens.weight"] = target.embedding.to(torch.bfloat16).clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    ours = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    kept = (
        "architectures", "model_type", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size",
        "tie_word_embeddings", "draft_vocab_size", "head_dim",
    )  # fmt: skip
    config: dict[str, Any] = {key: ours[key] for key in kept}
    config["torch_dtype"] = "bfloat16"
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": SERVED_IDS, "use_aux_hidden_state": True}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def states(target: Target, one: Record) -> list[torch.Tensor]:
    """The four tensors of one sample, [T, D] in bf16: the embedding, and the outputs of three layers."""
    ids = torch.from_numpy(one.input_ids.astype(np.int64))[None]
    tapped = taps.run(target, ids, torch.tensor([one.seq_len]), STORED).taps[0]
    return [tap.to(torch.bfloat16).clone() for tap in tapped.split(target.hidden_size, dim=-1)]


# -- what it is worth ------------------------------------------------------------------------------------------


def fed(wanted: Sequence[int]) -> taps.Run:
    """A run that hands over other taps than the drafter asks for, in this order."""

    def run(target: Target, ids: torch.Tensor, lengths: torch.Tensor, _asked: Sequence[int]) -> taps.States:
        found = taps.run(target, ids, lengths, sorted(wanted))
        parts = dict(zip(sorted(wanted), found.taps.split(target.hidden_size, dim=-1), strict=True))
        return taps.States(torch.cat([parts[t] for t in wanted], dim=-1), found.last)

    return run


def accept_lengths(drafter: Drafter, target: Target, records: Sequence[Record]) -> dict[str, Any]:
    """Accept length with 4 drafted tokens, and joint accuracy at depth 0, under each wiring."""
    rows: dict[str, Any] = {}
    for name, wanted in {"as trained": TRAINED, **SWAPS, "as served": SERVED}.items():
        measured = curve.measure(drafter, target, records, depths=4, run=fed(wanted))
        first, length = measured.teacher_forced.joint_rate(0), measured.lengths[3]
        low, high = length.interval()
        rows[name] = {
            "taps": list(wanted),
            "accept_length": [round(v, 3) for v in (length.value or 1.0, low or 0.0, high or 0.0)],
            "depth_0": [first.hits, first.n],
        }
        print(name, rows[name], flush=True)
    return rows


def main(out: Path) -> None:
    text = teach_target(out / "target")
    target = targets.load(str(out / "target"))
    long = greedy(target, pieces(text, LONG, 3), LONG_TOKENS, "case")
    made = [*long, *greedy(target, pieces(text, RECORDS, 1), NEW_TOKENS, "case")]
    held_out = greedy(target, pieces(text, HELD_OUT, 2), NEW_TOKENS, "case")
    if not (out / "trained" / "config.json").exists():
        train_drafter(target, made, held_out, out / "trained")
    drafter = checkpoint.load(checkpoint.read(out / "trained"), target)

    case = out / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(out / "target", case / "target")
    as_served(out / "trained", target, case / "drafter")
    (case / "trained").mkdir()
    for name in ("config.json", "model.safetensors"):  # for the mutation bench
        shutil.copy(out / "trained" / name, case / "trained")
    write_records(case / "train.jsonl", [long[0], *made[LONG : LONG + 23]])
    write_records(case / "heldout.jsonl", held_out)
    (case / "states").mkdir()
    torch.save(states(target, long[0]), case / "states" / "sample_0.pt")
    measured = accept_lengths(drafter, target, held_out)
    (case / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
