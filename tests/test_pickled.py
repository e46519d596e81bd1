"""Weights that torch.save wrote: named, shaped and typed without torch, and nothing in the file is ever run."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import inventory
from eyas.errors import CheckpointError
from eyas.inventory import TensorInfo, torch_zip


def folder_with(folder: Path, name: str, value: object, **options: Any) -> Path:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    torch.save(value, folder / name, **options)
    return folder


def refused(folder: Path, match: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        inventory.read(folder)
    assert caught.value.way_out
    return caught.value


def with_pickle(path: Path, data: bytes, storages: dict[str, bytes] | None = None) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", data)
        for key, held in (storages or {}).items():
            archive.writestr(f"w/data/{key}", held)


DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_under_its_name(tmp_path: Path, dtype: torch.dtype) -> None:
    found = inventory.read(folder_with(tmp_path, "pytorch_model.bin", {"a": torch.zeros(3, 5, dtype=dtype)}))
    assert found.tensors == {"a": TensorInfo("a", DTYPES[dtype], (3, 5), "pytorch_model.bin")}
    assert found.bytes == 15 * dtype.itemsize


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).half()
    held = module.state_dict()  # an OrderedDict with attributes
    held["parameter"] = torch.nn.Parameter(torch.zeros(2))
    held["view"] = torch.zeros(6, 6)[:, 1:3].t()
    held["scalar"], held["empty"] = torch.tensor(3), torch.zeros(0, 7)
    held["tied"] = held["0.weight"]
    found = inventory.read(folder_with(tmp_path, "model.pt", held))
    assert {n: t.shape for n, t in found.tensors.items()} == {n: tuple(t.shape) for n, t in held.items()}
    assert {n: t.dtype for n, t in found.tensors.items()} == {n: DTYPES[t.dtype] for n, t in held.items()}
    assert found.bytes == sum(t.numel() * t.itemsize for t in held.values())


def test_pickled_shards_through_their_index(tmp_path: Path) -> None:
    folder_with(tmp_path, "p-1.bin", {"a": torch.zeros(2)})
    folder_with(tmp_path, "p-2.bin", {"b": torch.zeros(3)})
    index = {"weight_map": {"a": "p-1.bin", "b": "p-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert {n: t.file for n, t in inventory.read(tmp_path).tensors.items()} == {"a": "p-1.bin", "b": "p-2.bin"}


def test_what_trainers_leave_beside_weights_is_none_of_them(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"\x80\x02N.")
    found = inventory.read(folder_with(tmp_path, "drafter.pt", {"a": torch.zeros(2)}))
    assert set(found.tensors) == {"a"}


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder_with(tmp_path, "pytorch_model.bin", {"old": torch.zeros(2)})
    save_file({"new": torch.zeros(2)}, tmp_path / "any.safetensors")
    assert set(inventory.read(tmp_path).tensors) == {"new"}


# -- nothing is run ---------------------------------------------------------------------------------------------------


class Runs:
    """What pickle runs when it loads one."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("place", ["name", "value", "inside", "instead"])
def test_a_pickle_that_would_make_a_file_makes_none(tmp_path: Path, place: str, protocol: int) -> None:
    proof = tmp_path / "made"
    bad = Runs(os.mkdir, str(proof))
    value = {
        "name": {bad: torch.zeros(1)},
        "value": {"a": torch.zeros(1), "b": bad},
        "inside": {"a": [{"b": bad}]},
        "instead": bad,
    }[place]
    folder_with(tmp_path, "pytorch_model.bin", value, pickle_protocol=protocol)
    refused(tmp_path, r"data.pkl holds 'posix.mkdir', which is neither a tensor nor a container")
    assert not proof.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert proof.exists(), "the pickle is harmless, so the test proves nothing"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ((eval, "1"), "__builtin__.eval"),
        ((getattr, 1, "real"), "__builtin__.getattr"),
        ((torch.load, "x"), "torch.serialization.load"),
        ((OrderedDict, [("a", 1)]), "a dictionary made of something"),
    ],
)
def test_no_function_is_called(tmp_path: Path, call: tuple[Any, ...], named: str) -> None:
    folder_with(tmp_path, "pytorch_model.bin", {"a": Runs(*call)})
    refused(tmp_path, named)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no pickle"),
        (b"N.", "a NoneType"),
        (b"]q\x00.", "a list"),
        (b"}q\x00X\x01\x00\x00\x00aK\x01s.", "int under 'a'"),
        (b"}X\x01\x00\x00\x00ah\x07s.", "do not fit"),  # a memo that was never put
        (b"0.", "the instruction POP"),
        (b"}(.", "what is no pickle"),
        (b"}\x85.", "a tuple"),
        (b"}\x86.", "do not fit"),  # a tuple of two with one on the stack
        (b"}(NNu.", "a key that is neither text nor number"),
        (b"(i__main__\nf\n.", "the instruction INST"),
        (b"\x80\x02}q\xff", "what is no pickle|no end"),
        (b"r\xff\xff\xff\xff.", "do not fit"),  # the memo index that makes C's pickle ask for 32 GB
        (b"\x8d" + (2**62).to_bytes(8, "little") + b"x.", "no pickle"),
        (b"}X\x01\x00\x00\x00a}}R.", "do not fit"),
        (
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\xff\xff\xff\xfftQ.",
            "a storage",
        ),
    ],
)
def test_a_pickle_that_is_none_is_refused(tmp_path: Path, data: bytes, named: str) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with_pickle(tmp_path / "pytorch_model.bin", data)
    refused(tmp_path, named)


def test_tuples_without_end_do_not_exhaust_the_stack(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with_pickle(tmp_path / "pytorch_model.bin", b"}N" + b"\x85" * 300_000 + b"Ns.")
    refused(tmp_path, "a key that is neither")


def test_a_dictionary_that_holds_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with_pickle(tmp_path / "pytorch_model.bin", b"}q\x00X\x01\x00\x00\x00ah\x00s.")
    refused(tmp_path, "dict under 'a'")


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, "pytorch_model.bin", {"a": torch.zeros(1)})
    monkeypatch.setattr(torch_zip, "MAX_OPCODES", 5)
    refused(tmp_path, "more than 5 instructions")
    monkeypatch.setattr(torch_zip, "MAX_PICKLE_BYTES", 10)
    refused(tmp_path, "longer than 10 bytes")
    monkeypatch.setattr(torch_zip, "MAX_ENTRIES", 1)
    refused(tmp_path, "files, at most 1 are read")


# -- files that are not what they seem --------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            if (new := change(name, data)) is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda n, d: None if n.endswith("data/0") else d, "whose 24 bytes are None"),
        (lambda n, d: d[:-1] if n.endswith("data/0") else d, "whose 24 bytes are 23"),
        (lambda n, d: None if n.endswith(".pkl") else d, "without NAME/data.pkl"),
        (lambda n, d: b"big" if n.endswith("byteorder") else d, "big-endian"),
    ],
)
def test_a_zip_that_contradicts_itself(
    tmp_path: Path, change: Callable[[str, bytes], bytes | None], match: str
) -> None:
    folder_with(tmp_path, "pytorch_model.bin", {"a": torch.zeros(2, 3)})
    rewritten(tmp_path / "pytorch_model.bin", change)
    refused(tmp_path, match)


def test_a_tensor_larger_than_its_storage(tmp_path: Path) -> None:
    view = torch.zeros(6)
    data = io.BytesIO()
    torch.save({"a": view}, data)
    with zipfile.ZipFile(data) as archive:
        held = archive.read("archive/data.pkl")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    # The shape, after the storage's own count of 6: K\x06 in (K\x06,).
    with_pickle(tmp_path / "pytorch_model.bin", held.replace(b"K\x00K\x06\x85", b"K\x00K\x07\x85"), {"0": bytes(24)})
    refused(tmp_path, "reaches beyond its 24 bytes")


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = folder_with(tmp_path, "pytorch_model.bin", {"a": torch.zeros(50)}) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "damaged zip|no file of torch.save")


def test_a_pickle_of_before_the_zip_comes_with_the_way_to_write_it_again(tmp_path: Path) -> None:
    held = {"a": torch.arange(3)}
    folder_with(tmp_path, "pytorch_model.bin", held, _use_new_zipfile_serialization=False)
    command = refused(tmp_path, "a bare pickle, as torch wrote before 1.6").way_out
    code = command.split('"')[1]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert inventory.read(tmp_path).tensors["a"].shape == (3,)
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["a"], held["a"])


def test_a_pickled_module_and_a_git_lfs_pointer(tmp_path: Path) -> None:
    folder_with(tmp_path, "pytorch_model.bin", torch.nn.Linear(2, 2))
    refused(tmp_path, r"holds 'torch.nn.modules.linear.Linear'")
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "Git LFS pointer")
    folder_with(tmp_path, "pytorch_model.bin", {"a": torch.zeros(1), "epoch": 3})
    refused(tmp_path, "int under 'epoch'")
    assert pickle.HIGHEST_PROTOCOL >= 5
