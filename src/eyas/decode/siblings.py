"""The draft side of ``worth``: one chain of the drafter, at every depth of which the next words are proposed too.

    slots      0 ──── … ──── t │ t + 1    t + 2   …          as ``chain``'s: only the likeliest word is ever fed
    proposes                 a │ a d      a d g
                             b │ a e      a d h
                             c │ a f      a d i

Letters: W draft vocabulary, k proposals a depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.decode.adaptive import Costs
from eyas.decode.cost import measure_cost
from eyas.decode.swift import chain_of
from eyas.decode.tree import Drafted
from eyas.decode.worth import NODES, WIDTH, ByWorth, Weighing
from eyas.drafter import Drafter
from eyas.target import Target

MEASURED_AFTER = 64  # tokens
MEASURED = (1, 2, 4, NODES)  # drafted tokens whose passes are timed; between them lies a line


class Siblings:
    """A drafter and what it saw of one text, for drafts that grow as a ``Weighing`` says."""

    def __init__(self, drafter: Drafter) -> None:
        self.chain = chain_of(drafter)
        self.drafter = drafter
        self.taps = self.chain.taps

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        """Commit slots, as ``Chain.extend`` does: taps [1, S, C*D], and the token after each position."""
        self.chain.extend(taps, next_tokens, first_slot)

    @torch.inference_mode()
    def draft(self, weighing: Weighing) -> Drafted:
        """What it chooses of the drafter's words, a tree or nothing; ``extend`` before drafting again."""
        tokens: list[int] = []
        newest: list[int] = []
        while weighing.deeper():
            newest, shares = self._next(newest)
            tokens += newest
            weighing.propose(shares)
        if newest:  # else slots that wait on the draft side go on waiting
            self.chain.drop_draft()
        chosen = weighing.chosen
        place = {old: new for new, old in enumerate(chosen)}
        parents = [place.get(weighing.parents[old], -1) for old in chosen]
        paths = torch.tensor([weighing.paths[old] for old in chosen], dtype=torch.float32)
        return Drafted([tokens[old] for old in chosen], parents, paths.log())

    def _next(self, newest: Sequence[int]) -> tuple[list[int], list[float]]:
        """The depth below the first of the ``newest`` words, at first after the last known token: target ids [k] and
        their shares, falling."""
        if newest:
            self.chain.feed_id(newest[0])
        words, shares = likeliest(self.chain.logits(), WIDTH)
        return self.chain.target_ids(words), shares


def likeliest(logits: Tensor, width: int) -> tuple[list[int], list[float]]:
    """Draft logits [W] -> the ``width`` likeliest words' draft ids [k], k <= W, and their shares, falling.

    Among equals the first is the one that argmax takes, as a chain's. What is not a number has a share of 0.
    """
    said = logits.float().cpu().numpy()  # one way for all of it, and no threads to wait for
    k = min(width, len(said))
    first = int(said.argmax())
    others = [int(word) for word in np.argpartition(said, -k)[-k:] if word != first]
    words = [first, *sorted(others, key=lambda word: -said[word])][:k]
    with np.errstate(invalid="ignore"):  # of infinite logits
        shares = np.exp(said[words] - said[first]) / np.exp(said - said[first]).sum()
    return words, np.nan_to_num(shares, nan=0.0).clip(max=1.0).tolist()


def by_worth(target: Target, drafter: Drafter, prompt_ids: Sequence[int], draft_tokens: int) -> ByWorth:
    """Chooses drafts of at most ``draft_tokens`` depths from what passes cost here and now: it times some after a
    beginning of ``prompt_ids``. Measure with ``packed`` open, as rounds are played."""
    return ByWorth(Costs.measured(measure_cost(target, drafter, prompt_ids[:MEASURED_AFTER], MEASURED)), draft_tokens)
