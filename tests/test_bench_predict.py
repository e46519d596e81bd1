"""Whether speculation can pay, from numbers alone; every expected number is worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.bench.predict import Length, StepTimes, assumed, from_check, from_rates, predict, rate_for
from eyas.errors import InputError, UsageError

TIMES = StepTimes({1: 0.040, 3: 0.048, 5: 0.060}, 0.004)  # v: 1, 1.2, 1.5; d: 0.1


def test_every_column_of_a_row() -> None:
    found = predict(TIMES, [2, 4], {2: Length(1.82, 1.4, 2.1), 4: Length(1.9)})
    two, four = found.rows
    assert (two.cost.verify, two.cost.draft, two.timed) == (pytest.approx(1.2), pytest.approx(0.1), True)
    assert two.break_even == pytest.approx(1.4)
    assert two.perfect == pytest.approx(3 / 1.4)
    assert two.ratio is not None
    assert (two.ratio.value, two.ratio.low, two.ratio.high) == pytest.approx((1.3, 1.0, 1.5))
    assert two.break_even_rate == pytest.approx((-1 + 2.6**0.5) / 2)  # 1 + p + p² = 1.4
    assert four.ratio is not None
    assert four.ratio.value == pytest.approx(1.0)
    assert found.best is two
    assert found.ceiling is four  # 5 / 1.9 against 3 / 1.4
    assert found.conclusion == "may"  # the interval reaches 1.0


def test_the_best_is_the_fastest_not_the_longest() -> None:
    found = predict(StepTimes({1: 1.0, 5: 3.0}, 0.2), range(1, 5), from_rates([0.8, 0.8, 0.8, 0.8]))
    lengths = [row.length.value for row in found.rows if row.length]
    assert lengths == sorted(lengths)
    assert found.best is found.rows[0]
    assert found.best.ratio is not None
    assert found.best.ratio.value == pytest.approx(1.8 / 1.7)


def test_between_timed_rows_is_a_line_and_beyond_is_nothing() -> None:
    found = predict(TIMES, range(1, 9))
    assert [row.draft_tokens for row in found.rows] == [1, 2, 3, 4]
    assert [row.timed for row in found.rows] == [False, True, False, True]
    assert [row.cost.verify for row in found.rows] == pytest.approx([1.1, 1.2, 1.35, 1.5])
    with pytest.raises(UsageError, match="up to 5 rows"):
        predict(TIMES, [5, 6])


@pytest.mark.parametrize(
    ("times", "lengths", "conclusion"),
    [
        (StepTimes({1: 1.0, 3: 3.5}, 0.5), None, "cannot"),
        (StepTimes({1: 1.0, 3: 3.5}, 0.5), {1: Length(2.0, 2.0, 2.0)}, "cannot"),
        (TIMES, None, "can"),
        (TIMES, {2: Length(1.2, 1.1, 1.3)}, "loses"),
        (TIMES, {2: Length(1.5, 1.3, 1.7)}, "may"),
        (TIMES, {2: Length(1.5, 1.45, 1.55)}, "pays"),
        (TIMES, {2: Length(1.5)}, "pays"),
    ],
)
def test_conclusions(times: StepTimes, lengths: dict[int, Length] | None, conclusion: str) -> None:
    found = predict(times, [1, 2], lengths)
    assert found.conclusion == conclusion
    told = found.to_json()
    assert told["can_pay"] is (conclusion != "cannot")
    assert json.loads(json.dumps(told)) == told


def test_a_perfect_drafter_loses_where_passes_cost_what_they_bring() -> None:
    row = predict(StepTimes({1: 1.0, 2: 1.6}, 0.5), [1]).rows[0]
    assert row.break_even == pytest.approx(2.1)
    assert row.break_even_rate is None  # not even always right
    assert row.perfect == pytest.approx(2 / 2.1)


def test_rates_become_lengths() -> None:
    found = from_rates([0.6, 0.4, 0.3])
    assert [found[k].value for k in (1, 2, 3)] == pytest.approx([1.6, 1.84, 1.912])
    assert 4 not in found


@pytest.mark.parametrize("rates", [[], [1.2], [-0.1], [float("nan")], [0.5] * 65])
def test_what_is_no_rate(rates: list[float]) -> None:
    with pytest.raises(UsageError, match="rates"):
        from_rates(rates)


def test_an_assumed_length_is_met_at_4() -> None:
    found = assumed(2.0)
    assert found[4].value == pytest.approx(2.0)
    assert found[1].value < found[2].value < 2.0 < found[8].value < 2.1
    assert assumed(5.0)[2].value == pytest.approx(3.0)
    assert assumed(1.0)[4].value == pytest.approx(1.0)


@pytest.mark.parametrize("length", [0.9, 5.1, float("nan")])
def test_an_impossible_length(length: float) -> None:
    with pytest.raises(UsageError, match="between 1 and 5"):
        assumed(length)


@pytest.mark.parametrize(("length", "k", "rate"), [(1.0, 3, 0.0), (4.0, 3, 1.0), (1.5, 1, 0.5), (4.01, 3, None)])
def test_the_rate_behind_a_length(length: float, k: int, rate: float | None) -> None:
    found = rate_for(length, k)
    assert found == (pytest.approx(rate, abs=1e-9) if rate is not None else None)


@pytest.mark.parametrize(
    ("verify", "draft", "said"),
    [({3: 1.0}, 0.1, "missing"), ({1: 0.0}, 0.1, "above zero"), ({1: float("inf")}, 0.1, "above zero"),
     ({0: 1.0, 1: 1.0}, 0.1, "above zero"), ({1: 1.0}, -1.0, "no time"), ({1: 1.0}, float("nan"), "no time")],
)  # fmt: skip
def test_what_is_no_step_time(verify: dict[int, float], draft: float, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        StepTimes(verify, draft)


def point(k: int, value: float) -> dict[str, Any]:
    return {"draft_tokens": k, "value": value, "low": value - 0.1, "high": value + 0.1, "rounds": 9, "method": "walk"}


def curve(*rates: float) -> dict[str, Any]:
    return {"depths": [{"depth": k, "conditional": {"rate": rate}} for k, rate in enumerate(rates)]}


def test_a_checks_json_gives_its_walk_first() -> None:
    told = {"accept_length": [point(1, 1.5), point(2, 1.7)], "curves": {"walk": curve(0.1)}}
    found, origin = from_check(told, "c.json")
    assert (found[2], origin) == (Length(1.7, 1.7 - 0.1, 1.7 + 0.1), "walk")
    found, origin = from_check({"accept_length": [], "curves": {"walk": None, "teacher_forced": curve(0.5, 0.5)}}, "c")
    assert (found[2].value, origin) == (1.75, "teacher_forced")


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"accept_length": [{"draft_tokens": 1}]},
        {"accept_length": [point(1, 3.0)]},
        {"accept_length": [point(0, 1.0)]},
        {"accept_length": ["x"]},
        {"curves": {"walk": {"depths": [{"conditional": {"rate": 7}}]}}},
        {"curves": "none"},
    ],
)
def test_what_is_no_check(told: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"c\.json"):
        from_check(told, "c.json")
