"""Counts a record, and the rates, lengths and intervals that follow from them.

Counts are stored, means and intervals are derived. Intervals are seeded bootstraps over records, because the
slots of one conversation are correlated; only ``wilson`` serves logs, where records are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import norm, t

DRAWS = 2000
Z_95 = 1.959963984540054

Ints = npt.NDArray[np.int64]
Interval = tuple[float | None, float | None]


@lru_cache(maxsize=2)
def _draw_weights(records: int, draws: int, seed: int) -> npt.NDArray[np.int16]:
    """[draws, records]: how often each record is drawn. Kept, for every rate of a curve uses the same."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(records, np.full(records, 1 / records), size=draws).astype(np.int16)


def _resampled_ratios(numerators: Ints, denominators: Ints, draws: int, seed: int) -> npt.NDArray[np.float64]:
    """[draws] ratios of sums; NaN where a draw has no denominator."""
    columns = np.stack([numerators, denominators], axis=1).astype(np.float64)
    weights = _draw_weights(len(numerators), draws, seed)
    # Float products go through BLAS; in blocks, so that many records do not need a float copy of all weights.
    blocks = [weights[i : i + 256].astype(np.float64) @ columns for i in range(0, draws, 256)]
    sums = np.concatenate(blocks)
    ratios = np.full(draws, np.nan)
    np.divide(sums[:, 0], sums[:, 1], out=ratios, where=sums[:, 1] > 0)
    return ratios


def _middle_95(values: npt.NDArray[np.float64], records: float) -> Interval:
    """The expanded percentile interval (Hesterberg 2015, section 5.3): resampling n records knows nothing of Student's
    t and has n - 1 in the place of n in its variance, so its plain 95 % hold less where records are few."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return None, None
    n = max(records, 2.0)
    tail = 100 * float(norm.cdf(-math.sqrt(n / (n - 1)) * t.ppf(0.975, n - 1)))
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _effective(denominators: Ints) -> float:
    """How many records of equal weight say as much as these, whose weights differ (Kish)."""
    weights = denominators.astype(np.float64)
    return float(weights.sum() ** 2 / (weights**2).sum())


def bootstrap_ratio(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """95 % interval of sum(numerators) / sum(denominators), resampling records (``_middle_95``).

    (None, None) where fewer than two records carry anything: one conversation tells nothing about the spread.
    """
    up, down = _ints(numerators, 1), _ints(denominators, 1)
    assert up.shape == down.shape, "one numerator and one denominator a record"
    if np.count_nonzero(down) < 2:
        return None, None
    return _middle_95(_resampled_ratios(up, down, draws, seed), _effective(down))


def wilson(hits: int, n: int, *, z: float = Z_95) -> Interval:
    """Wilson interval, 95 % unless ``z`` says more, for a log's counts. Too narrow, since it takes slots as
    independent: label it."""
    assert 0 <= hits <= n
    if n == 0:
        return None, None
    rate, wide = hits / n, z * z / n
    centre = (rate + wide / 2) / (1 + wide)
    half = z * math.sqrt(rate * (1 - rate) / n + wide / (4 * n)) / (1 + wide)
    return max(0.0, centre - half), min(1.0, centre + half)


def _ints(values: npt.ArrayLike, dimensions: int) -> Ints:
    array = np.asarray(values)
    assert array.ndim == dimensions, f"{array.shape}: {dimensions} dimensions expected"
    assert array.size == 0 or np.issubdtype(array.dtype, np.integer), f"{array.dtype}: counts are integers"
    return array.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Rate:
    hits: int
    n: int
    low: float | None
    high: float | None

    @property
    def rate(self) -> float | None:
        return self.hits / self.n if self.n else None

    @classmethod
    def over_records(cls, hits: Ints, n: Ints, seed: int = 0) -> Rate:
        return cls(int(hits.sum()), int(n.sum()), *bootstrap_ratio(hits, n, seed=seed))

    @classmethod
    def from_log(cls, hits: int, n: int) -> Rate:
        """Records unknown: a Wilson interval."""
        return cls(hits, n, *wilson(hits, n))

    def to_json(self) -> dict[str, Any]:
        return {"hits": self.hits, "n": self.n, "rate": self.rate, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class CurveCounts:
    """Counts of R records at K depths, from which every rate of a curve follows.

    ``n``: chains valid through depth k; ``prev``: those of them whose depths 0..k-1 all hit; ``joint``: those
    whose depths 0..k all hit. In a walk ``n`` is the record's rounds at every depth, and ``prev`` at k is
    ``joint`` at k-1.
    ``slots`` and ``covered``: truth tokens, and those of them inside the draft vocabulary.
    """

    truth: str  # "target" | "record"
    slots: Ints  # [R]
    covered: Ints  # [R]
    n: Ints  # [R, K]
    prev: Ints  # [R, K]
    joint: Ints  # [R, K]

    def __post_init__(self) -> None:
        assert self.truth in ("target", "record"), self.truth
        for name, dimensions in (("slots", 1), ("covered", 1), ("n", 2), ("prev", 2), ("joint", 2)):
            object.__setattr__(self, name, _ints(getattr(self, name), dimensions))
        assert self.n.shape == self.prev.shape == self.joint.shape, "n, prev and joint are [R, K]"
        assert self.slots.shape == self.covered.shape == self.n.shape[:1], "slots and covered are [R]"
        assert (self.covered >= 0).all(), "covered is a count"
        assert (self.covered <= self.slots).all(), "covered slots are slots"
        assert (self.joint >= 0).all(), "joint is a count"
        assert (self.joint <= self.prev).all(), "a chain that hits at depth k hit before it"
        assert (self.prev <= self.n).all(), "prev counts valid chains"
        assert (self.prev[:, :1] == self.n[:, :1]).all(), "nothing precedes depth 0"

    @property
    def depths(self) -> int:
        return int(self.n.shape[1])

    def joint_rate(self, k: int) -> Rate:
        return Rate.over_records(self.joint[:, k], self.n[:, k])

    def conditional_rate(self, k: int) -> Rate:
        return Rate.over_records(self.joint[:, k], self.prev[:, k])

    def coverage(self) -> Rate:
        return Rate.over_records(self.covered, self.slots)

    def to_json(self) -> dict[str, Any]:
        depths = [
            {
                "depth": k,
                "joint": self.joint_rate(k).to_json(),
                "conditional": self.conditional_rate(k).to_json(),
            }
            for k in range(self.depths)
        ]
        return {"truth": self.truth, "coverage": self.coverage().to_json(), "depths": depths}

    @classmethod
    def concatenate(cls, parts: Sequence[CurveCounts]) -> CurveCounts:
        """The records of all parts, in order; parts must agree in truth and depths."""
        assert parts, "nothing to concatenate"
        assert len({(part.truth, part.depths) for part in parts}) == 1, "parts differ in truth or depths"
        names = ("slots", "covered", "n", "prev", "joint")
        return cls(parts[0].truth, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """Rounds and accepted tokens a record, of a walk with ``draft_tokens`` drafted tokens a round."""

    draft_tokens: int
    rounds: Ints  # [R]
    accepted: Ints  # [R], without bonus tokens

    def __post_init__(self) -> None:
        assert self.draft_tokens >= 1
        for name in ("rounds", "accepted"):
            object.__setattr__(self, name, _ints(getattr(self, name), 1))
        assert self.rounds.shape == self.accepted.shape, "rounds and accepted are [R]"
        assert (self.accepted >= 0).all(), "accepted is a count"
        assert (self.accepted <= self.draft_tokens * self.rounds).all(), "a round keeps only what it drafted"

    @property
    def total_rounds(self) -> int:
        return int(self.rounds.sum())

    @property
    def value(self) -> float | None:
        rounds = self.total_rounds
        return 1 + int(self.accepted.sum()) / rounds if rounds else None

    def interval(self, *, seed: int = 0) -> Interval:
        low, high = bootstrap_ratio(self.accepted, self.rounds, seed=seed)
        return (None, None) if low is None or high is None else (1 + low, 1 + high)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval()
        return {
            "draft_tokens": self.draft_tokens,
            "value": self.value,
            "low": low,
            "high": high,
            "rounds": self.total_rounds,
            "method": "walk",
        }


@dataclass(frozen=True)
class Difference:
    """Accept length of one drafter minus another's on the same records."""

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high}


def paired_difference(a: LengthCounts, b: LengthCounts, seed: int = 0) -> Difference:
    """a minus b. Both are resampled with the same draws of records, so what is hard for both cancels out."""
    assert a.rounds.shape == b.rounds.shape, "paired drafters have the same records, in the same order"
    assert a.draft_tokens == b.draft_tokens, "lengths at different drafted tokens do not compare"
    if a.value is None or b.value is None:
        return Difference(None, None, None)
    if min(np.count_nonzero(a.rounds), np.count_nonzero(b.rounds)) < 2:
        return Difference(a.value - b.value, None, None)
    ratios = [_resampled_ratios(side.accepted, side.rounds, DRAWS, seed) for side in (a, b)]
    few = min(_effective(side.rounds) for side in (a, b))
    return Difference(a.value - b.value, *_middle_95(ratios[0] - ratios[1], few))


def unpaired_difference(a: LengthCounts, b: LengthCounts, seed: int = 0) -> Difference:
    """a minus b on records of their own. Each side draws by itself: with one seed, equal sizes would draw alike."""
    assert a.draft_tokens == b.draft_tokens, "lengths at different drafted tokens do not compare"
    if a.value is None or b.value is None:
        return Difference(None, None, None)
    if min(np.count_nonzero(a.rounds), np.count_nonzero(b.rounds)) < 2:
        return Difference(a.value - b.value, None, None)
    ratios = [_resampled_ratios(s.accepted, s.rounds, DRAWS, seed + i) for i, s in enumerate((a, b))]
    few = min(_effective(side.rounds) for side in (a, b))
    return Difference(a.value - b.value, *_middle_95(ratios[0] - ratios[1], few))
