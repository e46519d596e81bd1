"""What the verbs share: consoles, option types, progress bars and JSON out. Imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from pydantic import ValidationError
    from torch.nn import Module

    from eyas.errors import UsageError
    from eyas.target import Target

out = Console()
err = Console(stderr=True)

TargetOption = Annotated[
    str,
    typer.Option("--target", "-t", help="Target: a name (smollm2, gemma3-270m), a folder, a GGUF file or a hub id."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Precision of the target: fp32, bf16 or fp16.")]
Int8Option = Annotated[
    bool,
    typer.Option("--int8", help="Round weights to eight bits: faster on the CPU; the rounded target's own answers."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Where target and drafter run: cpu, cuda, cuda:1 or mps.")]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="Instead of --device: spread the target over devices (accelerate): "
        "auto, balanced, balanced_low_0 or sequential.",
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the target. Read it first.")
]
DrafterOption = Annotated[str, typer.Option("--drafter", "-d", help="Drafter: a name (smollm2-eagle3) or a folder.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Without a drafter.")]
DraftTokensOption = Annotated[int, typer.Option("--draft-tokens", "-k", min=1, max=16, help="Tokens drafted a round.")]
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
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries; ours are rich's


def load_target(
    spec: str,
    dtype: str = "fp32",
    device: str = "cpu",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    int8: bool = False,
) -> Target:
    """The target, with a word while it loads."""
    from eyas import placement, target

    precision = placement.dtype(dtype)
    placement.require(device, device_map)
    if int8:
        placement.require_roundable(dtype, device, device_map)
    say_first_load(spec)
    if dtype != "fp32":
        note(
            f"{dtype}: where two tokens are all but equally good, which one wins depends on rounding and on how many "
            "rows a pass has, so texts and hits may differ there from those of fp32."
        )
    with err.status(f"loading target {spec} …"):
        loaded = target.load(
            spec, dtype=precision, device=device, device_map=device_map, trust_remote_code=trust_remote_code
        )
    if int8:
        from eyas.decode import kernel

        loaded.fingerprint()  # it remembers which target it is rounded from
        round_weights(loaded.model)
        if (why := kernel.load()[1]) is not None:
            note(f"--int8 makes nothing faster here: {why}.")
    return loaded


def round_weights(model: Module) -> None:
    """To eight bits, with a word meanwhile."""
    from eyas.decode import int8

    with err.status("rounding weights …"):
        int8.rounded(model)


def load_ends(spec: str, dtype: str = "fp32", device: str = "cpu", trust_remote_code: bool = False) -> Target:
    """The target without its decoder layers: all that stored states leave to it."""
    from eyas import placement, target

    precision = placement.dtype(dtype)
    placement.require(device, None)
    say_first_load(spec)
    with err.status(f"loading embedding, norm and head of {spec} …"):
        return target.load_ends(spec, dtype=precision, device=device, trust_remote_code=trust_remote_code)


def say_first_load(spec: str) -> None:
    """What loading this target costs the first time, before it does."""
    from eyas import resolve

    if cost := resolve.first_load(spec):
        note(f"the first time {spec} is used, {cost}")


def note(text: str) -> None:
    """A line on standard error that is no error."""
    err.print(Text.assemble(("note   ", "bold yellow"), text), soft_wrap=True)


def invalid_option(error: ValidationError, verb: str, **options: str) -> UsageError:
    """The first thing wrong with a verb's configuration; ``options`` are those spelt otherwise than its field."""
    from eyas.errors import UsageError

    first = error.errors()[0]
    field = str(first["loc"][0])
    option = options.get(field, field.replace("_", "-"))
    return UsageError(f"--{option} {first['input']!r}: {first['msg']}.", way_out=f"See `eyas {verb} --help`.")


def split(flags: str, option: str) -> tuple[str, ...]:
    """The words of an engine's flags, given as one string."""
    from eyas.errors import UsageError

    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise UsageError(f"{option} {flags!r} cannot be split: {error}.", way_out="Close its quotes.") from error


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


@contextmanager
def checking(label: str, total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar for the records walked, and a line that names the reading being tried, with how many went before."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        walked = bar.add_task(label, total=total)
        trying = bar.add_task("", total=None, visible=False)

        def tried(what: str) -> None:
            bar.update(trying, description=f"trying {what[:50]}", advance=1, visible=True)

        yield lambda done: bar.update(walked, completed=done), tried


@contextmanager
def counting_bytes(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same for bytes, with their speed."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
