"""Which tap each stored tensor is, told from its values.

Tap 0 is known by its rows, which are the embedding's of the record's tokens; tap n by what the head makes of it, which
is the record's next token; and where the target can run, every tap is known by computing it again. What is left is
placed by its order and the configured ids, and is no more than a guess. Places and claims in a file prove nothing.

Letters: T rows, S slots, D target width, V vocabulary, C tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eyas import taps
from eyas.compare import SHIFTS, TINY, row_order, tap_matrix
from eyas.records import Record
from eyas.states.embedded import embedding_rows
from eyas.states.stock import Stock, Tap
from eyas.target import Target

Confidence = Literal["certain", "likely", "guess"]
_RANK: Mapping[Confidence, int] = {"certain": 0, "likely": 1, "guess": 2}

LOOKED_AT = 8  # records of a stock
ROWS = 1024  # of each record, from its start, as a state needs no later one; whole records show another order
ALL_ROWS = 2048  # of all these records, one more record at most
RERUN_ROWS = 640  # of the records computed again, likewise
COMPARED = 256  # rows by which a tap is told
SLOTS = 240  # that the head is asked about
OPERATIONS = 4e12  # multiplications that asking the head may cost
# Relative distance of a stored tensor from the tap that it is, SmolLM2: bf16 0.0016, fp8 0.026, int4 0.17; from the
# nearest other tap 0.24 to 1.0, so 9 times as far in fp8 and 1.7 times in int4, which is then no more than likely.
SAME = 0.2
CLEAR = 2.0
EMBEDDED = 0.25  # relative error of rows against the embedding's, up to one factor: int4 0.13, other tokens 1.0
# Share of slots whose token the head gives, SmolLM2's own greedy text, 1,281 slots: tap n 0.998, stored after the norm
# 0.996; the tap below 0.59; tap n read the wrong way (norm twice, or not at all) 0.29.
# A layer that does little is nearer: tap 11 of 12 of the tests' target gives 0.981 where tap 12 gives 1.000.
AGREES = 0.99
ENOUGH = 50  # slots below which no share is believed
UNIT = 0.01  # by how much the RMS of a row after the final norm, its gain divided out, may miss one: bf16 0.002


@dataclass(frozen=True)
class Placed:
    """One tensor. ``shift`` = s: stored row t + s is of position t. ``error`` against the target run again, if so."""

    tap: int | None
    how: str
    confidence: Confidence
    shift: int = 0
    error: float | None = None


@dataclass(frozen=True)
class Placement:
    """``last`` is the tensor that is tap n; with ``post_norm`` it was stored after the final norm. ``shift`` is that
    of all tensors whose shift is known, 0 where they differ."""

    placed: Mapping[Tap, Placed]
    last: Tap | None
    post_norm: bool
    shift: int
    notes: tuple[str, ...] = ()
    rows: Rows | None = field(default=None, repr=False)
    live: Live | None = field(default=None, repr=False)
    """What it was told from: of the stock, and of the target where that ran."""

    @property
    def guessed(self) -> bool:
        return any(p.confidence == "guess" and p.tap is not None for p in self.placed.values())

    def to_json(self, form: str, notes: Sequence[str]) -> dict[str, Any]:
        placed = [
            {"field": str(name), "tap": p.tap, "how": p.how, "confidence": p.confidence}
            for name, p in self.placed.items()
        ]
        return {"format": form, "placed": placed, "shift": self.shift, "notes": [*notes, *self.notes]}

    def mapping(self, least: Confidence = "likely") -> dict[str, int]:
        """Taps by name, of the tensors placed at least so surely; each tap once, the surest first. Tap n stored after
        the final norm is left out: it is not the stream."""
        found: dict[str, int] = {}
        for name, p in sorted(self.placed.items(), key=lambda item: _RANK[item[1].confidence]):
            normed = self.post_norm and name == self.last
            if p.tap is not None and _RANK[p.confidence] <= _RANK[least] and p.tap not in found.values() and not normed:
                found[str(name)] = p.tap
        return found


def place(
    stock: Stock,
    target: Target,
    configured: Sequence[int] | None,
    live: bool,
    meant: Sequence[int] | None = None,
) -> Placement:
    """``configured`` are the ids of the drafter's config, counted in whichever way; ``meant`` the taps that they are
    to the engine asked about, if one is; ``live``: the target may run."""
    rows = Rows.of(stock)
    found: dict[Tap, Placed] = {
        tap: Placed(tap, "so the store says", "certain") for tap in stock.taps if isinstance(tap, int)
    }
    last, post_norm = stock.last, False
    notes: list[str] = []
    true = Live.of(rows, target) if live else None
    if true is not None:
        again, normed = by_running(rows, true, stock, target.num_layers)
        found |= again
        last = next((t for t, p in again.items() if p.tap == target.num_layers), last)
        last, post_norm = (normed, True) if normed is not None else (last, False)
    open_ = [tap for tap in stock.taps if tap not in found]
    embedded = by_embedding(rows, open_, target)
    found |= embedded
    if last is None:
        head = by_head(rows, [t for t in open_ if t not in embedded], target)
        found |= head.placed
        last, post_norm = head.last, head.post_norm
        notes += head.notes
    found |= by_order(stock, found, last, target.num_layers, meant or configured, (0,) if meant else (1, 0))
    shifts = {p.shift for p in found.values() if p.confidence == "certain"}
    if len(shifts) > 1:
        told = ", ".join(f"{t} by {p.shift}" for t, p in found.items() if p.confidence == "certain")
        notes.append(f"the tensors are not shifted alike: {told}")
    norms = ", ".join(f"{tap} {rows.norm(tap):.3g}" for tap in stock.taps)
    notes.append(f"median row norms: {norms}")
    ordered = {tap: found.get(tap, Placed(None, "nothing tells", "guess")) for tap in stock.taps}
    return Placement(ordered, last, post_norm, shifts.pop() if len(shifts) == 1 else 0, tuple(notes), rows, true)


@dataclass(frozen=True, eq=False)
class Rows:
    """The beginnings of some records of a stock; states [T, D] by record and tensor."""

    records: Sequence[Record]
    states: Sequence[Mapping[Tap, Tensor]]

    @staticmethod
    def of(stock: Stock, limit: int = LOOKED_AT) -> Rows:
        records = enough(stock.records[:limit], ALL_ROWS)
        states = []
        for i in range(len(records)):
            whole = stock.states(i, stock.taps)
            parts = torch.split(whole[:ROWS], whole.shape[1] // len(stock.taps), -1)
            states.append(dict(zip(stock.taps, parts, strict=True)))
        return Rows(records, states)

    def ids(self, index: int) -> Tensor:
        """[T] as far as there are states."""
        length = len(next(iter(self.states[index].values())))
        return torch.from_numpy(self.records[index].input_ids[:length].astype(np.int64))

    def norm(self, tap: Tap) -> float:
        return float(torch.cat([s[tap].norm(dim=-1) for s in self.states]).median())


def enough(records: Sequence[Record], rows: int) -> list[Record]:
    """The first of them that have so many rows together, two at least."""
    kept: list[Record] = []
    for record in records:
        if len(kept) > 1 and sum(min(r.seq_len, ROWS) for r in kept) >= rows:
            break
        kept.append(record)
    return kept


# -- tap 0 ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_embedding(rows: Rows, open_: Sequence[Tap], target: Target) -> dict[Tap, Placed]:
    """The tensor, if any, whose rows are the embedding's: in order, shifted, in another order, or of other tokens of
    these records. Rows times any one factor count: not all who store them scale as Gemma does."""
    pool = torch.unique(torch.cat([rows.ids(i) for i in range(len(rows.records))]))
    known = embedding_rows(target, pool)
    best: tuple[float, Tap, Placed] | None = None
    for tap in open_:
        held = torch.cat([s[tap] for s in rows.states])
        factor = _factor(held, known)
        if factor is None:
            continue
        at = [row_order(s[tap] / factor, embedding_rows(target, rows.ids(i))) for i, s in enumerate(rows.states)]
        error = _nearest_error(held / factor, known)
        if error > EMBEDDED or (best is not None and best[0] <= error):
            continue
        kinds = [(o.kind, o.shift) for o in at]
        kind, shift = max(set(kinds), key=kinds.count)
        agreed = f"{kinds.count((kind, shift))} of {len(kinds)} records"
        scaled = "" if abs(factor - 1) < 0.05 else f", times {factor:.3g}"
        how = {
            "home": f"its rows are the embedding's of the ids ({agreed}, error {error:.3f}{scaled})",
            "shifted": f"its rows are the embedding's of the ids, row t + {shift} of position t ({agreed}{scaled})",
            "permuted": f"its rows are the embedding's of the ids in another order ({agreed}{scaled})",
            "other": f"its rows are the embedding's of other tokens than the ids ({agreed}{scaled})",
        }[kind]
        best = error, tap, Placed(0, how, "certain", shift)
    return {best[1]: best[2]} if best else {}


def _factor(held: Tensor, known: Tensor) -> float | None:
    """The one number between rows [T, D] and the rows of ``known`` [V, D] that point most nearly their way."""
    norms = held.norm(dim=-1)
    held = held[torch.isfinite(norms) & (norms > 0)][:ROWS]
    if not len(held):
        return None
    length = held.norm(dim=-1)
    nearest = (held @ torch.nn.functional.normalize(known, dim=-1).T).argmax(1)
    return float((length / known[nearest].norm(dim=-1).clamp(min=TINY)).median()) or None


def _nearest_error(held: Tensor, known: Tensor) -> float:
    norms = held.norm(dim=-1)
    held = held[torch.isfinite(norms) & (norms > 0)]
    nearest = torch.cdist(held, known).min(1)
    return float((nearest.values / known[nearest.indices].norm(dim=-1).clamp(min=TINY)).median())


# -- tap n ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHead:
    placed: Mapping[Tap, Placed]
    last: Tap | None
    post_norm: bool
    notes: Sequence[str]


@dataclass
class Said:
    """Slots at which the head gives the record's next token, by tensor: [before the norm, after it], by shift."""

    slots: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SHIFTS, 0))
    agreed: dict[tuple[int, bool], int] = field(
        default_factory=lambda: {(s, normed): 0 for s in SHIFTS for normed in (False, True)}
    )

    def best(self) -> tuple[int, bool]:
        """The shift and whether it is stored after the norm; no shift where equal."""
        return max(self.agreed, key=lambda k: (self.share(*k), k[0] == 0))

    def share(self, shift: int, normed: bool) -> float:
        return self.agreed[shift, normed] / self.slots[shift] if self.slots[shift] else 0.0


@torch.no_grad()
def predictions(held: Tensor, target: Target, normed: bool) -> Tensor:
    """What the head makes of rows [S, D], stored before the final norm or (``normed``) after it: [S]."""
    held = held.nan_to_num().to(target.device, target.dtype)
    return target.logits(held if normed else target.norm(held)).argmax(-1).cpu()


def by_head(rows: Rows, open_: Sequence[Tap], target: Target) -> ByHead:
    said = {tap: Said() for tap in open_}
    cost = target.vocab_size * target.hidden_size * 2 * max(len(open_), 1)
    wanted = int(min(SLOTS, max(2 * ENOUGH, OPERATIONS / cost)))
    each = -(-wanted // max(len(rows.records), 1)) + 4
    for i, states in enumerate(rows.states):
        supervised = np.flatnonzero(rows.records[i].loss_mask[: len(rows.ids(i))])
        if not len(supervised):
            continue
        first = max(int(supervised[0]) - 1, 0)
        mask = torch.from_numpy(rows.records[i].loss_mask)
        for tap in open_:
            held = states[tap][first : first + each]
            for normed in (False, True):
                _count(said[tap], predictions(held, target, normed), rows.ids(i), mask, first, normed)
    return _concluded(said, rows, target)


def _count(said: Said, predicted: Tensor, ids: Tensor, mask: Tensor, first: int, normed: bool) -> None:
    """Row first + j is of position first + j - shift, so it foretells the id after that."""
    for shift in SHIFTS:
        at = torch.arange(first, first + len(predicted)) - shift + 1
        good = (at > 0) & (at < len(ids))
        good[good.clone()] &= mask[at[good]]
        said.agreed[shift, normed] += int((predicted[good] == ids[at[good]]).sum())
        said.slots[shift] += 0 if normed else int(good.sum())


def _concluded(said: Mapping[Tap, Said], rows: Rows, target: Target) -> ByHead:
    notes: list[str] = []
    best: tuple[float, Tap] | None = None
    for tap, s in said.items():
        shift, normed = s.best()
        share, slots = s.share(shift, normed), s.slots[shift]
        if share > 0.3:
            counts = f"{s.agreed[shift, False]} of {slots} through norm and head, {s.agreed[shift, True]} head alone"
            notes.append(f"{tap} gives the next token in {counts}")
        if slots >= ENOUGH and share >= AGREES and (best is None or share > best[0]):
            best = share, tap
    if best is None:
        return ByHead({}, None, False, notes)
    tap = best[1]
    shift, normed = said[tap].best()
    s, gain = said[tap], target.norm_gain.cpu()
    flat = torch.cat([x[tap] for x in rows.states]) / gain
    rms = float((flat.square().mean(-1).sqrt() - 1).abs().nan_to_num(nan=1.0).median())
    normed = normed or rms < UNIT
    how = (
        f"the head gives the record's next token in {s.agreed[shift, False]} of {s.slots[shift]} slots with the final "
        f"norm before it, {s.agreed[shift, True]} without"
        + (f"; row t + {shift} is of position t" if shift else "")
        + (f"; its rows have the length that the final norm gives (off by {rms:.2%})" if rms < UNIT else "")
    )
    return ByHead({tap: Placed(target.num_layers, how, "certain", shift)}, tap, normed, notes)


# -- all taps, by running the target ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Live:
    """Taps 0..n of the beginnings of some records, and the state after the final norm: [T, D] each."""

    taps: Sequence[Sequence[Tensor]]
    normed: Sequence[Tensor]

    @staticmethod
    @torch.no_grad()
    def of(rows: Rows, target: Target) -> Live:
        held, normed = [], []
        for i in range(len(enough(rows.records, RERUN_ROWS))):
            ids = rows.ids(i)[None]
            states = taps.run(target, ids, torch.tensor([ids.shape[1]]), range(target.num_layers + 1))
            held.append(torch.split(states.taps[0].float().cpu(), target.hidden_size, -1))
            normed.append(states.last[0].float().cpu())
        return Live(held, normed)


def by_running(rows: Rows, live: Live, stock: Stock, n: int) -> tuple[dict[Tap, Placed], Tap | None]:
    """What each tensor is of the taps computed again; and which one is tap n after the final norm."""
    found: dict[Tap, Placed] = {}
    normed = None
    for tap in stock.taps:
        errors = {0: _errors(rows, live, tap, 0)}
        if float(errors[0].min()) > SAME:
            errors |= {s: _errors(rows, live, tap, s) for s in SHIFTS if s}
        shift = min(errors, key=lambda s: float(errors[s].min()))
        at, margin = int(errors[shift].argmin()), _margin(errors[shift])
        error = float(errors[shift][at])
        if error > SAME:
            continue
        what = f"tap {at}" if at <= n else "tap n after the final norm"
        how = f"it is {what} as the target gives it (error {error:.3f}; the next nearest is {margin:.1f} times as far)"
        how += f", row t + {shift} of position t" if shift else ""
        confidence: Confidence = "certain" if margin >= CLEAR else "likely"
        found[tap] = Placed(min(at, n), how, confidence, shift, error)
        normed = tap if at > n else normed
    return found, normed


def _errors(rows: Rows, live: Live, tap: Tap, shift: int) -> Tensor:
    """Distance from each tap and from the normed state: [n + 2]."""
    stored, true = [], []
    for i, taps_of in enumerate(live.taps):
        held = rows.states[i][tap]
        T = len(held) - abs(shift)
        stored.append(held[max(shift, 0) :][:T])
        true.append([x[max(-shift, 0) :][:T] for x in (*taps_of, live.normed[i])])
    pooled = [torch.cat(parts) for parts in zip(*true, strict=True)]
    some = torch.linspace(0, len(pooled[0]) - 1, min(len(pooled[0]), COMPARED)).long()
    return tap_matrix([torch.cat(stored)[some]], [x[some] for x in pooled]).error[0]


def _margin(errors: Tensor) -> float:
    two = errors.sort().values[:2]
    return float(two[1] / two[0].clamp(min=TINY)) if len(two) == 2 else float("inf")


# -- the rest, by order -----------------------------------------------------------------------------------------


def by_order(
    stock: Stock,
    found: Mapping[Tap, Placed],
    last: Tap | None,
    n: int,
    configured: Sequence[int] | None,
    ways: Sequence[int] = (1, 0),
) -> dict[Tap, Placed]:
    """The configured ids, in order, for as many tensors in a row: id k as tap k or as tap k + 1, whichever agrees with
    the tensors that are known. Where both do it is a guess at k + 1, as SGLang and vLLM count."""
    left = [tap for tap in stock.taps if tap not in found]
    if not left or not configured:
        return {}
    ids = sorted(configured)
    candidates = [[t for t in stock.taps if t != last], list(stock.taps), left]
    for tensors in candidates:
        fits = [plus for plus in ways if len(tensors) == len(ids) and _fits(tensors, ids, plus, found, n)]
        if not fits:
            continue
        anchored = any(t in found for t in tensors) and len(fits) == 1
        confidence: Confidence = "likely" if anchored else "guess"
        plus = fits[0]
        counted = " or ".join(f"id + {p}" if p else "id" for p in fits)
        how = f"by its order and the configured ids {list(configured)}, read as tap = {counted}"
        return {t: Placed(k + plus, how, confidence) for t, k in zip(tensors, ids, strict=True) if t in left}
    return {}


def _fits(tensors: Sequence[Tap], ids: Sequence[int], plus: int, found: Mapping[Tap, Placed], n: int) -> bool:
    numbers = [k + plus for k in ids]
    taken = {p.tap for t, p in found.items() if t not in tensors}
    agree = all(found[t].tap == k for t, k in zip(tensors, numbers, strict=True) if t in found)
    return agree and all(0 <= k <= n and k not in taken for k in numbers)
