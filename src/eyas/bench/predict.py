"""Whether speculation can pay, from an accept length and step times alone: nothing is trained, nothing decoded.

A round of K drafted tokens costs v(K+1) + K d plain steps and gives AL(K) tokens, a plain step gives one:

    expected     AL(K) / (v(K+1) + K d)
    break-even   AL(K) = v(K+1) + K d
    perfect      (K+1) / (v(K+1) + K d)       a drafter of this cost that is always right

These are bounds: what a loop spends outside its passes comes on top. Letters: K drafted tokens a round, v(R) a target
pass over R rows and d one draft depth, both in plain steps, v(1) = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal

import numpy as np

from eyas.bench.summary import Cost
from eyas.errors import InputError, UsageError
from eyas.results import EXPECT_DRAFT_TOKENS, SCHEMA, eyas_version

MAX_DRAFT_TOKENS = 64
Conclusion = Literal["cannot", "can", "loses", "may", "pays"]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a target pass by its rows (1 among them) and of one draft depth."""

    verify: Mapping[int, float]
    draft: float

    def __post_init__(self) -> None:
        if 1 not in self.verify:
            raise UsageError(
                "The time of a pass over one row, a plain step, is missing.", way_out="Give it: --verify-ms 1=45,5=60."
            )
        if min(self.verify) < 1 or not all(_positive(v) for v in self.verify.values()):
            raise UsageError(
                f"Step times {dict(self.verify)} are not all above zero.", way_out="Write them as ROWS=MILLISECONDS."
            )
        if not (math.isfinite(self.draft) and self.draft >= 0):
            raise UsageError(f"A draft depth of {self.draft} seconds is no time.", way_out="Give 0 or more.")

    @property
    def plain(self) -> float:
        return self.verify[1]

    @property
    def most(self) -> int:
        """The largest K whose verify pass was timed."""
        return max(self.verify) - 1

    def cost(self, draft_tokens: int) -> Cost:
        """Between timed rows on a straight line; nothing is said beyond the last."""
        assert 1 <= draft_tokens <= self.most
        rows = sorted(self.verify)
        seconds = float(np.interp(draft_tokens + 1, rows, [self.verify[r] for r in rows]))
        return Cost(seconds / self.plain, self.draft / self.plain)

    def to_json(self) -> dict[str, Any]:
        verify = [{"rows": rows, "seconds": self.verify[rows]} for rows in sorted(self.verify)]
        return {"verify": verify, "draft_depth_seconds": self.draft}


@dataclass(frozen=True)
class Length:
    """An accept length, with its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """What K drafted tokens a round would give."""

    draft_tokens: int
    cost: Cost
    timed: bool
    """Was this pass timed, or does it lie between two that were?"""
    length: Length | None

    @property
    def break_even(self) -> float:
        """The accept length at which nothing is won or lost; above K + 1 no drafter reaches it."""
        return self.cost.round(self.draft_tokens)

    @property
    def break_even_rate(self) -> float | None:
        """How often each depth must be right, given that all before it were, to break even; None where always is not
        enough."""
        return rate_for(self.break_even, self.draft_tokens)

    @property
    def perfect(self) -> float:
        return self.cost.bound(self.draft_tokens + 1, self.draft_tokens)

    @property
    def ratio(self) -> Length | None:
        if self.length is None:
            return None
        told = (self.length.value, self.length.low, self.length.high)
        value, low, high = (None if v is None else self.cost.bound(v, self.draft_tokens) for v in told)
        assert value is not None
        return Length(value, low, high)

    def to_json(self) -> dict[str, Any]:
        return {
            "draft_tokens": self.draft_tokens,
            "verify": self.cost.verify,
            "draft": self.cost.draft,
            "timed": self.timed,
            "accept_length": _json(self.length),
            "ratio": _json(self.ratio),
            "break_even": self.break_even,
            "break_even_rate": self.break_even_rate,
            "perfect": self.perfect,
        }


@dataclass(frozen=True)
class Prediction:
    """Rows for every K that can be said anything about; ``origin`` says where the accept lengths are from."""

    times: StepTimes
    rows: tuple[Row, ...]
    origin: str | None

    @property
    def best(self) -> Row | None:
        """The K of the largest expected ratio, where an accept length is known."""
        return max((row for row in self.rows if row.ratio), key=_value, default=None)

    @property
    def ceiling(self) -> Row:
        """The K at which a perfect drafter gains most."""
        return max(self.rows, key=lambda row: row.perfect)

    @property
    def easiest(self) -> Row:
        """The K that asks least of a drafter: the lowest break-even rate."""
        return min(self.rows, key=lambda row: (row.break_even_rate is None, row.break_even_rate or 0, row.break_even))

    @property
    def conclusion(self) -> Conclusion:
        best = self.best
        if self.ceiling.perfect <= 1:
            return "cannot"
        if best is None or best.ratio is None:
            return "can"
        if best.ratio.value <= 1:
            return "loses"
        return "pays" if best.ratio.low is None or best.ratio.low > 1 else "may"

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "conclusion": self.conclusion,
            "can_pay": self.ceiling.perfect > 1,
            "best": best.to_json() if best is not None else None,
            "ceiling": {"draft_tokens": self.ceiling.draft_tokens, "ratio": self.ceiling.perfect},
            "easiest": self.easiest.to_json(),
            "by_draft_tokens": [row.to_json() for row in self.rows],
            "accept_length_from": self.origin,
            "step_times": self.times.to_json(),
        }


def predict(
    times: StepTimes,
    draft_tokens: Iterable[int],
    lengths: Mapping[int, Length] | None = None,
    origin: str | None = None,
) -> Prediction:
    """For each K of ``draft_tokens`` whose verify pass was timed or lies between two that were."""
    known = [k for k in sorted(set(draft_tokens)) if 1 <= k <= times.most]
    if not known:
        raise UsageError(
            f"Passes were timed up to {times.most + 1} rows: nothing can be said of any drafted token asked for.",
            way_out="Give the time of a pass over K + 1 rows: --verify-ms 1=45,5=60.",
        )
    rows = tuple(Row(k, times.cost(k), k + 1 in times.verify, (lengths or {}).get(k)) for k in known)
    return Prediction(times, rows, origin)


# -- accept lengths -------------------------------------------------------------------------------------------


def from_rates(rates: Sequence[float]) -> dict[int, Length]:
    """AL(K) = 1 + c0 + c0 c1 + … of conditional rates, for each K up to their number."""
    if not rates or not all(0 <= rate <= 1 for rate in rates) or len(rates) > MAX_DRAFT_TOKENS:
        raise UsageError(
            f"{list(rates)[:9]} are not rates from 0 to 1, one a depth.", way_out="Write them as --accept 0.6,0.4,0.3."
        )
    joint = accumulate(rates, mul)
    return {k: Length(1 + kept) for k, kept in enumerate(accumulate(joint), 1)}


def assumed(accept_length: float, at: int = EXPECT_DRAFT_TOKENS) -> dict[int, Length]:
    """Accept lengths of a drafter that is right equally often at each depth and reaches ``accept_length`` at ``at``."""
    rate = rate_for(accept_length, at) if accept_length >= 1 else None
    if rate is None:
        raise UsageError(
            f"An accept length of {accept_length} at {at} drafted tokens is not between 1 and {at + 1}.",
            way_out=f"It counts the target's own token: 1 is no draft kept, {at + 1} every one.",
        )
    return from_rates([rate] * MAX_DRAFT_TOKENS)


def from_check(told: Mapping[str, Any], name: str) -> tuple[dict[int, Length], str]:
    """Accept lengths of a check's JSON and what they are: the walk's, or what a teacher-forced curve comes to."""
    try:
        if told.get("accept_length"):
            return {_k(p["draft_tokens"]): _length(p) for p in told["accept_length"]}, "walk"
        for curve in ("walk", "teacher_forced"):
            depths = ((told.get("curves") or {}).get(curve) or {}).get("depths")
            if depths:
                return from_rates([float(d["conditional"]["rate"]) for d in depths]), curve
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{name} is not the JSON of a check ({type(error).__name__}: {error}).",
            way_out="Write one with eyas check … --json FILE.",
        ) from error
    raise InputError(f"{name} holds no curve.", way_out="Write one with eyas check … --json FILE.")


def rate_for(accept_length: float, draft_tokens: int) -> float | None:
    """The rate p with 1 + p + … + p^K = ``accept_length``, 0 at 1 or less; None above K + 1."""
    if accept_length > draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # the sum grows with p: halving finds it to the last bit that matters
        middle = (low + high) / 2
        reached = sum(middle**k for k in range(draft_tokens + 1))
        low, high = (middle, high) if reached < accept_length else (low, middle)
    return high


def _length(told: Mapping[str, Any]) -> Length:
    value, low, high = (None if told[key] is None else float(told[key]) for key in ("value", "low", "high"))
    if value is None or not 1 <= value <= int(told["draft_tokens"]) + 1:
        raise ValueError(f"an accept length of {value} at {told['draft_tokens']} drafted tokens")
    if not all(v is None or math.isfinite(v) for v in (low, high)):
        raise ValueError("an interval that is none")
    return Length(value, low, high)


def _k(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DRAFT_TOKENS:
        raise ValueError(f"{value!r} drafted tokens")
    return value


def _positive(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _value(row: Row) -> float:
    assert row.ratio is not None
    return row.ratio.value


def _json(length: Length | None) -> dict[str, Any] | None:
    return None if length is None else {"value": length.value, "low": length.low, "high": length.high}
