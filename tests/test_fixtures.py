"""The test drafters: on taps that are not the default ones, so that a wiring that falls back to those is seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from eyas import checkpoint, curve, records, resolve, taps
from eyas import target as targets
from eyas.target import Target

DRAFTERS = Path(__file__).parent / "fixtures" / "drafters"
MOST_BYTES = 12_000_000
DEFAULT = (2, 15, 27)


@pytest.mark.parametrize("folder", sorted(p.parent for p in DRAFTERS.glob("*/model.safetensors")), ids=lambda p: p.name)
def test_every_one_is_small_and_off_the_default_taps(folder: Path) -> None:
    read = checkpoint.read(folder)
    assert (folder / "model.safetensors").stat().st_size < MOST_BYTES
    assert read.shape.draft_vocab_size == 4096
    assert read.contract is not None
    assert tuple(read.contract["taps"]) == read.shape.taps
    assert 0 in read.shape.taps
    assert read.shape.taps != DEFAULT


@pytest.mark.real
def test_default_taps_cost_it_nearly_everything() -> None:
    """Healthy wiring on the held-out records that ship; the same weights on the taps engines fall back to."""
    target = targets.load("smollm2")
    read = checkpoint.read(DRAFTERS / "smollm2-taps-0-2-15")
    assert not [f for f in checkpoint.inspect(read, target) if f.severity != "note"]
    drafter = checkpoint.load(read, target)
    held = records.read(resolve.drafter("smollm2-eagle3") / "heldout.jsonl.gz", vocab_size=target.vocab_size, limit=4)

    def by_default(of: Target, input_ids: Tensor, lengths: Tensor, _taps: Sequence[int]) -> taps.States:
        return taps.run(of, input_ids, lengths, DEFAULT)

    right = curve.measure(drafter, target, held, depths=4).teacher_forced.joint_rate(0)
    wrong = curve.measure(drafter, target, held, depths=4, run=by_default).teacher_forced.joint_rate(0)
    assert right.n == wrong.n > 400
    assert right.hits > 0.2 * right.n
    assert wrong.hits < 0.5 * right.hits
