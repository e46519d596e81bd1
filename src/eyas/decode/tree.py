"""The draft side of a round that drafts a tree: EAGLE-2's dynamic one (arXiv 2406.16858).

    depth 0      the last slot's state proposes top_k children of the last known token
    depth 1      one pass over the top_k best of them, each proposes top_k children          top_k² candidates
    depth 2      one pass over the top_k best of *those*, and so on                          top_k² candidates
    at the end   the ``nodes`` best of all candidates are the draft

"Best" is by the probability of the whole path, the product of the drafter's own probabilities along it: that a child is
never likelier than its parent is why the best nodes always form a tree. Equally likely ones go in the order they were
proposed, and a parent is proposed before its children.

A pass appends one temporary row for each node it feeds; a node sees what is committed, its ancestors and itself:

    slots        0 ──── … ──── t │ rows of depth 1   rows of depth 2     (rope position of depth k: t + k, as a chain's)
                                 │  a   b   c         ab  ac  ca
      ac sees    all committed   │  a   .   .         .   ac  .

Letters: F nodes fed in a pass, R temporary rows held, T rows held, k children a node, M candidates, H drafter width,
W draft vocabulary, N query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.decode.swift import chain_of
from eyas.drafter import Drafter
from eyas.errors import UsageError


@dataclass(frozen=True)
class TreeSize:
    """``depth`` levels of ``top_k`` expanded nodes with ``top_k`` children each, of which at most ``nodes`` are kept.

    A chain of K is ``TreeSize(K, 1, K)``. Engines count the last known token too: SGLang's
    ``--speculative-num-draft-tokens`` is ``nodes + 1``. Raises UsageError for a number below 1.
    """

    depth: int
    top_k: int
    nodes: int

    def __post_init__(self) -> None:
        for name, value in (("depth", self.depth), ("top_k", self.top_k), ("nodes", self.nodes)):
            if value < 1:
                raise UsageError(
                    f"A draft tree with {name} {value} has nothing to verify; 1 or more was expected.",
                    way_out=f"Pass a {name} of 1 or more, or decode without a drafter.",
                )

    @property
    def rows(self) -> int:
        """Of a verify pass, at most: the drafted nodes and the last known token."""
        return 1 + min(self.nodes, self.top_k + (self.depth - 1) * self.top_k**2)


class Drafted(NamedTuple):
    """A drafted tree of n nodes, the likeliest first, parents before their children: every beginning is a tree too.

    ``tokens`` are target ids, ``parents`` indexes into them, -1 for the last known token; no two children of a node are
    the same token. ``log_probs`` [n] fp32: of the path to each node, by the drafter; -inf throughout if it says NaN.
    """

    tokens: list[int]
    parents: list[int]
    log_probs: Tensor


class Tree:
    """A drafter and what it saw of one text, for drafting trees."""

    def __init__(self, drafter: Drafter) -> None:
        self.chain = chain_of(drafter)
        self.drafter = drafter
        self.taps = self.chain.taps

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        """Commit slots, as ``Chain.extend`` does: taps [1, S, C*D], and the token after each position."""
        self.chain.extend(taps, next_tokens, first_slot)

    @torch.inference_mode()
    def draft(self, size: TreeSize) -> Drafted:
        """The drafter's likeliest continuations; ``extend`` before drafting again."""
        states = self.chain.state
        assert states is not None, "draft before extend"
        candidates = Candidates(states.device)
        fed = torch.full((1,), -1, device=states.device)
        ancestors = torch.ones(1, 0, dtype=torch.bool, device=states.device)
        for depth in range(size.depth):
            if depth:
                fed = candidates.frontier(size)
                if not len(fed):
                    break
                above = candidates.row_above[fed]
                itself = torch.eye(len(fed), dtype=torch.bool, device=fed.device)
                ancestors = torch.cat((ancestors[above], itself), dim=1)
                states = self._feed(states[:, above], candidates.tokens[fed], ancestors, depth)
            candidates.add(fed, *self._children(states[0], size.top_k))
        self.chain.drop_draft()
        return candidates.best(size.nodes)

    def _feed(self, states: Tensor, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """States [1, F, H] above F nodes and their target ids [F] -> the nodes' own states [1, F, H].

        ``ancestors`` [F, R]: which temporary rows each node sees, the F rows of this pass included.
        """
        return self.chain.level(states, tokens, ancestors, depth)

    def _children(self, states: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """States [F, H] -> the likeliest children's target ids and log probabilities, both [F, k], k <= W."""
        logits = self.drafter.logits(states).float()
        k = min(top_k, logits.shape[-1])
        # Among equal logits max takes the first, as a chain's argmax does; topk takes any.
        best, draft_ids = logits.max(-1, keepdim=True) if k == 1 else logits.topk(k)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        # Whatever a broken drafter says, a child is no likelier than its parent, and has a place in the order.
        log_probs = log_probs.clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return self.drafter.to_target_ids(draft_ids), log_probs


class Candidates:
    """All nodes proposed so far, [M] of each, depth after depth, so that a node's parent stands before it.

    ``parents`` are places in this list, -1 at depth 0; ``row_above`` is the parent's row in the pass that proposed it.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.parents, self.row_above = torch.empty_like(self.tokens), torch.empty_like(self.tokens)
        self.scores = torch.empty(0, device=device)
        self._newest = 0

    def add(self, fed: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """One depth more: tokens and own log probabilities [F, k] of the children of the nodes at ``fed`` [F]."""
        k = tokens.shape[1]
        self._newest = len(self.tokens)
        before = self.scores[fed] if self._newest else log_probs.new_zeros(1)
        self.scores = torch.cat((self.scores, (before[:, None] + log_probs).flatten()))
        self.tokens = torch.cat((self.tokens, tokens.flatten()))
        self.parents = torch.cat((self.parents, fed.repeat_interleave(k)))
        rows = torch.arange(len(fed), device=fed.device)
        self.row_above = torch.cat((self.row_above, rows.repeat_interleave(k)))

    def frontier(self, size: TreeSize) -> Tensor:
        """Places [F] of the nodes to feed next: the ``top_k`` best of the last depth, without those that cannot matter.

        Below a node no better than the last that would be kept now, nothing can be kept later, so that on a CPU, where
        looking costs nothing, such nodes are not fed. The tree is the same.
        """
        places = self._newest + _best_first(self.scores[self._newest :])[: size.top_k]
        if self.scores.device.type != "cpu" or len(self.scores) < size.nodes:
            return places
        last_kept = self.scores.topk(size.nodes).values[-1]
        return places[self.scores[places] > last_kept]

    def best(self, nodes: int) -> Drafted:
        """The ``nodes`` best. The order is stable: at equal scores a parent stays before its children."""
        order = _best_first(self.scores)[:nodes]
        place = torch.full((len(self.scores) + 1,), -1, device=order.device)  # one more, for -1 to land on
        place[order] = torch.arange(len(order), device=order.device)
        return Drafted(self.tokens[order].tolist(), place[self.parents[order]].tolist(), self.scores[order])


def _best_first(scores: Tensor) -> Tensor:
    """Places [M] by falling score, equal ones in the order they stand."""
    return scores.sort(descending=True, stable=True).indices
