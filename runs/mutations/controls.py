"""H and X: drafters nothing is wrong with, however odd their files look, and the taxonomy's negative controls."""

from __future__ import annotations

from dataclasses import replace

import torch
from runs.mutations.states import int4, matrices, stored
from runs.mutations.subject import Bed, Mutation, Sample, Subject, drop, fields, keys, tensors, unchanged
from runs.mutations.weights import D2T, EMBEDDING, HEAD, T2D, near_embedding, rename
from torch import Tensor


def other_order(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Map and head in another order, together: as legal as the ascending one."""
    order = torch.randperm(len(bed.ids), generator=torch.Generator().manual_seed(0))
    return {D2T: bed.ids[order] - torch.arange(len(order)), HEAD: held[HEAD][order]}


def own_copy(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {EMBEDDING: bed.target.embedding.to(torch.bfloat16)}


def rope_at_top(bed: Bed, subject: Subject) -> Subject:
    return keys(remove=["rope_parameters"])(bed, subject)


def rope_inside(bed: Bed, subject: Subject) -> Subject:
    return keys(remove=["rope_theta"])(bed, subject)


def ids_at_top(bed: Bed, subject: Subject) -> Subject:
    return replace(subject, config={k: v for k, v in subject.config.items() if k != "eagle_config"})


def smaller_epsilon(bed: Bed, subject: Subject) -> Subject:
    return keys(rms_norm_eps=subject.config["rms_norm_eps"] / 10)(bed, subject)


def whole_map(bed: Bed, subject: Subject) -> Subject:
    """A head over the whole vocabulary and a map that is all zeros; rows of tokens it never says are zero."""
    V = bed.target.vocab_size
    head = torch.zeros(V, subject.tensors[HEAD].shape[1], dtype=subject.tensors[HEAD].dtype)
    head[bed.ids] = subject.tensors[HEAD]
    made = {HEAD: head, D2T: torch.zeros(V, dtype=torch.int64), T2D: torch.ones(V, dtype=torch.bool)}
    return replace(subject, tensors=subject.tensors | made, config=subject.config | {"draft_vocab_size": V})


def small_vocabulary(bed: Bed) -> bool:
    """Where a whole head is no hundreds of megabytes."""
    return bed.target.vocab_size <= 65_536


def tuple_index(bed: Bed, made: list[Sample]) -> list[Sample]:
    """States taken as entries k + 1 of Hugging Face's tuple for the ids k = tap - 1: the very same taps."""
    return made


def plain(bed: Bed) -> bool:
    return EMBEDDING not in bed.tensors


MUTATIONS: list[Mutation] = [
    Mutation("as it is", "H", "healthy", unchanged, keeps_contract=True),
    Mutation("without its contract", "H", "healthy", unchanged),
    Mutation("saved in fp32", "H", "healthy",
             tensors(lambda bed, held: {n: t.float() for n, t in held.items() if t.is_floating_point()})),
    Mutation("layer as layers.0", "H", "healthy", rename("midlayer.", "layers.0.")),
    Mutation("model. before every name", "H", "healthy", lambda bed, s: replace(
        s, tensors={n if n in (D2T, T2D, HEAD) else f"model.{n}": t for n, t in s.tensors.items()})),
    Mutation("pickled", "H", "healthy", fields(pickled=True)),
    Mutation("in three shards", "H", "healthy", fields(shards=3)),
    Mutation("map and head in another order", "H", "healthy", tensors(other_order)),
    Mutation("mask left out", "H", "healthy", drop(T2D)),
    Mutation("offsets as int32", "H", "healthy", tensors(lambda bed, held: {D2T: held[D2T].to(torch.int32)})),
    Mutation("a copy of the target's embedding", "H", "healthy", tensors(own_copy), applies=plain),
    Mutation("base at top level only", "H", "healthy", rope_at_top),
    Mutation("base in rope_parameters only", "H", "healthy", rope_inside),
    Mutation("ids at top level only", "H", "healthy", ids_at_top),
    Mutation("epsilon a tenth", "H", "healthy", smaller_epsilon),
    Mutation("a tensor nobody uses", "H", "healthy",
             tensors(lambda bed, held: {"training.step": torch.tensor([700])}), also=("weights-unexpected",)),
    Mutation("half of the records", "H", "healthy",
             lambda bed, s: replace(s, records=s.records[::2])),
    Mutation("map of zeros, whole vocabulary", "X", "healthy", whole_map, applies=small_vocabulary),
    Mutation("hidden tuple index + 1", "X", "healthy", stored(tuple_index, last=False)),
    Mutation("4-bit drafter", "X", "healthy", tensors(matrices(int4)), also=("drafter-quantised",)),
    Mutation("embedding distinct by 3e-8", "X", "healthy", tensors(near_embedding), applies=plain),
]  # fmt: skip
