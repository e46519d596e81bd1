"""What the drafter's layer gave for what it was fed, and what else would have given it.

A reading of the files that differs in one fact gives other states; the one whose states are the engine's to the last
digits is what the engine runs. No statistics are needed: the right reading is off by rounding, the next by a thousand
times as much.

Letters: K depths, H drafter width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.diagnose.inputs import AHEAD, Status, _short
from eyas.diagnose.reference import Reference
from eyas.diagnose.replay import Replay
from eyas.diagnose.served import Served
from eyas.variants import Facts, build, table

FEW_TEXTS, FEW_ROUNDS = 2, 6  # what a candidate is first looked at on
MANY_TEXTS, MANY_ROUNDS = 8, 40
STACKED = 3  # facts that may be wrong in the layer at once
BETTER = 0.7  # of the error that a step of the search must leave at most
TRIED = ("embedding", "residual", "residual_kept", "norm_gain", "rope", "rope_layout", "window")


@dataclass(frozen=True, eq=False)
class States:
    """Mean relative error of the states by depth, ``errors`` [K]; ``matched``: the facts that make it vanish, with
    the error they leave, and ``rivals`` that leave as little."""

    status: Status
    errors: list[float]
    n: int
    matched: dict[str, Any] = field(default_factory=dict)
    matched_errors: list[float] | None = None
    rivals: list[dict[str, Any]] = field(default_factory=list)
    tried: int = 0
    nearest: tuple[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "depths": [{"depth": k, "error": _short(e), "n": self.n} for k, e in enumerate(self.errors)],
            "matched": {
                "facts": self.matched,
                "name": table.name_of(self.matched),
                "error": _short(max(self.matched_errors)),
            }
            if self.matched and self.matched_errors
            else None,
            "rivals": [table.name_of(r) for r in self.rivals],
            "tried": self.tried,
            "nearest": None if self.nearest is None else {"name": self.nearest[0], "error": _short(self.nearest[1])},
        }


def states(
    reference: Reference, fed: Mapping[str, Any], heard: Callable[[str], None] = lambda what: None
) -> States | None:
    """``fed``: what the feedback was seen to be, which says in which form the engine's states were recorded."""
    if not any(r.turn.fused is not None for t in reference.texts for r in t.rounds):
        return None
    found = _errors(reference, {}, fed, _many(reference))
    if found is None:
        return None
    errors, n = found
    if max(errors) <= reference.near:
        return States("equal", errors, n)
    return _search(reference, errors, n, fed, heard)


def _search(
    reference: Reference, errors: list[float], n: int, fed: Mapping[str, Any], heard: Callable[[str], None]
) -> States:
    """One fact at a time, the best kept, until the states are the engine's or nothing helps."""
    where = _where(reference, fed)
    here = _errors(reference, {}, fed, where)
    assert here is not None
    at: dict[str, Any] = {}
    left = max(here[0])
    tried = 0
    nearest: tuple[str, float] | None = None
    rivals: list[dict[str, Any]] = []
    for _ in range(STACKED):
        scored: list[tuple[float, dict[str, Any]]] = []
        for change in _changes(reference, at):
            heard(table.name_of(change))
            got = _errors(reference, {**at, **change}, fed, where)
            tried += 1
            if got is not None:
                scored.append((max(got[0]), change))
        if not scored:
            break
        far, change = min(scored, key=lambda pair: pair[0])
        nearest = (table.name_of({**at, **change}), far)
        if far > BETTER * left:
            break
        rivals = [c for e, c in scored if c is not change and e <= reference.near and e <= AHEAD * far]
        at, left = {**at, **change}, far
        if left <= reference.near:
            break
    if left > reference.near:
        return States("differs", errors, n, tried=tried, nearest=nearest)
    whole = _errors(reference, at, fed, _many(reference))
    assert whole is not None
    matched = max(whole[0]) <= reference.near
    return States("differs", errors, n, at if matched else {}, whole[0], rivals, tried, nearest)


def _changes(reference: Reference, at: Facts) -> Iterator[dict[str, Any]]:
    base = {**reference.facts, **at}
    n = reference.target.num_layers
    for change in table.candidates(base, reference.parts, reference.stock, n):
        if next(iter(change)) in TRIED:
            yield change
    # What the files' own keys say where they are not how it was trained: an engine may have believed them.
    spelled = reference.spelled.items()
    yield from ({fact: value} for fact, value in spelled if fact in TRIED and base.get(fact) != value)
    yield from ({"cache": cache} for cache in ("all", "own", "zeros", "kept") if base.get("cache", "all") != cache)


Where = Sequence[tuple[Served, int]]
"""Texts, and how many of the rounds of each."""


def _errors(
    reference: Reference, changes: Facts, fed: Mapping[str, Any], where: Where
) -> tuple[list[float], int] | None:
    """Mean relative error [K] over the rounds, and how many those were; None where it cannot be built. A mean, for a
    fault may be felt in few rounds only."""
    by_text = [_by_round(reference, changes, fed, text, rounds) for text, rounds in where]
    found = [one for one in by_text if one is not None and len(one)]
    if not found:
        return None
    K = min(one.shape[1] for one in found)
    every = torch.cat([one[:, :K] for one in found]).nan_to_num(nan=float("inf"))
    return every.mean(0).tolist(), len(every)


def _by_round(reference: Reference, changes: Facts, fed: Mapping[str, Any], text: Served, rounds: int) -> Tensor | None:
    """Relative errors [rounds, K] of one text."""
    facts = {**reference.facts, **changes}
    drafter = build(reference.parts, facts)
    if drafter is None:
        return None
    normed = bool(fed.get("normed"))
    replay = Replay(drafter, facts, len(text.ids))
    found: list[Tensor] = []
    for now in text.rounds:
        if now.turn.fused is None or len(found) == rounds:
            break
        played = replay.turn(now.turn, now.first, torch.from_numpy(now.turn.fused))
        if now.last < text.prompt - 1:
            continue
        got = drafter.norm(played.pre) if normed else played.pre
        meant = torch.from_numpy(now.turn.post if normed else now.turn.pre)
        found.append((got - meant).norm(dim=-1) / meant.norm(dim=-1).clamp(min=1e-12))
    return torch.stack(found) if found else None


def _many(reference: Reference) -> Where:
    return [(text, MANY_ROUNDS) for text in _whole(reference)[:MANY_TEXTS]]


def _where(reference: Reference, fed: Mapping[str, Any]) -> Where:
    """A few rounds of the texts in which the states are off the soonest: those that tell readings apart."""
    soonest: list[tuple[int, int, Served]] = []
    for i, text in enumerate(_whole(reference)[:MANY_TEXTS]):
        errors = _by_round(reference, {}, fed, text, MANY_ROUNDS)
        if errors is None:
            continue
        off = (errors.nan_to_num(nan=float("inf")).amax(1) > reference.near).nonzero().flatten()
        if len(off):
            soonest.append((int(off[0]), i, text))
    return [(text, first + FEW_ROUNDS) for first, _, text in sorted(soonest, key=lambda s: s[:2])[:FEW_TEXTS]]


def _whole(reference: Reference) -> list[Served]:
    """Texts fed from their first slot on, the shortest prompts first: the others lean on keys that nobody saw."""
    return sorted((t for t in reference.texts if t.whole and t.rounds), key=lambda t: t.prompt)
