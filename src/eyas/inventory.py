"""A checkpoint's tensors from its headers alone: names, dtypes, shapes. No weight is read, no torch needed.

A safetensors file is: header length N (8 bytes, little-endian) | N bytes of JSON | data. The JSON maps each
name to its dtype, shape and [begin, end) within the data, which the tensors fill without gap or overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eyas.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 100_000_000  # config.json and the index of shards
INDEX = "model.safetensors.index.json"
FETCH_AGAIN = "Fetch or write the file again."

_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
_BITS |= dict.fromkeys(("I32", "U32", "F32"), 32)
_BITS |= dict.fromkeys(("I64", "U64", "F64", "C64"), 64)


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Inventory:
    """``bytes`` counts tensor data, without headers."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    bytes: int


def read(folder: Path) -> Inventory:
    """config.json and every tensor of the checkpoint in ``folder``."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, a folder was expected" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}.", way_out="Name the folder that holds config.json.")
    config = _json_object(folder / "config.json")
    tensors: dict[str, TensorInfo] = {}
    total = 0
    for file, promised in _weight_files(folder).items():
        found, size = _read_header(folder / file, file)
        _compare_with_index(folder, file, promised, found)
        for name in found.keys() & tensors.keys():
            raise CheckpointError(
                f"{folder}: the tensor {name} is in {tensors[name].file} and in {file}.",
                way_out="Keep one of the two files, or rewrite the index.",
            )
        tensors |= found
        total += size
    return Inventory(folder, config, tensors, total)


def _weight_files(folder: Path) -> dict[str, set[str]]:
    """The files to read, as loaders prefer them, each with the tensors that an index promises in it."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": set()}
    if (folder / INDEX).is_file():
        return _shards(folder)
    if files := sorted(path.name for path in folder.glob("*.safetensors")):
        return {file: set() for file in files}
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds {', '.join(pickles)} and no safetensors; reading pickled weights comes later.",
            way_out="Convert first: python -c \"import torch, safetensors.torch as s; w = torch.load('"
            + pickles[0]
            + "', map_location='cpu', weights_only=True); "
            "s.save_file({k: v.contiguous().clone() for k, v in w.items()}, 'model.safetensors')\"",
        )
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:20])
    raise CheckpointError(
        f"{folder} holds no weights, only {present}.",
        way_out="Put model.safetensors beside config.json, or name the folder that has both.",
    )


def _shards(folder: Path) -> dict[str, set[str]]:
    index = folder / INDEX
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensors to files.", way_out=FETCH_AGAIN)
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise CheckpointError(
                f"{index} says that {name} lies in {file!r}; a file inside the folder was expected.",
                way_out="Do not load this checkpoint unless you trust it; mend the weight_map.",
            )
        shards.setdefault(file, set()).add(name)
    if missing := sorted(file for file in shards if not (folder / file).is_file()):
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)} of the {len(shards)} files in {INDEX}.",
            way_out="Fetch the missing files into the folder.",
        )
    return shards


def _stays_inside(file: str) -> bool:
    # By its spelling, not by resolving: in the hub's own cache every file is a link out of the folder.
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


def _compare_with_index(folder: Path, file: str, promised: set[str], found: dict[str, TensorInfo]) -> None:
    if absent := sorted(promised - found.keys()):
        raise CheckpointError(
            f"{folder / file} lacks {len(absent)} of the tensors that {INDEX} promises, e.g. {absent[0]}.",
            way_out="The index and the file belong to different checkpoints: fetch both again.",
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as handle:
            data = handle.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.",
            way_out="Name the folder that holds config.json and the weights.",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be read: {error.strerror}.", way_out="Check the file and its permissions."
        ) from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is longer than {MAX_JSON_BYTES} bytes.", way_out=FETCH_AGAIN)
    return _parse(data, str(path))


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}).",
            way_out=FETCH_AGAIN,
        ) from error
    except (ValueError, RecursionError) as error:  # the latter when nested without end
        raise CheckpointError(f"{where} is broken JSON ({error}).", way_out=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}, an object was expected.", way_out=FETCH_AGAIN
        )
    return value


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice!r} stands there twice")
    return value


def _read_header(path: Path, file: str) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of one file and how many bytes of data they take."""
    try:
        with open(path, "rb") as handle:
            actual = handle.seek(0, 2)
            handle.seek(0)
            start = handle.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else 0
            _check_length(path, start, length, actual)
            header = _parse(handle.read(length), f"{path}: its header")
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
    if start == b"version ":
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights.", way_out="Run `git lfs pull` in the folder."
        )
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
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise wrong(f"the dtype {dtype!r}, one of {', '.join(_BITS)} was expected")
    sizes = _whole_numbers(shape, wrong, "shape")
    ends = _whole_numbers(offsets, wrong, "data_offsets")
    if len(ends) != 2:
        raise wrong(f"the data_offsets {offsets!r}, [begin, end] was expected")
    bits = math.prod(sizes) * _BITS[dtype]
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
