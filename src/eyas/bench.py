"""Two or more ways of decoding, timed side by side on the same prompts.

The sides take turns prompt by prompt, and the order within a turn flips each time, so that a machine that
warms up or slows down does so for all of them. The first side is the baseline of every ratio. Counts and
seconds are stored per prompt, everything else is derived; intervals resample prompts.

An answer *loops* when more than 30 % of its 8-grams repeat an earlier one of the same answer. Looping text is
easier to draft than text worth having, so every number is also given without the prompts where any side's
answer loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from eyas.errors import UsageError
from eyas.results import SCHEMA, Interval, LengthCounts, Rate, eyas_version

NGRAM = 8
LOOPS_ABOVE = 0.30
DRAWS = 2000


class Named(Protocol):
    @property
    def id(self) -> str: ...


P = TypeVar("P", bound=Named)


@dataclass(frozen=True)
class SideResult:
    """One side's answer to one prompt. ``drafted`` and ``accepted`` [K] count rounds by depth."""

    token_ids: Sequence[int]
    seconds: float
    rounds: int = 0
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert self.seconds > 0
        assert len(self.drafted) == len(self.accepted), "counts of the same depths"

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def repeats(self) -> Repeats:
        return repeats(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "repeated_8grams": self.repeats.to_json(),
            "loops": self.repeats.loops,
        }


@dataclass(frozen=True)
class Repeats:
    """8-grams of a text, and those of them that occurred earlier in it."""

    repeated: int
    total: int

    @property
    def share(self) -> float | None:
        return self.repeated / self.total if self.total else None

    @property
    def loops(self) -> bool:
        return (self.share or 0.0) > LOOPS_ABOVE

    def to_json(self) -> dict[str, Any]:
        return {"repeated": self.repeated, "total": self.total, "share": self.share}


def repeats(token_ids: Sequence[int]) -> Repeats:
    grams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return Repeats(len(grams) - len(set(grams)), len(grams))


@dataclass(frozen=True)
class Cost:
    """What a side pays, in plain steps: ``verify`` a pass over K+1 rows, ``draft`` one depth."""

    verify: float
    draft: float

    def bound(self, accept_length: float, draft_tokens: int) -> float:
        """The speed-up when nothing else takes time: AL(K) / (v(K+1) + K d)."""
        return accept_length / (self.verify + draft_tokens * self.draft)


@dataclass(frozen=True)
class Turn:
    """One prompt, answered by every side in ``order``."""

    prompt_id: str
    order: tuple[str, ...]
    results: Mapping[str, SideResult]

    @property
    def loops(self) -> bool:
        return any(result.repeats.loops for result in self.results.values())

    def equal(self, side: str, baseline: str) -> bool:
        return list(self.results[side].token_ids) == list(self.results[baseline].token_ids)

    def to_json(self, baseline: str) -> dict[str, Any]:
        sides = {
            name: result.to_json() | {"equal": self.equal(name, baseline)} for name, result in self.results.items()
        }
        return {"id": self.prompt_id, "order": list(self.order), "loops": self.loops, "sides": sides}


@dataclass(frozen=True)
class SideSummary:
    """One side over a set of prompts; ``ratio`` is its tokens per second over the baseline's."""

    tokens: int
    seconds: float
    median_tokens_per_second: float
    ratio: float
    ratio_interval: Interval
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
        if self.cost is None or self.lengths is None or self.lengths.value is None:
            return None
        return self.cost.bound(self.lengths.value, self.lengths.draft_tokens)

    def to_json(self) -> dict[str, Any]:
        low, high = self.ratio_interval
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "median_tokens_per_second": self.median_tokens_per_second,
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

    @property
    def baseline(self) -> str:
        return self.sides[0]

    def summary(self, *, without_loops: bool = False) -> dict[str, SideSummary]:
        """Every side over all turns, or over those where no answer loops; empty when none is left."""
        turns = [turn for turn in self.turns if not (without_loops and turn.loops)]
        return {side: self._side(side, turns) for side in self.sides} if turns else {}

    def _side(self, side: str, turns: Sequence[Turn]) -> SideSummary:
        mine = [turn.results[side] for turn in turns]
        base = [turn.results[self.baseline] for turn in turns]
        equal = np.asarray([turn.equal(side, self.baseline) for turn in turns], dtype=np.int64)
        of_each = [result.repeats for result in mine]
        lengths, depths = _acceptance(mine, self.seed)
        return SideSummary(
            tokens=sum(result.tokens for result in mine),
            seconds=sum(result.seconds for result in mine),
            median_tokens_per_second=median(result.tokens / result.seconds for result in mine),
            ratio=_speed(mine) / _speed(base),
            ratio_interval=(1.0, 1.0) if side == self.baseline else _ratio_interval(mine, base, self.seed),
            equal=Rate.over_records(equal, np.ones_like(equal), self.seed),
            repeats=Repeats(sum(r.repeated for r in of_each), sum(r.total for r in of_each)),
            lengths=lengths,
            depths=depths,
            cost=self.costs.get(side),
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        def every(summary: Mapping[str, SideSummary]) -> dict[str, Any]:
            return {name: side.to_json() for name, side in summary.items()}

        kept = sum(not turn.loops for turn in self.turns)
        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "baseline": self.baseline,
            "seed": self.seed,
            "costs": {name: {"verify": c.verify, "draft": c.draft} for name, c in self.costs.items()},
            "all": {"prompts": len(self.turns), "sides": every(self.summary())},
            "without_loops": {"prompts": kept, "sides": every(self.summary(without_loops=True))},
            "prompts": [turn.to_json(self.baseline) for turn in self.turns],
        }


def run(
    sides: Mapping[str, Callable[[P], SideResult]],
    prompts: Iterable[P],
    *,
    seed: int = 0,
    costs: Mapping[str, Cost] | None = None,
) -> Bench:
    """Let every side answer every prompt, in turns. ``seed`` is the bootstrap's; ``costs`` make a bound."""
    assert sides, "nothing to time"
    forth, turns = tuple(sides), []
    for i, prompt in enumerate(prompts):
        order = forth if i % 2 == 0 else forth[::-1]
        answers = {name: sides[name](prompt) for name in order}
        turns.append(Turn(prompt.id, order, {name: answers[name] for name in forth}))
    if not turns:
        raise UsageError("There are no prompts to time.", way_out="Name a prompt set or a file of prompts.")
    return Bench(forth, tuple(turns), dict(costs or {}), seed)


def _speed(results: Sequence[SideResult]) -> float:
    return sum(result.tokens for result in results) / sum(result.seconds for result in results)


def _ratio_interval(mine: Sequence[SideResult], base: Sequence[SideResult], seed: int) -> Interval:
    """95 % percentile interval of the ratio of speeds; both sides get the same draws of prompts."""
    if len(mine) < 2:
        return None, None
    n = len(mine)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    speeds = [_resampled_speeds(weights, results) for results in (mine, base)]
    low, high = np.percentile(speeds[0] / speeds[1], [2.5, 97.5])
    return float(low), float(high)


def _resampled_speeds(weights: npt.NDArray[np.int64], results: Sequence[SideResult]) -> npt.NDArray[np.float64]:
    tokens = np.asarray([result.tokens for result in results], dtype=np.float64)
    seconds = np.asarray([result.seconds for result in results], dtype=np.float64)
    return (weights @ tokens) / (weights @ seconds)


def _acceptance(results: Sequence[SideResult], seed: int) -> tuple[LengthCounts | None, tuple[Rate, ...]]:
    """Accept length and the curve by depth from counts; nothing for a side that drafts nothing."""
    draft_tokens = max(len(result.drafted) for result in results)
    if draft_tokens == 0:
        return None, ()
    drafted, accepted = np.zeros((2, len(results), draft_tokens), dtype=np.int64)
    for i, result in enumerate(results):
        drafted[i, : len(result.drafted)] = result.drafted
        accepted[i, : len(result.accepted)] = result.accepted
    rounds = np.asarray([result.rounds for result in results], dtype=np.int64)
    rates = tuple(Rate.over_records(accepted[:, k], drafted[:, k], seed) for k in range(draft_tokens))
    return LengthCounts(draft_tokens, rounds, accepted.sum(1)), rates
