"""Stored states against the states they should be: which tap, which row, which directions.

A target's first positions have activations a hundred times as large as all others, so nothing here sums over rows:
each row is measured on its own and the median is taken.

Letters: S stored tensors, L live taps, T rows, D target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-12
SHIFTS = (0, 1, -1, 2, -2)  # rows off by more is not one bug but another text
# Share of rows at their place, SmolLM2, taps 0 to 30: 1.00 from fp32 to int4; of another request up to 0.47 (two texts
# begin alike, and what comes after does not change a state), of which up to 0.66 are found anywhere; shuffled 0.03.
FOUND = 0.9
# Relative distance within which a row counts as found: bf16 0.002, fp8 0.03, int4 0.17.
NEAR = 0.3


@dataclass(frozen=True, eq=False)
class TapMatrix:
    """Medians over rows, [S, L]: ``cosine``, and ``error`` = |stored - live| / |live|, by which a tap is told."""

    cosine: Tensor
    error: Tensor

    @property
    def best(self) -> tuple[int, ...]:
        """The live tap nearest to each stored tensor, as a column."""
        return tuple(self.error.argmin(1).tolist())

    @property
    def margin(self) -> tuple[float, ...]:
        """How many times as far the next nearest is; infinite where there is one live tap only."""
        if self.error.shape[1] < 2:
            return (float("inf"),) * len(self.error)
        two = self.error.sort(1).values[:, :2]
        return tuple((two[:, 1] / two[:, 0].clamp(min=TINY)).tolist())


def tap_matrix(stored: Sequence[Tensor], live: Sequence[Tensor]) -> TapMatrix:
    """Each stored tensor [T, D] against each live one [T, D], row t against row t."""
    cosine = torch.stack([torch.stack([F.cosine_similarity(s, x, -1).median() for x in live]) for s in stored])
    error = torch.stack([torch.stack([median_error(s, x) for x in live]) for s in stored])
    return TapMatrix(cosine, error)


def median_error(stored: Tensor, live: Tensor) -> Tensor:
    """Median over the rows of [T, D] of |stored - live| / |live|; infinite where a row is not finite."""
    error = (stored - live).norm(dim=-1) / live.norm(dim=-1).clamp(min=TINY)
    middle: Tensor = error.nan_to_num(nan=float("inf")).median()
    return middle


@dataclass(frozen=True)
class RowOrder:
    """``kind``: "home" (row t is row t), "shifted", "permuted" (all are there, in another order) or "other".

    ``shift`` = s means that stored row t + s is live row t. ``home`` is the share of rows at their place under it,
    ``found`` the share that are somewhere among the live ones, ``counted`` the rows that could be told apart.
    """

    kind: Literal["home", "shifted", "permuted", "other"]
    shift: int
    home: float
    found: float
    counted: int


def row_order(stored: Tensor, live: Tensor) -> RowOrder:
    """Where the rows of ``stored`` [T, D] stand among those of ``live`` [T', D].

        live     x0 x1 x2 x3        shift 1:   stored  ?  x0 x1 x2        shift -1:  stored  x1 x2 x3 ?

    Equal rows (tap 0 of one token twice) are at home where either is. Rows of zeros and of no number are not counted.
    """
    norms = stored.norm(dim=-1)
    good = torch.isfinite(norms) & (norms > 0)
    counted = int(good.sum())
    if counted < 2 or len(live) < 2:
        return RowOrder("other", 0, 0.0, 0.0, counted)
    far = torch.cdist(stored.nan_to_num(), live) / live.norm(dim=-1).clamp(min=TINY)
    nearest = far.min(1).values
    found = float((nearest < NEAR)[good].float().mean())
    at_home = {s: _at_home(far, nearest, good, s) for s in SHIFTS}
    shift = max(SHIFTS, key=lambda s: at_home[s])  # the first of equals: no shift
    if at_home[shift] >= FOUND:
        return RowOrder("shifted" if shift else "home", shift, at_home[shift], found, counted)
    return RowOrder("permuted" if found >= FOUND else "other", 0, at_home[0], found, counted)


def _at_home(far: Tensor, nearest: Tensor, good: Tensor, shift: int) -> float:
    """Share of stored rows t + shift whose nearest live row is t, and near."""
    at = torch.arange(len(far))
    inside = good & (at >= shift) & (at - shift < far.shape[1])
    if not bool(inside.any()):
        return 0.0
    there = far[at[inside], at[inside] - shift]
    return float(((there < NEAR) & (there <= nearest[inside] * 1.01 + 1e-6)).float().mean())


@dataclass(frozen=True)
class Rotation:
    """``norms``: median relative difference of row norms; ``cosine``: median row by row; ``angles``: median absolute
    difference of the cosines between any two rows; ``unexplained``: relative error on half of the rows of the
    orthogonal matrix that fits the other half best, None where those are fewer than the width."""

    norms: float
    cosine: float
    angles: float
    unexplained: float | None
    rows: int

    @property
    def proven(self) -> bool:
        """The same lengths and the same angles in other directions: an orthogonal map and nothing else does that.

        SmolLM2, 1,500 rows of taps 0, 2, 15, 30, turned: norms 0.000 (bf16) to 0.005 (int4), angles 0.000 to 0.006,
        cosine 0.03; one layer beside, turned: norms from 0.08, angles from 0.022; another request's states: norms
        from 0.01, angles from 0.04, cosine from 0.49. Fewer than 32 rows prove nothing.
        """
        same = self.norms < 0.02 and self.angles < 0.012 and self.cosine < 0.3
        return same and self.rows >= 32 and (self.unexplained is None or self.unexplained < 0.3)


def rotation(stored: Tensor, live: Tensor) -> Rotation:
    """Whether ``stored`` [T, D] is ``live`` [T, D] times one orthogonal matrix.

    Lengths and angles need no fit, so they are evidence with few rows too; the fit needs D rows and as many to test it
    on, so rows of several records are best given together.
    """
    norms, theirs = stored.norm(dim=-1), live.norm(dim=-1)
    good = torch.isfinite(norms) & (norms > 0) & (theirs > 0)
    s, x = stored[good], live[good]
    if len(s) < 4:
        return Rotation(1.0, 0.0, 1.0, None, len(s))
    some = torch.linspace(0, len(s) - 1, min(len(s), 512)).long()
    a, b = F.normalize(s[some], dim=-1), F.normalize(x[some], dim=-1)
    apart = ~torch.eye(len(some), dtype=torch.bool)
    return Rotation(
        norms=float((norms[good] / theirs[good] - 1).abs().median()),
        cosine=float(F.cosine_similarity(s, x, -1).abs().median()),
        angles=float((a @ a.T - b @ b.T)[apart].abs().median()),
        unexplained=_unexplained(s, x),
        rows=len(s),
    )


def _unexplained(stored: Tensor, live: Tensor) -> float | None:
    """Procrustes: the orthogonal Q nearest to taking ``live`` to ``stored``, fitted to even rows, tried on odd ones.

    Rows are scaled to one length, else the largest alone would be fitted.
    """
    s, x = F.normalize(stored, dim=-1), F.normalize(live, dim=-1)
    if len(s[::2]) < 1.2 * s.shape[1]:
        return None
    u, _, vt = torch.linalg.svd(x[::2].T @ s[::2])
    return float((x[1::2] @ (u @ vt) - s[1::2]).norm(dim=-1).median())
