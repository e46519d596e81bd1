from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.check import Case

HELD_OUT = "heldout.jsonl.gz"  # records that travel with a checkpoint


def check(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A drafter: a name (smollm2-eagle3) or a folder.")
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="A second drafter, to compare with on the same text.")
    ] = None,
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    records: Annotated[
        Path | None,
        typer.Option("--records", "-r", help="Held-out records; default: those in the checkpoint."),
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(
            "--states", help="Stored states, of any trainer: the target does not run, only its ends are read."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N records.")] = None,
    draft_tokens: Annotated[
        int | None, typer.Option("--draft-tokens", "-k", min=1, max=16, help="Deepest walk.")
    ] = None,
    expect: Annotated[
        float, typer.Option(help="Accept length at 4 drafted tokens below which a drafter is weak.")
    ] = 1.6,
    quick: Annotated[bool, typer.Option("--quick", help="Try no other readings of the files.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try other readings even where nothing speaks for them.")
    ] = False,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="weak", help="Exit 1 on a weak drafter too.")
    ] = None,
    observed: Annotated[
        str | None,
        typer.Option("--observed", metavar="LOG", help="An engine's log, metrics page or its address, as `eyas read`."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", "-e", metavar="NAME[==VERSION]", help="Engine that will serve it.")
    ] = None,
    runner: Annotated[Literal["v1", "v2"] | None, typer.Option(help="vLLM's runner; default: both.")] = None,
    flags: Annotated[
        str | None, typer.Option(help="Flags the engine is started with, as one quoted string; needs --engine.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    json: common.JsonOption = None,
) -> None:
    """Say what a drafter is worth on its target, engine-free: files, contract, curves, accept length, verdict."""
    common.quiet_threads()
    from eyas import files, resolve
    from eyas import records as reading
    from eyas.check import check as check_drafter
    from eyas.errors import UsageError
    from eyas.prepare import read_manifest
    from eyas.report import page, terminal
    from eyas.results import exit_code
    from eyas.states.given import given

    if quick and sweep:
        raise UsageError("--quick and --sweep contradict each other.", way_out="Pass one of them.")
    if fail_on not in (None, "weak"):
        raise UsageError(f"--fail-on {fail_on!r} is not known.", way_out="Pass --fail-on weak.")
    steps = beside(observed, engine, runner, flags, target)
    if other is not None and (html is not None or fail_on is not None):
        raise UsageError("--html and --fail-on are of one drafter.", way_out="Leave them out, or check one drafter.")
    folder = resolve.drafter(checkpoint)
    second = resolve.drafter(other) if other is not None else None
    file = records or folder / HELD_OUT
    if records is None and states is None and not file.exists():
        raise UsageError(
            f"{checkpoint} carries no held-out records.",
            way_out="Pass --records FILE, made by `eyas prepare`.",
        )
    if states is None:
        loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
    else:
        loaded = common.load_ends(target, dtype, device, trust_remote_code)
    chosen = None
    if records is not None or states is None:
        read = reading.read(file, vocab_size=loaded.vocab_size, limit=limit)
        chosen = list(reading.fit(read, loaded.max_positions))
    stock, form, notes = given(states, loaded, chosen) if states is not None else (None, "eyas", ())
    if stock is not None:
        chosen = list(stock.records)
    assert chosen is not None
    arguments = {
        "verb": "check",
        "checkpoint": checkpoint,
        "target": target,
        "dtype": dtype,
        "records": file.name,
        "states": states.name if states else None,
        "limit": limit,
        "observed": observed,
        "engine": engine,
        "flags": flags,
    }
    if second is not None and other is not None:
        from eyas.cli import pairing

        pairing.compare(
            (folder, second),
            loaded,
            chosen,
            names=(checkpoint, other),
            json=json,
            manifest=read_manifest(file),
            draft_tokens=draft_tokens,
            expect=expect,
            sweeping="never" if quick else "always" if sweep else "auto",
            arguments={**arguments, "other": other},
        )
    with common.checking(f"walking {len(chosen)} records", len(chosen)) as (progress, tried):
        result = check_drafter(
            folder,
            loaded,
            chosen,
            name=checkpoint,
            manifest=read_manifest(file) if file.exists() else None,
            draft_tokens=draft_tokens,
            expect=expect,
            states=stock,
            form=form,
            notes=notes,
            engine=engine,
            sweeping="never" if quick else "always" if sweep else "auto",
            arguments=arguments,
            evidence=steps,
            progress=progress,
            tried=tried,
        )
    told = result.to_json()
    common.write_result(told, json)
    if html is not None:
        files.write_text(html, page.check_page([told]))
    terminal.print_check(told, common.console_for(json))
    sys.exit(exit_code(result.verdict, fail_on == "weak"))


def beside(
    observed: str | None, engine: str | None, runner: Literal["v1", "v2"] | None, flags: str | None, target: str
) -> list[Callable[[Case], None]]:
    """Steps about what lies beside the files: the engine asked about, its log. A log that says nothing stops here."""
    from eyas import resolve
    from eyas.check.engine import judge_engine
    from eyas.check.observed import judge_observed
    from eyas.cli import read
    from eyas.dialects import engines, host
    from eyas.errors import UsageError

    if engine is None and (runner or flags):
        raise UsageError(
            f"{'--flags' if flags else '--runner'} speaks of an engine and none was named.",
            way_out="Name it with --engine NAME[==VERSION].",
        )
    steps: list[Callable[[Case], None]] = []
    if engine is not None:
        words = common.split(flags or "", "--flags")
        engines.asked(engine, runner, words)
        known = host.read(resolve.target_config(target))
        steps.append(lambda case: judge_engine(case, engine, runner, words, known))
    if observed is not None:
        reading = read.reading(observed)
        steps.append(lambda case: judge_observed(case, reading.observed, reading.findings))
    return steps
