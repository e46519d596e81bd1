"""What an engine is expected to reach: the walk that ``curves.json`` beside a drafter holds, or a plain number."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError, UsageError

FILE = "curves.json"
MOST_BYTES = 16 << 20
DEEPEST = 64


@dataclass(frozen=True)
class Length:
    """95 % interval; without one for a number that was given."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Expected:
    """Lengths by drafted tokens, from 1; or one length for any, where the user said so (``asked``)."""

    source: str
    lengths: tuple[Length | None, ...] = ()
    joint: tuple[float, ...] = ()
    asked: float | None = None

    def at(self, draft_tokens: int | None) -> Length | str:
        """The length at this many drafted tokens, or why there is none."""
        if self.asked is not None:
            return Length(self.asked, self.asked, self.asked)
        if draft_tokens is None:
            return "the page does not tell how many tokens a chain drafts, and lengths at different K do not compare"
        if draft_tokens > len(self.lengths):
            return f"{draft_tokens} tokens are drafted, {self.source} has the walk up to {len(self.lengths)}"
        found = self.lengths[draft_tokens - 1]
        return found if found is not None else f"{self.source} has no interval at {draft_tokens} drafted tokens"

    def joint_at(self, draft_tokens: int | None) -> list[float] | None:
        """The walk's joint rates, which were measured with all its depths drafted; None at another K."""
        return list(self.joint) if self.joint and draft_tokens == len(self.joint) else None


def asked(length: float) -> Expected:
    if not math.isfinite(length) or not 1 <= length <= DEEPEST + 1:
        raise UsageError(
            f"--expect {length} is no accept length.", way_out="Accept length is accepted + 1: at least 1, e.g. 2.4."
        )
    return Expected("--expect", asked=length)


def of_drafter(folder: Path) -> Expected:
    """CheckpointError where the folder has no readable ``curves.json`` with a walk."""
    path = folder / FILE
    try:
        with open(path, "rb") as handle:
            raw = handle.read(MOST_BYTES + 1)
        told = json.loads(raw) if len(raw) <= MOST_BYTES else None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {FILE}.",
            way_out="`eyas train` writes one; or pass --expect with the accept length of `eyas check`.",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", way_out="Pass --expect instead.") from error
    lengths = _lengths(told)
    if not any(lengths):
        raise CheckpointError(f"{path} has no walk with intervals.", way_out="Pass --expect instead.")
    return Expected(f"{FILE} of {folder.resolve().name}", lengths, _joint(told))


def _lengths(told: Any) -> tuple[Length | None, ...]:
    rows = told.get("accept_length") if isinstance(told, dict) else None
    found: dict[int, Length] = {}
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict) or type(row.get("draft_tokens")) is not int:
            continue
        values = [_number(row.get(name)) for name in ("value", "low", "high")]
        value, low, high = values
        if value is None or low is None or high is None or not 1 <= low <= value <= high:
            continue
        if 1 <= row["draft_tokens"] <= DEEPEST:
            found[row["draft_tokens"]] = Length(value, low, high)
    return tuple(found.get(k) for k in range(1, max(found, default=0) + 1))


def _joint(told: Any) -> tuple[float, ...]:
    try:
        rates = [_number(depth["joint"]["rate"]) for depth in told["walk"]["depths"][:DEEPEST]]
    except (KeyError, TypeError):
        return ()
    known = [rate for rate in rates if rate is not None]
    return tuple(known) if len(known) == len(rates) else ()


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
