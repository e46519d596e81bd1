"""What a dialect is asked and what it answers; the same words for every engine.

An engine's dialect turns files, target and launch into a ``Wiring``: the contract that this engine would give effect
to, and what it does on the way with keys, tensors and flags. What differs between that contract and the one the
drafter was trained under is a fault; ``show`` says so, ``export`` writes files for which nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from eyas.contract import Contract
from eyas.errors import CheckpointError, UsageError
from eyas.inventory import TensorInfo

Runner = Literal["v1", "v2"]
Loudness = Literal["silent", "info", "warning", "error"]
Basis = Literal["read", "inferred", "executed"]
"""How a row is known: read in the engine's source, concluded from it, or seen by running that code."""


@dataclass(frozen=True)
class Files:
    """A drafter as its files give it. ``tensors`` by the names in the files; None where only the config is here."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] | None = None


@dataclass(frozen=True)
class TargetFacts:
    """What engines ask of the target. ``config`` is its raw config.json, empty where only its identity is known."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """An engine as it is to be started. ``version`` may carry a rule of a patched build as its local part."""

    version: Version
    runner: Runner | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a row of a table stands: ``sglang 0.5.23 models/llama.py:929``."""

    where: str
    basis: Basis = "read"


@dataclass(frozen=True)
class KeyNote:
    """A key of the drafter's config that this engine does not take at its word. Nested keys are dotted."""

    key: str
    value: Any
    effect: Literal["ignored", "defaulted", "overridden"]
    why: str
    source: Source


@dataclass(frozen=True)
class TensorNote:
    """A tensor, by its name in the files (or the name expected), that this engine does not simply load."""

    tensor: str
    effect: Literal["dropped", "shared", "overwritten", "unfilled"]
    why: str
    loudness: Loudness
    source: Source


@dataclass(frozen=True)
class FlagNote:
    flag: str
    requested: Any
    resolved: Any
    rule: str
    loudness: Loudness
    source: Source


@dataclass(frozen=True)
class Refusal:
    """The engine stops: at start, or at the first forward pass. ``cause`` is a slug of ``causes``."""

    cause: str
    why: str
    when: Literal["start", "first forward"]
    source: Source


@dataclass(frozen=True)
class Wiring:
    """What one engine makes of a drafter. ``taps`` in concatenation order; None where it cannot be told, with a note.

    ``facts`` holds every fact of a contract that this engine decides, each as it would be here. ``warnings`` are
    things worth a line that are no difference of a fact (faked acceptance, another meaning of a metric), each with
    the slug of a cause.
    """

    name: str
    version: str
    runner: Runner | None
    source: Literal["table", "installed"]
    taps: tuple[int, ...] | None
    facts: Contract
    keys: tuple[KeyNote, ...] = ()
    tensors: tuple[TensorNote, ...] = ()
    flags: tuple[FlagNote, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    warnings: tuple[tuple[str, str, Source], ...] = ()
    assumed: str | None = None
    """Said where the version is not one the tables were read from: which one stands in for it."""


@dataclass(frozen=True)
class Inexpressible:
    """A fact of a contract that an engine has no spelling for, and the nearest that it has."""

    fact: str
    wanted: Any
    nearest: Any
    why: str
    source: Source


class CannotExpress(CheckpointError):
    """An engine has no spelling for facts of a contract. ``facts`` names each, never empty."""

    def __init__(self, engine: str, facts: Sequence[Inexpressible], *, way_out: str | None = None) -> None:
        assert facts
        self.engine = engine
        self.facts = tuple(facts)
        lines = [f"{f.fact}: {_shown(f.wanted)} is wanted, {_nearest(f.nearest)} ({f.why})" for f in self.facts]
        super().__init__(
            f"{engine} cannot run this drafter as it was trained. {'; '.join(lines)}.",
            way_out=way_out or "Serve it with an engine that can, or train a drafter without what is named here.",
        )


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


def _nearest(value: Any) -> str:
    return "nothing there is near it" if value is None else f"the nearest there is {_shown(value)}"


def parse_engine(text: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, Version]:
    """``NAME[==VERSION]``; without a version the newest known. ``known``: versions by name, ascending."""
    name, _, version = text.partition("==")
    name = name.strip().lower()
    if name not in known:
        raise UsageError(
            f"{text!r} is no engine known here.",
            way_out=f"Known: {', '.join(f'{n} ({known[n][-1]})' for n in sorted(known))}.",
        )
    try:
        return name, Version(version.strip() or known[name][-1])
    except InvalidVersion as error:
        raise UsageError(
            f"{version!r} is no version of {name}.", way_out=f"Write it as in {name}=={known[name][-1]}."
        ) from error
