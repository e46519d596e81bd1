"""What two trainers' own drafter classes say with tiny drafters of every shape: the judges in tests/test_judges.py.

    python runs/judges.py make        OUT          (where eyas is)
    VENV/bin/python runs/judges.py speculators OUT (where speculators is)
    VENV/bin/python runs/judges.py specforge   OUT (where SpecForge is)
    python runs/judges.py copies      OUT --of DIR (where eyas is: drafters for vLLM, see ``copies``)

``make`` saves drafters with three taps, which both trainers insist on somewhere, and the shipped drafter's text. The
others load every folder under OUT into the trainer's own class and write what it says, over the prompt and the chain
of ``engine_shapes.py``, to OUT/JUDGE.safetensors, and what it refused, missed or dropped to OUT/JUDGE.json.

speculators: ``Eagle3DraftModel``, and the folder that its converter makes of ours, loaded by its ``from_pretrained``.
SpecForge: ``LlamaForCausalLMEagle3``, unrolled as its ``algorithms/eagle3/model.py`` does. ``runs/judges.sh`` does it
all; the versions are in it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SpecForge compiles its norms, for which a machine may have no compiler

import torch
from engine_shapes import DEPTHS, make_one, shapes_in, some_words, tiny_target, write_text
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ALL = {"norm_before_residual": True, "norm_output": True, "own_embedding": True}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "all_each": {"fc_norm": True, **ALL},
    "all_joint": {"norm_before_fc": True, **ALL},
    "llama3": {"rope_parameters": LLAMA3},
    "full_vocab": {},
    "full_vocab_all": {"fc_norm": True, **ALL},
}
FULL = ("full_vocab", "full_vocab_all")
SHIPPED = Path(__file__).parents[1] / "models" / "smollm2-135m-eagle3"
SHIPPED_PREFIX, SHIPPED_WORDS = 3, 256  # slots of its prompt, and how many of its logits are kept


# -- the drafters ---------------------------------------------------------------------------------------------


def make(out: Path) -> None:
    from eyas.vocab import DraftVocab

    torch.manual_seed(1)
    target, words = tiny_target(), some_words()
    every = DraftVocab(torch.arange(48), 48)
    for name, choices in SHAPES.items():
        make_one(target, out / name, (1, 3, 4), every if name in FULL else words, choices)
    write_text(target, out, 3)
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    ids = torch.randint(0, config["vocab_size"], (1, SHIPPED_PREFIX + DEPTHS))
    rows = torch.randn(ids.shape[1], config["hidden_size"])  # of the embedding: the others are zeros
    taps = torch.randn(1, SHIPPED_PREFIX, 3 * config["hidden_size"])
    save_file({"taps": taps, "input_ids": ids, "rows": rows}, out / "shipped-text.safetensors")


def copies(out: Path, of: Path) -> None:
    """All drafters of a folder, and two as other trainers would have named their tensors, read and saved again."""
    from eyas import checkpoint

    for name in shapes_in(of):
        shutil.copytree(of / name, out / name)
    shutil.copy(of / "text.safetensors", out)
    target = tiny_target()
    for name in RENAMED:
        for spelling, rename in SPELLINGS.items():
            named = out / "named" / f"{name}-{spelling}"
            shutil.copytree(of / name, named)
            tensors = {rename(n): t for n, t in load_file(named / "model.safetensors").items()}
            save_file(tensors, named / "model.safetensors", metadata={"format": "pt"})
            found = checkpoint.read(named)
            assert found.contract is not None
            drafter = checkpoint.load(found, target)
            checkpoint.save(drafter, out / f"{name}, from {spelling}", found.contract, {}, dtype=torch.float32)
    shutil.rmtree(out / "named")


RENAMED = ("plain", "all_each")
SPELLINGS = {
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "model.": lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
}


def shipped_text(out: Path) -> dict[str, Tensor]:
    text = load_file(out / "shipped-text.safetensors")
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    embedding = torch.zeros(config["vocab_size"], config["hidden_size"])
    embedding[text["input_ids"][0]] = text.pop("rows")
    return {**text, "embedding": embedding}


def cases(out: Path) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Every folder to be judged, with its text. The shipped drafter only beside its text."""
    text = load_file(out / "text.safetensors")
    found = {name: (out / name, text) for name in shapes_in(out)}
    if (out / "shipped-text.safetensors").exists():
        found["shipped"] = (SHIPPED, shipped_text(out))
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def padded(text: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Taps [1, S, C*D] and fed ids [1, S] of so many slots that the last of the prompt can be unrolled; that slot."""
    taps, ids = text["taps"], text["input_ids"]
    return torch.cat((taps, taps.new_zeros(1, DEPTHS - 1, taps.shape[2])), dim=1), ids[:, 1:], taps.shape[1] - 1


# -- speculators ----------------------------------------------------------------------------------------------


@torch.no_grad()
def speculators(out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    said, notes = {}, {}
    for name, (folder, text) in cases(out).items():
        config, refused = speculators_config(folder)
        model, missing, unexpected = speculators_model(config, weights(folder), text["embedding"])
        said[name] = speculators_logits(model, text)
        notes[name] = {"missing": missing, "unexpected": unexpected, "refused": refused}
        logits, notes[name]["converter"] = converted(folder, text)
        if logits is not None:
            said[f"{name}, converted"] = logits
    return said, notes


def speculators_config(folder: Path) -> tuple[Any, str | None]:
    """Its config for our folder, and what it holds against it: one of the two norms before fc is then set later."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer = LlamaConfig(**{k: v for k, v in ours.items() if k in LAYER_KEYS})
    layer._attn_implementation = "sdpa"
    greedy = GreedyTokenProposalConfig(speculative_tokens=DEPTHS)
    keys = {key: ours.get(key, False) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    keys |= {key: ours[key] for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    keys["speculators_config"] = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[greedy],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    try:
        return Eagle3SpeculatorConfig(transformer_layer_config=layer, **keys), None
    except ValueError as error:
        config = Eagle3SpeculatorConfig(transformer_layer_config=layer, **{**keys, "norm_before_fc": False})
        config.norm_before_fc = True
        return config, error.errors()[0]["msg"]  # type: ignore[attr-defined]


LAYER_KEYS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def speculators_model(config: Any, tensors: dict[str, Tensor], embedding: Tensor) -> tuple[Any, list[str], list[str]]:
    """Its class with our weights: midlayer. is layers.0. there, and the target's embedding is put in as it would."""
    from speculators.models.eagle3 import Eagle3DraftModel

    model = Eagle3DraftModel(config).eval()
    named = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    missing, unexpected = model.load_state_dict(named, strict=False)
    if "embed_tokens.weight" in missing:
        model.embed_tokens.weight.copy_(embedding)
    return model, sorted(missing), sorted(unexpected)


def speculators_logits(model: Any, text: dict[str, Tensor]) -> Tensor:
    """Logits [DEPTHS, W] of its training unroll at the prompt's last slot."""
    said: list[Tensor] = []
    taps, ids, slot = padded(text)
    hook = model.lm_head.register_forward_hook(lambda *call: said.append(call[2][0, slot]))
    model(hidden_states=taps, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=DEPTHS)
    hook.remove()
    return torch.stack(said)


def converted(folder: Path, text: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Any]]:
    """What its converter makes of our folder: logits of the result loaded as it would be, and what got lost."""
    from loguru import logger
    from speculators.convert import convert_model
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    taps, warned = ours["eagle_aux_hidden_state_layer_ids"], []
    logger.remove()
    logger.add(lambda line: warned.append(str(line).strip()), level="WARNING", format="{message}")
    with tempfile.TemporaryDirectory() as scratch:
        base, made = Path(scratch, "target"), Path(scratch, "made")
        write_base(base, ours, text["embedding"])
        # The two that it takes from its caller alone; whatever else it needs it reads from our config.
        given = {"norm_before_residual": ours["norm_before_residual"], "eagle_aux_hidden_state_layer_ids": taps}
        note: dict[str, Any] = {"given": given, "refused": None, "lost": [], "switches": {}}
        try:
            convert_model(str(folder), str(base), "eagle3", str(made), validate_device="cpu", **given)
        except Exception as error:  # whatever it is, it is the answer
            note["refused"] = one_line(error, scratch)
            return None, note
        config = Eagle3SpeculatorConfig.from_pretrained(made)
        config.transformer_layer_config._attn_implementation = "sdpa"
        written = json.loads((made / "config.json").read_text(encoding="utf-8"))
        held = set(load_file(made / "model.safetensors"))
        names = {name.replace("midlayer.", "layers.0.") for name in load_file(folder / "model.safetensors")}
        note |= {"warned": warned, "lost": sorted(names - held), "gained": sorted(held - names)}
        note["switches"] = {key: written.get(key) for key in ("norm_before_fc", "fc_norm", "norm_output")}
        note["rope"] = written["transformer_layer_config"].get("rope_parameters")
        model = Eagle3DraftModel.from_pretrained(made, config=config)
        note["missing"] = sorted(set(model.state_dict()) - held)
        if "embed_tokens.weight" in note["missing"]:
            # speculators 0.9.0 fills it from the target where it finds a NaN in it, and puts NaN there when it builds
            # the model; but transformers 5.19 builds it anew and leaves whatever was in memory, NaN or not.
            model.embed_tokens.weight.copy_(text["embedding"])
        return speculators_logits(model.float().eval(), text), note


def write_base(folder: Path, ours: dict[str, Any], embedding: Tensor) -> None:
    """A target for the converter to read: its config, and the three tensors that speculators takes from it."""
    from transformers import LlamaConfig

    keys = {k: v for k, v in ours.items() if k in LAYER_KEYS}
    keys["num_hidden_layers"] = max(ours["eagle_aux_hidden_state_layer_ids"]) + 1  # deep enough for its taps
    config = LlamaConfig(**keys)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    rows = {"model.embed_tokens.weight": embedding, "lm_head.weight": torch.zeros_like(embedding)}
    save_file(rows | {"model.norm.weight": torch.ones(embedding.shape[1])}, folder / "model.safetensors")


# -- SpecForge ------------------------------------------------------------------------------------------------


@torch.no_grad()
def specforge(out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    said, notes = {}, {}
    for name, (folder, text) in cases(out).items():
        ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, notes[name] = specforge_model(ours, weights(folder), text["embedding"])
        said[name] = specforge_logits(model, text)
    folder, text = cases(out)["plain"]
    # The switch is read there as whether a norm stands before the head at all; we write it only where it is on.
    ours = {**json.loads((folder / "config.json").read_text(encoding="utf-8")), "norm_output": False}
    model, _ = specforge_model(ours, weights(folder), text["embedding"])
    said["plain, norm_output false"] = specforge_logits(model, text)
    return said, notes


def specforge_model(ours: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> tuple[Any, dict[str, Any]]:
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "config.json")
        path.write_text(json.dumps(ours), encoding="utf-8")
        config = AutoDraftModelConfig.from_file(str(path))
    model = AutoDraftModel.from_config(config, torch_dtype=torch.float32, attention_backend="sdpa").eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if "embed_tokens.weight" in missing:
        model.embed_tokens.weight.copy_(embedding)
    return model, {"missing": sorted(missing), "unexpected": sorted(unexpected)}


def specforge_logits(model: Any, text: dict[str, Tensor]) -> Tensor:
    """Logits [DEPTHS, W] at the prompt's last slot: its unroll's steps, one after the other."""
    taps, ids, slot = padded(text)
    hidden, cache, said = model.project_hidden_states(taps), [[], []], []
    slots = hidden.shape[1]
    mask = model.prepare_decoder_attention_mask(torch.ones(1, slots, dtype=torch.bool), hidden, 1, slots, 0)
    positions = torch.arange(slots)[None]
    for _ in range(DEPTHS):
        hidden = model.backbone(model.embed_input_ids(ids), hidden, cache, mask, positions)
        said.append(model.compute_logits(hidden)[0, slot])
        ids = torch.cat((ids[:, 1:], ids.new_zeros(1, 1)), dim=1)
    return torch.stack(said)


# -------------------------------------------------------------------------------------------------------------


def one_line(error: Exception, scratch: str) -> str:
    """What it said, without a folder of this machine."""
    return f"{type(error).__name__}: {error}".replace(scratch, "").replace("\n", " ")[:300]


def record(out: Path, judge: str, said: dict[str, Tensor], notes: dict[str, Any]) -> None:
    kept = {name: logits[:, :SHIPPED_WORDS].clone() for name, logits in said.items()}
    save_file(kept, out / f"{judge}.safetensors")
    about = {
        "judge": judge,
        "versions": {name: importlib.metadata.version(name) for name in (judge, "torch", "transformers")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": f"python runs/judges.py {judge} {out}",
        "shapes": notes,
    }
    (out / f"{judge}.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for name, logits in kept.items():
        print(name, [round(float(v), 4) for v in logits[:, 0]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "copies", "speculators", "specforge"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--of", type=Path, help="the folder of drafters to copy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.what == "make":
        make(options.out)
    elif options.what == "copies":
        copies(options.out, options.of)
    else:
        judge = {"speculators": speculators, "specforge": specforge}[options.what]
        record(options.out, options.what, *judge(options.out))


if __name__ == "__main__":
    main()
