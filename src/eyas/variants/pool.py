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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas import batches, objective
from eyas.results import LengthCounts
from eyas.states.stock import Stock, Tap
from eyas.target import Target
from eyas.variants.parts import Facts, Parts, build, play

FEW_RECORDS = 8
STRETCH = 32  # slots of a unit where records are few
FINAL = "final"  # the target's last state after its norm, where a tap is asked for


@dataclass(frozen=True, eq=False)
class Chunk:
    """A batch of the pool: ``truth`` [B, T] target ids at labelled positions, -1 elsewhere; ``unit`` [B, S]."""

    batch: batches.Batch
    slots: objective.Slots
    truth: Tensor
    unit: Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    stock: Stock
    chunks: Sequence[Chunk]
    units: int
    depths: int

    @property
    def slots(self) -> int:
        return sum(int(chunk.slots.valid[:, :, 0].sum()) for chunk in self.chunks)


@dataclass(frozen=True, eq=False)
class Score:
    """Of one reading on one pool, by slot [S]: ``kept`` of ``depths``, the mean ``log_probability`` over the depths
    that count, ``unit``. ``said`` [S] is the target id said at depth 0."""

    depths: int
    kept: np.ndarray
    log_probability: np.ndarray
    unit: np.ndarray
    said: np.ndarray
    units: int

    def lengths(self) -> LengthCounts:
        """As accept lengths of rounds that start at every slot: what intervals are taken from."""
        rounds = np.bincount(self.unit, minlength=self.units)
        return LengthCounts(self.depths, rounds, np.bincount(self.unit, self.kept, self.units).astype(np.int64))

    @property
    def kept_per_slot(self) -> float:
        return float(self.kept.mean()) if len(self.kept) else 0.0

    @property
    def log_p(self) -> float:
        return float(self.log_probability.mean()) if len(self.kept) else 0.0


def z_of(better: Score, base: Score) -> float:
    """How many standard errors the paired difference of ``kept`` is from zero, units being what varies."""
    return _z((better.kept - base.kept).astype(float), base)


def log_z_of(better: Score, base: Score) -> float:
    """The same of the log probability of the truth."""
    assert better.depths == base.depths
    return _z(better.log_probability - base.log_probability, base)


def _z(difference: np.ndarray, base: Score) -> float:
    n = np.bincount(base.unit, minlength=base.units).astype(float)
    d = np.bincount(base.unit, difference, base.units)
    there = n > 0
    n, d = n[there], d[there]
    if len(n) < 2:
        return 0.0
    mean = d.sum() / n.sum()
    error = np.sqrt(((d - mean * n) ** 2).sum() * len(n) / (len(n) - 1)) / n.sum()
    if error == 0:
        return 99.0 * float(np.sign(mean))
    return float(mean / error)


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


@torch.no_grad()
def make(stock: Stock, truths: Truths, chosen: Mapping[int, np.ndarray], depths: int, batch_size: int = 8) -> Pool:
    records = stock.records
    by_record = len(chosen) >= FEW_RECORDS
    order = sorted(chosen, key=lambda i: (records[i].seq_len, i))
    chunks: list[Chunk] = []
    units = 0
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
    return Pool(stock, chunks, units, depths)


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
        if self._stock.last is not None:
            asked = torch.from_numpy(record.loss_mask.copy())
            asked[:-1] |= asked[1:].clone()  # the position before a response token is asked for it
            last = self._stock.states(index, (self._stock.last,))[asked]
            last = last.to(self._target.device, self._target.head_weight.dtype)
            following = torch.full_like(ids, -1)
            following[asked] = objective.greedy(self._target, self._target.norm(last)).cpu()
        self._known[index] = following
        return following


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


# -- scoring ------------------------------------------------------------------------------------------------------


def tapped(stock: Stock, target: Target, index: int, facts: Facts) -> Tensor:
    """The states [T, C*D] of a record as ``facts`` feed them."""
    known = needed(facts, stock.last)
    held = dict(zip(known, torch.split(stock.states(index, known), target.hidden_size, -1), strict=True))
    return arranged(held, target, facts, stock.last, stock.records[index].seq_len)


def needed(facts: Facts, last: Tap | None) -> tuple[Tap, ...]:
    """The taps that ``facts`` feed, each once."""
    asked = [last if t == FINAL else t for t in facts["taps"] if t is not None]
    return tuple(dict.fromkeys(t for t in asked if t is not None))


def arranged(held: Mapping[Tap, Tensor], target: Target, facts: Facts, last: Tap | None, T: int) -> Tensor:
    """``held`` taps [..., T, D] in the slots of fc, [..., T, C*D]. None in a slot feeds zeros; ``FINAL`` the target's
    last state after its norm. With a token shift s, slot t has the states of position t+1-s."""
    like = next(iter(held.values()))
    blocks = []
    for t in facts["taps"]:
        if t is None:
            blocks.append(torch.zeros_like(like))
        elif t == FINAL:
            assert last is not None
            end = held[last].to(target.device, target.head_weight.dtype)
            blocks.append(target.norm(end).to(like.device, like.dtype))
        else:
            blocks.append(held[t])
    states = torch.cat(blocks, -1).float()  # a drafter runs in fp32 whatever its target does
    late = facts.get("token_shift", 1) - 1
    return states if late == 0 else states[..., (torch.arange(T, device=states.device) - late).clamp(0, T - 1), :]


@torch.no_grad()
def score(
    pool: Pool, parts: Parts, facts: Facts, *, depths: int | None = None, heard: Callable[[], None] = lambda: None
) -> Score | None:
    """``facts`` on ``pool``, to ``depths``; None where these files or states cannot be read so."""
    if not set(needed(facts, pool.stock.last)) <= set(pool.stock.taps):
        return None
    if not pool.slots:
        return None
    drafter = build(parts, facts)
    if drafter is None:
        return None
    K = depths or pool.depths
    ids = parts.maps[facts["vocab_map"]]
    V = parts.target.vocab_size
    rows = torch.full((V,), -1, dtype=torch.int64)
    fits = (ids >= 0) & (ids < V)
    rows[ids[fits]] = torch.arange(len(ids))[fits]
    device, how = parts.target.device, play(facts)
    columns: list[list[Tensor]] = [[], [], [], []]
    for chunk in pool.chunks:
        states = _padded([tapped(pool.stock, parts.target, i, facts) for i in chunk.batch.index]).to(device)
        tokens, truth = chunk.batch.input_ids.to(device), chunk.truth.to(device)
        slots = objective.Slots(chunk.slots.index.to(device), chunk.slots.valid[:, :, :K].to(device))
        T = tokens.shape[1]
        alive = slots.valid[:, :, 0]
        kept = torch.zeros(int(alive.sum()), dtype=torch.int64)
        on = torch.ones_like(kept, dtype=torch.bool)
        total, n = torch.zeros(len(kept)), torch.zeros(len(kept))
        for k, state in enumerate(objective.unroll(drafter, states, tokens, slots, how)):
            label = torch.gather(truth, 1, (slots.index + 1 + k).clamp(max=T - 1))[alive]
            counts = slots.valid[:, :, k][alive].cpu()
            log_p, said = _say(drafter.logits(state[alive]).float(), ids.to(device), rows.to(device), label, V)
            on &= (said == label).cpu() & counts
            kept += on
            total += torch.where(counts, log_p.cpu(), 0.0)
            n += counts
            if k == 0:
                columns[3].append(said.cpu())
        columns[0].append(kept)
        columns[1].append(total / n.clamp(min=1))
        columns[2].append(chunk.unit[chunk.slots.valid[:, :, 0]])
        heard()
    kept_, log_, unit, first = (torch.cat(c).numpy() for c in columns)
    return Score(K, kept_, log_, unit, first, pool.units)


def _say(logits: Tensor, ids: Tensor, rows: Tensor, label: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """Log probability of the label, a flat one where no draft id means it, and the target id said: both [S]."""
    row = rows[label.clamp(min=0)]
    chosen = torch.gather(logits, 1, row.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
    log_p = torch.where(row >= 0, chosen, torch.full_like(chosen, -float(np.log(V))))
    return log_p, ids[logits.argmax(-1)]
