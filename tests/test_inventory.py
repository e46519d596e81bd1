"""Checkpoints made byte by byte, good and bad, plus one that the safetensors library wrote itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eyas import inventory
from eyas.errors import CheckpointError
from eyas.inventory import Glance, TensorInfo, json_file


def safetensors(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 2}', encoding="utf-8")
    return tmp_path


def weights(folder: Path, header: object, data: bytes, name: str = "model.safetensors") -> None:
    (folder / name).write_bytes(safetensors(header, data))


def shards(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )


def refused(folder: Path, match: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        inventory.read(folder)
    assert caught.value.way_out
    return caught.value


def test_what_the_library_writes_is_read(folder: Path) -> None:
    arrays = {
        "fc.weight": np.zeros((2, 6), np.float16),
        "d2t": np.zeros(3, np.int64),
        "s": np.zeros((), np.float32),
    }
    save_file({k: np.asarray(v) for k, v in arrays.items()}, folder / "model.safetensors", {"format": "pt"})
    found = inventory.read(folder)
    assert found.folder == folder
    assert found.config == {"hidden_size": 2}
    assert found.tensors == {
        "fc.weight": TensorInfo("fc.weight", "F16", (2, 6), "model.safetensors"),
        "d2t": TensorInfo("d2t", "I64", (3,), "model.safetensors"),
        "s": TensorInfo("s", "F32", (), "model.safetensors"),
    }
    assert found.bytes == 24 + 24 + 4


def test_small_and_empty_tensors_and_an_unordered_header(folder: Path) -> None:
    header = {"b": entry(3, 11), "a": entry(0, 3, "F6_E2M3", [4]), "none": entry(11, 11, "BF16", [0, 7])}
    weights(folder, header, bytes(11))
    found = inventory.read(folder)
    assert {name: info.shape for name, info in found.tensors.items()} == {
        "a": (4,),
        "b": (2,),
        "none": (0, 7),
    }
    assert found.bytes == 11


def test_shards_through_the_index(folder: Path) -> None:
    weights(folder, {"a": entry(0, 8)}, bytes(8), "x-1.safetensors")
    weights(folder, {"b": entry(0, 4)}, bytes(4), "x-2.safetensors")
    weights(folder, {"c": entry(0, 4)}, bytes(4), "stray.safetensors")
    shards(folder, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    found = inventory.read(folder)
    assert {name: info.file for name, info in found.tensors.items()} == {
        "a": "x-1.safetensors",
        "b": "x-2.safetensors",
    }
    assert found.bytes == 12
    weights(folder, {"whole": entry(0, 4)}, bytes(4))
    assert list(inventory.read(folder).tensors) == ["whole"]


def test_any_safetensors_without_an_index(folder: Path) -> None:
    weights(folder, {"a": entry(0, 8)}, bytes(8), "one.safetensors")
    weights(folder, {"b": entry(0, 4)}, bytes(4), "two.safetensors")
    assert set(inventory.read(folder).tensors) == {"a", "b"}
    weights(folder, {"a": entry(0, 4)}, bytes(4), "two.safetensors")
    refused(folder, "tensor a is in one.safetensors and in two.safetensors")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "", ".", "a\0b", 3, None],
)
def test_a_shard_outside_the_folder_is_refused(folder: Path, file: object) -> None:
    inside = folder / "inside"
    inside.mkdir()
    (inside / "config.json").write_text("{}", encoding="utf-8")
    weights(folder, {"a": entry(0, 4)}, bytes(4), "x.safetensors")
    shards(inside, {"a": file})
    refused(inside, "a file inside the folder was expected")


def test_links_out_of_the_folder_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    weights(blobs, {"a": entry(0, 4)}, bytes(4), "blob")
    (folder / "x.safetensors").symlink_to(blobs / "blob")
    shards(folder, {"a": "x.safetensors"})
    assert set(inventory.read(folder).tensors) == {"a"}


def test_index_and_shards_that_disagree(folder: Path) -> None:
    weights(folder, {"a": entry(0, 4)}, bytes(4), "x.safetensors")
    shards(folder, {"a": "x.safetensors", "b": "x.safetensors"})
    refused(folder, "x.safetensors lacks 1 of the tensors .* e.g. b")
    shards(folder, {"a": "x.safetensors", "b": "y.safetensors"})
    refused(folder, "lacks y.safetensors of the 2 files")
    for weight_map in (dict[str, str](), None, ["a"]):
        shards(folder, weight_map)
        refused(folder, "no weight_map")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "has no config.json"),
        (b"\xff\xfe{}", "not UTF-8 \\(byte 0xff at offset 0"),
        (b'{"a": ', "broken JSON"),
        (b"[1]", "holds a JSON list, an object was expected"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
        (b"", "broken JSON"),
    ],
)
def test_a_bad_config_is_refused(folder: Path, content: bytes | None, match: str) -> None:
    weights(folder, {"a": entry(0, 4)}, bytes(4))
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(content)
    refused(folder, match)


def test_a_json_file_that_is_far_too_long_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 10)
    refused(folder, "longer than 10 bytes")


def test_a_folder_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "x.safetensors").mkdir()
    refused(folder, "could not be read: Is a directory")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    refused(folder, "config.json could not be read: Is a directory")


def test_a_truncated_file_says_how_much_is_missing(folder: Path) -> None:
    whole = safetensors({"a": entry(0, 400)}, bytes(400))
    path = folder / "model.safetensors"
    path.write_bytes(whole[:-1])
    refused(folder, f"truncated: {len(whole) - 1} bytes, {len(whole)} expected")
    header_end = len(whole) - 400
    path.write_bytes(whole[: header_end - 1])
    refused(folder, f"truncated: {header_end - 1} bytes, at least {header_end} expected")
    path.write_bytes(b"\xff" * 5)
    refused(folder, "truncated: 5 bytes, at least 8 expected")
    path.write_bytes(b"")
    refused(folder, "truncated: 0 bytes, at least 8 expected")
    path.write_bytes(whole + b"x")
    refused(folder, f"too long: {len(whole) + 1} bytes, {len(whole)} expected")


def test_a_header_longer_than_the_format_allows_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((100_000_001).to_bytes(8, "little") + b"{}")
    refused(folder, "header of 100000001 bytes, at most 100000000 are allowed")
    (folder / "model.safetensors").write_bytes((100_000_000).to_bytes(8, "little") + b"{}")
    refused(folder, "truncated: 10 bytes, at least 100000008 expected")


def test_a_git_lfs_pointer_is_called_one(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refused(folder, "Git LFS pointer").way_out


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, "tensor b overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, "tensor b overlaps"),
        ({"a": entry(4, 8)}, "tensor a leaves a gap before it \\(begins at 4, 0 expected"),
        ({"a": entry(4, 0, shape=[1])}, "-4 bytes, 4 expected"),
        ({"a": entry(0, 8, shape=[1])}, "8 bytes, 4 expected of F32"),
        ({"a": entry(0, 2, "F4", [3])}, "2 bytes, 1.5 expected"),
        ({"a": entry(0, 4, "F33")}, "dtype 'F33'"),
        ({"a": entry(0, 4, ["F32"])}, "dtype \\['F32'\\]"),
        ({"a": entry(0, 4, shape=[-1])}, "the shape \\[-1\\]"),
        ({"a": entry(0, 4, shape=[-1, -1])}, "the shape"),
        ({"a": entry(0, 4, shape=[1.0])}, "the shape"),
        ({"a": entry(0, 4, shape=[True])}, "the shape"),
        ({"a": entry(0, 4, shape="1")}, "the shape"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "the data_offsets None"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, "the data_offsets \\[0, 4, 8\\]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "the data_offsets \\[-4, 0\\]"),
        ({"a": 1}, "the entry 1"),
        ([], "header holds a JSON list"),
        (b"{", "header is broken JSON"),
        (b"\xff", "header is not UTF-8"),
        (b'{"a": {}, "a": {}}', "'a' stands there twice"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(folder: Path, header: object, match: str) -> None:
    weights(folder, header, bytes(8))
    refused(folder, match)


def test_no_weights_or_no_folder(folder: Path) -> None:
    refused(folder, "no weights, only config.json")
    refused(folder / "gone", "does not exist")
    refused(folder / "config.json", "is a file, a folder was expected")


# -- a checkpoint without its weights ---------------------------------------------------------------------------------


def test_a_glance_at_a_whole_checkpoint_is_what_is_read(folder: Path) -> None:
    weights(folder, {"a": entry(0, 8)}, bytes(8))
    for path in (folder, folder / "config.json"):
        seen = inventory.glance(path)
        assert seen == Glance(folder, {"hidden_size": 2}, inventory.read(folder).tensors, frozenset({"a"}), None)


def test_a_lone_config(folder: Path) -> None:
    for path in (folder, folder / "config.json"):
        assert inventory.glance(path) == Glance(folder, {"hidden_size": 2}, None, None, "the weights")
    (folder / "other.json").write_text('{"hidden_size": 3}', encoding="utf-8")
    weights(folder, {"a": entry(0, 8)}, bytes(8))
    seen = inventory.glance(folder / "other.json")
    assert (seen.config, seen.tensors, seen.missing) == ({"hidden_size": 3}, None, "other.json alone was named")


def test_a_hub_folder_copied_without_what_it_links_to(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("../../blobs/0123")
    assert inventory.glance(folder).missing == "what model.safetensors links to"
    assert "cp -rL" in refused(folder, "model.safetensors links to a file that is not there").way_out


def test_an_index_without_its_shards_names_the_tensors(folder: Path) -> None:
    shards(folder, {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"})
    weights(folder, {"a": entry(0, 8)}, bytes(8), "x-1.safetensors")
    seen = inventory.glance(folder)
    assert (seen.tensors, seen.names) == (None, frozenset("abc"))
    assert seen.missing == "1 of 2 shards, e.g. x-2.safetensors"
    weights(folder, {"b": entry(0, 8), "c": entry(8, 12)}, bytes(12), "x-2.safetensors")
    assert inventory.glance(folder).names == frozenset("abc")
    assert inventory.glance(folder).tensors == inventory.read(folder).tensors


def test_a_glance_is_as_strict_as_reading_about_what_is_there(folder: Path) -> None:
    weights(folder, {"a": entry(0, 8)}, bytes(7))
    with pytest.raises(CheckpointError, match="truncated"):
        inventory.glance(folder)
    (folder / "model.safetensors").unlink()
    shards(folder, None)
    with pytest.raises(CheckpointError, match="no weight_map"):
        inventory.glance(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        inventory.glance(folder / "gone")
    (folder / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds a JSON list"):
        inventory.glance(folder)
