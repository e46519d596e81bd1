"""Taps of some records, from one run of the target over them, kept in memory.

Letters: B batch, T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eyas import batches, taps
from eyas.errors import UsageError
from eyas.records import Record
from eyas.states.stock import Tap
from eyas.target import Target


def bytes_needed(target: Target, records: Sequence[Record], taps: Sequence[int], dtype: torch.dtype) -> int:
    """What a ``LiveStock`` of these holds."""
    return sum(record.seq_len for record in records) * len(taps) * target.hidden_size * dtype.itemsize


class LiveStock:
    """A stock whose states the target itself has just said. All are held in the machine's memory, in ``dtype``.

    In fp32 they are ``taps.run``'s rows to the last bit; in bf16 half the size, each number rounded by itself.
    """

    def __init__(
        self,
        target: Target,
        records: Sequence[Record],
        taps: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 8,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """``taps`` in any order; without them all, 0 to n. ``progress`` hears the records done so far.

        Raises UsageError for a tap that the target does not have.
        """
        wanted = range(target.num_layers + 1) if taps is None else sorted(set(taps))
        self._taps: tuple[int, ...] = tuple(wanted)
        self._last = target.num_layers if target.num_layers in self._taps else None
        self._records = tuple(records)
        self._kept = _run(target, self._records, self._taps, dtype, batch_size, progress)

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self._taps

    @property
    def last(self) -> Tap | None:
        return self._last

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        """As ``Stock.states``: in the order asked for, a tap as often as it is named."""
        held = self._kept[index]
        return torch.cat([held[place_of(tap, self._taps)] for tap in taps], dim=-1).float()


def place_of(tap: Tap, held: Sequence[Tap]) -> int:
    """Where ``tap`` stands among those held. Raises UsageError where it does not."""
    try:
        return held.index(tap)
    except ValueError as error:
        raise UsageError(
            f"Tap {tap} is not among the states at hand.", way_out=f"These are: {', '.join(map(str, held))}."
        ) from error


def _run(
    target: Target,
    records: Sequence[Record],
    wanted: Sequence[int],
    dtype: torch.dtype,
    batch_size: int,
    progress: Callable[[int], None],
) -> list[Tensor]:
    """[C, T, D] of each record."""
    kept: dict[int, Tensor] = {}
    for batch in batches.in_order(records, batch_size):
        said = taps.run(target, batch.input_ids, batch.lengths, wanted).taps
        for row, (index, length) in enumerate(zip(batch.index, batch.lengths.tolist(), strict=True)):
            rows = said[row, :length].view(length, len(wanted), -1).transpose(0, 1)
            kept[index] = torch.empty(rows.shape, dtype=dtype).copy_(rows)
        progress(len(kept))
    return [kept[i] for i in range(len(records))]
