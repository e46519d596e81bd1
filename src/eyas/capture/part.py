"""One part of a store, being written: shard by shard, each whole or not at all, gone on with after any end.

A finished shard is named in the part's journal; at the end the journal becomes the manifest. Whatever the journal does
not name, or what no longer has the hash it names, is made again.

Letters: T positions, D target width, C taps.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from eyas import checkpoint, files, provenance
from eyas.capture.config import Listener
from eyas.capture.source import Split, Survey, distinct, grouped, of_part
from eyas.errors import EnvironmentFault, InputError, Interrupted, TargetError, UsageError
from eyas.records import Record
from eyas.states.manifest import (
    MANIFEST,
    SCHEMA,
    Facts,
    Placed,
    Shard,
    is_whole,
    read_manifest,
)
from eyas.states.shard import bytes_per_token, empty_shard, put

JOURNAL = "journal.jsonl"
StatesOf = Callable[[Sequence[Record]], Iterator[tuple[int, torch.Tensor]]]
"""States [T, (C+1)*D] of each of some records, all stored taps in ascending order, with its index; in any order."""


@dataclass
class Part:
    """One part of a store, being written."""

    folder: Path
    facts: Facts
    part: tuple[int, int]
    survey: Survey
    shards: dict[str, Shard] = field(default_factory=dict)
    kept: int = 0
    seconds: float = 0.0

    # -- start ------------------------------------------------------------------------------------------------

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Take over what is whole of an earlier run, or refuse it, or clear it; then see whether the rest fits."""
        existing = [name for name in (MANIFEST, JOURNAL) if (self.folder / name).exists()]
        if existing and not resume and not overwrite:
            state = "holds captured states" if MANIFEST in existing else "holds an unfinished capture"
            raise UsageError(
                f"{self.folder} {state}.", way_out="Pass --resume to go on with it, or --overwrite to start anew."
            )
        kept = self._earlier() if resume and existing else {}
        self.shards, self.kept = kept, len(kept)
        if self._complete():
            return
        self.refuse_full_disk(kept)
        lines = [{"facts": self.facts.model_dump(mode="json")}, *(s.model_dump(mode="json") for s in kept.values())]
        files.write_text(self.folder / JOURNAL, "".join(json.dumps(line) + "\n" for line in lines))
        (self.folder / MANIFEST).unlink(missing_ok=True)  # before the shards it names
        for path in self.folder.iterdir():  # what is not kept, and what a killed run left half-written
            if path.name not in (".lock", JOURNAL, *kept):
                path.unlink()

    def _complete(self) -> bool:
        """Whether the part is finished and whole; its manifest is then left alone."""
        records = sum(len(shard.records) for shard in self.shards.values())
        return (self.folder / MANIFEST).exists() and records == self.survey.part_records

    def _earlier(self) -> dict[str, Shard]:
        """The shards of an earlier run that are what they were, by name."""
        if (self.folder / MANIFEST).exists():
            manifest = read_manifest(self.folder / MANIFEST)
            facts, shards = manifest.facts, list(manifest.shards)
        else:
            facts, shards = read_journal(self.folder / JOURNAL)
        if told := facts.differences(self.facts):
            raise UsageError(
                f"{self.folder} was begun with other options or records: {told} now.",
                way_out="Resume with the same ones, or start again with --overwrite.",
            )
        return {shard.file: shard for shard in shards if is_whole(self.folder / shard.file, shard)}

    def refuse_full_disk(self, kept: Mapping[str, Shard]) -> None:
        free = shutil.disk_usage(self.folder).free
        freed = sum(p.stat().st_size for p in self.folder.glob("*.safetensors") if p.name not in kept)
        missing = self.bytes - sum(shard.bytes for shard in kept.values())
        if missing > free + freed:
            raise EnvironmentFault(
                f"The states need {missing / 1e9:.1f} GB in {self.folder.parent}, {(free + freed) / 1e9:.1f} GB are "
                "free.",
                way_out="Free some space, or pass --states-dtype fp8, fewer --taps, or --shard i/n on several disks.",
            )

    @property
    def token_bytes(self) -> int:
        facts = self.facts
        return bytes_per_token(facts.taps, facts.last, facts.target.hidden_size, facts.dtype)

    @property
    def bytes(self) -> int:
        """About what the part takes on disk: its tensors, and the manifest's line of every record."""
        return self.survey.part_tokens * self.token_bytes + 100 * self.survey.part_records

    def plan(self) -> dict[str, Any]:
        """What the capture will cost, to be said before it starts."""
        return {
            "records": self.survey.part_records,
            "tokens": self.survey.part_tokens,
            "part": f"{self.part[0]}/{self.part[1]}",
            "taps": list(self.facts.stored),
            "bytes": self.bytes,
            "bytes_per_token": self.token_bytes,
            "free_bytes": shutil.disk_usage(self.folder).free,
            "kept_shards": self.kept,
        }

    # -- the work ---------------------------------------------------------------------------------------------

    def go(self, source: Iterable[Split], states_of: StatesOf, listener: Listener) -> None:
        """Shard after shard; those there already are only counted."""
        began = time.perf_counter()
        largest = max(1, self.facts.shard_bytes // self.token_bytes)
        mine = (split for split, _ in of_part(distinct(source), self.part))
        try:
            for number, group in enumerate(grouped(mine, largest)):
                name = f"{number:05d}.safetensors"
                if name not in self.shards:
                    self.shards[name] = self._write(name, group, states_of, listener)
                else:
                    listener.captured(sum(r.seq_len for _, r in group))
                self.seconds = time.perf_counter() - began
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"Stopped with {len(self.shards)} shards finished; they are kept in {self.folder}.",
                way_out="Run the same command with --resume to go on.",
            ) from error

    def _write(self, name: str, group: list[Split], states_of: StatesOf, listener: Listener) -> Shard:
        """One shard, whole or not at all, then its line in the journal."""
        placed, row = [], 0
        for split, record in group:
            named = record.source.encode("utf-8", "replace").decode()  # may hold half a surrogate pair
            placed.append(Placed(record.id, row, record.seq_len, split, named))
            row += record.seq_len
        tensors = fill(self.facts, [record for _, record in group], states_of, listener)
        path = self.folder / name
        with files.written_whole(path) as temporary:
            checkpoint.write_tensors(tensors, temporary, {"eyas": "states"})
            size, digest = temporary.stat().st_size, provenance.sha256_file(temporary)
        shard = Shard(file=name, bytes=size, sha256=digest, records=tuple(placed))
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(shard.model_dump(mode="json")) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        return shard

    def finish(self, arguments: Mapping[str, object]) -> None:
        """The manifest, which says that the part is whole, in place of the journal."""
        if self._complete():
            return
        counted = sum(len(shard.records) for shard in self.shards.values())
        if counted != self.survey.part_records:
            raise InputError(
                f"The records changed while they were captured: {self.survey.part_records} at first, {counted} now.",
                way_out="Let whatever writes them end, then start again with --overwrite.",
            )
        manifest = {
            "schema": SCHEMA,
            "part": list(self.part),
            "facts": self.facts.model_dump(mode="json"),
            "shards": [self.shards[name].model_dump(mode="json") for name in sorted(self.shards)],
            "provenance": provenance.collect(arguments),
        }
        files.write_text(self.folder / MANIFEST, json.dumps(manifest) + "\n")
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def result(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "out": str(self.folder.parent),
            "part": f"{self.part[0]}/{self.part[1]}",
            "records": self.survey.part_records,
            "tokens": self.survey.part_tokens,
            "duplicates": self.survey.duplicates,
            "taps": list(self.facts.taps),
            "stored_taps": list(self.facts.stored),
            "dtype": self.facts.dtype,
            "shards": len(self.shards),
            "kept_shards": self.kept,
            "bytes": sum(shard.bytes for shard in self.shards.values()),
            "seconds": self.seconds,
        }


def fill(facts: Facts, group: Sequence[Record], states_of: StatesOf, listener: Listener) -> dict[str, torch.Tensor]:
    """The tensors of a shard of these records."""
    rows = list(accumulate((r.seq_len for r in group), initial=0))
    shard = empty_shard(facts, rows[-1])
    for i, states in states_of(group):
        if not states.isfinite().all():
            raise TargetError(
                f"The target's states of record {group[i].id} are not finite.",
                way_out="Run the target in fp32 or bf16, or leave that record out.",
            )
        put(shard, facts, rows[i], group[i], states)
        listener.captured(group[i].seq_len)
    return shard


def read_journal(path: Path) -> tuple[Facts, list[Shard]]:
    """Facts and finished shards; a last line that was cut is a shard that was not finished."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        facts = Facts.model_validate(json.loads(lines[0])["facts"])
        return facts, [Shard.model_validate_json(line) for line in lines[1:]]
    except (ValidationError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(f"{path} cannot be gone on from: {error}.", way_out="Start again with --overwrite.") from error
