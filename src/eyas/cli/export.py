from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import common


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A drafter: a name (smollm2-eagle3) or a folder.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="NAME[==VERSION]", help="Engine to write for.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write (llama.cpp: a .gguf file).")],
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Folder or config.json of the target; default: the contract's."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Write a drafter so that one engine wires it as it was trained, and read it back to prove it."""
    common.quiet_threads()
    from rich.text import Text

    from eyas import resolve
    from eyas.dialects import engines, host
    from eyas.export import export as export_drafter
    from eyas.report import terminal

    asked = engines.asked(to)
    known = tokenizer = None
    if target is not None and target.endswith(".gguf"):  # whose tokenizer it is; the shape is in the contract
        tokenizer = Path(target)
    elif target is not None:
        config = resolve.target_config(target)
        known, tokenizer = host.read(config), config.parent
    arguments = {"verb": "export", "checkpoint": checkpoint, "to": to, "target": target}
    made = export_drafter(
        resolve.drafter(checkpoint),
        asked,
        out,
        target=known,
        tokenizer=tokenizer,
        overwrite=overwrite,
        arguments=arguments,
    )
    told = made.to_json()
    common.write_result(told, json)
    console = common.console_for(json)
    console.print(Text(f"{out} is wired by {made.engine} as the contract says, read back through its table.", "bold"))
    if made.renamed:
        console.print(Text(f"renamed: {', '.join(f'{a} -> {b}' for a, b in list(made.renamed.items())[:6])}", "dim"))
    if made.left_out:
        console.print(Text(f"left out, since the draft vocabulary is the whole one: {', '.join(made.left_out)}", "dim"))
    if told["findings"]:
        terminal.print_findings(told["findings"], console)
