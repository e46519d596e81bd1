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
from eyas.variants.pool import FEW_RECORDS, Pool, Score, log_z_of, score, z_of
from eyas.variants.table import name_of

__all__ = ["RIGHT", "Facts", "Limits", "Parts", "Pass", "Sweep", "Trial", "build", "read_parts", "score", "sweep"]

DEAD = 0.12  # kept a slot, of four: what chance and the commonest tokens give
MAX_PASSES = 4
SUSPECT = 2.5  # standard errors from which a better reading keeps a drafter from being called sound
Outcome = Literal["better", "tied", "suspect", "equal", "worse", "screened out"]


@dataclass(frozen=True)
class Limits:
    """How much is looked at. ``screen`` and ``confirm`` are slots, ``finalists`` readings that are confirmed."""

    screen: int = 1000
    confirm: int = 6000
    finalists: int = 5
    draft_tokens: int = 4
    screen_depths: int = 2
    least: float = 0.02  # a smaller gain is no fault worth a name
    seed: int = 0


@dataclass(eq=False)
class Trial:
    """One reading in one pass: ``changes`` to the base, the scores of both on the screening slots, and on the others
    where it came so far."""

    changes: dict[str, Any]
    screened: Score
    base: Score
    confirmed: Score | None = None
    difference: Difference | None = None
    z: float | None = None
    log_z: float | None = None
    outcome: Outcome = "screened out"

    @property
    def name(self) -> str:
        return name_of(self.changes)


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
    screen = pools.make(stock, truths, first, limits.draft_tokens)
    confirm = pools.make(stock, truths, second, limits.draft_tokens)
    at: dict[str, Any] = {**RIGHT, **base}
    few = pools.make(stock, truths, pools.narrowed(first, taps.SLOTS), 1)
    passes: list[Pass] = []
    tried = 0
    while len(passes) < MAX_PASSES:
        before = passes[-1].taps if passes else None
        searched = tuple(before.best) if before and before.settled else ()
        more = also if not passes else ()
        done = _pass(parts, stock, (few, screen, confirm), at, num_layers, more, searched, limits, progress)
        if done is None:
            break
        passes.append(done)
        tried += len(done.trials)
        if done.winner is None:
            break
        at = {**at, **done.winner.changes}
    at = _pruned(at, {**RIGHT, **base}, parts, confirm)
    return Sweep(passes, at, screen, confirm, tried, time.perf_counter() - began)


def _pass(
    parts: Parts,
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
    here = score(screen, parts, base, depths=limits.screen_depths)
    there = score(confirm, parts, base)
    if here is None or there is None:
        return None
    done = Pass(base, here, there)
    changes = [dict(c) for c in also] + list(table.candidates(base, parts, stock, num_layers))
    for change in _distinct(changes):
        progress(name_of(change))
        tried = score(screen, parts, {**base, **change}, depths=limits.screen_depths)
        if tried is not None:
            done.trials.append(Trial(change, tried, here))
    if tuple(base["taps"]) != searched:  # the search ends where no single change helps
        done.taps = taps.search(few, parts, stock, base, progress)
    if done.taps is not None and done.taps.best != tuple(base["taps"]):
        known = {tuple(t.changes["taps"]) for t in done.trials if "taps" in t.changes}
        # Few slots chose it by a hair's breadth perhaps: its neighbours come along, and more slots decide.
        for found in (done.taps.best, *table.neighbours(done.taps.best, stock)):
            if found not in known and found != tuple(base["taps"]):
                tried = score(screen, parts, {**base, "taps": found}, depths=limits.screen_depths)
                if tried is not None:
                    done.trials.append(Trial({"taps": found}, tried, here))
    if there.kept_per_slot < DEAD and not _promising(done.trials):
        done.trials += _pairs(screen, parts, base, here, done.trials, limits)
    _confirm(done, confirm, parts, limits, progress)
    return done


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


def _pairs(
    screen: Pool, parts: Parts, base: dict[str, Any], here: Score, trials: Sequence[Trial], limits: Limits
) -> list[Trial]:
    """Two changes at once, of those that alone make the truth likelier. Greedy, for all pairs would be thousands."""
    ranked = sorted(trials, key=lambda t: -t.screened.log_p)
    found = []
    for a, b in combinations(ranked[:10], 2):
        if a.changes.keys() & b.changes.keys():
            continue
        change = {**a.changes, **b.changes}
        if tried := score(screen, parts, {**base, **change}, depths=limits.screen_depths):
            found.append(Trial(change, tried, here))
    return found


def _confirm(done: Pass, confirm: Pool, parts: Parts, limits: Limits, progress: Callable[[str], None]) -> None:
    """The finalists on slots that took no part in choosing them, and who wins."""
    by_kept = sorted(done.trials, key=lambda t: (-t.screened.kept_per_slot, -t.screened.log_p))
    by_log = sorted(done.trials, key=lambda t: -t.screened.log_p)
    chosen: list[Trial] = []
    ahead = [
        t for t in done.trials if t.screened.kept_per_slot > t.base.kept_per_slot or t.screened.log_p > t.base.log_p
    ]
    by_kept = [t for t in by_kept if t in ahead] or by_kept[:1]  # what is behind in both needs no second look
    by_log = [t for t in by_log if t in ahead]
    for trial in (*by_kept[: limits.finalists - 1], *by_log):
        if len(chosen) < limits.finalists and trial not in chosen:
            chosen.append(trial)
    bar = threshold(len(done.trials))
    for trial in chosen:
        progress(f"confirming {trial.name}")
        trial.confirmed = score(confirm, parts, {**done.base, **trial.changes})
        assert trial.confirmed is not None
        trial.difference = paired_difference(trial.confirmed.lengths(), done.confirmed.lengths())
        trial.z = z_of(trial.confirmed, done.confirmed)
        trial.log_z = log_z_of(trial.confirmed, done.confirmed)
        trial.outcome = _outcome(trial, done.confirmed, bar, limits.least)
    better = [t for t in chosen if t.outcome == "better"]
    if better:
        done.winner = max(better, key=lambda t: t.confirmed.kept_per_slot if t.confirmed else 0.0)
        done.ties = [t for t in chosen if t is not done.winner and _ties(t, done.winner, bar)]
        for tie in done.ties:
            tie.outcome = "tied"


def threshold(tried: int) -> float:
    """Standard errors that none of so many readings of a sound drafter passes by chance, in one sweep of 1,000."""
    return float(norm.isf(0.001 / max(tried, 1)))


def _outcome(trial: Trial, base: Score, bar: float, least: float) -> Outcome:
    """Better by the tokens kept; or by those less surely, if the truth is likelier beyond doubt and the screening
    slots, which are others, say the same."""
    assert trial.confirmed is not None
    assert trial.z is not None
    assert trial.log_z is not None
    gain = trial.confirmed.kept_per_slot - base.kept_per_slot
    if gain > least * (1 + base.kept_per_slot):
        both = trial.log_z > bar and trial.screened.kept_per_slot > trial.base.kept_per_slot
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


def _pruned(best: dict[str, Any], base: Facts, parts: Parts, confirm: Pool) -> dict[str, Any]:
    """``best`` without what does not help it: a change found on the way may be of no use, or harm, in the end."""
    changed = [fact for fact, value in best.items() if base.get(fact, RIGHT.get(fact)) != value]
    kept = dict(best)
    for fact in changed if len(changed) > 1 else ():
        with_it = score(confirm, parts, kept)
        without = score(confirm, parts, {**kept, fact: base.get(fact, RIGHT.get(fact))})
        if with_it is not None and without is not None and z_of(with_it, without) < 1.0:
            kept[fact] = base.get(fact, RIGHT.get(fact))
    return kept
