"""States handed over as files: S (shifted against the ids), D (not the states of these ids), T and Q likewise.

A sample holds the drafter's taps in order, then tap n before the final norm, as loose tensors without names. What the
drafter is fed is the first of them.

Letters: T positions, D target width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from runs.mutations.subject import SAMPLES, Bed, Change, Mutation, Sample, Subject, tensors
from torch import Tensor

from eyas.records import Record


def sample(bed: Bed, record: Record, layers: Sequence[int]) -> Sample:
    return Sample(record, [bed.bank.states(record, [tap]).to(torch.bfloat16) for tap in layers])


def stored(
    change: Callable[[Bed, list[Sample]], list[Sample]] = lambda bed, made: made, *, last: bool = True
) -> Change:
    """Samples of the first records beside the drafter, then ``change``; no more records than samples."""

    def run(bed: Bed, subject: Subject) -> Subject:
        layers = [*bed.taps, *([bed.n] if last else [])]
        made = [sample(bed, record, layers) for record in subject.records[:SAMPLES]]
        return replace(subject, samples=change(bed, made), records=subject.records[:SAMPLES])

    return run


def every(change: Callable[[Bed, Tensor, int], Tensor], *, taps_only: bool = False) -> Change:
    """``change(bed, tensor, which)`` on every tensor of every sample, tap n among them unless ``taps_only``."""

    def run(bed: Bed, made: list[Sample]) -> list[Sample]:
        C = len(bed.taps)
        return [
            replace(s, tensors=[change(bed, t, i) if i < C or not taps_only else t for i, t in enumerate(s.tensors)])
            for s in made
        ]

    return stored(run)


# -- shifts -----------------------------------------------------------------------------------------------------


def shifted(by: int) -> Callable[[Bed, Tensor, int], Tensor]:
    """Row t holds what stood at t + by; the end is filled with its own row."""

    def run(bed: Bed, tensor: Tensor, which: int) -> Tensor:
        T = len(tensor)
        return tensor[(torch.arange(T) + by).clamp(0, T - 1)]

    return run


# -- other states -----------------------------------------------------------------------------------------------


def zeroed(share: float) -> Callable[[Bed, list[Sample]], list[Sample]]:
    """A seeded share of the rows, the same in all tensors of a sample."""

    def run(bed: Bed, made: list[Sample]) -> list[Sample]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for one in made:
            kept = torch.rand(len(one.tensors[0]), generator=generator) >= share
            found.append(replace(one, tensors=[t * kept[:, None] for t in one.tensors]))
        return found

    return run


def of_previous(bed: Bed, made: list[Sample]) -> list[Sample]:
    """Each record has the states of the one before it, cut or repeated to its own length."""
    found = []
    for i, one in enumerate(made):
        T = len(one.tensors[0])
        found.append(replace(one, tensors=[t[torch.arange(T) % len(t)] for t in made[i - 1].tensors]))
    return found


def of_first(bed: Bed, made: list[Sample]) -> list[Sample]:
    """Every record has the states of the first, as a gather at the first request's index gives them."""
    found = [made[0]]
    for one in made[1:]:
        T = len(one.tensors[0])
        found.append(replace(one, tensors=[t[torch.arange(T) % len(t)] for t in made[0].tensors]))
    return found


def rows_shuffled(bed: Bed, made: list[Sample]) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for one in made:
        order = torch.randperm(len(one.tensors[0]), generator=generator)
        found.append(replace(one, tensors=[t[order] for t in one.tensors]))
    return found


def one_layer_deeper(bed: Bed, made: list[Sample]) -> list[Sample]:
    return [sample(bed, one.record, [*(tap + 1 for tap in bed.taps), bed.n]) for one in made]


def order_of_records(bed: Bed, made: list[Sample]) -> list[Sample]:
    """Files in another order than the records; each holds its own ids."""
    return [made[i] for i in torch.randperm(len(made), generator=torch.Generator().manual_seed(0))]


def truncated(bed: Bed, made: list[Sample]) -> list[Sample]:
    """Cut at a limit that most records exceed, ids left whole."""
    limit = sorted(len(one.tensors[0]) for one in made)[len(made) // 4]
    return [replace(one, tensors=[t[:limit] for t in one.tensors]) for one in made]


def final_for_highest(bed: Bed, made: list[Sample]) -> list[Sample]:
    """The highest tap is the target's final, normalised state: Hugging Face's last hidden state."""
    return [
        replace(one, tensors=[*one.tensors[:-2], bed.bank.normed(one.record).to(torch.bfloat16), one.tensors[-1]])
        for one in made
    ]


def last_normed(bed: Bed, made: list[Sample]) -> list[Sample]:
    """Tap n is stored after the final norm. The drafter does not read it."""
    return [replace(s, tensors=[*s.tensors[:-1], bed.bank.normed(s.record).to(torch.bfloat16)]) for s in made]


def ids_without_first(bed: Bed, subject: Subject) -> Subject:
    """Ids and mask lost their first entry, states their last row: row t stands beside the id of t + 1."""
    subject = stored()(bed, subject)
    assert subject.samples is not None
    found = []
    for one in subject.samples:
        cut = replace(one.record, input_ids=one.record.input_ids[1:], loss_mask=one.record.loss_mask[1:])
        found.append(Sample(cut, [t[:-1] for t in one.tensors]))
    return replace(subject, samples=found, records=[one.record for one in found])


# -- precision and rotation -------------------------------------------------------------------------------------


def orthogonal(width: int) -> Tensor:
    values = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, upper = torch.linalg.qr(values)
    turned: Tensor = (found * upper.diagonal().sign()).float()
    return turned


def rotated(bed: Bed, tensor: Tensor, which: int) -> Tensor:
    return (tensor.float() @ orthogonal(tensor.shape[1])).to(tensor.dtype)


def fp8(bed: Bed, tensor: Tensor, which: int) -> Tensor:
    scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def int4(tensor: Tensor, group: int = 32) -> Tensor:
    """Rounded to sixteen steps in groups along the rows, as weight-only formats round."""
    parts = tensor.float().view(len(tensor), -1, math.gcd(group, tensor.shape[1]))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    return ((parts / scale).round().clamp(-8, 7) * scale).view(tensor.shape).to(tensor.dtype)


def trained_on_rotated(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """fc as of a target whose stream is turned: each block takes the rotation, so plain states no longer fit."""
    turn = orthogonal(bed.target.hidden_size)
    parts = [part.float() @ turn for part in held["fc.weight"].chunk(len(bed.taps), dim=1)]
    return {"fc.weight": torch.cat(parts, dim=1).to(held["fc.weight"].dtype)}


def matrices(change: Callable[[Tensor], Tensor]) -> Callable[[Bed, dict[str, Tensor]], dict[str, Tensor]]:
    """On every matrix of the drafter."""
    return lambda bed, held: {n: change(t) for n, t in held.items() if t.ndim == 2}


def fp8_matrix(tensor: Tensor) -> Tensor:
    scale = tensor.float().abs().amax() / 448
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def with_int4_target(bed: Bed, subject: Subject) -> Subject:
    return every(lambda bed, tensor, which: int4(tensor))(bed, subject)


# A shift seen from the other side: the stored rows are right and the drafter was trained on other pairs.
TWICE, ONCE = ("training-shift-twice",), ("token-shift-missing",)

MUTATIONS: list[Mutation] = [
    Mutation("highest stored state is the final one", "T", "taps-highest-final-state", stored(final_for_highest)),
    Mutation("row t holds the state of t + 1", "S", "token-shift-missing", every(shifted(1)), also=TWICE),
    Mutation("row t holds the state of t - 1", "S", "token-shift-two", every(shifted(-1)), also=ONCE),
    Mutation("row t holds the state of t + 2", "S", None, every(shifted(2)), also=("token-shift-missing",)),
    Mutation("taps of t + 1, tap n of t", "S", "token-shift-missing", every(shifted(1), taps_only=True), also=TWICE),
    Mutation("ids of the sample shifted by one", "S", "token-shift-two", ids_without_first,
             also=("states-of-other-request",)),
    Mutation("every record has the first one's states", "S", "gather-first-request", stored(of_first),
             also=("states-of-other-request",)),
    Mutation("5 % of rows zero", "D", "states-zero", stored(zeroed(0.05)), inventory=True),
    Mutation("all rows zero", "D", "states-zero", stored(zeroed(1.0)), inventory=True),
    Mutation("states of the request before", "D", "states-of-other-request", stored(of_previous)),
    Mutation("rows shuffled", "D", "states-rows-shuffled", stored(rows_shuffled)),
    Mutation("stored one layer deeper", "D", "states-off-by-one-layer", stored(one_layer_deeper),
             also=("taps-off-by-one",)),
    Mutation("states cut, ids not", "D", "states-truncated", stored(truncated), inventory=True),
    Mutation("states rotated", "Q", "states-rotated", every(rotated)),
    Mutation("taps rotated, tap n not", "Q", "states-rotated", every(rotated, taps_only=True)),
    Mutation("fc trained on rotated states", "Q", "states-rotated", tensors(trained_on_rotated)),
    Mutation("states in fp8", "Q", "healthy", every(fp8), also=("target-quantised",)),
    Mutation("states in int4", "Q", "target-quantised", with_int4_target),
    Mutation("matrices in fp8", "Q", "healthy", tensors(matrices(fp8_matrix)), also=("drafter-quantised",)),
    Mutation("states as they should be", "H", "healthy", stored()),
    Mutation("states without tap n", "H", "healthy", stored(last=False)),
    Mutation("tap n stored after the final norm", "H", "healthy", stored(last_normed)),
    Mutation("states in another order than the records", "H", "healthy", stored(order_of_records)),
]  # fmt: skip
