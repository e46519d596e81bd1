"""Conversations in, records out: train and held-out files, a manifest and an audit, in one folder written whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from eyas import files, provenance
from eyas.errors import InputError, RecordsError, UsageError
from eyas.records import CONVERSATION_KEYS, Record, Renderer, fit, messages_of, record_of

TRAIN, HELD_OUT, MANIFEST = "train.jsonl", "heldout.jsonl", "manifest.json"
SHOWN = 5  # examples kept of whatever is listed


@dataclass
class Audit:
    """What went in, what came out and what is supervised. Counts only; ``to_json`` derives the shares."""

    lines: int = 0
    bad: int = 0
    duplicates: int = 0
    cut: int = 0
    reasons: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    ended: int = 0
    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    supervised: int = 0
    lengths: list[int] = field(default_factory=list)
    held_out: int = 0

    def refuse(self, reason: str) -> None:
        self.bad += 1
        if len(self.reasons) < SHOWN:
            self.reasons.append(reason)

    def count(self, record: Record, eos_ids: frozenset[int], *, held_out: bool) -> None:
        self.sources[record.source] += 1
        self.tokens += record.seq_len
        self.supervised += record.n_response_tokens
        self.lengths.append(record.seq_len)
        self.held_out += held_out
        for first, last in record.spans():
            self.turns += 1
            self.first[int(record.input_ids[first])] += 1
            self.last[int(record.input_ids[last])] += 1
            self.ended += int(record.input_ids[last]) in eos_ids

    def to_json(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        quantiles = np.percentile(self.lengths, [0, 50, 90, 100]).astype(int).tolist() if self.lengths else []
        return {
            "lines": self.lines,
            "records": len(self.lengths),
            "held_out": self.held_out,
            "bad": self.bad,
            "bad_examples": self.reasons,
            "duplicates": self.duplicates,
            "cut_to_positions": self.cut,
            "sources": dict(self.sources.most_common()),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": self.supervised / self.tokens if self.tokens else None,
            "turns": self.turns,
            "turns_with_supervised_end": self.ended,
            "first_supervised": _tokens(self.first, tokenizer),
            "last_supervised": _tokens(self.last, tokenizer),
            "length_min_median_p90_max": quantiles,
        }


def _tokens(counts: Counter[int], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return [{"id": token, "text": tokenizer.decode([token]), "turns": n} for token, n in counts.most_common(SHOWN)]


def prepare(
    inputs: Sequence[Path],
    renderer: Renderer,
    out: Path,
    *,
    vocab_size: int,
    max_positions: int,
    held_out: float = 0.05,
    skip_bad: bool = False,
    overwrite: bool = False,
    arguments: Mapping[str, object] | None = None,
    progress: Callable[[int], None] = lambda lines: None,
) -> Audit:
    """Write ``out`` with its records; raises on the first bad line unless ``skip_bad``, and then leaves nothing."""
    if not 0 <= held_out < 1:
        raise UsageError(f"A held-out share of {held_out} is not between 0 and 1.", way_out="Pass --held-out 0.05.")
    files.refuse_existing(out, overwrite=overwrite)
    audit, seen = Audit(), set[bytes]()
    with files.atomic_folder(out) as folder:
        with (
            open(folder / TRAIN, "w", encoding="utf-8") as train,
            open(folder / HELD_OUT, "w", encoding="utf-8") as held,
        ):
            for record in _records(inputs, renderer, vocab_size, audit, skip_bad=skip_bad):
                for fitted in fit([record], max_positions):
                    _keep(fitted, audit, seen, renderer, held_out, train, held)
                    audit.cut += fitted.seq_len < record.seq_len
                progress(audit.lines)
        if not audit.lengths:
            raise RecordsError(
                f"No records came out of {', '.join(map(str, inputs))} ({audit.lines} lines, {audit.bad} refused).",
                way_out="The first refusal: " + (audit.reasons[0] if audit.reasons else "the input is empty."),
            )
        manifest = {
            "schema": 1,
            **renderer.hashes(),
            "held_out_share": held_out,
            "audit": audit.to_json(renderer.tokenizer),
            "provenance": provenance.collect(arguments or {}),
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return audit


def _records(
    inputs: Sequence[Path], renderer: Renderer, vocab_size: int, audit: Audit, *, skip_bad: bool
) -> Iterator[Record]:
    for path in inputs:
        for number, line in files.read_lines(path):
            if not line.strip():
                continue
            audit.lines += 1
            try:
                yield _record(files.parse_json_line(path, number, line), renderer, f"{path}, line {number}", vocab_size)
            except InputError as error:
                if not skip_bad:
                    raise
                audit.refuse(error.message)


def _record(row: dict[str, Any], renderer: Renderer, where: str, vocab_size: int) -> Record:
    """A record from a conversation, or from ids and a mask that are there already."""
    if any(key in row for key in CONVERSATION_KEYS):
        cut = (row.get("finish_reason") or row.get("finish")) == "length"
        return renderer.record(messages_of(row, where), str(row.get("source", "unknown")), cut=cut, where=where)
    if any("mask" in key or "ids" in key for key in row):
        return record_of(row, where, vocab_size)
    messages_of(row, where)  # raises, and names the keys
    raise AssertionError("unreachable")


def _keep(
    record: Record,
    audit: Audit,
    seen: set[bytes],
    renderer: Renderer,
    share: float,
    train: IO[str],
    held: IO[str],
) -> None:
    key = bytes.fromhex(record.id)
    if key in seen:
        audit.duplicates += 1
        return
    seen.add(key)
    # By the prompt's hash, so that one prompt with two answers never lands on both sides.
    is_held_out = int(record.prompt_hash[:8], 16) < share * 2**32
    (held if is_held_out else train).write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")
    audit.count(record, renderer.eos_ids, held_out=is_held_out)


def read_manifest(records: Path) -> dict[str, Any]:
    """The manifest beside a records file, or nothing where it stands alone."""
    path = records.parent / MANIFEST
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a manifest: {error}.", way_out="Run `eyas prepare` again.") from error
    return value if isinstance(value, dict) else {}
