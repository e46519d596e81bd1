"""States of some records, tap by tap, wherever they come from: what a check works on.

Letters: T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from eyas.errors import UsageError
from eyas.records import Record

Tap = int | str
"""A tap, in layers done; or the name of a stored tensor whose tap nobody could tell, such as ``hidden_states[2]``."""


class Stock(Protocol):
    @property
    def records(self) -> Sequence[Record]: ...

    @property
    def taps(self) -> tuple[Tap, ...]:
        """All that can be asked for, in the order of the layers where it is known."""
        ...

    @property
    def last(self) -> Tap | None:
        """Which of them is tap n, before the final norm; None where the target's end is not here."""
        ...

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        """Taps of record ``index``, concatenated: [T, C*D], fp32."""
        ...

    def truth(self, index: int) -> Tensor | None:
        """The target's greedy token after each position of record ``index``, [T], where somebody knows it already; -1
        where nothing asks for it."""
        ...


def place_of(tap: Tap, held: Sequence[Tap]) -> int:
    """Where ``tap`` stands among those held. Raises UsageError where it does not."""
    try:
        return held.index(tap)
    except ValueError as error:
        raise UsageError(
            f"Tap {tap} is not among the states at hand.", way_out=f"These are: {', '.join(map(str, held))}."
        ) from error
