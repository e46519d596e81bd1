from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.watch import Expected, Watcher
    from eyas.watch.export import Export


def watch(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of a running SGLang or vLLM, e.g. localhost:8000.")
    ],
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "-d", help="Drafter whose curves.json says what to expect: a name or a folder."),
    ] = None,
    expect: Annotated[float | None, typer.Option(help="Accept length to expect of this traffic, instead.")] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two readings.")] = 15.0,
    seconds: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="End after so long; default: never.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, max=100_000, help="Intervals with rounds in a window.")] = 20,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="FILE|:PORT", help="Write the numbers here, or serve them on this port of 127.0.0.1."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read once: all the engine has counted so far.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Watch a running engine's acceptance: drift over its uptime, and whether it reaches what the drafter can do.

    Only reads its metrics page. Exits with 1 where a warning stands at the end.
    """
    from eyas.errors import EXIT_INTERRUPTED
    from eyas.watch import Watcher, loop

    _check_numbers(every, seconds)
    expected = _expected(drafter, expect)
    address = loop.address(url)
    with common.err.status(f"asking {address} …"):
        first = loop.read(address, loop.patience(every))
    watcher = Watcher(address, window=window, every=every, expected=expected)
    interrupted = False
    with _exporting(prometheus, watcher) as export, _display(json) as show:
        try:
            if once:
                rounds: Iterator[Any] = iter([watcher.once(*first)])
            else:
                rounds = loop.watch(address, watcher, seconds=seconds, first=first)
            for events in rounds:
                told = watcher.told()
                show(told, [event.to_json() for event in events])
                _export(export, told)
        except KeyboardInterrupt:
            interrupted = True
    _finish(watcher, json)
    sys.exit(EXIT_INTERRUPTED if interrupted else int(bool(watcher.standing)))


def _check_numbers(every: float, seconds: float | None) -> None:
    from eyas.errors import UsageError

    if not 0.05 <= every <= 86400:
        raise UsageError(f"--every {every}: from 0.05 to 86400 seconds.", way_out="15 suits most engines.")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise UsageError(f"--for {seconds} is no time.", way_out="Give seconds, or leave it out to watch without end.")


def _expected(drafter: str | None, expect: float | None) -> Expected | None:
    from eyas import resolve
    from eyas.errors import UsageError
    from eyas.watch import expected

    if drafter is not None and expect is not None:
        raise UsageError("--drafter and --expect both say what to expect.", way_out="Pass one of them.")
    if expect is not None:
        return expected.asked(expect)
    return None if drafter is None else expected.of_drafter(resolve.drafter(drafter))


@contextmanager
def _exporting(to: str | None, watcher: Watcher) -> Iterator[Export | None]:
    if to is None:
        yield None
        return
    from eyas.watch.export import Export

    with closing(Export(to, watcher.told())) as export:
        yield export


def _export(export: Export | None, told: Any) -> None:
    """A disk that is full for a while must not end the watch."""
    from eyas.errors import EnvironmentFault

    if export is None:
        return
    try:
        export.tell(told)
        export.failed = False
    except EnvironmentFault as error:
        if not export.failed:
            common.note(error.message)
        export.failed = True


@contextmanager
def _display(json: Path | None) -> Iterator[Any]:
    from eyas.report import watched

    with watched.shown(common.console_for(json)) as show:
        yield show


def _finish(watcher: Watcher, json: Path | None) -> None:
    from eyas.report import watched
    from eyas.results import SCHEMA, eyas_version

    told = {"schema": SCHEMA, "eyas": eyas_version(), **watcher.told()}
    common.write_result(told, json)
    watched.print_watched(told, common.console_for(json))
