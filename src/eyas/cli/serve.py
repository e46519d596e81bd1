from __future__ import annotations

import logging
import shlex
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.drafter import Drafter
    from eyas.serve import Answering, Settings
    from eyas.target import Target

AT_MOST = 4  # tokens drafted a round where a chooser says how many
FIXED = 2  # where none does


def serve(
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    int8: common.Int8Option = False,
    drafter: common.DrafterOption = "smollm2-eagle3",
    plain: common.PlainOption = False,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens",
            "-k",
            min=1,
            max=16,
            help=f"Tokens drafted a round, at most. Default {AT_MOST}; {FIXED} with --fixed or --engine.",
        ),
    ] = None,
    fixed: Annotated[
        bool, typer.Option("--fixed", help="Draft --draft-tokens every round, not as many as pay: for measurements.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond 127.0.0.1 a key is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="EYAS_API_KEY", help="Better set in the environment.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A name clients may call this server by; addresses all may."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The model's name in the API; default: TARGET.")] = None,
    max_running: Annotated[int, typer.Option(help="Answers whose rounds are played in turn.")] = 4,
    max_queue: Annotated[int, typer.Option(help="Answers that may wait; more get 429.")] = 64,
    queue_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait in the queue.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time of a request.")] = 600.0,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A client that reads nothing for so long is cut off.")
    ] = 30.0,
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="What a stop leaves to the answers that run.")] = 30.0,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Start vllm or sglang instead, with the drafter spelled for it.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option("--engine-python", help="Python of the environment the engine is in.")
    ] = None,
    engine_flags: Annotated[str, typer.Option("--engine-flags", help="Flags of the engine's own, in one string.")] = "",
) -> None:
    """Serve a target over HTTP as the OpenAI API does, faster by a drafter; a chat page at /."""
    common.quiet_threads()
    from eyas.errors import UsageError
    from eyas.serve.run import require_safe
    from eyas.serve.settings import Settings

    settings = Settings(
        model=name or _name(target),
        max_running=max_running,
        max_queue=max_queue,
        queue_seconds=queue_timeout,
        request_seconds=request_timeout,
        stall_seconds=stall_timeout,
        grace_seconds=grace,
        hosts=(*(allow_host or ()), *(() if host in ("0.0.0.0", "::") else (host,))),
        api_key=api_key,
    )
    require_safe(host, settings)
    if engine is not None:
        if int8:
            raise UsageError(
                f"--int8 is for eyas's own decoder, not for --engine {engine}.",
                way_out="Leave it out; an engine's own way of rounding goes into --engine-flags.",
            )
        chosen = None if plain else drafter
        python = _python(engine, engine_python)
        count = draft_tokens or FIXED
        sys.exit(_engine(engine, python, target, chosen, count, host, port, settings, engine_flags))
    with _listen(host, port) as listening:
        loaded = common.load_target(target, dtype, device, device_map, trust_remote_code, int8)
        side = None if plain else _drafter(drafter, loaded)
        if int8 and side is not None:
            common.round_weights(side)
        _serve(_answering(loaded, side, draft_tokens, fixed), settings, listening)


def _name(target: str) -> str:
    """What a target goes by in the API: a folder by its own name, no path of this machine."""
    path = Path(target).expanduser()
    return path.resolve().name if path.exists() else target


def _listen(host: str, port: int) -> socket.socket:
    """Before the target is loaded: a port that is taken is best known at once."""
    from eyas.serve.run import bound

    return bound(host, port)


def _drafter(spec: str, target: Target) -> Drafter:
    """The drafter, if it fits the target in every way that its files tell. Raises CheckpointError in ``check``'s
    words."""
    from eyas import checkpoint, resolve
    from eyas.errors import CheckpointError

    read = checkpoint.read(resolve.drafter(spec))
    for finding in checkpoint.inspect(read, target):
        if finding.severity == "fatal" or finding.cause == "target-differs":
            raise CheckpointError(
                finding.summary,
                way_out=f"{finding.fix} Serve the target it was trained on, or pass --plain; "
                f"`eyas check {shlex.quote(spec)} --target {shlex.quote(target.spec)}` measures what it is worth here.",
            )
        if finding.severity == "likely":
            common.note(finding.summary)
    return checkpoint.load(read, target)


def _answering(target: Target, drafter: Drafter | None, draft_tokens: int | None, fixed: bool) -> Answering:
    from eyas.serve import Answering
    from eyas.target import no_tokenizer

    if target.tokenizer is None:
        raise no_tokenizer(target.spec)
    count = draft_tokens or (FIXED if fixed else AT_MOST)
    return Answering(target, drafter, draft_tokens=count, adaptive=not fixed)


def _how(answering: Answering) -> str:
    """What is drafted, for the line that says the server is ready."""
    if answering.drafter is None:
        return "without a drafter"
    if answering.adaptive:
        return f"0 to {answering.draft_tokens} tokens drafted a round, as many as pay"
    return f"{answering.draft_tokens} tokens drafted a round"


def _serve(answering: Answering, settings: Settings, listening: socket.socket) -> None:
    from eyas.serve import Service
    from eyas.serve import serve as run

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("eyas.serve").setLevel(logging.INFO)
    service = Service(answering, settings)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def ready() -> None:
        where = f"http://{shown}:{port}"
        common.note(f"{settings.model} at {where}/v1, {_how(answering)}; a chat at {where}/")

    run(service, listening, ready)


# -- an engine instead -----------------------------------------------------------------------------------------------


def _python(engine: str, python: Path | None) -> Path:
    from eyas.errors import UsageError

    if python is None:
        raise UsageError(
            f"--engine {engine} needs the environment that it is in.",
            way_out="Pass --engine-python, e.g. ~/vllm/bin/python.",
        )
    return python.absolute()


def _engine(
    engine: str,
    python: Path,
    target: str,
    drafter: str | None,
    draft_tokens: int,
    host: str,
    port: int,
    settings: Settings,
    flags: str,
) -> int:
    """Run it in the foreground; its exit code."""
    from eyas import resolve
    from eyas.engines import serving
    from eyas.unpack import materialise

    common.say_first_load(target)
    with ExitStack() as kept:
        spelled = None if drafter is None else _spelled(engine, resolve.drafter(drafter), target, kept)
        words = serving.command(
            engine,
            python,
            materialise(resolve.target(target)),
            spelled,
            draft_tokens=draft_tokens,
            host=host,
            port=port,
            name=settings.model,
            flags=common.split(flags, "--engine-flags"),
        )
        common.out.print(shlex.join(words), soft_wrap=True, markup=False, highlight=False)
        return serving.run([*words, *_key(engine, settings)], serving.environment(engine, settings.api_key))


def _key(engine: str, settings: Settings) -> list[str]:
    """vLLM reads its key from its environment, SGLang has a flag alone."""
    if engine != "sglang" or settings.api_key is None:
        return []
    common.note("SGLang takes its key as a flag (--api-key, not shown above), which others on this machine can read.")
    return ["--api-key", settings.api_key]


def _spelled(engine: str, drafter: Path, target: str, kept: ExitStack) -> Path:
    """The drafter's own folder where this engine wires it as it was trained, else an export that lives as long as
    ``kept``."""
    from eyas import resolve
    from eyas.dialects import engines, host
    from eyas.export import export
    from eyas.show import show

    to = engines.asked(engine)
    facts = host.read(resolve.target_config(target)) if Path(target).expanduser().exists() else None
    grave = [f for f in show(drafter, [to], target=facts).findings if f.severity != "note"]
    if not grave:
        return drafter.absolute()
    folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="eyas-export-")))
    common.note(f"{grave[0].summary} It is served from a copy that is spelled for {engine}.")
    return export(drafter, to, folder / drafter.name, target=facts).out
