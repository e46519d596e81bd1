"""The command line: one small file a verb. Parse, call, print; heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from eyas.cli import (
    bench,
    bundle,
    capture,
    check,
    common,
    demo,
    diagnose,
    export,
    generate,
    prepare,
    read,
    records,
    serve,
    show,
    target,
    train,
    watch,
)
from eyas.errors import EXIT_FAULT, EXIT_INTERRUPTED, EyasError

app = typer.Typer(
    name="eyas",
    help="Train EAGLE-3 drafters, prove what they are worth, decode with them, and name what is wrong with one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for module, verb in (
    (target, "target"),
    (prepare, "prepare"),
    (records, "records"),
    (capture, "capture"),
    (train, "train"),
    (check, "check"),
    (diagnose, "diagnose"),
    (bundle, "bundle"),
    (show, "show"),
    (export, "export"),
    (read, "read"),
    (watch, "watch"),
    (generate, "generate"),
    (serve, "serve"),
    (bench, "bench"),
    (demo, "demo"),
):
    app.command(verb)(getattr(module, verb))


@app.callback(invoke_without_command=False)
def _root() -> None:
    pass


def main() -> None:
    """Entry point. Errors of ours become two lines and their exit code; anything else is our bug and says so."""
    try:
        app()
    except EyasError as error:
        common.complain(error.message, error.way_out)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        common.complain("Interrupted.", "Nothing half-written was left behind.")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe went away, e.g. `eyas … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAULT)
    except Exception as error:
        if os.environ.get("EYAS_DEBUG"):
            traceback.print_exc()
        common.complain(
            f"A bug in eyas: {type(error).__name__}: {error}",
            "Please report it with the command you ran; EYAS_DEBUG=1 shows where it happened.",
        )
        sys.exit(EXIT_FAULT)
