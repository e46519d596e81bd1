"""Rows to files: lengths, counts, what is kept in memory, and nothing torn whatever happens."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas import files, prepare, sources
from eyas.convert import Converter, Made, TooLong
from eyas.errors import EnvironmentFault, InputError, RecordsError, UsageError
from eyas.prepare import HELD_OUT, MANIFEST, TRAIN, Seen
from eyas.records import Record, read
from eyas.render import RAW_TEMPLATE, Renderer
from eyas.sources import Row
from templates import CHATML, LLAMA3, STRIPS_THINKING, tokenizer


def renderer(template: str = CHATML) -> Renderer:
    return Renderer(tokenizer(), frozenset({int(tokenizer().convert_tokens_to_ids("<|im_end|>"))}), template)


def made(data: dict[str, Any], max_length: int, too_long: TooLong = "cut", template: str = CHATML) -> Made:
    converter = Converter(renderer(template), vocab_size=400, max_length=max_length, too_long=too_long)
    return converter.made(Row("f, row 1", "f", data))


def text_of(record: Record) -> str:
    return str(tokenizer().decode(record.input_ids.tolist()))


def said(record: Record) -> list[str]:
    return [tokenizer().decode(record.input_ids[a : b + 1].tolist()) for a, b in record.spans()]


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


# -- forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "form", "answers"),
    [
        (chat("Q", "A"), "messages", ["A<|im_end|>"]),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "sharegpt", None),
        ({"instruction": "Q", "output": "A"}, "alpaca", ["A<|im_end|>"]),
        ({"prompt": "Q", "completion": "A"}, "completion", ["A<|im_end|>"]),
        ({"prompt": "Q", "response": "A", "finish_reason": "length"}, "completion", ["A"]),
        ({"text": "<|im_start|>assistant\nA<|im_end|>\n"}, "preformatted", ["A<|im_end|>"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, "record", None),
    ],
)
def test_each_form_becomes_a_record(data: dict[str, Any], form: str, answers: list[str] | None) -> None:
    found = made(data, 10**6)
    assert found.form == form
    assert len(found.records) == 1
    assert not +found.events
    assert found.records[0].source == "f"
    if answers:
        assert said(found.records[0]) == answers
    assert made({**data, "source": "mine"}, 10**6).records[0].source == "mine"


def test_raw_takes_texts_completions_and_turns() -> None:
    assert text_of(made({"text": "Once"}, 99, template=RAW_TEMPLATE).records[0]) == "Once"
    done = made({"prompt": "1+1=", "completion": "2"}, 99, template=RAW_TEMPLATE)
    assert (text_of(done.records[0]), said(done.records[0])) == ("1+1=2<|im_end|>", ["2<|im_end|>"])
    assert text_of(made(chat("Q", "A"), 99, template=RAW_TEMPLATE).records[0]) == "Q\nA<|im_end|>"


@pytest.mark.parametrize("data", [{"prompt": "Q"}, {"question": "Q"}, {"instruction": "Q"}, {"turns": ["Q", "R"]}])
@pytest.mark.parametrize("template", [CHATML, RAW_TEMPLATE])
def test_a_bare_prompt_points_to_regenerate(data: dict[str, Any], template: str) -> None:
    with pytest.raises(RecordsError, match="f, row 1: no assistant turn") as caught:
        made(data, 99, template=template)
    assert "--regenerate" in caught.value.way_out


# -- length ---------------------------------------------------------------------------------------------------

SYSTEM = "<|im_start|>system\nS<|im_end|>\n"
FOUR = chat("q1", "a1", "q2", "a2", "q3", "a3", "q4", "a4", system="S")


def test_what_fits_is_left_alone() -> None:
    length = made(FOUR, 10**6).records[0].seq_len
    for too_long in ("cut", "drop", "split"):
        found = made(FOUR, length, too_long)
        assert (len(found.records), +found.events) == (1, Counter())


def test_cut_and_drop_are_counted() -> None:
    length = made(FOUR, 10**6).records[0].seq_len
    cut = made(FOUR, length - 1)
    assert [r.seq_len for r in cut.records] == [length - 1]
    assert said(cut.records[0])[-1] == "a4"  # its end token did not fit
    assert +cut.events == Counter(cut=1)
    assert +made(FOUR, length - 1, "drop").events == Counter(dropped=1)
    assert not made(FOUR, length - 1, "drop").records
    nothing_left = made(chat("a long question", "A"), 20)
    assert (nothing_left.records, +nothing_left.events) == ([], Counter(dropped=1))


def test_split_keeps_every_turn_once_and_the_system_in_each_part() -> None:
    two = made(chat("q1", "a1", "q2", "a2", system="S"), 10**6).records[0].seq_len
    found = made(FOUR, two, "split")
    assert [said(r) for r in found.records] == [["a1<|im_end|>", "a2<|im_end|>"], ["a3<|im_end|>", "a4<|im_end|>"]]
    assert text_of(found.records[1]).startswith(f"{SYSTEM}<|im_start|>user\nq3<|im_end|>")
    assert +found.events == Counter(split=1)
    assert [len(said(r)) for r in made(FOUR, two + 1, "split").records] == [2, 2]
    assert [len(said(r)) for r in made(FOUR, two - 1, "split").records] == [1, 1, 1, 1]
    assert found.prompt_hash == made(FOUR, 10**6).prompt_hash


def test_an_exchange_too_long_by_itself_is_cut_in_its_place() -> None:
    one = made(chat("q1", "a1", system="S"), 10**6).records[0].seq_len
    found = made(chat("q1", "a1", "q2", "a2" * 50, "q3", "a3", system="S"), one, "split")
    assert [said(r)[-1] for r in found.records] == ["a1<|im_end|>", "a2a", "a3<|im_end|>"]
    assert +found.events == Counter(split=1, cut=1)
    late = made(chat("q1", "a1", "q" * 99, "a2", "q3", "a3", system="S"), one, "split")
    assert [said(r) for r in late.records] == [["a1<|im_end|>"], ["a3<|im_end|>"]]
    assert +late.events == Counter(split=1, dropped=1)


def test_a_cut_answer_is_the_last_parts_alone() -> None:
    one = made(chat("q1", "a1", system="S"), 10**6).records[0].seq_len
    found = made({**chat("q1", "a1", "q2", "a2", system="S"), "finish_reason": "length"}, one, "split")
    assert [said(r) for r in found.records] == [["a1<|im_end|>"], ["a2"]]


def test_raw_text_is_split_into_windows() -> None:
    text = "abcdefghijk"
    found = made({"text": text}, 4, "split", RAW_TEMPLATE)
    assert [text_of(r) for r in found.records] == ["abcd", "efgh", "ijk"]
    assert [r.loss_mask.tolist() for r in found.records] == [[False, True, True, True]] * 2 + [[False, True, True]]
    assert [text_of(r) for r in made({"text": text[:9]}, 4, "split", RAW_TEMPLATE).records] == ["abcd", "efgh"]
    assert [text_of(r) for r in made({"text": text}, 4, "cut", RAW_TEMPLATE).records] == ["abcd"]


@given(
    st.lists(st.text("ab ", max_size=12), min_size=2, max_size=9),
    st.integers(30, 150),
    st.sampled_from(["cut", "split"]),
)
@settings(max_examples=60, deadline=None)
def test_no_record_is_longer_and_no_answer_is_lost_or_doubled(
    turns: list[str], max_length: int, too_long: TooLong
) -> None:
    found = made(chat(*turns, system="S"), max_length, too_long)
    assert all(r.seq_len <= max_length and r.loss_mask[-1] for r in found.records)
    answers = [text + "<|im_end|>" for text in turns[1::2]]
    kept = [answer for r in found.records for answer in said(r)]
    if not found.events["cut"] and not found.events["dropped"]:
        assert kept == answers
    assert len(kept) <= len(answers)


def test_templates_that_strip_thinking_give_a_record_a_turn_on_one_side() -> None:
    thinking = chat("q1", "<think>x</think>a1", "q2", "<think>y</think>a2")
    found = made(thinking, 10**6, template=STRIPS_THINKING)
    assert [said(r) for r in found.records] == [["<think>x</think>a1<|im_end|>"], ["<think>y</think>a2<|im_end|>"]]
    assert +found.events == Counter(apart=1)
    assert found.prompt_hash == found.records[0].prompt_hash != found.records[1].prompt_hash


# -- the folder -----------------------------------------------------------------------------------------------


def rows(n: int, start: int = 0) -> Iterator[Row]:
    for i in range(start, start + n):
        yield Row(f"f, row {i + 1}", f"set {i % 2}", chat(f"question {i}", "answer " * (1 + i % 5), "more?", f"{i}."))


def run(given: Iterator[Row] | list[Row], out: Path, **options: Any) -> prepare.Audit:
    options = {"vocab_size": 400, "max_positions": 512, **options}
    return prepare.prepare(given, renderer(options.pop("template", CHATML)), out, **options)


def content(out: Path) -> dict[str, bytes]:
    """What must be the same whenever it was made."""
    manifest = json.loads((out / MANIFEST).read_text())
    del manifest["provenance"]["time"]
    return {
        TRAIN: (out / TRAIN).read_bytes(),
        HELD_OUT: (out / HELD_OUT).read_bytes(),
        MANIFEST: json.dumps(manifest).encode(),
    }


def test_the_audit_counts_everything(tmp_path: Path) -> None:
    given = [*rows(40), *rows(3)]  # three again
    given += [Row("f, row 44", "f", {"text": "x"}), Row("f, row 45", "f", error=InputError("broken.", way_out="Mend."))]
    given += [Row("f, row 46", "f", chat("q" * 400, "a" * 400)), Row("f, row 47", "f", chat("q" * 600, "a"))]
    given += [Row("f, row 48", "g", {"prompt": "Q", "completion": "A"})]
    audit = run(given, tmp_path / "out", skip_bad=True, held_out=0.3).to_json(tokenizer())
    wanted = {"lines": 48, "records": 42, "bad": 2, "duplicates": 3, "cut_to_length": 1, "dropped_too_long": 1}
    assert {key: audit[key] for key in wanted} == wanted
    assert audit["forms"] == {"messages": 45, "completion": 1}
    assert audit["sources"] == {"set 0": 20, "set 1": 20, "f": 1, "g": 1}
    assert audit["bad_examples"][1] == "broken."
    train, held = read(tmp_path / "out" / TRAIN), read(tmp_path / "out" / HELD_OUT)
    assert (len(train) + len(held), len(held)) == (audit["records"], audit["held_out"])
    assert 3 < len(held) < 25
    assert sum(r.seq_len for r in train + held) == audit["tokens"]
    lengths = sorted(r.seq_len for r in train + held)
    assert audit["length_min_median_p90_max"] == [lengths[0], lengths[20], lengths[37], lengths[-1]]


def test_parts_of_a_conversation_land_on_one_side(tmp_path: Path) -> None:
    thinking = [
        Row("f", "f", chat(f"q{i}", "<think>x</think>a1", "q2", "<think>y</think>a2", "q3", "a3")) for i in range(60)
    ]
    run(thinking, tmp_path / "out", held_out=0.4, template=STRIPS_THINKING)
    sides = [{text_of(r).split("<|im_end|>")[0] for r in read(tmp_path / "out" / name)} for name in (TRAIN, HELD_OUT)]
    assert len(sides[0]) + len(sides[1]) == 60
    assert len(sides[1]) > 5
    assert not sides[0] & sides[1]


def test_columns_that_change_their_type_are_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [chat("Q", "A"), {"messages": "now text"}, {"messages": [{"role": "user", "content": 3}]}, chat("R", "B")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordsError, match=r"a\.jsonl, line 2: 'messages' is str"):
        run(sources.read([path]), tmp_path / "out")
    audit = run(sources.read([path]), tmp_path / "out", skip_bad=True)
    assert (audit.records, audit.bad) == (2, 2)


def test_skip_bad_keeps_what_was_whole_and_refuses_what_never_was(tmp_path: Path) -> None:
    path, hopeless = tmp_path / "a.json", tmp_path / "b.json"
    path.write_text(json.dumps([chat("Q", "A"), chat("R", "B"), chat("S", "C")])[:-20])
    hopeless.write_text('[{"messages":')
    audit = run(sources.read([path]), tmp_path / "out", skip_bad=True)
    assert (audit.lines, audit.records, audit.bad) == (3, 2, 1)
    with pytest.raises(InputError, match=r"b\.json, item 1"):
        run(sources.read([path, hopeless]), tmp_path / "other", skip_bad=True)
    assert not (tmp_path / "other").exists()


def test_templates_mixed_in_one_input_are_named(tmp_path: Path) -> None:
    ours = renderer().text(chat("Q", "A")["messages"], prompt=False)
    other = renderer(LLAMA3).text(chat("Q", "A")["messages"], prompt=False)
    given = [Row("f, row 1", "f", {"text": ours}), Row("f, row 2", "f", {"text": other})]
    with pytest.raises(RecordsError, match=r"f, row 2: .*Llama 3"):
        run(given, tmp_path / "out")
    audit = run(given, tmp_path / "out", skip_bad=True)
    assert (audit.records, audit.bad) == (1, 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_length": 1}, "--max-length 1 is not between 2 and the target's 512 positions"),
        ({"max_length": 513}, "--max-length 513"),
        ({"too_long": "wrap"}, "--too-long 'wrap'"),
        ({"held_out": 1}, "held-out share of 1"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        run(rows(3), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


# -- duplicates -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40) | st.integers(2**64 - 3, 2**64 - 1), max_size=200))
def test_seen_is_a_set(values: list[int]) -> None:
    seen, known = Seen(recent=7), set[int]()
    for value in values:
        assert seen.add(f"{value:016x}") == (value in known)
        known.add(value)
    assert len(seen) == len(known)


def test_seen_takes_some_eight_bytes_an_id() -> None:
    seen, rng = Seen(recent=1000), np.random.default_rng(0)
    for value in rng.integers(0, 2**63, 30_000):
        seen.add(f"{int(value):016x}")
    assert seen.sorted.nbytes <= 8 * 30_000
    assert len(seen.recent) < 1000
    assert np.all(seen.sorted[1:] > seen.sorted[:-1])


# -- nothing torn ---------------------------------------------------------------------------------------------


def in_child(work: Callable[[], object]) -> int:
    """A process that does ``work``; forked, since starting Python takes longer than the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    began = time.monotonic()
    assert status(in_child(lambda: run(rows(KILLED_ROWS), out))) == 0
    return content(out), time.monotonic() - began


KILLED_ROWS = 200
MOMENTS = int(os.environ.get("EYAS_KILLS", "4"))


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_killed_at_any_moment_nothing_torn_is_read(
    tmp_path: Path, undisturbed: tuple[dict[str, bytes], float], seed: int
) -> None:
    """With an older output there or not; it stays whole, or the new one is whole; the next run gives the same bytes."""
    whole, seconds = undisturbed
    out, moment = tmp_path / "out", random.Random(seed)
    older = None
    if seed % 2:
        run(rows(20, start=1000), out)
        older = content(out)
    child = in_child(lambda: run(rows(KILLED_ROWS), out, overwrite=True))
    time.sleep(moment.uniform(0, 1.1 * seconds))
    os.kill(child, signal.SIGKILL)
    ended = status(child)
    print(f"killed {ended}, out there: {out.exists()}, beside it: {sorted(names(tmp_path) - {'out'})}")
    if out.exists():
        assert content(out) in (whole, older)
    run(rows(KILLED_ROWS), out, overwrite=True)
    assert content(out) == whole
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("name", ["replace", "fsync", "chmod", "rmtree"])
def test_killed_within_the_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before each call that makes the new folder take the old one's place."""
    out, calls = tmp_path / "out", 0
    while True:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        run(rows(5), out)
        older = content(out)

        def disturbed(kill_at: int = calls) -> None:
            holder = shutil if name == "rmtree" else os
            real, count = getattr(holder, name), 0

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            monkeypatch.setattr(holder, name, counted)
            run(rows(6), out, overwrite=True)

        ended = status(in_child(disturbed))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        calls += 1
        if out.exists():
            assert content(out)[TRAIN].count(b"\n") + content(out)[HELD_OUT].count(b"\n") in (5, 6)
        with pytest.raises(UsageError, match="exists already"):  # the older one is back, or the new one is there
            run(rows(6), out)
        if content(out) != older:
            assert content(out)[TRAIN].count(b"\n") + content(out)[HELD_OUT].count(b"\n") == 6
        assert names(tmp_path) == {"out"}
    assert calls >= 1


def test_a_second_run_on_one_output_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def meanwhile() -> Iterator[Row]:
        yield from rows(5)
        with pytest.raises(UsageError, match="Another run is writing to"):
            run(rows(3), out, overwrite=True)
        assert names(tmp_path) > {".out.lock"}
        run(rows(3), tmp_path / "out.x")  # another output, whose hidden neighbours look alike
        yield from rows(5, start=5)

    assert run(meanwhile(), out).records == 10
    assert names(tmp_path) == {"out", "out.x"}


def test_a_lock_removed_between_opening_and_locking_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ended just then: what we locked is no longer the file that a third run would lock."""
    lock, real, tries = tmp_path / ".out.lock", fcntl.flock, 0

    def slow(handle: int, how: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            lock.unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with files.sole_writer(tmp_path / "out"):
        assert tries == 2
        assert lock.exists()
    assert not lock.exists()


def test_what_a_killed_run_left_is_removed_and_no_more(tmp_path: Path) -> None:
    for name in (".out.abc.part", ".out.abc.old", ".out.x.abc.part", ".outabc.part", ".out.part"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.def.part").write_text("a file")
    (tmp_path / ".out.notes").write_text("the user's own")
    run(rows(3), tmp_path / "out")
    assert names(tmp_path) == {"out", ".out.x.abc.part", ".outabc.part", ".out.notes", ".out.part"}


def test_a_failed_run_leaves_nothing_and_names_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run(rows(3), tmp_path / "out")
    before = content(tmp_path / "out")
    monkeypatch.setattr(files, "_sync", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        run(rows(6), tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == before
    assert names(tmp_path) == {"out"}
