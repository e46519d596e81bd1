from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from eyas.cli import common


def target(
    spec: Annotated[str, typer.Argument(metavar="TARGET", help="A name (smollm2), a folder, a GGUF file or a hub id.")],
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    json: common.JsonOption = None,
) -> None:
    """Say what a target is, where it lies and what it takes; fetch and unpack it if it is a known name."""
    common.quiet_threads()
    from eyas import placement
    from eyas import target as targets

    precision = placement.dtype(dtype)
    placement.require(device, device_map)
    common.say_first_load(spec)
    with common.err.status(f"looking at {spec} …"):
        found = targets.describe(
            spec, dtype=precision, device=device, device_map=device_map, trust_remote_code=trust_remote_code
        )
    common.write_result(found, json)
    table = Table(show_header=False, box=None)
    for key, value in found.items():
        if key != "schema" and value is not None:
            table.add_row(key.replace("_", " "), str(value))
    common.console_for(json).print(table)
