"""What a store says about itself: of which target, which taps, and which record lies where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas import provenance
from eyas.errors import InputError
from eyas.target import Target

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**30  # about eight million records in one part
TRAIN, HELD_OUT = "train", "heldout"
FP8 = torch.float8_e4m3fn
AGAIN = "Make it again: `eyas capture` with the same options and --resume checks every shard and mends the bad ones."

Dtype = Literal["bf16", "fp8"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Placed(NamedTuple):
    """Where a record lies in its shard: ``tokens`` rows from ``row`` on."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    row: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(gt=0)]
    split: str
    source: str


class Shard(BaseModel):
    model_config = ConfigDict(frozen=True)

    file: str = Field(pattern=r"^\d{5,9}\.safetensors$")
    bytes: int = Field(ge=0)
    sha256: Sha256
    records: tuple[Placed, ...]


class TargetFacts(BaseModel):
    model_config = ConfigDict(frozen=True)

    fingerprint: str
    architecture: str
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)


class Facts(BaseModel):
    """What all parts of a store share. ``taps`` are those of the drafter; ``last`` is tap n. Counts are of all parts.

    The content of a shard is a function of these facts, its records and the machine's arithmetic.
    """

    model_config = ConfigDict(frozen=True)

    taps: tuple[int, ...]
    last: int
    dtype: Dtype
    computed: str
    """By what and in which precision, e.g. "transformers float32"."""
    target: TargetFacts
    tokenizer_sha256: str | None
    template_sha256: str | None
    records: int
    tokens: int
    records_sha256: Sha256
    batch: int
    shard_bytes: int

    @property
    def stored(self) -> tuple[int, ...]:
        return stored_taps(self.taps, self.last)

    def dtype_of(self, tap: int) -> torch.dtype:
        return FP8 if self.dtype == "fp8" and tap != self.last else torch.bfloat16

    def differences(self, other: Facts) -> str:
        """Every fact that differs, as 'name ours, theirs', or nothing."""
        ours, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return ", ".join(f"{k} {ours[k]!r} and {theirs[k]!r}" for k in ours if ours[k] != theirs[k])


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True)

    version: int = Field(alias="schema")
    part: tuple[int, int]
    facts: Facts
    shards: tuple[Shard, ...]
    provenance: dict[str, Any]


def stored_taps(taps: Sequence[int], last: int) -> tuple[int, ...]:
    return tuple(sorted({*taps, last}))


def target_facts(target: Target) -> TargetFacts:
    return TargetFacts(**target.identity())


def part_name(part: tuple[int, int]) -> str:
    return f"part-{part[0]}-of-{part[1]}"


def read_manifest(path: Path) -> Manifest:
    """A manifest, every value of it checked: it is a foreign file. Raises InputError."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise InputError(f"{path} is larger than {MAX_MANIFEST_BYTES / 2**30:.0f} GiB.", way_out=AGAIN)
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a manifest of states: {error}.", way_out=AGAIN) from error
    version = value.get("schema") if isinstance(value, dict) else None
    if version != SCHEMA:
        raise InputError(
            f"{path} has schema {version!r}; this eyas reads schema {SCHEMA}.",
            way_out="Read it with the version that wrote it (see provenance in that file), or capture again.",
        )
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{path} is not a manifest of states: {'.'.join(map(str, first['loc']))}: {first['msg']}.", way_out=AGAIN
        ) from error
    for shard in manifest.shards:
        ends = np.cumsum([0, *(placed.tokens for placed in shard.records)])
        if [placed.row for placed in shard.records] != ends[:-1].tolist():
            raise InputError(f"{path}: the records of {shard.file} overlap or leave gaps.", way_out=AGAIN)
    return manifest


def is_whole(path: Path, shard: Shard) -> bool:
    """Whether the file is byte for byte what the manifest says."""
    try:
        return path.stat().st_size == shard.bytes and provenance.sha256_file(path) == shard.sha256
    except OSError:
        return False
