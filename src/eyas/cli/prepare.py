from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eyas.cli import common


def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="JSON lines (.gz too): messages, ShareGPT, records."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write: train.jsonl, heldout.jsonl, manifest.json.")
    ],
    target: common.TargetOption = "smollm2",
    trust_remote_code: common.TrustOption = False,
    held_out: Annotated[float, typer.Option(help="Share of prompts held out, by hash.")] = 0.05,
    template: Annotated[
        Path | None, typer.Option(help="A jinja chat template to use instead of the tokenizer's.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: turns joined as plain text.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines out, counted, instead of stopping.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Turn conversations into records: token ids, and a mask of what the target said."""
    common.quiet_threads()
    from eyas import prepare as preparing
    from eyas import target as targets
    from eyas.errors import UsageError
    from eyas.records import RAW_TEMPLATE, Renderer

    if raw and template:
        raise UsageError("--raw and --template exclude each other.", way_out="Pass one of them.")
    common.say_first_load(target)
    with common.err.status(f"loading the tokenizer of {target} …"):
        side = targets.load_text_side(target, trust_remote_code=trust_remote_code)
    text = RAW_TEMPLATE if raw else _read_template(template)
    renderer = Renderer(side.tokenizer, side.eos_ids, text)
    arguments = {
        "verb": "prepare",
        "target": target,
        "inputs": [p.name for p in inputs],
        "held_out": held_out,
        "raw": raw,
    }
    with common.counting("preparing", None) as progress:
        audit = preparing.prepare(
            inputs,
            renderer,
            out,
            vocab_size=side.vocab_size,
            max_positions=side.max_positions,
            held_out=held_out,
            skip_bad=skip_bad,
            overwrite=overwrite,
            arguments=arguments,
            progress=progress,
        )
    result = audit.to_json(side.tokenizer)
    common.write_result({"schema": 1, "out": str(out), "audit": result}, json)
    _print(result, out, common.console_for(json))


def _read_template(path: Path | None) -> str | None:
    from eyas.errors import TemplateError

    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"{path} cannot be read: {error}.", way_out="Pass a UTF-8 text file with a jinja template."
        ) from error


def _print(audit: dict[str, Any], out: Path, console: Any) -> None:
    table = Table(show_header=False, box=None)
    for key in (
        "lines",
        "records",
        "held_out",
        "bad",
        "duplicates",
        "cut_to_positions",
        "tokens",
        "supervised_tokens",
    ):
        table.add_row(key.replace("_", " "), f"{audit[key]:,}")
    table.add_row("supervised share", f"{audit['supervised_share']:.1%}")
    table.add_row(
        "turns that end with a supervised end token",
        f"{audit['turns_with_supervised_end']:,} of {audit['turns']:,}",
    )
    table.add_row("length min / median / p90 / max", " / ".join(map(str, audit["length_min_median_p90_max"])))
    for key in ("first_supervised", "last_supervised"):
        shown = ", ".join(f"{t['text']!r} × {t['turns']}" for t in audit[key])
        table.add_row(key.replace("_", " ") + " tokens", Text(shown))
    table.add_row("sources", Text(", ".join(f"{k} {v}" for k, v in audit["sources"].items())))
    console.print(table)
    for reason in audit["bad_examples"]:
        console.print(Text(f"left out: {reason}", style="yellow"))
    console.print(Text(f"written to {out}", style="bold"))
