"""What a check costs at the width of the case: 7,168 wide, random weights, one stored sample; no target runs.

    python runs/wide.py OUT            makes OUT (10 GB of random files) where it is not there, then measures

A drafter of the case's shapes, a target's embedding, norm and head in one of two shards, four stored tensors of one
sample of 2,048 tokens, 256 of them supervised. Measured: two depths of the curve over the whole sample, then the tap
sweep on its first 512 tokens: every stored tap and the embedding in every slot. Prints one JSON object: seconds, and
the most memory the process held, files it mapped included. Random weights guess nothing right: only the cost is real.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from safetensors.torch import save_file

from eyas import curve, variants
from eyas import target as targets
from eyas.check import load_weights, placed, read_files, settle_taps
from eyas.check.case import Case
from eyas.records import Record
from eyas.states.given import given
from eyas.states.stock import Stock, Tap
from eyas.variants import feed, pool, scores, taps
from eyas.variants.parts import play

WIDTH, MLP, HEADS, VOCABULARY, DRAFT, LAYERS = 7168, 18432, 56, 163_840, 32_000, 61
TOKENS, SUPERVISED, SHORT = 2048, 256, 512
STORED = (0, 3, 31, 59)


def main(out: Path) -> None:
    if not (out / "made").exists():
        make(out)
        (out / "made").touch()
    told: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    began = time.perf_counter()
    target = targets.load_ends(str(out / "target"))
    case = Case("wide")
    read_files(case, out / "drafter", target)
    assert not case.stopped, case.findings
    load_weights(case, target)
    assert case.parts is not None
    say("read")
    told["seconds to read"] = round(time.perf_counter() - began, 1)

    began = time.perf_counter()
    stock, _, _ = given(out / "states", target, None)
    stock = placed(case, stock, stock.records, target, None)
    settle_taps(case, stock)
    assert case.told is not None
    facts = {**case.told.configured, "taps": tuple(stock.taps[:3])}
    drafter = variants.build(case.parts, facts)
    assert drafter is not None
    say("placed")
    told["seconds to place"] = round(time.perf_counter() - began, 1)

    began = time.perf_counter()
    run = feed.from_stock(stock, facts)
    measured = curve.measure(drafter, target, stock.records, depths=2, run=run, play=play(facts), truth="record")
    told |= {"two depths": round(time.perf_counter() - began, 1), "slots": measured.agreement[1]}

    say("two depths")
    begun = Beginning(stock, SHORT)
    began = time.perf_counter()
    marks = {0: np.ones(SHORT, dtype=bool)}
    few = pool.make(begun, pool.Truths(begun, target), marks, 1)
    found = taps.search(few, scores.Scores(case.parts), begun, facts)
    assert found is not None
    tried = sum(len(row) for row in found.log_probability)
    told |= {"tap sweep": round(time.perf_counter() - began, 1), "readings": tried, "tap sweep slots": few.slots}
    told["GiB"] = memory()
    print(json.dumps(told, indent=2))


def say(what: str) -> None:
    sys.stderr.write(f"{what}: {json.dumps(memory())}\n")


def memory() -> dict[str, float]:
    """GiB: held now in memory of its own and in mapped files, which the system takes back when it needs them; and the
    most of both together."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, mapped, most = (int(lines[key].split()[0]) / 2**20 for key in ("RssAnon", "RssFile", "VmHWM"))
    return {"own": round(own, 2), "mapped files": round(mapped, 2), "most of both": round(most, 2)}


class Beginning:
    """The first tokens of a stock's records."""

    def __init__(self, inner: Stock, tokens: int) -> None:
        self._inner, self._tokens = inner, tokens
        self.records: Sequence[Record] = [
            Record(r.input_ids[:tokens], r.loss_mask[:tokens], r.source) for r in inner.records
        ]
        self.taps: tuple[Tap, ...] = inner.taps
        self.last: Tap | None = inner.last

    def states(self, index: int, taps: Sequence[Tap]) -> torch.Tensor:
        return self._inner.states(index, taps)[: self._tokens]

    def truth(self, index: int) -> torch.Tensor | None:
        return None


# -- the files --------------------------------------------------------------------------------------------------


def make(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16)
        for block in values.view(-1).split(2**24):
            block.copy_(torch.randn(len(block), generator=generator) * 0.02)
        return values

    for folder in ("drafter", "target", "states"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    embedding = noise(VOCABULARY, WIDTH)
    ids = torch.arange(DRAFT) * 5
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[ids] = True
    wide = HEADS * 128
    drafter = {
        "fc.weight": noise(WIDTH, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": noise(wide, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": noise(wide, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": noise(wide, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": noise(WIDTH, wide),
        "midlayer.mlp.gate_proj.weight": noise(MLP, WIDTH),
        "midlayer.mlp.up_proj.weight": noise(MLP, WIDTH),
        "midlayer.mlp.down_proj.weight": noise(WIDTH, MLP),
        "lm_head.weight": noise(DRAFT, WIDTH),
        "embed_tokens.weight": embedding,
        "d2t": ids - torch.arange(DRAFT),
        "t2d": mask,
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        drafter[f"midlayer.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    drafter["norm.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    save_file(drafter, out / "drafter" / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": WIDTH, "intermediate_size": MLP, "max_position_embeddings": 4096,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 128, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": VOCABULARY, "draft_vocab_size": DRAFT,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    }  # fmt: skip
    (out / "drafter" / "config.json").write_text(json.dumps(config, indent=2))
    ends = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
        "lm_head.weight": noise(VOCABULARY, WIDTH),
    }
    name = "model-00002-of-00002.safetensors"
    save_file(ends, out / "target" / name, metadata={"format": "pt"})
    where = dict.fromkeys(ends, name) | {"model.layers.0.mlp.up_proj.weight": "model-00001-of-00002.safetensors"}
    (out / "target" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    theirs = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (out / "target" / "config.json").write_text(json.dumps(theirs, indent=2))
    said = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    supervised = torch.zeros(TOKENS, dtype=torch.int64)
    supervised[SHORT - SUPERVISED // 2 : SHORT + SUPERVISED // 2] = 1  # half of it within the first tokens
    states = [embedding[said], *(noise(TOKENS, WIDTH) * 50 * n for n in range(1, len(STORED)))]
    held = {"input_ids": said, "loss_mask": supervised, "hidden_states": states}
    torch.save(held, out / "states" / "sample_0.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
