"""The draft side of a round: one chain of the drafter's own tokens.

    slots      0 ──── … ──── t-1 │ t-1 + 1    t-1 + 2   …     (rope positions)
    keys from  target taps       │ own state  own state
               committed         │ temporary, dropped when the draft is done

Slot t holds the target's taps of position t and is fed token x[t+1]; depth k of it stands at position t + k
and sees every committed key and its own keys of depths 1..k. The alignment is drawn at the head of
``objective``. Every layer of the drafter has a cache of its own.

Letters: S slots, F nodes of a tree's level, R temporary rows, C taps, D target width, H drafter width, W draft
vocabulary, N query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.answers import Sampling
from eyas.decode import law
from eyas.decode.accept import Drawn
from eyas.decode.cache import KeyValues
from eyas.decode.sample import Chance
from eyas.drafter import Drafter, attend


class Chain:
    """A drafter and what it saw of one text; ``state`` [1, 1, H] is the last slot's at its current depth."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps = drafter.config.taps
        self.caches = [KeyValues() for _ in range(drafter.config.num_hidden_layers)]
        self.committed = 0
        self._state: Tensor | None = None

    @property
    def state(self) -> Tensor | None:
        return self._state

    @state.setter
    def state(self, state: Tensor | None) -> None:
        self._state = state

    @torch.inference_mode()
    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        """Commit slots from ``first_slot`` on: target taps [1, S, C*D], and the token after each position.

        Every slot leaves keys and values in every layer; only the last, where drafting starts, leaves the last layer.
        """
        assert first_slot == self.committed, f"slot {first_slot} after {self.committed} slots"
        assert len(next_tokens) == taps.shape[1], "one following token a slot"
        device = taps.device
        tokens = torch.tensor([list(next_tokens)], dtype=torch.int64, device=device)
        positions = torch.arange(first_slot, first_slot + taps.shape[1], device=device)[None]
        self.truncate(first_slot)
        self.state = self._through(self.drafter.fuse(taps), tokens, positions)
        self.committed = self.length

    @torch.inference_mode()
    def feed(self, token: Tensor) -> None:
        """One depth further: ``token`` [1, 1], a target id, after the current state."""
        assert self.state is not None, "feed before extend"
        position = torch.full((1, 1), self.length, device=token.device)
        self.state = self._through(self.drafter.feedback(self.state), token, position)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Draft logits [W] of the current state."""
        assert self.state is not None, "logits before extend"
        return self.drafter.logits(self.state[0, 0])

    @torch.inference_mode()
    def draft(self, draft_tokens: int) -> list[int]:
        """The drafter's next ``draft_tokens`` target ids, greedily; ``extend`` before drafting again."""
        tokens: list[Tensor] = []
        for _ in range(draft_tokens):
            if tokens:
                self.feed(tokens[-1])
            tokens.append(self.drafter.to_target_ids(self.logits().argmax(-1)).view(1, 1))
        self.drop_draft()
        return torch.cat(tokens, dim=1)[0].tolist()

    def feed_id(self, token: int) -> None:
        """``feed`` of a number."""
        self.feed(torch.tensor([[token]], device=self.drafter.device))

    def target_ids(self, draft_ids: Sequence[int]) -> list[int]:
        """What these words of the draft vocabulary are to the target."""
        found: list[int] = self.drafter.to_target_ids(torch.tensor(draft_ids, device=self.drafter.device)).tolist()
        return found

    @torch.inference_mode()
    def sample(self, draft_tokens: int, sampling: Sampling, chance: Chance) -> Drawn:
        """The next ``draft_tokens`` drawn, each from the drafter's own law; ``extend`` before drafting again.

        Its own law is its logits under the answer's temperature, top-k, top-p and min-p. Any law would do, for what is
        kept has the target's (``accept``); one cut as the target's is wastes no draft on words that cannot be kept.
        Bias and penalties are left out: they would have to follow the draft through every depth.
        """
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for _ in range(draft_tokens):
            if tokens:
                self.feed(tokens[-1])
            laws.append(law.cut(_numbers(self.logits())[None], sampling)[0])
            tokens.append(self.drafter.to_target_ids(chance.pick(laws[-1])).view(1, 1))
        self.drop_draft()
        return Drawn(
            torch.cat(tokens, dim=1)[0].tolist(), torch.stack(laws), cast(Tensor, self.drafter.draft_to_target)
        )

    def drop_draft(self) -> None:
        """Forget the temporary rows, and where drafting stood; ``extend`` before drafting again."""
        self.truncate(self.committed)
        self.state = None

    @torch.inference_mode()
    def level(self, states: Tensor, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """A tree's next level: states [1, F, H] above its F nodes and their target ids [F] -> their states [1, F, H].

        Their keys and values are temporary rows; ``ancestors`` [F, R] is which of all R such rows each node sees, the
        F of this call among them.
        """
        hidden, tokens = self.drafter.feedback(states), tokens[None]
        positions = torch.full_like(tokens, self.committed - 1 + depth)
        # Where every level so far was a single node all that is held is seen, and no mask is needed.
        lone = ancestors.shape[1] == depth
        seen = None if lone else F.pad(ancestors, (self.committed, 0), value=True)
        for layer, cache in enumerate(self.caches):
            residual, mixed = self.drafter.enter(hidden, tokens, layer)
            cache.append(*self.drafter.keys_values(mixed, positions, layer))
            queries = self.drafter.queries(mixed, positions, layer)
            hidden = self.drafter.finish(residual, attend_grouped(queries, cache.keys, cache.values, seen), layer)
        return hidden

    @property
    def length(self) -> int:
        """Slots held, committed and temporary."""
        return self.caches[0].length

    def truncate(self, length: int) -> None:
        """Forget all slots from ``length`` on."""
        for cache in self.caches:
            cache.truncate(length)

    def _through(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden [1, S, H] of the slots that follow those held -> state [1, 1, H] of the last of them."""
        last = len(self.caches) - 1
        for layer, cache in enumerate(self.caches):
            residual, mixed = self.drafter.enter(hidden, tokens, layer)
            cache.append(*self.drafter.keys_values(mixed, positions, layer))
            if layer == last:
                residual, mixed, positions = residual[:, -1:], mixed[:, -1:], positions[:, -1:]
            hidden = self._through_layer(layer, residual, mixed, positions)
        return hidden

    def _through_layer(self, layer: int, residual: Tensor, mixed: Tensor, positions: Tensor) -> Tensor:
        """The layer's output [1, S, H] at its last S rows: residual [1, S, H], attention's input [1, S, 2H or H]."""
        keys, values = self.caches[layer].keys, self.caches[layer].values
        queries = self.drafter.queries(mixed, positions, layer)
        S = queries.shape[2]
        if S == 1:
            attended = attend_grouped(queries, keys, values, None)
        else:
            rows = torch.arange(keys.shape[2], device=keys.device)
            held = rows <= rows[-S:, None]  # [S, T]
            attended = attend(queries, keys, values, held[None, None])
        return self.drafter.finish(residual, attended, layer)


def attend_grouped(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of few rows [1, N, F, E] over keys and values [1, G, T, E]; ``seen`` [F, T], None is all.

    The heads of a group stand as rows, so that no key is repeated.
    """
    groups = keys.shape[1]
    grouped = queries.reshape(1, groups, -1, queries.shape[-1])  # [1, G, N/G * F, E]
    if seen is not None:
        seen = seen.repeat(queries.shape[1] // groups, 1)[None, None]
    return attend(grouped, keys, values, seen).reshape(queries.shape)


def _numbers(logits: Tensor) -> Tensor:
    """Logits of a drafter that may be broken: what is not a number is as unlikely as can be, all of it is even odds."""
    return logits.nan_to_num(nan=torch.finfo(logits.dtype).min)
