"""A journal keeps whole lines, cuts torn ones, and belongs to one question."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from eyas.errors import EnvironmentFault, InputError, UsageError
from eyas.journal import NAME, Journal

HEADER = {"schema": 1, "target": "abc", "sampling": {"temperature": 0.5, "top_k": None}}


def written(folder: Path, n: int) -> bytes:
    with Journal(folder, HEADER) as journal:
        for i in range(n):
            journal.append({"id": f"é{i}", "said": "x" * i})
    return (folder / NAME).read_bytes()


def test_entries_come_back_as_they_went_in(tmp_path: Path) -> None:
    data = written(tmp_path, 3)
    assert json.loads(data.splitlines()[0]) == HEADER
    with Journal(tmp_path, HEADER) as journal:
        assert len(journal) == 3
        assert "é1" in journal
        assert "é9" not in journal
        assert journal.entry("é2") == {"id": "é2", "said": "xx"}
        journal.append({"id": "é9", "said": "y"})
        assert journal.entry("é9")["said"] == "y"
        assert journal.entry("é0")["said"] == ""


def test_cut_anywhere_it_holds_the_lines_that_were_whole(tmp_path: Path) -> None:
    data = written(tmp_path, 4)
    edges = [at + i for at, byte in enumerate(data) if byte == 10 for i in (0, 1, 2)]
    for end in sorted({*range(0, len(data), 17), *(edge for edge in edges if edge <= len(data))}):
        (tmp_path / NAME).write_bytes(data[:end])
        whole = data[:end].count(b"\n")
        with Journal(tmp_path, HEADER) as journal:
            assert len(journal) == max(0, whole - 1)
            assert journal.torn_bytes == end - (data[:end].rfind(b"\n") + 1)
            left = data[: max(end - journal.torn_bytes, data.index(b"\n") + 1)]
            assert (tmp_path / NAME).read_bytes() == left
            for i in range(len(journal), 4):
                journal.append({"id": f"é{i}", "said": "x" * i})
        assert (tmp_path / NAME).read_bytes() == data


@pytest.mark.parametrize(
    ("key", "header"),
    [
        ("target", {**HEADER, "target": "other"}),
        ("sampling", {**HEADER, "sampling": {"temperature": 0.6, "top_k": None}}),
        ("batch", {**HEADER, "batch": 3}),
        ("schema", {k: v for k, v in HEADER.items() if k != "schema"}),
    ],
)
def test_a_journal_of_something_else_is_refused(key: str, header: dict[str, object], tmp_path: Path) -> None:
    data = written(tmp_path, 2)
    with pytest.raises(UsageError, match=f"another {key}"), Journal(tmp_path, header):
        pass
    assert (tmp_path / NAME).read_bytes() == data


@pytest.mark.parametrize(
    "line", [b"{\n", b'{"x": 1}\n', b"[]\n", b'{"id": 7}\n', b'{"id": "\xc3\xa91"}\n', b"\0\0\n", b"\n"]
)
def test_a_line_that_is_no_entry_is_named(line: bytes, tmp_path: Path) -> None:
    data = written(tmp_path, 2)
    (tmp_path / NAME).write_bytes(data + line)
    with pytest.raises(InputError, match="line 4"), Journal(tmp_path, HEADER):
        pass
    assert (tmp_path / NAME).read_bytes() == data + line


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, HEADER),
        pytest.raises(UsageError, match="Another run"),
        Journal(tmp_path, HEADER),
    ):
        pass
    written(tmp_path, 1)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with Journal(tmp_path, HEADER) as journal:
        journal.append({"id": "a"})
        data = (tmp_path / NAME).read_bytes()

        def short(fd: int, view: memoryview, at: int) -> int:
            if at > len(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, view[:5], at)

        monkeypatch.setattr(os, "pwrite", short)
        with pytest.raises(EnvironmentFault, match="disk is full"):
            journal.append({"id": "b"})
        assert (tmp_path / NAME).read_bytes() == data
        monkeypatch.undo()
        journal.append({"id": "b"})
    with Journal(tmp_path, HEADER) as journal:
        assert "b" in journal


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="could not be written"), Journal(tmp_path / "file", HEADER):
        pass
