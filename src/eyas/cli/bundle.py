from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import common


def bundle(
    result: Annotated[Path, typer.Argument(help="What `eyas diagnose --json FILE` wrote.")],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="The drafter: its config and header go in, no weights.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("eyas-bundle.zip"),
    with_tokens: Annotated[
        bool, typer.Option("--with-tokens", help="Put the prompts and answers in as well. They are readable text.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Pack a diagnosis to attach to a bug report: counts, cosines and ranks; no text, ids, states or weights."""
    import json

    from eyas import files, resolve
    from eyas.diagnose import bundle as bundling
    from eyas.errors import InputError

    files.refuse_existing(out, overwrite=overwrite)
    try:
        told = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{result} cannot be read as JSON: {error}.", way_out="Write it with `eyas diagnose … --json FILE`."
        ) from error
    if not isinstance(told, dict):
        raise InputError(f"{result} holds no result.", way_out="Write it with `eyas diagnose … --json FILE`.")
    folder = resolve.drafter(checkpoint) if checkpoint is not None else None
    bundling.write(told, folder, out, with_tokens=with_tokens)
    common.out.print(f"{out}: {out.stat().st_size:,} bytes" + (", with readable text" if with_tokens else ""))
