"""Readings in, events and a state of fixed size out. No clock and no network here: the caller says when it was.

    first read        only the base of the counters
    first window      the first ``window`` intervals with rounds (and 200 rounds): what the newest is compared with
    newest window     the last ``window`` intervals with rounds

A warning about a length needs a whole window of looks in a row that say so, and is given once. It stands until its
size has fallen to half of what it was when it was given; only then can it be given again. A restart is a new first
window, and withdraws the warning of drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.engines.scrape import sampled
from eyas.engines.scrape.sampled import Sampled
from eyas.results import Finding, NotChecked
from eyas.results.verdict import MIN_ROUNDS
from eyas.watch import reasons
from eyas.watch.expected import Expected
from eyas.watch.reasons import Said
from eyas.watch.sums import RECENT, Interval, Newest, Sums, Trend, copied

REASONS = (reasons.DRIFT, reasons.FALLS_SHORT, reasons.IDLE, reasons.CONTRADICT)
EVENTS, RUNS = 100, 20
RECOVERED = 0.5
LEAST_UPTIME = 600.0  # seconds that a slope an hour needs
TURNS, AMONG = 3, 10  # restarts among so many readings: no engine does that, a balancer does
Kind = Literal["restart", "down", "up", "warning", "note", "cleared"]


@dataclass(frozen=True)
class Event:
    """Something to say once."""

    at: float
    kind: Kind
    text: str
    fix: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"at": round(self.at, 3), "kind": self.kind, "text": self.text, "fix": self.fix}


@dataclass
class _Standing:
    at: float
    size: float
    finding: Finding


class Watcher:
    def __init__(self, where: str, *, window: int, every: float, expected: Expected | None = None) -> None:
        self.where, self.window, self.every, self.expected = where, window, every, expected
        self.up = True
        self.readings = self.restarts = self.outages = self.rounds = 0
        self.at = 0.0
        self.standing: dict[str, _Standing] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.recent: deque[Interval] = deque(maxlen=RECENT)
        self.runs: deque[dict[str, Any]] = deque(maxlen=RUNS)
        self._restarted: deque[bool] = deque(maxlen=AMONG)
        self._taking_turns = self._told_means = self._alone = False
        self._down_since: float | None = None
        self._last: Sampled | None = None
        self._last_at = 0.0
        self._page_findings: tuple[Finding, ...] = ()
        self._page_times = 0
        self._said: dict[str, Said] = {}
        self._looks: dict[str, int] = {}  # by reason, how many in a row have said so
        self._noted: set[str] = set()
        self._baseline(0.0)

    def _baseline(self, at: float) -> None:
        self._since = at
        self.first, self.newest, self.trend = Sums(), Newest(self.window), Trend(self.every)
        self._fresh = False
        self._after = self._idle = 0  # intervals with rounds behind the first window; intervals without any

    # -- input -----------------------------------------------------------------------------------------------

    def take(self, now: Sampled, at: float, findings: Sequence[Finding] = ()) -> list[Event]:
        """A reading of the page at ``at`` seconds; ``findings`` are those of the page by itself."""
        said = self._back(at)
        last, before = self._last, self._last_at
        self._last, self._last_at, self.at = now, at, at
        self.readings += 1
        self._page(now, findings)
        why = sampled.began_anew(last, now) if last is not None else None
        self._restarted.append(why is not None)
        if why is not None:
            said += self._restart(at, why)
        elif last is not None:
            self._interval(last, now, at, at - before)
        said += self._judge(at)
        return self._kept(said)

    def once(self, now: Sampled, findings: Sequence[Finding] = ()) -> list[Event]:
        """One reading alone: all that the engine has counted so far is the newest window."""
        self._last = now
        self.readings = 1
        self._page(now, findings)
        self._page_times *= 3
        self._alone = self._fresh = True
        self.newest = Newest(1)
        one = _interval(None, now, 0.0, 0.0)
        if one.weight:
            self.newest.add(one)
        return self._kept(self._judge(0.0))

    def down(self, at: float, message: str) -> list[Event]:
        """The page could not be read: said once, until it can be again."""
        self.at = at
        if self._down_since is not None:
            return []
        self.up, self._down_since, self._idle = False, at, 0
        self.outages += 1
        return self._kept([Event(at, "down", f"{message} Trying again.")])

    # -- what a reading does -----------------------------------------------------------------------------------

    def _back(self, at: float) -> list[Event]:
        if self._down_since is None:
            return []
        text = f"The engine answers again after {at - self._down_since:.0f} s."
        self.up, self._down_since = True, None
        return [Event(at, "up", text)]

    def _page(self, now: Sampled, findings: Sequence[Finding]) -> None:
        """vLLM's counters are judged by window: those of a life never forget one bad moment."""
        self._page_findings = tuple(findings) if now.engine != "vllm" else ()
        grave = any(one.severity != "note" for one in self._page_findings)
        self._page_times = self._page_times + 1 if grave else 0

    def _restart(self, at: float, why: str) -> list[Event]:
        self.restarts += 1
        ended = {"seconds": round(at - self._since, 3), "first": self.first.length, "newest": self.newest.sums.length}
        self.runs.append(ended)
        self._baseline(at)
        self.standing.pop(reasons.DRIFT, None)
        self._said.pop(reasons.DRIFT, None)
        self._looks.clear()
        if sum(self._restarted) >= TURNS:
            if self._taking_turns:
                return []
            self._taking_turns = True
            text = "The engine seems to start again and again: do several take turns behind this address?"
            return [Event(at, "restart", text, "Name one of them by its own address.")]
        self._taking_turns = False
        text = f"The engine was started anew ({why}): the first window begins again."
        if ended["newest"] is not None:
            text += f" Accept length before: {ended['newest']:.2f}."
        return [Event(at, "restart", text)]

    def _interval(self, last: Sampled, now: Sampled, at: float, seconds: float) -> None:
        one = _interval(last, now, at, seconds)
        self.recent.append(one)
        self.rounds += one.rounds or 0
        if one.weight == 0:
            self._idle += bool(last.running and now.running and not one.rounds and not _ever(now))
            return
        self._idle, self._fresh = 0, True
        self.newest.add(one)
        self.trend.add(at - self._since, one)
        if self.first_is_whole:
            self._after += 1
        else:
            self.first.add(one)

    @property
    def first_is_whole(self) -> bool:
        return self.first.intervals >= self.window and (self.first.unknown > 0 or self.first.rounds >= MIN_ROUNDS)

    def per_hour(self) -> float | None:
        """Slope of the length over uptime; None before there is enough of that."""
        return self.trend.per_hour() if self.at - self._since >= LEAST_UPTIME else None

    @property
    def draft_tokens(self) -> int | None:
        return None if self._last is None else self._last.draft_tokens

    # -- what is wrong -----------------------------------------------------------------------------------------

    def _judge(self, at: float) -> list[Event]:
        newest, said = self.newest.sums, []
        running = self._last.running if self._last else None
        if newest.counted:
            sound = reasons.contradicts(newest, self.where)
        else:
            sound = reasons.page_contradicts(self._page_findings, self._page_times)
        judged = [reasons.idle(self._idle, self.window, running, self.where), sound]
        if sound.bad:
            why = "the engine's numbers contradict one another, so they are compared with nothing"
            judged += [Said(reason, None, why_not=why) for reason in (reasons.DRIFT, reasons.FALLS_SHORT)]
        else:
            judged += [self._drift(), self._against()]
        for one in judged:
            self._said[one.reason] = one
            said += self._settle(one, at)
        self._fresh = False
        return said + self._means(at)

    def _drift(self) -> Said:
        if not self.first_is_whole or self._after < self.window:
            return Said(reasons.DRIFT, None, why_not="there are not two windows yet")
        return reasons.drift(self.first, self.newest.sums, self.draft_tokens, self.per_hour, self.where)

    def _against(self) -> Said:
        if self.expected is None:
            return Said(reasons.FALLS_SHORT, None, why_not="nothing is expected: give --drafter or --expect")
        if not self.newest.full:
            return Said(reasons.FALLS_SHORT, None, why_not="there is not one window yet")
        return reasons.against(self.expected, self.newest.sums, self.draft_tokens, self.where)

    def _settle(self, one: Said, at: float) -> list[Event]:
        """Raise, keep or clear what one reason says."""
        stands, finding = self.standing.get(one.reason), one.finding
        says = finding is not None and finding.cause in (one.reason, *reasons.GAUGES)
        if self._fresh or not says or self._needed(one.reason) == 1:
            self._looks[one.reason] = self._looks.get(one.reason, 0) + 1 if says else 0
        if stands is not None:
            return self._still(stands, one, at)
        if finding is None or not says or self._looks[one.reason] < self._needed(one.reason):
            if one.bad is False and one.size <= 0:
                self._noted.discard(one.reason)
            return []
        text = f"{finding.cause}: {finding.summary}"
        if one.bad:
            self.standing[one.reason] = _Standing(at, one.size, finding)
            return [Event(at, "warning", text, finding.fix)]
        if one.reason in self._noted:
            return []
        self._noted.add(one.reason)
        return [Event(at, "note", text, finding.fix)]

    def _still(self, stands: _Standing, one: Said, at: float) -> list[Event]:
        if one.bad and one.finding is not None:
            stands.finding = one.finding
        if one.bad is not False or one.size > RECOVERED * stands.size:
            return []
        del self.standing[one.reason]
        return [Event(at, "cleared", f"{one.reason}: recovered.")]

    def _needed(self, reason: str) -> int:
        """Looks in a row that must say so: text that wanders lowers one window, seldom two that share nothing."""
        return self.window if reason in (reasons.DRIFT, reasons.FALLS_SHORT) and not self._alone else 1

    def _means(self, at: float) -> list[Event]:
        """Said once where no count of rounds comes although lengths do."""
        if self._told_means or not self.first_is_whole or not self.newest.sums.unknown:
            return []
        self._told_means = True
        return [Event(at, "note", "The page has means and no count of rounds: shown, but never warned about.")]

    def _kept(self, said: list[Event]) -> list[Event]:
        self.events += said
        return said

    # -- output ------------------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """What stands, then notes."""
        found = [one.finding for one in self.standing.values()]
        agrees = self._said.get(reasons.FALLS_SHORT)
        if agrees is not None and agrees.finding is not None and agrees.reason not in self.standing:
            found.append(agrees.finding)
        odd = reasons.faked(tuple(self.newest), self.newest.sums, self.draft_tokens, self.where)
        notes = [one for one in self._page_findings if one.severity == "note"]
        return found + ([odd] if odd else []) + notes

    def told(self) -> dict[str, Any]:
        """Everything there is to show, as JSON has it."""
        expected = self.expected
        length = expected.at(self.draft_tokens) if expected else None
        drift = self._said.get(reasons.DRIFT)
        return {
            "where": self.where,
            "engine": self._last.engine if self._last else None,
            "draft_tokens": self.draft_tokens,
            "up": self.up,
            "seconds": round(self.at, 3),
            "since_restart": round(self.at - self._since, 3),
            "every": self.every,
            "window": self.window,
            "readings": self.readings,
            "restarts": self.restarts,
            "outages": self.outages,
            "rounds": self.rounds,
            "life": _alone(self._last).to_json() if self._last else None,
            "first": self.first.to_json(),
            "first_is_whole": self.first_is_whole,
            "newest": copied(self.newest.sums).to_json(),
            "interval": self.recent[-1].to_json() if self.recent else None,
            "expected": None if expected is None else _expectation(expected, length, self.draft_tokens),
            "drift": drift.gap.to_json() if drift and drift.gap else None,
            "per_hour": self.per_hour(),
            "trend": self.trend.to_json(),
            "intervals": [one.to_json() for one in self.recent],
            "runs": list(self.runs),
            "standing": sorted(self.standing),
            "events": [one.to_json() for one in self.events],
            "findings": [one.to_json() for one in self.findings()],
            "not_checked": [one.to_json() for one in self._not_checked()],
        }

    def _not_checked(self) -> list[NotChecked]:
        return [NotChecked(one.reason, one.why_not) for one in self._said.values() if one.why_not]


def _expectation(expected: Expected, length: Any, draft_tokens: int | None) -> Mapping[str, Any]:
    known = not isinstance(length, str)
    return {
        "source": expected.source,
        "value": length.value if known else None,
        "low": length.low if known else None,
        "high": length.high if known else None,
        "joint": expected.joint_at(draft_tokens),
        "why_not": None if known else length,
    }


def _ever(now: Sampled) -> bool:
    """Whether a gauge was ever set: one that stands still may only have been set to the same again."""
    return any(gauge.length > 0 for gauge in now.gauges.values())


def _interval(last: Sampled | None, now: Sampled, at: float, seconds: float) -> Interval:
    """What happened between two readings. A gauge that stood still while nothing was counted is no new reading."""
    grown = sampled.grown(last, now)
    if now.engine == "vllm":
        return Interval(at, seconds, grown.rounds, grown.drafted, grown.accepted, grown.hits, running=now.running)
    counts = any(name == "verify_calls" for name, _ in now.counters)
    rounds = grown.rounds if counts else None
    lengths = [gauge.length for gauge in now.gauges.values() if gauge.length > 0]  # 0 was never set
    fresh = last is None or now.gauges != last.gauges or bool(rounds)
    length = sum(lengths) / len(lengths) if lengths and fresh else None
    return Interval(at, seconds, rounds, means=True, length=length, running=now.running)


def _alone(now: Sampled) -> Sums:
    """All that the engine has counted, or its gauges of now."""
    sums = Sums()
    sums.add(_interval(None, now, 0.0, 0.0))
    return sums
