"""Which tap each slot of fc was trained on: every stored tap tried in every slot, the others held.

One slot at a time, by how likely depth 0 makes the truth: where all slots are wrong, the right tap in one of them
seldom scores a hit but does make the truth likelier. The best single change is kept and the search goes round again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyas.states.stock import Stock
from eyas.variants.parts import Facts
from eyas.variants.pool import Pool
from eyas.variants.scores import Scores, less_likely

ROUNDS = 8
SLOTS = 256
ENOUGH = 0.002  # nats a slot; less is no step
AGAIN = 5  # taps a slot that later rounds try: the likeliest of the first, and those beside where it stands


@dataclass(eq=False)
class Search:
    """``log_probability`` and ``kept`` of the first round: a row a slot of fc, a column a tap. ``best`` after all
    rounds."""

    taps: tuple[Any, ...]
    configured: tuple[Any, ...]
    best: tuple[Any, ...]
    log_probability: list[list[float | None]] = field(default_factory=list)
    kept: list[list[int | None]] = field(default_factory=list)
    slots: int = 0
    settled: bool = False
    """Whether the rounds ended because no single change helped any more."""


def search(
    pool: Pool, scores: Scores, stock: Stock, base: Facts, progress: Callable[[str], None] = lambda what: None
) -> Search | None:
    """None where there is nothing to choose from."""
    at = tuple(base["taps"])
    if len(stock.taps) <= 1:
        return None
    here = scores.of(pool, base, 1)
    if here is None:
        return None
    found = Search(stock.taps, at, at, slots=len(here.kept))
    reached = here.log_p
    last_moved, best_score = -1, here
    for number in range(ROUNDS):
        best: tuple[float, int, tuple[Any, ...]] | None = None
        for slot in range(len(at)):
            if number and slot == last_moved:
                continue  # it was just chosen with the others as they are
            logs: list[float | None] = []
            kept: list[int | None] = []
            tries = stock.taps if number == 0 else _again(found, slot, at[slot])
            for tap in tries:
                progress(f"taps, round {number + 1}: {tap} in slot {slot}")
                tried = (*at[:slot], tap, *at[slot + 1 :])
                both = scores.until(pool, {**base, "taps": tried}, {**base, "taps": at}, less_likely, 1)
                # A tap that has lost early was compared on fewer slots: what counts is how far it is from ``at`` there.
                log_p = here.log_p + both[0].log_p - both[1].log_p if both else None
                logs.append(log_p)
                kept.append(int(here.kept.sum() + both[0].kept.sum() - both[1].kept.sum()) if both else None)
                if log_p is not None and both and (best is None or log_p > best[0]):
                    best, best_score = (log_p, slot, tried), both[0]
            if number == 0:
                found.log_probability.append(logs)
                found.kept.append(kept)
        if best is None or best[0] < reached + ENOUGH:
            found.settled = True
            break
        reached, last_moved, at = best
        here = best_score
    if len(set(at)) == len(at):  # a tap twice may lie on the way, but no engine can feed it
        found.best = at
    return found


def _again(found: Search, slot: int, now: Any) -> list[Any]:
    """Where the right tap of a slot may still be, once another slot is right."""
    ranked = sorted(
        zip(found.log_probability[slot], found.taps, strict=True),
        key=lambda pair: -float("inf") if pair[0] is None else -pair[0],
    )
    likeliest = [tap for _, tap in ranked[:AGAIN]]
    at = found.taps.index(now) if now in found.taps else 0
    beside = [found.taps[i] for i in range(max(at - 2, 0), min(at + 3, len(found.taps)))]
    return list(dict.fromkeys((*likeliest, *beside)))
