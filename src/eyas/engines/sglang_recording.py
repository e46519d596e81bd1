"""The rounds that the plugin in SGLang wrote, put where and as ``recording`` reads those of every engine.

Two things are spelled otherwise there: rows of bf16 are called ``taps`` beside a name of their type, and what no
module of the drafter showed is NaN. A state that *is* NaN makes logits that are, so the two are told apart.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.engines import recording

STATES = ("depth_fed", "depth_post", "depth_pre")
PUT_BACK = ""  # stands for a request whose rows cannot be told apart; no request is called so


@dataclass(frozen=True)
class Moved:
    """``error``: why not all that was recorded is there."""

    passes: int
    bytes: int
    error: str | None = None


def moved(rounds: Path, folder: Path, most_bytes: int, put_back: Collection[str] = ()) -> Moved:
    """Every round of ``rounds`` into ``folder``, up to ``most_bytes``; what was moved is gone from the first.

    ``put_back``: requests that the engine began anew, so that their rounds do not follow one another. Raises
    InputError for a file that is no round.
    """
    passes = written = 0
    for path in sorted(rounds.glob("pass-*.npz")):
        arrays = recording.arrays(path)
        if not _shown(arrays):
            return Moved(passes, written, "the modules of this drafter show no states")
        if written + path.stat().st_size > most_bytes:
            return Moved(passes, written, f"the limit of {most_bytes:,} bytes is reached")
        try:
            written += _write(folder / path.name, _spelled(arrays, put_back))
        except OSError as error:
            return Moved(passes, written, error.strerror or str(error))
        path.unlink()
        passes += 1
    return Moved(passes, written)


def clear(rounds: Path) -> None:
    """What was recorded so far belongs to nobody's question."""
    for path in rounds.glob("pass-*.npz"):
        path.unlink()


def _shown(arrays: dict[str, np.ndarray]) -> bool:
    """Whether the states of every depth [K, B, H] are there, or their logits [K, B, N] are as little numbers."""
    floats = {name: value for name, value in arrays.items() if value.dtype.kind == "f"}
    if "top_logits" not in floats or not np.isfinite(floats["top_logits"]).any():
        return True
    there = [floats[name] for name in STATES if name in floats]
    return not any(np.isnan(depth).all() for states in there for depth in states)


def _spelled(arrays: dict[str, np.ndarray], put_back: Collection[str]) -> dict[str, np.ndarray]:
    found = {name: value for name, value in arrays.items() if name != "taps_dtype"}
    if str(arrays.get("taps_dtype")) == "bfloat16" and "taps" in found:
        found["taps_bf16"] = found.pop("taps")
    if put_back and "requests" in found:
        names = [PUT_BACK if name in put_back else name for name in found["requests"].tolist()]
        found["requests"] = np.array(names, dtype=np.str_)
    return found


def _write(path: Path, arrays: dict[str, np.ndarray]) -> int:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path.stat().st_size
