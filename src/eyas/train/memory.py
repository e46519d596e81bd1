"""Target states kept between epochs, so that later ones skip the target."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import taps
from eyas.batches import Batch
from eyas.target import Target


class StatesInMemory:
    """Target states of records seen before, as bf16. Also the first time they pass through bf16, so that a resumed
    run, whose memory is empty, computes what the undisturbed one did up to the rounding of a batch padded otherwise."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, target: Target, batch: Batch, tap_list: tuple[int, ...]) -> taps.States:
        if not all(i in self._kept for i in batch.index):
            states = taps.run(target, batch.input_ids, batch.lengths, tap_list)
            for row, i in enumerate(batch.index):
                n = int(batch.lengths[row])
                self._kept[i] = (
                    states.taps[row, :n].to(torch.bfloat16).clone(),
                    states.last[row, :n].to(torch.bfloat16).clone(),
                )
        pad = torch.nn.utils.rnn.pad_sequence
        tapped, last = ([self._kept[i][part] for i in batch.index] for part in (0, 1))
        return taps.States(pad(tapped, batch_first=True).float(), pad(last, batch_first=True).float())
