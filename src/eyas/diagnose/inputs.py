"""What the drafter was fed in its first passes: tokens, positions, taps, and what fc made of them.

Letters: R rows, C taps, D target width, H drafter width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor

from eyas import compare
from eyas.diagnose.reference import Reference, error
from eyas.diagnose.served import Round, Served
from eyas.variants.scores import FINAL

Status = Literal["equal", "differs", "unknown", "not seen"]
SHIFTS = (1, 0, 2, -1)  # token beside the state of a position, counted from it; 1 is right
MOST = 0.98  # of the rows
FAR = 0.3  # relative error past which a state is no longer a rounding of another
AHEAD = 3.0  # times as far the next nearest must be


@dataclass(frozen=True)
class Tokens:
    """``shift``: which token of the text stands beside each state; None where no single one does. ``tail``: of the
    sample rows, those fed the token that the target gave."""

    status: Status
    rows: int
    equal: int
    shift: int | None
    tail: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "rows": self.rows, "equal": self.equal, "shift": self.shift,
                "tail": list(self.tail)}  # fmt: skip


def tokens(texts: Sequence[Served]) -> Tokens:
    rows = equal = tails = right = 0
    shifts: Counter[int] = Counter()
    for text, now in _rounds(texts):
        fed = now.turn.token_ids
        for i, token in enumerate(fed.tolist()):
            at = now.first + i
            if at + 1 >= len(text.ids):
                continue
            rows += 1
            equal += token == int(text.ids[at + 1])
            for shift in SHIFTS:
                if 0 <= at + shift < len(text.ids):
                    shifts[shift] += token == int(text.ids[at + shift])
        if now.last + 1 < len(text.ids):
            tails += 1
            right += int(fed[-1]) == int(text.ids[now.last + 1])
    if not rows:
        return Tokens("not seen", 0, 0, None, (0, 0))
    best = max(SHIFTS, key=lambda s: shifts[s])
    whole = shifts[best] >= MOST * rows
    return Tokens("equal" if equal == rows else "differs", rows, equal, best if whole else None, (right, tails))


@dataclass(frozen=True)
class Positions:
    """``offset`` of a row's rope position from its slot, None where it is not one number; ``step`` with each depth, and
    ``steps`` how often which."""

    status: Status
    rows: int
    offset: int | None
    step: int | None
    offsets: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "rows": self.rows, "offset": self.offset, "step": self.step,
                "offsets": {str(k): v for k, v in self.offsets.items()},
                "steps": {str(k): v for k, v in self.steps.items()}}  # fmt: skip


def positions(texts: Sequence[Served]) -> Positions:
    offsets: Counter[int] = Counter()
    steps: Counter[int] = Counter()
    for _, now in _rounds(texts):
        for i, position in enumerate(now.turn.positions.tolist()):
            offsets[position - now.first - i] += 1
        for a, b in zip(now.turn.fed_positions, now.turn.fed_positions[1:], strict=False):
            steps[int(b - a)] += 1
    rows = sum(offsets.values())
    if not rows:
        return Positions("not seen", 0, None, None)
    offset = next(iter(offsets)) if len(offsets) == 1 else None
    step = next(iter(steps)) if len(steps) == 1 else None
    right = offset == 0 and (step == 1 or not steps)
    return Positions(
        "equal" if right else "differs",
        rows,
        offset,
        step if steps else 1,
        dict(offsets.most_common(6)),
        dict(steps.most_common(6)),
    )


@dataclass(frozen=True, eq=False)
class Taps:
    """``observed``: the tap in each slot of fc, None where it is none of them. ``kind`` says in one word what is odd
    about slots that are none: rounded, rotated, shifted, repeated, zeros, other."""

    status: Status
    configured: tuple[Any, ...]
    observed: tuple[Any, ...]
    columns: tuple[Any, ...]
    cosine: list[list[float]]
    error: list[list[float]]
    margin: list[float]
    kind: str
    shift: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "configured": list(self.configured),
            "observed": list(self.observed),
            "taps": list(self.columns),
            "cosine": [[round(v, 6) for v in row] for row in self.cosine],
            "error": [[_short(v) for v in row] for row in self.error],
            "margin": [_short(v) for v in self.margin],
            "kind": self.kind,
        }


def taps(reference: Reference) -> Taps | None:
    """None where no rows were kept."""
    if not reference.chosen:
        return None
    wanted = tuple(reference.facts["taps"])
    D = reference.target.hidden_size
    fed = reference.fed()
    columns: tuple[Any, ...] = (*range(reference.target.num_layers + 1), FINAL)
    if fed.shape[1] % D:
        return Taps(
            "differs", wanted, (None,), columns, [], [], [], f"rows of width {fed.shape[1]}, which {D} does not divide"
        )
    blocks = torch.split(fed, D, dim=-1)
    matrix = compare.tap_matrix(blocks, [reference.live(t) for t in columns])
    observed: list[Any] = []
    for row, best, margin in zip(matrix.error, matrix.best, matrix.margin, strict=True):
        sure = float(row[best]) <= reference.near or (float(row[best]) < FAR and margin > AHEAD)
        observed.append(columns[best] if sure else None)
    nearest = tuple(columns[best] for best in matrix.best)
    if nearest == wanted and all(float(row[b]) < FAR for row, b in zip(matrix.error, matrix.best, strict=True)):
        observed = list(wanted)  # however coarse, every slot is nearest to its own tap: no chance does that
    right = tuple(observed) == wanted
    worst = max(float(row[b]) for row, b in zip(matrix.error, matrix.best, strict=True))
    kind, shift = "equal" if right else "other taps", 0
    if right and worst > reference.near:
        kind = "rounded"
    elif None in observed:
        kind, shift = _odd(blocks[observed.index(None)], wanted, observed.index(None), reference)
    status: Status = "equal" if kind == "equal" else "differs"
    return Taps(
        status,
        wanted,
        tuple(observed),
        columns,
        matrix.cosine.tolist(),
        matrix.error.tolist(),
        list(matrix.margin),
        kind,
        shift,
    )


def _odd(block: Tensor, wanted: Sequence[Any], slot: int, reference: Reference) -> tuple[str, int]:
    """What is odd about rows [R, D] that are no tap; and by how many rows they are off, if that is it."""
    norms = block.norm(dim=-1)
    if not bool(torch.isfinite(block).all()):
        return "not finite", 0
    if float((norms == 0).float().mean()) > 0.5:
        return "zeros", 0
    meant = wanted[slot] if slot < len(wanted) else None
    tried = [meant] if isinstance(meant, int) else []
    for tap in dict.fromkeys((*tried, *(t for t in wanted if isinstance(t, int)))):
        order = _order(slot, tap, reference)
        if order is not None:
            return order
    for tap in tried:
        if compare.rotation(block, reference.live(tap)).proven:
            return "rotated", 0
    if len(block) > 8 and float(((block[1:] - block[:-1]).norm(dim=-1) < 1e-6 * norms[1:]).float().mean()) > 0.5:
        return "repeated", 0
    return "other", 0


def _order(slot: int, tap: int, reference: Reference) -> tuple[str, int] | None:
    """Whether the rows of a text's prompt are this tap's, in other places."""
    D = reference.target.hidden_size
    kinds = []
    for i, text in enumerate(reference.texts[:6]):
        first = next((r for r in text.rounds if r.turn.taps is not None and len(r.turn.token_ids) > 8), None)
        if first is None:
            continue
        assert first.turn.taps is not None
        rows = torch.from_numpy(first.turn.taps[:, slot * D : (slot + 1) * D])
        kinds.append(compare.row_order(rows, reference.stock.states(i, (tap,))[first.first : first.last + 1]))
    found = [k for k in kinds if k.kind in ("shifted", "permuted")]
    if kinds and len(found) >= 0.6 * len(kinds):
        return ("shifted", found[0].shift) if found[0].kind == "shifted" else ("permuted", 0)
    return None


@dataclass(frozen=True, eq=False)
class Fused:
    """``matched``: the change of facts, or a word, that makes what fc gave."""

    status: Status
    error: float
    matched: dict[str, Any] | None = None
    how: str | None = None
    matched_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "error": _short(self.error), "matched": self.how,
                "matched_error": None if self.matched_error is None else _short(self.matched_error)}  # fmt: skip


def fused(reference: Reference) -> Fused | None:
    """fc and the norms before it, on the rows that the engine fed to its own."""
    drafter = reference.drafter()
    if not reference.chosen or drafter is None:
        return None
    fed, got = reference.fed(), reference.fused()
    if fed.shape[1] != drafter.fc.in_features or got.shape[1] != drafter.config.hidden_size:
        return Fused("differs", float("inf"), None, "other widths", None)
    base = error(drafter.fuse(fed), got)
    if base <= reference.near:
        return Fused("equal", base)
    best: tuple[float, dict[str, Any], str] | None = None
    for change, how, rows in _fusings(reference, fed):
        far = error(rows, got)
        if best is None or far < best[0]:
            best = far, change, how
    if best is not None and best[0] <= reference.near and best[0] * AHEAD < base:
        return Fused("differs", base, best[1], best[2], best[0])
    return Fused("differs", base)


def _fusings(reference: Reference, fed: Tensor) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Other ways to fuse the same rows."""
    for value in ("none", "joint", "each", "joint, then each"):
        other = reference.drafter(fc_norm=value)
        if other is not None:
            yield {"fc_norm": value}, f"fc_norm {value}", other.fuse(fed)
    drafter = reference.drafter()
    assert drafter is not None
    blocks = torch.split(fed, reference.target.hidden_size, dim=-1)
    trained = tuple(reference.facts["taps"])
    if len(blocks) <= 4:
        for order in permutations(range(len(blocks))):
            if list(order) != sorted(order):
                taps = tuple(trained[i] for i in order)
                yield (
                    {"taps": taps},
                    f"fc's blocks in the order {order}",
                    drafter.fuse(torch.cat([blocks[i] for i in order], -1)),
                )
    for i in range(len(blocks)):
        left = [torch.zeros_like(b) if j == i else b for j, b in enumerate(blocks)]
        taps = tuple(None if j == i else t for j, t in enumerate(trained))
        yield {"taps": taps}, f"without block {i} of fc", drafter.fuse(torch.cat(left, -1))


def _rounds(texts: Sequence[Served]) -> Iterator[tuple[Served, Round]]:
    for text in texts:
        for now in text.rounds:
            yield text, now


def _short(value: float) -> float | None:
    return None if value != value or value in (float("inf"), -float("inf")) else float(f"{value:.4g}")
