"""The draft vocabulary: which target ids a drafter may say.

Inside eyas it is one sorted list of target ids. ``d2t`` (offsets: target id = draft id + d2t[draft id]) and ``t2d``
(boolean mask) are the checkpoint's spelling of it and exist only at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.errors import CheckpointError, UsageError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """``ids`` [W] int64, strictly increasing target ids; ``vocab_size`` is the target's V."""

    ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        assert self.ids.dtype == torch.int64
        assert self.ids.ndim == 1
        assert len(self.ids) > 0
        assert bool((self.ids[1:] > self.ids[:-1]).all())
        assert int(self.ids[0]) >= 0
        assert int(self.ids[-1]) < self.vocab_size

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def t2d(self) -> Tensor:
        """Boolean mask [V]: is this target id in the draft vocabulary?"""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    @property
    def d2t(self) -> Tensor:
        """Offsets [W]: target id minus draft id."""
        return self.ids - torch.arange(len(self.ids))

    def draft_ids(self) -> Tensor:
        """Target id -> draft id [V], -1 outside."""
        inverse = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        inverse[self.ids] = torch.arange(len(self.ids))
        return inverse

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens [V] that lie inside: no acceptance at depth 0 can exceed it."""
        total = int(counts.sum())
        return int(counts[self.ids].sum()) / total if total else 0.0


def by_frequency(counts: Tensor, size: int) -> DraftVocab:
    """The ``size`` most frequent target ids by ``counts`` [V]; ties go to the lower id."""
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise UsageError(
            f"A draft vocabulary of {size} does not fit a target vocabulary of {vocab_size}.",
            way_out=f"Pass --draft-vocab between 1 and {vocab_size}.",
        )
    order = torch.argsort(counts, descending=True, stable=True)
    return DraftVocab(order[:size].sort().values, vocab_size)


def from_checkpoint(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> DraftVocab:
    """The map of a checkpoint, its algebra proven: in range, strictly increasing, equal to the mask if there is one."""
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    trouble = None
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        trouble = f"it points at ids {int(ids.min())} to {int(ids.max())}, outside 0 to {vocab_size - 1}"
    elif not bool((ids[1:] > ids[:-1]).all()):
        trouble = "the ids it points at are not strictly increasing, so two draft ids may mean one token"
    elif t2d is not None and len(t2d) != vocab_size:
        trouble = f"t2d has {len(t2d)} entries for a vocabulary of {vocab_size}"
    elif t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids):
        trouble = f"t2d marks {int(t2d.bool().sum())} ids and they are not the {len(ids)} that d2t points at"
    if trouble:
        raise CheckpointError(
            f"The vocabulary map of this drafter contradicts itself: read as offsets (id + d2t[id]), {trouble}.",
            way_out="Take d2t and t2d from the run that trained lm_head; d2t holds offsets, not ids.",
        )
    return DraftVocab(ids, vocab_size)
