"""Records: token ids with a mask of what the target said, and their form on disk as JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eyas import files
from eyas.conversations import expected, keys_present
from eyas.errors import RecordsError

KEYS = ("input_ids", "loss_mask", "seq_len", "n_prompt_tokens", "n_response_tokens", "source")
SYNONYMS = {"token_ids": "input_ids", "ids": "input_ids", "tokens": "input_ids", "mask": "loss_mask"}


@dataclass(frozen=True, eq=False)
class Record:
    """One tokenised conversation. Arrays are int32 and bool [T]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    @property
    def id(self) -> str:
        """First 16 hex digits of the sha256 of the ids as little-endian int64."""
        return hashlib.sha256(self.input_ids.astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def seq_len(self) -> int:
        return len(self.input_ids)

    @property
    def n_response_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def prompt_hash(self) -> str:
        """Hash of the tokens before the first supervised one: equal for equal prompts, whatever was answered."""
        first = int(self.loss_mask.argmax())
        return hashlib.sha256(self.input_ids[:first].astype("<i8").tobytes()).hexdigest()

    def spans(self) -> list[tuple[int, int]]:
        """Supervised stretches as (first, last) positions, last included."""
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.loss_mask.astype(np.int8), [0]))))
        return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def to_json(self) -> dict[str, Any]:
        n = self.n_response_tokens
        return {
            "input_ids": self.input_ids.tolist(),
            "loss_mask": self.loss_mask.astype(int).tolist(),
            "seq_len": self.seq_len,
            "n_prompt_tokens": self.seq_len - n,
            "n_response_tokens": n,
            "source": self.source,
        }


# -- records already tokenised --------------------------------------------------------------------------------


def record_of(row: Mapping[str, Any], where: str, vocab_size: int | None) -> Record:
    """A record from a JSON object; the usual misspellings of its keys are understood."""
    row = {SYNONYMS.get(k, k) if SYNONYMS.get(k, k) not in row else k: v for k, v in row.items()}
    for key in ("input_ids", "loss_mask"):
        if key not in row:
            raise RecordsError(f"{where}: no {key!r}. {keys_present(row)}", way_out=expected())
    ids, mask = (
        _integers(row["input_ids"], f"{where}: input_ids"),
        _integers(row["loss_mask"], f"{where}: loss_mask"),
    )
    if len(ids) != len(mask):
        raise RecordsError(
            f"{where}: loss_mask has {len(mask)} entries for {len(ids)} tokens.",
            way_out="Both must be of one length; write the records again, or pass --skip-bad.",
        )
    if "seq_len" in row and row["seq_len"] != len(ids):
        raise RecordsError(
            f"{where}: seq_len says {row['seq_len']!r}, input_ids has {len(ids)} tokens: the line was cut or mixed up.",
            way_out="Write the records again, or pass --skip-bad.",
        )
    largest = (vocab_size or 2**31) - 1  # ids are kept as int32
    if ids.min() < 0 or ids.max() > largest:
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        whose = "the target's vocabulary" if vocab_size else "any vocabulary"
        raise RecordsError(
            f"{where}: token id {bad} is outside {whose} (0 to {largest}).",
            way_out="These records were made with another tokenizer; prepare them again with this target.",
        )
    if not set(np.unique(mask)) <= {0, 1}:
        raise RecordsError(
            f"{where}: loss_mask holds values other than 0 and 1.", way_out="Use 1 for supervised tokens."
        )
    if not mask.any():
        raise RecordsError(
            f"{where}: loss_mask is zero everywhere, so nothing in it can be learnt or measured.",
            way_out="Check how the mask was made (a template that did not match?), or pass --skip-bad.",
        )
    return Record(ids.astype(np.int32), mask.astype(bool), str(row.get("source", "unknown")))


def _integers(value: object, where: str) -> np.ndarray:
    if not isinstance(value, list):
        raise RecordsError(f"{where} is {type(value).__name__}, a list of integers was expected.", way_out=expected())
    if not value:
        raise RecordsError(f"{where} is empty.", way_out="Remove the line, or pass --skip-bad.")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths inside
        array = np.empty(0, dtype=object)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise RecordsError(
            f"{where} holds more than integers.", way_out="Token ids and masks are flat lists of integers."
        )
    return array.astype(np.int64)


def stream(path: Path, *, vocab_size: int | None = None) -> Iterator[Record]:
    """Records of a JSON-lines file (``.gz`` too), one by one. Raises RecordsError naming the line."""
    for number, line in files.read_lines(path):
        if line.strip():
            yield record_of(files.parse_json_line(path, number, line), f"{path}, line {number}", vocab_size)


def read(path: Path, *, vocab_size: int | None = None, limit: int | None = None) -> list[Record]:
    """The first ``limit`` records of a file, or all. As ``stream``; an empty file is an error."""
    found = list(islice(stream(path, vocab_size=vocab_size), limit))
    if not found:
        raise RecordsError(f"{path} holds no records.", way_out="Run `eyas prepare` on conversations first.")
    return found


def fit(records: Iterable[Record], max_positions: int) -> Iterator[Record]:
    """Records cut to so many tokens, after the last of them that is supervised; one with none is dropped."""
    for record in records:
        if record.seq_len <= max_positions:
            yield record
        elif len(supervised := np.flatnonzero(record.loss_mask[:max_positions])):
            end = int(supervised[-1]) + 1
            yield replace(record, input_ids=record.input_ids[:end], loss_mask=record.loss_mask[:end])
