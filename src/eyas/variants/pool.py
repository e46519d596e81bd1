"""Slots on which readings are compared, and what a reading makes of them.

Every reading is scored on the same slots, teacher-forced (see ``objective``): at depth k a slot at t is fed the text's
token t+1+k and must say the truth after it. ``kept`` of a slot is how many of its depths hit before the first miss:
what a round starting there would keep. The log probability of the truth says more with fewer slots, and says it of a
reading that never hits too, so it ranks; it does not decide, for it also moves with how sure a drafter is.

The truth is the target's greedy token where its last tap is at hand, else the text's own next token.

Intervals resample units. A unit is a record; where there are few records, a stretch of slots of one, since slots far
apart in a text are nearly as good as slots of other texts and the only other thing there is.

Letters: B batch, T positions, S slots, K depths, C taps, D target width, W draft vocabulary, U units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas import batches, objective, taps
from eyas.states.stock import Stock
from eyas.target import Target

FEW_RECORDS = 8
STRETCH = 32  # slots of a unit where records are few


@dataclass(frozen=True, eq=False)
class Chunk:
    """A batch of the pool: ``truth`` [B, T] target ids at labelled positions, -1 elsewhere; ``unit`` [B, S]."""

    batch: batches.Batch
    slots: objective.Slots
    truth: Tensor
    unit: Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    """``stages``, if any, are parts of it, in its order, on which what has lost already can be seen to have."""

    stock: Stock
    chunks: Sequence[Chunk]
    units: int
    depths: int
    stages: Sequence[Pool] = ()

    @property
    def slots(self) -> int:
        return sum(int(chunk.slots.valid[:, :, 0].sum()) for chunk in self.chunks)


# -- making pools -------------------------------------------------------------------------------------------------


def split(stock: Stock, depths: int, first: int, second: int, seed: int) -> tuple[dict[int, np.ndarray], ...]:
    """Which slots [T] of which records go into two pools of about ``first`` and ``second`` slots, without overlap:
    whole records where there are enough of them, else alternating stretches."""
    alive = {}
    for i, record in enumerate(stock.records):
        valid = objective.trained_slots(torch.from_numpy(record.loss_mask)[None], 1)
        marks = np.zeros(record.seq_len, dtype=bool)
        marks[valid.index[valid.valid[:, :, 0]].numpy()] = True
        alive[i] = marks
    order = np.random.default_rng(seed).permutation(len(alive)).tolist()
    if len([i for i in alive if alive[i].any()]) < 2 * FEW_RECORDS:
        return tuple(_stretches(alive, order, side, limit) for side, limit in ((0, first), (1, second)))
    a: dict[int, np.ndarray] = {}
    b: dict[int, np.ndarray] = {}
    counts = [0, 0]
    total = sum(int(m.sum()) for m in alive.values())
    first = min(first, total // 3)
    for i in order:
        side = 0 if counts[0] < first else 1
        if side and counts[1] >= second:
            break
        (a, b)[side][i] = alive[i]
        counts[side] += int(alive[i].sum())
    return a, b


def narrowed(chosen: Mapping[int, np.ndarray], slots: int) -> dict[int, np.ndarray]:
    """The first records of a choice, whole, until there are so many slots."""
    kept: dict[int, np.ndarray] = {}
    for i, marks in chosen.items():
        if sum(int(m.sum()) for m in kept.values()) >= slots:
            break
        kept[i] = marks
    return kept


def _stretches(alive: Mapping[int, np.ndarray], order: Sequence[int], side: int, limit: int) -> dict[int, np.ndarray]:
    chosen, count = {}, 0
    for i in order:
        at = np.flatnonzero(alive[i])
        mine = at[(np.arange(len(at)) // STRETCH) % 2 == side][: max(limit - count, 0)]
        count += len(mine)
        if len(mine):
            chosen[i] = np.isin(np.arange(len(alive[i])), mine)
    return chosen


def make(
    stock: Stock, truths: Truths, chosen: Mapping[int, np.ndarray], depths: int, stages: Sequence[int] = ()
) -> Pool:
    """``stages``: about how many slots each but the last part has. They are of whole records: one part where records
    are few."""
    by_record = len(chosen) >= FEW_RECORDS
    parts = _parted(chosen, stages) if by_record and stages else [chosen]
    made: list[tuple[list[Chunk], int]] = []
    for part in parts:
        made.append(_chunks(stock, truths, part, depths, by_record, made[-1][1] if made else 0))
    units = made[-1][1]
    pools = [Pool(stock, chunks, units, depths) for chunks, _ in made]
    if len(pools) == 1:
        return pools[0]
    return Pool(stock, [chunk for pool in pools for chunk in pool.chunks], units, depths, pools)


def _parted(chosen: Mapping[int, np.ndarray], stages: Sequence[int]) -> list[dict[int, np.ndarray]]:
    parts: list[dict[int, np.ndarray]] = [{}]
    slots = 0
    for i, marks in chosen.items():
        if len(parts) <= len(stages) and slots >= stages[len(parts) - 1]:
            parts.append({})
            slots = 0
        parts[-1][i] = marks
        slots += int(marks.sum())
    return parts


@torch.no_grad()
def _chunks(
    stock: Stock,
    truths: Truths,
    chosen: Mapping[int, np.ndarray],
    depths: int,
    by_record: bool,
    units: int,
    batch_size: int = 8,
) -> tuple[list[Chunk], int]:
    """The batches of ``chosen``, their units numbered from ``units``; and the number after the last."""
    records = stock.records
    order = sorted(chosen, key=lambda i: (records[i].seq_len, i))
    chunks: list[Chunk] = []
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        batch = batches.collate(records, some)
        T = batch.input_ids.shape[1]
        marks = torch.stack([torch.from_numpy(np.pad(chosen[i], (0, T - len(chosen[i])))) for i in some])
        all_slots = objective.trained_slots(batch.loss_mask, depths)
        valid = torch.zeros(len(some), T, depths, dtype=torch.bool)
        rows = torch.arange(len(some))[:, None].expand_as(all_slots.index)
        alive = all_slots.valid[:, :, 0]
        valid[rows[alive], all_slots.index[alive]] = all_slots.valid[alive]
        slots = objective.gather_slots(valid & marks[:, :, None])
        unit = torch.zeros_like(slots.index)
        for row in range(len(some)):
            n = int(slots.valid[row, :, 0].sum())
            unit[row, :n] = units + (torch.zeros(n, dtype=torch.int64) if by_record else torch.arange(n) // STRETCH)
            units += 1 if by_record else -(-n // STRETCH)
        known = pad_sequence([truths.of(i) for i in some], batch_first=True, padding_value=-1)
        truth = torch.where(objective.label_positions(slots, T), known, -1)
        chunks.append(Chunk(batch, slots, truth, unit))
    return chunks, units


class Truths:
    """What must be said after each position of a record, [T]: worked out once, for the head is the dearest part of a
    target that does not run."""

    def __init__(self, stock: Stock, target: Target) -> None:
        self._stock, self._target = stock, target
        self._known: dict[int, Tensor] = {}

    @torch.no_grad()
    def of(self, index: int) -> Tensor:
        """Target ids; -1 where nothing asks for them."""
        if index in self._known:
            return self._known[index]
        record = self._stock.records[index]
        ids = torch.from_numpy(record.input_ids.astype(np.int64))
        following = torch.cat((ids[1:], ids[-1:]))
        if (known := self._stock.truth(index)) is not None:
            following = known
        elif self._stock.last is not None:
            asked = taps.answered(record.loss_mask)
            last = self._stock.states(index, (self._stock.last,))[asked]
            last = last.to(self._target.device, self._target.dtype)
            following = torch.full_like(ids, -1)
            following[asked] = taps.greedy(self._target, self._target.norm(last)).cpu()
        self._known[index] = following
        return following
