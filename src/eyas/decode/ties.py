"""Token for token, up to ties: how the answer of another way of decoding is compared with the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TIE = 1e-3


class Difference(NamedTuple):
    """The first position where two answers part, and whether the oracle was undecided there."""

    position: int
    excused: bool


def first_difference(
    oracle_ids: Sequence[int], other_ids: Sequence[int], gaps: Sequence[float], tie: float = TIE
) -> Difference | None:
    """None for equal answers. ``gaps``: the oracle's two best logits' distance at each step.

    ``tie`` is 1e-3 for fp32; for bf16 or int8 twice the measured largest difference between 1-row and n-row
    logits. Where they part both answers still have the same text before them, so only the gap there excuses.
    """
    assert len(gaps) == len(oracle_ids), "one gap a token"
    for position, (mine, theirs) in enumerate(zip(oracle_ids, other_ids, strict=False)):
        if mine != theirs:
            return Difference(position, gaps[position] < tie)
    if len(oracle_ids) == len(other_ids):
        return None
    return Difference(min(len(oracle_ids), len(other_ids)), False)
