from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import common
from eyas.cli.turning import turning

if TYPE_CHECKING:
    from eyas.check import Case
    from eyas.cli.turning import Turn
    from eyas.diagnose import Diagnosis
    from eyas.engines.sglang_live import Sglang
    from eyas.engines.vllm_live import Vllm
    from eyas.target import Target


@dataclass(frozen=True)
class Asks:
    """What is sent: chats, or texts where the target has no template; ``ids`` as we render them."""

    chats: Sequence[Sequence[dict[str, str]]] | None
    ids: Sequence[Sequence[int]]


def diagnose(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="The drafter that is served: a name or a folder.")
    ] = None,
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    engine: Annotated[str, typer.Option("--engine", "-e", metavar="NAME[==VERSION]", help="vllm or sglang.")] = "vllm",
    engine_python: Annotated[
        Path | None, typer.Option(help="Start the engine: the python of an environment that has it.")
    ] = None,
    engine_flags: Annotated[
        str, typer.Option(help="The flags it is served with, as one quoted string; --speculative-config too.")
    ] = "",
    url: Annotated[
        str | None,
        typer.Option(help="An engine that runs already. Only read: one request at a time, no setting changed."),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="A bundle from `eyas bundle`: judged again, with no engine and no target.")
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", "-p", help="mt-bench, humaneval, gsm8k, or a .jsonl / .txt file.")
    ] = "mt-bench",
    limit: Annotated[int, typer.Option(min=2, max=512, help="How many prompts are sent.")] = 16,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=4)] = 64,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", "-k", min=1, max=16, help="Drafted tokens a round; default: as served."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at a time, on an engine we start.")] = 8,
    observed: Annotated[
        str | None, typer.Option("--observed", metavar="LOG", help="The engine's log or metrics page as well.")
    ] = None,
    expect: Annotated[
        float, typer.Option(help="Accept length at 4 drafted tokens below which a drafter is weak.")
    ] = 1.6,
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="For the engine we start; default: a free one.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Keep the log of the engine we start here.")] = None,
    toggles: Annotated[
        bool | None,
        typer.Option(
            "--toggles/--no-toggles",
            help="Turn settings (batch, graphs, prefix cache, chunk size, restart), one at a time, on an engine we "
            "start; default: where all that is probed is right and the engine, or the log given, still falls short.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with pictures, fixes and every drafted token here.")
    ] = None,
    json: common.JsonOption = None,
) -> None:
    """Ask a running engine what its drafter is fed and drafts, compare with the reference, name what is wrong."""
    common.quiet_threads()
    from eyas import files
    from eyas.report import diagnosis, diagnosis_terminal
    from eyas.results import exit_code

    if bundle is not None:
        told = from_bundle(bundle)
    else:
        flags = common.split(engine_flags, "--engine-flags")
        arguments = {"verb": "diagnose", "checkpoint": checkpoint, "target": target, "dtype": dtype, "engine": engine,
                     "engine_flags": flags, "url": url, "prompts": prompts, "limit": limit,
                     "max_new_tokens": max_new_tokens, "temperature": temperature}  # fmt: skip
        name = named(checkpoint, engine, engine_python, url)
        assert checkpoint is not None
        loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
        asks = asked(prompts, limit, max_new_tokens, loaded)
        announce(name, len(asks.ids), max_new_tokens, url, prompts)
        with ended_well():
            live = started(name, checkpoint, loaded, engine_python, url, flags, draft_tokens, port, concurrency)
            try:
                turn = turning(toggles, loaded, checkpoint, engine_python, flags, concurrency)
                told = run(live, checkpoint, loaded, asks, flags, max_new_tokens, temperature, draft_tokens, expect,
                           beside(observed), arguments, turn).to_json()  # fmt: skip
            finally:
                live.stop(log)
    common.write_result(told, json)
    if html is not None:
        files.write_text(html, diagnosis.diagnosis_page(told))
    diagnosis_terminal.print_diagnosis(told, common.console_for(json))
    sys.exit(_environment(told) or exit_code(told["verdict"]))


READS = {
    "vllm": "/version, /v1/models, /tokenize and /metrics",
    "sglang": "/server_info, /model_info and /tokenize",
}
"""What is read of an engine of others, beside its answers."""


def named(checkpoint: str | None, engine: str, engine_python: Path | None, url: str | None) -> str:
    """The engine's name, of those that are asked."""
    from eyas.errors import UsageError, did_you_mean

    if checkpoint is None:
        raise UsageError("No drafter was named.", way_out="eyas diagnose CHECKPOINT --engine-python …/bin/python")
    name = engine.split("==")[0]
    if name not in READS:
        known = name in ("llama.cpp", "tensorrt-llm")
        raise UsageError(
            f"{name} is not asked here yet." if known else f"{engine!r} is no engine.",
            way_out="`eyas show CHECKPOINT --engine NAME` says what it does with the files."
            if known
            else did_you_mean(name, list(READS)),
        )
    if (engine_python is None) == (url is None):
        raise UsageError(
            "An engine is either started (--engine-python) or attached to (--url).",
            way_out="Pass --engine-python …/bin/python of an environment that has it, or --url http://host:port.",
        )
    return name


def asked(prompts: str, limit: int, max_new_tokens: int, target: Target) -> Asks:
    """The first prompts of a set that leave room for an answer."""
    from eyas import prompts as sets
    from eyas.errors import UsageError
    from eyas.render import Renderer

    tokenizer = target.tokenizer
    if tokenizer is None:
        raise UsageError(
            "The target has no tokenizer, so prompts cannot be cut.", way_out="Give the target's own folder."
        )
    chosen = sets.load(prompts, limit)
    room = target.max_positions - max_new_tokens - 1
    if getattr(tokenizer, "chat_template", None):
        renderer = Renderer(tokenizer, target.eos_ids())
        chats = [p.messages() for p in chosen]
        ids = [renderer.ids(chat, prompt=True) for chat in chats]
        fit = [i for i, one in enumerate(ids) if 1 < len(one) <= room]
        return _some(Asks([chats[i] for i in fit], [ids[i] for i in fit]), prompts)
    ids = [list(tokenizer(p.turns[0])["input_ids"]) for p in chosen]
    return _some(Asks(None, [one for one in ids if 1 < len(one) <= room]), prompts)


def _some(asks: Asks, prompts: str) -> Asks:
    from eyas.errors import InputError

    if len(asks.ids) < 2:
        raise InputError(
            f"{len(asks.ids)} prompts of {prompts} fit the target; at least 2 are needed.",
            way_out="Give other prompts.",
        )
    return asks


def announce(engine: str, count: int, max_new_tokens: int, url: str | None, prompts: str) -> None:
    """What it will cost, before it does."""
    if url is not None:
        common.note(
            f"sends {count} prompts of {prompts} to {url}, one at a time, {max_new_tokens} tokens each, and reads "
            f"{READS[engine]}. Nothing is set, flushed or profiled."
        )
    else:
        common.note(
            f"starts the engine (a minute for a small model), sends {count} prompts of {max_new_tokens} tokens, then "
            "runs the reference on the same text: about 3 minutes for SmolLM2 on two cores."
        )


@contextmanager
def ended_well() -> Iterator[None]:
    """SIGTERM ends us as an interrupt does, so that the engine ends too; what an earlier eyas left is ended first."""
    from eyas.engines import child

    if left := child.reap():
        common.note(f"{left} engine{'s' if left > 1 else ''} that an eyas before left running: ended.")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def started(
    engine: str,
    checkpoint: str,
    target: Target,
    python: Path | None,
    url: str | None,
    flags: Sequence[str],
    draft_tokens: int | None,
    port: int | None,
    concurrency: int,
) -> Vllm | Sglang:
    from eyas import resolve
    from eyas.engines.sglang_live import Meant, Sglang
    from eyas.engines.vllm_live import Vllm

    if url is not None:
        if engine == "sglang":
            return Sglang.attach(url, Meant(target.spec, checkpoint, target.facts.architecture), flags)
        return Vllm.attach(url)
    assert python is not None, "named() saw to it"
    assert target.folder is not None, "a target that was loaded lies somewhere"
    launch = Sglang.launch if engine == "sglang" else Vllm.launch
    live = launch(
        python.absolute(), target.folder, resolve.drafter(checkpoint).absolute(), draft_tokens=draft_tokens,
        flags=flags, port=port, concurrency=concurrency,
    )  # fmt: skip
    for note in live.notes:
        common.note(note)
    return live


def run(
    live: Vllm | Sglang,
    checkpoint: str,
    target: Target,
    asks: Asks,
    flags: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    draft_tokens: int | None,
    expect: float,
    evidence: Sequence[Callable[[Case], None]],
    arguments: dict[str, Any],
    turn: Turn,
) -> Diagnosis:
    """Ask, then judge. An engine of ours that dies is judged by its files and its last words."""
    from eyas import diagnose as diagnosing
    from eyas import resolve
    from eyas.diagnose import asked as asking
    from eyas.diagnose.dead import died
    from eyas.errors import EnvironmentFault

    folder = resolve.drafter(checkpoint)
    began = time.monotonic()
    try:
        with common.err.status("starting the engine …") as status:
            live.ready(lambda line: status.update(f"starting the engine: {line[-100:]}"))
        start_seconds = time.monotonic() - began
        K = drafted(live, draft_tokens)
        prompts: Sequence[Sequence[int]] = asks.ids
        prompt = None
        if asks.chats is not None:
            prompts, prompt = asking.rendered(live, asks.chats, asks.ids)
        with common.counting(f"asking {len(prompts)} prompts", len(prompts)) as heard:
            collected = diagnosing.collect(
                live, prompts, max_new_tokens, temperature=temperature, prompt=prompt, heard=heard
            )
    except EnvironmentFault as fault:
        if live.about.mode == "attached":
            raise
        return died(folder, target, live.about, fault, flags, name=checkpoint, arguments=arguments)
    live.stop_engine()  # the reference needs its memory and its cores
    with common.err.status("comparing …") as status:
        found = diagnosing.diagnose(
            folder,
            target,
            collected,
            name=checkpoint,
            draft_tokens=K,
            expect=expect,
            flags=flags,
            evidence=evidence,
            arguments=arguments,
            heard=lambda what: status.update(f"comparing: {what[:90]}"),
        )
    turn(found, collected, K, start_seconds)
    return found


def drafted(live: Vllm | Sglang, asked_for: int | None) -> int:
    """Tokens drafted a round, as the engine says; it drafts or it is an error."""
    from eyas.errors import InputError

    told = live.about.model.get("draft_tokens") or live.about.resolved.get("speculative.num_speculative_tokens")
    if not told:
        page = live.metrics()
        told = len(page.accepted) if page is not None else None
    if not told:
        raise InputError(
            "The engine runs no drafter: its metrics know no speculation.",
            way_out="Start it with --speculative-config and without --disable-log-stats; see docs/engines-vllm.md.",
        )
    if asked_for is not None and asked_for != told:
        common.note(f"the engine drafts {told} tokens a round, not {asked_for}.")
    return int(told)


def beside(observed: str | None) -> list[Callable[[Case], None]]:
    """A log as one more witness."""
    if observed is None:
        return []
    from eyas.check.observed import judge_observed
    from eyas.cli import read

    reading = read.reading(observed)
    return [lambda case: judge_observed(case, reading.observed, reading.findings)]


def from_bundle(path: Path) -> dict[str, Any]:
    from eyas.diagnose import bundle

    return bundle.judged(path)


def _environment(told: dict[str, Any]) -> int:
    """4 where the engine died and nothing in the files says why."""
    from eyas.errors import EXIT_ENVIRONMENT

    alone = (
        told["verdict"] == "undecided" and not (told.get("served") or {}).get("prompts") and not told.get("observed")
    )
    return EXIT_ENVIRONMENT if alone else 0
