"""Tensors that somebody saved by hand: any number, as list, tuple, dictionary or one stack, with ids or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from eyas.states.foreign.parts import Parts

NAME = "loose tensors"
IDS = ("input_ids", "token_ids", "ids", "tokens")
MASKS = ("loss_mask", "mask")
NAMES = ("id", "name", "conversation_id")
MAX_TENSORS = 4096
MAX_DEPTH = 8


def recognises(held: Any) -> bool:
    return any(value.is_floating_point() and value.ndim > 1 for _, value in _tensors(held))


def parts(held: Any) -> Parts:
    ids = mask = None
    states: list[tuple[str, Tensor, str | None]] = []
    left: list[str] = []
    for field, value in _tensors(held):
        word = field.rpartition(".")[2]
        flat = value.numel() == max(value.shape, default=0)
        if word in MASKS and flat:
            mask = value
        elif flat and not value.is_floating_point() and (word in IDS or (ids is None and field.startswith("["))):
            ids = value
        elif flat and field.startswith("[") and not value.is_floating_point() and mask is None:
            mask = value
        elif value.is_floating_point() and value.ndim > 1:
            states.append((field, value, None))
        else:
            left.append(field)
    named = held if isinstance(held, Mapping) else {}
    name = next((named[key] for key in NAMES if isinstance(named.get(key), str)), None)
    notes = (f"not used: {', '.join(left)}",) if left else ()
    return Parts(ids, mask, tuple(states), name=name, notes=notes)


def _tensors(held: Any, field: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with where it stands: ``[2]``, ``layer_3``, ``taps[0]``."""
    if isinstance(held, Tensor):
        yield field or "tensor", held
    elif depth < MAX_DEPTH and isinstance(held, Mapping):
        for key, value in list(held.items())[:MAX_TENSORS]:
            yield from _tensors(value, f"{field}.{key}" if field else str(key), depth + 1)
    elif depth < MAX_DEPTH and isinstance(held, list | tuple):
        for number, value in enumerate(held[:MAX_TENSORS]):
            yield from _tensors(value, f"{field}[{number}]", depth + 1)
