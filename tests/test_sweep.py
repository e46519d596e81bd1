"""Faults planted in a sound drafter, and what a check says of them: the cause first, confident, and nothing of sound
ones. The drafter is the tiny one of the case (see test_case), on its true taps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import checkpoint, curve, records, variants
from eyas import target as targets
from eyas.check import check
from eyas.records import Record
from eyas.results import CheckResult, graver_first
from eyas.states.live import LiveStock
from eyas.target import Target

torch.set_num_threads(1)
CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"
IDS = "eagle_aux_hidden_state_layer_ids"
LIMITS = variants.Limits(screen=500, confirm=2500)
Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


@cache
def target() -> Target:
    return targets.load(str(CASE / "target"))


@cache
def held_out() -> tuple[Record, ...]:
    return tuple(records.read(CASE / "heldout.jsonl", vocab_size=target().vocab_size))


def edited(folder: Path, edit: Edit) -> Path:
    """The drafter with its true taps named, then edited."""
    shutil.copytree(CASE / "drafter", folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config.pop("eagle_config", None)
    config[IDS] = [0, 3, 7]
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def checked(folder: Path, **options: Any) -> CheckResult:
    return check(folder, target(), held_out(), sweeping="always", limits=LIMITS, **options)


def first(result: CheckResult) -> str | None:
    grave = [f for f in graver_first(result.findings) if f.severity != "note"]
    return grave[0].cause if grave else None


def nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    pass


def gains(by: float) -> Edit:
    return lambda config, tensors: tensors.update(
        {n: t + by for n, t in tensors.items() if t.ndim == 1 and "norm" in n}
    )


def blocks(*order: int) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        parts = tensors["fc.weight"].chunk(3, -1)
        tensors["fc.weight"] = torch.cat([parts[i] for i in order], -1)

    return edit


def ids(*taps: int) -> Edit:
    return lambda config, tensors: config.update({IDS: list(taps)})


def pairs(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for p in "qk":
        name, E = f"midlayer.self_attn.{p}_proj.weight", config["head_dim"]
        rows = tensors[name].reshape(-1, 2, E // 2, tensors[name].shape[-1])
        tensors[name] = rows.transpose(1, 2).reshape(tensors[name].shape)


def direct(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def direct_without_mask(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    direct(config, tensors)
    tensors.pop("t2d", None)


def zero_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def noise(name: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors[name] = torch.randn(tensors[name].shape, generator=generator).to(tensors[name].dtype) * 0.02

    return edit


FAULTS: dict[str, tuple[Edit, str]] = {
    "other taps": (ids(3, 7, 10), "taps-differ"),
    "one deeper": (ids(1, 4, 8), "taps-off-by-one"),
    "one tap beside": (ids(0, 4, 7), "taps-differ"),
    "blocks swapped": (blocks(1, 0, 2), "taps-swapped"),
    "blocks reversed": (blocks(2, 1, 0), "taps-reversed"),
    "gains up": (gains(1.0), "norm-gain-plus-one"),
    "gains down": (gains(-1.0), "norm-gain-minus-one"),
    "pairs": (pairs, "rope-interleaved"),
    "ids for offsets": (direct, "d2t-read-as-ids"),
    "ids for offsets, no mask": (direct_without_mask, "d2t-read-as-ids"),
    "map zeroed": (zero_map, "d2t-missing"),
    "embedding noise": (noise("embed_tokens.weight"), "embedding-random"),
    "normed feedback": (lambda config, tensors: config.update(norm_output=True), "feedback-post-norm"),
    "other residual": (
        lambda config, tensors: config.update(norm_before_residual=True),
        "norm-before-residual-ignored",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_named(tmp_path: Path, fault: str) -> None:
    edit, cause = FAULTS[fault]
    result = checked(edited(tmp_path / "d", edit))
    assert result.verdict == "miswired"
    assert first(result) == cause, [(f.cause, f.severity, f.summary) for f in result.findings]
    assert result.confident


def test_two_faults_are_named_together(tmp_path: Path) -> None:
    def both(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        ids(3, 7, 10)(config, tensors)
        gains(1.0)(config, tensors)

    result = checked(edited(tmp_path / "d", both))
    assert {"taps-differ", "norm-gain-plus-one"} <= {f.cause for f in result.findings if f.severity != "note"}


def test_nothing_is_wrong_with_a_sound_one(tmp_path: Path) -> None:
    result = checked(edited(tmp_path / "d", nothing))
    assert result.verdict == "healthy"
    assert first(result) is None
    assert result.to_json()["found"]["changes"] == []


def test_a_dead_drafter_is_not_called_weak(tmp_path: Path) -> None:
    """Nothing wakes it, so its wiring was not proven: that it is dead may be anybody's fault."""

    def lost(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in ("fc.weight", "midlayer.self_attn.v_proj.weight", "midlayer.mlp.up_proj.weight"):
            noise(name)(config, tensors)

    result = checked(edited(tmp_path / "d", lost))
    assert result.verdict == "undecided"
    assert first(result) is None
    assert any("all but dead" in n.why for n in result.not_checked if n.needed)


def test_the_curve_of_a_sound_one_is_that_of_the_plain_loader(tmp_path: Path) -> None:
    folder = edited(tmp_path / "d", nothing)
    plain = curve.measure(checkpoint.load(checkpoint.read(folder), target()), target(), held_out(), depths=5)
    result = checked(folder)
    assert result.teacher_forced is not None
    assert plain.walk is not None
    assert result.walk is not None
    for ours, theirs in ((result.teacher_forced, plain.teacher_forced), (result.walk, plain.walk)):
        assert ours.joint.tolist() == theirs.joint.tolist()
        assert ours.n.tolist() == theirs.n.tolist()
        assert ours.covered.tolist() == theirs.covered.tolist()


def test_states_at_hand_say_the_same_as_a_running_target(tmp_path: Path) -> None:
    folder = edited(tmp_path / "d", ids(3, 7, 10))
    stock = LiveStock(target(), held_out())
    stock.fill()
    live, stored = checked(folder), checked(folder, states=stock)
    assert first(live) == first(stored) == "taps-differ"
    assert live.to_json()["found"]["changes"] == stored.to_json()["found"]["changes"]
    assert live.accept_length[3].value == stored.accept_length[3].value
