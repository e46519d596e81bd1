"""A long prompt, fed part by part: what a pass keeps on the side stays small whatever the prompt's length.

Letters: S rows, T tokens held, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK = 512  # rows: what many rows gain is gained by then, and masks of [chunk, T] stay small


def in_chunks(
    rows: Callable[[Sequence[int], Sequence[int] | None], tuple[Tensor, Tensor]],
    token_ids: Sequence[int],
    parents: Sequence[int] | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """``rows`` over ``chunk`` tokens at a time -> states [S, D] and taps [S, C*D] of all.

    A tree is one pass: its rows do not follow each other.
    """
    if parents is not None or len(token_ids) <= chunk:
        return rows(token_ids, parents)
    told = [rows(token_ids[begin : begin + chunk], None) for begin in range(0, len(token_ids), chunk)]
    states, taps = zip(*told, strict=True)
    return torch.cat(states), torch.cat(taps)
