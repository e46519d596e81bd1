"""What a probe wrote, read back as data: the passes of each request, in order.

The files come from another process, so nothing in them is believed: no pickle, bounded sizes, every shape checked.
Letters: B requests of a pass, T rows, C*D tap width, H drafter width, K drafted tokens, N top logits kept, n rows of a
request.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import InputError

MOST_FILE = 2 << 30  # bytes that one pass may unpack to
INTS = ("starts", "sample", "next_token", "rejected", "token_ids", "positions", "draft_ids")


@dataclass(frozen=True, eq=False)
class Turn:
    """One pass of the drafter over one request: its rows up to the sample row, which are all that count, and the chain
    drafted from there. ``taps`` and ``fused`` may be None: a probe near its limit leaves them out.

    token_ids [n], positions [n], taps [n, C*D], fused [n, H]; of each depth: ``fed_ids`` and ``fed_positions`` [K],
    ``fed``, ``post``, ``pre`` [K, H], ``top_ids`` and ``top_logits`` [K, N]; ``draft_ids`` [K]. ``next_token`` is what
    the target gave, ``rejected`` how many rows of the round before were (-1: not told).
    """

    number: int
    token_ids: np.ndarray
    positions: np.ndarray
    taps: np.ndarray | None
    fused: np.ndarray | None
    next_token: int
    rejected: int
    rows: int
    """All that were fed, those of rejected tokens too."""
    draft_ids: np.ndarray
    fed_ids: np.ndarray
    fed_positions: np.ndarray
    fed: np.ndarray
    post: np.ndarray
    pre: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray

    @property
    def depths(self) -> int:
        return len(self.draft_ids)


def read(folder: Path) -> dict[str, list[Turn]]:
    """By request, in the order they were written."""
    turns: dict[str, list[Turn]] = {}
    for number, path in enumerate(sorted(folder.glob("pass-*.npz"))):
        for request, turn in _turns(path, number):
            turns.setdefault(request, []).append(turn)
    return turns


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("pass-*.npz"))


def _turns(path: Path, number: int) -> Iterator[tuple[str, Turn]]:
    found = arrays(path)
    try:
        yield from _split(found, number)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise InputError(
            f"{path.name} is not a pass of a probe: {type(error).__name__}: {error}.",
            way_out="Record again; if it stays, report the engine's version.",
        ) from error


def arrays(path: Path) -> dict[str, np.ndarray]:
    """A pass as it was written. InputError for a file that is none, or unpacks to more than ``MOST_FILE`` bytes."""
    try:
        with zipfile.ZipFile(path) as packed:
            total = sum(info.file_size for info in packed.infolist())
        if total > MOST_FILE:
            raise InputError(
                f"{path.name} unpacks to {total:,} bytes; a pass has less than {MOST_FILE:,}.",
                way_out="Record again with fewer prompts.",
            )
        with np.load(path, allow_pickle=False) as kept:
            return {name: kept[name] for name in kept.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path.name} cannot be read: {error}.", way_out="Record again; was the disk full?") from error


def _split(arrays: Mapping[str, np.ndarray], number: int) -> Iterator[tuple[str, Turn]]:
    starts, sample = (_ints(arrays, name) for name in ("starts", "sample"))
    B, T = len(starts) - 1, int(starts[-1])
    ids, positions, drafted = (_ints(arrays, name) for name in ("token_ids", "positions", "draft_ids"))
    taps, fused = _rows(arrays, "taps", T), _rows(arrays, "fused", T)
    if not (ids.shape == positions.shape == (T,) and sample.shape == (B,) and drafted.shape[0] == B):
        raise ValueError("its arrays do not fit one another")
    depths = {name: arrays[f"depth_{name}"] for name in ("token_ids", "positions", "fed", "post", "pre")}
    K = drafted.shape[1]
    if any(a.shape[:2] != (K, B) for a in depths.values()):
        raise ValueError("its depths do not fit what was drafted")
    top_ids, top = arrays["top_ids"], arrays["top_logits"]
    for b, request in enumerate(arrays["requests"].tolist()):
        first, end = int(starts[b]), int(sample[b]) + 1
        if not first < end <= int(starts[b + 1]):
            raise ValueError(f"row {end - 1} is none of request {b}")
        yield (
            str(request),
            Turn(
                number,
                ids[first:end],
                positions[first:end],
                None if taps is None else taps[first:end],
                None if fused is None else fused[first:end],
                int(arrays["next_token"][b]),
                int(arrays["rejected"][b]),
                int(starts[b + 1]) - first,
                drafted[b],
                depths["token_ids"][:, b].astype(np.int64),
                depths["positions"][:, b].astype(np.int64),
                depths["fed"][:, b],
                depths["post"][:, b],
                depths["pre"][:, b],
                top_ids[:, b],
                top[:, b],
            ),
        )


def _ints(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    found: np.ndarray = arrays[name].astype(np.int64, casting="safe")
    return found


def _rows(arrays: Mapping[str, Any], name: str, T: int) -> np.ndarray | None:
    """[T, width] in fp32, from fp32 or from the bits of bf16."""
    if (bits := arrays.get(f"{name}_bf16")) is not None:
        found: np.ndarray | None = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        found = arrays.get(name)
    if found is not None and (found.ndim != 2 or len(found) < T):
        raise ValueError(f"{name} has {found.shape}, {T} rows were fed")
    return None if found is None else found[:T].astype(np.float32)
