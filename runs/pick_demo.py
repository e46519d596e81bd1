"""The demo's conversations, picked from answers: several hundred, of every kind, none that goes in circles.

    python runs/pick_demo.py --answers answers.jsonl --out models/smollm2-135m-eagle3/demo.jsonl.gz

The same answers give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eyas import files
from eyas.errors import EyasError, InputError

Row = dict[str, Any]

SOURCES = ("own", "bfcl", "chatterbot_en", "arena_hard")  # prompts that we may pass on
PER_SOURCE = 100
CUT = 25  # of PER_SOURCE that ended at the length limit; more where too few ended by themselves
PER_CLUSTER = 4
PER_OPENING = 10  # answers of one source that begin with the same three words
MAX_REPEATED = 0.2
GRAM = 8
MAX_BYTES = 1_000_000
# Everyone reads the demo: neither delicate matters in it, nor what may be somebody's address.
DELICATE = re.compile(
    r"\b(?:sex|pregnan|boyfriend|girlfriend|anthro|catgirl|barefoot|trans-|nazi|hitler|dictad|dictator|trump|biden"
    r"|suicid|euthanas|murder|weapon|guns?\b|shot dead|(?:should|you) die\b|drugs?\b|disabilit|indulge|fic\b"
    r"|brokeback|what the f)|@\w|https?://",
    re.IGNORECASE,
)


def finish_reason(row: Row) -> str:
    return str(row.get("finish_reason", row.get("finish")))


def repeated(text: str) -> float:
    """The share of the text's runs of eight words that it has said before."""
    words = text.casefold().split()
    grams = [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def clusters(prompt: str) -> tuple[str, str]:
    """The template a prompt seems made from: its first three words, and its last three."""
    words = re.findall(r"[a-z']+|\d", re.sub(r"\d+", "0", prompt.casefold()))
    return " ".join(words[:3]), " ".join(words[-3:])


def is_fit(row: Row) -> bool:
    """Ours to pass on, ended by an answer, whole characters, nothing delicate, no answer that goes in circles."""
    messages = row["messages"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    return (
        row["source"] in SOURCES
        and finish_reason(row) in ("stop", "length")
        and messages[-1]["role"] == "assistant"
        and all(answer.strip() and "\ufffd" not in answer for answer in answers)
        and not any(DELICATE.search(message["content"]) for message in messages)
        and all(repeated(answer) <= MAX_REPEATED for answer in answers)
    )


def rank(row: Row, draw: str = "pick") -> str:
    """A fixed order that has nothing to do with meaning; another one for another ``draw``."""
    return hashlib.sha256(f"{draw}/{row['messages'][0]['content']}".encode()).hexdigest()


def diverse(rows: Iterable[Row], most: int, seen: Counter[str]) -> list[Row]:
    """At most ``most`` rows, few of one template, no answer twice. ``seen`` carries the counts on."""
    kept: list[Row] = []
    for row in sorted(rows, key=rank):
        first, last = clusters(row["messages"][0]["content"])
        answer = row["messages"][1]["content"].casefold()
        traits = {f"first: {first}": PER_CLUSTER, f"last: {last}": PER_CLUSTER, f"answer: {answer}": 1}
        traits[f"opening: {clusters(answer)[0]}"] = PER_OPENING
        if len(kept) < most and all(seen[trait] < limit for trait, limit in traits.items()):
            seen.update(traits.keys())
            kept.append(row)
    return kept


def from_source(rows: Sequence[Row]) -> list[Row]:
    """Of one source: mostly answers that ended by themselves, the rest cut ones."""
    seen: Counter[str] = Counter()
    stopped = [row for row in rows if finish_reason(row) == "stop"]
    cut = [row for row in rows if finish_reason(row) == "length"]
    kept = diverse(stopped, PER_SOURCE - CUT, seen)
    return kept + diverse(cut, PER_SOURCE - len(kept), seen)


def pick(rows: Sequence[Row]) -> list[Row]:
    """The demo's rows, sources mixed, with the keys the demo has."""
    fit = [row for row in rows if is_fit(row)]
    kept = [row for name in SOURCES for row in from_source([r for r in fit if r["source"] == name])]
    return [
        {"source": row["source"], "finish_reason": finish_reason(row), "messages": row["messages"]}
        for row in sorted(kept, key=lambda row: rank(row, "order"))
    ]


def packed(rows: Iterable[Row]) -> bytes:
    """Gzipped JSON lines without a time stamp in them."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return gzip.compress(text.encode(), mtime=0)


def read(path: Path) -> list[Row]:
    rows = [files.parse_json_line(path, number, line) for number, line in files.read_lines(path)]
    for number, row in enumerate(rows, start=1):
        if not row.get("messages") or "source" not in row:
            raise InputError(
                f"{path}, line {number}: no messages or no source.", way_out="Make the file with runs/answer.py."
            )
    return rows


def run(answers: Path, out: Path) -> None:
    rows = pick(read(answers))
    data = packed(rows)
    if not rows or len(data) > MAX_BYTES:
        raise InputError(
            f"{len(rows)} conversations of {len(data)} bytes came of {answers}; some, of at most {MAX_BYTES}, "
            "were expected.",
            way_out=f"Give answers to prompts of {', '.join(SOURCES)}.",
        )
    with files.atomic_file(out, "wb") as handle:
        handle.write(data)
    counts = Counter((row["source"], row["finish_reason"]) for row in rows)
    for (source, reason), count in sorted(counts.items()):
        print(f"{source:14} {reason:6} {count:4}")
    print(f"{len(rows)} conversations, {len(data)} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pick the demo's conversations from answers.")
    parser.add_argument("--answers", type=Path, required=True, help="JSON lines of runs/answer.py, .gz or not")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl.gz to write")
    args = parser.parse_args(argv)
    try:
        run(args.answers, args.out)
    except EyasError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
