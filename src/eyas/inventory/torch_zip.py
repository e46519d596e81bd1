"""The tensors of a file that ``torch.save`` wrote, without torch and without running anything in it.

Such a file is a zip: ``NAME/data.pkl`` describes the object, ``NAME/data/KEY`` holds each storage's bytes. The pickle
is a program for a stack machine. Here it is not run by ``pickle``: its opcodes are read one by one
(``pickletools.genops``) and only those that build a dictionary of tensors have a meaning; whatever else stands in it,
a name to import or a function to call, is refused. Names of functions as in torch 2.13 ``_utils.py`` and
``serialization.py``.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError
from eyas.inventory.json_file import FETCH_AGAIN
from eyas.inventory.tensor import BITS, TensorInfo, is_lfs_pointer, lfs_pointer

MAX_PICKLE_BYTES = 16_000_000  # a tensor takes about 300
MAX_OPCODES = 2_000_000
MAX_ENTRIES = 200_000
ZIP = b"PK\x03\x04"

_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
# Without a storage class of their own; _rebuild_tensor_v3 names them.
_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}
_FUNCTIONS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
}
_NAMES = _FUNCTIONS | {f"torch {name}" for name in (*_STORAGES, *_DTYPES)} | {"torch.storage UntypedStorage"}


@dataclass(frozen=True)
class _Name:
    """Something that the pickle would import."""

    dotted: str


@dataclass(frozen=True)
class _Storage:
    dtype: str | None  # None: bytes, whose meaning the tensor tells
    key: str
    numel: int


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: _Storage


_MARK = object()


class _Refused(Exception):
    """What stands in the pickle and has no meaning here."""


def read_zip(path: Path, file: str) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of one file and how many bytes of data they take. Raises CheckpointError on anything else in it."""
    try:
        with open(path, "rb") as handle:
            _require_zip(path, handle.read(16))
        with zipfile.ZipFile(path) as archive:
            sizes, pickle = _contents(path, archive)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be read: {error.strerror or error}.", way_out="Check the file and its permissions."
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} is a damaged zip file ({error}).", way_out=FETCH_AGAIN) from error
    try:
        found = {name: _checked(name, tensor, sizes) for name, tensor in _tensors(_built(pickle)).items()}
    except _Refused as refused:
        raise CheckpointError(
            f"{path}: data.pkl holds {refused}; a dictionary of tensors was expected.",
            way_out="Save the state_dict alone, e.g. safetensors.torch.save_file(model.state_dict(), ...). "
            "Do not load this file with torch.load(weights_only=False) unless you trust it.",
        ) from refused
    total = sum(math.prod(tensor.shape) * BITS[tensor.dtype] // 8 for tensor in found.values())
    return {name: TensorInfo(name, t.dtype, t.shape, file) for name, t in found.items()}, total


def _require_zip(path: Path, start: bytes) -> None:
    if start.startswith(ZIP):
        return
    if is_lfs_pointer(start):
        raise lfs_pointer(path)
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"{path} is a bare pickle, as torch wrote before 1.6; only its zip format is read.",
            way_out=f"Write it again: python -c \"import torch; f = '{path.name}'; "
            "torch.save(torch.load(f, map_location='cpu', weights_only=True), f)\"",
        )
    raise CheckpointError(f"{path} is no file of torch.save: it begins with {start[:8]!r}.", way_out=FETCH_AGAIN)


def _contents(path: Path, archive: zipfile.ZipFile) -> tuple[dict[str, int], bytes]:
    """Bytes of each storage by key, and the pickle."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) < len(archive.infolist()):
        raise CheckpointError(f"{path} holds two files of one name.", way_out=FETCH_AGAIN)
    if len(entries) > MAX_ENTRIES:
        raise CheckpointError(
            f"{path} holds {len(entries)} files, at most {MAX_ENTRIES} are read.", way_out=FETCH_AGAIN
        )
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{path} is a zip file without NAME/data.pkl, so torch.save did not write it.", way_out=FETCH_AGAIN
        )
    root = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{root}byteorder")
    if order is not None and archive.read(order)[:8] != b"little":
        raise CheckpointError(f"{path} is written big-endian.", way_out="Write it again on a usual machine.")
    with archive.open(entries[pickles[0]]) as handle:
        pickle = handle.read(MAX_PICKLE_BYTES + 1)
    if len(pickle) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: data.pkl is longer than {MAX_PICKLE_BYTES} bytes.", way_out=FETCH_AGAIN)
    data = f"{root}data/"
    return {name.removeprefix(data): e.file_size for name, e in entries.items() if name.startswith(data)}, pickle


def _tensors(built: object) -> Mapping[str, _Tensor]:
    if not isinstance(built, dict):
        raise _Refused(f"a {type(built).__name__.lstrip('_')}")
    for name, value in built.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            raise _Refused(f"{type(value).__name__.lstrip('_')} under {str(name)[:80]!r}")
    return built


def _checked(name: str, tensor: _Tensor, sizes: Mapping[str, int]) -> _Tensor:
    """The tensor, if its storage is in the file and large enough."""
    stored, bits = tensor.storage, BITS[tensor.dtype]
    expected = stored.numel * (BITS[stored.dtype] if stored.dtype else 8) // 8
    if sizes.get(stored.key) != expected:
        raise _Refused(f"{name}, whose {expected} bytes are {sizes.get(stored.key)} in the file")
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if 0 not in tensor.shape and (last + 1) * bits > expected * 8:
        raise _Refused(f"{name}, which reaches beyond its {expected} bytes")
    return tensor


# -- the stack machine ------------------------------------------------------------------------------------------------


def _built(pickle: bytes) -> object:
    """What the pickle builds, if it builds nothing but containers, numbers, texts and tensors."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if count > MAX_OPCODES:
                raise _Refused(f"more than {MAX_OPCODES} instructions")
            if opcode.name == "STOP":
                (result,) = stack
                return result
            _step(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError) as error:  # a stack with something else on it
        raise _Refused("instructions that do not fit each other") from error
    except ValueError as error:
        raise _Refused(f"what is no pickle ({error})") from error
    raise _Refused("no end")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _PUSH:
        stack.append(_PUSH[name](argument))
    elif name in ("PROTO", "FRAME"):
        pass
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _TUPLES:
        items = [stack.pop() for _ in range(_TUPLES[name])]
        stack.append(tuple(reversed(items)))
    elif name == "TUPLE":
        stack.append(tuple(_to_mark(stack)))
    elif name == "APPEND":
        item = stack.pop()
        _only(stack[-1], list).append(item)
    elif name == "APPENDS":
        items = _to_mark(stack)
        _only(stack[-1], list).extend(items)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _set(stack[-1], [key, value])
    elif name == "SETITEMS":
        items = _to_mark(stack)
        _set(stack[-1], items)
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        if name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            argument = f"{module} {attribute}"
        if argument not in _NAMES:
            raise _Refused(f"{argument.replace(' ', '.')[:120]!r}, which is neither a tensor nor a container")
        stack.append(_Name(argument))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_called(_only(function, _Name).dotted, _only(arguments, tuple)))
    elif name == "BUILD":  # attributes of an OrderedDict: the versions of modules
        stack.pop()
        _only(stack[-1], dict)
    else:
        raise _Refused(f"the instruction {name}")


_PUSH: dict[str, Any] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
}
_PUSH |= dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), lambda value: value)
_PUSH |= dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), lambda value: value)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _to_mark(stack: list[Any]) -> list[Any]:
    start = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK)
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _set(target: object, items: list[Any]) -> None:
    pairs = dict(zip(items[::2], items[1::2], strict=True)) if all(type(k) in (str, int) for k in items[::2]) else None
    if pairs is None:  # torch names tensors with texts, optimizers number them; a nested key could exhaust the stack
        raise _Refused("a key that is neither text nor number")
    _only(target, dict).update(pairs)


def _only(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Refused("instructions that do not fit each other")
    return value


def _storage(described: object) -> _Storage:
    """('storage', class, key, device, numel), which stands for bytes beside the pickle."""
    what, kind, key, _device, numel = _only(described, tuple)
    module_name = _only(kind, _Name).dotted.split(" ")[1]
    if what != "storage" or not isinstance(key, str) or not _whole((numel,)):
        raise _Refused("a storage that is none")
    if module_name not in _STORAGES and module_name != "UntypedStorage":
        raise _Refused(f"a storage of {module_name}")
    return _Storage(_STORAGES.get(module_name), key, numel)


def _called(function: str, arguments: tuple[Any, ...]) -> object:
    if function == "collections OrderedDict":
        if arguments:
            raise _Refused("a dictionary made of something")
        return {}
    if function == "torch._utils _rebuild_parameter":
        return _only(arguments[0], _Tensor)
    if function == "torch._utils _rebuild_tensor_v2":
        storage, offset, shape, stride = arguments[:4]
        return _tensor(storage, offset, shape, stride, _only(storage, _Storage).dtype)
    if function == "torch._utils _rebuild_tensor_v3":
        storage, offset, shape, stride = arguments[:4]
        return _tensor(storage, offset, shape, stride, _DTYPES.get(_only(arguments[6], _Name).dotted.split(" ")[1]))
    raise _Refused(f"a call of {function.replace(' ', '.')!r}")


def _tensor(storage: object, offset: int, shape: object, stride: object, dtype: str | None) -> _Tensor:
    sizes, steps = _only(shape, tuple), _only(stride, tuple)
    if not _whole((offset, *sizes, *steps)) or len(sizes) != len(steps) or dtype is None:
        raise _Refused("a tensor whose shape is none")
    return _Tensor(dtype, sizes, steps, offset, _only(storage, _Storage))


def _whole(numbers: tuple[object, ...]) -> bool:
    return all(type(n) is int and 0 <= n < 2**63 for n in numbers)
