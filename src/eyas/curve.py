"""How often a drafter is right, depth by depth, and the accept length that follows. Sole owner of both.

Teacher-forced: every supervised slot; depth k is fed the record's tokens and the drafter's own states.

Walk: rounds as an engine plays them over the record's own text. With x[p] committed and the target's states known up
to p-1, the round drafts from slot t = p-1, keeps its leading matches a, takes the target's own next token, and goes on
at p + a + 1:

    x:      … x[p]  x[p+1] x[p+2] x[p+3] …
    slot p-1:  fed ▲  d0     d1     d2       d0, d1 match, d2 does not:  a = 2, next p is p + 3

Every draft cache is rebuilt from target states, so the chain of a slot depends on nothing but the slot: all chains are
unrolled at once and a walk only jumps between them. And while a chain's own tokens match the text it is fed the very
tokens of the text, so its run of leading matches is that of the teacher-forced chain; one unroll serves both. The
naive walk, which drafts token by token, is the oracle of the tests (``decode``).

Letters: B batch, T positions, S slots, K depths, R records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from eyas import batches, objective, taps
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.results import CurveCounts, LengthCounts
from eyas.target import Target

Truth = Literal["target", "record"]
ON_POLICY = 0.98  # a walk replays the target's own text; below this share of agreement it would replay another's


@dataclass(frozen=True, eq=False)
class SlotTable:
    """One record's S slots, for what pairs drafters or slices text.

    ``position`` [S] int32 of the slot, rising: its chain predicts the tokens from position + 2; ``truth`` [S] int32 the
    first of them in the target's vocabulary; ``covered`` [S] whether the draft vocabulary has it; ``lead`` [S] int8
    leading matches of a round there; ``scored`` [S, K] chains that teacher-forced counts take, ``hits`` [S, K].
    """

    position: np.ndarray
    truth: np.ndarray
    covered: np.ndarray
    lead: np.ndarray
    scored: np.ndarray
    hits: np.ndarray


@dataclass(frozen=True, eq=False)
class Measured:
    """Curves of one drafter on some records. ``agreement`` counts slots whose record token is the truth; ``tables``
    are the slots of every record."""

    teacher_forced: CurveCounts
    walk: CurveCounts | None
    lengths: list[LengthCounts]
    agreement: tuple[int, int]
    tables: Sequence[SlotTable] = ()

    @property
    def on_policy(self) -> bool:
        agreed, slots = self.agreement
        return slots > 0 and agreed / slots >= ON_POLICY


@dataclass(frozen=True, eq=False)
class Chains:
    """One record's chains by position: ``lead`` [T] leading matches (-1 where no chain starts), and its counts."""

    lead: np.ndarray
    n: np.ndarray  # [K] chains valid through depth k, teacher-forced
    prev: np.ndarray  # [K]
    joint: np.ndarray  # [K]
    slots: int
    covered: int
    agreed: int
    compared: int
    table: SlotTable


@torch.no_grad()
def measure(
    drafter: Drafter,
    target: Target,
    records: Sequence[Record],
    *,
    depths: int,
    batch_size: int = 8,
    run: taps.Run = taps.run,
    play: objective.Play = objective.TRAINED,
    truth: Truth = "target",
    progress: Callable[[int], None] = lambda done: None,
) -> Measured:
    """Run the target over the records and the drafter over its taps; ``progress`` hears the records done so far.

    ``run`` gives the states: the target's own pass, or a store's.
    """
    chains: dict[int, Chains] = {}
    for batch in batches.in_order(records, batch_size):
        batch = batch.to(drafter.device)
        states = run(target, batch.input_ids, batch.lengths, drafter.config.taps)
        chains.update(_chains(drafter, target, states, batch, depths, play))
        progress(len(chains))
    return summarise([chains[i] for i in range(len(records))], records, depths, truth)


def _chains(
    drafter: Drafter,
    target: Target,
    states: taps.States,
    batch: batches.Batch,
    depths: int,
    play: objective.Play,
) -> dict[int, Chains]:
    ids, mask = batch.input_ids, batch.loss_mask
    T = ids.shape[1]
    slots = objective.drafted_slots(mask, depths)
    truth = taps.truths(target, states, objective.label_positions(slots, T))
    inside = drafter.vocab.draft_ids().to(ids.device) >= 0

    hits, right = [], []
    for k, state in enumerate(objective.unroll(drafter, states.taps, ids, slots, play)):
        at = (slots.index + 1 + k).clamp(max=T - 1)
        label = torch.gather(truth, 1, at)
        said = torch.full_like(label, -1)
        valid = slots.valid[:, :, k]
        said[valid] = drafter.to_target_ids(drafter.logits(state[valid]).argmax(-1))
        hits.append((said == label) & valid)
        following = torch.gather(ids, 1, (at + 1).clamp(max=T - 1))
        ended = at + 1 >= batch.lengths[:, None]
        right.append((label == following) | ended)
    hit, on_text = torch.stack(hits, -1), torch.stack(right, -1)  # [B, S, K]

    return {index: _one(row, hit, on_text, slots, mask, truth, inside, ids) for row, index in enumerate(batch.index)}


def _one(
    row: int,
    hit: Tensor,
    on_text: Tensor,
    slots: objective.Slots,
    mask: Tensor,
    truth: Tensor,
    inside: Tensor,
    ids: Tensor,
) -> Chains:
    """Counts of one record out of its batch's [B, S, K] tables."""
    valid = slots.valid[row]
    alive = valid[:, 0]
    index, hits, valid = slots.index[row][alive], hit[row][alive], valid[alive]
    K, T = hits.shape[1], mask.shape[1]

    # A match carries on to the next depth only if the text itself took that token.
    carried = (hits & on_text[row][alive]).int().cumprod(1)
    before = torch.cat((torch.ones_like(carried[:, :1]), carried[:, :-1]), 1).bool()
    lead = np.full(T, -1, dtype=np.int64)
    led = (hits & before).sum(1).cpu().numpy()
    lead[index.cpu().numpy()] = led

    # Teacher-forced counts ask that the predicted token is a response token too.
    at = index[:, None] + 2 + torch.arange(K, device=index.device)
    predicted = torch.where(at < T, mask[row][at.clamp(max=T - 1)], False)
    scored = valid & predicted
    run = torch.cat((torch.ones_like(hits[:, :1]), hits[:, :-1].int().cumprod(1).bool()), 1)
    first = truth[row][(index + 1).clamp(max=T - 1)]
    labels = first[scored[:, 0]]
    table = SlotTable(
        position=index.int().cpu().numpy(),
        truth=first.int().cpu().numpy(),
        covered=inside[first].cpu().numpy(),
        lead=led.astype(np.int8),
        scored=scored.cpu().numpy(),
        hits=hits.cpu().numpy(),
    )
    spoken = ids[row][(index + 2).clamp(max=T - 1)][scored[:, 0]]
    return Chains(
        lead=lead,
        n=scored.sum(0).cpu().numpy(),
        prev=(scored & run).sum(0).cpu().numpy(),
        joint=(scored & run & hits).sum(0).cpu().numpy(),
        slots=len(labels),
        covered=int(inside[labels].sum()),
        agreed=int((labels == spoken).sum()),
        compared=len(labels),
        table=table,
    )


def summarise(chains: Sequence[Chains], records: Sequence[Record], depths: int, truth: Truth = "target") -> Measured:
    """Counts of every record, and the walks of 1..depths drafted tokens where the text is the target's own."""
    agreement = (sum(c.agreed for c in chains), sum(c.compared for c in chains))
    slots, covered = (np.array([getattr(c, name) for c in chains]) for name in ("slots", "covered"))
    counts = (np.stack([getattr(c, name) for c in chains]) for name in ("n", "prev", "joint"))
    forced = CurveCounts(truth, slots, covered, *counts)
    tables = [c.table for c in chains]
    measured = Measured(forced, None, [], agreement, tables)
    if not measured.on_policy:
        return measured

    lengths = []
    for k in range(1, depths + 1):
        walks = [walk(c.lead, r.spans(), k) for c, r in zip(chains, records, strict=True)]
        rounds = np.array([w.sum() for w in walks])
        accepted = np.array([int((w * np.arange(k + 1)).sum()) for w in walks])
        lengths.append(LengthCounts(k, rounds, accepted))
    kept = np.stack([w[::-1].cumsum()[::-1] for w in walks])  # rounds that kept at least k, [R, K+1]
    rounds = np.repeat(kept[:, :1], depths, axis=1)
    curve = CurveCounts(truth, slots, covered, rounds, kept[:, :-1], kept[:, 1:])
    return Measured(forced, curve, lengths, agreement, tables)


def walk(lead: np.ndarray, spans: Sequence[tuple[int, int]], draft_tokens: int) -> np.ndarray:
    """Rounds by how many drafted tokens they kept, [draft_tokens + 1], over one record.

    ``lead`` [T] leading matches of the chain at each slot; ``spans`` (first, last) response positions. The first
    response token comes from prefill and belongs to no round; a round cut by the end of the text counts whole.
    """
    histogram = np.zeros(draft_tokens + 1, dtype=np.int64)
    for first, last in spans:
        committed = first
        while committed < last:
            kept = min(int(lead[committed - 1]), draft_tokens) if committed else 0
            histogram[max(kept, 0)] += 1
            committed += kept + 1
    return histogram
