"""JSON too large to hold, value by value: one element of an array is in memory at a time.

Three shapes are read under the name .json: an array of values, values one after the other (JSON lines), and an object
that holds one array of objects (a container, as exports have it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from eyas.errors import InputError

CHUNK_CHARS = 2**20
MAX_VALUE_CHARS = 64 * 2**20  # as long as a line of JSON lines may be

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_WAY_OUT = "Write the file again, or convert it to JSON lines (one object on each line)."


class TooLong(InputError):
    pass


class Cursor:
    """A place in JSON text that is read as it is needed. ``name`` and ``item`` are for complaints."""

    def __init__(self, handle: IO[str], name: str) -> None:
        self.handle, self.name, self.item = handle, name, 0
        self.text, self.at, self.ended = "", 0, False

    def fail(self, why: str, kind: type[InputError] = InputError) -> InputError:
        return kind(f"{self.name}, item {self.item + 1}: {why}.", way_out=_WAY_OUT)

    def more(self, chars: int) -> None:
        self.text, self.at = self.text[self.at :], 0
        try:
            read = self.handle.read(chars)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise self.fail(f"not UTF-8 from here on (byte {byte:#04x})") from error
        self.ended = not read
        self.text += read

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more(CHUNK_CHARS)

    def take(self, expected: str) -> str:
        """Step over one of the ``expected`` characters and return it."""
        found = self.peek()
        if not found:
            raise self.fail(f"the file ends where one of {' '.join(expected)} was expected: it was cut off")
        if found not in expected:
            raise self.fail(f"broken JSON, {found!r} where one of {' '.join(expected)} was expected")
        self.at += 1
        return found

    def value(self) -> Any:
        """The next whole value. Raises TooLong, and then nothing was stepped over."""
        self.peek()
        chars = CHUNK_CHARS
        while True:
            why = ""
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # a number at the end of what was read may go on
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                why = f"broken JSON, {error.msg}"
            except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
                raise self.fail(f"JSON that cannot be read ({type(error).__name__})") from error
            if self.ended:
                raise self.fail(f"{why}, or the file was cut off")
            if len(self.text) - self.at > MAX_VALUE_CHARS:
                raise self.fail(why or "a value without end", TooLong)
            self.more(chars)
            chars *= 2


def values(handle: IO[str], name: str) -> Iterator[Any]:
    """Every element of the three shapes. Raises InputError that names the element it broke off at."""
    cursor = Cursor(handle, name)
    if cursor.peek() == "[":
        yield from _array(cursor)
        _at_end(cursor)
        return
    if not cursor.peek():
        return
    try:
        first = cursor.value()
    except TooLong:
        if cursor.peek() != "{":
            raise
        yield from _container(cursor)
        _at_end(cursor)
        return
    if not cursor.peek() and (inside := _only_list(first)) is not None:
        yield from inside
        return
    yield first
    while cursor.peek():
        cursor.item += 1
        yield cursor.value()


def _array(cursor: Cursor) -> Iterator[Any]:
    cursor.take("[")
    if cursor.peek() == "]":
        cursor.take("]")
        return
    while True:
        yield cursor.value()
        cursor.item += 1
        if cursor.take(",]") == "]":
            return


def _container(cursor: Cursor) -> Iterator[Any]:
    """The elements of the one array of objects in an object too large to hold."""
    cursor.take("{")
    found: str | None = None
    while True:
        key = cursor.value()
        cursor.take(":")
        if cursor.peek() == "[":
            if found is not None:
                raise cursor.fail(f"two lists, {found!r} and {key!r}; put each into a file of its own")
            found = key
            yield from _array(cursor)
        else:
            cursor.value()
        if cursor.take(",}") == "}":
            return


def _only_list(value: Any) -> list[Any] | None:
    """The list a lone object holds, if it is a container of rows and not a row: its elements are no chat turns."""
    if not isinstance(value, dict):
        return None
    lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(e, dict) for e in v)]
    if len(lists) != 1 or any(key in lists[0][0] for key in ("role", "from")):
        return None
    return lists[0]


def _at_end(cursor: Cursor) -> None:
    if found := cursor.peek():
        raise cursor.fail(f"broken JSON, {found!r} after the end")
