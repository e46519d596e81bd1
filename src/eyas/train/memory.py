"""Target states kept between epochs, so that later ones skip the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas import taps
from eyas.target import Target


class StatesInMemory:
    """``run`` is ``source`` (``taps.run``, or a store's) that remembers texts by their ids, in ``dtype``, with the
    target's greedy tokens.

    A text passes through ``dtype`` the first time already, so that a resumed run, whose memory is empty, computes what
    the undisturbed one did, up to the rounding of a batch padded otherwise.
    """

    def __init__(self, dtype: torch.dtype, source: taps.Run | None = None) -> None:
        self.dtype = dtype
        self._source = source or taps.run
        self._kept: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, target: Target, input_ids: Tensor, lengths: Tensor, tap_list: Sequence[int]) -> taps.States:
        sizes = lengths.tolist()
        keys = [ids[:n].cpu().numpy().tobytes() for ids, n in zip(input_ids, sizes, strict=True)]
        if not all(key in self._kept for key in keys):
            states = self._source(target, input_ids, lengths, tap_list)
            for row, (key, n) in enumerate(zip(keys, sizes, strict=True)):
                tapped, last = (part[row, :n].to(self.dtype).clone() for part in (states.taps, states.last))
                truth = taps.greedy(target, last.to(states.last.dtype))
                self._kept[key] = tapped, last, truth
        pad = torch.nn.utils.rnn.pad_sequence
        kept = [self._kept[key] for key in keys]
        tapped, last, truth = (pad([texts[i] for texts in kept], batch_first=True) for i in range(3))
        compute = target.dtype
        return taps.States(tapped.to(compute), last.to(compute), truth)
