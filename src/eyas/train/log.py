"""A run's curves while it goes: a plain CSV of every step, and TensorBoard's files."""

from __future__ import annotations

import csv
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from eyas import files

COLUMNS = ("step", "loss", "hit_rate_depth_0", "tokens_per_second", "gradient_norm")


class Log:
    """``log.csv`` and ``tensorboard/`` in the folder of a run. Steps after ``done`` are taken again: forgotten."""

    def __init__(self, folder: Path, done: int) -> None:
        self._path = folder / "log.csv"
        if self._path.exists():
            self._trim(done)
        else:
            self._append(COLUMNS)
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=done + 1)

    def step(self, step: int, loss: float, hit_rate: float, tokens_per_second: float, norm: float) -> None:
        self._append((step, f"{loss:.6f}", f"{hit_rate:.4f}", f"{tokens_per_second:.1f}", f"{norm:.4f}"))
        values = (loss, hit_rate, tokens_per_second, norm)
        for name, value in zip(COLUMNS[1:], values, strict=True):
            self._writer.add_scalar(f"train/{name}", value, step)

    def measured(self, step: int, accept_length: float) -> None:
        self._writer.add_scalar("held_out/accept_length", accept_length, step)

    def close(self) -> None:
        self._writer.close()

    def _append(self, row: tuple[object, ...]) -> None:
        with open(self._path, "a", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerow(row)

    def _trim(self, done: int) -> None:
        head, *rows = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [r for r in rows if r.split(",")[0].isdigit() and int(r.split(",")[0]) <= done]
        files.write_text(self._path, "".join([head, *kept]))
