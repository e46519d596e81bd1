"""JSON: responses, server info and iteration statistics, wherever in a body their fields lie.

TensorRT-LLM's ``specDecodingStats`` are read here too: counts of one iteration, of which every request with a draft is
one round; its ``acceptanceLength`` is (accepted + requests) / requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eyas.engines.scrape.identities import Printed
from eyas.engines.scrape.tally import Complaints, Garbled, Settings, count, faked_finding, literal, number
from eyas.results import Finding
from eyas.results.observed import Counts, ObservedRate, length_of_counts

DEEPEST = 12
_FIELD = {
    "sglang": "spec_verify_ct",
    "vllm": "acceptance_histogram",
    "llama.cpp": "draft_n_accepted",
    "tensorrt-llm": "numRequestsWithDraftTokens",
    "sglang info": "avg_spec_accept_length",
    "sglang settings": "speculative_num_draft_tokens",
}


class Found(NamedTuple):
    kind: str
    fields: Mapping[str, Any]
    emitted: int | None  # completion tokens of the response around it


def walk(value: Any, emitted: int | None = None, depth: int = 0) -> Iterator[Found]:
    """Every object in a body that holds numbers of speculation, with the usage of the response it lies in."""
    if depth > DEEPEST:
        return
    if isinstance(value, list):
        for item in value:
            yield from walk(item, emitted, depth + 1)
    if not isinstance(value, dict):
        return
    usage = value.get("usage")
    if isinstance(usage, dict) and type(usage.get("completion_tokens")) is int:
        emitted = usage["completion_tokens"]
    kinds = [kind for kind, name in _FIELD.items() if name in value]
    for kind in kinds:
        yield Found(kind, value, emitted)
    for key, item in value.items():
        if key != "usage":
            yield from walk(item, emitted, depth + 1)


_PRINTED = re.compile(
    r"['\"](spec_\w+|completion_tokens|e2e_latency)['\"]: (-?\d+(?:\.\d+)?(?:e-?\d+)?|\[[\d, ]*\])(?=[,}\s])"
)


def printed_fields(line: str) -> dict[str, Any]:
    """The fields of a response that a log printed as Python does (SGLang's ``--log-requests``)."""
    start = line.rfind("meta_info")
    fields = {name: literal(value) for name, value in _PRINTED.findall(line[max(start, 0) :])}
    if "spec_verify_ct" not in fields:
        raise Garbled
    return fields


def settings(fields: Mapping[str, Any]) -> Settings:
    """Of SGLang's server info."""
    verified, top_k, version = (
        fields.get(name) for name in ("speculative_num_draft_tokens", "speculative_eagle_topk", "version")
    )
    verified = verified if type(verified) is int else None
    top_k = top_k if type(top_k) is int else None
    return Settings(
        version=version if isinstance(version, str) else None,
        verified=verified,
        top_k=top_k,
        draft_tokens=verified - 1 if verified and top_k == 1 else None,
    )


class Iterations:
    """TensorRT-LLM's iteration statistics, added up."""

    engine = "tensorrt-llm"

    def __init__(self, where: str, at: str) -> None:
        self.where, self.at = where, at
        self.seen = self.rounds = self.drafted = self.accepted = 0
        self._complaints = Complaints(where)

    def add(self, fields: Mapping[str, Any], at: str) -> None:
        try:
            drafted, accepted = count(fields["numDraftTokens"]), count(fields["numAcceptedTokens"])
            rounds = count(fields["numRequestsWithDraftTokens"])
        except KeyError as error:
            raise Garbled from error
        if not rounds:
            return
        self.seen += 1
        self.rounds, self.drafted, self.accepted = (
            self.rounds + rounds,
            self.drafted + drafted,
            self.accepted + accepted,
        )
        if accepted > drafted:
            self._say("counts-inconsistent", "numAcceptedTokens", accepted, f"at most {drafted}", at)
        if fields.get("acceptanceLength") is not None:
            length = Printed(number(fields["acceptanceLength"]), 1e-3)
            if not length.fits(1 + accepted / rounds):
                cause = "bonus-dropped" if length.fits(accepted / rounds) else "counts-inconsistent"
                self._say(cause, "acceptanceLength", length.value, round(1 + accepted / rounds, 4), at)

    def _say(self, cause: str, measure: str, value: Any, expected: Any, at: str) -> None:
        self._complaints.add(
            cause, "likely", measure, value, expected, f"{measure} contradicts the counts beside it.", at
        )

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        sound = self.accepted <= self.drafted
        counts = Counts(
            self.engine, "request fields", f"{self.where}, {self.at}" if self.at else self.where, settings.version,
            rounds=self.rounds, drafted=self.drafted, accepted=self.accepted,
            accept_length=length_of_counts(self.accepted, self.rounds) if sound else None,
            accept_rate=ObservedRate.counted(self.accepted, self.drafted) if sound and self.drafted else None,
            rate_definition="accepted / drafted", lines=self.seen, faked=settings.faked,
        )  # fmt: skip
        return counts, [*faked_finding(settings, self.where), *self._complaints.findings()]
