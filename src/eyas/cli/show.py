from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from eyas.cli import common


def show(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A drafter: a name (smollm2-eagle3), a folder, or its config.json."),
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", "-e", metavar="NAME[==VERSION]", help="Engine to ask about; may be given again."),
    ] = None,
    runner: Annotated[
        Literal["v1", "v2"] | None, typer.Option(help="vLLM's runner; default: both (CPU uses v1, GPUs v2).")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Folder or config.json of the target; default: the contract's."),
    ] = None,
    flags: Annotated[
        str | None, typer.Option(help="Flags the engine will be started with, as one quoted string.")
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option("--engine-python", metavar="PATH", help="Ask the engine installed beside this python itself."),
    ] = None,
    json: common.JsonOption = None,
) -> None:
    """Say what engines will do with a drafter, from its files alone: what is captured, ignored, shared, dropped."""
    from eyas import resolve
    from eyas.dialects import engines, host
    from eyas.engines import ask
    from eyas.errors import EXIT_FAULT, UsageError
    from eyas.report import wiring as report
    from eyas.show import read_files
    from eyas.show import show as show_drafter

    asked = [engines.asked(text, runner, common.split(flags or "", "--flags")) for text in engine or []]
    names = sorted({one.name for one in asked})
    if len(names) != 1 and (flags or engine_python):
        raise UsageError(
            f"{'--flags' if flags else '--engine-python'} speaks of one engine; {len(names)} were named.",
            way_out="Name one with --engine, and run the command once for each.",
        )
    place = resolve.drafter_files(checkpoint)
    known = host.read(resolve.target_config(target)) if target else None
    answers = {}
    if engine_python is not None:
        files = read_files(place)
        if known is None:
            raise UsageError(
                f"{names[0]} is asked with the target's whole config.json, which a contract does not hold.",
                way_out="Pass --target with the target's folder or its config.json.",
            )
        answers[names[0]] = ask.ask(names[0], engine_python, files, known.config, asked[0].launch.flags)
    arguments = {"verb": "show", "checkpoint": checkpoint, "engine": engine, "target": target, "flags": flags}
    shown = show_drafter(place, asked, name=checkpoint, target=known, answers=answers, arguments=arguments)
    told = shown.to_json()
    common.write_result(told, json)
    report.print_show(told, common.console_for(json))
    sys.exit(EXIT_FAULT if shown.miswired else 0)
