"""Stored states by their path, whoever stored them, as a stock. T positions, D target width, C taps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from eyas.records import Record
from eyas.states.foreign import ForeignStock, as_stock, open_states
from eyas.states.manifest import HELD_OUT, MANIFEST, TRAIN
from eyas.states.own import stock_of
from eyas.states.stock import Stock, Tap, place_of
from eyas.states.store import StoredStates
from eyas.target import Target

HELD = 1.5 * 2**30  # bytes of states kept in memory


def given(path: Path, target: Target, records: Sequence[Record] | None) -> tuple[Stock, str, tuple[str, ...]]:
    """The stock, its format, and what there is to say about it. Without ``records``, those that lie with the states.

    Raises InputError and TargetError, as the readers do.
    """
    if path.is_dir() and list(path.glob(f"part-*/{MANIFEST}")):
        store = StoredStates(path)
        store.require(target, ())
        chosen = list(records) if records is not None else store.records(HELD_OUT) or store.records(TRAIN)
        return stock_of(store, chosen), "eyas", ()
    foreign = open_states(path, target.hidden_size)
    stock, notes = as_stock(foreign, records, target.embedding, target.hidden_size)
    return stock, foreign.format, (*foreign.notes, *notes)


class Held:
    """A ``Stock`` that reads a record's states once while they are worked on: foreign files may have to be unpacked."""

    def __init__(self, inner: Stock) -> None:
        self._inner = inner
        self.records: Sequence[Record] = inner.records
        self.taps: tuple[Tap, ...] = inner.taps
        self.last: Tap | None = inner.last
        rows = max((record.seq_len for record in inner.records), default=1)
        width = inner.states(0, inner.taps[:1]).shape[-1] if inner.records else 1
        self._read = lru_cache(maxsize=max(1, int(HELD / (4 * rows * width * len(inner.taps)))))(self._all)

    def _all(self, index: int) -> tuple[Tensor, ...]:
        whole = self._inner.states(index, self.taps)
        return torch.split(whole, whole.shape[-1] // len(self.taps), -1)

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        held = self._read(index)
        return torch.cat([held[place_of(t, self.taps)] for t in taps], -1)

    def truth(self, index: int) -> Tensor | None:
        return self._inner.truth(index)


__all__ = ["ForeignStock", "Held", "given"]
