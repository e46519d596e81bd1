from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eyas.cli import answering, common

ALWAYS_SHOWN = ("lines", "records", "held_out", "bad", "duplicates", "tokens", "supervised_tokens")


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files (.jsonl .json .txt .parquet .arrow), folders, hub data sets (org/name), prompt sets by name.",
        ),
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
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: turns, completions and texts as plain text.")
    ] = False,
    split: Annotated[str | None, typer.Option(help="Split of a folder or hub data set (else train).")] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Most tokens of a record (else the target's positions).")
    ] = None,
    too_long: Annotated[
        str, typer.Option("--too-long", help="What to do beyond that: cut, drop, or split at turns.")
    ] = "cut",
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Let the target answer what users ask, instead of the data's answers.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint that answers; else in process.")] = None,
    url_model: Annotated[
        str | None, typer.Option("--url-model", help="The endpoint's name of the target, if it serves several.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of answers; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Share of the probability that sampling keeps.")] = 1.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Tokens that sampling keeps.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Requests an endpoint gets at once.")] = 16,
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out, counted, instead of stopping.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Turn conversations into records: token ids, and a mask of what the target said."""
    common.quiet_threads()
    from eyas import files, sources
    from eyas import prepare as preparing
    from eyas import target as targets
    from eyas.answerers import Answerer, InProcess, Remote
    from eyas.answers import Sampling
    from eyas.endpoint import Endpoint
    from eyas.errors import UsageError
    from eyas.render import RAW_TEMPLATE, Renderer

    if raw and template:
        raise UsageError("--raw and --template exclude each other.", way_out="Pass one of them.")
    if url and not regenerate:
        raise UsageError("--url says who answers, but nothing is to be answered.", way_out="Pass --regenerate too.")
    read = partial(sources.read, inputs, split=split, subset=subset)
    rows = read()
    common.say_first_load(target)
    with common.err.status(f"loading the tokenizer of {target} …"):
        side = targets.load_text_side(target, trust_remote_code=trust_remote_code)
    text = RAW_TEMPLATE if raw else _read_template(template)
    renderer = Renderer(side.tokenizer, side.eos_ids, text)
    if regenerate:
        files.refuse_existing(out, overwrite=overwrite)
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        answerer: Answerer
        if url:
            endpoint = Endpoint(
                url, model=url_model, max_new_tokens=max_new_tokens, sampling=sampling, concurrency=concurrency
            )
            answerer = Remote(endpoint, renderer, side.vocab_size)
        else:
            loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
            answerer = InProcess(loaded, max_new_tokens=max_new_tokens, sampling=sampling)
        journal = out.with_name(out.name + ".answers")
        rows = answering.answered_rows(read, answerer, renderer, journal, max_positions=side.max_positions)
    arguments: dict[str, object] = {
        "verb": "prepare",
        "target": target,
        "inputs": [Path(name).name if Path(name).exists() else name for name in inputs],
        "split": split,
        "subset": subset,
        "held_out": held_out,
        "raw": raw,
        "regenerate": regenerate,
    }
    if regenerate:
        arguments |= {"url": url, "max_new_tokens": max_new_tokens, "sampling": asdict(sampling)}
    with nullcontext(_silent) if regenerate else common.counting("preparing", None) as progress:
        audit = preparing.prepare(
            rows,
            renderer,
            out,
            vocab_size=side.vocab_size,
            max_positions=side.max_positions,
            max_length=max_length,
            too_long=too_long,  # type: ignore[arg-type]  # looked at there
            held_out=held_out,
            skip_bad=skip_bad,
            overwrite=overwrite,
            arguments=arguments,
            progress=progress,
        )
    result = audit.to_json(side.tokenizer)
    common.write_result({"schema": 1, "out": str(out), "audit": result}, json)
    _print(result, out, common.console_for(json))


def _silent(_lines: int) -> None:
    """The bar of the answering is the only one."""


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
        "cut_to_length",
        "dropped_too_long",
        "split_at_turns",
        "split_by_template",
        "tokens",
        "supervised_tokens",
    ):
        if audit[key] or key in ALWAYS_SHOWN:
            table.add_row(key.replace("_", " "), f"{audit[key]:,}")
    table.add_row("forms", ", ".join(f"{form} {n:,}" for form, n in audit["forms"].items()))
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
