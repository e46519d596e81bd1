"""What is kept of the intervals: sums, of which windows and bins are made. Nothing here grows with time.

An interval is what happened between two readings. vLLM's has counts: rounds r, accepted tokens a. SGLang's has a mean
length and, where verify calls are counted, about how many rounds there were; it weighs 1 whatever they are, for the
gauge covers only the last log interval of them. Beside the sums stand those of squares, from which follows how much
intervals differ: text comes in stretches, so rounds of one interval are more alike than rounds of two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

BINS = 64
RECENT = 120  # intervals that are shown


@dataclass(frozen=True)
class Interval:
    """``at`` and ``seconds``: when it ended, how long it was. ``means``: no counts, and ``length`` if there was one."""

    at: float
    seconds: float
    rounds: int | None
    drafted: int = 0
    accepted: int = 0
    hits: tuple[int, ...] = ()
    means: bool = False
    length: float | None = None
    running: float | None = None

    @property
    def weight(self) -> float:
        if self.means:
            return 0.0 if self.length is None else 1.0
        return self.rounds or 0

    @property
    def kept(self) -> float:
        """Tokens kept of this weight."""
        return self.accepted if self.length is None else self.length - 1

    @property
    def value(self) -> float | None:
        return 1 + self.kept / self.weight if self.weight else None

    def to_json(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 3),
            "seconds": round(self.seconds, 3),
            "rounds": self.rounds,
            "accept_length": self.value,
            "running": self.running,
        }


@dataclass
class Sums:
    """Where every interval has counts (``counted``), ``weight`` is rounds and ``kept`` accepted tokens."""

    intervals: int = 0
    rounds: int = 0
    unknown: int = 0  # intervals that do not tell their rounds
    means: int = 0  # intervals that have a mean length and no counts
    drafted: int = 0
    accepted: int = 0
    hits: list[int] = field(default_factory=list)
    weight: float = 0.0
    kept: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # weight^2, weight x kept, kept^2

    def add(self, one: Interval, sign: int = 1) -> None:
        """Take an interval in, or with ``sign`` -1 out again."""
        weight, kept = one.weight, one.kept
        squares = (weight * weight, weight * kept, kept * kept)
        self._plus(one.rounds or 0, one.drafted, one.accepted, one.hits, weight, kept, squares, sign)
        self.intervals += sign
        self.unknown += sign * (one.rounds is None)
        self.means += sign * one.means

    def merge(self, other: Sums) -> None:
        self._plus(
            other.rounds, other.drafted, other.accepted, tuple(other.hits), other.weight, other.kept, other.squares, 1
        )
        self.intervals += other.intervals
        self.unknown += other.unknown
        self.means += other.means

    def _plus(
        self,
        rounds: int,
        drafted: int,
        accepted: int,
        hits: tuple[int, ...],
        weight: float,
        kept: float,
        squares: tuple[float, float, float],
        sign: int,
    ) -> None:
        self.rounds += sign * rounds
        self.drafted += sign * drafted
        self.accepted += sign * accepted
        self.hits = [a + sign * b for a, b in zip_longest(self.hits, hits, fillvalue=0)]
        self.weight += sign * weight
        self.kept += sign * kept
        ww, wk, kk = (a + sign * b for a, b in zip(self.squares, squares, strict=True))
        self.squares = ww, wk, kk

    @property
    def counted(self) -> bool:
        return not self.means

    @property
    def known_rounds(self) -> int | None:
        return None if self.unknown else self.rounds

    @property
    def length(self) -> float | None:
        return 1 + self.kept / self.weight if self.weight > 0 else None

    @property
    def joint(self) -> list[float]:
        return [hit / self.rounds for hit in self.hits] if self.rounds and self.counted else []

    def error(self) -> float | None:
        """Standard error of the length with intervals as the units (a ratio, linearised); None for fewer than two."""
        if self.intervals < 2 or self.weight <= 0:
            return None
        ratio = self.kept / self.weight
        ww, wk, kk = self.squares
        spread = max(0.0, kk - 2 * ratio * wk + ratio * ratio * ww)
        return math.sqrt(spread * self.intervals / (self.intervals - 1)) / self.weight

    def to_json(self) -> dict[str, Any]:
        return {
            "intervals": self.intervals,
            "rounds": self.known_rounds,
            "drafted": self.drafted if self.counted else None,
            "accepted": self.accepted if self.counted else None,
            "hits": self.hits if self.counted else None,
            "accept_length": self.length,
            "joint": self.joint or None,
        }


class Newest:
    """The last ``size`` intervals that had rounds, and their sums."""

    def __init__(self, size: int) -> None:
        self._kept: deque[Interval] = deque(maxlen=size)
        self.sums = Sums()

    def add(self, one: Interval) -> None:
        if len(self._kept) == self._kept.maxlen:
            self.sums.add(self._kept[0], -1)
        self._kept.append(one)
        self.sums.add(one)

    @property
    def full(self) -> bool:
        return len(self._kept) == self._kept.maxlen

    def __iter__(self) -> Iterator[Interval]:
        return iter(self._kept)


class Trend:
    """Sums by uptime in at most BINS bins; when they are full, two and two become one."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.bins: list[Sums] = []

    def add(self, uptime: float, one: Interval) -> None:
        while uptime >= BINS * self.width:
            self._halve()
        place = int(uptime / self.width)
        while len(self.bins) <= place:
            self.bins.append(Sums())
        self.bins[place].add(one)

    def _halve(self) -> None:
        pairs = [self.bins[i : i + 2] for i in range(0, len(self.bins), 2)]
        for pair in pairs:
            if len(pair) == 2:
                pair[0].merge(pair[1])
        self.bins = [pair[0] for pair in pairs]
        self.width *= 2

    def lengths(self) -> list[float | None]:
        return [one.length for one in self.bins]

    def per_hour(self) -> float | None:
        """Slope of the length over uptime, every bin weighted by what it holds; None for fewer than three bins."""
        points = [(i, one.weight, one.length) for i, one in enumerate(self.bins) if one.length is not None]
        if len(points) < 3:
            return None
        whole = sum(w for _, w, _ in points)
        middle = sum(w * i for i, w, _ in points) / whole
        mean = sum(w * value for _, w, value in points) / whole
        across = sum(w * (i - middle) * (value - mean) for i, w, value in points)
        return across / sum(w * (i - middle) ** 2 for i, w, _ in points) / self.width * 3600

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "from_seconds": round(i * self.width, 3),
                "to_seconds": round((i + 1) * self.width, 3),
                "intervals": one.intervals,
                "rounds": one.known_rounds,
                "accept_length": one.length,
            }
            for i, one in enumerate(self.bins)
            if one.intervals
        ]


def copied(sums: Sums) -> Sums:
    return replace(sums, hits=list(sums.hits))
