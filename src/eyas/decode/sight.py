"""What the rows of one pass see: every token held, their ancestors among the rows, and themselves.

    held    0 1 2 ... t-1 │ rows      0    1    2    3       parents  -1, 0, 0, 2
                          │           └─┬─ 1                 depths    0, 1, 1, 2
                          │             └─ 2 ── 3            row 3 sees 0, 2, 3 and stands at position t + 2

A window of W looks at the W last *positions*, its own included: rows of one depth share a position, so what falls
out of it goes by depth and not by row.

Letters: S rows, T tokens held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sight:
    """``depths`` [S] int64, from 0; ``seen`` [S, S] bool: whether row i sees row j."""

    depths: Tensor
    seen: Tensor
    chained: bool
    """Whether every row follows the one before."""

    def __len__(self) -> int:
        return int(self.depths.shape[0])

    def first(self, held: int, window: int | None) -> Tensor:
        """The first of ``held`` tokens that each row sees [S] int64; ``held`` where it sees none."""
        if window is None or held + len(self) <= window:
            return torch.zeros_like(self.depths)
        return (self.depths + (held - window + 1)).clamp_(0, held)

    def rows(self, window: int | None) -> Tensor:
        """``seen`` as far as a window lets it [S, S]."""
        if window is None or len(self) <= window:
            return self.seen
        return self.seen & (self.depths[:, None] - self.depths < window)

    def mask(self, held: int, window: int | None) -> Tensor:
        """Whether a row sees each of T tokens held and of the S rows [S, T + S] bool."""
        before = torch.arange(held, device=self.depths.device) >= self.first(held, window)[:, None]
        return torch.cat((before, self.rows(window)), dim=1)


@lru_cache(maxsize=64)
def chain(rows: int, device: torch.device) -> Sight:
    """Every row follows the one before."""
    seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return Sight(torch.arange(rows, device=device), seen, True)


def tree(parents: Sequence[int], device: torch.device) -> Sight:
    """Row i follows row ``parents[i]``, -1 is the last token held; parents come before their children."""
    return _tree(tuple(parents), device)


@lru_cache(maxsize=256)
def _tree(parents: tuple[int, ...], device: torch.device) -> Sight:
    """Few shapes come again and again where a draft is small."""
    depths: list[int] = []
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        assert -1 <= parent < row, f"row {row} follows row {parent}, which does not stand before it"
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            seen[row] |= seen[parent]
    return Sight(torch.tensor(depths, dtype=torch.int64, device=device), seen.to(device), False)


@dataclass(frozen=True)
class Fed:
    """A pass that was made: ``rows`` after ``began`` tokens held."""

    began: int
    rows: int
    parents: tuple[int, ...] | None

    @classmethod
    def of(cls, began: int, token_ids: Sequence[int], parents: Sequence[int] | None) -> Fed:
        assert token_ids, "a pass of no tokens"
        assert parents is None or len(parents) == len(token_ids), "one parent a token"
        return cls(began, len(token_ids), None if parents is None else tuple(parents))

    def kept(self, rows: Sequence[int]) -> list[int]:
        """Where in the cache these rows lie; they must be a path from the root, or what stays is no text."""
        parents = range(-1, self.rows - 1) if self.parents is None else self.parents
        for above, row in zip((-1, *rows), rows, strict=False):
            assert 0 <= row < self.rows, f"row {row} of {self.rows}"
            assert parents[row] == above, f"rows {list(rows)} are no path: {row} follows {parents[row]}, not {above}"
        return [self.began + row for row in rows]
