"""A run that something happens to: warm-up, repeats, failing sides, Ctrl-C, a journal; and what is recommended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import benches
from benches import Asked, prompts
from eyas import bench
from eyas.bench import Fault, Setting, SideResult, settings
from eyas.errors import EnvironmentFault, Interrupted, UsageError
from eyas.journal import Journal

FRESH = tuple(range(20))
Side = Callable[[Asked], SideResult]


def says(seconds: float) -> Side:
    return lambda _: SideResult(FRESH, seconds)


def broken(*ids: str) -> Side:
    def side(prompt: Asked) -> SideResult:
        if prompt.id in ids:
            raise EnvironmentFault(f"no answer to {prompt.id}.", way_out="See to it.")
        return SideResult(FRESH, 1.0)

    return side


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.warm: dict[str, SideResult] = {}
        self.left = 0
        self.done: list[int] = []
        self.faults: list[Fault] = []

    def warmed_up(self, results: Mapping[str, SideResult], turns_left: int) -> None:
        self.warm, self.left = dict(results), turns_left

    def turn_done(self, done: int) -> None:
        self.done.append(done)

    def failed(self, fault: Fault) -> None:
        self.faults.append(fault)


# -- warm-up and repeats --------------------------------------------------------------------------------------


def test_the_warm_up_is_answered_and_not_counted() -> None:
    asked: list[str] = []

    def slow_at_first(prompt: Asked) -> SideResult:
        asked.append(prompt.id)
        return SideResult(FRESH, 100.0 if len(asked) == 1 else 1.0)

    heard = Heard()
    done = bench.run({"plain": slow_at_first}, prompts(3), warm_up=Asked("warm"), listener=heard)
    assert asked == ["warm", "p0", "p1", "p2"]
    assert [turn.prompt_id for turn in done.turns] == ["p0", "p1", "p2"]
    assert done.summary()["plain"].seconds == 3.0
    assert (heard.warm["plain"].seconds, heard.left, heard.done) == (100.0, 3, [1, 2, 3])


def test_repeats_flip_the_order_of_every_prompt() -> None:
    done = bench.run({"a": says(1.0), "b": says(1.0)}, prompts(3), repeats=2)
    orders = {(turn.prompt_id, turn.order[0]) for turn in done.turns}
    assert len(done.turns) == 6
    assert orders == {(f"p{i}", first) for i in range(3) for first in "ab"}
    assert done.to_json()["all"]["prompts"] == 3


def test_the_interval_draws_prompts_not_turns() -> None:
    """Answers to one prompt are no independent evidence: repeating all of them leaves the interval as it was."""
    speeds = {f"p{i}": 0.5 + 0.1 * i for i in range(4)}
    sides = {"plain": says(1.0), "fast": lambda prompt: SideResult(FRESH, speeds[prompt.id])}
    once, often = (bench.run(sides, prompts(4), repeats=n).summary()["fast"] for n in (1, 8))
    assert often.ratio == pytest.approx(once.ratio)
    assert often.ratio_interval == pytest.approx(once.ratio_interval)
    assert (often.prompts, often.tokens) == (4, 8 * once.tokens)


def test_prompts_of_one_name_stay_two() -> None:
    done = bench.run({"plain": says(1.0)}, [Asked("same"), Asked("same")])
    assert done.to_json()["all"]["prompts"] == 2


def test_quartiles_and_the_first_token() -> None:
    seconds = {"p0": 1.0, "p1": 2.0, "p2": 4.0, "p3": 5.0}
    side = bench.run(
        {"plain": lambda p: SideResult(FRESH, seconds[p.id], first_seconds=seconds[p.id] / 10)}, prompts(4)
    ).summary()["plain"]
    assert side.quartiles == pytest.approx(tuple(np.percentile([20, 10, 5, 4], [25, 75])))
    assert side.first_token_seconds == pytest.approx(0.3)


def test_categories_are_told_apart() -> None:
    fast = {"maths": 0.5, "writing": 1.0}
    sides = {"plain": says(1.0), "fast": lambda prompt: SideResult(FRESH, fast[str(prompt.category)])}
    done = bench.run(sides, prompts(6), category=lambda prompt: prompt.category)
    parts = {part["category"]: part for part in done.to_json()["categories"]}
    assert {name: part["sides"]["fast"]["ratio"]["value"] for name, part in parts.items()} == {
        "maths": 2.0,
        "writing": 1.0,
    }
    assert parts["maths"]["prompts"] == 3


# -- what goes wrong ------------------------------------------------------------------------------------------


def test_a_side_that_fails_once_costs_its_answer_alone() -> None:
    heard = Heard()
    done = bench.run({"plain": says(2.0), "far": broken("p1")}, prompts(4), listener=heard)
    assert [list(turn.results) for turn in done.turns] == [
        ["plain", "far"], ["plain"], ["plain", "far"], ["plain", "far"],
    ]  # fmt: skip
    found = done.summary()
    assert (found["plain"].prompts, found["far"].prompts, found["far"].ratio) == (4, 3, 2.0)
    assert [(f.side, f.prompt_id, f.given_up) for f in done.faults] == [("far", "p1", False)]
    assert list(done.faults) == heard.faults
    assert "no answer to p1" in done.to_json()["faults"][0]["why"]


def test_three_faults_in_a_row_give_a_side_up() -> None:
    asked: list[str] = []

    def dead(prompt: Asked) -> SideResult:
        asked.append(prompt.id)
        raise EnvironmentFault("gone.", way_out="See to it.")

    done = bench.run({"plain": says(1.0), "ok": says(1.0), "far": dead}, prompts(6))
    assert asked == ["p0", "p1", "p2"]
    assert [fault.given_up for fault in done.faults] == [False, False, True]
    assert len(done.turns) == 6
    assert "far" not in done.summary()
    assert done.to_json()["all"]["sides"].keys() == {"plain", "ok"}


def test_faults_that_are_not_in_a_row_give_nothing_up() -> None:
    done = bench.run({"plain": says(1.0), "far": broken("p0", "p1", "p3", "p4")}, prompts(6))
    assert not any(fault.given_up for fault in done.faults)
    assert done.summary()["far"].prompts == 2


def test_nothing_goes_on_without_a_baseline_or_another_side() -> None:
    counted: list[str] = []

    def counts(prompt: Asked) -> SideResult:
        counted.append(prompt.id)
        return SideResult(FRESH, 1.0)

    for sides in ({"dead": broken(*(f"p{i}" for i in range(6))), "ok": counts},
                  {"ok": counts, "dead": broken(*(f"p{i}" for i in range(6)))}):  # fmt: skip
        counted.clear()
        done = bench.run(sides, prompts(6))
        assert counted == ["p0", "p1", "p2"]
        assert len(done.turns) == 3


def test_without_the_baseline_a_turn_has_no_ratio() -> None:
    done = bench.run({"far": broken("p0", "p2"), "ok": says(1.0)}, prompts(3))
    ok = done.summary()["ok"]
    assert (ok.prompts, ok.ratio, ok.equal.n) == (3, 1.0, 1)
    alone = done.to_json()["prompts"][0]["sides"]["ok"]
    assert alone["equal"] is None


def test_nothing_measured_is_an_error_with_the_first_fault() -> None:
    with pytest.raises(EnvironmentFault, match="far: no answer to p0"):
        bench.run({"far": broken("p0", "p1")}, prompts(2))


def test_a_bug_of_ours_is_no_fault_of_a_side() -> None:
    def bug(prompt: Asked) -> SideResult:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.run({"plain": bug}, prompts(2))


def interrupts_at(count: int) -> Side:
    asked: list[str] = []

    def side(prompt: Asked) -> SideResult:
        asked.append(prompt.id)
        if len(asked) == count:
            raise KeyboardInterrupt
        return SideResult(FRESH, 1.0)

    return side


def test_ctrl_c_leaves_the_whole_turns() -> None:
    done = bench.run({"plain": says(1.0), "b": interrupts_at(3)}, prompts(6))
    assert done.interrupted
    assert [turn.prompt_id for turn in done.turns] == ["p0", "p1"]
    assert done.to_json()["interrupted"] is True
    with pytest.raises(Interrupted):
        bench.run({"plain": interrupts_at(1)}, prompts(2))


# -- the journal ----------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    def timed(prompt: Asked) -> SideResult:
        n = int(prompt.id[1:])
        return SideResult(FRESH, 1.0 + n, 4, (4, 3), (2, 1), first_seconds=0.1, text=f"t{n}")

    header = {"what": "this"}
    with Journal(tmp_path, header) as journal:
        first = bench.run({"plain": timed, "b": interrupts_at(4)}, prompts(5), journal=journal)
    assert len(first.turns) == 3
    calls: list[str] = []

    def watched(prompt: Asked) -> SideResult:
        calls.append(prompt.id)
        return timed(prompt)

    heard = Heard()
    with Journal(tmp_path, header) as journal:
        whole = bench.run(
            {"plain": watched, "b": says(1.0)}, prompts(5), journal=journal, warm_up=Asked("w9"), listener=heard
        )
    assert calls == ["w9", "p3", "p4"]
    assert heard.left == 2
    assert whole.to_json() == bench.run({"plain": timed, "b": says(1.0)}, prompts(5)).to_json()
    with Journal(tmp_path, header) as journal:
        again = bench.run({"plain": broken("p0"), "b": says(9.0)}, prompts(5), journal=journal, warm_up=Asked("w9"))
    assert again.to_json() == whole.to_json()
    assert not again.faults


def test_a_turn_that_lacks_a_side_is_asked_again(tmp_path: Path) -> None:
    sides = {"plain": says(1.0), "far": broken("p1")}
    with Journal(tmp_path, {}) as journal:
        bench.run(sides, prompts(3), journal=journal)
        assert "0/0" in journal
        assert "0/1" not in journal
    with Journal(tmp_path, {}) as journal:
        mended = bench.run({**sides, "far": says(1.0)}, prompts(3), journal=journal)
    assert [len(turn.results) for turn in mended.turns] == [2, 2, 2]
    assert not mended.faults


def test_a_journal_with_a_changed_entry_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path, {}) as journal:
        bench.run({"plain": says(1.0)}, prompts(1), journal=journal)
    file = tmp_path / "journal.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    entry = json.loads(lines[1])
    entry["sides"]["plain"]["seconds"] = -1
    file.write_text("\n".join([lines[0], json.dumps(entry), ""]), encoding="utf-8")
    with Journal(tmp_path, {}) as journal, pytest.raises(UsageError, match="not an answer of plain"):
        bench.run({"plain": says(1.0)}, prompts(1), journal=journal)


# -- what to run with -----------------------------------------------------------------------------------------

SWEPT = {"plain": Setting(0), "chain 2": Setting(2), "chain 4": Setting(4)}


def test_the_fastest_is_recommended_not_the_longest_accept_length() -> None:
    done = benches.measured()
    found = done.summary()
    assert found["chain 4"].lengths is not None
    assert found["chain 2"].lengths is not None
    assert found["chain 4"].lengths.value > found["chain 2"].lengths.value  # type: ignore[operator]
    best = bench.recommend(done, SWEPT)
    assert best is not None
    assert (best.side, best.sure, best.over) == ("chain 2", True, "without_loops")
    assert best.shares == {"plain": 0.0, "chain 2": 1.0, "chain 4": 0.0}
    assert best.summary.ratio == found["chain 2"].ratio
    assert best.summary.bound == pytest.approx(1.75 / (1.2 + 2 * 0.09))
    told = best.to_json()
    assert told["bound"]["low"] <= told["bound"]["value"] <= told["bound"]["high"]
    assert json.loads(json.dumps(told)) == told


def test_no_speculation_is_a_recommendation() -> None:
    done = benches.measured(**{"plain": says(1.0), "chain 4": benches.chain(4, 1.5)})
    best = bench.recommend(done, SWEPT)
    assert best is not None
    assert (best.side, best.setting) == ("plain", bench.NO_SPECULATION)
    assert all(each.flags == "" for each in best.flags)


def test_a_close_race_is_not_sure() -> None:
    def other(prompt: Asked) -> SideResult:
        n = int(prompt.id[1:])
        return SideResult(FRESH, 1.0 + (0.2 if n % 2 else -0.21))

    best = bench.recommend(benches.measured(**{"plain": says(1.0), "chain 2": other}), SWEPT)
    assert best is not None
    assert best.side == "chain 2"
    assert not best.sure
    assert best.shares is not None
    assert sum(best.shares.values()) == pytest.approx(1.0)


def test_looping_prompts_do_not_decide() -> None:
    def loops(prompt: Asked) -> SideResult:
        if prompt.id in ("p0", "p1"):
            return SideResult((1, 2, 3, 4) * 6, 0.01, 4, (4, 4), (4, 4))
        return SideResult(FRESH, 1.2, 4, (4, 4), (1, 0))

    done = benches.measured(**{"plain": says(1.0), "chain 2": loops})
    assert done.summary()["chain 2"].ratio > 1  # type: ignore[operator]
    best = bench.recommend(done, SWEPT)
    assert best is not None
    assert (best.side, best.over, best.prompts) == ("plain", "without_loops", 4)


def test_nothing_is_recommended_without_something_to_compare() -> None:
    assert bench.recommend(benches.measured(plain=says(1.0)), SWEPT) is None
    assert bench.recommend(benches.measured(plain=says(1.0), far=says(0.5)), SWEPT) is None


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("plain", Setting(0)),
        ("chain 4", Setting(4)),
        ("tree 4/2/8", Setting(4, 2, 8)),
        ("vllm", None),
        ("chain x", None),
        ("chain 4 ", None),
    ],
)
def test_a_name_tells_the_setting(name: str, setting: Setting | None) -> None:
    assert settings.named(name) == setting
    assert setting is None or setting.name == name
