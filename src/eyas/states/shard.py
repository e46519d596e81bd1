"""The tensors of one shard: how records and their taps are laid out and rounded.

Letters: T positions, D target width, C taps, N tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.records import Record
from eyas.states.manifest import FP8, Dtype, Facts

FP8_MAX = 448.0


def bytes_per_token(taps: Sequence[int], last: int, width: int, dtype: Dtype) -> int:
    """Bytes on disk of one token: its taps, its id and its mask."""
    per_tap = width + 4 if dtype == "fp8" else 2 * width
    return per_tap * len(set(taps) - {last}) + 2 * width + 5


def empty_shard(facts: Facts, tokens: int) -> dict[str, Tensor]:
    """The tensors of a shard of so many tokens, to be filled by ``put``."""
    tensors = {
        "input_ids": torch.zeros(tokens, dtype=torch.int32),
        "loss_mask": torch.zeros(tokens, dtype=torch.bool),
    }
    for tap in facts.stored:
        dtype = facts.dtype_of(tap)
        tensors[f"tap.{tap}"] = torch.zeros(tokens, facts.target.hidden_size, dtype=dtype)
        if dtype == FP8:
            tensors[f"tap.{tap}.scale"] = torch.zeros(tokens, dtype=torch.float32)
    return tensors


def put(shard: dict[str, Tensor], facts: Facts, row: int, record: Record, states: Tensor) -> None:
    """Write a record and its ``states`` [T, (C+1)*D], all stored taps in ascending order, at ``row``."""
    rows = slice(row, row + record.seq_len)
    shard["input_ids"][rows] = torch.from_numpy(record.input_ids.astype(np.int32))
    shard["loss_mask"][rows] = torch.from_numpy(record.loss_mask.astype(bool))
    for tap, values in zip(facts.stored, torch.split(states, facts.target.hidden_size, dim=-1), strict=True):
        if facts.dtype_of(tap) == FP8:
            shard[f"tap.{tap}"][rows], shard[f"tap.{tap}.scale"][rows] = quantise(values)
        else:
            shard[f"tap.{tap}"][rows] = values.to(torch.bfloat16)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` [T, D] as fp8 [T, D] and the scales [T] that undo it; the largest of each row becomes fp8's largest."""
    scale = rows.float().abs().amax(-1).clamp(min=1e-30) / FP8_MAX
    return (rows.float() / scale[:, None]).to(FP8), scale
