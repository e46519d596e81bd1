"""How much to draft, chosen round by round from what passes cost and from what was accepted lately.

A round of size s verifies ``rows`` and drafts ``depth`` levels; it costs v(rows) + its drafting, makes 1 + accepted
tokens, and a plain round costs 1 and makes 1. Costs are in plain passes. Best is the size with most tokens a pass:

    tokens(s) / cost(s)       tokens = 1 + r0 + r0 r1 + …        r_k: rounds that keep depth k / rounds that kept 0..k-1

The rates are of the last rounds that tried a depth, begin at a prior and lean on the depth above where little was
tried. Costs begin as measured beforehand and follow the seconds of the rounds played (``Pace``).

What looks worse is tried again now and then, so that a change is noticed: a size is due when 2 % of the time since
it was last played, divided among the sizes, pays for what it is expected to lose, hoping for the better where little
was tried. And nothing is played that could break the promise, whatever is accepted, in any stretch of rounds:

    passes  <=  1.02 tokens + 8                      (plain decoding: passes = tokens)

by the costs believed. Nothing here is random and no clock is read: the same rounds give the same choices.

Letters: A choices, the first of them plain.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.decode.cost import PassCost
from eyas.decode.tree import TreeSize
from eyas.errors import UsageError

Floats = npt.NDArray[np.float64]

TRYING = 0.02  # share of the time that may go into what looks worse, and by which decoding may be slower than plain
ALLOWANCE = 8.0  # plain passes that drafting may lose on top
PRIOR_RATE = 0.5
PRIOR_ROUNDS = 4.0  # what the prior, or the depth above, weighs
MEMORY = 48.0  # tries of a depth after which one counts a third


@dataclass(frozen=True)
class Costs:
    """What passes cost, all in one unit: ``verify`` by rows of a target pass, which must hold 1; ``draft`` one depth,
    by rows of the drafter's pass. Between what was measured lies a straight line, beyond it the last one goes on.

    Raises UsageError where a cost is missing or no cost.
    """

    verify: Mapping[int, float]
    draft: Mapping[int, float]

    def __post_init__(self) -> None:
        known = [*self.verify.values(), *self.draft.values()]
        if 1 not in self.verify or not self.draft or not all(math.isfinite(c) and c >= 0 for c in known):
            raise UsageError(
                f"Costs of target passes {dict(self.verify)} and drafter passes {dict(self.draft)} are not all there, "
                "or not all numbers from 0 up.",
                way_out="Measure a target pass over 1 row and over more, and a drafter pass over 1.",
            )
        if min(self.verify.values()) <= 0:
            raise UsageError(
                f"Costs of target passes {dict(self.verify)} hold one that takes no time.",
                way_out="Measure again with a clock that sees one pass.",
            )

    @classmethod
    def measured(cls, passes: PassCost) -> Costs:
        """Of a chain, as ``measure_cost`` found them."""
        return cls({1: passes.plain} | {k + 1: cost for k, cost in passes.verify.items()}, {1: passes.draft})

    def of(self, size: TreeSize) -> float:
        """A round of this size, in plain passes."""
        depths = min(size.depth, size.nodes)
        return self.verifying(size.rows) + self.drafting() + (depths - 1) * self.drafting(size.top_k)

    def verifying(self, rows: int) -> float:
        """A target pass over so many rows, in plain passes."""
        return _line(self.verify, rows) / self.verify[1]

    def drafting(self, rows: int = 1) -> float:
        """A drafter's pass over so many rows, in plain passes."""
        return _line(self.draft, rows) / self.verify[1]


def _line(known: Mapping[int, float], at: int) -> float:
    """The value at ``at``, on the line through the two known ones around it or nearest to it, if there are two."""
    if len(known) == 1:
        return next(iter(known.values()))
    rows = sorted(known)
    above = min(max(bisect_left(rows, at), 1), len(rows) - 1)
    low, high = rows[above - 1], rows[above]
    return max(known[low] + (known[high] - known[low]) * (at - low) / (high - low), 0.0)


class Acceptance:
    """Fading counts of rounds that kept every depth before k, and of those that kept k too."""

    def __init__(self, depths: int) -> None:
        self.tries, self.hits = [0.0] * depths, [0.0] * depths

    def saw(self, drafted: int, accepted: int) -> None:
        """A round that drafted so many levels and kept so many. A depth fades only as it is tried."""
        assert 0 <= accepted <= drafted, f"{accepted} accepted of {drafted}"
        for k in range(min(drafted, accepted + 1)):
            self.tries[k] += 1 - self.tries[k] / MEMORY
            self.hits[k] += (k < accepted) - self.hits[k] / MEMORY

    def tokens(self, *, hope: bool = False) -> list[float]:
        """Expected tokens of a round by levels drafted, 0 to all.

        With ``hope`` a rate is a standard deviation better than it seems, less that of one tried as often as can count.
        """
        rate, kept, tokens = PRIOR_RATE, 1.0, [1.0]
        for tries, hits in zip(self.tries, self.hits, strict=True):
            rate = (hits + PRIOR_ROUNDS * rate) / (tries + PRIOR_ROUNDS)
            unsure = 0.5 / math.sqrt(tries + PRIOR_ROUNDS) - 0.5 / math.sqrt(MEMORY + PRIOR_ROUNDS)
            kept *= min(rate + unsure, 1.0) if hope else rate
            tokens.append(tokens[-1] + kept)
        return tokens


class Pace:
    """Costs of the choices in plain passes, from costs measured before and from seconds seen.

    log seconds = log(seconds of a plain pass, which drift) + log(cost of the choice) + noise: a Kalman filter over
    these logarithms, so that a machine that slows down is told from a choice that costs more than was thought. Entry
    0 is the plain pass's seconds, the others are by how much each cost was mistaken, alike as they may be but for those
    that stand ``alone``. None is believed to be less than ``least``: a round that verifies is a plain pass and more.
    """

    NOISE, DRIFT, MISTAKEN, ALIKE, HEED = 0.1, 0.02, 0.3, 0.5, 1.5

    def __init__(
        self, costs: Floats, *, least: Floats | float = 1.0, alone: Sequence[int] = (), noise: float = NOISE
    ) -> None:
        A = len(costs)
        self._before, self._least, self._noise = costs, least, noise
        self._mean = np.zeros(A)
        self._covariance = self.MISTAKEN**2 * (self.ALIKE + (1 - self.ALIKE) * np.eye(A))
        for entry in (0, *alone):
            self._covariance[entry], self._covariance[:, entry] = 0, 0
            self._covariance[entry, entry] = self.MISTAKEN**2
        self._covariance[0, 0] = 1e4  # nothing is known of the unit
        self._drift = np.diag([self.DRIFT**2, *[(self.DRIFT / 4) ** 2] * (A - 1)])
        self._warm = [False] * A

    @property
    def costs(self) -> Floats:
        """[A], in plain passes; the first is 1."""
        costs = np.maximum(self._before * np.exp(self._mean), self._least)
        costs[0] = 1.0
        return costs

    def saw(self, choice: int, seconds: float) -> None:
        """The first round of a choice also pays for making its kernels and is left out; so is what is no time."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if not self._warm[choice]:
            self._warm[choice] = True
            return
        self._covariance += self._drift
        looked = np.zeros(len(self._mean))
        looked[0] = looked[choice] = 1.0
        spread = self._covariance @ looked
        variance = float(spread @ looked) + self._noise**2
        surprise = math.log(seconds / self._before[choice]) - float(self._mean @ looked)
        most = self.HEED * math.sqrt(variance)  # a hiccup of the machine says little
        self._mean += spread * (min(max(surprise, -most), most) / variance)
        self._covariance -= np.outer(spread, spread) / variance


class AdaptiveTree:
    """Chooses among ``sizes``, and a plain round. Sizes that are chains learn from each other's rounds."""

    def __init__(self, costs: Costs, sizes: Sequence[TreeSize]) -> None:
        assert len(set(sizes)) == len(sizes) > 0, "sizes to choose from, each once"
        self._choices = {size: 1 + i for i, size in enumerate(sizes)}
        self._sizes = (None, *sizes)
        self._levels = [min(size.depth, size.nodes) for size in sizes]
        self._chain = Acceptance(max(self._levels))
        self._trees = {
            size: Acceptance(levels) for size, levels in zip(sizes, self._levels, strict=True) if size.top_k > 1
        }
        self._pace = Pace(np.array([1.0, *(costs.of(size) for size in sizes)]))
        self._now = 0.0  # passes so far
        self._played = np.zeros(1 + len(sizes))  # when each choice last was
        self._left = ALLOWANCE

    @property
    def costs(self) -> Floats:
        """A round of each choice, in plain passes, as believed now: [A], the first is 1."""
        return self._pace.costs

    def tokens(self, *, hope: bool = False) -> Floats:
        """Expected tokens of a round of each choice, or what may be hoped for: [A], the first is 1."""
        chain = self._chain.tokens(hope=hope)
        trees = {size: acceptance.tokens(hope=hope) for size, acceptance in self._trees.items()}
        pairs = zip(self._choices, self._levels, strict=True)
        return np.array([1.0, *(trees.get(size, chain)[levels] for size, levels in pairs)])

    def choose(self) -> TreeSize | None:
        """What to draft next; None is a plain round. Asking changes nothing."""
        costs = self.costs
        safe = costs <= self._left + 1 + TRYING  # even if nothing is accepted
        safe[0] = True
        speed = np.where(safe, self.tokens() / costs, 0.0)
        best = int(speed.argmax())
        lost = np.maximum(costs - self.tokens(hope=True) / speed[best], 1e-9)
        paid = (self._now - self._played) * (TRYING / len(costs))
        due = np.where(safe, paid / lost, 0.0)
        due[best] = 0.0
        tried = int(due.argmax())
        return self._sizes[tried if due[tried] >= 1 else best]

    def saw(self, size: TreeSize | None, accepted: int, seconds: float | None = None) -> None:
        """The round played: drafted tokens kept, and what it took. A size that is none of ``sizes``, cut short by the
        end of the context, teaches nothing."""
        if size is None:
            choice = 0
        elif size in self._choices:
            choice = self._choices[size]
            self._trees.get(size, self._chain).saw(self._levels[choice - 1], accepted)
        else:
            return
        cost = float(self.costs[choice])
        self._now += cost
        self._played[choice] = self._now
        self._left = min(ALLOWANCE, self._left + (1 + TRYING) * (1 + accepted) - cost)
        if seconds is not None:
            self._pace.saw(choice, seconds)


class Adaptive:
    """Chooses how many tokens of a chain to draft, from 0, a plain round, to ``max_draft_tokens``."""

    def __init__(self, costs: Costs, max_draft_tokens: int) -> None:
        require_choice(max_draft_tokens)
        self._chains = [TreeSize(k, 1, k) for k in range(1, max_draft_tokens + 1)]
        self._sizes = AdaptiveTree(costs, self._chains)

    @property
    def costs(self) -> Floats:
        """A round by drafted tokens from 0, in plain passes, as believed now."""
        return self._sizes.costs

    def tokens(self) -> Floats:
        """Expected tokens of a round by drafted tokens from 0."""
        return self._sizes.tokens()

    def choose(self) -> int:
        """Tokens to draft next. Asking changes nothing."""
        size = self._sizes.choose()
        return 0 if size is None else size.depth

    def saw(self, drafted: int, accepted: int, seconds: float | None = None) -> None:
        """The round played: tokens drafted, those of them kept, and what it took."""
        self._sizes.saw(self._chains[drafted - 1] if drafted else None, accepted, seconds)


def require_choice(draft_tokens: int) -> None:
    if draft_tokens < 1:
        raise UsageError(
            f"{draft_tokens} draft tokens leave nothing to choose from.",
            way_out="Pass --draft-tokens 1 or more, or decode without a drafter.",
        )
