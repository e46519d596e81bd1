"""Settings turned one at a time, on an engine that keeps less than it should while all that a probe sees is right.

Every run is a fresh engine without a probe, as it is served, but for one setting; the same prompts, greedily. A sound
engine keeps the same tokens whatever is turned, so what changes the counts is where the fault lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from eyas.diagnose.curves import Counted
from eyas.diagnose.probes import first_apart
from eyas.diagnose.result import Diagnosis
from eyas.engines.live import Answer, Counters, Engine
from eyas.engines.toggles import SERVED, Toggle
from eyas.errors import EnvironmentFault
from eyas.results import Evidence, Finding, Rival, judge
from eyas.results.verdict import FALLS_SHORT

WORTH = 0.05  # tokens a round; where the texts are the same, near ties of the drafter make no such difference
SURE = 3.0  # standard errors, of rounds as if independent, where they are not
SAME = 0.9  # of the answers
RECOVERS = 0.5  # of what is lost
ONE_BY_ONE = 3.0  # times what several requests at a time take


@dataclass(frozen=True)
class Kept:
    """Rounds, and tokens kept by depth."""

    rounds: int
    accepted: Sequence[int]

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / self.rounds

    @property
    def squared_error(self) -> float:
        """Of ``length``: with p_k the share of rounds that keep depth k, a round's square has mean sum (2k+1) p_k."""
        shares = [a / self.rounds for a in self.accepted]
        mean, square = sum(shares), sum((2 * k + 1) * share for k, share in enumerate(shares))
        return (square - mean**2) / self.rounds

    def above(self, other: Kept, *, same: bool) -> bool:
        """Whether it keeps more, by what matters and, unless both are of the ``same`` greedy texts, beyond chance."""
        more = self.length - other.length
        return more >= WORTH and (same or more >= SURE * sqrt(self.squared_error + other.squared_error))


@dataclass(frozen=True)
class Tried:
    """``kept`` is None where it was not tried; ``equal`` counts answers that are the ones the probed engine gave."""

    toggle: Toggle
    predicted_minutes: float
    outcome: str
    kept: Kept | None = None
    equal: int = 0
    same: bool = False
    """Whether nearly all answers are equal."""
    short: bool = False
    helps: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.toggle.name,
            "setting": self.toggle.setting,
            "accept_length": self.kept.length if self.kept else None,
            "rounds": self.kept.rounds if self.kept else 0,
            "accepted": list(self.kept.accepted) if self.kept else [],
            "equal": self.equal,
            "predicted_minutes": round(self.predicted_minutes, 1),
            "outcome": self.outcome,
            "helps": self.helps,
        }


@dataclass(frozen=True)
class Asking:
    """What is sent in every run, what the probed engine said to it, and what a run of it took, in seconds."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    answers: Sequence[Answer]
    start_seconds: float
    generate_seconds: float

    def minutes(self, toggle: Toggle) -> float:
        """A prediction, made before."""
        asking = self.generate_seconds * (ONE_BY_ONE if toggle.concurrency == 1 else 1.0) * (2 if toggle.again else 1)
        return (self.start_seconds * toggle.starts + asking) / 60


def minutes(asking: Asking, toggles: Sequence[Toggle]) -> float:
    """What all of them are expected to take."""
    return sum(asking.minutes(t) for t in (SERVED, *toggles) if t.why_not is None)


def turned(
    begin: Callable[[Toggle], Engine],
    toggles: Sequence[Toggle],
    asking: Asking,
    expected: Counted,
    heard: Callable[[str], None] = lambda what: None,
) -> list[Tried]:
    """As it is served, then each setting. Where it keeps, freshly started, what it should, only uptime is left."""
    aim = Kept(int(expected.rounds.sum()), [int(n) for n in expected.hits.sum(0)])
    served = _run(begin, SERVED, asking, heard)
    if served.kept is None:
        return [served]
    short = aim.above(served.kept, same=served.same)
    lost = aim.length - served.kept.length
    fine = f"keeps what it should, {served.kept.length:.2f} of {aim.length:.2f}"
    found = [replace(served, outcome=f"keeps {lost:.2f} a round less than it should" if short else fine, short=short)]
    for toggle in toggles if short else [t for t in toggles if t.again]:
        if toggle.why_not is not None:
            found.append(Tried(toggle, 0.0, f"not tried: {toggle.why_not}"))
            continue
        run = _run(begin, toggle, asking, heard)
        found.append(run if run.kept is None else _against(run, served.kept, lost, same=run.same and served.same))
    return found


def _run(begin: Callable[[Toggle], Engine], toggle: Toggle, asking: Asking, heard: Callable[[str], None]) -> Tried:
    predicted = asking.minutes(toggle)
    heard(f"{toggle.name}: {toggle.setting}, about {predicted:.0f} minutes")
    engine = begin(toggle)
    try:
        engine.ready()
        for _ in range(2 if toggle.again else 1):
            before = engine.metrics()
            answers = engine.generate(asking.prompts, asking.max_tokens)
            after = _settled(engine, before)
    except EnvironmentFault as fault:
        return Tried(toggle, predicted, f"not tried: {fault.message}")
    finally:
        engine.stop()
    if before is None or after is None or not after.since(before).rounds:
        return Tried(toggle, predicted, "not tried: the engine counts no rounds")
    counts = after.since(before)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(answers, asking.answers, strict=True))
    same = equal >= SAME * len(answers)
    return Tried(toggle, predicted, "", Kept(counts.rounds, counts.accepted), equal, same)


def _settled(engine: Engine, before: Counters | None, patience: float = 5.0) -> Counters | None:
    """An engine counts a little after it answered: the page is read until it stands still."""
    page = engine.metrics()
    until = time.monotonic() + patience
    while page is not None and before is not None and time.monotonic() < until:
        time.sleep(0.2)
        later = engine.metrics()
        if later == page and page.rounds > before.rounds:
            break
        page = later
    return page


def _against(run: Tried, served: Kept, lost: float, *, same: bool) -> Tried:
    """A run again on one engine helps where it keeps less than the first: then a restart cures."""
    assert run.kept is not None
    if run.toggle.again:
        worse = served.above(run.kept, same=same)
        outcome = f"keeps {served.length - run.kept.length:.2f} less the second time" if worse else "no difference"
        return replace(run, outcome=outcome, helps=worse)
    gained = run.kept.length - served.length
    helps = run.kept.above(served, same=same) and gained >= RECOVERS * lost
    outcome = f"recovers {gained:.2f} of {lost:.2f}" if helps else "no difference"
    if not helps and (run.kept.above(served, same=same) or served.above(run.kept, same=same)):
        outcome = f"changes {gained:+.2f}, which is not it"
    return replace(run, outcome=outcome, helps=helps)


def clean(result: Diagnosis) -> bool:
    """Whether all that could be looked at is right, so that only what nobody sees is left."""
    grave = [f for f in result.checked.findings if f.severity != "note" and f.cause != FALLS_SHORT]
    return not grave and result.probes is not None and first_apart(result.probes) in (None, "metrics")


def short(result: Diagnosis) -> bool:
    """Whether an engine was seen to keep less than it should: the one asked here, or the one whose log was given."""
    return any(f.cause == FALLS_SHORT for f in result.checked.findings)


def settle(result: Diagnosis, tried: Sequence[Tried]) -> None:
    """Put what was tried into the result; a setting that helps is what is wrong."""
    result.toggles = [t.to_json() for t in tried]
    new = list(findings(tried))
    if new:
        rest = [f for f in result.checked.findings if f.cause != FALLS_SHORT]
        verdict = judge([*new, *rest], length_at_4=None, not_checked=result.checked.not_checked)
        result.checked = replace(result.checked, findings=[*new, *rest], verdict=verdict)


def findings(tried: Sequence[Tried]) -> list[Finding]:
    """One for each setting that helps, each the other's rival; that it falls short where none does."""
    served = tried[0]
    helping = [t for t in tried if t.helps]
    if served.kept is None or not (helping or served.short):
        return []
    if helping:
        return [_helps(run, served.kept, [t for t in helping if t is not run]) for run in helping]
    names = ", ".join(t.toggle.name for t in tried[1:] if t.kept is not None) or "none could be turned"
    return [
        Finding(
            FALLS_SHORT,
            "likely",
            f"As it is served the engine {served.outcome}, and no setting that was turned changes that ({names}).",
            [_shown("as served", served.kept)],
        )
    ]


def _helps(run: Tried, served: Kept, others: Sequence[Tried]) -> Finding:
    assert run.kept is not None
    again = run.toggle.again
    report = "and report the engine's version with these numbers."
    return Finding(
        "cache-drift" if again else "setting-costs",
        "likely",
        f"{run.toggle.name.capitalize()}: on the same prompts it {run.outcome} ({run.toggle.setting}).",
        [_shown("as served", served), _shown(run.toggle.setting, run.kept)],
        fix=f"Restart it for now; serve without the prefix cache if that holds, {report}"
        if again
        else f"Serve with {run.toggle.setting} for now, {report}",
        rivals=[Rival("setting-costs", f"{t.toggle.setting} helps as well") for t in others],
    )


def _shown(name: str, kept: Kept) -> Evidence:
    return Evidence(f"accept length, {name}", round(kept.length, 3), None, f"{kept.rounds} rounds, metrics page")
