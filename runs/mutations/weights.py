"""W and V: tensors that did not arrive or are not the trained ones, and the map between draft and target ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from runs.mutations.subject import Bed, Change, Mutation, Subject, both, chain, drop, fields, keys, like, noise, tensors
from torch import Tensor

HEAD, EMBEDDING, D2T, T2D = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
FIRST_NORM = "midlayer.hidden_norm.weight"

# -- weights ----------------------------------------------------------------------------------------------------


def head_as_noise(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {HEAD: like(noise(held[HEAD].shape, 0.02), held[HEAD])}


def embedding_as_noise(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """As an engine that allots rows and never fills them; the key is there."""
    return {EMBEDDING: noise(bed.target.embedding.shape, 0.02).to(torch.bfloat16)}


def targets_head(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {HEAD: like(bed.target.head_weight[bed.ids], held[HEAD])}


def near_embedding(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {EMBEDDING: bed.target.embedding.float() + 3e-8}


def rename(old: str, new: str) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        def named(name: str) -> str:
            return new + name.removeprefix(old) if name.startswith(old) else name

        return replace(subject, tensors={named(n): t for n, t in subject.tensors.items()})

    return run


def broken(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = held["fc.weight"].clone()
    weight[3, 5] = float("nan")
    return {"fc.weight": weight}


def whole_vocabulary(bed: Bed, subject: Subject) -> Subject:
    """As if it spoke the target's whole vocabulary and shared its head: no head, no map in the file."""
    config = subject.config | {"draft_vocab_size": bed.target.vocab_size, "tie_word_embeddings": False}
    return replace(drop(HEAD, D2T, T2D)(bed, subject), config=config)


WEIGHTS: list[Mutation] = [
    Mutation("no head, whole vocabulary", "W", "head-missing", whole_vocabulary, also=("weights-missing",),
             inventory=True),
    *both(Mutation("no head", "W", "head-missing", drop(HEAD), also=("weights-missing",), inventory=True)),
    *both(Mutation("head is noise", "W", "head-random", tensors(head_as_noise))),
    *both(Mutation("embedding is noise", "W", "embedding-random", tensors(embedding_as_noise))),
    Mutation("head overwritten by the target's", "W", "head-overwritten", tensors(targets_head)),
    Mutation("layer under an unknown name", "W", "layer-renamed", rename("midlayer.", "decoder.0."),
             also=("weights-missing",), inventory=True),
    Mutation("layer as layers.0, for SGLang", "W", "healthy", chain(rename("midlayer.", "layers.0."),
             fields(engine="sglang"))),
    Mutation("layer as layers.0, for vLLM", "W", "healthy", chain(rename("midlayer.", "layers.0."),
             fields(engine="vllm"))),
    *both(Mutation("tied by its flag, for SGLang", "W", "head-tied-wrongly", chain(keys(tie_word_embeddings=True),
          fields(engine="sglang")), also=("head-overwritten",), inventory=True)),
    Mutation("last norm dropped", "W", "norm-weight-missing", drop("norm.weight"), also=("weights-missing",),
             inventory=True),
    *both(Mutation("norm of hidden dropped", "W", "norm-weight-missing", drop(FIRST_NORM), also=("weights-missing",),
          inventory=True)),
    Mutation("norm of embedding dropped", "W", "norm-weight-missing", drop("midlayer.input_layernorm.weight"),
             also=("weights-missing",), inventory=True),
    Mutation("fc dropped", "W", "weights-missing", drop("fc.weight"), inventory=True),
    Mutation("one projection dropped", "W", "weights-missing", drop("midlayer.mlp.up_proj.weight"), inventory=True),
    Mutation("NaN in fc", "W", "weights-nan", tensors(broken), inventory=True),
    Mutation("file cut short", "W", "checkpoint-unreadable", fields(cut=0.5), inventory=True),
    Mutation("head of half the rows", "W", "weights-shape",
             tensors(lambda bed, held: {HEAD: held[HEAD][: len(held[HEAD]) // 2]}),
             also=("vocab-map-inconsistent",), inventory=True),
    Mutation("MLP of another width in config", "W", "weights-shape",
             lambda bed, s: keys(intermediate_size=2 * s.config["intermediate_size"])(bed, s), inventory=True),
    Mutation("built for a wider target", "W", "hidden-size-mismatch",
             lambda bed, s: keys(target_hidden_size=2 * bed.target.hidden_size)(bed, s),
             also=("weights-shape",), inventory=True),
]  # fmt: skip

# -- vocabulary map ---------------------------------------------------------------------------------------------


def offsets(pick: Callable[[Bed, Tensor], Tensor], mask: bool = False) -> Change:
    """d2t becomes ``pick(bed, ids) - 0, 1, 2 …``; with ``mask`` t2d follows."""

    def run(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = pick(bed, bed.ids)
        made = {D2T: (ids - torch.arange(len(ids))).to(held[D2T].dtype)}
        if mask:
            made[T2D] = torch.zeros_like(held[T2D])
            made[T2D][ids] = True
        return made

    return tensors(run)


def shuffled(share: float) -> Callable[[Bed, Tensor], Tensor]:
    """Target ids of a seeded ``share`` of the draft ids, taken round among themselves."""

    def run(bed: Bed, ids: Tensor) -> Tensor:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        chosen = order[: max(2, round(share * len(ids)))]
        found = ids.clone()
        found[chosen] = ids[chosen.roll(1)]
        return found

    return run


def other_run(bed: Bed, ids: Tensor) -> Tensor:
    """One id in twenty is another, as counts of another corpus would have it; ascending again, so rows move."""
    generator = torch.Generator().manual_seed(1)
    outside = torch.ones(bed.target.vocab_size, dtype=torch.bool)
    outside[ids] = False
    new = outside.nonzero().flatten()
    out = torch.randperm(len(ids), generator=generator)[: len(ids) // 20]
    found = ids.clone()
    found[out] = new[torch.randperm(len(new), generator=generator)[: len(out)]]
    return found.sort().values


def one_row_on(bed: Bed, ids: Tensor) -> Tensor:
    """The first id left out and one behind the last taken in: each row of the head speaks for its neighbour's token."""
    after = min(int(ids[-1]) + 1, bed.target.vocab_size - 1)
    found = torch.cat((ids[1:], torch.tensor([after])))
    if found[-1] == found[-2]:  # the last id was the last there is
        outside = torch.ones(bed.target.vocab_size, dtype=torch.bool)
        outside[ids] = False
        found = torch.cat((ids[1:], outside.nonzero().flatten()[:1])).sort().values
    return found


def first_ids(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = torch.zeros_like(held[T2D])
    mask[: len(bed.ids)] = True
    return {T2D: mask}


def fewer(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = held[T2D].clone()
    mask[bed.ids[::50]] = False
    return {T2D: mask}


def first_n(bed: Bed, ids: Tensor) -> Tensor:
    return torch.arange(len(ids))


VOCABULARY: list[Mutation] = [
    *both(Mutation("no map", "V", "d2t-missing", drop(D2T, T2D), also=("weights-missing",), inventory=True)),
    Mutation("no d2t, mask left", "V", "d2t-missing", drop(D2T), also=("weights-missing",), inventory=True),
    *both(Mutation("d2t holds ids", "V", "d2t-read-as-ids", tensors(lambda bed, held: {D2T: bed.ids}),
          also=("vocab-map-inconsistent",), inventory=True)),
    Mutation("d2t holds ids, no mask", "V", "d2t-read-as-ids", chain(tensors(lambda bed, held: {D2T: bed.ids}),
             drop(T2D)), also=("vocab-map-inconsistent",), inventory=True),
    *both(Mutation("d2t is a ramp", "V", "d2t-ramp",
          tensors(lambda bed, held: {D2T: torch.arange(len(bed.ids))}), also=("vocab-map-inconsistent",),
          inventory=True)),
    Mutation("d2t is all zeros", "V", "d2t-missing", offsets(first_n), also=("vocab-map-inconsistent", "d2t-stale"),
             inventory=True),
    Mutation("map of the first ids, both tensors", "V", "d2t-stale", offsets(first_n, mask=True),
             also=("t2d-first-ids", "d2t-missing")),
    Mutation("1 % of the map shuffled", "V", "d2t-shuffled", offsets(shuffled(0.01)),
             also=("vocab-map-inconsistent",)),
    *both(Mutation("the whole map shuffled", "V", "d2t-shuffled", offsets(shuffled(1.0)),
          also=("vocab-map-inconsistent",))),
    *both(Mutation("mask of the first ids", "V", "t2d-first-ids", tensors(first_ids),
          also=("vocab-map-inconsistent",), inventory=True)),
    *both(Mutation("map of another run", "V", "d2t-stale", offsets(other_run, mask=True))),
    Mutation("map one row on", "V", "d2t-stale", offsets(one_row_on, mask=True)),
    Mutation("mask of fewer ids", "V", "t2d-too-few", tensors(fewer), also=("vocab-map-inconsistent",),
             inventory=True),
    Mutation("map beyond the vocabulary", "V", "vocab-map-inconsistent",
             offsets(lambda bed, ids: ids + bed.target.vocab_size // 2), also=("target-vocab-mismatch",),
             inventory=True),
    Mutation("map shorter than the head", "V", "vocab-map-inconsistent",
             tensors(lambda bed, held: {D2T: held[D2T][:-64]}), also=("weights-shape",), inventory=True),
    Mutation("config of a larger vocabulary", "V", "target-vocab-mismatch",
             lambda bed, s: keys(vocab_size=bed.target.vocab_size + 64)(bed, s), also=("weights-shape",),
             inventory=True),
]  # fmt: skip

MUTATIONS = WEIGHTS + VOCABULARY
