"""Two drafters of one target on the same text: which is better, by how much, where.

Both are checked as by themselves; compared is what each is as it fits best. Vocabularies, taps and shapes may differ:
the slots, and what is true of them, are those of target and records.

Letters: R records, S slots, K depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from eyas import check as checks
from eyas import errors, slices, variants
from eyas.check.case import Case
from eyas.curve import SlotTable
from eyas.records import Record
from eyas.results import (
    EXPECT_DRAFT_TOKENS,
    SCHEMA,
    CheckResult,
    Difference,
    LengthCounts,
    Rate,
    exit_code,
    eyas_version,
    paired_difference,
)
from eyas.target import Target

ERROR = 0.05  # chance of one slice or more that differs by chance alone
POWER = 0.8  # a difference of the smallest size told is seen in this share of such comparisons
FEW = 10  # records in a slice below which its spread is not known well enough to claim anything


@dataclass(frozen=True, eq=False)
class Side:
    """One drafter on the compared records: its walk at 4 drafted tokens and its slots."""

    length: LengthCounts
    tables: Sequence[SlotTable]


@dataclass(frozen=True)
class Where:
    """First minus second in one slice, and by how many standard errors; ``proven`` counts all slices looked at."""

    by: str
    name: str
    first: Rate
    second: Rate
    difference: Difference
    z: float | None
    proven: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "name": self.name,
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "difference": self.difference.to_json(),
            "z": None if self.z is None else round(self.z, 2),
            "proven": self.proven,
        }


@dataclass(frozen=True)
class Paired:
    """``difference`` is the first's accept length minus the second's, on the same records."""

    records: int
    slots: int
    first: float | None
    second: float | None
    difference: Difference
    slices: Sequence[Where]

    @property
    def better(self) -> str | None:
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or low <= 0 <= high:
            return None
        return "first" if low > 0 else "second"

    @property
    def smallest_seen(self) -> float | None:
        """The difference that as many records would have shown in ``POWER`` of the cases."""
        low, high = self.difference.low, self.difference.high
        if low is None or high is None:
            return None
        z = NormalDist().inv_cdf
        return (high - low) / 2 * (1 + z(POWER) / z(0.975))

    def to_json(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "slots": self.slots,
            "draft_tokens": EXPECT_DRAFT_TOKENS,
            "first": self.first,
            "second": self.second,
            "difference": self.difference.to_json(),
            "better": self.better,
            "smallest_seen": self.smallest_seen,
            "power": POWER,
            "slices": [s.to_json() for s in self.slices],
        }


@dataclass(frozen=True)
class PairResult:
    first: CheckResult
    second: CheckResult
    pair: Paired | None
    why_not: str | None = None

    @property
    def exit_code(self) -> int:
        codes = [exit_code(side.verdict) for side in (self.first, self.second)]
        if errors.EXIT_FAULT in codes:
            return errors.EXIT_FAULT
        decided = self.pair is not None and self.pair.difference.low is not None
        return errors.EXIT_OK if decided and not any(codes) else errors.EXIT_UNDECIDED

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "pair": self.pair.to_json() if self.pair else None,
            "why_not": self.why_not,
        }


def check_pair(
    folders: tuple[Path, Path],
    target: Target,
    records: Sequence[Record],
    *,
    names: tuple[str, str],
    draft_tokens: int | None = None,
    limits: variants.Limits = variants.Limits(),  # noqa: B008 - frozen
    **options: Any,
) -> PairResult:
    """Check both (``options`` as ``check`` takes them), then pair what both were measured on."""
    depths = max(draft_tokens or checks.DEPTHS, EXPECT_DRAFT_TOKENS)
    cases = Case(names[0]), Case(names[1])
    results = [
        checks.check(folder, target, records, case=case, draft_tokens=depths, limits=limits, **options)
        for folder, case in zip(folders, cases, strict=True)
    ]
    measured = []
    for case in cases:
        if case.measured is None or not case.measured.lengths:
            return PairResult(results[0], results[1], None, f"{case.name} has no walk to compare; see its own findings")
        # A drafter that fits another reading than configured was measured again, on the records held for the sweep.
        whole = len(case.measured.tables) == len(records)
        on = records if whole else checks.held(records, target, limits)
        measured.append((case.measured, {r.id: i for i, r in enumerate(on)}))
    common = [r for r in records if all(r.id in at for _, at in measured)]
    sides = []
    for m, at in measured:
        rows, length = [at[r.id] for r in common], m.lengths[EXPECT_DRAFT_TOKENS - 1]
        counts = LengthCounts(length.draft_tokens, length.rounds[rows], length.accepted[rows])
        sides.append(Side(counts, [m.tables[i] for i in rows]))
    return PairResult(results[0], results[1], pair(sides[0], sides[1], common))


def pair(first: Side, second: Side, records: Sequence[Record]) -> Paired:
    """Compare two drafters on the same records, slot by slot."""
    for a, b in zip(first.tables, second.tables, strict=True):
        assert np.array_equal(a.position, b.position), "paired drafters have the same slots"
        assert np.array_equal(a.truth, b.truth), "paired drafters have the same target"
    looked_at = slices.slices(first.tables, records)
    bar = NormalDist().inv_cdf(1 - ERROR / 2 / max(len(looked_at), 1))
    return Paired(
        records=len(records),
        slots=sum(int(t.scored[:, 0].sum()) for t in first.tables),
        first=first.length.value,
        second=second.length.value,
        difference=paired_difference(first.length, second.length),
        slices=[_where(s, first.tables, second.tables, bar) for s in looked_at],
    )


def _where(at: slices.Slice, first: Sequence[SlotTable], second: Sequence[SlotTable], bar: float) -> Where:
    """Hits of depths 0..depth, all of them, over the slots both are asked at: the same slots for both."""
    (a, n), (b, _) = joint(at, first), joint(at, second)
    as_lengths = [LengthCounts(1, n, hits) for hits in (a, b)]
    z = z_of(a - b, n)
    proven = z is not None and abs(z) > bar and int(np.count_nonzero(n)) >= FEW
    rates = Rate.over_records(a, n), Rate.over_records(b, n)
    return Where(at.by, at.name, *rates, paired_difference(as_lengths[0], as_lengths[1]), z, proven)


def joint(at: slices.Slice, tables: Sequence[SlotTable]) -> tuple[np.ndarray, np.ndarray]:
    """Chains of a slice whose tokens all hit through its depth, and all its chains, [R] each."""
    asked = [where & t.scored[:, at.depth] for t, where in zip(tables, at.where, strict=True)]
    hits = [int((s & t.hits[:, : at.depth + 1].all(1)).sum()) for t, s in zip(tables, asked, strict=True)]
    return np.array(hits, np.int64), np.array([int(s.sum()) for s in asked], np.int64)


def z_of(difference: np.ndarray, n: np.ndarray) -> float | None:
    """Standard errors, over records, that sum(difference) / sum(n) lies from zero; None without spread."""
    carrying = n > 0
    difference, n = difference[carrying], n[carrying]
    if len(n) < 2:
        return None
    rest = difference - difference.sum() / n.sum() * n
    spread = math.sqrt(float((rest**2).sum()) * len(n) / (len(n) - 1))
    return float(difference.sum()) / spread if spread > 0 else None
