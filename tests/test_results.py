"""Counts, intervals and the verdict. The expected numbers are worked out by hand or by scipy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from eyas import results
from eyas.results import (
    CheckResult,
    CurveCounts,
    Evidence,
    Finding,
    LengthCounts,
    NotChecked,
    Rate,
    Rival,
    bootstrap_ratio,
    judge,
    paired_difference,
    wilson,
)


def ints(*values: Any) -> Any:
    return np.array(values, dtype=np.int64)


def walk() -> CurveCounts:
    """Two records, two depths: 10 and 30 rounds."""
    return CurveCounts(
        truth="target",
        slots=ints(40, 60),
        covered=ints(39, 51),
        n=ints([10, 10], [30, 30]),
        prev=ints([10, 6], [30, 24]),
        joint=ints([6, 3], [24, 12]),
    )


def length(value: float, rounds: int = 400, records: int = 20, draft_tokens: int = 4) -> LengthCounts:
    """Records that are all alike, so the interval is nearly a point."""
    each = rounds // records
    accepted = round((value - 1) * each)
    return LengthCounts(draft_tokens, np.full(records, each), np.full(records, accepted))


FATAL_TAPS = Finding("taps-off-by-one", "fatal", "s")
LIKELY_QUALITY = Finding("quality-low", "likely", "s")


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200)), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_bootstrap_brackets_the_ratio(records: list[tuple[int, int]]) -> None:
    n, hits = np.array(records).T
    low, high = bootstrap_ratio(hits, n)
    assert low is not None
    assert high is not None
    assert low - 1e-12 <= hits.sum() / n.sum() <= high + 1e-12


def test_interval_of_a_thousand_records_covers_the_known_rate() -> None:
    covered, widths = 0, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = rng.integers(5, 40, size=1000)
        own = rng.beta(6, 4, size=1000)  # records differ, as conversations do; their mean rate is 0.6
        low, high = bootstrap_ratio(rng.binomial(n, own), n)
        assert low is not None
        assert high is not None
        covered += low <= 0.6 <= high
        widths.append(high - low)
    assert 34 <= covered <= 40  # 95 % of 40 is 38; five below that has odds under 1 in 100
    # By hand: half width 1.96 * sd / sqrt(1000), sd of a record's share of the ratio about 0.2
    assert 0.018 < np.mean(widths) < 0.032


def test_interval_is_over_records_not_slots() -> None:
    """Ten records of 100 equal slots hold no more than ten observations."""
    hits, n = ints(*[100] * 5 + [0] * 5), np.full(10, 100)
    low, high = bootstrap_ratio(hits, n)
    assert low is not None
    assert high is not None
    assert high - low > 0.5
    narrow = wilson(500, 1000)
    assert narrow[1] - narrow[0] < 0.07  # type: ignore[operator]


def test_bootstrap_is_seeded() -> None:
    hits, n = ints(3, 9, 4, 7, 1), ints(10, 10, 11, 12, 13)
    assert bootstrap_ratio(hits, n) == bootstrap_ratio(hits, n, seed=0)
    assert bootstrap_ratio(hits, n) != bootstrap_ratio(hits, n, seed=1)


@pytest.mark.parametrize(
    ("hits", "n"), [([], []), ([3], [10]), ([0, 0], [0, 0]), ([3, 0], [10, 0]), ([3, 0, 0], [10, 0, 0])]
)
def test_no_interval_without_two_records(hits: list[int], n: list[int]) -> None:
    assert bootstrap_ratio(np.array(hits, dtype=np.int64), np.array(n, dtype=np.int64)) == (None, None)


def test_draws_without_denominator_are_left_out() -> None:
    low, high = bootstrap_ratio(ints(5, 5, *[0] * 20), ints(10, 10, *[0] * 20))
    assert (low, high) == (0.5, 0.5)


def test_counts_are_integers() -> None:
    with pytest.raises(AssertionError, match="integers"):
        bootstrap_ratio(np.array([0.5, 1.0]), ints(1, 1))


@given(st.integers(1, 5000), st.data())
@settings(max_examples=60, deadline=None)
def test_wilson_is_scipys(n: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, n))
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_of_nothing() -> None:
    assert wilson(0, 0) == (None, None)
    assert Rate.from_log(0, 0).to_json() == {"hits": 0, "n": 0, "rate": None, "low": None, "high": None}


def test_rates_follow_from_counts() -> None:
    curve = walk()
    assert (curve.joint_rate(0).hits, curve.joint_rate(0).n) == (30, 40)
    assert curve.joint_rate(1).rate == 15 / 40
    assert curve.conditional_rate(1).rate == 15 / 30
    assert curve.coverage().rate == 0.9
    low, high = curve.conditional_rate(1).low, curve.conditional_rate(1).high
    assert (low, high) == (0.5, 0.5)  # both records have one half
    assert (curve.joint_rate(1).low, curve.joint_rate(1).high) == (0.3, 0.4)


def test_curve_json_has_the_agreed_shape() -> None:
    told = walk().to_json()
    assert set(told) == {"truth", "coverage", "depths"}
    assert [set(d) for d in told["depths"]] == [{"depth", "joint", "conditional"}] * 2
    assert [d["depth"] for d in told["depths"]] == [0, 1]
    for rate in (told["coverage"], told["depths"][1]["joint"], told["depths"][1]["conditional"]):
        assert set(rate) == {"hits", "n", "rate", "low", "high"}
    json.dumps(told, allow_nan=False)


def test_a_depth_nobody_reached_has_no_rate() -> None:
    curve = CurveCounts(
        "record", ints(5, 5), ints(5, 5), ints([5, 5], [5, 5]), ints([5, 0], [5, 0]), ints([0, 0], [0, 0])
    )
    assert curve.conditional_rate(1) == Rate(0, 0, None, None)
    assert curve.conditional_rate(1).rate is None
    assert curve.joint_rate(1).rate == 0


@pytest.mark.parametrize(
    "change",
    [
        {"truth": "teacher"},
        {"covered": ints(41, 51)},
        {"covered": ints(-1, 51)},
        {"joint": ints([6, 7], [24, 12])},
        {"joint": ints([-1, 3], [24, 12])},
        {"prev": ints([10, 11], [30, 24])},
        {"prev": ints([9, 6], [30, 24])},
        {"slots": ints(40)},
        {"n": ints([10, 10, 10], [30, 30, 30])},
        {"joint": np.array([[6.0, 3.0], [24.0, 12.0]])},
    ],
)
def test_impossible_counts_are_refused(change: dict[str, Any]) -> None:
    good = walk()
    fields = {name: getattr(good, name) for name in ("truth", "slots", "covered", "n", "prev", "joint")}
    CurveCounts(**fields)
    with pytest.raises(AssertionError):
        CurveCounts(**(fields | change))


def test_concatenate_keeps_every_record() -> None:
    both = CurveCounts.concatenate([walk(), walk()])
    assert both.n.shape == (4, 2)
    assert both.joint_rate(1).hits == 30
    other = CurveCounts("record", *(getattr(walk(), f) for f in ("slots", "covered", "n", "prev", "joint")))
    with pytest.raises(AssertionError, match="truth"):
        CurveCounts.concatenate([walk(), other])


def test_accept_length_is_a_ratio_of_sums_plus_the_bonus() -> None:
    counts = LengthCounts(3, ints(10, 30), ints(20, 15))
    assert counts.value == 1 + 35 / 40  # the mean of the records' lengths would be 2.25
    told = counts.to_json()
    assert (told["low"], told["high"]) == (1.5, 3.0)
    assert told == {
        "draft_tokens": 3,
        "value": 1.875,
        "low": 1.5,
        "high": 3.0,
        "rounds": 40,
        "method": "walk",
    }


def test_accept_length_of_nothing_is_null() -> None:
    told = LengthCounts(3, ints(0), ints(0)).to_json()
    assert (told["value"], told["low"], told["high"], told["rounds"]) == (None, None, None, 0)


def test_a_round_keeps_no_more_than_it_drafted() -> None:
    LengthCounts(2, ints(10), ints(20))
    with pytest.raises(AssertionError, match="drafted"):
        LengthCounts(2, ints(10), ints(21))


def test_paired_difference_cancels_what_both_find_hard() -> None:
    rng = np.random.default_rng(0)
    rounds = np.full(200, 50)
    hard = rng.integers(0, 120, size=200)
    a, b = LengthCounts(4, rounds, hard + 5), LengthCounts(4, rounds, hard)
    difference = paired_difference(a, b)
    assert difference.value == pytest.approx(0.1)
    assert difference.low == pytest.approx(0.1)  # each record differs by exactly 0.1
    assert difference.high == pytest.approx(0.1)
    spread = a.interval()
    assert spread[1] - spread[0] > 0.1  # type: ignore[operator]
    assert paired_difference(b, a).value == pytest.approx(-0.1)
    with pytest.raises(AssertionError, match="same records"):
        paired_difference(a, LengthCounts(4, ints(1, 1), ints(1, 1)))


def test_finding_takes_kind_and_fix_from_the_table() -> None:
    found = Finding("d2t-read-as-ids", "likely", "s", [Evidence("top-1", 0.01, 0.6, "held-out records")])
    assert found.kind == "vocab"
    assert found.fix is not None
    assert "target_id - i" in found.fix
    assert Finding("quality-low", "note", "s", fix="Do this.").fix == "Do this."
    told = found.to_json()
    assert list(told) == ["kind", "cause", "severity", "summary", "evidence", "fix", "rivals"]
    assert told["evidence"] == [{"measure": "top-1", "value": 0.01, "expected": 0.6, "source": "held-out records"}]


def test_unknown_causes_and_severities_are_refused() -> None:
    with pytest.raises(AssertionError, match="no-such-cause"):
        Finding("no-such-cause", "note", "s")
    with pytest.raises(AssertionError, match="no-such-cause"):
        Rival("no-such-cause", "x")
    with pytest.raises(AssertionError, match="grave"):
        Finding("quality-low", "grave", "s")


def test_verdict_takes_the_first_that_applies() -> None:
    """Every level is present; taking the gravest away reveals the next."""
    nan = Finding("weights-nan", "fatal", "s")
    needed = [NotChecked("walk", "off-policy text", needed=True)]
    low = length(1.2)
    assert judge([LIKELY_QUALITY, FATAL_TAPS, nan], length_at_4=low, not_checked=needed) == "broken"
    assert judge([LIKELY_QUALITY, FATAL_TAPS], length_at_4=low, not_checked=needed) == "miswired"
    assert judge([LIKELY_QUALITY], length_at_4=low, not_checked=needed) == "undecided"
    assert judge([LIKELY_QUALITY], length_at_4=low) == "weak"
    assert judge([], length_at_4=length(2.2)) == "healthy"


@pytest.mark.parametrize("cause", sorted(results.BROKEN_CAUSES))
def test_broken_causes(cause: str) -> None:
    assert judge([Finding(cause, "likely", "s")], length_at_4=None) == "broken"
    assert judge([Finding(cause, "note", "s")], length_at_4=length(2.2)) == "healthy"


def test_notes_and_quality_do_not_make_miswired() -> None:
    notes = [Finding("taps-off-by-one", "note", "s"), Finding("coverage-low", "fatal", "s")]
    assert judge(notes, length_at_4=length(2.2)) == "healthy"
    assert judge([Finding("rope-base-wrong", "likely", "s")], length_at_4=length(2.2)) == "miswired"


def test_unneeded_checks_do_not_withhold_a_verdict() -> None:
    assert judge([], length_at_4=length(2.2), not_checked=[NotChecked("sweep", "--quick")]) == "healthy"


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        (None, "undecided"),
        (length(2.2, rounds=200, records=20), "healthy"),
        (length(2.2, rounds=180, records=20), "undecided"),
        (length(1.2, rounds=180, records=20), "undecided"),
        (length(2.2, rounds=5000, records=1), "undecided"),
        (LengthCounts(4, ints(5000, 0), ints(5000, 0)), "undecided"),
        # interval [1.4, 1.8] holds 1.6: not proven weak
        (LengthCounts(4, ints(200, 200), ints(80, 160)), "healthy"),
        # interval [1.4, 1.5]
        (LengthCounts(4, ints(200, 200), ints(80, 100)), "weak"),
        (length(1.6), "healthy"),
    ],
)
def test_what_cannot_separate_means(counts: LengthCounts | None, verdict: str) -> None:
    assert judge([], length_at_4=counts) == verdict
    too_few = results.too_few_records(counts)
    assert (too_few is not None) == (counts is not None and verdict == "undecided")
    if too_few:  # the note itself changes nothing
        assert judge([too_few], length_at_4=counts) == "undecided"


def test_expect_moves_the_line() -> None:
    assert judge([], length_at_4=length(2.2), expect=2.5) == "weak"
    with pytest.raises(AssertionError):
        judge([], length_at_4=length(2.2, draft_tokens=3))


def test_exit_codes() -> None:
    verdicts = ("broken", "miswired", "undecided", "weak", "healthy")
    assert [results.exit_code(v) for v in verdicts] == [1, 1, 3, 0, 0]
    assert [results.exit_code(v, fail_on_weak=True) for v in verdicts] == [1, 1, 3, 1, 0]


def test_check_result_json() -> None:
    note = Finding("contract-missing", "note", "s")
    rivalled = Finding("taps-off-by-one", "likely", "s", rivals=[Rival("token-shift-two", "a token sweep")])
    result = CheckResult("drafter", "target", "miswired", walk(), None, findings=[note, rivalled])
    told = result.to_json()
    assert told["schema"] == 1
    assert told["eyas"]
    assert told["curves"]["walk"] is None
    assert told["curves"]["teacher_forced"]["depths"][0]["joint"]["hits"] == 30
    assert [f["severity"] for f in told["findings"]] == ["likely", "note"]  # the gravest comes first
    assert told["confident"] is False
    assert CheckResult("d", "t", "miswired", None, None, findings=[note, FATAL_TAPS]).confident
    assert not CheckResult("d", "t", "healthy", None, None, findings=[note]).confident
    needed = "verdict curves accept_length found findings not_checked expect provenance seconds"
    assert set(needed.split()) <= set(told)
    json.dumps(told, allow_nan=False)
