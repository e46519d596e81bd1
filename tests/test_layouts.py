"""Every spelling of a drafter's tensors is the same drafter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny
from eyas import checkpoint, inventory
from eyas.dialects import layouts
from eyas.drafter import DrafterConfig
from eyas.errors import CheckpointError
from test_checkpoint import saved

Rename = Callable[[str], str]


def layers(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name)


def numbered(name: str) -> str:
    """TensorRT-LLM's own, where there are several layers."""
    return re.sub(r"^layers\.(\d+)\.", r"midlayer.\1.", layers(name))


def aux_norms(name: str) -> str:
    low, mid, high = "aux_norm_low", "aux_norm_mid", "aux_norm_high"
    return name.replace("fc_norm.0", low).replace("fc_norm.1", mid).replace("fc_norm.2", high)


def model(name: str) -> str:
    return name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}"


def everything(name: str) -> str:
    return f"model.{name}"


STYLES: dict[str, Rename] = {"midlayer": lambda n: n, "layers": layers, "midlayer.N": numbered}
PREFIXES: dict[str, Rename] = {
    "": lambda n: n,
    "model.": model,
    "model.model.": lambda n: everything(model(n)),
    "everything": everything,
}


def names_of(shape: DrafterConfig) -> list[str]:
    return [*checkpoint.expected_shapes(shape), *(f"layers.{i}.hidden_norm.weight" for i in range(1, 3))]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(tiny.SHAPES)),
    st.booleans(),
    st.sampled_from(sorted(STYLES)),
    st.sampled_from(sorted(PREFIXES)),
    st.booleans(),
)
def test_any_spelling_is_undone(shape: str, qk_norm: bool, style: str, prefix: str, aux: bool) -> None:
    config = tiny.drafter("llama").config.model_copy(update={**tiny.SHAPES[shape], "qk_norm": qk_norm})
    names = names_of(config)
    spell = [PREFIXES[prefix](STYLES[style](aux_norms(n) if aux else n)) for n in names]
    found = layouts.read(spell, "here")
    assert found.names == dict(zip(names, spell, strict=True))
    assert found.name == ("model." if prefix == "everything" else prefix) + style
    facts = found.facts()
    assert facts["fc_norm"] == config.facts()["fc_norm"]
    assert facts["qk_norm"] is qk_norm
    assert facts["attention_bias"] is config.attention_bias
    assert facts["embedding"] == config.facts()["embedding"]
    assert (facts["attention"], facts["head"]) == ("gqa", "own")


FILES = ("model.safetensors", "pytorch_model.bin", "drafter.pt", "shards.safetensors", "shards.bin")


def respelled(folder: Path, spell: Rename, kind: str) -> None:
    """The same tensors under other names, in other files."""
    tensors = {spell(n): t for n, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save = save_file if kind.endswith("safetensors") else torch.save
    if not kind.startswith("shards"):
        save(tensors, folder / kind)
        return
    whole = "model.safetensors" if kind.endswith("safetensors") else "pytorch_model.bin"
    where = {name: f"{whole}-{i % 3}{Path(kind).suffix}" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("style", "prefix", "shape"),
    [
        ("midlayer", "", "everything"),
        ("layers", "", "everything"),
        ("midlayer.N", "", "everything"),
        ("layers", "model.", "eagle31"),
        ("midlayer", "model.model.", "both_norms"),
        ("layers", "everything", "own_embedding"),
    ],
)
def test_the_drafter_is_the_same_from_any_spelling_and_file(
    tmp_path: Path, style: str, prefix: str, shape: str, kind: str
) -> None:
    drafter = tiny.drafter("llama", **tiny.SHAPES[shape], qk_norm=True)
    folder = saved(tmp_path / "d", drafter)
    respelled(folder, lambda n: PREFIXES[prefix](STYLES[style](aux_norms(n))), kind)
    read = checkpoint.read(folder)
    assert read.shape == drafter.config
    found = checkpoint.inspect(read, tiny.target("llama"))
    assert {f.cause for f in found} <= {"weights-changed", "engine-cannot-express"}
    back = checkpoint.load(read, tiny.target("llama"))
    ours, theirs = drafter.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert not [n for n in ours if not torch.equal(ours[n], theirs[n])]
    assert torch.equal(back.vocab.ids, drafter.vocab.ids)


@pytest.mark.parametrize(
    ("one", "other", "ours"),
    [
        ("midlayer.hidden_norm.weight", "model.layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("aux_norm_low.weight", "fc_norm.0.weight", "fc_norm.0.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight", "embed_tokens.weight"),
        ("d2t", "draft_id_to_target_id", "d2t"),
        ("lm_head.weight", "model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_two_names_of_one_tensor_are_refused(one: str, other: str, ours: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"two names of one tensor, {ours}")) as caught:
        layouts.read(["fc.weight", one, other], "here")
    assert one in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("verifier_lm_head.weight", "verifier_lm_head.weight"),  # speculators: the target's, no part of the drafter
        ("verifier_norm.weight", "verifier_norm.weight"),
        ("embed_tokens.weight_scale", "embed_tokens.weight_scale"),
        ("draft_model.d2t", "d2t"),
        ("model.draft_id_to_target_id", "d2t"),
        ("any.thing.t2d", "t2d"),
        ("model.norm.weight", "norm.weight"),
        ("eh_proj.weight", "eh_proj.weight"),
        ("mask_hidden", "mask_hidden"),
        ("layers.10.mlp.up_proj.weight", "layers.10.mlp.up_proj.weight"),
        ("layers.00.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("blayers.0.x", "blayers.0.x"),
        ("", ""),
        ("model.", ""),
    ],
)
def test_names_that_stay_and_names_that_do_not(theirs: str, ours: str) -> None:
    assert layouts.canonical(theirs) == ours


def test_a_mixed_layout_is_called_one() -> None:
    assert layouts.read(["model.midlayer.a", "layers.1.b"], "here").name == "mixed"
    assert layouts.read(["fc.weight"], "here").name == "none"
    assert layouts.read(["midlayer.a", "layers.1.b"], "here").name == "midlayer"


MLA = (
    "q_a_proj.weight",
    "q_a_layernorm.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
    "o_proj.weight",
)


@pytest.mark.parametrize("prefix", ["layers.0.", "midlayer.", "model.layers.0."])
def test_a_drafter_with_latent_attention_is_inventoried_and_not_run(tmp_path: Path, prefix: str) -> None:
    names = [f"{prefix}self_attn.{n}" for n in MLA] + ["fc.weight", "norm.weight", "lm_head.weight"]
    save_file({n: torch.zeros(2, 2) for n in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 4}', encoding="utf-8")
    found = layouts.read(inventory.read(tmp_path).tensors, "here")
    assert found.names == {n.replace(prefix, "midlayer."): n for n in names}
    assert found.facts() == {
        "fc_norm": "none",
        "layers": 1,
        "attention": "mla",
        "attention_bias": False,
        "qk_norm": False,
        "embedding": "target",
        "head": "own",
    }
    with pytest.raises(CheckpointError, match=r"latent attention \(MLA.*its forward is not built yet") as caught:
        checkpoint.read(tmp_path)
    assert "eyas show" in caught.value.way_out


def test_layers_are_counted_up_to_the_first_gap() -> None:
    assert layouts.read(["layers.0.a", "layers.1.a", "layers.3.a"], "here").facts()["layers"] == 2
