"""A whole greedy round as one step on the device: draft, verify, keep, extend. The host reads its outcome, once.

    token, state ──▶ d1 ─▶ d2 ─▶ … ─▶ dK      K depths; their rows lie behind ``held`` and are never counted
    [token d1 … dK] ──▶ target ──▶ best b0 b1 … bK      b_i: the target's own token after row i
    accepted a: leading i with d_(i+1) = b_i            so b0 … b_a are the new tokens, kept ones and bonus alike
    held + a + 1 on both sides; slots of *all* K+1 rows extended, row i with token b_i, those past a not counted
    told = [b0 … bK, a] ──▶ host                        token = b_a, state = row a's: the next round's beginning

As ``chain`` and ``loop`` play it, token for token and count for count; what differs is that lengths are numbers on the
device and that rows which turn out rejected are computed like the others. Sampling, trees, adaptive lengths and stop
strings stay with ``loop``.

Letters: K drafted tokens, R rows, C taps, D target width, H drafter width, N query heads, E head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.decode import sight
from eyas.decode.plain import require_room
from eyas.decode.static import ROWS, WARM_UPS, Buffers, StaticPasses, Step, as_it_is, require
from eyas.drafter import Drafter, attend
from eyas.errors import UsageError
from eyas.target import Target

LONGEST = ROWS[-1] // (WARM_UPS + 1) - 1  # draft tokens: as many warm-ups as ``graphed`` makes fit behind an empty text


class StaticChain:
    """What a drafter saw of one text, as ``chain.Chain``; ``state`` [1, 1, H] is the last slot's at depth 0."""

    def __init__(self, drafter: Drafter, slots: int) -> None:
        config = drafter.config
        width = (config.num_key_value_heads, config.head_dim)
        self.drafter, self.layers = drafter, config.num_hidden_layers
        self.buffers = Buffers([(width, width)] * self.layers, slots, drafter.fc.weight)
        self.state = drafter.fc.weight.new_zeros(1, 1, config.hidden_size)
        self._only = torch.zeros(1, dtype=torch.int64, device=drafter.device)

    def extend(self, taps: Tensor, next_tokens: Tensor, last: Tensor) -> None:
        """Feed R slots after those held: target taps [R, C*D] and the token after each position [R].

        Rows 0 … ``last`` ([1] int64) are held from now on and the state is the last one's.
        """
        at = self.buffers.next(len(next_tokens))
        self.state.copy_(self._through(self.drafter.fuse(taps[None]), next_tokens[None], at, last))
        self.buffers.held.add_(last + 1)

    def draft(self, draft_tokens: int) -> Tensor:
        """The drafter's next target ids [K], greedily; what is held stays as it is."""
        state: Tensor = self.state
        tokens: list[Tensor] = []
        for k in range(draft_tokens):
            if k:
                at = self.buffers.held + (k - 1)
                state = self._through(self.drafter.feedback(state), tokens[-1][None], at, self._only)
            tokens.append(self.drafter.to_target_ids(self.drafter.logits(state[0]).argmax(-1)))
        return torch.cat(tokens)

    def _through(self, hidden: Tensor, tokens: Tensor, at: Tensor, last: Tensor) -> Tensor:
        """Hidden [1, R, H] and tokens [1, R] of the slots ``at`` [R] -> state [1, 1, H] of row ``last`` [1]."""
        positions = at[None]  # a slot's rope position is its number
        for layer in range(self.layers):
            residual, mixed = self.drafter.enter(hidden, tokens, layer)
            keys, values = self.buffers.write(layer, *self.drafter.keys_values(mixed, positions, layer), at)
            if layer == self.layers - 1:
                residual, mixed, positions = (x.index_select(1, last) for x in (residual, mixed, positions))
            queries = self.drafter.queries(mixed, positions, layer)
            sees = self.buffers.slots <= positions[0, :, None]  # [rows, slots]
            hidden = self.drafter.finish(residual, self._attend(queries, keys, values, sees), layer)
        return hidden

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
        """Queries [1, N, R, E] over all slots -> [1, N, R, E]."""
        _, N, R, E = queries.shape
        if R > 1:
            return attend(queries, keys, values, sees[None, None])
        # One row: the heads of a group stand as rows, so that no key is repeated.
        grouped = queries.reshape(1, self.drafter.config.num_key_value_heads, -1, E)
        return attend(grouped, keys, values, sees[None, None]).reshape(1, N, 1, E)


@dataclass
class Answer:
    """``drafted[k]`` and ``accepted[k]``: rounds that drafted, and kept, depth k, as ``loop.Generation`` counts them.

    ``seconds``: of the whole; ``round_seconds``: of the rounds alone, in order.
    """

    token_ids: list[int]
    drafted: list[int]
    accepted: list[int]
    rounds: int = 0
    seconds: float = 0.0
    round_seconds: list[float] = field(default_factory=list)


class GreedyRounds:
    """Greedy answers of one target and drafter, K drafted tokens a round, one text after the other.

    ``capacity``: tokens that prompt and answer have together at most. ``prepare`` as for ``StaticPasses``; a round is
    handed to it here and now, so it may take long. Raises UsageError for what does not fit.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        draft_tokens: int,
        capacity: int,
        prepare: Callable[[Step], Step] = as_it_is,
    ) -> None:
        require(unsuited(drafter, target))
        if not 1 <= draft_tokens <= LONGEST:
            raise UsageError(
                f"{draft_tokens} draft tokens a round; a static round has 1 to {LONGEST}.",
                way_out="Pass --draft-tokens 4.",
            )
        self.draft_tokens, self._target = draft_tokens, target
        self.passes = StaticPasses(target, drafter.config.taps, capacity=capacity, prepare=prepare)
        self.chain = StaticChain(drafter, len(self.passes.buffers.slots))
        self.token = torch.zeros(1, dtype=torch.int64, device=target.device)
        self.told = self.token.new_zeros(draft_tokens + 2)
        self._sees = {K: sight.chain(K + 1, target.device) for K in range(1, draft_tokens + 1)}
        self._words, self._head = target.vocab_size, target.logits
        with torch.no_grad():
            self.step = prepare(self._whole)

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Answer:
        """The target's own greedy answer, an end token included. Raises UsageError for a text that has no room."""
        require_room(self._target, prompt_ids, max_new_tokens)
        if len(prompt_ids) + max_new_tokens > self.passes.capacity:
            raise UsageError(
                f"{len(prompt_ids)} tokens of prompt and {max_new_tokens} new ones do not fit a static cache of "
                f"{self.passes.capacity}.",
                way_out="Make it with a larger capacity.",
            )
        started, ends = time.perf_counter(), self._target.eos_ids()
        done = Answer([self._prefill(prompt_ids)], [0] * self.draft_tokens, [0] * self.draft_tokens)
        while len(done.token_ids) < max_new_tokens and done.token_ids[-1] not in ends:
            began = time.perf_counter()
            new, drafted = self._play()
            done.round_seconds.append(time.perf_counter() - began)
            count(done, drafted, len(new) - 1)
            end = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
            done.token_ids += new[: min(end, max_new_tokens - len(done.token_ids))]
        done.seconds = time.perf_counter() - started
        return done

    def _prefill(self, prompt_ids: Sequence[int]) -> int:
        """Hold the prompt on both sides -> the first token."""
        self.passes.holds(0)
        self.passes.buffers.held.zero_()
        self.chain.buffers.held.zero_()
        states, taps = self.passes.forward(prompt_ids)
        self.token.copy_(self._head(states[-1:]).argmax(-1))
        first = int(self.token)
        following = torch.tensor([*prompt_ids[1:], first], dtype=torch.int64, device=self.token.device)
        for fed, tokens in zip(torch.split(taps, ROWS[-1]), torch.split(following, ROWS[-1]), strict=True):
            self.chain.extend(fed, tokens, torch.full_like(self.token, len(tokens) - 1))
        return first

    def _play(self) -> tuple[list[int], int]:
        """One round -> its new tokens and how many were drafted. The one host sync of it is here."""
        length = self.passes.length
        K = min(self.draft_tokens, self._target.max_positions - 1 - length)
        if self.draft_tokens == K:
            self.step()
        else:  # the last rounds before the target's last position: too few to be worth preparing
            self.round(K)
        *best, accepted = self.told.tolist()
        self.passes.holds(length + accepted + 1)
        return best[: accepted + 1], K

    def _whole(self) -> None:
        self.round(self.draft_tokens)

    def round(self, K: int) -> None:
        """Draft, verify, keep and extend on the device alone, as drawn at the head of this module."""
        drafted = self.chain.draft(K)
        fed = torch.cat((self.token, drafted.where(drafted < self._words, 0)))
        states, taps = self.passes.rows(fed, self._sees[K].depths, self._sees[K].seen)
        best = self._head(states).argmax(-1)
        accepted = (drafted == best[:K]).cumprod(0).sum(0, keepdim=True)
        self.passes.buffers.held.add_(accepted + 1)
        self.chain.extend(taps, best, accepted)
        self.token.copy_(best.index_select(0, accepted))
        self.told[: K + 1].copy_(best)
        self.told[-1:].copy_(accepted)


def count(done: Answer, drafted: int, accepted: int) -> None:
    done.rounds += 1
    for k in range(drafted):
        done.drafted[k] += 1
        done.accepted[k] += k < accepted


def unsuited(drafter: Drafter, target: Target) -> str | None:
    """Why a drafter cannot draft for this target in static rounds, or None."""
    ours, its = (drafter.fc.weight.dtype, drafter.device), (target.dtype, target.device)
    if ours != its:
        return f"the drafter is {ours[0]} on {ours[1]}, the target {its[0]} on {its[1]}"
    rope = str(drafter.config.rope_parameters["rope_type"])
    if rope == "longrope" or "dynamic" in rope:
        return f"the drafter's rope of type {rope!r} changes with the length of the text"
    return None
