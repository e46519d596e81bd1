"""What a reading makes of a pool, and how two of them compare.

Letters: B batch, T positions, S slots, K depths, C taps, D target width, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas import objective
from eyas.results import LengthCounts
from eyas.states.stock import Stock, Tap
from eyas.target import Target
from eyas.variants.parts import Facts, Parts, build, play
from eyas.variants.pool import Pool

LIKELY = 2  # depths whose log probability counts; at deeper ones only slots that still hit are asked
BEHIND = (3.0, 1.0)  # standard errors over slots, after the first stage and after the next: what is 5 ahead on 4,000
# slots is 0.6 ahead on 64 and 1.2 on 250, give or take 1, in what it keeps and in how likely it finds the truth
HARDLY = 0.5  # standard errors over units, on a third of the slots: 5 on all would be 2.9 there, give or take 1
FINAL = "final"  # the target's last state after its norm, where a tap is asked for


@dataclass(frozen=True, eq=False)
class Score:
    """Of one reading on one pool, by slot [S]: ``kept`` of ``depths``, the mean ``log_probability`` over the first
    depths that count, ``unit``. ``said`` [S] is the target id said at depth 0."""

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


def behind(other: Score, base: Score, stage: int) -> bool:
    """Whether ``other`` keeps less and finds the truth less likely, so that it will hardly turn out better. Slots are
    what varies here, for it is too early to count records."""
    return _slot_z((other.kept - base.kept).astype(float)) < -_by(stage) and less_likely(other, base, stage)


def less_likely(other: Score, base: Score, stage: int) -> bool:
    return _slot_z(other.log_probability - base.log_probability) < -_by(stage)


def _by(stage: int) -> float:
    return BEHIND[min(stage, len(BEHIND) - 1)]


def no_better(other: Score, base: Score) -> bool:
    """Whether so little speaks for ``other`` on a part of the slots that all of them will hardly prove it better."""
    return z_of(other, base) < HARDLY and log_z_of(other, base) < HARDLY


def _slot_z(difference: np.ndarray) -> float:
    error = difference.std() / np.sqrt(max(len(difference), 1))
    return float(difference.mean() / error) if error else 99.0 * float(np.sign(difference.mean()))


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


# -- scoring -----------------------------------------------------------------------------------------------------------


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


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
            end = held[last].to(target.device, target.dtype)
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
            asked = torch.ones_like(on) if k < LIKELY else on & counts
            here = asked.to(device)
            log_p, said = _say(
                drafter.logits(state[alive][here]).float(), ids.to(device), rows.to(device), label[here], V
            )
            on[asked] &= (said == label[here]).cpu() & counts[asked]
            on &= asked
            kept += on
            if k < LIKELY:
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


class Scores:
    """Readings of some files, each scored once on each pool."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._known: dict[tuple[int, int, str], Score | None] = {}
        self._pools: dict[int, Pool] = {}  # held, so that no other gets its id

    def of(self, pool: Pool, facts: Facts, depths: int | None = None) -> Score | None:
        """As ``score``."""
        if pool.stages:
            got = [self.of(stage, facts, depths) for stage in pool.stages]
            known = [one for one in got if one is not None]
            return _joined(known) if len(known) == len(got) else None
        self._pools[id(pool)] = pool
        key = id(pool), depths or pool.depths, json.dumps(dict(facts), sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = score(pool, self.parts, facts, depths=depths)
        return self._known[key]

    def both(
        self, pool: Pool, facts: Facts, base: Facts, stages: int, depths: int | None = None
    ) -> tuple[Score, Score] | None:
        """Scores of ``facts`` and of ``base`` on the same slots, those of the first ``stages``."""
        pairs: list[tuple[Score, Score]] = []
        for stage in (pool.stages or (pool,))[:stages]:
            got, there = self.of(stage, facts, depths), self.of(stage, base, depths)
            if got is None or there is None:
                return None
            pairs.append((got, there))
        return _joined([a for a, _ in pairs]), _joined([b for _, b in pairs])

    def until(
        self,
        pool: Pool,
        facts: Facts,
        base: Facts,
        lost: Callable[[Score, Score, int], bool],
        depths: int | None = None,
    ) -> tuple[Score, Score] | None:
        """The same on all slots, or on so many stages as it takes until ``facts`` has ``lost`` (both, stage from 0)."""
        both = None
        for stages in range(1, len(pool.stages or (pool,)) + 1):
            both = self.both(pool, facts, base, stages, depths)
            if both is None or lost(*both, stages - 1):
                break
        return both


def _joined(scores: Sequence[Score]) -> Score:
    if len(scores) == 1:
        return scores[0]
    kept, log_p, unit, said = (
        np.concatenate([getattr(one, name) for one in scores]) for name in ("kept", "log_probability", "unit", "said")
    )
    return Score(scores[0].depths, kept, log_p, unit, said, scores[0].units)
