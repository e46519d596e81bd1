"""A store, read: the states of asked records, from memory-mapped shards.

Letters: B batch, T positions, D target width, C taps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas import provenance
from eyas.errors import InputError, TargetError, UsageError
from eyas.records import Record
from eyas.states.manifest import (
    AGAIN,
    FP8,
    MANIFEST,
    Manifest,
    Placed,
    Shard,
    TargetFacts,
    is_whole,
    part_name,
    read_manifest,
    target_facts,
)
from eyas.taps import States
from eyas.target import Target

_PART = re.compile(r"part-(\d{1,6})-of-(\d{1,6})")


class StoredStates:
    """A store, open for reading. Held in memory: where each record lies, about 0.3 KB a record. Of the shards only
    the rows asked for are read, through a memory map that is closed again.

    ``run`` has the form of ``taps.run``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises InputError where parts are missing or unfinished, do not belong together, or files were cut."""
        self.folder = Path(folder)
        parts = _open_parts(self.folder)
        self.facts = parts[0][1].facts
        self._shards: list[tuple[Path, Shard]] = []
        self._places: dict[str, tuple[int, Placed]] = {}
        for path, manifest in parts:
            for shard in manifest.shards:
                _require_size(path / shard.file, shard)
                for placed in shard.records:
                    self._places[placed.id] = (len(self._shards), placed)
                self._shards.append((path / shard.file, shard))
        if len(self._places) != self.facts.records:
            raise InputError(
                f"{folder} holds {len(self._places)} of the {self.facts.records} records captured.", way_out=AGAIN
            )

    def __contains__(self, record: Record) -> bool:
        return record.id in self._places

    @property
    def identity(self) -> str:
        """One digest for all that is in the store."""
        return provenance.sha256_text("\n".join(shard.sha256 for _, shard in self._shards))

    def records(self, split: str) -> list[Record]:
        """The records of ``train`` or ``heldout``, as they were captured."""
        return list(self._records(split))

    def _records(self, split: str) -> Iterator[Record]:
        for path, shard in self._shards:
            if not any(placed.split == split for placed in shard.records):
                continue
            with _opened(path) as file:
                n = sum(placed.tokens for placed in shard.records)
                ids = _rows(file, path, "input_ids", slice(0, n), (n,), torch.int32).numpy()
                mask = _rows(file, path, "loss_mask", slice(0, n), (n,), torch.bool).numpy()
                for placed in shard.records:
                    if placed.split == split:
                        rows = slice(placed.row, placed.row + placed.tokens)
                        yield Record(ids[rows].copy(), mask[rows].copy(), placed.source)

    def require(self, target: Target, taps: Sequence[int], records: Sequence[Record] = ()) -> None:
        """Raise unless these are states of ``target``, have the ``taps`` asked for and know all ``records``."""
        if self.facts.target.fingerprint != target.fingerprint():
            there, here = _told(self.facts.target), _told(target_facts(target))
            raise TargetError(
                f"{self.folder} holds states of another target: {there} there, {here} here.",
                way_out="Name the target they were captured from with --target, or capture again.",
            )
        absent = [t for t in taps if t not in self.facts.stored]
        if absent:
            stored = ",".join(map(str, self.facts.stored))
            raise UsageError(
                f"{self.folder} does not hold tap {', '.join(map(str, absent))}; it holds {stored}.",
                way_out=f"Pass --taps with some of {stored}, or capture again with --taps "
                f"{','.join(map(str, sorted({*taps, *self.facts.taps})))}.",
            )

        unknown = [record.id for record in records if record not in self]
        if unknown:
            raise InputError(
                f"{len(unknown)} of {len(records)} records are not in {self.folder}: {', '.join(unknown[:5])}"
                f"{' …' if len(unknown) > 5 else ''}.",
                way_out="Capture them too, or leave --records out to train on the records in the store.",
            )

    @torch.no_grad()
    def run(self, target: Target, input_ids: Tensor, lengths: Tensor, taps: Sequence[int]) -> States:
        """What ``taps.run`` would give for right-padded ``input_ids`` [B, T], up to the store's rounding.

        Of the target only the final norm is used. Rows past ``lengths`` [B] are zero.
        """
        self.require(target, taps)
        dtype = target.dtype
        read = [
            self._read(row[:n].cpu().numpy().astype(np.int32), taps, dtype)
            for row, n in zip(input_ids, lengths.tolist(), strict=True)
        ]
        tapped, deepest = (
            pad_sequence(list(rows), batch_first=True).to(target.device) for rows in zip(*read, strict=True)
        )
        return States(tapped, target.norm(deepest).to(target.device))

    def states_of(self, record: Record, taps: Sequence[int]) -> Tensor:
        """``taps`` of one record, in the order given: [T, C*D], fp32. Raises InputError where it is not here."""
        return self._read(record.input_ids, taps, torch.float32)[0]

    def _read(self, ids: np.ndarray, taps: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Taps [T, C*D] and tap n [T, D] of the record with these ids."""
        record_id = Record(ids, ids, "").id
        if record_id not in self._places:
            raise InputError(
                f"Record {record_id} ({len(ids)} tokens) is not in {self.folder}.",
                way_out="Capture it too, or leave --records out to train on the records in the store.",
            )
        number, placed = self._places[record_id]
        path = self._shards[number][0]
        rows = slice(placed.row, placed.row + placed.tokens)
        shape = (placed.tokens, self.facts.target.hidden_size)
        with _opened(path) as file:
            if not np.array_equal(_rows(file, path, "input_ids", rows, shape[:1], torch.int32).numpy(), ids):
                raise InputError(f"{path} does not hold record {record_id} where the manifest says.", way_out=AGAIN)
            values = {tap: self._tap(file, path, tap, rows, shape).to(dtype) for tap in {*taps, self.facts.last}}
        return torch.cat([values[tap] for tap in taps], dim=-1), values[self.facts.last]

    def _tap(self, file: Any, path: Path, tap: int, rows: slice, shape: tuple[int, int]) -> Tensor:
        stored = self.facts.dtype_of(tap)
        values = _rows(file, path, f"tap.{tap}", rows, shape, stored)
        if stored != FP8:
            return values
        return values.float() * _rows(file, path, f"tap.{tap}.scale", rows, shape[:1], torch.float32)[:, None]

    def verify(self, progress: Callable[[int], None] = lambda shards: None) -> None:
        """Read every shard and compare its hash with the manifest's. Raises InputError on the first that differs."""
        for done, (path, shard) in enumerate(self._shards, 1):
            if not is_whole(path, shard):
                raise InputError(f"{path} is not what was captured: its sha256 differs.", way_out=AGAIN)
            progress(done)


def _told(target: TargetFacts) -> str:
    return f"{target.architecture} of {target.num_layers} layers, width {target.hidden_size} ({target.fingerprint})"


def _open_parts(folder: Path) -> list[tuple[Path, Manifest]]:
    """Every part in its order; all of them must be there, finished, and of one capture."""
    found = {_numbers(path): path for path in folder.glob("part-*") if _PART.fullmatch(path.name)}
    if not found:
        what = "does not exist" if not folder.exists() else "holds no states"
        raise InputError(f"{folder} {what}.", way_out="Run `eyas capture --records … --out " + f"{folder}` first.")
    totals = sorted({n for _, n in found})
    if len(totals) > 1:
        raise InputError(
            f"{folder} mixes parts of {' and of '.join(map(str, totals))}.",
            way_out="Keep one set of parts in a folder.",
        )
    n = totals[0]
    if missing := [i for i in range(1, n + 1) if not (folder / part_name((i, n)) / MANIFEST).is_file()]:
        named = ", ".join(f"{i}/{n}" for i in missing[:10]) + (" …" if len(missing) > 10 else "")
        raise InputError(
            f"{folder} is not complete: {'part' if len(missing) == 1 else 'parts'} {named} missing or unfinished.",
            way_out=f"Run `eyas capture` for it with the same options, --shard {missing[0]}/{n} and --resume.",
        )
    parts = [(path, read_manifest(path / MANIFEST)) for _, path in sorted(found.items())]
    first = parts[0][1].facts
    for path, manifest in parts:
        if part_name(manifest.part) != path.name:
            raise InputError(f"{path} says that it is {part_name(manifest.part)}.", way_out="Undo the renaming.")
        if told := first.differences(manifest.facts):
            raise InputError(
                f"{parts[0][0]} and {path.name} are not of one capture: {told}.",
                way_out="Capture all parts from the same records with the same options.",
            )
    return parts


def _numbers(path: Path) -> tuple[int, int]:
    i, n = path.name.removeprefix("part-").split("-of-")
    return int(i), int(n)


def _require_size(path: Path, shard: Shard) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} is missing or cannot be read ({error.strerror}).", way_out=AGAIN) from error
    if size != shard.bytes:
        raise InputError(f"{path} has {size:,} bytes, {shard.bytes:,} were written.", way_out=AGAIN)


def _opened(path: Path) -> Any:
    """A shard, memory-mapped. The library refuses what is no safetensors file and headers of more than 100 MB."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a shard of states: {error}.", way_out=AGAIN) from error


def _rows(file: Any, path: Path, name: str, rows: slice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        found: Tensor = file.get_slice(name)[rows]
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: {name} cannot be read: {error}.", way_out=AGAIN) from error
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise InputError(
            f"{path}: {name} gives {list(found.shape)} of {found.dtype}, {list(shape)} of {dtype} was expected.",
            way_out=AGAIN,
        )
    return found
