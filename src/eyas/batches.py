"""Records as padded tensors, in an order that a seed and an epoch fix. B batch, T positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.records import Record


@dataclass(frozen=True, eq=False)
class Batch:
    """``input_ids`` [B, T] (0 past the end), ``lengths`` [B], ``loss_mask`` [B, T], ``index`` [B] into the records."""

    input_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    index: tuple[int, ...]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.input_ids.to(device), self.lengths.to(device), self.loss_mask.to(device), self.index)


def collate(records: Sequence[Record], index: Sequence[int]) -> Batch:
    chosen = [records[i] for i in index]
    T = max(r.seq_len for r in chosen)
    ids = torch.zeros(len(chosen), T, dtype=torch.int64)
    mask = torch.zeros(len(chosen), T, dtype=torch.bool)
    for row, record in enumerate(chosen):
        ids[row, : record.seq_len] = torch.from_numpy(record.input_ids.astype(np.int64))
        mask[row, : record.seq_len] = torch.from_numpy(record.loss_mask)
    return Batch(ids, torch.tensor([r.seq_len for r in chosen]), mask, tuple(index))


def in_order(records: Sequence[Record], size: int) -> Iterator[Batch]:
    """All records once, shortest first so that little is padded; ``size`` records a batch."""
    order = sorted(range(len(records)), key=lambda i: (records[i].seq_len, i))
    for start in range(0, len(order), size):
        yield collate(records, order[start : start + size])


def shuffled(records: Sequence[Record], size: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Indices of every batch of one epoch: a permutation, sorted by length within windows, batches permuted again.

    A pure function of its arguments, so that a resumed run meets the same batches. A short last batch is kept.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(records))
    window = size * 16
    batches = []
    for start in range(0, len(order), window):
        chunk = sorted(order[start : start + window].tolist(), key=lambda i: (records[i].seq_len, i))
        batches += [tuple(chunk[i : i + size]) for i in range(0, len(chunk), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def token_counts(records: Sequence[Record], vocab_size: int) -> Tensor:
    """How often each target id is supervised, [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for record in records:
        said = torch.from_numpy(record.input_ids[record.loss_mask].astype(np.int64))
        counts += torch.bincount(said, minlength=vocab_size)
    return counts
