"""Noise on the taps, so that a drafter learns to bear states that are not quite the target's."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform(tapped: Tensor, lengths: Tensor, amount: float, seed: int) -> Tensor:
    """Taps [B, T, C*D] with noise in [-amount, amount] times each feature's RMS over the batch's tokens.

    EAGLE and speculators add uniform noise of one size to all features (0.2, 0.05); but taps differ in size a
    hundredfold, feature by feature, and one size would drown some and leave others alone.
    """
    there = torch.arange(tapped.shape[1], device=tapped.device)[None] < lengths[:, None].to(tapped.device)
    rms = tapped[there].pow(2).mean(0).sqrt()
    drawn = torch.rand(tapped.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return tapped + amount * (2 * drawn - 1).to(tapped) * rms
