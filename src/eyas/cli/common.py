"""What the verbs share: consoles, option types, progress bars and JSON out. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from eyas.target import Target

out = Console()
err = Console(stderr=True)

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="Target: a name (smollm2), a folder, a GGUF file or a hub id.")
]
DrafterOption = Annotated[str, typer.Option("--drafter", "-d", help="Drafter: a name (smollm2-eagle3) or a folder.")]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the machine-readable result here; '-' for standard output."),
]


def complain(message: str, way_out: str) -> None:
    """An error as a user sees it: what is wrong, then what to do. Text, never markup: it may quote a file."""
    err.print(Text.assemble(("error  ", "bold red"), message), soft_wrap=True)
    err.print(Text.assemble(("  →    ", "bold"), way_out), soft_wrap=True)


def quiet_threads() -> None:
    """Waiting OpenMP threads sleep instead of spinning: with anything else on the machine spinning costs tenfold."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def load_target(spec: str) -> Target:
    """The target, with a word while it loads."""
    from eyas import target

    with err.status(f"loading target {spec} …"):
        return target.load(spec)


def write_result(value: object, where: Path | None) -> None:
    """JSON to a file, or to standard output for '-', and then nothing else goes there."""
    from eyas import files
    from eyas.report.terminal import as_json

    if where is None:
        return
    if str(where) == "-":
        sys.stdout.write(as_json(value) + "\n")
        sys.stdout.flush()
    else:
        files.write_text(where, as_json(value) + "\n")


def console_for(where: Path | None) -> Console:
    """Where prose goes: to standard error when standard output carries JSON."""
    return err if where is not None and str(where) == "-" else out


@contextmanager
def counting(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; call it with how many are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
