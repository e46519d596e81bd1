"""The header of a safetensors file: length N (8 bytes, little-endian) | N bytes of JSON | data.

The JSON maps each name to its dtype, shape and [begin, end) within the data, which the tensors fill without gap or
overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from eyas.errors import CheckpointError
from eyas.inventory.json_file import FETCH_AGAIN, parse
from eyas.inventory.tensor import BITS, TensorInfo, is_lfs_pointer, lfs_pointer

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(path: Path, file: str) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of one file and how many bytes of data they take."""
    try:
        with open(path, "rb") as handle:
            actual = handle.seek(0, 2)
            handle.seek(0)
            start = handle.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else 0
            _check_length(path, start, length, actual)
            header = parse(handle.read(length), f"{path}: its header")
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be read: {error.strerror}.", way_out="Check the file and its permissions."
        ) from error
    header.pop("__metadata__", None)
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    end = _check_layout(path, spans)
    if (expected := 8 + length + end) != actual:
        what = "truncated" if actual < expected else "too long"
        raise CheckpointError(f"{path} is {what}: {actual} bytes, {expected} expected.", way_out=FETCH_AGAIN)
    tensors = {name: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file) for name, entry in header.items()}
    return tensors, end


def _check_length(path: Path, start: bytes, length: int, actual: int) -> None:
    if is_lfs_pointer(start):
        raise lfs_pointer(path)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} announces a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed.",
            way_out="This is not a safetensors file, or it is damaged: fetch it again.",
        )
    if (expected := 8 + length) > actual:
        raise CheckpointError(
            f"{path} is truncated: {actual} bytes, at least {expected} expected.", way_out=FETCH_AGAIN
        )


def _span(path: Path, name: str, entry: object) -> tuple[int, int]:
    """[begin, end) of one tensor, after its entry was checked."""

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: the tensor {name} has {what}.", way_out=FETCH_AGAIN)

    if not isinstance(entry, dict):
        raise wrong(f"the entry {entry!r}, an object was expected")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"the dtype {dtype!r}, one of {', '.join(BITS)} was expected")
    sizes = _whole_numbers(shape, wrong, "shape")
    ends = _whole_numbers(offsets, wrong, "data_offsets")
    if len(ends) != 2:
        raise wrong(f"the data_offsets {offsets!r}, [begin, end] was expected")
    bits = math.prod(sizes) * BITS[dtype]
    if (ends[1] - ends[0]) * 8 != bits:
        raise wrong(f"{ends[1] - ends[0]} bytes, {bits / 8:g} expected of {dtype} {sizes}")
    return ends[0], ends[1]


def _whole_numbers(value: object, wrong: Callable[[str], CheckpointError], what: str) -> list[int]:
    # bool is an int to Python, but not to the format
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise wrong(f"the {what} {value!r}, a list of whole numbers from 0 was expected")
    return value


def _check_layout(path: Path, spans: dict[str, tuple[int, int]]) -> int:
    """Where the data end, given that each tensor begins where the one before it ended."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: the tensor {name} {what} (begins at {begin}, {position} expected).",
                way_out=FETCH_AGAIN,
            )
        position = end
    return position
