"""What a mutation costs: the walk of an engine that reads files as they stand, vLLM's way, and asks no questions.

Tensors that are missing keep what a fresh layer starts with (norms at one, matrices at random), a missing head is cut
from the target's, ids that no token has never match, and the states are what it is handed.

Letters: T positions, S slots, K depths, H drafter width, W draft vocabulary, V target vocabulary, R records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from pydantic import ValidationError
from runs.mutations.bank import Bank
from runs.mutations.subject import Bed, Subject, healthy
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eyas import curve, objective
from eyas.dialects import hf, layouts, vllm
from eyas.drafter import Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.records import Record
from eyas.results import LengthCounts
from eyas.vocab import DraftVocab

DRAFT_TOKENS = 4


class CannotRun(Exception):
    """The engine would stop at its start or at its first forward."""


@dataclass(frozen=True, eq=False)
class Engine:
    """``ids`` [W]: the target id of each draft id, -1 where it is no token."""

    drafter: Drafter
    ids: Tensor
    taps: tuple[int, ...]
    feedback: str | None = None

    def leads(self, taps: Tensor, record: Record, truth: Tensor) -> np.ndarray:
        """Leading matches of the chain at each slot, [T], from ``taps`` [T, C*D] and ``truth`` [T]; -1: no chain."""
        ids = torch.from_numpy(record.input_ids.astype("int64"))[None]
        slots = objective.drafted_slots(torch.from_numpy(record.loss_mask)[None], DRAFT_TOKENS)
        T, index = ids.shape[1], slots.index[0]
        on_text, alive = torch.ones(len(index), dtype=torch.bool), slots.valid[0, :, 0]
        lead = torch.zeros(len(index), dtype=torch.int64)
        drafter = _fed(self.drafter, self.feedback, taps, index)
        for k, state in enumerate(objective.unroll(drafter, taps[None], ids, slots)):
            at = index + 1 + k
            said = torch.full_like(index, -2)  # a chain that has ended is not asked
            said[on_text] = self.ids[self.drafter.logits(state[0, on_text]).argmax(-1)]
            on_text &= slots.valid[0, :, k] & (said == truth[at.clamp(max=T - 1)])
            lead += on_text
            on_text &= (at + 1 >= T) | (said == ids[0, (at + 1).clamp(max=T - 1)])
        found = np.full(T, -1, dtype=np.int64)
        found[index[alive].numpy()] = lead[alive].numpy()
        return found


def engine(subject: Subject, bed: Bed) -> Engine:
    """The drafter as its files stand. Raises CannotRun."""
    try:
        taps = tuple(vllm.captured(subject.config, bed.n, "v1"))
        shape = DrafterConfig(**hf.read_shape(subject.config, taps, bed.name))
        named = layouts.read(subject.tensors, bed.name).names
    except (EyasError, ValidationError) as error:
        raise CannotRun(str(error)) from error
    if taps[0] < 0 or taps[-1] > bed.n:
        raise CannotRun(f"taps {taps} of {bed.n} layers")
    tensors = {ours: subject.tensors[theirs] for ours, theirs in named.items()}
    W = len(tensors["d2t"]) if "d2t" in tensors else shape.draft_vocab_size
    ids = torch.arange(W) + (tensors["d2t"].long() if "d2t" in tensors else 0)
    ids = torch.where((ids >= 0) & (ids < bed.target.vocab_size), ids, -1)
    own = shape.model_copy(update={"own_embedding": "embed_tokens.weight" in tensors, "draft_vocab_size": W})
    embedding = None if own.own_embedding else bed.target.embedding.float()
    if shape.vocab_size != bed.target.vocab_size:
        raise CannotRun("vocab_size is not the target's")
    drafter = Drafter(own, DraftVocab(torch.arange(W), own.vocab_size), embedding)
    _fill(drafter, tensors, bed, ids)
    if (part := subject.config.get("partial_rotary_factor")) is not None:
        _rotate_in_part(drafter, part)
    return Engine(drafter.eval().requires_grad_(False), ids, taps, subject.feedback)


def _fill(drafter: Drafter, tensors: dict[str, Tensor], bed: Bed, ids: Tensor) -> None:
    if "lm_head.weight" not in tensors:
        tensors = tensors | {"lm_head.weight": bed.target.head_weight[ids.clamp(min=0)]}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in tensors:
                if tensors[name].shape != parameter.shape:
                    raise CannotRun(f"{name} is {list(tensors[name].shape)}, {list(parameter.shape)} is built")
                parameter.copy_(tensors[name].float())
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)


def _rotate_in_part(drafter: Drafter, part: float) -> None:
    """Rotate the first ``part`` of each head alone, with the frequencies of a head that wide."""
    shape = drafter.config
    width = int(shape.head_dim * part)
    narrow = shape.model_copy(update={"head_dim": width})
    rotary = type(drafter.rotary)(narrow.as_llama())

    def rotated(heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(heads, positions)
        turned = apply_rotary_pos_emb(heads[..., :width], heads[..., :width], cos, sin)[0]
        return torch.cat((turned, heads[..., width:]), dim=-1)

    cast(Any, drafter)._rotated = rotated


class _Fed:
    """A drafter whose later steps are fed something else than its own last state."""

    def __init__(self, drafter: Drafter, what: str, first: Tensor) -> None:
        self._drafter, self._what, self._held = drafter, what, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def feedback(self, state: Tensor) -> Tensor:
        if self._what == "zero":
            return torch.zeros_like(state)
        if self._what == "target":
            return self._held
        before, self._held = self._held, state  # stale: what the step before last left
        return before


def _fed(drafter: Drafter, what: str | None, taps: Tensor, index: Tensor) -> Drafter:
    if what is None:
        return drafter
    return cast(Drafter, _Fed(drafter, what, drafter.fuse(taps[None])[:, index]))


@dataclass(frozen=True, eq=False)
class Played:
    """``histograms`` [R, K+1]: rounds of each record by tokens kept."""

    histograms: np.ndarray

    @property
    def lengths(self) -> LengthCounts:
        kept = (self.histograms * np.arange(DRAFT_TOKENS + 1)).sum(1)
        return LengthCounts(DRAFT_TOKENS, self.histograms.sum(1), kept)


@torch.no_grad()
def play(runner: Engine, bank: Bank, records: Sequence[Record], fed: Sequence[Tensor] | None = None) -> Played:
    """Walks over ``records``; ``fed`` are the taps [T, C*D] of each, where they are not the target's own."""
    rows = []
    for number, record in enumerate(records):
        taps = bank.states(record, runner.taps) if fed is None else fed[number]
        if taps.shape != (record.seq_len, runner.drafter.fc.in_features):
            raise CannotRun(f"{list(taps.shape)} states for {record.seq_len} tokens")
        lead = runner.leads(taps, record, bank.truth(record))
        rows.append(curve.walk(lead, record.spans(), DRAFT_TOKENS))
    return Played(np.stack(rows))


def play_healthy(bed: Bed, records: Sequence[Record]) -> Played:
    """Walks of the drafter nothing was done to; each record is walked once."""
    keys = [(record.id, record.loss_mask.tobytes()) for record in records]
    if new := [i for i, key in enumerate(keys) if key not in bed.walks]:
        found = play(engine(healthy(bed), bed), bed.bank, [records[i] for i in new])
        bed.walks.update(zip([keys[i] for i in new], found.histograms, strict=True))
    return Played(np.stack([bed.walks[key] for key in keys]))


def agreement(bank: Bank, records: Sequence[Record]) -> float:
    """Share of supervised tokens that are the target's own choice: below ``curve.ON_POLICY`` no walk means anything."""
    agreed = slots = 0
    for record in records:
        at = np.flatnonzero(record.loss_mask[1:])
        agreed += int((bank.truth(record)[at] == torch.from_numpy(record.input_ids[at + 1].astype("int64"))).sum())
        slots += len(at)
    return agreed / max(slots, 1)
