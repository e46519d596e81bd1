"""Noise on the taps, so that a drafter learns to bear states that are not quite the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

OF_ITS_OWN = 1  # ends a seed, so that noise and the sample of slots are not the same draws


def uniform(tapped: Tensor, lengths: Tensor, amount: float, seeds: Sequence[Sequence[int]]) -> Tensor:
    """Taps [B, T, C*D] with noise in [-amount, amount] times each feature's RMS over the row's own tokens.

    EAGLE and speculators add uniform noise of one size to all features (0.2, 0.05); but taps differ in size a
    hundredfold, feature by feature, and one size would drown some and leave others alone. One seed a row, so that a
    row's noise does not depend on what else is in the batch.
    """
    if not amount:
        return tapped
    noisy = tapped.clone()
    for row, (n, seed) in enumerate(zip(lengths.tolist(), seeds, strict=True)):
        said = tapped[row, :n]
        drawn = np.random.default_rng((*seed, OF_ITS_OWN)).uniform(-amount, amount, said.shape).astype(np.float32)
        noisy[row, :n] += torch.from_numpy(drawn).to(said) * said.pow(2).mean(0).sqrt()
    return noisy
