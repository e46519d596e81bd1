"""What every live engine gives, and nothing more: start, ready, generate, probe, metrics, stop.

Attached to an engine of somebody else, only what reads is used: no flush, no profile, no weights, no settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Mode = Literal["launched", "attached"]


@dataclass(frozen=True)
class Answer:
    """One request as it was answered, greedily. ``request`` is the id that recordings name it by. ``rounds`` and
    ``accepted`` [K] where the engine tells them request by request."""

    request: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    rounds: int | None = None
    accepted: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Counters:
    """Counters of a metrics page since the engine's start: ``accepted`` [K] by position."""

    rounds: int
    drafted: int
    accepted: tuple[int, ...]
    generated: int | None = None

    def since(self, before: Counters) -> Counters:
        longest = max(len(self.accepted), len(before.accepted))
        new, old = ((*c.accepted, *(0,) * (longest - len(c.accepted))) for c in (self, before))
        made = None
        if self.generated is not None and before.generated is not None:
            made = self.generated - before.generated
        return Counters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            tuple(a - b for a, b in zip(new, old, strict=True)),
            made,
        )


@dataclass
class About:
    """The engine as it presents itself. ``resolved`` are its own words on its settings, ``model`` what a probe read
    off the running drafter; ``unseen`` what could not be looked at, in words."""

    name: str
    mode: Mode
    version: str | None = None
    runner: str | None = None
    url: str | None = None
    command: Sequence[str] = ()
    flags: Sequence[str] = ()
    """As it was started with, for the tables; not written down."""
    resolved: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    @property
    def asked(self) -> str:
        """NAME==VERSION, as the tables are asked."""
        return f"{self.name}=={self.version}" if self.version else self.name

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "runner": self.runner,
            "mode": self.mode,
            "url": self.url,
            "command": list(self.command),
            "resolved": self.resolved,
            "unseen": self.unseen,
        }


class Engine(Protocol):
    """``about`` is filled as it becomes known."""

    about: About

    def ready(self, heard: Callable[[str], None] = ...) -> None:
        """Wait until it answers; EnvironmentFault with its last words if it dies or hangs."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = ...,
        heard: Callable[[int], None] = ...,
    ) -> list[Answer]:
        """Answers in the order of the prompts."""
        ...

    def rendered(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...] | None:
        """A chat as the engine's own template renders it; None where it does not tell."""
        ...

    def probe(self, folder: Path, most_bytes: int) -> AbstractContextManager[Mapping[str, Any]]:
        """Record into ``folder`` (which exists, 0700) while inside; what is given is filled at the end."""
        ...

    def metrics(self) -> Counters | None:
        """None where it has no page, or one without speculation."""
        ...

    def stop(self) -> None: ...
