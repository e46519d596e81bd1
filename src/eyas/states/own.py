"""Our own store as a stock. T positions, D target width, C taps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eyas.errors import InputError
from eyas.records import Record
from eyas.states.stock import Tap, place_of
from eyas.states.store import StoredStates


class OwnStock:
    """A store, opened, as the stock of some of its records. Rows are read when asked for."""

    def __init__(self, store: StoredStates, records: Sequence[Record]) -> None:
        self.store = store
        self.records: Sequence[Record] = tuple(records)
        self._stored: tuple[int, ...] = tuple(store.facts.stored)
        self.taps: tuple[Tap, ...] = self._stored
        self.last: Tap | None = store.facts.last

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        """As ``Stock.states``: [T, C*D], fp32, in the order asked for."""
        asked = [self._stored[place_of(tap, self._stored)] for tap in taps]
        return self.store.states_of(self.records[index], asked)

    def truth(self, index: int) -> None:
        return None


def stock_of(store: StoredStates, records: Sequence[Record]) -> OwnStock:
    """Raises InputError for records that the store does not hold."""
    if unknown := [record.id for record in records if record not in store]:
        raise InputError(
            f"{len(unknown)} of {len(records)} records are not in {store.folder}: {', '.join(unknown[:5])}"
            f"{' …' if len(unknown) > 5 else ''}.",
            way_out="Name the records that were captured, or leave --records out to take the store's own.",
        )
    return OwnStock(store, records)
