from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from eyas.cli import common


def target(
    spec: Annotated[str, typer.Argument(metavar="TARGET", help="A name (smollm2), a folder, a GGUF file or a hub id.")],
    json: common.JsonOption = None,
) -> None:
    """Say what a target is and where it lies; fetch and unpack it if it is a known name."""
    common.quiet_threads()
    from eyas import target as targets

    with common.err.status(f"looking at {spec} … (the first time it may be fetched and dequantised)"):
        found = targets.describe(spec)
    common.write_result(found, json)
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        if key != "schema" and value is not None:
            table.add_row(key.replace("_", " "), str(value))
    common.console_for(json).print(table)
