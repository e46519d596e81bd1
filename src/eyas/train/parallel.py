"""One run in several processes (``accelerate launch`` or ``torchrun``): a batch is split by rows.

Every process holds the target, the drafter and its optimiser. Losses are normalised by the counts of the whole batch,
so that the summed gradients are those of one process, whichever way the rows fell. Only the first process writes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from torch import Tensor, nn

from eyas.errors import UsageError


class Workers:
    """The processes of a run, seen from one of them; a run in one process is the case of one worker."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # The only large buffer is the target's embedding, the same everywhere and never changed.
            alike = DistributedDataParallelKwargs(broadcast_buffers=False)
            self._accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[alike])

    @property
    def count(self) -> int:
        return self._accelerator.num_processes if self._accelerator else 1

    @property
    def first(self) -> bool:
        return self._accelerator is None or self._accelerator.is_main_process

    def share(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """This worker's rows of a batch; the batch must have at least one for each."""
        if self._accelerator is None:
            return rows
        return rows[self._accelerator.process_index :: self.count]

    def require_rows(self, batch: int) -> None:
        if batch < self.count:
            raise UsageError(
                f"A batch of {batch} cannot be split over {self.count} processes.",
                way_out=f"Pass --batch {self.count} or a multiple of it.",
            )

    def wrapped(self, module: nn.Module) -> nn.Module:
        """``module`` with its gradients averaged over the workers."""
        wrapped: nn.Module = self._accelerator.prepare(module) if self._accelerator else module
        return wrapped

    def summed(self, counts: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(counts.clone(), "sum") if self._accelerator else counts
        return total

    def told(self, value: Any) -> Any:
        """The first worker's ``value``, whatever the others thought."""
        return broadcast_object_list([value])[0] if self._accelerator else value
