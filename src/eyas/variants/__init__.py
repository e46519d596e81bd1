"""The sweep: the drafter read in other ways, one thing changed at a time, on the same slots.

Screened on few slots, the best confirmed on others. A reading is named better where it keeps more on the confirming
slots by so many standard errors that none of all those tried would by chance, and by a share worth a name. What is
better becomes the base and the sweep goes over it again, for faults stack; where nothing alone helps and the drafter is
all but dead, pairs are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from scipy.stats import norm

from eyas.results import Difference, paired_difference
from eyas.states.stock import Stock
from eyas.variants import pool as pools
from eyas.variants import table, taps
from eyas.variants.parts import RIGHT, Facts, Parts, build, read_parts
from eyas.variants.pool import FEW_RECORDS, Pool
from eyas.variants.scores import Score, Scores, behind, log_z_of, no_better, score, z_of
from eyas.variants.table import name_of

__all__ = ["RIGHT", "Facts", "Limits", "Parts", "Pass", "Sweep", "Trial", "build", "read_parts", "score", "sweep"]

DEAD = 0.12  # kept a slot, of four: what chance and the commonest tokens give
MAX_PASSES = 4
STAGES = (64, 192)  # slots after which what lies behind is not screened further
SURE = 2.0  # times the bar, beyond which the first slots settle it
SUSPECT = 2.5  # standard errors from which a better reading keeps a drafter from being called sound
Outcome = Literal["better", "tied", "suspect", "equal", "worse", "screened out"]


@dataclass(frozen=True)
class Limits:
    """How much is looked at. ``screen`` and ``confirm`` are slots, ``finalists`` readings that are confirmed."""

    screen: int = 1000
    confirm: int = 4000
    finalists: int = 5
    draft_tokens: int = 4
    screen_depths: int = 2
    least: float = 0.02  # a smaller gain is no fault worth a name
    seed: int = 0


@dataclass(eq=False)
class Trial:
    """One reading in one pass: ``changes`` to the base, the scores of both on the screening slots, as many as it took,
    and on the others where it came so far."""

    changes: dict[str, Any]
    screened: Score
    base: Score
    confirmed: Score | None = None
    against: Score | None = None
    """The base on the slots of ``confirmed``."""
    difference: Difference | None = None
    z: float | None = None
    log_z: float | None = None
    outcome: Outcome = "screened out"

    @property
    def name(self) -> str:
        return name_of(self.changes)

    @property
    def kept_more(self) -> float:
        """Tokens a slot, on the screening slots."""
        return self.screened.kept_per_slot - self.base.kept_per_slot

    @property
    def likelier(self) -> float:
        """Nats, on the screening slots."""
        return self.screened.log_p - self.base.log_p


@dataclass(eq=False)
class Pass:
    base: dict[str, Any]
    screened: Score
    confirmed: Score
    trials: list[Trial] = field(default_factory=list)
    taps: taps.Search | None = None
    winner: Trial | None = None
    ties: list[Trial] = field(default_factory=list)


@dataclass(eq=False)
class Sweep:
    """``best`` is the reading that fits, ``passes`` how it was found; ``records`` were used, ``slots`` confirm."""

    passes: list[Pass]
    best: dict[str, Any]
    screen: Pool
    confirm: Pool
    tried: int
    seconds: float
    scores: Scores

    @property
    def by_record(self) -> bool:
        """Whether records are what varies; with few of them it is stretches of their slots."""
        return len({i for chunk in self.confirm.chunks for i in chunk.batch.index}) >= FEW_RECORDS


def sweep(
    parts: Parts,
    stock: Stock,
    base: Facts,
    num_layers: int,
    *,
    also: Sequence[Mapping[str, Any]] = (),
    limits: Limits = Limits(),
    progress: Callable[[str], None] = lambda what: None,
) -> Sweep:
    """``also``: further changes to try first, such as what other readers make of the files."""
    began = time.perf_counter()
    first, second = pools.split(stock, limits.draft_tokens, limits.screen, limits.confirm, limits.seed)
    truths = pools.Truths(stock, parts.target)
    scores = Scores(parts)
    screen = pools.make(stock, truths, first, limits.draft_tokens, STAGES)
    third = sum(int(marks.sum()) for marks in second.values()) // 3
    confirm = pools.make(stock, truths, second, limits.draft_tokens, [third, third])
    at: dict[str, Any] = {**RIGHT, **base}
    few = pools.make(stock, truths, pools.narrowed(first, taps.SLOTS), 1, STAGES[:1])
    passes: list[Pass] = []
    tried = 0
    while len(passes) < MAX_PASSES:
        before = passes[-1].taps if passes else None
        searched = tuple(before.best) if before and before.settled else ()
        more = also if not passes else ()
        done = _pass(scores, stock, (few, screen, confirm), at, num_layers, more, searched, limits, progress)
        if done is None:
            break
        passes.append(done)
        tried += len(done.trials)
        if done.winner is None:
            break
        at = {**at, **done.winner.changes}
    at = _pruned(at, {**RIGHT, **base}, scores, confirm)
    return Sweep(passes, at, screen, confirm, tried, time.perf_counter() - began, scores)


def _pass(
    scores: Scores,
    stock: Stock,
    on: tuple[Pool, Pool, Pool],
    base: dict[str, Any],
    num_layers: int,
    also: Sequence[Mapping[str, Any]],
    searched: tuple[Any, ...],
    limits: Limits,
    progress: Callable[[str], None],
) -> Pass | None:
    few, screen, confirm = on
    here = scores.of(screen, base, limits.screen_depths)
    there = scores.of(confirm, base)
    if here is None or there is None:
        return None
    done = Pass(base, here, there)
    changes = [dict(c) for c in also] + list(table.candidates(base, scores.parts, stock, num_layers))
    for change in _distinct(changes):
        progress(name_of(change))
        done.trials += _tried(scores, screen, base, change, limits)
    if tuple(base["taps"]) != searched:  # the search ends where no single change helps
        done.taps = taps.search(few, scores, stock, base, progress)
    if done.taps is not None and done.taps.best != tuple(base["taps"]):
        known = {tuple(t.changes["taps"]) for t in done.trials if "taps" in t.changes}
        # Few slots chose it by a hair's breadth perhaps: its neighbours come along, and more slots decide.
        for found in (done.taps.best, *table.neighbours(done.taps.best, stock)):
            if found not in known and found != tuple(base["taps"]):
                done.trials += _tried(scores, screen, base, {"taps": found}, limits)
    if there.kept_per_slot < DEAD and not _promising(done.trials):
        done.trials += _pairs(scores, screen, base, done.trials, limits)
    _confirm(done, confirm, scores, limits, progress)
    return done


def _tried(scores: Scores, screen: Pool, base: dict[str, Any], change: dict[str, Any], limits: Limits) -> list[Trial]:
    got = scores.until(screen, {**base, **change}, base, behind, limits.screen_depths)
    return [Trial(change, *got)] if got else []


def _distinct(changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: set[str] = set()
    kept = []
    for change in changes:
        if (name := name_of(change)) not in seen:
            seen.add(name)
            kept.append(change)
    return kept


def _promising(trials: Sequence[Trial]) -> bool:
    return any(t.screened.kept_per_slot > 2 * t.base.kept_per_slot + DEAD for t in trials)


def _pairs(scores: Scores, screen: Pool, base: dict[str, Any], trials: Sequence[Trial], limits: Limits) -> list[Trial]:
    """Two changes at once, of those that alone make the truth likelier. Greedy, for all pairs would be thousands."""
    ranked = sorted(trials, key=lambda t: -t.likelier)
    found: list[Trial] = []
    for a, b in combinations(ranked[:10], 2):
        if a.changes.keys() & b.changes.keys():
            continue
        found += _tried(scores, screen, base, {**a.changes, **b.changes}, limits)
    return found


def _confirm(done: Pass, confirm: Pool, scores: Scores, limits: Limits, progress: Callable[[str], None]) -> None:
    """The finalists on slots that took no part in choosing them, and who wins."""
    by_kept = sorted(done.trials, key=lambda t: (-t.kept_more, -t.likelier))
    by_log = sorted(done.trials, key=lambda t: -t.likelier)
    chosen: list[Trial] = []
    ahead = [t for t in done.trials if t.kept_more > 0 or t.likelier > 0]
    by_kept = [t for t in by_kept if t in ahead] or by_kept[:1]  # what is behind in both needs no second look
    by_log = [t for t in by_log if t in ahead]
    for trial in (*by_kept[: limits.finalists - 1], *by_log):
        if len(chosen) < limits.finalists and trial not in chosen:
            chosen.append(trial)
    bar = threshold(len(done.trials))
    left = list(chosen)
    for stages in range(1, len(confirm.stages or (confirm,)) + 1):
        for trial in left:
            progress(f"confirming {trial.name}")
            got = scores.both(confirm, {**done.base, **trial.changes}, done.base, stages)
            assert got is not None
            trial.confirmed, trial.against = got
            trial.difference = paired_difference(got[0].lengths(), got[1].lengths())
            trial.z, trial.log_z = z_of(*got), log_z_of(*got)
            trial.outcome = _outcome(trial, bar, limits.least)
        left = [t for t in left if t.confirmed and t.against and not no_better(t.confirmed, t.against)]
        if not left or _settled(left, bar):
            break
    better = [t for t in chosen if t.outcome == "better"]
    if better:
        done.winner = max(better, key=lambda t: t.confirmed.kept_per_slot if t.confirmed else 0.0)
        done.ties = [t for t in chosen if t is not done.winner and _ties(t, done.winner, bar)]
        for tie in done.ties:
            tie.outcome = "tied"


def _settled(trials: Sequence[Trial], bar: float) -> bool:
    """Whether one is so far ahead of the base, and of all others, that more slots would tell nothing new."""
    first = max(trials, key=lambda t: t.confirmed.kept_per_slot if t.confirmed else 0.0)
    ahead = first.z is not None and first.z > SURE * bar
    return ahead and not any(_ties(t, first, bar) for t in trials if t is not first)


def threshold(tried: int) -> float:
    """Standard errors that none of so many readings of a sound drafter passes by chance, in one sweep of 1,000."""
    return float(norm.isf(0.001 / max(tried, 1)))


def _outcome(trial: Trial, bar: float, least: float) -> Outcome:
    """Better by the tokens kept; or by those less surely, if the truth is likelier beyond doubt and the screening
    slots, which are others, say the same."""
    assert trial.confirmed is not None
    assert trial.against is not None
    assert trial.z is not None
    assert trial.log_z is not None
    gain = trial.confirmed.kept_per_slot - trial.against.kept_per_slot
    if gain > least * (1 + trial.against.kept_per_slot):
        both = trial.log_z > bar and trial.kept_more > 0
        if trial.z > bar or (trial.z > SUSPECT and both):
            return "better"
        if trial.z > SUSPECT:
            return "suspect"
    return "worse" if trial.z < -bar else "equal"


def _ties(other: Trial, winner: Trial, bar: float) -> bool:
    """Whether the confirming slots do not tell the two apart."""
    assert other.confirmed is not None
    assert winner.confirmed is not None
    if other.outcome != "better":
        return False
    apart = z_of(winner.confirmed, other.confirmed)
    return apart < 3.0 and not (apart > 1.0 and log_z_of(winner.confirmed, other.confirmed) > bar)


def _pruned(best: dict[str, Any], base: Facts, scores: Scores, confirm: Pool) -> dict[str, Any]:
    """``best`` without what does not help it: a change found on the way may be of no use, or harm, in the end."""
    changed = [fact for fact, value in best.items() if base.get(fact, RIGHT.get(fact)) != value]
    kept = dict(best)
    for fact in changed if len(changed) > 1 else ():
        with_it = scores.of(confirm, kept)
        without = scores.of(confirm, {**kept, fact: base.get(fact, RIGHT.get(fact))})
        if with_it is not None and without is not None and z_of(with_it, without) < 1.0:
            kept[fact] = base.get(fact, RIGHT.get(fact))
    return kept
