"""What a format makes of a file's contents, before any tensor is taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """``tensors``: (field, tensor, claimed); ``name`` what the file calls its sample, if anything.

    ``width`` is the target's where the format tells it; ``last_block`` the claim for the last of a stack.
    """

    input_ids: Tensor | None
    loss_mask: Tensor | None
    tensors: tuple[tuple[str, Tensor, str | None], ...]
    name: str | None = None
    width: int | None = None
    last_block: str | None = None
    notes: tuple[str, ...] = ()


def keys_of(held: Any) -> set[str]:
    """The names of the tensors in a file that is a dictionary."""
    if not isinstance(held, Mapping):
        return set()
    return {str(key) for key, value in held.items() if isinstance(value, Tensor)}


def unused(held: Mapping[str, Any], used: set[str]) -> tuple[str, ...]:
    left = sorted(str(key) for key in held if key not in used)
    return (f"keys not used: {', '.join(left)}",) if left else ()
