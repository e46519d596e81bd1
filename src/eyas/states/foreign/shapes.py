"""Which axis of a stored tensor is which, told by the sizes.

Letters: T positions, D target width, S tensors stacked, k blocks of a concatenation.

    [T, D]  [D, T]  [T, k*D]  [1, T, D]  [T, 1, D]  [S, T, D]  [T, S, D]  [S, D, T] …
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from eyas.errors import InputError

FLOATS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
MAX_STACKED = 512


@dataclass(frozen=True)
class Known:
    """What is known of a sample from elsewhere: its number of tokens and the target's width."""

    length: int | None = None
    width: int | None = None


class Ambiguous(InputError):
    """Sizes that can be read in more than one way."""


Axes = tuple[int | None, int, int]
"""Axis of the stack (or None), of the positions, of the width."""


def planes(value: Tensor, field: str, where: str, known: Known, usual: Axes | None = None) -> tuple[list[Tensor], Axes]:
    """Every [T, D] in one stored tensor, and how it was read. ``usual`` decides where the sizes leave it open.

    Raises Ambiguous, or InputError where no reading fits or where it holds no states.
    """
    require_states(value, field, where)
    while value.ndim > 2 and 1 in value.shape:
        value = value.squeeze(value.shape.index(1))
    axes = _axes(value, field, where, known, usual)
    stack, t, d = axes
    ordered = value.permute(t, d) if stack is None else value.permute(stack, t, d)
    each = [ordered] if stack is None else list(ordered.unbind(0))
    if known.width and each[0].shape[1] > known.width:
        each = [block for plane in each for block in torch.split(plane, known.width, dim=1)]
    return each, axes


def require_states(value: Tensor, field: str, where: str) -> None:
    """Floating, of two dimensions or more, not empty, and no larger than what lies in the file."""
    shape = list(value.shape)
    if value.dtype not in FLOATS:
        raise InputError(
            f"{where}: {field} {shape} is {_named(value)}; states are floating-point numbers.",
            way_out="Write the states in bfloat16, float16 or float32.",
        )
    if 0 in shape:
        raise InputError(f"{where}: {field} {shape} is empty.", way_out="Capture this sample again, or remove it.")
    if value.ndim < 2:
        raise InputError(f"{where}: {field} {shape} is no matrix.", way_out="States have a row for each position.")
    if math.prod(shape) * value.element_size() > value.untyped_storage().nbytes():
        raise InputError(
            f"{where}: {field} {shape} repeats the numbers of a smaller tensor.",
            way_out="Write it with .contiguous().",
        )


def _axes(value: Tensor, field: str, where: str, known: Known, usual: Axes | None) -> Axes:
    if value.ndim not in (2, 3):
        raise InputError(
            f"{where}: {field} {list(value.shape)} has {value.ndim} dimensions, two or three were expected.",
            way_out="Write one tensor [T, D] for each tap, or stack them as [taps, T, D].",
        )
    sizes = value.shape
    found = _readings(value.ndim, tuple(sizes), known)
    if not found and known.width and known.length:  # cut states: the width alone tells
        found = _readings(value.ndim, tuple(sizes), Known(None, known.width))
    if usual is not None and usual in found:
        return usual
    if len(found) > 1 and value.ndim == 3:  # of a stack there are fewer than positions, and far fewer than columns
        fewest = min(sizes[s] for s, _, _ in found if s is not None)
        found = [axes for axes in found if axes[0] is not None and sizes[axes[0]] == fewest]
    if len(found) > 1 and known.width is None and known.length is None:
        found = [axes for axes in found if axes[2] == value.ndim - 1]  # rows, as everybody writes them
    told = f"{where}: {field} {list(sizes)}"
    expected = f"{known.length or 'an unknown number of'} tokens and width {known.width or 'unknown'}"
    if not found:
        raise InputError(
            f"{told} fits no reading with {expected}.",
            way_out="Are these states of this target and record? Expected is [T, D], [1, T, D] or a stack of them.",
        )
    if len(found) > 1:
        raise Ambiguous(
            f"{told} can be read in {len(found)} ways with {expected}.",
            way_out="Name samples whose number of tokens differs from the width, or write [T, D] tensors in a list.",
        )
    return found[0]


def _readings(ndim: int, sizes: tuple[int, ...], known: Known) -> list[Axes]:
    found: list[Axes] = []
    for order in permutations(range(ndim)):
        stack = None if ndim == 2 else order[0]
        t, d = order[-2:]
        if known.length is not None and sizes[t] != known.length:
            continue
        if known.width is not None and sizes[d] % known.width:
            continue
        if stack is not None and sizes[stack] > min(MAX_STACKED, sizes[d]):
            continue
        found.append((stack, t, d))
    if known.width is not None and any(sizes[d] == known.width for _, _, d in found):
        found = [axes for axes in found if sizes[axes[2]] == known.width]  # one of D columns rather than k blocks
    return found


def oddities(value: Tensor, axes: Axes, field: str) -> list[str]:
    """What to say about how ``planes`` read it."""
    stack, t, d = axes
    said = []
    if t > d:
        said.append(f"{field}: rows and columns are swapped ([D, T]); read transposed")
    if stack is not None:
        said.append(f"{field}: tensors stacked on dimension {stack}")
    if value.dtype not in (torch.bfloat16, torch.float32):
        said.append(f"{field}: stored as {_named(value)}")
    return said


def wrong_numbers(values: Tensor) -> str | None:
    """What is wrong with some [T, D], in words, if it is no state at all."""
    numbers = values.float()
    if bad := int((~torch.isfinite(numbers)).any(1).sum()):
        return f"{bad} of {len(values)} rows hold NaN or infinity"
    if zero := int((numbers == 0).all(1).sum()):
        return f"{zero} of {len(values)} rows are zero"
    return None


def _named(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
