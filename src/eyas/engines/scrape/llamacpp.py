"""llama.cpp's numbers: a line a request, a line a drafter since the server's start, ``timings`` of a response.

Read from llama.cpp's tools/server/server-context.cpp and common/speculative.cpp in several states of 2025 and 2026:

    draft acceptance rate = 0.64479 (  167 accepted /   259 generated)
    draft acceptance = 0.64479 (  167 accepted /   259 generated), mean len =  2.92    (for a while followed by
        "mean acceptance length = …, acceptance rate per position = (0.805, …)", later by a line "acc per pos = (…)")
    statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, …, #gen tokens = 259, #acc tokens = 167, …

A round stops drafting early (p-min), so drafted / rounds may be below K. A statistics line counts since the start, so
the last one holds all; its third call count is the rounds. Where there is one, request lines add nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eyas.engines.scrape.identities import never_increases, printed
from eyas.engines.scrape.tally import Complaints, Garbled, Settings, argument, count, faked_finding, whole
from eyas.results import Finding
from eyas.results.observed import (
    Counts,
    Kind,
    ObservedDepth,
    ObservedLength,
    ObservedRate,
    depths_of_hits,
    depths_of_rates,
    length_of_counts,
)

ENGINE = "llama.cpp"
_NUMBER = r"(\d+[.,]\d+)"
_REQUEST = re.compile(rf"draft acceptance(?: rate)? = {_NUMBER} \(\s*(\d+) accepted /\s*(\d+) generated\)")
_MEAN = re.compile(rf"mean (?:acceptance length|len) =\s*{_NUMBER}")
_STATISTICS = re.compile(
    r"statistics\s+(\S+): #calls(?:\(b,g,a\))? =\s*(\d+)(?:\s+(\d+)\s+(\d+))?"
    r".*#gen tokens =\s*(\d+), #acc tokens =\s*(\d+)"
)
_STATISTICS_MEAN = re.compile(rf"#mean acc len =\s*{_NUMBER}")
_RATES = re.compile(r"(?:acceptance rate per position|acc per pos|#acc rate/pos) = \(([\d.,\s]*)\)")


def settings(line: str) -> Settings | None:
    build = re.search(r"\bbuild(?:_info)?: (?:b?(\d+)[ -]\(?([0-9a-f]{6,12}))", line)
    drafted = argument(line, "spec-draft-n-max") or argument(line, "draft-max")
    if build is None and drafted is None:
        return None
    return Settings(version=f"b{build.group(1)}" if build else None, draft_tokens=whole(drafted))


def loads(line: str) -> bool:
    """A server that begins."""
    return "loading model" in line


class Drafter:
    """The newest statistics line of one drafter of a server."""

    def __init__(self, where: str, at: str, name: str) -> None:
        self.where, self.at, self.name = where, at, name
        self.seen = self.drafted = self.accepted = 0
        self.rounds: int | None = None
        self._line = ""
        self._complaints = Complaints(where)

    @staticmethod
    def name_of(line: str) -> str:
        found = _STATISTICS.search(line)
        if found is None:
            raise Garbled
        return found.group(1)

    def add(self, line: str, at: str) -> bool:
        """False where a counter fell: another server."""
        found = _STATISTICS.search(line)
        assert found is not None
        drafted, accepted = int(found.group(5)), int(found.group(6))
        if drafted < self.drafted or accepted < self.accepted:
            return False
        self.seen += 1
        self.drafted, self.accepted, self._line = drafted, accepted, line
        self.rounds = int(found.group(4)) if found.group(4) else None
        mean = _STATISTICS_MEAN.search(line)
        if accepted > drafted:
            self._wrong("accepted tokens", accepted, f"at most {drafted}", at)
        if mean and self.rounds and not printed(mean.group(1)).fits(1 + accepted / self.rounds):
            self._length(printed(mean.group(1)).value, accepted / self.rounds, at)
        return True

    def _length(self, mean: float, kept: float, at: str) -> None:
        dropped = abs(mean - kept) <= 0.005 + 1e-9
        self._complaints.add(
            "bonus-dropped" if dropped else "counts-inconsistent", "likely", "mean length", mean, round(1 + kept, 3),
            "The mean length is not 1 + accepted / rounds.", at,
        )  # fmt: skip

    def _wrong(self, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add("counts-inconsistent", "likely", measure, value, expected, f"{measure}: impossible.", at)

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        depths = hits = None
        found = _RATES.search(self._line)
        if found and self.rounds:
            depths, hits = _curve(found.group(1), self.rounds, self.accepted)
            if depths is None:
                self._wrong(
                    "rates by position", found.group(1), "1 or less, never increasing, their sum the length", ""
                )
        return _counts(self, settings, "log lines", self.rounds, depths, hits, drafter=self.name), [
            *faked_finding(settings, self.where),
            *self._complaints.findings(),
        ]


class Requests:
    """Request lines, or ``timings`` of responses: drafted and accepted, and seldom rounds."""

    def __init__(self, where: str, at: str, kind: Kind) -> None:
        self.where, self.at, self.kind = where, at, kind
        self.seen = self.drafted = self.accepted = 0
        self._low: float | None = 0.0
        self._high: float | None = 0.0
        self._emitted: int | None = 0
        self._complaints = Complaints(where)

    def add_line(self, line: str, at: str) -> None:
        found = _REQUEST.search(line)
        if found is None:
            if _RATES.search(line):
                return  # the trace line that follows
            raise Garbled
        rate, accepted, drafted = printed(found.group(1)), int(found.group(2)), int(found.group(3))
        self._add(drafted, accepted, None, at)
        if drafted and not rate.fits(accepted / drafted):
            self._wrong("draft acceptance", rate.value, accepted / drafted, at)
        mean = _MEAN.search(line)
        if mean is None or self._low is None or self._high is None:
            self._low = self._high = None
            return
        length = printed(mean.group(1))
        if length.value < 1 - length.half:
            self._complaints.add(
                "bonus-dropped", "likely", "mean length", length.value, "at least 1", "A length below 1.", at
            )
        self._low += accepted / max(length.high - 1, 1e-9) if accepted else 0
        self._high += accepted / max(length.low - 1, 1e-9) if accepted else 0

    def add_timings(self, timings: Mapping[str, Any], at: str) -> None:
        emitted = count(timings["predicted_n"]) if timings.get("predicted_n") is not None else None
        self._add(count(timings["draft_n"]), count(timings["draft_n_accepted"]), emitted, at)
        self._low = self._high = None

    def _add(self, drafted: int, accepted: int, emitted: int | None, at: str) -> None:
        self.seen += 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self._emitted = None if emitted is None or self._emitted is None else self._emitted + emitted
        if accepted > drafted:
            self._wrong("accepted tokens", accepted, f"at most {drafted}", at)
        if emitted is not None and accepted >= max(emitted, 1):
            self._complaints.add(
                "tokens-after-end-counted", "likely", "accepted tokens", accepted, f"below {emitted} tokens of output",
                "More drafted tokens were counted as accepted than the output has room for.", at,
            )  # fmt: skip

    def _wrong(self, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add("counts-inconsistent", "likely", measure, value, expected, f"{measure}: impossible.", at)

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        counts = _counts(
            self, settings, self.kind, None, None, None, emitted=self._emitted, span=(self._low, self._high)
        )
        return counts, [*faked_finding(settings, self.where), *self._complaints.findings()]


def _counts(
    tally: Drafter | Requests,
    settings: Settings,
    kind: Kind,
    rounds: int | None,
    depths: tuple[ObservedDepth, ...] | None,
    hits: list[int] | None,
    *,
    drafter: str | None = None,
    emitted: int | None = None,
    span: tuple[float | None, float | None] = (None, None),
) -> Counts:
    length = None
    if rounds:
        length = length_of_counts(tally.accepted, rounds, hits)
    elif span[0] and span[1]:
        middle = 1 + tally.accepted / ((span[0] + span[1]) / 2)
        ends = 1 + tally.accepted / span[1], 1 + tally.accepted / span[0]
        length = ObservedLength(middle, *ends, "rounding", "1 + accepted / rounds, rounds from the printed lengths")
    whole_rate = tally.accepted <= tally.drafted and tally.drafted > 0
    return Counts(
        ENGINE, kind, f"{tally.where}, {tally.at}" if tally.at else tally.where, settings.version, drafter,
        draft_tokens=settings.draft_tokens, top_k=1, rounds=rounds, drafted=tally.drafted, accepted=tally.accepted,
        emitted=emitted, depths=depths, accept_length=length,
        accept_rate=ObservedRate.counted(tally.accepted, tally.drafted) if whole_rate else None,
        rate_definition="accepted / drafted", lines=tally.seen,
        derived=("hits by depth: rate x rounds, the only whole number that fits",) if hits else (),
        faked=settings.faked,
    )  # fmt: skip


def _curve(text: str, rounds: int, accepted: int) -> tuple[tuple[ObservedDepth, ...] | None, list[int] | None]:
    """The curve of printed rates, and its hits where they are certain; (None, None) where it cannot be."""
    joint = [printed(one) for one in text.split(", ") if one.strip()]
    rates = [one.value for one in joint]
    if not rates or not never_increases(rates):
        return None, None
    if abs(sum(rates) - accepted / rounds) > sum(one.half for one in joint) + 1e-9:
        return None, None
    hits = [round(rate * rounds) for rate in rates]
    sure = all(one.half * rounds < 0.5 for one in joint) and sum(hits) == accepted
    if sure:
        return depths_of_hits(hits, rounds), hits
    return depths_of_rates(rates, [one.half for one in joint], rounds), None
