"""What must hold between an engine's numbers, and how every definition turns into the others. Plain functions.

    joint of depth k          rounds whose depths 0..k all hit / rounds        vLLM and llama.cpp print this one
    conditional of depth k    the same / rounds whose depths 0..k-1 all hit
    accept length             1 + accepted / rounds = 1 + sum of joint rates
    accept rate               accepted / drafted = (length - 1) / K of a chain of K drafted tokens
    SGLang's old rate         length / (K + 1): up to 0.5.10 in its log and gauges, never in its request fields

K + 1 is SGLang's ``speculative_num_draft_tokens`` of a chain, which counts the token that is verified anyway. Of a
tree it counts nodes; a rate over nodes is no rate of a chain, and nothing turns one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from eyas.errors import UsageError


def conditional_from_joint(joint: Sequence[float]) -> list[float | None]:
    """[K] -> [K]; None behind a depth that nothing passed."""
    before = [1.0, *joint]
    return [rate / before[k] if before[k] > 0 else None for k, rate in enumerate(joint)]


def joint_from_conditional(conditional: Sequence[float]) -> list[float]:
    """[K] -> [K]."""
    joint, so_far = [], 1.0
    for rate in conditional:
        so_far *= rate
        joint.append(so_far)
    return joint


def length_from_joint(joint: Sequence[float]) -> float:
    return 1 + math.fsum(joint)


def length_from_rate(rate: float, draft_tokens: int, *, top_k: int = 1) -> float:
    """Accept length of a chain of K drafted tokens from accepted / drafted. UsageError for a tree."""
    _chain(top_k)
    return 1 + rate * draft_tokens


def rate_from_length(length: float, draft_tokens: int, *, top_k: int = 1) -> float:
    """The other way. UsageError for a tree."""
    _chain(top_k)
    return (length - 1) / draft_tokens


def length_from_old_rate(rate: float, draft_tokens: int, *, top_k: int = 1) -> float:
    """Accept length from SGLang's old rate; K is ``speculative_num_draft_tokens`` - 1. UsageError for a tree."""
    _chain(top_k)
    return rate * (draft_tokens + 1)


def old_rate_from_length(length: float, draft_tokens: int, *, top_k: int = 1) -> float:
    _chain(top_k)
    return length / (draft_tokens + 1)


def rate_from_old_rate(rate: float, draft_tokens: int, *, top_k: int = 1) -> float:
    return rate_from_length(length_from_old_rate(rate, draft_tokens, top_k=top_k), draft_tokens, top_k=top_k)


def hits_from_histogram(histogram: Sequence[int]) -> list[int]:
    """Rounds by tokens kept [K + 1] -> joint hits by depth [K]."""
    hits, above = [], 0
    for count in reversed(histogram[1:]):
        above += count
        hits.append(above)
    return hits[::-1]


def _chain(top_k: int) -> None:
    if top_k != 1:
        raise UsageError(
            f"An accept rate of a tree (top-k {top_k}) counts the nodes verified in a round, not the tokens of a "
            "chain, so it does not turn into another definition.",
            way_out="Compare accept lengths: accepted / rounds + 1 means the same everywhere.",
        )


# -- printed numbers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """A number as it was printed: the true one is within ``half`` of it."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def fits(self, value: float, slack: float = 0.0) -> bool:
        return abs(value - self.value) <= self.half + slack + 1e-9


@lru_cache(maxsize=4096)
def printed(text: str) -> Printed:
    """``2.93`` is right within 0.005. Decimal commas are taken for points. Kept: a log prints few numbers often."""
    text = text.replace(",", ".")
    return Printed(float(text), 0.5 * 10.0 ** -len(text.partition(".")[2]))


def never_increases(joint: Sequence[float]) -> bool:
    """Rounding keeps order, so printed rates obey it exactly."""
    return all(a >= b for a, b in zip([1.0, *joint], joint, strict=False))


@dataclass
class Denominator:
    """Which whole D makes ``numerator / D = rate`` true of every printed pair so far. Constant memory."""

    low: float = 0.0
    high: float = math.inf

    def add(self, numerator: Printed, rate: Printed) -> None:
        self.low = max(self.low, numerator.low / rate.high)
        if rate.low > 0:
            self.high = min(self.high, numerator.high / rate.low)

    def holds(self, whole: int) -> bool:
        return self.low - 1e-9 <= whole <= self.high + 1e-9

    def wholes(self) -> list[int]:
        """At most two: more is as good as not knowing."""
        if math.isinf(self.high):
            return []
        first = max(1, math.ceil(self.low - 1e-9))
        return list(range(first, min(first + 1, math.floor(self.high + 1e-9)) + 1))
