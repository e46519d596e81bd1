"""What one side says to one prompt, and what is said of a text that repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

NGRAM = 8
LOOPS_ABOVE = 0.30


class Named(Protocol):
    @property
    def id(self) -> str: ...


P = TypeVar("P", bound=Named)


@dataclass(frozen=True)
class Repeats:
    """8-grams of a text, and those of them that occurred earlier in it."""

    repeated: int
    total: int

    @property
    def share(self) -> float | None:
        return self.repeated / self.total if self.total else None

    @property
    def loops(self) -> bool:
        return (self.share or 0.0) > LOOPS_ABOVE

    def to_json(self) -> dict[str, Any]:
        return {"repeated": self.repeated, "total": self.total, "share": self.share}


def repeats(tokens: Sequence[Hashable]) -> Repeats:
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return Repeats(len(grams) - len(set(grams)), len(grams))


@dataclass(frozen=True)
class SideResult:
    """One side's answer to one prompt, its ids empty where the side does not give them.

    ``seconds`` are those of the whole answer, ``first_seconds`` those until its first token was there. ``drafted`` and
    ``accepted`` [K] count rounds by depth. ``count`` is the number of tokens where ids do not tell it.
    """

    token_ids: Sequence[int]
    seconds: float
    rounds: int = 0
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    first_seconds: float | None = None
    text: str | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        assert self.seconds > 0
        assert len(self.drafted) == len(self.accepted), "counts of the same depths"

    @property
    def tokens(self) -> int:
        return len(self.token_ids) if self.count is None else self.count

    @property
    def repeats(self) -> Repeats:
        """Of token ids; of words where only the text is known."""
        return repeats(self.token_ids if self.token_ids or self.text is None else self.text.split())

    def same(self, other: SideResult) -> bool | None:
        """Are both answers the same, by ids where both have them, else by text? None where neither can be compared."""
        if self.token_ids and other.token_ids:
            return list(self.token_ids) == list(other.token_ids)
        if self.text is not None and other.text is not None:
            return self.text.strip() == other.text.strip()
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "first_token_seconds": self.first_seconds,
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "repeated_8grams": self.repeats.to_json(),
            "loops": self.repeats.loops,
        }

    def kept(self) -> dict[str, Any]:
        """All of it, for a journal."""
        return {
            "token_ids": list(self.token_ids),
            "seconds": self.seconds,
            "rounds": self.rounds,
            "drafted": list(self.drafted),
            "accepted": list(self.accepted),
            "first_seconds": self.first_seconds,
            "text": self.text,
            "count": self.count,
        }


@dataclass(frozen=True)
class Fault:
    """A side that did not answer one prompt, and why; ``given_up`` where it is not asked again."""

    side: str
    prompt_id: str
    why: str
    given_up: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"side": self.side, "prompt": self.prompt_id, "why": self.why, "given_up": self.given_up}


@dataclass(frozen=True)
class Turn:
    """One prompt, the ``number``-th of its set, answered by every side in ``order``; ``results`` of those that did."""

    prompt_id: str
    order: tuple[str, ...]
    results: Mapping[str, SideResult]
    number: int = 0
    category: str | None = None

    @property
    def loops(self) -> bool:
        return any(result.repeats.loops for result in self.results.values())

    def equal(self, side: str, baseline: str) -> bool | None:
        return self.results[side].same(self.results[baseline])

    def to_json(self, baseline: str) -> dict[str, Any]:
        known = baseline in self.results
        sides = {
            name: result.to_json() | {"equal": self.equal(name, baseline) if known else None}
            for name, result in self.results.items()
        }
        return {
            "id": self.prompt_id,
            "category": self.category,
            "order": list(self.order),
            "loops": self.loops,
            "sides": sides,
        }


Side = Callable[[P], SideResult]
