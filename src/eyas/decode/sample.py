"""Laws become tokens, by one random number each.

Letters: B rows, V vocabulary, N words of a law.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.answers import Sampling
from eyas.decode import law
from eyas.errors import UsageError


class Chance:
    """All that decoding leaves to chance, as two questions: a test can ask them with every answer."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    def happens(self, probability: float) -> bool:
        return self._draws.random() < probability

    def pick(self, law: Tensor) -> Tensor:
        """A word of a law [V] -> [], int64, where the law lives."""
        at = torch.full((1,), self._draws.random(), dtype=torch.float64, device=law.device)
        return place(law[None], at)[0]


def require_unadjusted(sampling: Sampling) -> None:
    """Raise UsageError for settings that ``choose`` cannot follow."""
    if sampling.adjusts:
        raise UsageError(
            "Many answers at once know neither penalties nor a logit bias.",
            way_out="Leave them out, or ask for one answer at a time (eyas serve).",
        )


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """One token a row of ``logits`` [B, V]; ``draws`` are B numbers in [0, 1), unused when greedy.

    Not for settings that look at what was said before (``require_unadjusted``): here nobody knows it.
    """
    assert not sampling.adjusts, "penalties or bias"
    if sampling.greedy:
        return logits.argmax(-1).tolist()
    assert len(draws) == len(logits), "one number a row"
    at = torch.tensor(draws, dtype=torch.float64, device=logits.device)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for part in law.parts(logits, sampling):
        picked = place(part.shares, at[part.rows])
        tokens[part.rows] = picked if part.words is None else part.words.gather(1, picked[:, None])[:, 0]
    return tokens.tolist()


def place(shares: Tensor, at: Tensor) -> Tensor:
    """Where numbers ``at`` [B] in [0, 1) fall in laws [B, N]: indices [B], never one without a share."""
    mass = shares.cumsum(-1, dtype=torch.float64)
    wanted = at[:, None] * mass[:, -1:]  # less than the whole mass: a double below 1 times a double rounds below it
    return torch.searchsorted(mass, wanted, right=True)[:, 0]
