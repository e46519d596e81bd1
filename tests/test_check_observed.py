"""An engine's log beside the walk: faults of the log first, then whether the engine reaches what the files can do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eyas.check import Case
from eyas.check.observed import difference, judge_observed, rounds_of
from eyas.engines import scrape
from eyas.results import Finding, LengthCounts
from eyas.results.observed import Counts, length_of_counts

RECORDED = Path(__file__).parent / "fixtures" / "engines"
VLLM = json.loads((RECORDED / "metrics-vllm-0.32.0.json").read_text(encoding="utf-8"))["cases"][0]


def walked(accepted: float, draft_tokens: int = 3, rounds: int = 40, records: int = 50) -> LengthCounts:
    """A walk that keeps ``accepted`` tokens a round, a little more in every other record."""
    kept = np.asarray([round((accepted + (0.1 if i % 2 else -0.1)) * rounds) for i in range(records)])
    return LengthCounts(draft_tokens, np.full(records, rounds), kept)


def case_of(*lengths: LengthCounts) -> Case:
    return Case("d", measured=SimpleNamespace(walk=object(), lengths=list(lengths)))  # type: ignore[arg-type]


def counts(accepted: int, total: int, **more: object) -> Counts:
    length = length_of_counts(accepted, total)
    given = {"draft_tokens": 1, "rounds": total, "accepted": accepted, "accept_length": length, **more}
    return Counts("vllm", "log lines", "engine.log", **given)  # type: ignore[arg-type]


def told(case: Case, run: Counts, *findings: Finding) -> tuple[dict[str, str], str]:
    judge_observed(case, [run], findings)
    return {f.cause: f.severity for f in case.findings}, " ".join(n.why for n in case.not_checked)


def test_a_recorded_log_that_agrees() -> None:
    reading = scrape.read(["\n".join(VLLM["lines"]).encode()], "engine.log")
    (run,) = reading.observed
    assert (run.draft_tokens, run.rounds) == (3, VLLM["truth"]["rounds"])
    expected = VLLM["truth"]["accepted"] / VLLM["truth"]["rounds"]
    case = case_of(walked(0.7), walked(1.4, 2), walked(expected))
    judge_observed(case, reading.observed, reading.findings)
    assert [f.cause for f in case.findings] == ["observed-agrees"]
    assert case.findings[0].evidence[0].expected == pytest.approx(1 + expected, abs=0.02)


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        (100, {"engine-falls-short": "likely"}),
        (500, {"engine-falls-short": "note"}),
        (690, {"observed-agrees": "note"}),
        (900, {"observed-exceeds": "note"}),
    ],
)
def test_the_engine_against_the_files(accepted: int, expected: dict[str, str]) -> None:
    case = case_of(walked(0.7, 1))
    assert told(case, counts(accepted, 1000)) == (expected, "")
    if accepted == 100:
        finding = case.findings[0]
        assert "falls short by 0.60" in finding.summary
        assert {rival.cause for rival in finding.rivals} == {"language-unseen", "temperature-greedy-drafts"}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (counts(10, 73), "73 rounds separate nothing"),
        (counts(100, 1000, draft_tokens=None), "does not say how many tokens"),
        (counts(100, 1000, draft_tokens=9), "the walk has 1"),
        (counts(100, 1000, top_k=4), "a tree"),
        (counts(100, 1000, rounds=None), "means and no counts"),
        (counts(100, 1000, faked="acc=1"), "simulated"),
        (counts(100, 1000, accept_length=None), "no accept length"),
    ],
)
def test_what_separates_nothing_is_left_out(run: Counts, why: str) -> None:
    findings, left = told(case_of(walked(0.7, 1)), run)
    assert findings == {}
    assert why in left


def test_no_walk_no_comparison() -> None:
    findings, left = told(Case("d"), counts(100, 1000))
    assert findings == {}
    assert "no walk" in left


@pytest.mark.parametrize(
    "cause", ["counts-inconsistent", "acceptance-faked", "bonus-dropped", "tokens-after-end-counted"]
)
@pytest.mark.parametrize("severity", ["note", "likely"])
def test_a_log_that_does_not_hold_is_compared_with_nothing(cause: str, severity: str) -> None:
    finding = Finding(cause, severity, "said")  # type: ignore[arg-type]
    findings, left = told(case_of(walked(0.7, 1)), counts(100, 1000), finding)
    assert findings == {cause: severity}
    assert cause in left


def test_a_note_about_definitions_stops_nothing() -> None:
    findings, _ = told(case_of(walked(0.7, 1)), counts(690, 1000), Finding("rate-definition-old", "note", "said"))
    assert set(findings) == {"rate-definition-old", "observed-agrees"}


def test_the_longest_run_speaks() -> None:
    case = case_of(walked(0.7, 1))
    judge_observed(case, [counts(10, 210), counts(690, 1000)], [])
    assert [f.cause for f in case.findings] == ["observed-agrees"]


def test_rounds_of_a_chain_follow_from_the_tokens_drafted() -> None:
    assert rounds_of(counts(1, 5, rounds=None, drafted=30, draft_tokens=3)) == 10
    assert rounds_of(counts(1, 5, rounds=None, drafted=30, draft_tokens=3, top_k=2)) is None


def test_the_interval_covers() -> None:
    """Both sides drawn anew from one truth: 95 % or more of the intervals hold zero (Wilson's is the wider kind)."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        rounds = np.full(40, 20)
        walk = LengthCounts(1, rounds, rng.binomial(rounds, 0.6))
        gap = difference(walk, 1 + rng.binomial(400, 0.6) / 400, 400)
        assert gap is not None
        assert gap.low < gap.value < gap.high
        held += gap.low <= 0 <= gap.high
    assert 90 <= held <= 99
