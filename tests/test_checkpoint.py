"""A drafter on disk: what is saved is what comes back, and nothing that is missing or changed passes in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from eyas import checkpoint, objective
from eyas.checkpoint import NotFinite, weights
from eyas.contract import Contract, declared
from eyas.drafter import Drafter
from eyas.errors import CheckpointError, EnvironmentFault
from eyas.results import Finding
from eyas.target import Target

torch.set_num_threads(1)

TAPS = (1, 2, 4)
NAMES = [
    "d2t",
    "fc.weight",
    "lm_head.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "t2d",
]


def contract_for(drafter: Drafter, target: Target) -> Contract:
    return declared(
        taps=list(drafter.config.taps),
        **drafter.config.facts(),
        rope=drafter.config.rope_parameters,
        draft_vocab_size=drafter.config.draft_vocab_size,
        vocab_sha256=checkpoint.vocab_sha256(drafter.vocab),
        target=target.identity(),
    )


def saved(folder: Path, drafter: Drafter | None = None, *, dtype: torch.dtype = torch.float32) -> Path:
    drafter = drafter or tiny.drafter("llama")
    target = tiny.target("llama")
    checkpoint.save(drafter, folder, contract_for(drafter, target), {}, dtype=dtype)
    return folder


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def found(folder: Path, target: Target | None = None) -> dict[str, Finding]:
    findings = checkpoint.inspect(checkpoint.read(folder), target or tiny.target("llama"))
    assert len({f.cause for f in findings}) == len(findings)
    return {f.cause: f for f in findings}


def load(folder: Path, target: Target | None = None) -> Drafter:
    return checkpoint.load(checkpoint.read(folder), target or tiny.target("llama"))


def speaks(drafter: Drafter) -> Tensor:
    """Everything a drafter says to fixed inputs, three depths of it [3, 6, W]."""
    generator = torch.Generator().manual_seed(3)
    width = len(drafter.config.taps) * drafter.config.target_hidden_size
    taps = torch.randn(1, 6, width, generator=generator)
    ids = torch.randint(0, tiny.VOCAB, (1, 6), generator=generator)
    with torch.no_grad():
        return drafter.logits(torch.cat(objective.dense_unroll(drafter, taps, ids, 3)))


# -- round trip -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_fp32_comes_back_exactly(tmp_path: Path, shape: str) -> None:
    drafter = tiny.drafter("llama", **tiny.SHAPES[shape])
    folder = saved(tmp_path / "d", drafter)
    assert set(found(folder)) <= {"engine-cannot-express"}
    back = load(folder)
    stored = {n: tuple(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    expected = checkpoint.expected_shapes(drafter.config)
    assert {n: size for n, size in stored.items() if n in expected} == expected
    assert back.config == drafter.config
    assert torch.equal(back.vocab.ids, drafter.vocab.ids)
    assert torch.equal(back.draft_to_target, drafter.vocab.ids)
    assert torch.equal(back.embedding, drafter.embedding)
    ours, theirs = dict(drafter.named_parameters()), dict(back.named_parameters())
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name
        assert theirs[name].dtype == torch.float32
    assert torch.equal(speaks(back), speaks(drafter))
    assert not back.training


def test_bf16_comes_back_rounded(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    folder = saved(tmp_path / "d", drafter, dtype=torch.bfloat16)
    back = dict(load(folder).named_parameters())
    for name, value in drafter.named_parameters():
        assert torch.equal(back[name], value.bfloat16().float()), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(folder / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].dtype == torch.bool


def test_the_tap_scale_is_folded_into_fc(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    drafter.tap_scale.copy_(torch.rand(drafter.tap_scale.shape, generator=torch.Generator().manual_seed(1)) * 4 + 0.1)
    before, fc = speaks(drafter), drafter.fc.weight.clone()
    back = load(saved(tmp_path / "d", drafter))
    assert torch.equal(drafter.fc.weight, fc), "saving must leave the drafter in training alone"
    assert torch.equal(back.tap_scale, torch.ones_like(back.tap_scale))
    assert not torch.allclose(back.fc.weight, fc, atol=0.1)
    assert torch.allclose(speaks(back), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(back.fc.weight, fc * drafter.tap_scale)


def test_names_and_shapes_on_disk(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    stored = load_file(folder / "model.safetensors")
    assert sorted(stored) == NAMES
    shape = checkpoint.read(folder).shape
    assert {n: tuple(t.shape) for n, t in stored.items()} == checkpoint.expected_shapes(shape)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"], "nothing half-written beside it"


def test_the_map_on_disk_is_offsets(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    stored = load_file(saved(tmp_path / "d", drafter) / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(tiny.DRAFT_VOCAB), drafter.vocab.ids)
    assert stored["t2d"].nonzero().flatten().tolist() == drafter.vocab.ids.tolist()


def test_extra_files_go_with_it_and_an_older_checkpoint_is_swapped_out(tmp_path: Path) -> None:
    folder, target = saved(tmp_path / "d"), tiny.target("llama")
    (folder / "stale.json").write_text("{}")
    other = tiny.drafter("llama", seed=1)
    checkpoint.save(other, folder, contract_for(other, target), {"curves.json": {"ä": [1]}}, dtype=torch.float32)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "curves.json", "model.safetensors"]
    assert json.loads((folder / "curves.json").read_text(encoding="utf-8")) == {"ä": [1]}
    assert torch.equal(load(folder).fc.weight, other.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_failed_save_leaves_the_older_one(tmp_path: Path) -> None:
    folder, drafter = saved(tmp_path / "d"), tiny.drafter("llama", seed=1)
    contract = contract_for(drafter, tiny.target("llama"))
    with pytest.raises(TypeError):
        checkpoint.save(drafter, folder, contract, {"curves.json": {"x": object()}})
    assert torch.equal(load(folder).fc.weight, tiny.drafter("llama").fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_full_disk_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_keywords: object) -> None:
        raise weights.SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    folder = saved(tmp_path / "d")
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(EnvironmentFault, match="The disk is full") as caught:
        saved(folder, tiny.drafter("llama", seed=1))
    assert caught.value.exit_code == 4
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert torch.equal(load(folder).fc.weight, tiny.drafter("llama").fc.weight)


def test_contract_and_hash_come_back(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    read = checkpoint.read(saved(tmp_path / "d", drafter))
    assert read.contract == contract_for(drafter, tiny.target("llama"))
    assert read.shape == drafter.config
    assert read.weights_sha256 == weights.provenance.sha256_file(tmp_path / "d" / "model.safetensors")


# -- other spellings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}",
        lambda n: "model." + n.replace("midlayer.", "layers.0."),
    ],
    ids=["layers.0", "model", "both"],
)
def test_other_names_are_understood(tmp_path: Path, rename: Callable[[str], str]) -> None:
    drafter = tiny.drafter("llama")
    folder = saved(tmp_path / "d", drafter)

    def renamed(tensors: dict[str, Tensor]) -> None:
        old = dict(tensors)
        tensors.clear()
        tensors.update({rename(n): t for n, t in old.items()})

    edit_weights(folder, renamed)
    assert set(found(folder)) == {"weights-changed"}
    assert torch.equal(speaks(load(folder)), speaks(drafter))


def test_an_embedding_of_its_own_is_used(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    own = torch.randn(tiny.VOCAB, 48, generator=torch.Generator().manual_seed(0))
    edit_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    edit_config(folder, lambda config: fact(config, "embedding", "own"))
    assert set(found(folder)) == {"weights-changed", "engine-cannot-express"}
    back = load(folder)
    assert back.config.own_embedding
    assert torch.equal(back.embedding, own)
    assert not torch.allclose(speaks(back), speaks(tiny.drafter("llama")), atol=0.1)


def test_no_map_and_a_full_vocabulary(tmp_path: Path) -> None:
    target, words = tiny.target("llama"), tiny.vocab(size=tiny.VOCAB)
    assert words.ids.tolist() == list(range(tiny.VOCAB))
    partial = tiny.drafter("llama")
    shape = partial.config.model_copy(update={"draft_vocab_size": tiny.VOCAB})
    drafter = Drafter(shape, words, target.embedding).requires_grad_(False)
    folder = saved(tmp_path / "d", drafter)
    assert not {"d2t", "t2d"} & set(load_file(folder / "model.safetensors"))
    assert found(folder) == {}
    assert torch.equal(load(folder).vocab.ids, words.ids)
    edit_weights(folder, lambda tensors: tensors.update(d2t=words.d2t, t2d=words.t2d))
    assert set(found(folder)) == {"weights-changed"}
    assert torch.equal(load(folder).vocab.ids, words.ids)


# -- faults of the weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n != "t2d"])
def test_a_missing_tensor_is_fatal(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors.pop(name))
    norm = "norm" in name
    alone = {"d2t": "d2t-missing", "lm_head.weight": "head-missing"}
    finding = found(folder)[alone.get(name, "norm-weight-missing" if norm else "weights-missing")]
    assert finding.severity == "fatal"
    assert finding.evidence[0].value == [name]
    with pytest.raises(CheckpointError, match=re.escape(f"d lacks {name}")) as caught:
        load(folder)
    assert caught.value.way_out


def test_t2d_may_be_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors.pop("t2d"))
    assert set(found(folder)) == {"weights-changed"}
    assert torch.equal(speaks(load(folder)), speaks(tiny.drafter("llama")))


def test_an_unexpected_tensor_is_noted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    more = {f"layers.1.{i}.weight": torch.zeros(2) for i in range(8)}
    edit_weights(folder, lambda tensors: tensors.update(more))
    finding = found(folder)["weights-unexpected"]
    assert finding.severity == "note"
    assert finding.evidence[0].value == sorted(more)
    assert finding.summary.endswith("layers.1.5.weight and 2 more")
    assert torch.equal(speaks(load(folder)), speaks(tiny.drafter("llama")))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_fatal(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    finding = found(folder)["weights-shape"]
    assert finding.severity == "fatal"
    expected = list(checkpoint.expected_shapes(checkpoint.read(folder).shape)[name])
    assert finding.evidence[0].expected == expected
    assert finding.evidence[0].value == [expected[0] - 1, *expected[1:]]
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is [")):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight"])
def test_what_is_not_finite_is_refused(tmp_path: Path, name: str, value: float) -> None:
    folder = saved(tmp_path / "d", dtype=torch.bfloat16)
    edit_weights(folder, lambda tensors: tensors[name].view(-1)[3].fill_(value))
    with pytest.raises(NotFinite, match=f"in {re.escape(name)} of d"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    folder = saved(tmp_path / "d")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read(folder)


def test_a_file_that_is_damaged_after_it_was_read_is_refused(tmp_path: Path) -> None:
    read = checkpoint.read(saved(tmp_path / "d"))
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(read, tiny.target("llama"))


def test_the_map_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors.update({"t2d": tiny.vocab(seed=5).t2d}))
    with pytest.raises(CheckpointError, match="vocabulary map of this drafter contradicts itself"):
        load(folder)
    ids = tiny.drafter("llama").vocab.ids
    edit_weights(folder, lambda tensors: tensors.update({"d2t": ids}))
    with pytest.raises(CheckpointError, match="vocabulary map of this drafter contradicts itself") as caught:
        load(folder)
    assert "d2t holds offsets, not ids" in caught.value.way_out


def test_an_own_embedding_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(tiny.VOCAB, 32)}))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load(folder)


def test_an_embedding_in_bf16_comes_as_fp32_and_stays_when_saved_again(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama", own_embedding=True)
    back = load(saved(tmp_path / "d", drafter, dtype=torch.bfloat16))
    assert back.embedding.dtype == torch.float32
    assert torch.equal(back.embedding, drafter.embedding.bfloat16().float())
    again = load(saved(tmp_path / "e", back))
    assert torch.equal(again.embedding, back.embedding)
    assert torch.equal(speaks(again), speaks(back))


def test_an_embedding_that_the_contract_promises_must_be_there(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", tiny.drafter("llama", own_embedding=True))
    edit_weights(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert found(folder)["weights-missing"].evidence[0].value == ["embed_tokens.weight"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fc_norm.1.weight", "norm-weight-missing"),
        ("input_norm.weight", "norm-weight-missing"),
        ("layers.2.mlp.up_proj.weight", "weights-missing"),
        ("lm_head.weight", "head-missing"),
        ("d2t", "d2t-missing"),
    ],
)
def test_a_missing_tensor_of_a_richer_shape_is_fatal(tmp_path: Path, name: str, cause: str) -> None:
    folder = saved(tmp_path / "d", tiny.drafter("llama", **tiny.SHAPES["everything"]))
    edit_weights(folder, lambda tensors: tensors.pop(name))
    assert found(folder)[cause].evidence[0].value == [name]


# -- the norm of a later layer, which two engines call by two names -------------------------------------------

VLLM, SGLANG = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"


def test_a_later_layers_norm_is_written_under_both_names(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama", num_hidden_layers=2)
    stored = load_file(saved(tmp_path / "d", drafter) / "model.safetensors")
    assert torch.equal(stored[VLLM], drafter.layer(1).input_layernorm.weight)
    assert torch.equal(stored[SGLANG], stored[VLLM])


@pytest.mark.parametrize("name", [VLLM, SGLANG])
def test_either_name_is_enough_and_the_other_engine_is_warned_of(tmp_path: Path, name: str) -> None:
    drafter = tiny.drafter("llama", num_hidden_layers=2)
    folder = saved(tmp_path / "d", drafter)
    edit_weights(folder, lambda tensors: tensors.pop(name))
    finding = found(folder)["norm-weight-missing"]
    assert finding.severity == "note"
    assert finding.summary.startswith(f"{name} is not in the file")
    assert torch.equal(speaks(load(folder)), speaks(drafter))


def test_two_norms_that_differ_under_the_two_names_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", tiny.drafter("llama", num_hidden_layers=2))
    edit_weights(folder, lambda tensors: tensors[SGLANG].add_(0.5))
    with pytest.raises(CheckpointError, match=r"differ\. vLLM norms this layer with the second"):
        load(folder)


# -- faults of the config -------------------------------------------------------------------------------------


def test_edited_taps_of_vllm(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3]))
    finding = found(folder)["contract-edited"]
    assert finding.severity == "likely"
    assert {e.measure: e.value for e in finding.evidence} == {"taps captured by vLLM": [0, 1, 3]}
    assert all(e.expected == list(TAPS) for e in finding.evidence)
    assert finding.fix == (
        'For taps [1, 2, 4]: "eagle_aux_hidden_state_layer_ids": [1, 2, 4] at top level (vLLM) '
        'and inside "eagle_config": [0, 1, 3] (SGLang).'
    )
    assert load(folder).config.taps == TAPS, "the contract's taps are those loaded"


def test_edited_taps_of_sglang(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    edit_config(folder, lambda config: config.update(eagle_config=ids))
    finding = found(folder)["contract-edited"]
    # Of five layers SGLang never reaches tap 5.
    assert [(e.measure, e.value) for e in finding.evidence] == [("taps captured by SGLang", [2, 3])]


def test_a_folder_spelled_for_one_engine_was_not_edited(tmp_path: Path) -> None:
    """For vLLM alone, for SGLang alone, for a build of SGLang that counts otherwise, for vLLM's V1 runner alone."""
    vllm_key, inner = "eagle_aux_hidden_state_layer_ids", "eagle_config"
    for number, (top, nested) in enumerate([([1, 2, 4], None), (None, [0, 1, 3]), (None, [1, 2, 4])]):
        folder = saved(tmp_path / str(number))
        edit_config(folder, lambda config: [config.pop(key, None) for key in (vllm_key, inner)])
        if top:
            edit_config(folder, lambda config, ids=top: config.update({vllm_key: ids}))
        if nested:
            edit_config(folder, lambda config, ids=nested: config.update({inner: {vllm_key: ids}}))
        assert not {"contract-edited", "taps-key-missing"} & set(found(folder))


def test_a_folder_that_names_no_taps_is_said_to(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    keys = ("eagle_aux_hidden_state_layer_ids", "eagle_config")
    edit_config(folder, lambda config: [config.pop(key) for key in keys])
    finding = found(folder)["taps-key-missing"]
    assert finding.severity == "likely"
    assert (finding.evidence[0].value, finding.evidence[0].expected) == ([2], list(TAPS))  # distinct ones of [2, 2, 2]


def test_one_rope_in_another_spelling_is_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, lambda config: config["rope_parameters"].update(type="default"))
    assert "contract-edited" not in found(folder)


def test_a_map_in_another_order_with_its_head_is_the_same_drafter(tmp_path: Path) -> None:
    """Engines take any one-to-one map; only two draft ids for one token are a fault."""
    drafter = tiny.drafter("llama")
    folder = saved(tmp_path / "d", drafter)

    def turned(tensors: dict[str, Tensor]) -> None:
        n = len(tensors["d2t"])
        ids = (tensors["d2t"] + torch.arange(n)).flip(0)
        tensors["d2t"] = ids - torch.arange(n)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)

    edit_weights(folder, turned)
    assert torch.equal(speaks(load(folder)), speaks(drafter))
    edit_weights(folder, lambda tensors: tensors["d2t"][1:2].add_(tensors["d2t"][0] - tensors["d2t"][1] - 1))
    with pytest.raises(CheckpointError, match="two draft ids may mean one token"):
        load(folder)


def test_an_edited_rope_is_a_finding(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, lambda config: config["rope_parameters"].update(rope_theta=5e5))
    finding = found(folder)["contract-edited"]
    assert finding.severity == "likely"
    assert finding.evidence[0].measure == "rope"
    assert finding.evidence[0].value["rope_theta"] == 5e5
    assert finding.evidence[0].expected["rope_theta"] == 1e4


@pytest.mark.parametrize("switch", ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"])
@pytest.mark.parametrize("trained", [True, False])
def test_an_edited_switch_is_a_finding_and_the_contract_is_loaded(tmp_path: Path, switch: str, trained: bool) -> None:
    drafter = tiny.drafter("llama", **{switch: trained})
    folder = saved(tmp_path / "d", drafter)
    edit_config(folder, lambda config: config.update({switch: not trained}))
    finding = found(folder)["contract-edited"]
    assert finding.severity == "likely"
    assert [(e.measure, e.value, e.expected) for e in finding.evidence] == [(switch, not trained, trained)]
    assert torch.equal(speaks(load(folder)), speaks(drafter))


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_output"])
def test_without_a_contract_the_keys_are_loaded(tmp_path: Path, switch: str) -> None:
    drafter = tiny.drafter("llama", **{switch: True})
    folder = saved(tmp_path / "d", drafter)
    edit_config(folder, lambda config: config.pop("eyas"))
    assert torch.equal(speaks(load(folder)), speaks(drafter))
    edit_config(folder, lambda config: config.pop(switch))
    assert not torch.allclose(speaks(load(folder)), speaks(drafter), atol=0.1)


def test_what_sglang_cannot_express_is_noted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d", tiny.drafter("llama", norm_before_residual=True, own_embedding=True))
    finding = found(folder)["engine-cannot-express"]
    assert finding.severity == "note"
    assert len(finding.evidence[0].value) == 2
    assert "norm_before_residual is not read" in finding.summary
    assert "the target's embedding in the place of the drafter's own" in finding.summary


def test_taps_that_sglang_cannot_capture_are_no_edit(tmp_path: Path) -> None:
    """Tap n lies behind the last layer, where a Llama target of SGLang never looks."""
    folder = saved(tmp_path / "d", tiny.drafter("llama", taps=(1, 2, 5)))
    assert set(found(folder)) == {"engine-cannot-express"}


def test_changed_weights_are_noted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_weights(folder, lambda tensors: tensors["fc.weight"].add_(1e-3))
    assert {c: f.severity for c, f in found(folder).items()} == {"weights-changed": "note"}
    load(folder)


@cache
def llama(hidden: int = 48, vocab: int = tiny.VOCAB, layers: int = 5) -> Target:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    return Target(f"llama-{hidden}-{vocab}-{layers}", None, LlamaForCausalLM(config).eval(), None, config)


def test_another_hidden_size_is_fatal(tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "d"), llama(hidden=32)
    finding = found(folder, other)["hidden-size-mismatch"]
    assert (finding.severity, finding.evidence[0].value, finding.evidence[0].expected) == ("fatal", 32, 48)
    with pytest.raises(CheckpointError, match="reads states 48 wide; llama-32-211-5 has 32"):
        load(folder, other)


def test_another_vocabulary_is_fatal(tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "d"), llama(vocab=200)
    finding = found(folder, other)["target-vocab-mismatch"]
    assert (finding.severity, finding.evidence[0].value, finding.evidence[0].expected) == ("fatal", 200, 211)
    with pytest.raises(CheckpointError, match="counts 211 target tokens; llama-48-200-5 has 200"):
        load(folder, other)


def test_too_few_layers_are_fatal(tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "d"), llama(layers=3)
    assert found(folder, other)["taps-too-few"].severity == "fatal"
    with pytest.raises(CheckpointError, match="Tap 4 lies beyond the 3 layers"):
        load(folder, other)


def test_other_weights_of_the_target_are_noted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    assert {c: f.severity for c, f in found(folder, llama()).items()} == {"target-differs": "note"}
    load(folder, llama())


def test_no_contract_is_noted_and_taps_are_read_from_the_keys(tmp_path: Path) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, lambda config: config.pop("eyas"))
    assert {c: f.severity for c, f in found(folder).items()} == {"contract-missing": "note"}
    assert load(folder).config.taps == TAPS
    edit_config(folder, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    assert checkpoint.read(folder).shape.taps == (0, 1, 3)  # as vLLM's V1 runner reads them
    edit_config(folder, lambda config: config.pop("eagle_config"))
    assert len(checkpoint.read(folder).shape.taps) == 3  # of what fc takes


def without_contract(folder: Path, ids: list[int] | None) -> Path:
    """What most published drafters are: no contract, and often no ids either."""

    def change(config: dict[str, Any]) -> None:
        for key in ("eyas", "eagle_config", "eagle_aux_hidden_state_layer_ids"):
            del config[key]
        if ids is not None:
            config["eagle_aux_hidden_state_layer_ids"] = ids

    edit_config(folder, change)
    return folder


def test_without_ids_the_taps_are_those_every_engine_defaults_to(tmp_path: Path) -> None:
    folder = without_contract(saved(tmp_path / "d"), None)
    assert load(folder, llama(layers=8)).config.taps == (2, 4, 5)


def test_ids_are_sorted_as_vllm_sorts_them(tmp_path: Path) -> None:
    folder = without_contract(saved(tmp_path / "d"), [4, 1, 2])
    assert load(folder).config.taps == (1, 2, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("hidden_size"), "config.json lacks hidden_size"),
        (lambda c: c.update(vocab_size=None), "config.json lacks vocab_size"),
        (lambda c: c.update(rms_norm_eps=0), "does not describe a drafter: rms_norm_eps"),
        (lambda c: c.update(num_attention_heads=3), "num_attention_heads must be a multiple"),
        (lambda c: c.update(draft_vocab_size=500), "draft_vocab_size is larger than vocab_size"),
        (lambda c: c.update(intermediate_size="many"), "does not describe a drafter: intermediate_size"),
        (lambda c: c["eyas"].pop("contract"), "the contract is a NoneType"),
        (lambda c: c["eyas"]["contract"].update(taps=3), "fact 'taps' of the contract is 3"),
        (lambda c: c.update(eyas="yes"), "the 'eyas' key holds a str"),
        (lambda c: fact(c, "residual", "sideways"), "Fact 'residual' of the contract is 'sideways'"),
        (lambda c: c.update(num_hidden_layers=10**9), "does not describe a drafter: num_hidden_layers"),
        (lambda c: c.update(norm_output="perhaps"), "does not describe a drafter: norm_output"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act of config.json is 'gelu'; 'silu'"),
        (lambda c: c.update(mlp_bias=True), "mlp_bias of config.json is True; False"),
    ],
)
def test_a_malformed_config_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        checkpoint.read(folder)
    assert caught.value.way_out


def fact(config: dict[str, Any], name: str, value: object) -> None:
    config["eyas"]["contract"][name]["value"] = value


def inferred_heads(config: dict[str, Any], heads: object) -> None:
    del config["head_dim"]
    config["num_attention_heads"] = heads


@pytest.mark.parametrize(
    "change",
    [
        lambda c: fact(c, "taps", None),
        lambda c: fact(c, "taps", ["one", 2, 4]),
        lambda c: fact(c, "taps", []),
        lambda c: fact(c, "target", "smollm2"),
        lambda c: fact(c, "target", {"fingerprint": "f"}),
        lambda c: (c.pop("eyas"), c.update(eagle_aux_hidden_state_layer_ids=5)),
        lambda c: c.update(eagle_config="yes"),
        lambda c: (c.pop("rope_parameters"), c.update(rope_scaling="linear")),
        lambda c: inferred_heads(c, 0),
        lambda c: inferred_heads(c, "four"),
    ],
    ids=[
        "taps-null",
        "taps-words",
        "taps-none",
        "target-text",
        "target-bare",
        "ids-number",
        "eagle_config-text",
        "rope_scaling-text",
        "heads-zero",
        "heads-text",
    ],
)
def test_a_malformed_value_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    folder = saved(tmp_path / "d")
    edit_config(folder, change)
    with pytest.raises(CheckpointError):
        found(folder)


def test_a_width_the_targets_embedding_does_not_have_is_refused(tmp_path: Path) -> None:
    """Without embed_tokens of its own a drafter reads the target's, which must be as wide as it is."""
    target = tiny.target("llama")
    shape = tiny.drafter("llama").config.model_copy(update={"hidden_size": 32})
    narrow = Drafter(shape, tiny.vocab(), torch.zeros(tiny.VOCAB, 32))
    folder = saved(tmp_path / "d", narrow)
    edit_config(folder, lambda config: config.update(target_hidden_size=target.hidden_size))
    with pytest.raises(CheckpointError):
        load(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        checkpoint.read(tmp_path)
