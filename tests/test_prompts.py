"""The named sets as they really are, and files of the user's own."""

import gzip
import json
from pathlib import Path

import pytest

from eyas import prompts
from eyas.errors import InputError, UsageError
from eyas.prompts import Prompt
from eyas.provenance import sha256_text


def test_mt_bench_is_eighty_questions_of_two_turns() -> None:
    found = prompts.load("mt-bench")
    assert len(found) == 80
    assert {len(prompt.turns) for prompt in found} == {2}
    assert found[0].id == "mt-bench/81"
    assert found[0].turns[0].startswith("Compose an engaging travel blog post about a recent trip to Hawaii")
    assert found[0].turns[1].endswith("Start every sentence with the letter A.")


def test_humaneval_is_164_functions_to_complete() -> None:
    found = prompts.load("humaneval")
    assert len(found) == 164
    assert (found[0].id, found[-1].id) == ("HumanEval/0", "HumanEval/163")
    text = found[0].turns[0]
    assert text.startswith(
        "Complete the following Python function. Reply with the whole function.\n\n"
        "```python\nfrom typing import List\n\n\ndef has_close_elements("
    )
    assert text.endswith('    True\n    """\n```')
    assert all(prompt.turns[0].count("```") == 2 for prompt in found)


def test_gsm8k_is_the_1319_test_questions() -> None:
    found = prompts.load("gsm8k")
    assert len(found) == 1319
    assert found[0].id == "gsm8k/0"
    assert found[0].turns[0].startswith("Janet’s ducks lay 16 eggs per day.")


@pytest.mark.parametrize(
    ("name", "count", "turns", "first", "begins"),
    [
        ("chatterbot-corpus", 748, 748, "chatterbot-corpus/ai/0", "What is AI?"),
        ("bfcl-eval", 3929, 5289, "bfcl-eval/simple_python_0", "Find the area of a triangle"),
        ("chitchat", 2958, 66846, "chitchat/a07edb12-6b91-4138-b11e-02421888d699", "Hello\nHow are you doing"),
        ("arena-hard", 750, 750, "arena-hard/2edbb5f36f5b42be", "Write me"),
    ],
)
def test_sets_for_training_are_distinct_and_never_empty(
    name: str, count: int, turns: int, first: str, begins: str
) -> None:
    found = prompts.load(name)
    assert (len(found), sum(len(p.turns) for p in found)) == (count, turns)
    assert (found[0].id, found[0].turns[0][: len(begins)]) == (first, begins)
    assert len({p.turns for p in found}) == len({p.id for p in found}) == count
    assert all(turn == turn.strip() != "" for p in found for turn in p.turns)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("mt-bench", "dfce446eb587651d"),
        ("humaneval", "d918c2ce706b8681"),
        ("gsm8k", "8b4b745ea51d8861"),
    ],
)
def test_no_prompt_of_a_set_has_changed(name: str, digest: str) -> None:
    everything = json.dumps([[prompt.id, prompt.turns] for prompt in prompts.load(name)])
    assert sha256_text(everything)[:16] == digest


def test_ids_are_unique_and_limit_takes_the_first() -> None:
    for name in prompts.names():
        everything = prompts.load(name)
        assert len({prompt.id for prompt in everything}) == len(everything)
        assert prompts.load(name, 3) == everything[:3]
    assert len(prompts.load("mt-bench", 1000)) == 80


def test_messages_are_the_first_turn() -> None:
    assert Prompt("a", ("first", "second")).messages() == [{"role": "user", "content": "first"}]


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert tuple(prompts.BENCHMARKS) == ("mt-bench", "humaneval", "gsm8k")
    assert tuple(prompts.FOR_TRAINING) == ("chatterbot-corpus", "bfcl-eval", "chitchat", "arena-hard")
    assert prompts.names() == (*prompts.BENCHMARKS, *prompts.FOR_TRAINING)
    with pytest.raises(UsageError, match="Did you mean 'mt-bench'"):
        prompts.load("mtbench")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(UsageError, match=f"{limit} prompts"):
        prompts.load("gsm8k", limit)


def test_json_lines_in_all_three_spellings(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one", "id": 7},
        {"turns": ["two", "three"]},
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "four"},
                {"role": "assistant", "content": "no turn of the user's"},
                {"role": "user", "content": "five"},
            ]
        },
    ]
    text = "\n\n".join(json.dumps(row) for row in rows) + "\n"
    (tmp_path / "own.jsonl").write_text(text, encoding="utf-8")
    with gzip.open(tmp_path / "own.jsonl.gz", "wt", encoding="utf-8") as handle:
        handle.write(text)
    found = prompts.load(str(tmp_path / "own.jsonl"))
    assert [p.turns for p in found] == [("one",), ("two", "three"), ("four", "five")]
    assert [p.id for p in found] == ["7", "own.jsonl/3", "own.jsonl/5"]
    assert [p.turns for p in prompts.load(str(tmp_path / "own.jsonl.gz"))] == [p.turns for p in found]
    assert prompts.load(str(tmp_path / "own.jsonl"), 2) == found[:2]


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Wie geht's?\n\n  äh  \n", encoding="utf-8")
    assert prompts.load(str(tmp_path / "own.txt")) == [
        Prompt("own.txt/1", ("Wie geht's?",)),
        Prompt("own.txt/3", ("äh",)),
    ]
    with gzip.open(tmp_path / "own.txt.gz", "wb") as handle:
        handle.write(b"zipped\n")
    assert prompts.load(str(tmp_path / "own.txt.gz")) == [Prompt("own.txt.gz/1", ("zipped",))]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"text": "x"}',
        '{"prompt": 3}',
        '{"prompt": " "}',
        '{"turns": []}',
        '{"turns": "one"}',
        '{"turns": ["a", null]}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": ["x"]}',
        '{"messages": null}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": {"role": "user", "content": "x"}}',
    ],
)
def test_an_object_without_prompt_text_is_named_by_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2: no prompt text"):
        prompts.load(str(tmp_path / "bad.jsonl"))


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n', encoding="utf-8")
    with pytest.raises(InputError, match="line 1: broken JSON"):
        prompts.load(str(tmp_path / "broken.jsonl"))
    (tmp_path / "latin.txt").write_bytes(b"fine\nb\xe4h\n")
    with pytest.raises(InputError, match="line 2: not UTF-8 \\(byte 0xe4 at offset 1"):
        prompts.load(str(tmp_path / "latin.txt"))
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(InputError, match="no prompts"):
        prompts.load(str(tmp_path / "empty.txt"))
    with pytest.raises(InputError, match="does not exist"):
        prompts.load(str(tmp_path / "gone.jsonl"))
