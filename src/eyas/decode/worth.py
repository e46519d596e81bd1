"""What to draft, chosen word by word from how sure the drafter is: a chain with siblings, as deep and wide as pays.

A drafter that says "surely" is kept more often than one that guesses, and it says so before the target is asked:

    depth 0     the committed slot proposes three words              a .52   b .21   c .05
    depth 1     one pass below the likeliest of them, three more     a d .40   a e .06   a f .02
    …           as long as another depth is expected to bring more than it costs
    verified    the likeliest of all proposed, as many as pay        a, a d, b: a tree, since no child is likelier

Costs are in plain passes: d a depth, v(r) a target pass of r rows. With λ the plain passes a token costs now and P the
odds of a proposal being kept, verifying the m likeliest instead of nothing is worth

    λ (P1 + … + Pm) - (v(1 + m) - v(1))       P = min(1, c p)        p: the drafter's own share of the whole path

λ follows what rounds cost and made; c is how often the drafter was right over how often it said it would be. The
first depth of a round is drafted if lately that was worth a depth, or if 1 % of the time since one was drafted pays for
it; another if the three words it is likely to bring would raise the worth by more than d. As in ``adaptive``, nothing
is played that could break the promise, whatever is kept, in any stretch of rounds, by the costs believed:

    passes  <=  1.02 tokens + 8                      (plain decoding: passes = tokens)

Costs begin as measured beforehand and follow the seconds of the rounds played, a round's drafting and its verifying
told apart (``adaptive.Pace``). So that no cost is believed for want of looking, m = 0 among them, another m than the
best is played in a round where that loses no more than 1 % of the time since it was played last, divided among all m.
Nothing here is random and no clock is read: the same rounds give the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eyas.decode.adaptive import ALLOWANCE, TRYING, Costs, Pace, require_choice

WIDTH = 3  # proposals a depth
NODES = 7  # drafted tokens verified in a round, at most
GUESS = (0.45, 0.13, 0.06)  # what a depth's proposals are expected to be, as shares of the path above them
FIRST_WORTH = 0.45  # what the first depth is thought to be worth, before one is seen
LOOKS, ROUNDS, TOKENS = 48.0, 600.0, 200.0  # after so many first depths, rounds, rounds one counts a third
CERTAIN = 4.0  # tokens kept as foretold that ``trust`` begins with
BEGUN = 30.0  # tokens at a pass each that ``price`` begins with
LOOKING = 0.01  # share of the time that may go into a first depth, or a number of rows, that looks worse: half of what
# the promise allows, so that something is left to verify what turns out well
NOISE = 0.3  # of the logarithm of a single pass's seconds, on a machine that has other things to do
LEAST = 1e-3  # of a plain pass: a depth that is thought to take no time would never be believed to take any


class Beliefs(NamedTuple):
    """What a round is chosen by, all costs in plain passes.

    ``draft`` is one depth, ``verify[m]`` a target pass over m drafted tokens and the last known one (``verify[0]`` is
    1), ``price`` λ, ``trust`` c. ``bearable``: what the round may cost even if nothing is kept. ``look``: whether to
    draft at all. ``spare[m]``: what may be lost by verifying m.
    """

    draft: float
    verify: tuple[float, ...]
    price: float
    trust: float
    bearable: float
    look: bool
    spare: tuple[float, ...]

    def worth(self, paths: Sequence[float]) -> list[float]:
        """What verifying the m likeliest proposals is worth over verifying none, by m from 0; ``paths`` are their
        shares, falling."""
        values, gain = [0.0], 0.0
        for m, path in enumerate(paths[: len(self.verify) - 1], 1):
            gain += self.price * min(1.0, self.trust * path)
            values.append(gain - (self.verify[m] - self.verify[0]))
        return values


class Weighing:
    """One round's draft as it grows. As long as ``deeper`` says so draft a depth below the likeliest of the newest
    proposals, at first below the last known token, and ``propose`` it; then verify the ``chosen``.

    ``paths`` are the shares of the paths to all proposals so far, ``parents`` are places in that list, -1 for the last
    known token; ``depths`` is how many were drafted.
    """

    def __init__(self, beliefs: Beliefs, most: int) -> None:
        self.depths = 0
        self.paths: list[float] = []
        self.parents: list[int] = []
        self.beliefs, self._most = beliefs, most
        self._worth = [0.0]
        self._top = -1  # the likeliest of the newest depth

    def within(self, depths: int) -> Weighing:
        """The same, no deeper than so."""
        self._most = min(self._most, depths)
        return self

    def deeper(self) -> bool:
        """Whether to draft another depth."""
        beliefs = self.beliefs
        if self.depths >= self._most or (self.depths + 1) * beliefs.draft + 1 > beliefs.bearable:
            return False
        if not self.depths:
            return beliefs.look
        above = self.paths[self._top]
        guessed = sorted([*self.paths, *(above * share for share in GUESS)], reverse=True)
        return max(beliefs.worth(guessed)) - self.value > beliefs.draft

    def propose(self, shares: Sequence[float]) -> None:
        """A depth's words by the drafter's shares of them, falling, from 0 to 1."""
        assert all(0 <= share <= 1 for share in shares), f"shares {list(shares)}"
        above, self._top = self._top, len(self.paths)
        self.parents += [above] * len(shares)
        path = self.paths[above] if self.depths else 1.0
        self.paths += [path * share for share in shares]
        self.depths += 1
        self._worth = self.beliefs.worth(sorted(self.paths, reverse=True))

    @property
    def value(self) -> float:
        """What verifying proposals is worth at best, over verifying none."""
        return max(self._worth)

    @property
    def nodes(self) -> int:
        """How many proposals are verified: those that pay, of what can be borne, or now and then as many as are due."""
        beliefs, worth = self.beliefs, self._worth
        left = beliefs.bearable - self.depths * beliefs.draft
        borne = [m for m in range(len(worth)) if not m or beliefs.verify[m] <= left]
        best = max(borne, key=worth.__getitem__)  # the fewest where several are as good
        due = {m: beliefs.spare[m] / max(worth[best] - worth[m], 1e-9) for m in borne if m != best}
        tried = max(due, key=due.__getitem__, default=best)
        return tried if due.get(tried, 0.0) >= 1 else best

    @property
    def chosen(self) -> list[int]:
        """Places of the proposals to verify, the likeliest first, a parent before its children."""
        return sorted(range(len(self.paths)), key=lambda place: -self.paths[place])[: self.nodes]

    @property
    def foretold(self) -> float:
        """How many of the chosen are kept, by the drafter's own shares."""
        return sum(self.paths[place] for place in self.chosen)

    @property
    def cost(self) -> float:
        """Of the round, in plain passes."""
        return self.depths * self.beliefs.draft + self.beliefs.verify[self.nodes]


class Fading:
    """A mean in which one of ``memory`` values ago counts a third; begins at ``value`` with a ``weight``."""

    def __init__(self, value: float, weight: float, memory: float) -> None:
        self._sum, self._weight, self._stays = value * weight, weight, 1 - 1 / memory

    @property
    def mean(self) -> float:
        return self._sum / self._weight

    def saw(self, value: float, weight: float = 1.0) -> None:
        self._sum = self._sum * self._stays + value
        self._weight = self._weight * self._stays + weight


class ByWorth:
    """Chooses drafts of at most ``draft_tokens`` depths. Answers may share one, their rounds played one at a time."""

    def __init__(self, costs: Costs, draft_tokens: int) -> None:
        require_choice(draft_tokens)
        self.draft_tokens = draft_tokens
        # Of ``Pace``: 0 the plain pass, 1 a depth, r the pass of r rows from 2 up.
        before = [1.0, max(costs.drafting(), LEAST), *(costs.verifying(rows) for rows in range(2, NODES + 2))]
        self._pace = Pace(np.array(before), least=np.array([1.0, LEAST, *[1.0] * NODES]), alone=[1], noise=NOISE)
        self._price = Fading(1.0, BEGUN, TOKENS)
        self._first = Fading(FIRST_WORTH, CERTAIN, LOOKS)
        self._kept = self._foretold = 0.0
        self._now = self._drafted = 0.0  # passes so far, and when a round with a draft was last begun
        self._played = [0.0] * (NODES + 1)  # when so many tokens were last verified
        self._left = ALLOWANCE

    @property
    def costs(self) -> tuple[float, list[float]]:
        """One depth, and a target pass by drafted tokens from 0, in plain passes, as believed now."""
        plain, draft, *verify = self._pace.costs.tolist()
        return draft, [plain, *verify]

    @property
    def price(self) -> float:
        """λ: plain passes that a token costs now, never more than plain decoding's one."""
        return min(1.0, self._price.mean)

    @property
    def trust(self) -> float:
        """c: tokens kept over those foretold by the drafter's own shares."""
        return (self._kept + CERTAIN) / (self._foretold + CERTAIN)

    def choose(self) -> Weighing:
        """A round's draft, to be grown and played. Asking changes nothing."""
        draft, verify = self.costs
        look = self._first.mean >= draft or (self._now - self._drafted) * LOOKING >= draft
        bearable = self._left + 1 + TRYING
        spare = tuple((self._now - played) * LOOKING / len(verify) for played in self._played)
        beliefs = Beliefs(draft, tuple(verify), self.price, self.trust, bearable, look, spare)
        return Weighing(beliefs, self.draft_tokens)

    def saw(self, played: Weighing, accepted: int, seconds: tuple[float, float] | None = None) -> None:
        """The round played: how many of its chosen were kept, and what drafting and verifying them took."""
        nodes, depths, cost = played.nodes, played.depths, played.cost
        assert 0 <= accepted <= min(nodes, depths), f"{accepted} accepted of {nodes} in {depths} depths"
        stays = 1 - 1 / ROUNDS
        self._kept = (self._kept + accepted) * stays
        self._foretold = (self._foretold + played.foretold) * stays
        self._price.saw(cost, accepted + 1)
        self._left = min(ALLOWANCE, self._left + (1 + TRYING) * (accepted + 1) - cost)
        if depths:
            self._drafted = self._now
            self._first.saw(played.value - (depths - 1) * played.beliefs.draft)
        self._now += cost
        self._played[nodes] = self._now
        if seconds is not None:
            self._told(depths, nodes, *seconds)

    def _told(self, depths: int, nodes: int, drafting: float, verifying: float) -> None:
        if depths:
            self._pace.saw(1, drafting / depths)
        self._pace.saw(nodes + 1 if nodes else 0, verifying)
