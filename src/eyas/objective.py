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

Letters: B batch, T positions, S slots, K depths, H drafter width, W draft vocabulary, V target vocabulary, M picked
slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter import Drafter, attend
from eyas.target import Target


@dataclass(frozen=True, eq=False)
class Slots:
    """Chains of one batch: ``index`` [B, S] their position t (0 if padded), ``valid`` [B, S, K] where each counts."""

    index: Tensor
    valid: Tensor

    @property
    def depths(self) -> int:
        return self.valid.shape[2]


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


def unroll(drafter: Drafter, taps: Tensor, input_ids: Tensor, slots: Slots) -> Iterator[Tensor]:
    """States [B, S, H] of every slot, depth after depth. ``taps`` [B, T, C*D], ``input_ids`` [B, T].

    The last position has no next token: its slot pairs with a stand-in (its own token) that no valid slot can see.
    """
    B, T = input_ids.shape
    index = slots.index
    positions = torch.arange(T, device=input_ids.device).expand(B, T)
    following = torch.cat((input_ids[:, 1:], input_ids[:, -1:]), dim=1)

    layers = range(drafter.config.num_hidden_layers)
    shared: list[tuple[Tensor, Tensor]] = []
    hidden = drafter.fuse(taps)
    for layer in layers:
        residual, mixed = drafter.enter(hidden, following, layer)
        shared.append(drafter.keys_values(mixed, positions, layer))
        if layer < layers[-1]:  # every position leaves keys in the next layer, so every position goes through this one
            causal = (positions[:, None] <= positions[:, :, None])[:, None]  # [B, 1, T, T]
            attended = attend(drafter.queries(mixed, positions, layer), *shared[layer], causal)
            hidden = drafter.finish(residual, attended, layer)
    seen = (positions[:, None] <= index[:, :, None])[:, None]  # [B, 1, S, T]
    queries = drafter.queries(_at(mixed, index), index, layers[-1])
    state = drafter.finish(_at(residual, index), _attend_own(queries, *shared[-1], seen, []), layers[-1])
    yield state

    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for k in range(1, slots.depths):
        fed = torch.gather(following, 1, (index + k).clamp(max=T - 1))
        hidden = drafter.feedback(state)
        for layer in layers:
            residual, mixed = drafter.enter(hidden, fed, layer)
            own[layer].append(drafter.keys_values(mixed, index + k, layer))
            queries = drafter.queries(mixed, index + k, layer)
            hidden = drafter.finish(residual, _attend_own(queries, *shared[layer], seen, own[layer]), layer)
        state = hidden
        yield state


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
def teach(target: Target, last: Tensor, wanted: Tensor, drafter: Drafter, chunk: int = 512) -> Teacher:
    """Labels from final-normed states ``last`` [B, T, D] at ``wanted`` [B, T] positions."""
    states = last[wanted]
    ids = drafter.vocab.ids.to(last.device)
    truths, probabilities = [], []
    for part in torch.split(states, chunk):
        full = target.logits(part).float()
        truths.append(full.argmax(-1))
        probabilities.append(full[:, ids].softmax(-1))
    row = torch.zeros(wanted.shape, dtype=torch.int64, device=last.device)
    row[wanted] = torch.arange(len(states), device=last.device)
    empty = last.new_zeros(0, len(ids))
    return Teacher(
        row,
        torch.cat(probabilities) if probabilities else empty,
        torch.cat(truths) if truths else row.new_zeros(0),
    )


def label_positions(slots: Slots, T: int) -> Tensor:
    """Which positions [B, T] label some valid slot: t + 1 + k."""
    wanted = torch.zeros(slots.index.shape[0], T, dtype=torch.bool, device=slots.index.device)
    rows = torch.arange(slots.index.shape[0], device=slots.index.device)[:, None].expand_as(slots.index)
    for k in range(slots.depths):
        valid = slots.valid[:, :, k]
        wanted[rows[valid], (slots.index + 1 + k)[valid]] = True
    return wanted


@dataclass(frozen=True, eq=False)
class Loss:
    """``value`` to differentiate; per depth: summed cross entropy, slots in it, hits and slots (misses outside the
    draft vocabulary included), all [K]."""

    value: Tensor
    sums: Tensor
    counts: Tensor
    hits: Tensor
    slots: Tensor


def loss(
    drafter: Drafter,
    teacher: Teacher,
    taps: Tensor,
    input_ids: Tensor,
    slots: Slots,
    depth_weights: list[float],
) -> Loss:
    """Soft cross entropy against the target on the draft vocabulary, averaged per depth, weighted over depths.

    A slot whose true token lies outside the draft vocabulary has no fair label and is left out of the loss (EAGLE,
    SpecForge); it still counts as a miss in ``hits``.
    """
    T = input_ids.shape[1]
    draft_ids = drafter.vocab.draft_ids().to(input_ids.device)
    value = taps.new_zeros(())
    sums, counts, hits, totals = [], [], [], []
    for k, state in enumerate(unroll(drafter, taps, input_ids, slots)):
        picked = slots.valid[:, :, k]
        rows = torch.gather(teacher.row, 1, (slots.index + 1 + k).clamp(max=T - 1))[picked]  # [M]
        truth = draft_ids[teacher.truth[rows]]
        logits = drafter.logits(state[picked]).float()  # [M, W]
        inside = truth >= 0
        entropy = torch.logsumexp(logits, -1) - (teacher.probabilities[rows] * logits).sum(-1)
        summed, count = (entropy * inside).sum(), inside.sum()
        value = value + depth_weights[k] * summed / count.clamp(min=1)
        sums.append(summed.detach())
        counts.append(count)
        hits.append((logits.detach().argmax(-1) == truth).sum())
        totals.append(picked.sum())
    stack = torch.stack
    return Loss(value / sum(depth_weights), stack(sums), stack(counts), stack(hits), stack(totals))
