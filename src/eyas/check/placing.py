"""Which stored tensor is which tap: told by what it holds, never by its name alone.

Tap 0 is the embedding of the record's own tokens. Tap n is what the final norm and the head turn into the record's next
tokens; where the head alone does, it was stored after the norm and is no tap. A target that runs settles all others.
Without one, what is left is placed by its order among the ids of the config, which is a guess and is called one.

Letters: T positions, D target width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from eyas import objective, taps
from eyas.states.stock import Stock
from eyas.target import Target

RECORDS = 3  # looked at; all of a record's rows agree or none do
EMBEDDING = 0.02  # median relative error of rows that are the embedding: bf16 gives 0.002, fp8 0.02; another tap 0.5
SAYS = 0.96  # share of next tokens from which a tensor is the target's end; on its own greedy text 0.98 and more. The
# layer before it may give 0.93 (a tiny target of 12 layers), so only the best of all is taken.
SAME = 0.1  # median relative error to the recomputed tap; int4 targets give 0.07, the next layer 0.2 and more
Confidence = Literal["certain", "likely", "guess"]


@dataclass(frozen=True)
class Placed:
    field: str
    tap: int | None
    how: str
    confidence: Confidence

    def to_json(self) -> dict[str, Any]:
        return {"field": self.field, "tap": self.tap, "how": self.how, "confidence": self.confidence}


@dataclass(frozen=True)
class Placement:
    placed: tuple[Placed, ...]
    last: str | None = None
    """The field that is tap n."""
    notes: tuple[str, ...] = field(default=())

    @property
    def guessed(self) -> bool:
        return any(p.confidence == "guess" and p.tap is not None for p in self.placed)

    @property
    def mapping(self) -> dict[str, int]:
        return {p.field: p.tap for p in self.placed if p.tap is not None}


@torch.no_grad()
def place(stock: Stock, target: Target, readings: Sequence[Sequence[int]]) -> Placement:
    """``readings``: the taps that the config's ids may mean, likeliest first. ``target`` is run if it can be."""
    n = target.num_layers
    some = range(min(RECORDS, len(stock.records)))
    fields = [str(t) for t in stock.taps]
    found: dict[str, Placed] = {}
    notes: list[str] = []
    says: dict[str, tuple[int, int, int]] = {}
    live = None if target.ends_only else _recomputed(stock, target, some)
    for name in fields:
        rows = [stock.states(i, (name,)) for i in some]
        if live is not None and (by := _nearest(rows, live)) is not None:
            found[name] = Placed(name, by[0], f"recomputed, median relative error {by[1]:.4f}", "certain")
            continue
        if (error := _off_embedding(rows, stock, target, some)) < EMBEDDING:
            found[name] = Placed(name, 0, f"rows of the embedding, median relative error {error:.4f}", "certain")
            continue
        says[name] = _says(rows, stock, target, some)
    if says:
        name = max(says, key=lambda field: max(says[field][:2]))
        normed, plain, asked = says[name]
        told = f"{normed} of {asked} next tokens after norm and head, {plain} after the head alone"
        if asked and max(normed, plain) > SAYS * asked and normed >= plain:
            found[name] = Placed(name, n, told, "certain")
        elif asked and plain > SAYS * asked:
            found[name] = Placed(name, None, f"stored after the final norm: {told}", "certain")
            notes.append(f"{name} is the target's end after its final norm ({told}), which is no tap.")
    _by_order(found, fields, readings)
    placed = tuple(found.get(name, Placed(name, None, "nothing tells", "guess")) for name in fields)
    last = next((p.field for p in placed if p.tap == n), None)
    return Placement(placed, last, tuple(notes))


def _by_order(found: dict[str, Placed], fields: Sequence[str], readings: Sequence[Sequence[int]]) -> None:
    """What nothing else told, in the order it is stored: the ids of the config, if they are as many."""
    left = [name for name in fields if name not in found]
    known = {p.tap for p in found.values()}
    for reading in readings:
        rest = sorted(t for t in reading if t not in known)
        if left and len(rest) == len(left):
            found.update({name: Placed(name, tap, f"by order, of the configured taps {list(reading)}", "guess")
                          for name, tap in zip(left, rest, strict=True)})  # fmt: skip
            return


def _ids(stock: Stock, index: int) -> Tensor:
    return torch.from_numpy(stock.records[index].input_ids.astype(np.int64))


def _recomputed(stock: Stock, target: Target, some: Sequence[int]) -> list[Tensor]:
    """All taps of some records, each [T, n+1, D]."""
    made = []
    for index in some:
        ids = _ids(stock, index)[None]
        states = taps.run(target, ids, torch.tensor([ids.shape[1]]), range(target.num_layers + 1)).taps[0]
        made.append(states.reshape(ids.shape[1], target.num_layers + 1, -1).float().cpu())
    return made


def _nearest(rows: Sequence[Tensor], live: Sequence[Tensor]) -> tuple[int, float] | None:
    """The tap that the rows are, and how far off they are; None where they are like none."""
    count = live[0].shape[1]
    errors = []
    for tap in range(count):
        each = [_relative(own, made[:, tap]) for own, made in zip(rows, live, strict=True) if len(own) == len(made)]
        errors.append(float(torch.cat(each).median()) if each else float("inf"))
    best = int(np.argmin(errors))
    return (best, errors[best]) if errors[best] < SAME else None


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """By row. The median over rows is asked for: huge values at the first positions drown all else in a sum."""
    apart: Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)
    return apart


def _off_embedding(rows: Sequence[Tensor], stock: Stock, target: Target, some: Sequence[int]) -> float:
    """Median relative error against the embedding of the tokens, up to one factor (Gemma scales it)."""
    errors = []
    for index, own in zip(some, rows, strict=True):
        wanted = target.embedding[_ids(stock, index).to(target.device)].float().cpu()
        if len(wanted) == len(own):
            factor = (own.norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)).median()
            errors.append(_relative(own, factor * wanted))
    return float(torch.cat(errors).median()) if errors else float("inf")


def _says(rows: Sequence[Tensor], stock: Stock, target: Target, some: Sequence[int]) -> tuple[int, int, int]:
    """How many response tokens norm and head say, how many the head alone, and of how many."""
    normed = plain = asked = 0
    for index, own in zip(some, rows, strict=True):
        record = stock.records[index]
        at = torch.from_numpy(np.flatnonzero(record.loss_mask[1:]))
        wanted = _ids(stock, index)[at + 1]
        chosen = own[at].to(target.device)
        normed += int((objective.greedy(target, target.norm(chosen)).cpu() == wanted).sum())
        plain += int((objective.greedy(target, chosen).cpu() == wanted).sum())
        asked += len(at)
    return normed, plain, asked


def to_json(placement: Placement, form: str, samples: int, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "format": form,
        "samples": samples,
        "placed": [p.to_json() for p in placement.placed],
        "notes": [*notes, *placement.notes],
    }


def numbered(names: Mapping[str, int]) -> dict[str, int]:
    """Without fields that would take another's tap."""
    seen: dict[int, str] = {}
    for name, tap in names.items():
        seen.setdefault(tap, name)
    return {name: tap for tap, name in seen.items()}


__all__ = ["Placed", "Placement", "numbered", "place", "to_json"]
