"""Settings of speculation as sides of a sweep, and which of them to run with.

The fastest side is recommended, never the one with the longest accept length: a deeper draft keeps more tokens a round
and may still cost more than it brings. "No speculation" is one of the settings. How sure that is, resampled prompts
say: in how many draws each side is the fastest. The interval of the chosen ratio is of that side alone; of several
sides the best looks a little better than it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eyas.bench.flags import Spelled, spelled
from eyas.bench.sides import Turn
from eyas.bench.summary import Bench, SideSummary, by_prompt, resampled_speeds, speed
from eyas.errors import UsageError

SURE = 0.95  # share of draws
_NAME = re.compile(r"plain|chain (\d{1,3})|tree (\d{1,3})/(\d{1,3})/(\d{1,4})")


@dataclass(frozen=True)
class Setting:
    """``draft_tokens`` depths a round; a tree has ``top_k`` children a node too and ``nodes`` drafted tokens in all."""

    draft_tokens: int
    top_k: int = 1
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and not self.draft_tokens <= self.nodes:
            raise UsageError(
                f"A tree of {self.nodes} nodes is not {self.draft_tokens} deep.",
                way_out="Give it at least as many nodes as depths.",
            )

    @property
    def name(self) -> str:
        if self.draft_tokens == 0:
            return "plain"
        if self.nodes is None:
            return f"chain {self.draft_tokens}"
        return f"tree {self.draft_tokens}/{self.top_k}/{self.nodes}"

    def to_json(self) -> dict[str, Any]:
        return {"draft_tokens": self.draft_tokens, "top_k": self.top_k, "nodes": self.nodes}


NO_SPECULATION = Setting(0)


def named(name: str) -> Setting | None:
    """The setting a side's name tells: ``plain``, ``chain 4``, ``tree 4/2/8`` (depths, top-k, nodes); else None."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    if found[1]:
        return Setting(int(found[1]))
    return Setting(int(found[2]), int(found[3]), int(found[4])) if found[2] else NO_SPECULATION


@dataclass(frozen=True)
class Recommendation:
    """``side`` and its ``setting``; ``shares``: of the draws, those in which each side is the fastest; None of one
    prompt. ``over``: all prompts, or those without looping answers."""

    side: str
    setting: Setting
    summary: SideSummary
    shares: Mapping[str, float] | None
    over: Literal["all", "without_loops"]
    prompts: int
    flags: Sequence[Spelled]

    @property
    def sure(self) -> bool:
        return self.shares is not None and self.shares[self.side] >= SURE

    def to_json(self) -> dict[str, Any]:
        low, high = self.summary.ratio_interval
        bound_low, bound_high = self.summary.bound_interval
        return {
            "side": self.side,
            "setting": self.setting.to_json(),
            "sure": self.sure,
            "ratio": {"value": self.summary.ratio, "low": low, "high": high},
            "bound": {"value": self.summary.bound, "low": bound_low, "high": bound_high},
            "fastest_share": dict(self.shares) if self.shares is not None else None,
            "over": self.over,
            "prompts": self.prompts,
            "engines": [each.to_json() for each in self.flags],
        }


def recommend(bench: Bench, settings: Mapping[str, Setting], drafter: str = "DRAFTER") -> Recommendation | None:
    """The fastest of the sides named in ``settings``; None unless one of them is without speculation and another with
    it, and there are prompts that all of them answered. ``drafter`` stands where an engine wants its path."""
    known = {name: settings[name] for name in bench.sides if name in settings}
    if len({setting.draft_tokens == 0 for setting in known.values()}) < 2:
        return None
    over, turns = _comparable(bench, list(known))
    if not turns:
        return None
    groups = by_prompt(turns)
    best = max(known, key=lambda side: speed(groups, side))
    summary = Bench(bench.sides, tuple(turns), bench.costs, bench.seed).summary()[best]
    shares = _fastest(groups, list(known), bench.seed) if len(groups) > 1 else None
    return Recommendation(best, known[best], summary, shares, over, len(groups), spelled_for(known[best], drafter))


def spelled_for(setting: Setting, drafter: str) -> list[Spelled]:
    return spelled(setting.draft_tokens, setting.top_k, setting.nodes, drafter)


def _comparable(bench: Bench, sides: Sequence[str]) -> tuple[Literal["all", "without_loops"], list[Turn]]:
    """Turns that every side answered, without looping ones where two prompts are left: loops flatter drafting."""
    clean = [turn for turn in bench.kept(without_loops=True) if all(side in turn.results for side in sides)]
    if len(by_prompt(clean)) >= 2:
        return "without_loops", clean
    return "all", [turn for turn in bench.turns if all(side in turn.results for side in sides)]


def _fastest(groups: Sequence[Sequence[Turn]], sides: Sequence[str], seed: int) -> dict[str, float]:
    winners = resampled_speeds(groups, sides, seed).argmax(axis=0)
    return {side: float(np.mean(winners == i)) for i, side in enumerate(sides)}
