"""Lines that survive the process that wrote them: what was done is there, what was torn is not.

A journal is a header line, which says what everything in it shares, and one JSON line an entry. A line is written
in one go; a last line without its end was torn by whatever ended the process, and is cut off when the journal is
opened again. Entries are found by id; about 150 bytes each are kept in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eyas import files
from eyas.errors import InputError, UsageError

NAME = "journal.jsonl"


class Journal:
    """The journal of ``folder``, opened with ``with``; nobody else writes there meanwhile.

    Raises UsageError where another run is writing or the journal's header is another one.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.path = folder / NAME
        self.torn_bytes = 0
        self._header = json.loads(json.dumps(header))  # as it will be read
        self._at: dict[str, int] = {}
        self._end = 0
        self._file = -1
        self._open = ExitStack()

    def __enter__(self) -> Journal:
        with ExitStack() as opening:
            try:
                opening.enter_context(files.only_writer(self.path.parent))
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise files.explain_os_error(error, self.path) from error
            opening.callback(os.close, self._file)
            self._read()
            if not self._end:
                self._write(self._header)
                os.fsync(self._file)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        self._open.close()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, id: object) -> bool:
        return id in self._at

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; its ``id`` must be new."""
        assert entry["id"] not in self._at, f"{entry['id']} twice"
        at = self._end
        self._write(entry)
        self._at[str(entry["id"])] = at

    def entry(self, id: str) -> dict[str, Any]:
        with open(self.path, "rb") as handle:
            handle.seek(self._at[id])
            return files.parse_json_line(self.path, 0, handle.readline())

    def _write(self, value: Mapping[str, Any]) -> None:
        left = memoryview((json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode())
        whole = self._end + len(left)
        try:
            while left:
                left = left[os.pwrite(self._file, left, whole - len(left)) :]
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise files.explain_os_error(error, self.path) from error
        self._end = whole

    def _read(self) -> None:
        """Index what is there; cut what was torn."""
        for number, line in files.read_lines(self.path):
            if not line.endswith(b"\n"):
                self.torn_bytes = len(line)
                os.ftruncate(self._file, self._end)
                break
            value = files.parse_json_line(self.path, number, line)
            if number == 1:
                self._compare(value)
            elif not isinstance(value.get("id"), str) or value["id"] in self._at:
                raise InputError(
                    f"{self.path}, line {number}: not an entry of this journal (id {value.get('id')!r}).",
                    way_out="Remove the line, or name another folder.",
                )
            else:
                self._at[value["id"]] = self._end
            self._end += len(line)

    def _compare(self, there: Mapping[str, Any]) -> None:
        for key in sorted({*there, *self._header}):
            if there.get(key) != self._header.get(key):
                raise UsageError(
                    f"{self.path} was begun with another {key}: {_short(there.get(key))} there, "
                    f"{_short(self._header.get(key))} now.",
                    way_out="Run the command it was begun with to go on, or name another folder.",
                )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
