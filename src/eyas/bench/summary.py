"""Sides over a set of prompts: speeds, their ratio with its interval, acceptance, the bound.

Counts and seconds are stored by turn, everything else is derived. One prompt may have several turns; they are summed
before anything is resampled, because answers to one prompt are no independent evidence: intervals draw *prompts*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.bench.sides import Fault, Repeats, SideResult, Turn
from eyas.results import SCHEMA, Interval, LengthCounts, Rate, eyas_version

DRAWS = 2000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """What a side pays, in plain steps: ``verify`` a pass over K+1 rows, ``draft`` one depth."""

    verify: float
    draft: float

    def round(self, draft_tokens: int) -> float:
        """A whole round, in plain steps: what accept length must exceed for speculation to pay."""
        return self.verify + draft_tokens * self.draft

    def bound(self, accept_length: float, draft_tokens: int) -> float:
        """The speed-up when nothing else takes time: AL(K) / (v(K+1) + K d)."""
        return accept_length / self.round(draft_tokens)


@dataclass(frozen=True)
class SideSummary:
    """One side over a set of prompts; ``ratio`` is its tokens per second over the baseline's, on prompts both answered.

    ``quartiles``: tokens per second of a prompt that a quarter and three quarters of them stay below.
    """

    prompts: int
    tokens: int
    seconds: float
    median_tokens_per_second: float
    quartiles: tuple[float, float]
    ratio: float | None
    ratio_interval: Interval
    first_token_seconds: float | None
    equal: Rate
    repeats: Repeats
    lengths: LengthCounts | None
    depths: tuple[Rate, ...]
    """Joint, as a live engine counts it: rounds that kept depth k / rounds that drafted it."""
    cost: Cost | None
    seed: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound(self) -> float | None:
        return self._bounded(self.lengths.value) if self.lengths is not None else None

    @property
    def bound_interval(self) -> Interval:
        """That of the accept length; pass times are taken as they were measured."""
        if self.lengths is None:
            return None, None
        low, high = self.lengths.interval(seed=self.seed)
        return self._bounded(low), self._bounded(high)

    def _bounded(self, accept_length: float | None) -> float | None:
        if self.cost is None or self.lengths is None or accept_length is None:
            return None
        return self.cost.bound(accept_length, self.lengths.draft_tokens)

    def to_json(self) -> dict[str, Any]:
        low, high = self.ratio_interval
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "median_tokens_per_second": self.median_tokens_per_second,
            "quartiles_tokens_per_second": list(self.quartiles),
            "first_token_seconds": self.first_token_seconds,
            "ratio": {"value": self.ratio, "low": low, "high": high},
            "equal": self.equal.to_json(),
            "repeated_8grams": self.repeats.to_json(),
            "accept_length": self._accept_length(),
            "depths": [{"depth": k, "joint": rate.to_json()} for k, rate in enumerate(self.depths)],
            "bound": self.bound,
        }

    def _accept_length(self) -> dict[str, Any] | None:
        if self.lengths is None:
            return None
        low, high = self.lengths.interval(seed=self.seed)
        return self.lengths.to_json() | {"low": low, "high": high, "method": "measured"}


@dataclass(frozen=True)
class Bench:
    """All turns of a run. The first of ``sides`` is the baseline."""

    sides: tuple[str, ...]
    turns: tuple[Turn, ...]
    costs: Mapping[str, Cost]
    seed: int
    faults: tuple[Fault, ...] = field(default=())
    interrupted: bool = False

    @property
    def baseline(self) -> str:
        return self.sides[0]

    @property
    def categories(self) -> tuple[str, ...]:
        """Those the prompts have, in the order they came."""
        return tuple(dict.fromkeys(turn.category for turn in self.turns if turn.category is not None))

    def kept(self, *, without_loops: bool = False, category: str | None = None) -> list[Turn]:
        """Turns, or those where no answer loops, or those of a category."""
        return [turn for turn in self.turns if not (without_loops and turn.loops) and category in (None, turn.category)]

    def summary(self, *, without_loops: bool = False, category: str | None = None) -> dict[str, SideSummary]:
        """Every side that answered, over the turns ``kept`` names; empty when none is left."""
        turns = self.kept(without_loops=without_loops, category=category)
        return {side: self._side(side, turns) for side in self.sides if any(side in t.results for t in turns)}

    def _side(self, side: str, turns: Sequence[Turn]) -> SideSummary:
        mine = by_prompt([turn for turn in turns if side in turn.results])
        results = [turn.results[side] for several in mine for turn in several]
        shared = by_prompt([turn for turn in turns if side in turn.results and self.baseline in turn.results])
        speeds = _speeds(mine, side)
        of_each = [result.repeats for result in results]
        lengths, depths = _acceptance(mine, side, self.seed)
        waits = [result.first_seconds for result in results if result.first_seconds is not None]
        low, high = np.percentile(speeds, [25, 75])
        return SideSummary(
            prompts=len(mine),
            tokens=sum(result.tokens for result in results),
            seconds=sum(result.seconds for result in results),
            median_tokens_per_second=median(speeds.tolist()),
            quartiles=(float(low), float(high)),
            ratio=_ratio(shared, side, self.baseline),
            ratio_interval=(1.0, 1.0) if side == self.baseline else _ratio_interval(shared, side, self),
            first_token_seconds=median(waits) if waits else None,
            equal=_equal(shared, side, self),
            repeats=Repeats(sum(r.repeated for r in of_each), sum(r.total for r in of_each)),
            lengths=lengths,
            depths=depths,
            cost=self.costs.get(side),
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        def over(turns: Sequence[Turn], summary: Mapping[str, SideSummary]) -> dict[str, Any]:
            sides = {name: side.to_json() for name, side in summary.items()}
            return {"prompts": len(by_prompt(turns)), "sides": sides}

        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "baseline": self.baseline,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "costs": {name: {"verify": c.verify, "draft": c.draft} for name, c in self.costs.items()},
            "all": over(self.turns, self.summary()),
            "without_loops": over(self.kept(without_loops=True), self.summary(without_loops=True)),
            "categories": [
                {"category": name, **over(self.kept(category=name), self.summary(category=name))}
                for name in self.categories
            ],
            "faults": [fault.to_json() for fault in self.faults],
            "prompts": [turn.to_json(self.baseline) for turn in self.turns],
        }


def by_prompt(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns of the same prompt together."""
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.number, []).append(turn)
    return list(groups.values())


def totals(groups: Sequence[Sequence[Turn]], side: str) -> tuple[Floats, Floats]:
    """Tokens and seconds of each prompt [N]."""
    of_each = [[turn.results[side] for turn in turns] for turns in groups]
    tokens = [sum(result.tokens for result in results) for results in of_each]
    seconds = [sum(result.seconds for result in results) for results in of_each]
    return np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)


def resampled_speeds(groups: Sequence[Sequence[Turn]], sides: Sequence[str], seed: int) -> Floats:
    """[S, draws] tokens per second on drawn prompts; all sides get the same draws, so what is hard for all cancels."""
    n = len(groups)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    counted = [totals(groups, side) for side in sides]
    return np.stack([(weights @ tokens) / (weights @ seconds) for tokens, seconds in counted])


def interval_of(values: Floats) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _speeds(groups: Sequence[Sequence[Turn]], side: str) -> Floats:
    tokens, seconds = totals(groups, side)
    return tokens / seconds


def speed(groups: Sequence[Sequence[Turn]], side: str) -> float:
    """Tokens per second, a ratio of sums."""
    tokens, seconds = totals(groups, side)
    return float(tokens.sum() / seconds.sum())


def _ratio(groups: Sequence[Sequence[Turn]], side: str, baseline: str) -> float | None:
    return speed(groups, side) / speed(groups, baseline) if groups and speed(groups, baseline) else None


def _ratio_interval(groups: Sequence[Sequence[Turn]], side: str, bench: Bench) -> Interval:
    """95 % percentile interval of the ratio of speeds."""
    if len(groups) < 2:
        return None, None
    mine, base = resampled_speeds(groups, (side, bench.baseline), bench.seed)
    return interval_of(mine / base)


def _equal(groups: Sequence[Sequence[Turn]], side: str, bench: Bench) -> Rate:
    """Answers equal to the baseline's, of those that can be compared."""
    found = [[turn.equal(side, bench.baseline) for turn in turns] for turns in groups]
    same = np.asarray([sum(e is True for e in each) for each in found], dtype=np.int64)
    compared = np.asarray([sum(e is not None for e in each) for each in found], dtype=np.int64)
    return Rate.over_records(same, compared, bench.seed)


def _acceptance(groups: Sequence[Sequence[Turn]], side: str, seed: int) -> tuple[LengthCounts | None, tuple[Rate, ...]]:
    """Accept length and the curve by depth from counts; nothing for a side that drafts nothing, or does not say."""
    of_each: list[list[SideResult]] = [[turn.results[side] for turn in turns] for turns in groups]
    draft_tokens = max(len(result.drafted) for results in of_each for result in results)
    if draft_tokens == 0:
        return None, ()
    drafted, accepted = np.zeros((2, len(of_each), draft_tokens), dtype=np.int64)
    for i, results in enumerate(of_each):
        for result in results:
            drafted[i, : len(result.drafted)] += np.asarray(result.drafted, dtype=np.int64)
            accepted[i, : len(result.accepted)] += np.asarray(result.accepted, dtype=np.int64)
    rounds = np.asarray([sum(result.rounds for result in results) for results in of_each], dtype=np.int64)
    rates = tuple(Rate.over_records(accepted[:, k], drafted[:, k], seed) for k in range(draft_tokens))
    return LengthCounts(draft_tokens, rounds, accepted.sum(1)), rates
