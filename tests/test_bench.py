"""Sides are alternated, counted and compared; every expected number is worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from eyas import bench
from eyas.bench import Cost, SideResult, repeats
from eyas.errors import UsageError
from eyas.results import Interval

FRESH = tuple(range(20))  # 13 different 8-grams
LOOPING = (1, 2, 3, 4) * 6  # 17 8-grams, 4 of them different


@dataclass(frozen=True)
class Asked:
    id: str


PROMPTS = [Asked(f"p{i}") for i in range(4)]
Side = Callable[[Asked], SideResult]


def plain(prompt: Asked) -> SideResult:
    return SideResult(FRESH, 2.0)


def twice_as_fast(prompt: Asked) -> SideResult:
    return SideResult(FRESH, 1.0, rounds=10, drafted=(10, 10), accepted=(6, 3))


def test_sides_take_turns_and_the_order_flips() -> None:
    calls: list[str] = []

    def watched(name: str, side: Side) -> Side:
        def call(prompt: Asked) -> SideResult:
            calls.append(f"{name} {prompt.id}")
            return side(prompt)

        return call

    sides = {"plain": watched("plain", plain), "drafted": watched("drafted", twice_as_fast)}
    done = bench.run(sides, PROMPTS[:3])
    assert calls == ["plain p0", "drafted p0", "drafted p1", "plain p1", "plain p2", "drafted p2"]
    assert [turn.order for turn in done.turns][1] == ("drafted", "plain")
    assert done.baseline == "plain"


def test_speeds_ratio_and_acceptance() -> None:
    cost = {"drafted": Cost(verify=1.5, draft=0.1)}
    done = bench.run({"plain": plain, "drafted": twice_as_fast}, PROMPTS, costs=cost)
    base, drafted = done.summary()["plain"], done.summary()["drafted"]
    assert (base.tokens, base.seconds, base.tokens_per_second) == (80, 8.0, 10.0)
    assert (drafted.tokens_per_second, drafted.median_tokens_per_second) == (20.0, 20.0)
    assert (drafted.ratio, drafted.ratio_interval) == (2.0, (2.0, 2.0))
    assert (base.ratio, base.lengths, base.depths, base.bound) == (1.0, None, (), None)
    assert drafted.lengths is not None
    assert drafted.lengths.draft_tokens == 2
    assert drafted.lengths.value == pytest.approx(1.9)
    assert [(rate.hits, rate.n) for rate in drafted.depths] == [(24, 40), (12, 40)]
    assert drafted.bound == pytest.approx(1.9 / (1.5 + 2 * 0.1))
    assert (drafted.equal.hits, drafted.equal.n) == (4, 4)


def test_speed_is_a_ratio_of_sums_and_the_median_is_by_prompt() -> None:
    seconds = {"p0": 1.0, "p1": 2.0, "p2": 10.0}
    done = bench.run({"only": lambda p: SideResult(FRESH, seconds[p.id])}, PROMPTS[:3])
    only = done.summary()["only"]
    assert only.tokens_per_second == pytest.approx(60 / 13)
    assert only.median_tokens_per_second == pytest.approx(10.0)


def test_the_interval_is_paired_seeded_and_holds_the_ratio() -> None:
    slow = {f"p{i}": 1.0 + i for i in range(4)}
    share = {"p0": 0.4, "p1": 0.5, "p2": 0.6, "p3": 0.55}

    def measured(seed: int) -> tuple[float, Interval]:
        sides = {
            "plain": lambda p: SideResult(FRESH, slow[p.id]),
            "drafted": lambda p: SideResult(FRESH, slow[p.id] * share[p.id]),
        }
        side = bench.run(sides, PROMPTS, seed=seed).summary()["drafted"]
        return side.ratio, side.ratio_interval

    ratio, (low, high) = measured(1)
    assert low is not None
    assert high is not None
    # Seconds differ fourfold between prompts, the ratio only from 1.67 to 2.5: unpaired draws would leave that.
    assert 1 / 0.6 <= low < ratio < high <= 1 / 0.4
    assert measured(1) == measured(1)


def test_one_prompt_gives_no_interval() -> None:
    side = bench.run({"plain": plain, "drafted": twice_as_fast}, PROMPTS[:1]).summary()["drafted"]
    assert (side.ratio, side.ratio_interval) == (2.0, (None, None))


def test_unequal_answers_are_counted() -> None:
    def other(prompt: Asked) -> SideResult:
        return SideResult(FRESH if prompt.id != "p2" else FRESH[:-1], 1.0)

    done = bench.run({"plain": plain, "other": other}, PROMPTS)
    assert (done.summary()["other"].equal.hits, done.summary()["other"].equal.n) == (3, 4)
    assert [turn.equal("other", "plain") for turn in done.turns] == [True, True, False, True]


@pytest.mark.parametrize(
    ("tokens", "repeated", "total", "loops"),
    [
        (FRESH, 0, 13, False),
        (LOOPING, 13, 17, True),
        ((1,) * 7, 0, 0, False),
        ((1,) * 8, 0, 1, False),
        ((*range(14), *range(10)), 3, 17, False),  # those of 0..7, 1..8 and 2..9 come again
        ((*range(10), *range(10), *range(10)), 13, 23, True),
    ],
)
def test_repeated_8grams(tokens: tuple[int, ...], repeated: int, total: int, loops: bool) -> None:
    found = repeats(tokens)
    assert (found.repeated, found.total, found.loops) == (repeated, total, loops)
    assert found.share == (repeated / total if total else None)


def test_an_answer_loops_above_30_percent_not_at_it() -> None:
    assert not bench.Repeats(3, 10).loops
    assert bench.Repeats(31, 100).loops


def test_prompts_where_any_side_loops_are_left_out_for_all() -> None:
    def loops_once(prompt: Asked) -> SideResult:
        if prompt.id == "p1":
            return SideResult(LOOPING, 0.1, rounds=5, drafted=(5, 5), accepted=(5, 5))
        return twice_as_fast(prompt)

    done = bench.run({"plain": plain, "drafted": loops_once}, PROMPTS)
    kept = done.summary(without_loops=True)
    assert (kept["plain"].tokens, kept["drafted"].seconds, kept["drafted"].ratio) == (60, 3.0, 2.0)
    assert done.summary()["drafted"].ratio > 2.0
    whole, clean = done.summary()["drafted"].repeats, kept["drafted"].repeats
    assert (whole.repeated, whole.total, clean.repeated, clean.total) == (13, 3 * 13 + 17, 0, 39)
    only_loops = bench.run({"plain": lambda _: SideResult(LOOPING, 1.0)}, PROMPTS)
    assert only_loops.summary(without_loops=True) == {}
    assert only_loops.to_json()["without_loops"] == {"prompts": 0, "sides": {}}


def test_an_answer_without_rounds_adds_none() -> None:
    def short(prompt: Asked) -> SideResult:  # its first token ended it
        if prompt.id == "p0":
            return SideResult((1,), 0.1, rounds=0, drafted=(0, 0), accepted=(0, 0))
        return twice_as_fast(prompt)

    lengths = bench.run({"drafted": short}, PROMPTS).summary()["drafted"].lengths
    assert lengths is not None
    assert lengths.total_rounds == 30
    assert lengths.value == pytest.approx(1.9)


def test_json_is_whole_and_plain() -> None:
    cost = {"drafted": Cost(1.5, 0.1)}
    value = bench.run({"plain": plain, "drafted": twice_as_fast}, PROMPTS, seed=7, costs=cost).to_json()
    assert json.loads(json.dumps(value)) == value
    assert (value["schema"], value["baseline"], value["seed"]) == (1, "plain", 7)
    drafted = value["all"]["sides"]["drafted"]
    assert drafted["ratio"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert drafted["accept_length"]["method"] == "measured"
    assert [d["joint"]["hits"] for d in drafted["depths"]] == [24, 12]
    assert value["all"]["sides"]["plain"]["accept_length"] is None
    assert value["prompts"][0]["sides"]["drafted"]["equal"] is True
    assert value["prompts"][0]["sides"]["plain"]["repeated_8grams"]["total"] == 13


def test_no_prompts_is_an_error_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="no prompts"):
        bench.run({"plain": plain}, [])
