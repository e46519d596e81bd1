"""Stocks of stored states made in memory, sound or with a fault planted. T rows, D width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from eyas import records
from eyas import target as targets
from eyas.records import Record
from eyas.states.live import LiveStock
from eyas.states.stock import Tap
from eyas.target import Target

CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"
Change = Callable[[int, Tensor, int], Tensor]
"""(record, rows [T, D], which tensor) -> rows."""


class Held:
    """A stock whose tensors are at hand, by record."""

    def __init__(self, of: Sequence[Record], tensors: Sequence[Sequence[Tensor]], taps: Sequence[Tap]) -> None:
        self.records: Sequence[Record] = list(of)
        self.tensors = [list(t) for t in tensors]
        self.taps: tuple[Tap, ...] = tuple(taps)
        self.last: Tap | None = None

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        return torch.cat([self.tensors[index][self.taps.index(t)].float() for t in taps], -1)

    def truth(self, index: int) -> None:
        return None


@cache
def case_target() -> Target:
    """Of DeepSeek-V3 layout, 12 layers, trained: its taps have real structure."""
    return targets.load(str(CASE / "target"))


@cache
def case_live(count: int = 6) -> LiveStock:
    read = records.read(CASE / "heldout.jsonl", vocab_size=case_target().vocab_size)
    made = LiveStock(case_target(), sorted(read, key=lambda r: -r.seq_len)[:count], batch_size=1)
    made.fill()
    return made


def stored(live: LiveStock, taps: Sequence[int], change: Change = lambda i, rows, which: rows) -> Held:
    """Tensors h[0], h[1], … in bf16, then changed."""
    tensors = [
        [change(i, live.states(i, (t,)).to(torch.bfloat16).float(), k) for k, t in enumerate(taps)]
        for i in range(len(live.records))
    ]
    return Held(live.records, tensors, [f"h[{k}]" for k in range(len(taps))])


def fp8(i: int, rows: Tensor, which: int) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def rolled(by: int) -> Change:
    """Row t holds what stood at t + by, the end filled with its own row."""
    return lambda i, rows, which: rows[(torch.arange(len(rows)) + by).clamp(0, len(rows) - 1)]


def shuffled(i: int, rows: Tensor, which: int) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(i))]


def turned(i: int, rows: Tensor, which: int) -> Tensor:
    return rows @ orthogonal(rows.shape[1])


@cache
def orthogonal(width: int) -> Tensor:
    values = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(values)[0].float()


def zeroed(share: float) -> Change:
    def run(i: int, rows: Tensor, which: int) -> Tensor:
        return rows * (torch.rand(len(rows), generator=torch.Generator().manual_seed(i)) >= share)[:, None]

    return run


def of_previous(made: Held) -> Held:
    """Each record has the states of the one before it, cut or repeated to its own length."""
    lengths = [len(t[0]) for t in made.tensors]
    moved = [[t[torch.arange(n) % len(t)] for t in made.tensors[i - 1]] for i, n in enumerate(lengths)]
    return Held(made.records, moved, made.taps)
