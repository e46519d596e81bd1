"""What an engine says of its own speculation: counts where it gives counts, else means with what their rounding hides.

An engine's text knows no records, so intervals are Wilson's (labelled so), widened where only printed rates are known.
What the text does not give is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.results.counts import Interval, wilson

Kind = Literal["log lines", "metrics page", "request fields", "server info"]
IntervalKind = Literal["wilson", "independent rounds", "rounding", "at least"]
"""How low and high came about. ``rounding``: the printed digits allow no more; it says nothing about sampling.
``at least``: the text bounds the value from below only."""


@dataclass(frozen=True)
class ObservedRate:
    """``hits`` of ``n``; hits is None where only a rounded rate was printed, n too where not even that is known."""

    hits: int | None
    n: int | None
    rate: float | None
    low: float | None
    high: float | None
    interval: IntervalKind | None

    @classmethod
    def counted(cls, hits: int, n: int) -> ObservedRate:
        """``hits <= n``. A Wilson interval."""
        return cls(hits, n, hits / n if n else None, *wilson(hits, n), interval="wilson" if n else None)

    @classmethod
    def printed(cls, rate: float, slack: float, n: int | None = None) -> ObservedRate:
        """A rate of which only digits are known, each end off by ``slack`` at most; Wilson on top where n is known."""
        if n is None:
            return cls(None, None, rate, max(0.0, rate - slack), min(1.0, rate + slack), "rounding")
        low, high = wilson(min(n, round(rate * n)), n)
        assert low is not None
        assert high is not None
        return cls(None, n, rate, max(0.0, low - slack), min(1.0, high + slack), "wilson")

    def to_json(self) -> dict[str, Any]:
        return {
            "hits": self.hits,
            "n": self.n,
            "rate": self.rate,
            "low": self.low,
            "high": self.high,
            "interval": self.interval,
        }


@dataclass(frozen=True)
class ObservedDepth:
    joint: ObservedRate
    conditional: ObservedRate


@dataclass(frozen=True)
class ObservedLength:
    """Accept length, the bonus token in it. ``method`` says what it was computed from."""

    value: float
    low: float | None
    high: float | None
    interval: IntervalKind | None
    method: str

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "interval": self.interval,
            "method": self.method,
        }


@dataclass(frozen=True)
class Counts:
    """One run of one engine, as far as a text tells. ``accepted`` is without bonus tokens.

    ``draft_tokens`` is K, the tokens drafted one after the other in a round; ``per_round`` what the engine divides its
    accept rate by in a round (K of a chain, nodes less one of a tree, K + 1 of SGLang's old rate); ``rate_definition``
    names that rate. ``derived`` says in words which numbers follow from others instead of being printed.
    ``faked`` quotes the setting that makes acceptance a fiction. ``where`` is the text and the line it begins at.
    """

    engine: str
    kind: Kind
    where: str
    version: str | None = None
    drafter: str | None = None
    draft_tokens: int | None = None
    top_k: int | None = None
    per_round: int | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    emitted: int | None = None
    depths: tuple[ObservedDepth, ...] | None = None
    accept_length: ObservedLength | None = None
    accept_rate: ObservedRate | None = None
    rate_definition: str | None = None
    lines: int = 0
    derived: tuple[str, ...] = ()
    faked: str | None = None

    def to_json(self) -> dict[str, Any]:
        depths = None
        if self.depths is not None:
            depths = [
                {"depth": k, "joint": d.joint.to_json(), "conditional": d.conditional.to_json()}
                for k, d in enumerate(self.depths)
            ]
        return {
            "engine": self.engine,
            "version": self.version,
            "kind": self.kind,
            "where": self.where,
            "drafter": self.drafter,
            "draft_tokens": self.draft_tokens,
            "top_k": self.top_k,
            "per_round": self.per_round,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "depths": depths,
            "accept_length": self.accept_length.to_json() if self.accept_length else None,
            "accept_rate": self.accept_rate.to_json() if self.accept_rate else None,
            "rate_definition": self.rate_definition,
            "lines": self.lines,
            "derived": list(self.derived),
            "faked": self.faked,
        }


def depths_of_hits(hits: Sequence[int], rounds: int) -> tuple[ObservedDepth, ...]:
    """The curve of exact joint hits [K] in ``rounds`` rounds; hits must not increase."""
    assert all(a >= b for a, b in zip([rounds, *hits], hits, strict=False)), "joint hits never increase"
    reached = [rounds, *hits]
    return tuple(
        ObservedDepth(ObservedRate.counted(hit, rounds), ObservedRate.counted(hit, reached[k]))
        for k, hit in enumerate(hits)
    )


def depths_of_rates(joint: Sequence[float], slack: Sequence[float], rounds: int | None) -> tuple[ObservedDepth, ...]:
    """The same of printed joint rates [K], each right within its ``slack`` [K]."""
    depths = []
    before, before_slack = 1.0, 0.0
    for rate, off in zip(joint, slack, strict=True):
        if before > 0:
            low = max(0.0, rate - off) / (before + before_slack)
            high = min(1.0, (rate + off) / max(before - before_slack, rate, 1e-12))
            conditional = ObservedRate(None, None, min(1.0, rate / before), low, max(low, high), "rounding")
        else:
            conditional = ObservedRate(None, None, None, None, None, None)
        depths.append(ObservedDepth(ObservedRate.printed(rate, off, rounds), conditional))
        before, before_slack = rate, off
    return tuple(depths)


def length_of_counts(accepted: int, rounds: int, hits: Sequence[int] | None = None) -> ObservedLength | None:
    """1 + accepted / rounds; with joint hits an interval that takes rounds as independent (so too narrow)."""
    if rounds <= 0:
        return None
    value = 1 + accepted / rounds
    low, high = _independent(hits, rounds) if hits is not None else (None, None)
    kind: IntervalKind | None = "independent rounds" if low is not None else None
    return ObservedLength(value, low, high, kind, "1 + accepted / rounds")


def _independent(hits: Sequence[int], rounds: int) -> Interval:
    """95 % of the mean length: tokens kept in a round have second moment sum over k of (2k + 1) P(depths 0..k hit)."""
    mean = sum(hits) / rounds
    second = sum((2 * k + 1) * hit for k, hit in enumerate(hits)) / rounds
    half = 1.959963984540054 * math.sqrt(max(0.0, second - mean * mean) / rounds)
    return max(1.0, 1 + mean - half), min(1.0 + len(hits), 1 + mean + half)
