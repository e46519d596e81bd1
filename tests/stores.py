"""Small stores of states of the tiny targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
from eyas.capture import CaptureConfig, capture
from eyas.records import Record
from eyas.states import StoredStates
from eyas.target import Target

TAPS = (1, 2, 4)
LAST = 5
TOKEN_BYTES = 4 * 2 * 48 + 5  # of the tiny llama: three taps and the last in bf16, id, mask


def splits(records: Sequence[Record], held_out: int = 2) -> list[tuple[str, Record]]:
    """The last ``held_out`` are held out."""
    n = len(records) - held_out
    return [("train" if i < n else "heldout", r) for i, r in enumerate(records)]


def config(**changes: Any) -> CaptureConfig:
    """Shards of about three of the tiny records."""
    return CaptureConfig(**{"taps": TAPS, "batch": 2, "shard_bytes": 100 * TOKEN_BYTES, **changes})


def captured(
    out: Path,
    records: Sequence[Record],
    target: Target | None = None,
    flags: dict[str, Any] | None = None,
    **changes: Any,
) -> StoredStates:
    """A store of all ``records``, whatever the number of its parts; open."""
    n = changes.pop("parts", 1)
    for i in range(1, n + 1):
        asked = config(part=(i, n), **changes)
        capture(splits(records), target or tiny.target("llama"), out, asked, **(flags or {}))
    return StoredStates(out)


def shards(out: Path) -> dict[str, bytes]:
    """Every shard's bytes by its path in the store."""
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}
