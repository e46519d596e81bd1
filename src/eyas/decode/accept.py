"""Which drafted tokens are kept: pure maths on token ids and laws.

    draft        d0        d1        d2                  row k of the target's pass is fed what stands before d_k
    laws      p0 │ q0   p1 │ q1   p2 │ q2    p3          and gives p_k; p_K follows the last one
    keep d_k with min(1, p_k(d_k) / q_k(d_k)); at the first that is not kept draw from max(p_k - q_k, 0), made to
    sum to 1, and end; if all are kept draw from p_K

What comes out has the target's law whatever q is, provided the draft was drawn from it (Leviathan et al. 2023,
arXiv 2211.17192, appendix A.1; Chen et al. 2023, arXiv 2302.01318, theorem 1).

Letters: K drafted tokens, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.decode.sample import Chance


class Kept(NamedTuple):
    """Leading drafted tokens kept, and the target's own token after them."""

    accepted: int
    bonus: int


class Drawn(NamedTuple):
    """A chain drawn by a drafter: ``tokens`` are K target ids, ``laws`` [K, W] what each was drawn from, over draft
    words whose target ids are ``words`` [W]."""

    tokens: list[int]
    laws: Tensor
    words: Tensor

    def over(self, vocabulary: int) -> Tensor:
        """The laws over the target's words [K, V]; words it does not have are left out."""
        known = (self.words >= 0) & (self.words < vocabulary)
        laws, words = (self.laws, self.words) if known.all() else (self.laws[:, known], self.words[known])
        return self.laws.new_zeros(len(self.laws), vocabulary).index_add_(1, words, laws)


class Path(NamedTuple):
    """Drafted rows of a tree that are kept, from the root on, and the target's own token after them."""

    rows: list[int]
    bonus: int


def greedy(drafted: Sequence[int], target_ids: Sequence[int]) -> Kept:
    """``target_ids`` [K+1]: its greedy token after the last known token and after each drafted one."""
    assert len(target_ids) == len(drafted) + 1, "a verify pass has one row more than was drafted"
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target_ids[accepted]:
        accepted += 1
    return Kept(accepted, target_ids[accepted])


def sampled(drafted: Sequence[int], draft_laws: Tensor, target_laws: Tensor, chance: Chance) -> Kept:
    """Keep or resample a chain drawn from ``draft_laws`` [K, V]; ``target_laws`` [K+1, V].

    A token that cannot have been drawn from its law (share 0 or not a number, no word of the target) is not kept.
    """
    assert len(target_laws) == len(drafted) + 1, "a verify pass has one row more than was drafted"
    for depth, share in enumerate(kept_shares(drafted, draft_laws, target_laws[:-1])):
        if not chance.happens(share):
            return Kept(depth, int(chance.pick(residual(target_laws[depth], draft_laws[depth]))))
    return Kept(len(drafted), int(chance.pick(target_laws[-1])))


def kept_shares(drafted: Sequence[int], draft_laws: Tensor, target_laws: Tensor) -> list[float]:
    """How likely each drafted token is kept once those before it are: min(1, p / q), both laws [K, V]."""
    tokens = torch.tensor(drafted, dtype=torch.int64, device=target_laws.device)
    at = tokens.clamp(0, target_laws.shape[1] - 1)
    p, q = (laws.gather(1, at[:, None])[:, 0] for laws in (target_laws, draft_laws))
    shares: list[float] = (p / q).clamp(max=1.0).where((q > 0) & (tokens == at), 0.0).tolist()
    return shares


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target's law [V] has above the draft's, as a law; p itself where that is nothing or not a number."""
    above = (p - q).clamp(min=0)
    whole = above.sum()
    return above / whole if whole > 0 else p


def walk(tokens: Sequence[int], parents: Sequence[int], say: Callable[[int], int]) -> Path:
    """Follow the target through a tree of drafted ``tokens`` whose rows have ``parents`` (-1: the last known token).

    ``say(row)`` is the target's own token after drafted row ``row``, -1 the last known token: its best, or a draw
    from its law. The walk goes on where that token was drafted too. So the answer is what the target alone would
    have said, draw by draw, for any tree that was chosen without looking at those draws.
    """
    children: dict[tuple[int, int], int] = {}
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert parent < row, "a parent comes before its children"
        children.setdefault((parent, token), row)
    rows, at = list[int](), -1
    while True:
        token = say(at)
        if (at, token) not in children:
            return Path(rows, token)
        at = children[at, token]
        rows.append(at)
