"""One way to read every engine's numbers: text in, counts and what is wrong with them out. Pure but for ``page``.

``read`` takes blocks of bytes of any size (a log, a metrics page, JSON) in constant memory. See ``reader`` for where a
run ends, ``vllm``, ``sglang``, ``llamacpp`` and ``bodies`` for what each engine prints, ``identities`` for what its
numbers must obey.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eyas.engines.scrape.reader import LONGEST, LOOKED_FOR, NUMBERS, STARTS, Reader
from eyas.errors import InputError
from eyas.results import Finding
from eyas.results.observed import Counts

BLOCK = 1 << 20
MOST_JSON = 64 << 20  # bytes of a document that has to be read whole
_ENCODINGS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


@dataclass(frozen=True)
class Reading:
    observed: list[Counts]
    findings: list[Finding]
    lines: int


def read(blocks: Iterable[bytes], where: str) -> Reading:
    """Every run in a text.

    InputError where nothing speaks of speculation, where it is no text, and for JSON of more than MOST_JSON bytes.
    """
    reader = Reader(where)
    source = iter(blocks)
    first = next(source, b"")
    _refuse_no_text(first, where)
    as_document = _is_document(first)
    lines = _document(first, source, reader, where) if as_document else _lines(first, source, reader)
    reader.finish()
    if not reader.counts:
        raise InputError(
            f"{where} says nothing of speculation ({lines:,} lines read).",
            way_out=f"Looked for {LOOKED_FOR}. Was the engine started with a drafter, and with its statistics on "
            "(vLLM: no --disable-log-stats; SGLang: --enable-metrics for the page)?",
        )
    return Reading(reader.counts, reader.findings, lines)


def _refuse_no_text(first: bytes, where: str) -> None:
    if not first.strip():
        raise InputError(f"{where} is empty.", way_out="Give the engine's log, its metrics page or its responses.")
    if encoding := _ENCODINGS.get(first[:2]):
        raise InputError(
            f"{where} is {encoding.upper()} text.", way_out=f"Convert it: iconv -f {encoding} -t utf-8 LOG > LOG.txt"
        )
    if b"\0" in first:
        raise InputError(
            f"{where} is not text: it holds zero bytes.",
            way_out="Give the log itself; .gz is unpacked, others are not.",
        )
    if first[:1024].lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise InputError(f"{where} is an HTML page.", way_out="Give the address of the metrics page, mostly …/metrics.")


# -- JSON that is not one object a line -------------------------------------------------------------------------


def _is_document(first: bytes) -> bool:
    """Whether it begins as JSON whose first line is not whole."""
    start = first.lstrip()
    if start[:1] not in (b"{", b"["):
        return False
    line = start.split(b"\n", 1)[0]
    if start[:1] == b"[" and line[1:2].isdigit():
        return False  # SGLang's lines begin with a date in brackets
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return start[:1] == b"["


def _document(first: bytes, rest: Iterator[bytes], reader: Reader, where: str) -> int:
    whole = bytearray(first)
    for block in rest:
        whole += block
        if len(whole) > MOST_JSON:
            raise InputError(
                f"{where} is a JSON document of more than {MOST_JSON >> 20} MB.",
                way_out="Write one response a line (jq -c '.[]'); lines are read without end.",
            )
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError):
        return _lines(bytes(whole), iter(()), reader)  # a log that only begins like JSON
    reader.document(value)
    return whole.count(b"\n") + 1


# -- lines ------------------------------------------------------------------------------------------------------


def _lines(first: bytes, rest: Iterator[bytes], reader: Reader) -> int:
    """Hand the lines with a marker to ``reader``; the others are only counted."""
    number, tail = 1, b""
    block = first
    while block:
        text = tail + block
        end = text.rfind(b"\n") + 1
        if end:
            number = _block(text, end, number, reader)
            tail = text[end:]
        elif len(text) <= 2 * LONGEST:
            tail = text
        else:  # a line without end: what has been read of it is enough to leave it out
            _block(text, len(text), number, reader)
            tail = b""
        block = next(rest, b"")
    if tail:
        _block(tail, len(tail), number, reader)
        number += 1
    return number - 1


def _block(text: bytes, end: int, number: int, reader: Reader) -> int:
    """Whole lines text[:end], of which the first has ``number``; the number of the line behind them."""
    starts = _starts(text, end)
    at = 0
    for start in sorted(starts):
        number += text.count(b"\n", at, start)
        at = start
        reader.line(number, text[start : starts[start]])
    return number + text.count(b"\n", at, end)


def _starts(text: bytes, end: int) -> dict[int, int]:
    """Lines with a marker, begin -> end. Searching for a marker a time is what makes a gigabyte a matter of seconds."""
    found: dict[int, int] = {}
    for marker in (*NUMBERS, *STARTS):
        at = text.find(marker, 0, end)
        while at >= 0:
            begin = text.rfind(b"\n", 0, at) + 1
            stop = text.find(b"\n", at, end)
            stop = end if stop < 0 else stop
            found[begin] = stop
            at = text.find(marker, stop, end)
    return found
