"""SGLang's numbers: its decode lines, its gauges on a metrics page, its per-request fields, its server info.

Read from the wheels of 0.4.9, 0.5.6, 0.5.8, 0.5.10, 0.5.15 and 0.5.23, and run from some of them for the fixtures. A
decode line covers the rounds since the one before and prints two rounded means, no counts. D below is
``speculative_num_draft_tokens``, the tokens verified in a round: K + 1 of a chain, nodes of a tree.

    accept len                  correct drafts / rounds + 1, in every release
    accept rate, old            accept len / D                        log and gauges of 0.5.6 to 0.5.10
    accept rate, new            correct drafts / (rounds x (D - 1))   log and gauges of 0.5.15 and later; request fields
    accept length of a request  completion tokens / rounds            the token of prefill in it, cut at the text's end

Which of the two a rate is, is told by which D makes it true of every line, never by a version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.engines.scrape import identities
from eyas.engines.scrape.identities import Denominator, Printed, printed
from eyas.engines.scrape.tally import Complaints, Garbled, Settings, argument, count, faked_finding, number, whole
from eyas.results import Finding
from eyas.results.observed import (
    Counts,
    Kind,
    ObservedLength,
    ObservedRate,
    depths_of_hits,
    length_of_counts,
)

ENGINE = "sglang"
NEW, OLD = "correct drafts / (rounds x per_round)", "accept length / (draft tokens verified in a round)"
_LINE = re.compile(r"accept len: (\d+[.,]\d+)(?=,|\s*$)(?:, accept rate: (\d+[.,]\d+)(?=,|\s*$))?")
_PAIRS = 20_000
_RUNNING = re.compile(r"#running-req: (\d+)")
_FAKED = re.compile(r"(SGLANG_SIMULATE_ACC_LEN)['\"]?\s*[=:]\s*['\"]?(\d+(?:\.\d+)?)")


def settings(line: str) -> Settings | None:
    """Of a start-up line, a command line or an environment; None for any other."""
    faked = _FAKED.search(line)
    wanted = faked is not None and float(faked.group(2)) > 0
    if "server_args" not in line and "speculative" not in line and not wanted:
        return None
    verified, top_k = (
        whole(argument(line, "speculative_num_draft_tokens")),
        whole(argument(line, "speculative_eagle_topk")),
    )
    if verified is None and top_k is None and not wanted:
        return None
    return Settings(
        draft_tokens=_chain(verified, top_k),
        top_k=top_k,
        verified=verified,
        faked=f"{faked.group(1)}={faked.group(2)}" if faked is not None and wanted else None,
    )


def _chain(verified: int | None, top_k: int | None) -> int | None:
    """K of a chain; a tree drafts fewer tokens in a row than it has nodes."""
    return verified - 1 if verified and top_k == 1 else None


class Means:
    """Decode lines, or readings of the gauges: pairs of a mean length and a rate, without counts."""

    def __init__(self, where: str, at: str, kind: Kind) -> None:
        self.where, self.at, self.kind = where, at, kind
        self.seen = 0
        self.rounds: int | None = None  # of the life of the server; only a page has it
        self.gauged: int | None = None  # D as a gauge says
        self._weighted = self._weights = self._half = 0.0
        self._low, self._high = float("inf"), 0.0
        self._old, self._new = Denominator(), Denominator()
        self._rates, self._rate_half = 0.0, 0.0
        self._rated = 0
        self._pairs: set[tuple[float, float]] = set()  # those that the two below have seen
        self._ragged = False
        self._complaints = Complaints(where)

    def add_line(self, line: str) -> None:
        found = _LINE.search(line)
        if found is None:
            raise Garbled
        running = _RUNNING.search(line)
        weight = int(running.group(1)) if running else 1
        self._ragged |= "cap len:" in line
        self.add(printed(found.group(1)), printed(found.group(2)) if found.group(2) else None, max(1, weight))

    def add(self, length: Printed, rate: Printed | None, weight: int = 1) -> None:
        self.seen += 1
        self._weighted += weight * length.value
        self._weights += weight
        self._half = max(self._half, length.half)
        self._low, self._high = min(self._low, length.value), max(self._high, length.value)
        if rate is not None:
            self._rated += 1
            self._rates += weight * rate.value
            self._rate_half = max(self._rate_half, rate.half)
            pair = (length.value, rate.value)
            if pair not in self._pairs:
                if len(self._pairs) < _PAIRS:
                    self._pairs.add(pair)
                self._old.add(length, rate)
                self._new.add(Printed(length.value - 1, length.half), rate)

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        verified = self.gauged or settings.verified
        definition, per_round, derived = self._definition(verified, settings.top_k)
        self._judge(definition, verified, settings.top_k)
        value = self._weighted / self._weights if self._weights else None
        k = settings.draft_tokens or _chain(verified, settings.top_k)
        rounds = f"; rounds of the server's life, the means of its last {self.seen} readings" if self.rounds else ""
        if self.seen > 1:
            derived.append(
                "accept length: mean of the lines, each weighted by its running requests; no line has counts"
            )
        counts = Counts(
            ENGINE, self.kind, f"{self.where}, {self.at}" if self.at else self.where,
            settings.version, settings.drafter, draft_tokens=k, top_k=settings.top_k, per_round=per_round,
            rounds=self.rounds,
            accept_length=None if value is None else ObservedLength(
                value, max(1.0, value - self._half), value + self._half, "rounding",
                f"mean of {self.seen:,} printed means, from {self._low:.2f} to {self._high:.2f}{rounds}",
            ),
            accept_rate=ObservedRate.printed(self._rates / self._weights, self._rate_half) if self._rated else None,
            rate_definition=definition, lines=self.seen, derived=tuple(derived), faked=settings.faked,
        )  # fmt: skip
        return counts, [*faked_finding(settings, self.where), *self._complaints.findings()]

    def _definition(self, verified: int | None, top_k: int | None) -> tuple[str | None, int | None, list[str]]:
        """Which rate it is, and what it is divided by in a round; None where both fit, or neither."""
        if not self._rated or self._ragged:
            return None, None, []
        if verified is not None:
            old, new = self._old.holds(verified), self._new.holds(verified - 1)
            if old == new:
                return None, None, []
            return (OLD, verified, []) if old else (NEW, verified - 1, [])
        old_d, new_d = self._old.wholes(), self._new.wholes()
        if bool(old_d) == bool(new_d) or len(old_d or new_d) > 1:
            return None, None, []
        definition, per_round = (OLD, old_d[0]) if old_d else (NEW, new_d[0])
        return definition, per_round, [f"per_round: the only whole number that fits all {self._rated:,} pairs"]

    def _judge(self, definition: str | None, verified: int | None, top_k: int | None) -> None:
        complaints = self._complaints
        if definition == OLD:
            complaints.add(
                "rate-definition-old", "note", "accept rate x per_round", "accept len", "accept len - 1",
                "The accept rate is length / tokens verified, SGLang's old definition: the bonus token is in it.", "",
            )  # fmt: skip
        if top_k is not None and top_k > 1:
            complaints.add(
                "tree-denominator", "note", "top-k", top_k, 1,
                "The accept rate is over the nodes of a tree; no chain's rate compares with it.", "",
            )  # fmt: skip
        if self._rated and not self._ragged and definition is None:
            self._neither(verified)
        if verified and self._high > verified + self._half:
            complaints.add(
                "counts-inconsistent", "likely", "accept len", self._high, f"at most {verified}",
                "A round cannot keep more tokens than it verifies.", "",
            )  # fmt: skip
        if self._high and self._low < 1 - self._half:
            complaints.add(
                "bonus-dropped", "likely", "accept len", self._low, "at least 1",
                "A round always gives one token, so a length below 1 lacks it.", "",
            )  # fmt: skip
        if self.kind == "log lines" and self.seen >= 20 and self._low == self._high > 1 and self._high != verified:
            complaints.add(
                "acceptance-faked", "note", f"accept len of {self.seen} lines", self._low, "lines that differ",
                "Every line has the very same length, as no text gives but a simulation does.", "",
            )  # fmt: skip

    def _neither(self, verified: int | None) -> None:
        """No whole D makes the pairs true, or not the configured one; silent where there is too little to tell."""

        def empty(one: Denominator) -> bool:
            return one.low > one.high + 1e-9

        if verified is not None:
            wrong = not self._old.holds(verified) and not self._new.holds(verified - 1)
        else:
            wrong = empty(self._old) and empty(self._new)
        if wrong:
            span = f"{self._new.low:.2f} to {self._new.high:.2f}"
            self._complaints.add(
                "counts-inconsistent", "likely", "(accept len - 1) / accept rate", span,
                verified - 1 if verified else "one whole number for all lines",
                "Neither definition of the accept rate agrees with the lengths: several settings in one text, "
                "or draft tokens changed while it ran.", "",
            )  # fmt: skip


class Requests:
    """``meta_info`` or ``spec_tokens_details`` of responses: counts, but a length that is not the log's."""

    def __init__(self, where: str, at: str) -> None:
        self.where, self.at = where, at
        self.seen = self.rounds = 0
        self._accepted: int | None = 0
        self._drafted: int | None = 0
        self._emitted: int | None = 0
        self._histogram: list[int] | None = []
        self._per_round: set[int] = set()
        self._complaints = Complaints(where)

    def add(self, fields: Mapping[str, Any], at: str) -> None:
        """Garbled where a count is none. Rounds without drafts (verify_ct 0) are a request without speculation."""
        rounds = count(fields["spec_verify_ct"])
        if not rounds:
            return
        accepted = _first(fields, "spec_num_correct_drafts", "spec_accept_token_num")
        drafted = _first(fields, "spec_num_proposed_drafts", "spec_draft_token_num")
        emitted = count(fields["completion_tokens"]) if fields.get("completion_tokens") is not None else None
        histogram = fields.get("spec_correct_drafts_histogram") or fields.get("spec_accept_histogram") or None
        steps = [count(value) for value in histogram] if isinstance(histogram, Sequence) else None
        self.seen, self.rounds = self.seen + 1, self.rounds + rounds
        self._accepted, self._drafted = _plus(self._accepted, accepted), _plus(self._drafted, drafted)
        self._emitted = _plus(self._emitted, emitted)
        self._histogram = _added(self._histogram, steps)
        if accepted is not None and drafted is not None:
            self._check(rounds, accepted, drafted, fields, at)
        if steps is not None and accepted is not None:
            kept = sum(j * n for j, n in enumerate(steps))
            if (sum(steps), kept) != (rounds, accepted):
                self._wrong("rounds and drafts in the histogram", [sum(steps), kept], [rounds, accepted], at)
        if emitted is not None and accepted is not None and emitted > 1 + accepted + rounds:
            self._wrong("completion_tokens", emitted, f"at most {1 + accepted + rounds}", at)

    def _check(self, rounds: int, accepted: int, drafted: int, fields: Mapping[str, Any], at: str) -> None:
        if drafted % rounds:
            self._wrong("drafts proposed", drafted, f"a multiple of {rounds} rounds", at)
        else:
            self._per_round.add(drafted // rounds)
        if accepted > drafted:
            self._wrong("correct drafts", accepted, f"at most {drafted}", at)
        if fields.get("spec_accept_rate") is not None and drafted:
            rate, new = number(fields["spec_accept_rate"]), accepted / drafted
            old = (accepted + rounds) / (drafted + rounds)
            if not Printed(rate, 1e-4).fits(new):
                if Printed(rate, 1e-4).fits(old):
                    self._complaints.add(
                        "rate-definition-old", "note", "spec_accept_rate", rate, new,
                        "The accept rate counts the bonus token, SGLang's old definition.", at,
                    )  # fmt: skip
                else:
                    self._wrong("spec_accept_rate", rate, new, at)

    def _wrong(self, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add(
            "counts-inconsistent",
            "likely",
            measure,
            value,
            expected,
            f"{measure}: contradicts the counts beside it.",
            at,
        )

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        per_round = self._per_round.pop() if len(self._per_round) == 1 else None
        broken = "counts-inconsistent" in self._complaints
        hits = identities.hits_from_histogram(self._histogram) if self._histogram and not broken else None
        k = settings.draft_tokens or _chain(settings.verified or (per_round + 1 if per_round else None), settings.top_k)
        if hits is not None and k:
            hits += [0] * (k - len(hits))  # the list ends with the most that was ever kept
        self._after_the_end()
        if settings.top_k is not None and settings.top_k > 1:
            self._complaints.add(
                "tree-denominator", "note", "top-k", settings.top_k, 1,
                "The accept rate is over the nodes of a tree; no chain's rate compares with it.", "",
            )  # fmt: skip
        rate = None
        if self._accepted is not None and self._drafted and self._accepted <= self._drafted:
            rate = ObservedRate.counted(self._accepted, self._drafted)
        counts = Counts(
            ENGINE, "request fields", f"{self.where}, {self.at}" if self.at else self.where,
            settings.version, settings.drafter, draft_tokens=k, top_k=settings.top_k, per_round=per_round,
            rounds=self.rounds, drafted=self._drafted, accepted=self._accepted, emitted=self._emitted,
            depths=depths_of_hits(hits, self.rounds) if hits else None, accept_length=self._length(k, hits),
            accept_rate=rate, rate_definition=NEW if rate else None, lines=self.seen, faked=settings.faked,
        )  # fmt: skip
        return counts, [*faked_finding(settings, self.where), *self._complaints.findings()]

    def _length(self, k: int | None, hits: list[int] | None) -> ObservedLength | None:
        if self._accepted is not None:
            return length_of_counts(self._accepted, self.rounds, hits)
        if self._emitted is None or not self.rounds:
            return None
        least = (self._emitted - self.seen) / self.rounds  # the last round may have been cut
        most = least + k * self.seen / self.rounds if k else None
        return ObservedLength(
            max(1.0, least), max(1.0, least), most, "at least", "(completion tokens - requests) / rounds"
        )

    def _after_the_end(self) -> None:
        if self._accepted is None or self._emitted is None:
            return
        full = self._accepted + self.rounds + self.seen
        if self._emitted < full and "counts-inconsistent" not in self._complaints:
            self._complaints.add(
                "tokens-after-end-counted", "note", "tokens in the outputs", self._emitted, full,
                "Rounds are counted whole although the text ended inside some, so the length is a little too high.", "",
            )  # fmt: skip


def _first(fields: Mapping[str, Any], *names: str) -> int | None:
    return next((count(fields[name]) for name in names if fields.get(name) is not None), None)


def _plus(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more


def _added(so_far: list[int] | None, more: list[int] | None) -> list[int] | None:
    if so_far is None or more is None:
        return None
    length = max(len(so_far), len(more))
    return [sum(values) for values in zip(*(one + [0] * (length - len(one)) for one in (so_far, more)), strict=True)]
