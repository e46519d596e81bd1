from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.engines.scrape import Reading

MOST_UNPACKED, MOST_RATIO = 1 << 30, 200  # bytes that any .gz may unpack to, and how many times its own size


def read(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG_OR_URL...",
            help="An engine's log (.gz too), metrics page, responses as JSON, or its address; '-' is standard input.",
        ),
    ],
    json: common.JsonOption = None,
) -> None:
    """Read what an engine says of its speculation: counts, curve, accept length, and where its numbers disagree.

    SGLang, vLLM, llama.cpp, TensorRT-LLM; one definition for all of them.
    """
    from eyas.report import observed
    from eyas.results import SCHEMA, eyas_version

    readings = [reading(source) for source in sources]
    told = {
        "schema": SCHEMA,
        "eyas": eyas_version(),
        "observed": [counts.to_json() for one in readings for counts in one.observed],
        "findings": [finding.to_json() for one in readings for finding in one.findings],
    }
    common.write_result(told, json)
    observed.print_observed(told, common.console_for(json))
    sys.exit(int(any(finding["severity"] != "note" for finding in told["findings"])))  # type: ignore[attr-defined]


def reading(source: str) -> Reading:
    """What a file, an address or standard input says of speculation."""
    from eyas.engines import scrape
    from eyas.engines.scrape import page

    if source == "-":
        return scrape.read(_stdin(), "standard input")
    if page.is_url(source):
        url = page.address(source)
        with common.err.status(f"asking {url} …"):
            body = page.fetch(url)
        return scrape.read([body], url)
    path = Path(source)
    with _bar(path) as progress:
        return scrape.read(_blocks(path, progress), path.name)


def _stdin() -> Iterator[bytes]:
    from eyas.engines.scrape import BLOCK

    while block := sys.stdin.buffer.read(BLOCK):
        yield block


def _blocks(path: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    """Blocks of a file; ``progress`` gets the bytes of the file itself, packed or not."""
    from eyas import files
    from eyas.engines.scrape import BLOCK
    from eyas.errors import InputError

    with files.open_bytes(path) as (handle, raw):
        unpacked = 0
        while block := handle.read(BLOCK):
            unpacked += len(block)
            if handle is not raw and unpacked > max(MOST_UNPACKED, MOST_RATIO * raw.tell()):
                raise InputError(
                    f"{path} unpacks to more than {unpacked // raw.tell()} times its size; no log does.",
                    way_out="Unpack it yourself and look at it.",
                )
            progress(raw.tell())
            yield block


def _bar(path: Path) -> AbstractContextManager[Callable[[int], None]]:
    """A bar for what takes more than a moment."""
    size = path.stat().st_size if path.is_file() else 0
    return common.counting_bytes(f"reading {path.name}", size) if size > 20e6 else nullcontext(lambda done: None)
