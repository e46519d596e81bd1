"""Where a drafter is right: its hits by depth, source, frequency of the token and position inside the answer.

All but "depth" look at a slot's first drafted token, teacher-forced; "depth" at every depth, over the chains whose
earlier depths all hit. Slices of one kind share no slot. Intervals are over records, as everywhere.

Letters: R records, S slots, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eyas.curve import SlotTable
from eyas.records import Record
from eyas.results import Rate

By = Literal["depth", "source", "frequency", "position", "coverage"]
RARE = (1, 3, 10, 100)  # a token's times among the truths of these records; the last class is open
ANSWER = (8, 32, 128)  # tokens into the answer
SOURCES = 12  # most told apart; the smaller ones are one


@dataclass(frozen=True, eq=False)
class Slice:
    """``where`` [R] of [S] booleans: the slots that belong; ``depth`` of the drafted token looked at."""

    by: By
    name: str
    where: Sequence[np.ndarray]
    depth: int = 0

    def counts(self, tables: Sequence[SlotTable]) -> tuple[np.ndarray, np.ndarray]:
        """Hits [R] and slots [R] of a drafter whose slots these are."""
        hits, n = [], []
        for table, where in zip(tables, self.where, strict=True):
            counted = where & table.scored[:, self.depth] & table.hits[:, : self.depth].all(1)
            hits.append(int((counted & table.hits[:, self.depth]).sum()))
            n.append(int(counted.sum()))
        return np.array(hits, np.int64), np.array(n, np.int64)

    def rate(self, tables: Sequence[SlotTable]) -> Rate:
        return Rate.over_records(*self.counts(tables))


def slices(tables: Sequence[SlotTable], records: Sequence[Record]) -> list[Slice]:
    """All slices of these records that hold a slot."""
    assert len(tables) == len(records), "a table a record"
    if not any(len(t.position) for t in tables):
        return []
    everywhere = [np.ones(len(t.position), bool) for t in tables]
    found = [Slice("depth", str(k), everywhere, k) for k in range(tables[0].hits.shape[1])]
    found += _sources(tables, records)
    found += _classes("frequency", _times(tables), RARE, "seen {} times", 0)
    into = [_into_answer(t, r) for t, r in zip(tables, records, strict=True)]
    found += _classes("position", into, ANSWER, "token {}", -1)
    return [s for s in found if sum(int((w & t.scored[:, 0]).sum()) for w, t in zip(s.where, tables, strict=True))]


def to_json(tables: Sequence[SlotTable], records: Sequence[Record]) -> list[dict[str, Any]]:
    """The slices of one drafter as a check's result has them, its coverage ceiling last."""
    told = [{"by": s.by, "name": s.name, "rate": s.rate(tables).to_json()} for s in slices(tables, records)]
    if not told:
        return []
    inside = [int((t.covered & t.scored[:, 0]).sum()) for t in tables]
    slots = [int(t.scored[:, 0].sum()) for t in tables]
    ceiling = Rate.over_records(np.array(inside, np.int64), np.array(slots, np.int64))
    return [*told, {"by": "coverage", "name": "ceiling", "rate": ceiling.to_json()}]


def _sources(tables: Sequence[SlotTable], records: Sequence[Record]) -> list[Slice]:
    """By what stands before the last "/" of a record's source; the smallest together where there are many."""
    names = [r.source.rpartition("/")[0] or r.source for r in records]
    slots: dict[str, int] = {}
    for name, table in zip(names, tables, strict=True):
        slots[name] = slots.get(name, 0) + len(table.position)
    largest = sorted(slots, key=lambda name: (-slots[name], name))
    kept = largest if len(largest) <= SOURCES else largest[: SOURCES - 1]
    groups = [n if n in kept else "other" for n in names]
    return [
        Slice("source", group, [np.full(len(t.position), g == group) for t, g in zip(tables, groups, strict=True)])
        for group in dict.fromkeys([*kept, *groups])
    ]


def _times(tables: Sequence[SlotTable]) -> list[np.ndarray]:
    """How often each slot's true token is a truth of these records."""
    seen = np.bincount(np.concatenate([t.truth[t.scored[:, 0]] for t in tables]))
    return [np.where(t.scored[:, 0], seen[np.minimum(t.truth, len(seen) - 1)], 0) for t in tables]


def _into_answer(table: SlotTable, record: Record) -> np.ndarray:
    """How many tokens of its answer stand before the one a slot's chain predicts first."""
    predicted = table.position + 2
    firsts = np.array([first for first, _ in record.spans()], np.int64)
    if not len(firsts):
        return np.zeros(len(predicted), np.int64)
    return predicted - firsts[np.maximum(np.searchsorted(firsts, predicted, side="right") - 1, 0)]


def _classes(by: By, values: Sequence[np.ndarray], ends: Sequence[int], name: str, below: int) -> list[Slice]:
    """Slices of ``values`` [R] of [S], all over ``below``; each class ends with its number in ``ends``."""
    made = []
    for low, high in zip((below, *ends), (*ends, None), strict=True):
        told = f"over {low}" if high is None else f"{low + 1} to {high}" if low + 1 < high else str(high)
        made.append(
            Slice(by, name.format(told), [(v > low) & (v <= (np.inf if high is None else high)) for v in values])
        )
    return made
