"""vLLM's numbers: its ``SpecDecoding metrics`` lines, its counters on a metrics page, its per-request metrics.

Read from vLLM 0.32.0 (v1/spec_decode/metrics.py, v1/metrics/stats.py) and run there for the fixtures. A line covers
the time since the one before and resets, so lines add up; counters cover the life of the engine. Rounds are in no
line: where every printed digit agrees with drafted / K it is that, else the digits bound them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.engines.scrape import identities
from eyas.engines.scrape.identities import Printed, never_increases, printed
from eyas.engines.scrape.tally import Complaints, Garbled, Settings, argument, count, faked_finding, number, whole
from eyas.results import Finding
from eyas.results.observed import (
    Counts,
    ObservedLength,
    ObservedRate,
    depths_of_hits,
    depths_of_rates,
    length_of_counts,
)

ENGINE = "vllm"
_NUMBER = r"(\d+(?:[.,]\d+)?)"
_LENGTH = re.compile(rf"Mean acceptance length: {_NUMBER}(?=[,\s]|$)")
_ACCEPTED = re.compile(r"Accepted: (\d+) tokens")
_DRAFTED = re.compile(r"Drafted: (\d+) tokens")
_AVERAGE = re.compile(rf"Draft acceptance rate: (?:{_NUMBER}|nan)%")
_RATES = re.compile(r"Per-position acceptance rate: (\d[.,]\d{3}(?:, \d[.,]\d{3})*)(?=, [A-Z]|\s*$)")
_CANDIDATES = 500  # rounds tried where drafted / K does not settle them


def settings(line: str) -> Settings | None:
    """Of a start-up line; None for any other."""
    version = re.search(r"(?:█  version |LLM engine \(v|vLLM (?:API )?server version )v?([0-9][\w.+]*)", line)
    speculative = "num_spec_tokens" in line or "num_speculative_tokens" in line
    faked = _faked(line)
    if version is None and not speculative and faked is None:
        return None
    return Settings(
        version=version.group(1) if version else None,
        draft_tokens=whole(argument(line, "num_speculative_tokens") or argument(line, "num_spec_tokens")),
        top_k=1 if speculative else None,  # chains only
        faked=faked,
    )


def _faked(line: str) -> str | None:
    if argument(line, "rejection_sample_method") != "synthetic":
        return None
    for name in ("synthetic_acceptance_length", "synthetic_acceptance_rates"):
        if (value := argument(line, name)) is not None:
            return f"rejection_sample_method=synthetic, {name}={value}"
    return "rejection_sample_method=synthetic"


class Lines:
    """Sums over ``SpecDecoding metrics`` lines that have equally many rates."""

    def __init__(self, where: str, at: str) -> None:
        self.where, self.at = where, at
        self.seen = self.accepted = self.drafted = 0
        self.positions: int | None = None
        self._low = self._high = 0  # rounds
        self._hits: list[float] = []
        self._slack: list[float] = []
        self._all_drafted = True
        self._padded: set[int] = set()
        self._bonus = 0
        self._first: str | None = None
        self._constant = True
        self._complaints = Complaints(where)

    def add(self, line: str, at: str) -> bool:
        """False where the line is of another number of drafted tokens. Garbled for a line cut short."""
        accepted, drafted = _ACCEPTED.search(line), _DRAFTED.search(line)
        average = _AVERAGE.search(line)
        if accepted is None or drafted is None or average is None:
            raise Garbled
        length, rates = _LENGTH.search(line), _RATES.search(line)
        if (length is None) != (rates is None) or ("Per-position" in line and rates is None):
            raise Garbled
        joint = [printed(text) for text in rates.group(1).split(", ")] if rates else []
        if self.positions is not None and joint and len(joint) != self.positions:
            return False
        self.seen += 1
        self.accepted += int(accepted.group(1))
        self.drafted += int(drafted.group(1))
        self._look_constant(rates.group(1) if rates else None)
        if length is None:  # releases before 0.9 print two counts and a rate
            self._low, self._high, self._all_drafted = -1, -1, False
            return True
        self.positions = len(joint)
        self._line(
            printed(length.group(1)), joint, int(accepted.group(1)), int(drafted.group(1)),
            printed(average.group(1)) if average.group(1) else None, at,
        )  # fmt: skip
        return True

    def _line(
        self, length: Printed, joint: Sequence[Printed], accepted: int, drafted: int, average: Printed | None, at: str
    ) -> None:
        rates = [rate.value for rate in joint]
        total, slack = math.fsum(rates), sum(rate.half for rate in joint)
        inconsistent = self._inconsistent
        if not length.fits(1 + total, slack):
            if length.fits(total, slack):
                self._bonus += 1
                self._complaints.add(
                    "bonus-dropped", "likely", "length", length.value, round(1 + total, 3),
                    "The printed length is the sum of the rates by position, without the bonus token.", at,
                )  # fmt: skip
                length = Printed(length.value + 1, length.half)
            else:
                inconsistent("1 + sum of rates by position", length.value, round(1 + total, 3), at)
        if rates[0] > 1 or not never_increases(rates):
            inconsistent("rates by position", rates, "at most 1, never increasing", at)
        if accepted > drafted:
            inconsistent("accepted tokens", accepted, f"at most {drafted} drafted", at)
        if average is not None and drafted and not average.fits(100 * accepted / drafted):
            inconsistent("average rate in percent", average.value, round(100 * accepted / drafted, 2), at)
        low, high = _rounds(length, accepted, drafted, len(joint))
        if low == high and not length.fits(1 + accepted / low):
            inconsistent("1 + accepted / rounds", length.value, round(1 + accepted / low, 3), at)
        padded = _padding(rates, drafted, low, high)
        if padded:
            self._padded.add(padded)
            low = high = drafted // padded
        self._all_drafted &= low * len(joint) == drafted or bool(padded)
        self._low, self._high = self._low + low, self._high + high
        if not self._hits:
            self._hits, self._slack = [0.0] * len(joint), [0.0] * len(joint)
        for k, rate in enumerate(joint):
            hits, off = _hits(rate, low, high)
            self._hits[k] += hits
            self._slack[k] += off

    def _inconsistent(self, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add(
            "counts-inconsistent", "likely", measure, value, expected,
            f"The {measure} of a line of vLLM contradict its other numbers beyond rounding.", at,
        )  # fmt: skip

    def _look_constant(self, rates: str | None) -> None:
        self._first = self._first if self.seen > 1 else rates
        self._constant &= rates is not None and rates == self._first

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        complaints = self._complaints
        k = min(self._padded) if len(self._padded) == 1 else self.positions
        if self._padded:
            complaints.add(
                "rates-padded", "note", "rates by position", self.positions, k,
                "More rates are printed than tokens were drafted; those behind are zeros that nobody drafted.", "",
            )  # fmt: skip
        if settings.draft_tokens and self.positions and settings.draft_tokens != self.positions and not self._padded:
            complaints.add(
                "rates-at-different-k", "note", "rates by position", self.positions, settings.draft_tokens,
                "The configuration drafts another number of tokens than there are rates.", "",
            )  # fmt: skip
        _constant(complaints, self.seen, self._constant, self._first, self.accepted)
        rounds = self._low if self._low == self._high and self._low > 0 else None
        derived = []
        if rounds is not None:
            how = "drafted / draft_tokens" if self._all_drafted else "the only number that fits every printed digit"
            derived.append(f"rounds: {how}, confirmed by lengths and rates")
        depths, exact = self._depths(rounds, k)
        if exact is not None:
            derived.append("hits by depth: rate x rounds, the only whole number that fits")
        counts = Counts(
            ENGINE, "log lines", f"{self.where}, {self.at}", settings.version, settings.drafter,
            draft_tokens=k or settings.draft_tokens, top_k=1, per_round=k or settings.draft_tokens,
            rounds=rounds, drafted=self.drafted, accepted=self.accepted, depths=depths,
            accept_length=self._length(rounds, exact), accept_rate=_rate(self.accepted, self.drafted),
            rate_definition="accepted / drafted", lines=self.seen, derived=tuple(derived), faked=settings.faked,
        )  # fmt: skip
        return counts, [*faked_finding(settings, self.where), *complaints.findings()]

    def _depths(self, rounds: int | None, k: int | None) -> tuple[Any, list[int] | None]:
        """The curve, and its hits where every one is certain."""
        if self.positions is None or self._high <= 0:
            return None, None
        hits, slack = self._hits[:k], self._slack[:k]
        if rounds is not None and not any(slack):
            whole_hits = [round(hit) for hit in hits]
            if never_increases([hit / rounds for hit in whole_hits]) and sum(whole_hits) == self.accepted:
                return depths_of_hits(whole_hits, rounds), whole_hits
        middle = (self._low + self._high) / 2
        spread = (self._high - self._low) / 2 / middle
        rates = [min(1.0, hit / middle) for hit in hits]
        if not never_increases(rates):
            return None, None
        off = [one / middle + rate * spread for one, rate in zip(slack, rates, strict=True)]
        return depths_of_rates(rates, off, rounds), None

    def _length(self, rounds: int | None, hits: list[int] | None) -> ObservedLength | None:
        if rounds is not None:
            return length_of_counts(self.accepted, rounds, hits)
        if self._low <= 0:
            return None
        value = 1 + self.accepted / ((self._low + self._high) / 2)
        ends = (1 + self.accepted / self._high, 1 + self.accepted / self._low)
        return ObservedLength(value, *ends, "rounding", "1 + accepted / rounds, rounds from the printed lengths")


def _rounds(length: Printed, accepted: int, drafted: int, k: int) -> tuple[int, int]:
    """The fewest and most rounds that a line allows: equal where drafted / K fits, every round having drafted K."""
    fewest = -(-drafted // k)
    if drafted % k == 0 and fewest and length.fits(1 + accepted / fewest):
        return fewest, fewest
    if not accepted or length.low <= 1:
        return fewest, fewest if drafted % k == 0 else drafted
    low = max(fewest, math.ceil(accepted / (length.high - 1) - 1e-9))
    high = math.floor(accepted / (length.low - 1) + 1e-9)
    return (low, high) if low <= high else (fewest, fewest)


def _padding(rates: Sequence[float], drafted: int, low: int, high: int) -> int | None:
    """K where rounds of fewer tokens than there are rates explain the line: drafted / rounds whole, the rest zeros."""
    if low <= 0 or low * len(rates) <= drafted <= high * len(rates):
        return None
    first = max(1, math.ceil(drafted / high))
    whole = [k for k in range(first, len(rates)) if low <= drafted / k <= high and drafted % k == 0]
    return whole[0] if len(whole) == 1 and rates[whole[0] - 1] > 0 and not any(rates[whole[0] :]) else None


def _hits(rate: Printed, low: int, high: int) -> tuple[float, float]:
    """Hits of a depth and how far off they may be; 0 where one whole number fits alone."""
    if low == high:
        first, last = math.ceil(rate.low * low - 1e-6), math.floor(rate.high * low + 1e-6)
        if first == last:
            return float(first), 0.0
    middle = (low + high) / 2
    return rate.value * middle, rate.half * middle


def _rate(accepted: int, drafted: int) -> ObservedRate | None:
    return ObservedRate.counted(accepted, drafted) if drafted > 0 and accepted <= drafted else None


def _constant(complaints: Complaints, lines: int, constant: bool, first: str | None, accepted: int) -> None:
    if lines >= 20 and constant and first and accepted and set(first) - set("10., "):
        complaints.add(
            "acceptance-faked", "note", f"rates of {lines} lines", first, "lines that differ",
            "Every line has the very same rates, as no text gives but a simulation does.", "",
        )  # fmt: skip


# -- counters and bodies --------------------------------------------------------------------------------------


class Exact:
    """Counters of a page, or bodies of requests: everything is counted, so everything must agree."""

    def __init__(self, where: str, at: str, kind: str) -> None:
        assert kind in ("metrics page", "request fields")
        self.where, self.at, self.kind = where, at, kind
        self.seen = self.rounds = self.drafted = self.accepted = 0
        self.hits: list[int] = []
        self._emitted: int | None = 0
        self._complaints = Complaints(where)

    def add_body(self, body: Mapping[str, Any], emitted: int | None, at: str) -> bool:
        """``metrics.speculative_decoding`` of one response; False where it drafted another number of tokens."""
        try:
            histogram = [count(value) for value in body["acceptance_histogram"]]
            rounds, accepted = count(body["num_spec_steps"]), count(body["num_accepted_draft_tokens"])
            drafted, k = count(body["num_draft_tokens"]), count(body["num_spec_tokens"])
            length = number(body["mean_acceptance_length"])
        except (KeyError, TypeError) as error:
            raise Garbled from error
        if self.hits and len(histogram) - 1 != len(self.hits):
            return False
        hits = identities.hits_from_histogram(histogram)
        if not hits or len(hits) != k:
            raise Garbled
        self.hits = [a + b for a, b in zip(self.hits or [0] * k, hits, strict=True)]
        self.seen, self.rounds = self.seen + 1, self.rounds + rounds
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self._check(rounds, drafted, accepted, hits, at, sum(histogram))
        if rounds and not Printed(length, 1e-6).fits(1 + accepted / rounds):
            dropped = Printed(length, 1e-6).fits(accepted / rounds)
            self._say("bonus-dropped" if dropped else "counts-inconsistent", "mean_acceptance_length", length,
                      1 + accepted / rounds, at)  # fmt: skip
        self._emitted = None if emitted is None or self._emitted is None else self._emitted + emitted
        return True

    def set_page(self, rounds: int, drafted: int, accepted: int, hits: Sequence[int]) -> None:
        """The newest state of an engine's counters."""
        self.seen += 1
        self.rounds, self.drafted, self.accepted, self.hits = rounds, drafted, accepted, list(hits)
        self._emitted = None

    def _say(self, cause: str, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add(
            cause, "likely", measure, value, expected, f"{measure} contradicts the counts beside it.", at
        )

    def _check(self, rounds: int, drafted: int, accepted: int, hits: Sequence[int], at: str, total: int | None) -> None:
        if total is not None and total != rounds:
            self._say("counts-inconsistent", "rounds in the histogram", total, rounds, at)
        if hits and sum(hits) != accepted:
            self._say("counts-inconsistent", "hits by position, summed", sum(hits), accepted, at)
        if any(b > a for a, b in zip([rounds, *hits], hits, strict=False)):
            self._say("counts-inconsistent", "hits by position", list(hits), f"never increasing, at most {rounds}", at)
        if accepted > drafted:
            self._say("counts-inconsistent", "accepted tokens", accepted, f"at most {drafted} drafted", at)
        if hits and drafted > rounds * len(hits):
            self._say("counts-inconsistent", "drafted tokens", drafted, f"at most {rounds * len(hits)}", at)

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        k: int | None = len(self.hits) or settings.draft_tokens
        if self.kind == "metrics page":
            self._check(self.rounds, self.drafted, self.accepted, self.hits, "", None)
        if k and self.rounds and self.drafted % self.rounds == 0 and self.drafted // self.rounds < k:
            real = self.drafted // self.rounds
            if real and not any(self.hits[real:]):
                self._complaints.add(
                    "rates-padded", "note", "positions", k, real, "More positions are listed than were drafted.", ""
                )
                k, self.hits = real, self.hits[:real]
        self._after_the_end()
        broken = "counts-inconsistent" in self._complaints
        hits = self.hits if self.hits and not broken else None
        counts = Counts(
            ENGINE, self.kind, f"{self.where}, {self.at}" if self.at else self.where,  # type: ignore[arg-type]
            settings.version, settings.drafter, draft_tokens=k, top_k=1, per_round=k,
            rounds=self.rounds, drafted=self.drafted, accepted=self.accepted, emitted=self._emitted,
            depths=depths_of_hits(hits, self.rounds) if hits else None,
            accept_length=length_of_counts(self.accepted, self.rounds, hits),
            accept_rate=_rate(self.accepted, self.drafted), rate_definition="accepted / drafted",
            lines=self.seen, faked=settings.faked,
        )  # fmt: skip
        return counts, [*faked_finding(settings, self.where), *self._complaints.findings()]

    def _after_the_end(self) -> None:
        """Outputs hold the tokens of rounds and the one of prefill; what is missing was counted behind the end."""
        if self._emitted is None or not self.rounds:
            return
        most = self.accepted + self.rounds + self.seen
        if self._emitted < self.accepted + self.rounds:
            self._complaints.add(
                "tokens-after-end-counted", "note", "tokens in the outputs", self._emitted, f"{most}, were none cut",
                "Rounds are counted whole although the text ended inside some, so the length is a little too high.", "",
            )  # fmt: skip
