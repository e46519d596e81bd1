"""Logits become tokens: greedily, or by one random number a row.

Letters: B rows, V target vocabulary, K candidates of a row, best first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.answers import Sampling

NARROW = 256  # candidates in which a nucleus nearly always ends; a whole sort of 49 k words costs 4 ms a row


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[int]:
    """One token a row of ``logits`` [B, V]; ``draws`` are B numbers in [0, 1), unused when greedy."""
    if sampling.greedy:
        return logits.argmax(-1).tolist()
    assert len(draws) == len(logits), "one number a row"
    at = torch.tensor(draws, dtype=torch.float64)
    scaled = logits.float() / sampling.temperature
    vocabulary = scaled.shape[1]
    if sampling.top_k is not None and sampling.top_k < vocabulary:
        best, words = scaled.topk(sampling.top_k, dim=-1)
        picked, _ = _draw(best.softmax(-1), sampling.top_p, at)
        return words.gather(1, picked).flatten().tolist()
    if sampling.top_p == 1:
        picked, _ = _draw(scaled.softmax(-1), 1.0, at)
        return picked.flatten().tolist()
    return _nucleus(scaled, sampling.top_p, at, min(NARROW, vocabulary))


def _nucleus(scaled: Tensor, top_p: float, at: Tensor, width: int) -> list[int]:
    """Top-p among ``width`` candidates; rows whose nucleus is larger are looked at whole."""
    vocabulary = scaled.shape[1]
    best, words = scaled.topk(width, dim=-1)
    shares = (best - scaled.logsumexp(-1, keepdim=True)).exp()
    picked, inside = _draw(shares, top_p, at)
    tokens: list[int] = words.gather(1, picked).flatten().tolist()
    if width < vocabulary:
        for row in (~inside).nonzero().flatten().tolist():
            tokens[row] = _nucleus(scaled[row : row + 1], top_p, at[row : row + 1], vocabulary)[0]
    return tokens


def _draw(shares: Tensor, top_p: float, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``at`` [B] falls in ``shares`` [B, K] cut at ``top_p``: indices [B, 1], and whether the cut is inside."""
    mass = shares.cumsum(-1, dtype=torch.float64)
    if top_p == 1:
        last = torch.full_like(at, shares.shape[1] - 1, dtype=torch.int64)[:, None]
    else:
        last = (mass < top_p).sum(-1, keepdim=True).clamp(max=shares.shape[1] - 1)
    wanted = at[:, None] * mass.gather(1, last)
    return torch.searchsorted(mass, wanted, right=True).minimum(last), mass[:, -1] >= top_p
