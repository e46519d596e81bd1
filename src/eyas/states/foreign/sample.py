"""One sample of somebody's states, as its file has it. T positions, D target width."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LAST = "tap n"
NORMED_LAST = "tap n after the final norm"
EITHER_LAST = "tap n, before or after the final norm"


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a sample: ``values`` [T, D] in the dtype it is stored in, memory-mapped where that is possible.

    ``field`` is where it stands (``hidden_states[2]``, ``aux_hidden_state[1]`` for a block of a concatenation),
    ``claimed`` what the format says it is, which is not to be believed: one of the three above, or None.
    """

    field: str
    values: Tensor
    claimed: str | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """``input_ids`` and ``loss_mask`` [T] where the file has them; ``notes`` say what was odd."""

    name: str
    input_ids: Tensor | None
    loss_mask: Tensor | None
    tensors: tuple[Stored, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return min(len(stored.values) for stored in self.tensors)
