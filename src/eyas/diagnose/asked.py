"""The prompts: as the target's own template renders them, and as the engine does.

Where the two differ the engine is asked what it would be asked by its users: its own rendering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.engines.live import Engine

Chat = Sequence[Mapping[str, str]]


def rendered(
    engine: Engine, chats: Sequence[Chat], ours: Sequence[Sequence[int]]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Prompts in token ids, and how the two renderings compare."""
    prompts: list[list[int]] = []
    equal = told = 0
    first: dict[str, Any] | None = None
    cause: str | None = None
    for number, (chat, mine) in enumerate(zip(chats, ours, strict=True)):
        theirs = engine.rendered(chat)
        if theirs is None:
            prompts.append(list(mine))
            continue
        told += 1
        prompts.append(list(theirs))
        if list(theirs) == list(mine):
            equal += 1
        elif first is None:
            at = next(
                (i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine))
            )
            first = {"request": number, "position": at, "fed": _at(theirs, at), "expected": _at(mine, at)}
            cause = "template-missing" if len(theirs) < len(mine) and _inside(theirs, mine) else "template-differs"
    status = "unknown" if not told else "equal" if equal == told else "differs"
    return prompts, {"status": status, "requests": told, "equal": equal, "first": first, "cause": cause}


def _at(ids: Sequence[int], at: int) -> int | None:
    return int(ids[at]) if at < len(ids) else None


def _inside(short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether one prompt is a stretch of the other: the text without its template."""
    n = len(short)
    return any(list(long[i : i + n]) == list(short) for i in range(len(long) - n + 1))
