"""Rows in, records out: train and held-out files, a manifest and an audit, in one folder written whole.

Memory does not depend on how many records there are, but for what is kept to find duplicates: 8 bytes
each, and as much again for a moment while that grows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from eyas import files, provenance
from eyas.convert import TOO_LONG, Converter, Made, TooLong
from eyas.errors import InputError, RecordsError, UsageError
from eyas.records import Record
from eyas.render import Renderer
from eyas.sources import Row

TRAIN, HELD_OUT, MANIFEST = "train.jsonl", "heldout.jsonl", "manifest.json"
SHOWN = 5  # examples kept of whatever is listed


@dataclass
class Audit:
    """What went in, what came out and what is supervised. Counts only; ``to_json`` derives the shares."""

    lines: int = 0
    bad: int = 0
    duplicates: int = 0
    events: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    ended: int = 0
    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    supervised: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    held_out: int = 0

    @property
    def records(self) -> int:
        return self.lengths.total()

    def refuse(self, reason: str) -> None:
        self.bad += 1
        if len(self.reasons) < SHOWN:
            self.reasons.append(reason)

    def count(self, record: Record, eos_ids: frozenset[int], *, held_out: bool) -> None:
        self.sources[record.source] += 1
        self.tokens += record.seq_len
        self.supervised += record.n_response_tokens
        self.lengths[record.seq_len] += 1
        self.held_out += held_out
        for first, last in record.spans():
            self.turns += 1
            self.first[int(record.input_ids[first])] += 1
            self.last[int(record.input_ids[last])] += 1
            self.ended += int(record.input_ids[last]) in eos_ids

    def to_json(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "records": self.records,
            "held_out": self.held_out,
            "bad": self.bad,
            "bad_examples": self.reasons,
            "duplicates": self.duplicates,
            "forms": dict(self.forms.most_common()),
            "cut_to_length": self.events["cut"],
            "dropped_too_long": self.events["dropped"],
            "split_at_turns": self.events["split"],
            "split_by_template": self.events["apart"],
            "sources": dict(self.sources.most_common()),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": self.supervised / self.tokens if self.tokens else None,
            "turns": self.turns,
            "turns_with_supervised_end": self.ended,
            "first_supervised": _tokens(self.first, tokenizer),
            "last_supervised": _tokens(self.last, tokenizer),
            "length_min_median_p90_max": _quantiles(self.lengths, (0, 0.5, 0.9, 1)),
        }


def _tokens(counts: Counter[int], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return [{"id": token, "text": tokenizer.decode([token]), "turns": n} for token, n in counts.most_common(SHOWN)]


def _quantiles(counts: Counter[int], shares: tuple[float, ...]) -> list[int]:
    """The values at these shares of the sorted values, each a value that occurs."""
    if not counts:
        return []
    values = sorted(counts)
    up_to = np.cumsum([counts[value] for value in values])
    return [values[int(np.searchsorted(up_to, max(1, np.ceil(share * up_to[-1]))))] for share in shares]


class Seen:
    """Ids met so far: 8 bytes each in a sorted array, as much again while it grows, and the last few in a set."""

    def __init__(self, recent: int = 2**16) -> None:
        self.sorted = np.empty(0, dtype=np.uint64)
        self.recent: set[int] = set()
        self.most_recent = recent

    def __len__(self) -> int:
        return len(self.sorted) + len(self.recent)

    def add(self, record_id: str) -> bool:
        """Whether it was there already."""
        value = int(record_id, 16)
        place = int(np.searchsorted(self.sorted, np.uint64(value)))
        if value in self.recent or (place < len(self.sorted) and int(self.sorted[place]) == value):
            return True
        self.recent.add(value)
        if len(self.recent) >= max(
            self.most_recent, len(self.sorted) // 64
        ):  # a set's entry is a dozen times an array's
            recent = np.fromiter(self.recent, dtype=np.uint64, count=len(self.recent))
            recent.sort()
            self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, recent), recent)
            self.recent.clear()
        return False


def prepare(
    rows: Iterable[Row],
    renderer: Renderer,
    out: Path,
    *,
    vocab_size: int,
    max_positions: int,
    max_length: int | None = None,
    too_long: TooLong = "cut",
    held_out: float = 0.05,
    skip_bad: bool = False,
    overwrite: bool = False,
    arguments: Mapping[str, object] | None = None,
    progress: Callable[[int], None] = lambda lines: None,
) -> Audit:
    """Write ``out`` with the rows' records; raises on the first bad row unless ``skip_bad``, and then leaves nothing.

    ``rows`` come from ``sources.read``, or from whatever stands between it and here, row by row. ``max_length`` is the
    target's ``max_positions`` where it is not given.
    """
    length = _checked(held_out, max_length, max_positions, too_long)
    converter = Converter(renderer, vocab_size=vocab_size, max_length=length, too_long=too_long)
    with files.sole_writer(out):
        files.refuse_existing(out, overwrite=overwrite)
        with files.atomic_folder(out) as folder:
            audit = _write(rows, converter, folder, held_out, skip_bad=skip_bad, progress=progress)
            manifest = {
                "schema": 1,
                **renderer.hashes(),
                "held_out_share": held_out,
                "max_length": length,
                "too_long": too_long,
                "audit": audit.to_json(renderer.tokenizer),
                "provenance": provenance.collect(arguments or {}),
            }
            text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
            (folder / MANIFEST).write_text(text, encoding="utf-8")
    return audit


def _checked(held_out: float, max_length: int | None, max_positions: int, too_long: str) -> int:
    if not 0 <= held_out < 1:
        raise UsageError(f"A held-out share of {held_out} is not between 0 and 1.", way_out="Pass --held-out 0.05.")
    if too_long not in TOO_LONG:
        raise UsageError(f"--too-long {too_long!r} is unknown.", way_out=f"Pass one of: {', '.join(TOO_LONG)}.")
    if max_length is not None and not 2 <= max_length <= max_positions:
        raise UsageError(
            f"--max-length {max_length} is not between 2 and the target's {max_positions} positions.",
            way_out="Pass a length in between, or none.",
        )
    return max_length or max_positions


def _write(
    rows: Iterable[Row],
    converter: Converter,
    folder: Path,
    held_out: float,
    *,
    skip_bad: bool,
    progress: Callable[[int], None],
) -> Audit:
    audit, seen = Audit(), Seen()
    with (
        open(folder / TRAIN, "w", encoding="utf-8") as train,
        open(folder / HELD_OUT, "w", encoding="utf-8") as held,
    ):
        for row in rows:
            audit.lines += 1
            try:
                made = converter.made(row)
            except InputError as error:
                if not skip_bad:
                    raise
                audit.refuse(error.message)
                continue
            audit.forms[made.form] += 1
            audit.events += made.events
            # By the prompt's hash, so that one prompt with two answers never lands on both sides.
            is_held_out = int(made.prompt_hash[:8], 16) < held_out * 2**32
            _keep(made, held if is_held_out else train, audit, seen, converter.renderer, is_held_out=is_held_out)
            progress(audit.lines)
    if not audit.records:
        raise RecordsError(
            f"No records came out ({audit.lines} rows, {audit.bad} refused, {audit.events['dropped']} too long).",
            way_out="The first refusal: " + (audit.reasons[0] if audit.reasons else "the input is empty."),
        )
    return audit


def _keep(made: Made, file: IO[str], audit: Audit, seen: Seen, renderer: Renderer, *, is_held_out: bool) -> None:
    for record in made.records:
        if seen.add(record.id):
            audit.duplicates += 1
            continue
        file.write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")
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
