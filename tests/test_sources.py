"""Every kind of file and folder gives the same rows, and whatever is wrong with one is said with its place."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest
from datasets.arrow_writer import ArrowWriter

from eyas import json_stream, prompts, sources
from eyas.errors import EnvironmentFault, InputError, UsageError

ROWS: list[dict[str, Any]] = [
    {"id": i, "messages": [{"role": "user", "content": f"q{i} ä"}, {"role": "assistant", "content": f"a {i}"}]}
    for i in range(7)
]


def found(*inputs: Path | str, **choice: str) -> list[dict[str, Any]]:
    """The rows' data; an error among them is raised."""
    return [data_of(row) for row in sources.read(list(inputs), **choice)]


def data_of(row: sources.Row) -> dict[str, Any]:
    if row.error is not None:
        raise row.error
    return dict(row.data)


def told(path: Path | str, **choice: str) -> str:
    with pytest.raises(InputError) as caught:
        found(path, **choice)
    assert caught.value.way_out
    return caught.value.message


def jsonl(path: Path, rows: list[Any] = ROWS) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def parquet(path: Path, rows: list[Any] = ROWS, **how: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **how)
    return path


def arrow(path: Path, kind: str) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    writer = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with writer(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=3)
    return path


# -- every kind -----------------------------------------------------------------------------------------------


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    array = json.dumps(ROWS, indent=1, ensure_ascii=False)
    texts = {
        "array.json": array,
        "lines.json": "\n".join(map(json.dumps, ROWS)),
        "container.json": json.dumps({"version": 1, "data": ROWS, "names": ["x"]}),
        "bom.json": "\ufeff" + array,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "array.json.gz").write_bytes(gzip.compress(array.encode()))
    files = [tmp_path / name for name in (*texts, "array.json.gz")]
    files += [jsonl(tmp_path / name) for name in ("a.jsonl", "a.ndjson", "a.jsonl.gz", "noname")]
    files += [parquet(tmp_path / "a.parquet", row_group_size=2)]
    files += [arrow(tmp_path / "stream.arrow", "stream"), arrow(tmp_path / "file.arrow", "file")]
    for file in files:
        assert found(file) == ROWS, file.name
    assert found(*files) == ROWS * len(files)


def test_rows_know_their_place(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    path.write_text("\n" + path.read_text())
    assert [row.where for row in sources.read([path])][:2] == [f"{path}, line 2", f"{path}, line 3"]
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    assert list(sources.read([tmp_path / "a.json"]))[6].where == f"{tmp_path}/a.json, item 7"
    assert list(sources.read([parquet(tmp_path / "a.parquet")]))[6].where == f"{tmp_path}/a.parquet, row 7"
    assert {row.source for row in sources.read([path])} == {"a.jsonl"}


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\n\n  zwei ä \n".encode() + b"\xe4\nfour")
    rows = list(sources.read([tmp_path / "a.txt"]))
    assert [row.data.get("prompt") for row in rows] == ["one", "zwei ä", None, "four"]
    assert rows[2].error is not None
    assert "line 4: not UTF-8 (byte 0xe4 at offset 0)" in rows[2].error.message


def test_prompt_sets_by_name() -> None:
    rows = list(sources.read(["mt-bench"]))
    assert len(rows) == 80
    assert rows[0].data["turns"] == list(prompts.load("mt-bench", 1)[0].turns)
    assert (rows[0].where, rows[0].source) == ("prompt mt-bench/81", "mt-bench")


def test_a_file_wins_over_a_set_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "gsm8k")
    assert found("gsm8k") == ROWS


# -- folders --------------------------------------------------------------------------------------------------


def test_a_folder_of_files_is_read_by_name_and_split(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[5:])
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[3:5])
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "dataset_infos.json").write_text("{}")
    jsonl(tmp_path / ".cache" / "x.jsonl")
    assert found(tmp_path, split="train") == ROWS[:5]
    assert found(tmp_path, split="test") == ROWS[5:]
    assert len(found(tmp_path)) == len(ROWS)
    assert "no data files of split 'validation'" in told(tmp_path, split="validation")
    jsonl(tmp_path / "more.jsonl")
    assert "files of several kinds" in told(tmp_path)


def test_a_folder_without_data_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    assert "it holds notes.md" in told(tmp_path)


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=made, test=made.select([6])).save_to_disk(tmp_path / "two")
    datasets.DatasetDict(a=made, b=made).save_to_disk(tmp_path / "three")
    assert found(tmp_path / "one") == ROWS
    assert found(tmp_path / "two") == ROWS
    assert found(tmp_path / "two", split="test") == ROWS[6:]
    with pytest.raises(UsageError, match="several splits") as caught:
        found(tmp_path / "three")
    assert "a, b" in caught.value.way_out
    with pytest.raises(UsageError, match="no split 'c'"):
        found(tmp_path / "three", split="c")
    shard = next((tmp_path / "one").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:200])
    assert str(tmp_path / "one") in told(tmp_path / "one")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library's own cache as it is left by a download of ada/chats; no network."""
    folder = tmp_path / "ada___chats" / "default" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_list(ROWS).features
    writer = ArrowWriter(path=str(folder / "chats-train.arrow"), features=features)
    for row in ROWS:
        writer.write(row)
    count, size = writer.finalize()
    split = {"name": "train", "num_bytes": size, "num_examples": count, "dataset_name": "chats"}
    datasets.DatasetInfo(
        features=features,
        builder_name="parquet",
        dataset_name="chats",
        config_name="default",
        version="0.0.0",
        splits={"train": split},
    ).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path


def test_a_hub_data_set_from_the_cache(hub: Path) -> None:
    assert found("ada/chats") == ROWS
    assert found("ada/chats", split="train", subset="default") == ROWS
    assert "Available splits: ['train']" in told("ada/chats", split="test")
    assert "for config 'other'" in told("ada/chats", subset="other")
    with pytest.raises(EnvironmentFault, match="ada/none is no file or folder here, and could not be fetched"):
        found("ada/none")


def test_the_optional_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    path = parquet(tmp_path / "a.parquet")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    for spec, library in ((path, "pyarrow"), ("ada/chats", "datasets")):
        with pytest.raises(UsageError, match=f"needs {library}") as caught:
            found(spec)
        assert "eyas[datasets]" in caught.value.way_out


# -- what is wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none.jsonl", "folder/none.parquet", "gsm8kk", "none.json.gz", "/none/at/all"])
def test_what_is_not_there_is_said_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        sources.read([jsonl(tmp_path / "a.jsonl"), name])


def test_unreadable_kinds_and_useless_options_are_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "a.parquet.gz", "a.zst"):
        (tmp_path / name).write_text("x")
        assert "no kind that can be read" in told(tmp_path / name)
    with pytest.raises(UsageError, match="--split"):
        sources.read([jsonl(tmp_path / "a.jsonl")], split="train")


def cut_off(path: Path, keep: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


MANY = [{"id": i, "messages": [{"role": "user", "content": os.urandom(300).hex()}]} for i in range(400)]


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_truncated_file_is_named_and_what_is_whole_is_kept(tmp_path: Path, keep: float) -> None:
    (tmp_path / "a.json").write_text(json.dumps(MANY))
    for path in (jsonl(tmp_path / "a.jsonl.gz", MANY), jsonl(tmp_path / "a.jsonl", MANY), tmp_path / "a.json"):
        rows = list(sources.read([cut_off(path, keep)]))
        assert [row.data for row in rows[:-1]] == MANY[: len(rows) - 1]
        assert len(rows) > 100 * keep
        assert rows[-1].error is not None
        assert str(path) in rows[-1].error.message
    last = list(sources.read([tmp_path / "a.jsonl"]))[-1]
    assert last.error is not None
    assert "cut off, or is still being written" in last.error.message
    assert str(tmp_path / "a.parquet") in told(cut_off(parquet(tmp_path / "a.parquet", MANY), keep))


def test_a_truncated_arrow_stream_keeps_what_is_whole(tmp_path: Path) -> None:
    path = cut_off(arrow(tmp_path / "a.arrow", "stream"), 0.7)
    rows = list(sources.read([path]))
    assert [row.data for row in rows[:-1]] == ROWS[: len(rows) - 1]
    assert rows[-1].error is not None
    assert str(path) in rows[-1].error.message


def test_damaged_pages_of_parquet_are_an_error(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", MANY)
    data = bytearray(path.read_bytes())
    data[200:400] = b"\xff" * 200
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"a\.parquet"):
        found(path)


def test_a_file_that_grew_reads_whole(tmp_path: Path) -> None:
    """What was cut off is refused; the same file, once it has grown, gives what the whole one gives."""
    path = jsonl(tmp_path / "a.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert "line 7" in told(path)
    path.write_bytes(whole)
    assert found(path) == ROWS


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    rows = sources.read([path])
    next(rows)
    with path.open("a") as handle:
        handle.write(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(InputError, match="changed while it was read"):
        list(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1}, {"a": }]', "item 2: broken JSON, Expecting value"),
        ('[{"a": 1}, {"a": 2}', "item 3: the file ends where one of , ] was expected: it was cut off"),
        ('[{"a": 1} {"a": 2}]', "item 2: broken JSON, '{' where one of , ] was expected"),
        ('[{"a": 1}] x', "item 2: broken JSON, 'x' after the end"),
        ('[{"a": 1}, 3]', "item 2: a JSON int where an object was expected"),
        ('["text"]', "item 1: a JSON str where an object was expected"),
        ('{"a": "unterminated', "item 1: broken JSON, Unterminated string"),
        ("[" * 200_000, "item 1: JSON that cannot be read (RecursionError)"),
        ("[" + "9" * 5000 + "]", "item 1: JSON that cannot be read (ValueError)"),
    ],
)
def test_broken_json_is_named_by_its_item(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert f"{tmp_path}/a.json, {said}" in told(tmp_path / "a.json")


def test_json_of_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('[{"a": "ä"}]'.encode("latin-1"))
    assert "not UTF-8 from here on (byte 0xe4)" in told(tmp_path / "a.json")


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.txt"):
        (tmp_path / name).write_text("\n")
        assert found(tmp_path / name) == []
    (tmp_path / "b.json").write_text("[]")
    assert found(tmp_path / "b.json") == []
    (tmp_path / "a.parquet").write_bytes(b"")
    assert "a.parquet cannot be read" in told(tmp_path / "a.parquet")


def test_text_in_a_table_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    raw = pyarrow.array([b"fine", b"\xff\xfe", b"fine too"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "a.parquet")
    rows = list(sources.read([tmp_path / "a.parquet"]))
    assert [row.data.get("prompt") for row in rows] == ["fine", None, "fine too"]
    assert rows[1].error is not None
    assert "row 2: not UTF-8" in rows[1].error.message


# -- JSON larger than what is held ----------------------------------------------------------------------------


def test_values_longer_than_a_chunk_and_cut_anywhere_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"n": 10**12 + i, "t": 'x"]}\\' * i, "f": -1.5e-3, "b": [True, None, {"k": []}]} for i in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text("\n".join(map(json.dumps, rows)))
    for chunk in range(1, 40):
        monkeypatch.setattr(json_stream, "CHUNK_CHARS", chunk)
        assert found(tmp_path / "a.json") == rows
        assert found(tmp_path / "b.json") == rows


def test_a_container_too_large_to_hold_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_CHARS", 64)
    monkeypatch.setattr(json_stream, "MAX_VALUE_CHARS", 500)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": [1, 2], "rows": ROWS, "end": "x"}))
    with pytest.raises(InputError, match="item 1"):  # a list of numbers comes first, and holds no rows
        found(path)
    path.write_text(json.dumps({"version": 1234567, "rows": ROWS, "end": 1.25}))
    for chunk in (1, 2, 3, 5, 64):  # a number may be cut in two, and half of it is a number too
        monkeypatch.setattr(json_stream, "CHUNK_CHARS", chunk)
        assert found(path) == ROWS
    path.write_text(json.dumps({"train": ROWS, "test": ROWS}))
    assert "two lists, 'train' and 'test'" in told(path)
    path.write_text(json.dumps({"rows": ROWS})[:-30])
    assert [row.data for row in sources.read([path])][:6] == ROWS[:6]
    path.write_text(json.dumps([{"t": "x" * 5000}]))
    assert "item 1" in told(path)


def test_a_lone_row_is_no_container(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=2))
    assert found(tmp_path / "a.json") == ROWS[:1]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, kind: str) -> None:
    """Ten times the rows, the same peak: of what Python holds, and for parquet of what Arrow holds."""

    def peak(rows: int) -> tuple[int, int]:
        made = [{"id": i, "text": f"{i:06} " * 100} for i in range(rows)]
        path = tmp_path / f"{rows}.{kind}"
        if kind == "parquet":
            parquet(path, made, row_group_size=500)
        elif kind == "json":
            path.write_text(json.dumps(made))
        else:
            jsonl(path, made)
        del made
        pool = pyarrow.default_memory_pool()
        tracemalloc.start()
        most_arrow = 0
        for _ in sources.read([path]):
            most_arrow = max(most_arrow, pool.bytes_allocated())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, most_arrow

    few, many = peak(2_000), peak(20_000)
    assert many[0] < 1.5 * few[0] + 1e5
    assert many[1] < 1.5 * few[1] + 1e6
