"""Which records a part of a store is made of: streamed, each text once, dealt out to parts and shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eyas import records
from eyas.errors import RecordsError
from eyas.records import Record

Split = tuple[str, Record]


@dataclass(frozen=True)
class RecordFiles:
    """The records of some files by split, read anew whenever iterated, never held."""

    paths: Mapping[str, Path]
    vocab_size: int
    max_positions: int

    def __iter__(self) -> Iterator[Split]:
        for split, path in self.paths.items():
            for record in records.fit(records.stream(path, vocab_size=self.vocab_size), self.max_positions):
                yield split, record


@dataclass(frozen=True)
class Survey:
    """What there is to capture: in all, and in this part."""

    records: int
    tokens: int
    sha256: str
    part_records: int
    part_tokens: int
    longest: int
    duplicates: int


def distinct(source: Iterable[Split]) -> Iterator[tuple[Split, int]]:
    """Each text once, with the number it has among them: states depend on nothing but the token ids."""
    seen: set[bytes] = set()
    for split, record in source:
        key = bytes.fromhex(record.id)
        if key not in seen:
            yield (split, record), len(seen)
            seen.add(key)


def of_part(numbered: Iterable[tuple[Split, int]], part: tuple[int, int]) -> Iterator[tuple[Split, int]]:
    """Every n-th of the records, from the i-th on."""
    i, n = part
    return ((item, number) for item, number in numbered if number % n == i - 1)


def survey(source: Iterable[Split], part: tuple[int, int]) -> Survey:
    """One look at all records: how many there are, and which, before anything is written."""
    counts = {"records": 0, "tokens": 0, "part_records": 0, "part_tokens": 0, "longest": 0}
    digest, lines = hashlib.sha256(), 0

    def counted() -> Iterator[Split]:
        nonlocal lines
        for item in source:
            lines += 1
            yield item

    for (_, record), number in distinct(counted()):
        mine = number % part[1] == part[0] - 1
        counts["records"] += 1
        counts["tokens"] += record.seq_len
        counts["part_records"] += mine
        counts["part_tokens"] += record.seq_len * mine
        counts["longest"] = max(counts["longest"], record.seq_len)
        digest.update(f"{record.id}\n".encode())
    if not counts["part_records"]:
        raise RecordsError(
            f"No records to capture in part {part[0]} of {part[1]}: there are {counts['records']} in all.",
            way_out="Run `eyas prepare` first, or choose fewer parts.",
        )
    return Survey(**counts, sha256=digest.hexdigest(), duplicates=lines - counts["records"])


def grouped(items: Iterable[Split], largest: int) -> Iterator[list[Split]]:
    """Consecutive records of at most ``largest`` tokens together; a longer one alone."""
    group: list[Split] = []
    tokens = 0
    for item in items:
        if group and tokens + item[1].seq_len > largest:
            yield group
            group, tokens = [], 0
        group.append(item)
        tokens += item[1].seq_len
    if group:
        yield group
