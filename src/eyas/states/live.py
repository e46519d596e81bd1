"""States straight from a running target, kept in memory. B batch, T positions, D target width, C taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from eyas import batches, taps
from eyas.records import Record
from eyas.states.stock import Tap
from eyas.taps import States
from eyas.target import Target


def bytes_needed(records: Sequence[Record], num_taps: int, width: int) -> int:
    """What a ``LiveStock`` of these holds in memory."""
    return sum(r.seq_len for r in records) * num_taps * width * 4


class LiveStock:
    """All taps 0..n of some records, a ``Stock``, captured while the target runs over these or more records anyway:
    ``run`` has the form of ``taps.run``. What no such run met is run when it is asked for."""

    def __init__(self, target: Target, records: Sequence[Record], *, batch_size: int = 8) -> None:
        self.target = target
        self.records: Sequence[Record] = list(records)
        self.taps: tuple[Tap, ...] = tuple(range(target.num_layers + 1))
        self.last: Tap | None = target.num_layers
        self._batch_size = batch_size
        self._index = {record.id: i for i, record in enumerate(self.records)}
        self._held: dict[int, Tensor] = {}  # [T, n+1, D] by record
        self._truth: dict[int, Tensor] = {}  # [T] by record

    @torch.no_grad()
    def run(self, target: Target, input_ids: Tensor, lengths: Tensor, wanted: Sequence[int]) -> States:
        """As ``taps.run`` with the truths of this stock's records, and keeps what belongs to it."""
        rows = {row: self._index.get(_record_id(input_ids[row, :n])) for row, n in enumerate(lengths.tolist())}
        if all(index is None for index in rows.values()):
            return taps.run(target, input_ids, lengths, wanted)
        whole = taps.run(target, input_ids, lengths, range(target.num_layers + 1))
        B, T = input_ids.shape
        split = whole.taps.reshape(B, T, target.num_layers + 1, -1)
        asked = torch.zeros(B, T, dtype=torch.bool, device=input_ids.device)
        for row, index in rows.items():
            if index is not None:
                self._held[index] = split[row, : int(lengths[row])].to("cpu", torch.float32, copy=True)
                asked[row, : int(lengths[row])] = taps.answered(self.records[index].loss_mask).to(asked.device)
        truth = taps.truths(target, whole, asked)
        self._truth |= {i: truth[row, : int(lengths[row])].cpu() for row, i in rows.items() if i is not None}
        return States(split[:, :, list(wanted)].flatten(2), whole.last, truth)

    def states(self, index: int, wanted: Sequence[Tap]) -> Tensor:
        if index not in self._held:
            self.fill()
        return self._held[index][:, [int(t) for t in wanted]].flatten(1)

    def truth(self, index: int) -> Tensor | None:
        if index not in self._truth:
            self.fill()
        return self._truth[index]

    def fill(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Run the target over the records not yet met."""
        left = [i for i in range(len(self.records)) if i not in self._held]
        for batch in batches.in_order([self.records[i] for i in left], self._batch_size):
            self.run(self.target, batch.input_ids, batch.lengths, ())
            progress(len(self._held))


def _record_id(ids: Tensor) -> str:
    return Record(ids.cpu().numpy().astype(np.int32), np.zeros(len(ids), bool), "").id
