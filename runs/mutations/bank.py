"""What the target says of a record: taps, what follows the final norm, and its own next tokens; computed once.

Letters: T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eyas import taps
from eyas.records import Record
from eyas.states.stock import Tap
from eyas.target import Target


class Bank:
    """Every tap of records, by record; those of ``kept`` ones stay when the bank is told to ``forget``."""

    def __init__(self, target: Target, kept: Iterable[Record]) -> None:
        self.target = target
        self._kept = {record.id for record in kept}
        self._taps: dict[str, Tensor] = {}  # [n + 1, T, D]
        self._truth: dict[str, Tensor] = {}

    def states(self, record: Record, asked: Sequence[int]) -> Tensor:
        """Taps of a record, concatenated as asked: [T, C*D], fp32."""
        if record.id not in self._taps:
            self._taps[record.id] = self._run(record)
        return torch.cat([self._taps[record.id][tap] for tap in asked], dim=-1)

    @torch.no_grad()
    def normed(self, record: Record) -> Tensor:
        """What the head reads, [T, D]."""
        found: Tensor = self.target.norm(self.states(record, [self.target.num_layers]))
        return found

    def truth(self, record: Record) -> Tensor:
        """The target's greedy token after every position, [T]."""
        if record.id not in self._truth:
            self._truth[record.id] = taps.greedy(self.target, self.normed(record))
        return self._truth[record.id]

    def forget(self, everything: bool = False) -> None:
        kept = set() if everything else self._kept
        for held in (self._taps, self._truth):
            for id in held.keys() - kept:
                del held[id]

    def _run(self, record: Record) -> Tensor:
        ids = torch.from_numpy(record.input_ids.astype("int64"))[None]
        layers = range(self.target.num_layers + 1)
        states = taps.run(self.target, ids, torch.tensor([record.seq_len]), layers).taps[0].float()
        return states.view(record.seq_len, len(layers), -1).transpose(0, 1).contiguous()


class BankStock:
    """Records whose states are in a bank, as a check reads them (``states.stock.Stock``): the target need not run."""

    def __init__(self, bank: Bank, records: Sequence[Record]) -> None:
        self._bank = bank
        self.records: Sequence[Record] = records
        self.taps: tuple[Tap, ...] = tuple(range(bank.target.num_layers + 1))
        self.last: Tap | None = bank.target.num_layers

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        return self._bank.states(self.records[index], [int(tap) for tap in taps])

    def truth(self, index: int) -> Tensor:
        return self._bank.truth(self.records[index])
