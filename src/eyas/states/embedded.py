"""Tap 0 for states that were stored without it: the target's own embedding of a record's tokens.

It is always at hand, for the target's ends are; and without it no reading that was trained on the embedding could be
tried, and another would seem to fit best. T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.records import Record
from eyas.states.stock import Stock, Tap
from eyas.target import Target


def embedding_rows(target: Target, ids: Tensor) -> Tensor:
    """What the embedding makes of ids [T]: [T, D], scaled where the target scales (Gemma)."""
    rows: Tensor = target.model.get_input_embeddings()(ids.to(target.device))  # type: ignore[operator]
    return rows.float().cpu()


class WithEmbedding:
    """A ``Stock`` with tap 0 before what ``inner`` has."""

    def __init__(self, inner: Stock, target: Target) -> None:
        assert 0 not in inner.taps
        self._inner, self._target = inner, target
        self.records: Sequence[Record] = inner.records
        self.taps: tuple[Tap, ...] = (0, *inner.taps)
        self.last: Tap | None = inner.last

    @torch.no_grad()
    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        stored = tuple(dict.fromkeys(t for t in taps if t != 0))
        held = torch.split(self._inner.states(index, stored), self._target.hidden_size, -1) if stored else ()
        by_tap = dict(zip(stored, held, strict=True))
        if 0 in taps:
            by_tap[0] = embedding_rows(self._target, torch.from_numpy(self.records[index].input_ids.astype(np.int64)))
        return torch.cat([by_tap[t] for t in taps], -1)

    def truth(self, index: int) -> Tensor | None:
        return self._inner.truth(index)


def with_embedding(stock: Stock, target: Target) -> Stock:
    """The same states, and tap 0 where it is not among them."""
    return stock if 0 in stock.taps else WithEmbedding(stock, target)
