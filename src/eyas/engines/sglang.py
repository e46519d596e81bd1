"""SGLang to be launched and asked: its command line, and a plugin that writes what its drafter is fed and drafts.

What its HTTP bodies say is in ``sglang_bodies``. Built from the source of 0.5.23 and never run: an SGLang needs a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.dialects.sglang import flags as dialect
from eyas.engines.sglang_bodies import (
    Answer,
    Attach,
    Identity,
    Taps,
    answer,
    check,
    identify,
    request,
    taps_of,
)
from eyas.errors import UsageError
from eyas.files import explain_os_error

__all__ = ["Answer", "Attach", "Identity", "Launch", "Probing", "Taps", "answer", "capture_command", "check", "command"]
__all__ += ["identify", "launch", "probing", "request", "taps_of"]

INSIDE = Path(__file__).parent / "inside"
PLUGIN = ("sglang_probe.py", "sglang_rounds.py")
NAME = "eyas_sglang_probe"  # SGLANG_PLUGINS, where it is set, lists the plugins that may load
VARIABLE = "EYAS_SGLANG_PROBE"
LOOPBACK = "127.0.0.1"
LIMIT = 2**31  # bytes of rounds, unless told otherwise

_HOST, _PORT, _TARGET = "--host", "--port", "--model-path"
_ALIASES = {"--model": _TARGET}
# The probe sees no pass that a CUDA graph replays; a cached prefix is not fed again; overlap runs two rounds at once.
_PROBED = ("--disable-radix-cache", "--disable-overlap-schedule", "--disable-cuda-graph")
_METRICS = "--enable-metrics"


@dataclass(frozen=True)
class Launch:
    """``told``: where the user's flags go against what was asked for; they win. ``environment`` is what stood before
    the flags."""

    command: list[str]
    environment: Mapping[str, str]
    url: str
    told: tuple[str, ...]


def command(
    python: Path, target: str, drafter: str | None, *, port: int, draft_tokens: int, flags: Sequence[str] = ()
) -> list[str]:
    """The words of ``launch``."""
    return launch(python, target, drafter, port=port, draft_tokens=draft_tokens, flags=flags).command


def launch(
    python: Path, target: str, drafter: str | None, *, port: int, draft_tokens: int, flags: Sequence[str] = ()
) -> Launch:
    """A server on this machine alone that drafts a chain of ``draft_tokens``; without a drafter, one that does not.

    Raises UsageError for flags that are none.
    """
    if drafter is not None and draft_tokens < 1:
        raise UsageError(f"{draft_tokens} draft tokens were asked for.", way_out="Ask for one or more.")
    speculation: dict[str, str | None] = {}
    if drafter is not None:
        steps = str(dialect.parse(flags).values.get(dialect.STEPS, draft_tokens))
        speculation = {
            dialect.ALGORITHM: "EAGLE3",
            dialect.DRAFT: drafter,
            dialect.STEPS: steps,
            dialect.TOPK: "1",
            dialect.TOKENS: str(int(steps) + 1),
        }
    return _launch(python, target, speculation, port, flags, draft_tokens if drafter is not None else None)


def capture_command(
    python: Path, target: str, *, port: int, layer_ids: Sequence[int] | None = None, flags: Sequence[str] = ()
) -> list[str]:
    """A server without a drafter that hands over taps, by the very setter that serving a drafter runs.

    ``layer_ids`` are in the spelling of the target's class (``eyas.dialects.sglang.spell``); none: its own choice.
    0.5.23 resets the algorithm, which only names the convention, and turns the return of all states on
    (arg_groups/validation_hook.py:697). It takes no drafter, no pipeline stages, and no id twice or below zero.
    """
    ids = list(layer_ids or ())
    if layer_ids is not None and (not ids or min(ids) < 0 or len(set(ids)) != len(ids)):
        raise UsageError(
            f"SGLang cannot be asked for layers {ids}: ids must be there, none below zero and none twice.",
            way_out="Spell the taps for the target's class, or leave the ids out.",
        )
    asked = dialect.parse(flags)
    if dialect.DRAFT in asked.values or asked.values.get("--pp-size", 1) != 1:
        raise UsageError(
            f"SGLang hands taps over without {dialect.DRAFT} and on one pipeline stage only.",
            way_out="Leave those flags out.",
        )
    ours: dict[str, str | None] = {dialect.ALGORITHM: "EAGLE3", "--enable-return-aux-hidden-states": None}
    made = _launch(python, target, ours, port, flags, None).command
    return [*made, "--return-aux-hidden-state-layer-ids", *map(str, ids)] if ids else made


def _launch(
    python: Path, target: str, more: Mapping[str, str | None], port: int, flags: Sequence[str], depth: int | None
) -> Launch:
    given = dialect.parse(flags)
    theirs = {_ALIASES.get(name, name): value for name, value in {**given.unknown, **given.values}.items()}
    ours = {_TARGET: target, _HOST: LOOPBACK, _PORT: str(port), _METRICS: None, **dict.fromkeys(_PROBED), **more}
    words = [str(python), "-m", "sglang.launch_server"]
    for name, value in ours.items():
        if name not in theirs:
            words += [name] if value is None else [name, value]
    words += [word for word in flags if word not in _before(given.environment)]
    host, at = str(theirs.get(_HOST, LOOPBACK)), theirs.get(_PORT, port)
    host = LOOPBACK if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    told = tuple(_told(theirs, ours, given.environment, depth))
    return Launch(words, given.environment, f"http://{host}:{at}", told)


def _before(environment: Mapping[str, str]) -> set[str]:
    return {f"{name}={value}" for name, value in environment.items()}


def _told(
    theirs: Mapping[str, object], ours: Mapping[str, str | None], environment: Mapping[str, str], depth: int | None
) -> Iterator[str]:
    """Each contradiction, a sentence."""
    for name in (_TARGET, dialect.DRAFT, dialect.ALGORITHM, _PORT):
        if name in theirs and name in ours and str(theirs[name]) != ours[name]:
            yield f"{name} {theirs[name]} among the flags takes the place of {ours[name]}."
    if depth is not None:
        yield from _told_of_depth(theirs, depth)
    if str(theirs.get(_HOST, LOOPBACK)) not in (LOOPBACK, "localhost"):
        yield f"{_HOST} {theirs[_HOST]} among the flags opens the engine to other machines."
    if graphs := sorted(name for name in theirs if str(name).startswith("--cuda-graph-")):
        yield f"{', '.join(graphs)} among the flags may turn CUDA graphs on, inside which nothing is recorded."
    if float(_number(environment.get("SGLANG_SIMULATE_ACC_LEN", "0"))) > 0:
        yield "SGLANG_SIMULATE_ACC_LEN is set: what is kept of a draft is made up."


def _told_of_depth(theirs: Mapping[str, object], depth: int) -> Iterator[str]:
    steps = theirs.get(dialect.STEPS, depth)
    if steps != depth:
        yield f"{dialect.STEPS} {steps} among the flags takes the place of the {depth} draft tokens asked for."
    if theirs.get(dialect.TOPK, 1) != 1:
        yield f"{dialect.TOPK} {theirs[dialect.TOPK]} drafts a tree, of which nothing is recorded."
    elif theirs.get(dialect.TOKENS, int(str(steps)) + 1) != int(str(steps)) + 1:
        yield f"{dialect.TOKENS} {theirs[dialect.TOKENS]} will be {int(str(steps)) + 1}: a chain of {steps} and one."


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


# -- the plugin ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probing:
    """``environment`` for the engine's process; ``passes`` is where its rounds come to lie while it runs."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def passes(self) -> Path:
        return self.folder / "passes"

    @property
    def loaded(self) -> bool:
        """Whether SGLang took the plugin up at all."""
        return (self.passes / "loaded.json").is_file()

    def stopped(self) -> str | None:
        """Why no more is recorded, where that is so."""
        return self._said("stopped.json").get("why")

    def left_out(self) -> dict[str, int]:
        """What was seen and not recorded, counted up to powers of two."""
        return {str(what): int(count) for what, count in self._said("left-out.json").items()}

    def _said(self, name: str) -> dict[str, str]:
        path = self.passes / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found if isinstance(found, dict) else {}


@contextmanager
def probing(limit_bytes: int = LIMIT, environment: Mapping[str, str] | None = None) -> Iterator[Probing]:
    """A plugin laid out for an SGLang that is started inside, and a folder for what it writes; both go afterwards.

    SGLang finds plugins by the metadata of what is installed; a folder on PYTHONPATH with a ``.dist-info`` counts as
    that, so nothing is installed into the user's environment. ``environment``: the engine's, else ours.
    """
    around = os.environ if environment is None else environment
    folder = Path(tempfile.mkdtemp(prefix="eyas-sglang-"))  # 0700
    try:
        try:
            _lay_out(folder, limit_bytes)
        except OSError as error:
            raise explain_os_error(error, folder) from error
        more = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "plugin"), around.get("PYTHONPATH")])),
            VARIABLE: str(folder / "settings.json"),
        }
        if around.get("SGLANG_PLUGINS"):
            more["SGLANG_PLUGINS"] = f"{around['SGLANG_PLUGINS']},{NAME}"
        yield Probing(folder, more)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out(folder: Path, limit_bytes: int) -> None:
    plugin = folder / "plugin"
    about = plugin / f"{NAME}-0.dist-info"
    about.mkdir(parents=True)
    (folder / "passes").mkdir(mode=0o700)
    for name in PLUGIN:
        shutil.copyfile(INSIDE / name, plugin / name)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = sglang_probe:install\n", encoding="utf-8")
    settings = {"folder": str(folder / "passes"), "limit_bytes": limit_bytes}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
