"""What the target says of a record: taps, what follows the final norm, and its own next tokens; computed once.

Letters: T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eyas import objective, taps
from eyas.records import Record
from eyas.target import Target


class Bank:
    """``wanted`` taps are kept from the first pass over a record; any other costs a pass each time it is asked for."""

    def __init__(self, target: Target, wanted: Sequence[int]) -> None:
        self.target = target
        self.wanted = frozenset(wanted) | {target.num_layers}
        self._taps: dict[str, dict[int, Tensor]] = {}
        self._truth: dict[str, Tensor] = {}

    def states(self, record: Record, asked: Sequence[int]) -> Tensor:
        """Taps of a record, concatenated as asked: [T, C*D], fp32."""
        kept = self._taps.get(record.id)
        if kept is None:
            kept = self._taps[record.id] = self._run(record, self.wanted)
        if others := set(asked) - self.wanted:
            kept = kept | self._run(record, others)
        return torch.cat([kept[tap] for tap in asked], dim=-1)

    @torch.no_grad()
    def normed(self, record: Record) -> Tensor:
        """What the head reads, [T, D]."""
        found: Tensor = self.target.norm(self.states(record, [self.target.num_layers]))
        return found

    def truth(self, record: Record) -> Tensor:
        """The target's greedy token after every position, [T]."""
        if record.id not in self._truth:
            self._truth[record.id] = objective.greedy(self.target, self.normed(record))
        return self._truth[record.id]

    def clear(self) -> None:
        self._taps.clear()
        self._truth.clear()

    def _run(self, record: Record, layers: Collection[int]) -> dict[int, Tensor]:
        ids = torch.from_numpy(record.input_ids.astype("int64"))[None]
        run = sorted(layers)
        states = taps.run(self.target, ids, torch.tensor([record.seq_len]), run).taps[0].float()
        return {tap: values.clone() for tap, values in zip(run, states.chunk(len(run), dim=-1), strict=True)}
