"""What may be wrong with the numbers of a window, and how sure that is. Pure: sums in, what to say out.

A length's interval is the wider of two. One takes rounds as independent and all K tokens of a round as one draw
(Wilson; the widest that independent rounds can have). The other takes intervals as the units (Student's t), since
rounds of one text are alike; all it assumes is that intervals are independent. Means without counts have only the
second. The level is ALPHA, not 5 %: a day has thousands of looks, and at 5 % some of them would cry for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scipy.stats import norm, t

from eyas.results import Evidence, Finding, Rival
from eyas.results.counts import Z_95, wilson
from eyas.results.verdict import MIN_ROUNDS
from eyas.watch.expected import Expected
from eyas.watch.sums import Interval, Sums

DRIFT, FALLS_SHORT, IDLE, CONTRADICT = "cache-drift", "engine-falls-short", "speculation-idle", "counts-inconsistent"
GAUGES = ("counts-inconsistent", "bonus-dropped")  # what the reader of a page of SGLang finds wrong with it
ALPHA = 1e-4
Z = float(norm.ppf(1 - ALPHA / 2))
LEAST = 0.1  # share of the drafted tokens kept; losing less is worth no restart and no warning
OTHER_TEXT = 0.5  # text of another kind may cost up to this share, as in a check; more is no text's doing
CONTRADICTION = 0.01  # counters that are written while they are read may be a step apart
ALIKE, ALL_KEPT = 20, 1000  # readings that never differ, rounds that keep every token: no text does that
_OTHER = (
    Rival("language-unseen", "send the same prompts before and after a restart and watch both"),
    Rival("temperature-greedy-drafts", "compare the sampling settings of the requests of both windows"),
)
TRAFFIC = (
    Rival("language-unseen", "serve the prompts of the drafter's records and watch again"),
    Rival("temperature-greedy-drafts", "serve at temperature 0 and watch again"),
)


@dataclass(frozen=True)
class Gap:
    """One length minus another, with its interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Said:
    """What a reason says now. ``bad`` None: it cannot tell. ``size``: how bad, to see when it has recovered."""

    reason: str
    bad: bool | None
    size: float = 0.0
    finding: Finding | None = None
    why_not: str | None = None
    gap: Gap | None = None


@lru_cache(maxsize=512)
def _quantile(intervals: int) -> float:
    return float(t.ppf(1 - ALPHA / 2, intervals - 1))


def ends(sums: Sums, draft_tokens: int | None) -> tuple[float, float] | None:
    """Low and high end of a window's length; None where nothing says how far it can be off."""
    length = sums.length
    if length is None:
        return None
    low = high = length
    told = False
    if sums.counted and draft_tokens and sums.rounds:
        hits = min(sums.rounds, max(0, round((length - 1) / draft_tokens * sums.rounds)))
        below, above = wilson(hits, sums.rounds, z=Z)
        assert below is not None
        assert above is not None
        low, high, told = min(low, 1 + draft_tokens * below), max(high, 1 + draft_tokens * above), True
    if (error := sums.error()) is not None:
        half = _quantile(sums.intervals) * error
        low, high, told = min(low, length - half), max(high, length + half), True
    return (low, high) if told else None


def difference(a: tuple[float, float, float], b: tuple[float, float, float]) -> Gap:
    """a minus b, each (value, low, high). Distances to the ends add in squares (MOVER: Zou and Donner 2008)."""
    gap = a[0] - b[0]
    return Gap(gap, gap - math.hypot(a[0] - a[1], b[2] - b[0]), gap + math.hypot(a[2] - a[0], b[0] - b[1]))


def too_few(sums: Sums) -> str | None:
    if sums.unknown:
        return "the page has means and no count of rounds, so nothing says how far they can be off"
    if sums.rounds < MIN_ROUNDS:
        return f"too few to tell: {sums.rounds} rounds, {MIN_ROUNDS} at least"
    return None


# -- reasons --------------------------------------------------------------------------------------------------


def drift(
    first: Sums, newest: Sums, draft_tokens: int | None, per_hour: Callable[[], float | None], where: str
) -> Said:
    """The newest window against the first."""
    gap, why = _gap(first, newest, draft_tokens)
    if gap is None or first.length is None or newest.length is None:
        return Said(DRIFT, None, why_not=why)
    kept = first.length - 1
    if gap.low <= LEAST * kept:
        return Said(DRIFT, False, gap.value, gap=gap)
    beyond = gap.low > OTHER_TEXT * kept
    slope = "" if (slow := per_hour()) is None else f", {slow:+.3f} an hour"
    summary = (
        f"Accept length sank from {first.length:.2f} in the first window to {newest.length:.2f}: by {gap.value:.2f} "
        f"({gap.low:.2f} to {gap.high:.2f}{slope}). "
        + (
            "That is more than other text is taken to cost."
            if beyond
            else "Other text can do that too: a restart tells them apart."
        )
    )
    evidence = (
        Evidence("accept length", round(newest.length, 3), round(first.length, 3), f"{where}, {_rounds(newest)}"),
        Evidence("first minus newest", _rounded(gap), f"at most {LEAST * kept:.3f}", _method(newest)),
    )
    return Said(DRIFT, True, gap.value, Finding(DRIFT, "likely", summary, evidence, rivals=_OTHER), gap=gap)


def _gap(first: Sums, newest: Sums, draft_tokens: int | None) -> tuple[Gap | None, str | None]:
    if why := too_few(first) or too_few(newest):
        return None, why
    a, b = ends(first, draft_tokens), ends(newest, draft_tokens)
    if a is None or b is None or first.length is None or newest.length is None:
        return None, "one reading alone says nothing of how far means differ"
    return difference((first.length, *a), (newest.length, *b)), None


def against(expected: Expected, newest: Sums, draft_tokens: int | None, where: str) -> Said:
    """The newest window against what the drafter's files give, or what was asked for."""
    reason = FALLS_SHORT
    length = expected.at(draft_tokens)
    if isinstance(length, str):
        return Said(reason, None, why_not=length)
    if why := too_few(newest):
        return Said(reason, None, why_not=why)
    own = ends(newest, draft_tokens)
    if own is None or newest.length is None:
        return Said(reason, None, why_not="one reading alone says nothing of how far means differ")
    wide = Z / Z_95  # the walk's interval is one of 95 %
    theirs = length.value - wide * (length.value - length.low), length.value + wide * (length.high - length.value)
    gap = difference((length.value, *theirs), (newest.length, *own))
    at = "" if expected.asked is not None or draft_tokens is None else f" at {draft_tokens} drafted tokens"
    evidence = (
        Evidence(f"accept length{at}", round(newest.length, 3), round(length.value, 3), f"{where}, {_rounds(newest)}"),
        Evidence("expected minus observed", _rounded(gap), "an interval that holds 0", _method(newest)),
    )
    reaches = f"The engine reaches {newest.length:.2f}{at}, {expected.source} gives {length.value:.2f}"
    if gap.low > 0:
        return _short(expected, gap, length.value, reaches, evidence)
    if gap.high < 0:
        finding = Finding("observed-exceeds", "note", f"{reaches}: it exceeds that.", evidence)
    else:
        finding = Finding("observed-agrees", "note", f"{reaches}: they agree within what was measured.", evidence)
    return Said(reason, False, gap.value, finding, gap=gap)


def _short(expected: Expected, gap: Gap, value: float, reaches: str, evidence: Sequence[Evidence]) -> Said:
    """Held-out records are not the engine's traffic: within what other text can do it is a note. A length that was
    asked for is the user's own of this traffic."""
    least = LEAST if expected.asked is not None else OTHER_TEXT
    grave = gap.low > least * (value - 1)
    by = f"{reaches}: it falls short by {gap.value:.2f} ({gap.low:.2f} to {gap.high:.2f})."
    if not grave and expected.asked is not None:
        told = f"{by} A loss of a tenth of the tokens kept is not worth a warning."
        return Said(FALLS_SHORT, False, gap.value, Finding("observed-agrees", "note", told, evidence), gap=gap)
    told = by if grave else f"{by} Other text than the drafter's records can do that too."
    finding = Finding(FALLS_SHORT, "likely" if grave else "note", told, evidence, rivals=TRAFFIC)
    return Said(FALLS_SHORT, grave, gap.value, finding, gap=gap)


def idle(intervals: int, needed: int, running: float | None, where: str) -> Said:
    """``intervals`` in a row had requests running and no round."""
    if intervals < needed:
        return Said(IDLE, False if intervals == 0 else None)
    summary = f"{running or 0:.0f} requests run, and no round was drafted in {intervals} intervals."
    evidence = (Evidence("rounds", 0, "more than 0", f"{where}, {intervals} intervals"),)
    return Said(IDLE, True, 1.0, Finding(IDLE, "likely", summary, evidence))


def contradicts(newest: Sums, where: str) -> Said:
    """Counters of a window that cannot be true together, beyond what reading them a step apart explains."""
    reason = CONTRADICT
    if not newest.counted or newest.rounds < MIN_ROUNDS:
        return Said(reason, None)
    slack = CONTRADICTION * max(newest.rounds, newest.accepted)
    broken: list[tuple[str, Any, Any]] = []
    if newest.hits and abs(sum(newest.hits) - newest.accepted) > slack:
        broken.append(("hits by position, summed", sum(newest.hits), newest.accepted))
    if any(b > a + slack for a, b in zip([newest.rounds, *newest.hits], newest.hits, strict=False)):
        broken.append(("hits by position", list(newest.hits), f"never increasing, at most {newest.rounds}"))
    if newest.accepted > newest.drafted + slack:
        broken.append(("accepted tokens", newest.accepted, f"at most {newest.drafted} drafted"))
    if newest.hits and newest.drafted > newest.rounds * len(newest.hits) + slack * len(newest.hits):
        broken.append(("drafted tokens", newest.drafted, f"at most {newest.rounds * len(newest.hits)}"))
    if not broken:
        return Said(reason, False)
    summary = f"The counters contradict one another: {broken[0][0]} are {broken[0][1]}, expected {broken[0][2]}."
    evidence = tuple(Evidence(*one, where) for one in broken)
    return Said(reason, True, 1.0, Finding(reason, "likely", summary, evidence))


def page_contradicts(findings: Sequence[Finding], times: int) -> Said:
    """What the reader of a page found in SGLang's gauges; it stands when three pages in a row say it."""
    grave = next((one for one in findings if one.severity != "note"), None)
    if grave is None:
        return Said(CONTRADICT, False)
    if times < 3:
        return Said(CONTRADICT, None)
    return Said(CONTRADICT, True, 1.0, grave)


def faked(newest: Sequence[Interval], sums: Sums, draft_tokens: int | None, where: str) -> Finding | None:
    """A note, never a warning: numbers no usual text gives, but a loop can."""
    values = {one.value for one in newest}
    if sums.counted:
        odd = sums.rounds >= ALL_KEPT and sums.accepted == sums.drafted > 0
        told = f"every drafted token of {sums.rounds:,} rounds was kept"
    else:
        edge = {1.0, float((draft_tokens or 0) + 1)}
        odd = sums.intervals >= ALIKE and len(values) == 1 and not values <= edge
        told = f"{sums.intervals} readings have the very same length, {sums.length}"
    if not odd:
        return None
    rival = Rival("text-loops", "read some answers: text that repeats itself is drafted without a miss")
    evidence = (Evidence("accept length", sums.length, "lengths that differ", where),)
    return Finding("acceptance-faked", "note", f"{told[0].upper()}{told[1:]}.", evidence, rivals=(rival,))


def _rounds(sums: Sums) -> str:
    return f"{sums.rounds:,} rounds in {sums.intervals} intervals"


def _rounded(gap: Gap) -> list[float]:
    return [round(x, 3) for x in (gap.value, gap.low, gap.high)]


def _method(sums: Sums) -> str:
    units = "intervals taken as independent (Student's t)"
    return f"99.99 %, the wider of Wilson over rounds and {units}" if sums.counted else f"99.99 %, {units}"
