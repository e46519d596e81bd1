"""One tensor as a file describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.errors import CheckpointError

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
BITS |= dict.fromkeys(("I32", "U32", "F32"), 32)
BITS |= dict.fromkeys(("I64", "U64", "F64", "C64"), 64)


@dataclass(frozen=True)
class TensorInfo:
    """``dtype`` in safetensors' spelling, whatever the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


def is_lfs_pointer(start: bytes) -> bool:
    return start.startswith(b"version ")


def lfs_pointer(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a Git LFS pointer, not the weights.", way_out="Run `git lfs pull` in the folder."
    )
