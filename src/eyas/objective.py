"""The training-time unroll of a drafter over whole records, and its loss.

Alignment. Position t has token x[t] and the target's states h[t]; y[t] is the target's distribution after x[t]
(it predicts x[t+1]). Slot t is one draft chain. At depth k it is

    fed        x[t+1+k]                    (the record's own token: teacher-forced)
    hidden     fc(h[t]) at k = 0, else the slot's own state of depth k-1, normed if ``norm_output``
    position   t + k                       (rope)
    label      y[t+1+k], i.e. predicts x[t+2+k]

    x:   p0   p1   p2 │ r0   r1   r2        p prompt, r response
    slot of depth 0:    ▲ first slot: h[p2], fed r0, predicts r1; what an engine does right after prefill

A slot is trained at depth k when every token from the first it was fed (x[t+1]) to the one it must predict (x[t+2+k])
is a response token: the slots an engine drafts from. (EAGLE and SpecForge use the mask of x[t], one token early.)

Attention. The keys of depth 0 are the target's view of the text and every later depth adds one key of its own:

    slot t, depth k sees: depth-0 keys of slots 0..t, and its own keys of depths 1..k

Every layer of a drafter has keys of its own, seen by this rule. ``unroll`` computes the last layer's queries and
everything after them only at the slots asked for; ``dense_unroll`` is the plain version over all positions with one
explicit mask, kept as its oracle.

Sampling. The gradient of a later depth costs as much as that of depth 0 and says less, so training may carry only a
seeded sample of the slots past depth 0 (``sampled``); the mean loss of a depth stays unbiased.

Letters: B batch, T positions, S slots, K depths, H drafter width, W draft vocabulary, V target vocabulary, M picked
slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter import Drafter, attend
from eyas.taps import States, truths
from eyas.target import Target


@dataclass(frozen=True, eq=False)
class Slots:
    """Chains of one batch: ``index`` [B, S] their position t (0 if padded), ``valid`` [B, S, K] where each counts.

    ``going_on`` [B, R] names the slots that are carried past depth 0 (-1 if padded); None is all of them.
    """

    index: Tensor
    valid: Tensor
    going_on: Tensor | None = None

    @property
    def depths(self) -> int:
        return self.valid.shape[2]

    def at(self, k: int) -> tuple[Tensor, Tensor]:
        """Positions t of the slots carried to depth k and whether they count there, both [B, S], later [B, R]."""
        if k == 0 or self.going_on is None:
            return self.index, self.valid[:, :, k]
        kept = self.going_on.clamp(min=0)
        return _at(self.index, kept), _at(self.valid[:, :, k], kept) & (self.going_on >= 0)


def sampled(slots: Slots, share: float, seeds: Sequence[Sequence[int]]) -> Slots:
    """The same slots, of which each row carries a random ``share``, rounded up, past depth 0.

    One seed a row, so that the draw does not depend on what else is in the batch.
    """
    if share == 1:
        return slots
    alive = slots.valid[:, :, 0]
    drawn = np.stack([np.random.default_rng(seed).random(alive.shape[1]) for seed in seeds])
    order = torch.from_numpy(drawn).to(alive.device).masked_fill(~alive, 2.0).argsort(dim=1)
    wanted = torch.ceil(alive.sum(1, keepdim=True) * share).long()
    rank = torch.arange(order.shape[1], device=order.device)
    going_on = torch.where(rank < wanted, order, -1)[:, : max(int(wanted.max()), 1)]
    return replace(slots, going_on=going_on)


def trained_slots(loss_mask: Tensor, depths: int) -> Slots:
    """Chains whose fed and predicted tokens are all response tokens, from ``loss_mask`` [B, T] (0 beyond the end)."""
    fed, predicted = _shifted(loss_mask, 1), _shifted(loss_mask, 2)
    chains = [fed & predicted]
    for k in range(1, depths):
        chains.append(chains[-1] & _shifted(loss_mask, 2 + k))
    return gather_slots(torch.stack(chains, dim=-1))


def drafted_slots(loss_mask: Tensor, depths: int) -> Slots:
    """Chains an engine may draft: every fed token is a response token; the last may predict past the end."""
    chains = [_shifted(loss_mask, 1)]
    for k in range(1, depths):
        chains.append(chains[-1] & _shifted(loss_mask, 1 + k))
    return gather_slots(torch.stack(chains, dim=-1))


def _shifted(mask: Tensor, by: int) -> Tensor:
    """mask[:, t + by] at t, False past the end."""
    return F.pad(mask.bool(), (0, by))[:, by:]


def gather_slots(valid: Tensor) -> Slots:
    """From ``valid`` [B, T, K] over all positions to the slots alive at depth 0, left-packed row by row."""
    alive = valid[:, :, 0]
    width = max(int(alive.sum(1).max()), 1)
    order = torch.argsort(alive.int(), dim=1, descending=True, stable=True)[:, :width]
    kept = torch.gather(alive, 1, order)
    rows = torch.arange(valid.shape[0], device=valid.device)[:, None]
    return Slots(torch.where(kept, order, 0), valid[rows, order] & kept[:, :, None])


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [B, T, ...] at index [B, S] -> [B, S, ...]."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], index]


@dataclass(frozen=True)
class Play:
    """How chains are played. As it stands here is how drafters are trained and meant to be served; the rest is what
    engines and trainers have done instead, for ``variants`` to try.

    ``step``: how far the position advances with each depth. ``feedback``: hidden of a later depth: the slot's own state
    of the depth before, the target's (its hidden of depth 0), the state before that one, or zeros. ``cache``: depth-0
    keys that a slot sees, all up to its own or its own alone. ``window``: how many positions back it sees.
    """

    step: int = 1
    feedback: Literal["own", "target", "stale", "zeros"] = "own"
    cache: Literal["all", "own"] = "all"
    window: int | None = None

    def sees(self, positions: Tensor, at: Tensor) -> Tensor:
        """Which depth-0 keys [B, T] the slots at ``at`` [B, S] see: [B, 1, S, T]."""
        back = at[:, :, None] - positions[:, None]
        seen = back == 0 if self.cache == "own" else back >= 0
        return (seen if self.window is None else seen & (back < self.window))[:, None]

    def hidden(self, drafter: Drafter, first: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Of the next depth, from that of depth 0 and the states of all depths so far, each [B, S, H]."""
        if self.feedback == "target":
            return first
        if self.feedback == "zeros":
            return torch.zeros_like(first)
        if self.feedback == "stale":
            return drafter.feedback(states[-2]) if len(states) > 1 else first
        return drafter.feedback(states[-1])


TRAINED = Play()


def unroll(drafter: Drafter, taps: Tensor, input_ids: Tensor, slots: Slots, play: Play = TRAINED) -> Iterator[Tensor]:
    """States [B, S, H] of every slot carried, depth after depth. ``taps`` [B, T, C*D], ``input_ids`` [B, T].

    The last position has no next token: its slot pairs with a stand-in (its own token) that no valid slot can see.
    """
    B, T = input_ids.shape
    positions = torch.arange(T, device=input_ids.device).expand(B, T)
    following = torch.cat((input_ids[:, 1:], input_ids[:, -1:]), dim=1)

    layers = range(drafter.config.num_hidden_layers)
    shared: list[tuple[Tensor, Tensor]] = []
    fused = hidden = drafter.fuse(taps)
    for layer in layers:
        residual, mixed = drafter.enter(hidden, following, layer)
        shared.append(drafter.keys_values(mixed, positions, layer))
        if layer < layers[-1]:  # every position leaves keys in the next layer, so every position goes through this one
            causal = play.sees(positions, positions)  # [B, 1, T, T]
            attended = attend(drafter.queries(mixed, positions, layer), *shared[layer], causal)
            hidden = drafter.finish(residual, attended, layer)
    index = slots.index
    seen = play.sees(positions, index)  # [B, 1, S, T]
    queries = drafter.queries(_at(mixed, index), index, layers[-1])
    state = drafter.finish(_at(residual, index), _attend_own(queries, *shared[-1], seen, []), layers[-1])
    yield state

    if slots.going_on is not None:
        index, state = _at(index, slots.going_on.clamp(min=0)), _at(state, slots.going_on.clamp(min=0))
        seen = play.sees(positions, index)
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    first, states = _at(fused, index), [state]
    for k in range(1, slots.depths):
        fed = torch.gather(following, 1, (index + k).clamp(max=T - 1))
        hidden = play.hidden(drafter, first, states)
        position = index + k * play.step
        for layer in layers:
            residual, mixed = drafter.enter(hidden, fed, layer)
            own[layer].append(drafter.keys_values(mixed, position, layer))
            queries = drafter.queries(mixed, position, layer)
            hidden = drafter.finish(residual, _attend_own(queries, *shared[layer], seen, own[layer]), layer)
        states = [states[-1], hidden]
        yield hidden


def _attend_own(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over shared depth-0 keys [B, G, T, E] and each slot's own later keys [B, G, S, E]: one softmax."""
    if not own:
        return attend(q, keys, values, seen)
    B, N, S, E = q.shape
    G = keys.shape[1]
    grouped = q.view(B, G, N // G, S, E) * E**-0.5
    shared = torch.einsum("bgrse,bgte->bgrst", grouped, keys)
    shared = shared.masked_fill(~seen[:, :, None], float("-inf"))
    single = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat((shared, *single), dim=-1).softmax(-1)
    T = keys.shape[2]
    out = torch.einsum("bgrst,bgte->bgrse", weights[..., :T], values)
    for i, (_, v) in enumerate(own):
        out = out + weights[..., T + i, None] * v[:, :, None]
    return out.reshape(B, N, S, E)


def dense_unroll(drafter: Drafter, taps: Tensor, input_ids: Tensor, depths: int) -> list[Tensor]:
    """The oracle: every position at every depth [B, T, H], with one explicit mask over all keys so far."""
    B, T = input_ids.shape
    device = input_ids.device
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    diagonal = torch.eye(T, dtype=torch.bool, device=device)
    hidden = drafter.fuse(taps)
    keys: list[list[Tensor]] = [[] for _ in range(drafter.config.num_hidden_layers)]
    values: list[list[Tensor]] = [[] for _ in keys]
    states = []
    for k in range(depths):
        fed = input_ids[:, (torch.arange(T, device=device) + 1 + k).clamp(max=T - 1)]
        positions = torch.arange(T, device=device).expand(B, T) + k
        mask = torch.cat([causal] + [diagonal] * k, dim=1).expand(B, 1, T, T * (k + 1))
        for layer in range(len(keys)):
            residual, mixed = drafter.enter(hidden, fed, layer)
            for held, new in zip((keys, values), drafter.keys_values(mixed, positions, layer), strict=True):
                held[layer].append(new)
            queries = drafter.queries(mixed, positions, layer)
            attended = attend(queries, torch.cat(keys[layer], 2), torch.cat(values[layer], 2), mask)
            hidden = drafter.finish(residual, attended, layer)
        states.append(hidden)
        hidden = drafter.feedback(hidden)
    return states


@dataclass(frozen=True, eq=False)
class Teacher:
    """The target's word at the positions that label anything.

    ``row`` [B, T] row of a position in the tables (0 elsewhere), ``probabilities`` [P, W] on the draft vocabulary
    (softmax again after the restriction), ``truth`` [P] the greedy token over the whole vocabulary as a target id.
    """

    row: Tensor
    probabilities: Tensor
    truth: Tensor


@torch.no_grad()
def teach(target: Target, states: States, wanted: Tensor, drafter: Drafter, chunk: int = 512) -> Teacher:
    """Labels from what the target said, at ``wanted`` [B, T] positions."""
    normed, ids = states.last[wanted], drafter.vocab.ids.to(states.last.device)
    truth = truths(target, states, wanted, chunk)[wanted]
    parts = [target.logits(part, ids).float().softmax(-1) for part in torch.split(normed, chunk)]
    row = torch.zeros(wanted.shape, dtype=torch.int64, device=normed.device)
    row[wanted] = torch.arange(len(normed), device=normed.device)
    return Teacher(row, torch.cat(parts), truth)


def label_positions(slots: Slots, T: int) -> Tensor:
    """Which positions [B, T] label some valid slot: t + 1 + k."""
    wanted = torch.zeros(slots.index.shape[0], T, dtype=torch.bool, device=slots.index.device)
    for k in range(slots.depths):
        index, valid = slots.at(k)
        rows = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
        wanted[rows[valid], (index + 1 + k)[valid]] = True
    return wanted


@dataclass(frozen=True, eq=False)
class Loss:
    """Per depth, all [K]: ``sums`` of the cross entropy (to differentiate) over ``counts`` slots inside the draft
    vocabulary; ``hits`` among all ``slots``, where a truth outside it is a miss."""

    sums: Tensor
    counts: Tensor
    hits: Tensor
    slots: Tensor

    def mean(self, depth_weights: Sequence[float], counts: Tensor | None = None) -> Tensor:
        """Averaged per depth, weighted over depths. ``counts`` [K] are those of all parts of a batch that was split:
        the means of the parts then add up to the mean of the whole."""
        weights = self.sums.new_tensor(depth_weights)
        over = (self.counts if counts is None else counts).clamp(min=1)
        return (weights * self.sums / over).sum() / weights.sum()


def loss(drafter: Drafter, teacher: Teacher, taps: Tensor, input_ids: Tensor, slots: Slots) -> Loss:
    """Soft cross entropy against the target on the draft vocabulary, depth by depth.

    A slot whose true token lies outside the draft vocabulary has no fair label and is left out of the loss (EAGLE,
    SpecForge); it still counts as a miss in ``hits``.
    """
    T = input_ids.shape[1]
    draft_ids = drafter.vocab.draft_ids().to(input_ids.device)
    sums, counts, hits, totals = [], [], [], []
    for k, state in enumerate(unroll(drafter, taps, input_ids, slots)):
        index, picked = slots.at(k)
        rows = torch.gather(teacher.row, 1, (index + 1 + k).clamp(max=T - 1))[picked]  # [M]
        truth = draft_ids[teacher.truth[rows]]
        logits = drafter.logits(state[picked]).float()  # [M, W]
        inside = truth >= 0
        entropy = torch.logsumexp(logits, -1) - (teacher.probabilities[rows] * logits).sum(-1)
        sums.append((entropy * inside).sum())
        counts.append(inside.sum())
        hits.append((logits.detach().argmax(-1) == truth).sum())
        totals.append(picked.sum())
    return Loss(torch.stack(sums), torch.stack(counts), torch.stack(hits), torch.stack(totals))
