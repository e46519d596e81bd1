from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import common
from eyas.cli.benching import predicting, results
from eyas.cli.benching.results import Where
from eyas.cli.benching.setup import Setup

if TYPE_CHECKING:
    from eyas.bench import Bench
    from eyas.prompts import Prompt

WARM_UP = "Write three sentences about a river."


def bench(
    prompts: Annotated[
        str, typer.Option("--prompts", "-p", help="mt-bench, humaneval, gsm8k, or a .jsonl / .txt file.")
    ] = "mt-bench",
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    drafter: common.DrafterOption = "smollm2-eagle3",
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option("--draft-tokens", "-k", help="Drafted tokens a round; several to compare: 1,2,4. 4 if not given."),
    ] = None,
    tree: Annotated[
        str | None, typer.Option(help="Trees to compare too: DEPTH/TOP-K/NODES, several: 4/2/8,6/4/16.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="A side that chooses what to draft as it goes, 4 deep at most.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Times that every prompt is answered.")] = 1,
    library: Annotated[
        bool, typer.Option("--library", help="Time transformers' own generate too, as a further side.")
    ] = False,
    packed: Annotated[bool, typer.Option("--packed/--no-packed", help="Prepacked linear layers on the CPU.")] = True,
    int8: common.Int8Option = False,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL of an OpenAI-compatible server as a side; may be repeated. A name like 'plain' or 'chain 4' "
            "makes it part of the recommendation."
        ),
    ] = None,
    url_model: Annotated[
        list[str] | None, typer.Option(help="NAME=MODEL where the server of that name has several.")
    ] = None,
    url_key: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VARIABLE of the environment that holds that server's key; else EYAS_API_KEY."),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Let servers stream: tells when the first token came.")] = True,
    local: Annotated[
        bool | None, typer.Option("--local/--no-local", help="Decode in this process too. Without --url it does.")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="A folder in which every turn is kept: the same command goes on after an interruption."),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Decode nothing: say from step times whether speculation can pay here.")
    ] = False,
    curve: Annotated[Path | None, typer.Option(help="--predict: the JSON of a check, for its accept lengths.")] = None,
    accept: Annotated[
        str | None, typer.Option(help="--predict: how often each depth is right given those before: 0.6,0.4,0.3.")
    ] = None,
    accept_length: Annotated[
        float | None, typer.Option(help="--predict: an accept length assumed at 4 drafted tokens.")
    ] = None,
    verify_ms: Annotated[
        str | None, typer.Option(help="--predict: a target pass by its rows, 1=45,5=60; else it is timed here.")
    ] = None,
    draft_ms: Annotated[float | None, typer.Option(help="--predict: one draft depth, with --verify-ms.")] = None,
    draft_vocab: Annotated[
        int, typer.Option(min=1, help="--predict: draft vocabulary of the drafter whose cost is timed.")
    ] = 8192,
    json: common.JsonOption = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here as Markdown.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the result here as one self-contained page.")] = None,
) -> None:
    """Time ways of decoding side by side, in turns: with and without the drafter, in this process or behind a URL.

    Speed, ratio with its interval, accept length, equal texts; the setting to run with, in every engine's flags.
    """
    results.require_places(json, markdown, html)
    where = Where(json, markdown, html)
    ks = parse_counts(draft_tokens) if draft_tokens is not None else None
    if predict:
        run = (target, dtype, device, device_map, trust_remote_code, int8, packed)
        _predict(run, ks, verify_ms, draft_ms, draft_vocab, predicting.lengths(curve, accept, accept_length), where)
        return
    _refuse_stray(curve=curve, accept=accept, accept_length=accept_length, verify_ms=verify_ms, draft_ms=draft_ms)
    from eyas import prompts as sets

    chosen = sets.load(prompts, limit)
    with ExitStack() as stack:
        setup = Setup(max_new_tokens)
        if local if local is not None else not url:
            place = (target, dtype, device, device_map, trust_remote_code, int8)
            setup.add_local(
                place, drafter, ks or [4], chosen, trees=parse_trees(tree), adaptive=adaptive, library=library,
                packed=packed, stack=stack,
            )  # fmt: skip
        setup.add_urls(url or [], url_model or [], url_key or [], stream=stream, stack=stack)
        shared = {"prompts": prompts, "max_new_tokens": max_new_tokens, "sides": setup.told()}
        result = _run(setup, chosen, repeat, journal, shared)
        told = setup.result_json(result, chosen, {"prompts_name": prompts, "max_new_tokens": max_new_tokens}, drafter)
    where.write(told)
    _end(result)


def _run(setup: Setup, chosen: Sequence[Prompt], repeat: int, journal: Path | None, shared: dict[str, object]) -> Bench:
    from eyas import bench as benching
    from eyas.journal import Journal
    from eyas.prompts import Prompt

    setup.require_sides()
    turns = repeat * len(chosen)
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    with (
        Journal(journal, results.header(chosen, shared)) if journal is not None else nullcontext() as kept,
        common.counting(f"{turns} turns × {len(setup.sides)} sides", turns) as progress,
    ):
        if kept is not None and len(kept):
            common.note(f"{len(kept)} of {turns} turns are in {journal} already.")
        return benching.run(
            setup.sides,
            chosen,
            costs=setup.costs,
            category=lambda prompt: prompt.category,
            repeats=repeat,
            warm_up=Prompt("warm-up", (WARM_UP,)),
            journal=kept,
            listener=results.Told(setup.max_new_tokens, progress),
        )


def _end(result: Bench) -> None:
    """Exit codes of a run that is not whole: what there is has been written."""
    from eyas.errors import EXIT_ENVIRONMENT, Interrupted

    if result.interrupted:
        raise Interrupted(
            f"Interrupted after {len(result.turns)} turns, which were written.",
            way_out="With --journal FOLDER the same command goes on where it was.",
        )
    if any(fault.given_up for fault in result.faults):
        raise typer.Exit(EXIT_ENVIRONMENT)


def _predict(
    run: tuple[str, str, str, str | None, bool, bool, bool],
    ks: Sequence[int] | None,
    verify_ms: str | None,
    draft_ms: float | None,
    draft_vocab: int,
    lengths: tuple[Any, str | None],
    where: Where,
) -> None:
    from eyas import provenance
    from eyas.bench.predict import predict
    from eyas.errors import UsageError

    if (verify_ms is None) != (draft_ms is None):
        raise UsageError(
            "--verify-ms and --draft-ms go together.",
            way_out="Give both, as in --verify-ms 1=45,5=60 --draft-ms 4, or neither: then they are timed here.",
        )
    if verify_ms is not None and draft_ms is not None:
        times, about = predicting.step_times(verify_ms, draft_ms), "given"
        wanted = ks or range(1, times.most + 1)
    else:
        wanted = ks or range(1, predicting.MOST + 1)
        times, about = predicting.measured(*run, list(wanted), draft_vocab), f"timed on {run[0]}"
    found, origin = lengths
    told = predict(times, wanted, found, origin).to_json()
    told["provenance"] = provenance.collect({"step_times": about, "dtype": run[1], "draft_vocabulary": draft_vocab})
    where.write_prediction(told)


def _refuse_stray(**options: object) -> None:
    from eyas.errors import UsageError

    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --predict.", way_out="Add --predict, or leave it out.")


def parse_counts(text: str) -> list[int]:
    from eyas.errors import UsageError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= k <= 16 for k in counts):
        raise UsageError(
            f"--draft-tokens {text!r} is not a list of numbers from 1 to 16.",
            way_out="Pass for example -k 1,2,4.",
        )
    return counts


def parse_trees(text: str | None) -> list[tuple[int, int, int]]:
    """Depth, top-k and nodes of each tree in ``4/2/8,6/4/16``."""
    from eyas.errors import UsageError

    trees: list[tuple[int, int, int]] = []
    for part in text.split(",") if text is not None else ():
        numbers = part.strip().split("/")
        if len(numbers) != 3 or not all(n.isdecimal() and 1 <= int(n) <= 64 for n in numbers):
            raise UsageError(
                f"--tree {part!r} is not depth, top-k and nodes, each from 1 to 64.", way_out="Pass for example 4/2/8."
            )
        depth, top_k, nodes = map(int, numbers)
        trees.append((depth, top_k, nodes))
    return trees
