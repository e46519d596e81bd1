"""Token for token, up to ties: how the answer of another way of decoding is compared with the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eyas.decode.cache import TargetCache, as_row
from eyas.target import Target

TIE = 1e-3
MEASURED_STEPS = 32


class Difference(NamedTuple):
    """The first position where two answers part, and whether the oracle was undecided there."""

    position: int
    excused: bool


@torch.inference_mode()
def measured_tie(target: Target, token_ids: Sequence[int], rows: int = 5) -> float:
    """Distance of two best logits below which a target is undecided: 1e-3 in fp32, else measured here.

    Twice the largest difference between the logits that passes of one row and passes of ``rows`` rows give for the
    same last tokens of ``token_ids``, at least 1e-3.
    """
    if target.head.weight.dtype == torch.float32:
        return TIE
    assert len(token_ids) > 1, "one token is too few to measure on"
    rows = min(rows, len(token_ids) - 1)
    steps = min(MEASURED_STEPS, len(token_ids) - 1) // rows * rows
    prompt, text = list(token_ids[:-steps]), list(token_ids[-steps:])
    singly, together = (_logits(target, prompt, text, size) for size in (1, rows))
    return max(TIE, 2 * float((singly - together).abs().max()))


def _logits(target: Target, prompt: list[int], text: list[int], rows: int) -> torch.Tensor:
    """Logits [S, V] of the tokens of ``text``, fed ``rows`` at a time after ``prompt``."""
    cache = TargetCache(target)
    cache.forward(as_row(prompt, target))
    parts = (text[i : i + rows] for i in range(0, len(text), rows))
    return torch.cat([target.logits(cache.forward(as_row(part, target))[0]).float() for part in parts])


def first_difference(
    oracle_ids: Sequence[int], other_ids: Sequence[int], gaps: Sequence[float], tie: float = TIE
) -> Difference | None:
    """None for equal answers. ``gaps``: the oracle's two best logits' distance at each step.

    ``tie`` is 1e-3 for fp32, else ``measured_tie``. Where they part both answers still have the same text before
    them, so only the gap there excuses.
    """
    assert len(gaps) == len(oracle_ids), "one gap a token"
    for position, (mine, theirs) in enumerate(zip(oracle_ids, other_ids, strict=False)):
        if mine != theirs:
            return Difference(position, gaps[position] < tie)
    if len(oracle_ids) == len(other_ids):
        return None
    return Difference(min(len(oracle_ids), len(other_ids)), False)
