"""T: which layers are read, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from runs.mutations.subject import IDS, Bed, Change, Mutation, Subject, both, chain, fields, keys, tensors
from torch import Tensor

from eyas.dialects import vllm


def declare(pick: Callable[[Bed], Sequence[int]]) -> Change:
    """The config names these taps, at top level and inside ``eagle_config``, each key in its engine's own numbers."""

    def run(bed: Bed, subject: Subject) -> Subject:
        taps = list(pick(bed))
        inner = dict(subject.config["eagle_config"]) | {IDS: [tap - 1 for tap in taps]}
        return replace(subject, config=subject.config | {IDS: taps, "eagle_config": inner})

    return run


def blocks(*order: int) -> Change:
    """fc trained on its taps in another order: block j of the new weight is block order[j] of the old one."""

    def run(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = held["fc.weight"].chunk(len(bed.taps), dim=1)
        return {"fc.weight": torch.cat([parts[i] for i in order], dim=1)}

    return tensors(run)


def moved(slot: int, by: int) -> Callable[[Bed], Sequence[int]]:
    return lambda bed: [tap + by * (i == slot) for i, tap in enumerate(bed.taps)]


def default(bed: Bed) -> list[int]:
    return vllm.captured({}, bed.n, "v1")


def not_default(bed: Bed) -> bool:
    return list(bed.taps) != default(bed)


def strangers(bed: Bed) -> list[int]:
    """Taps that are not even beside a trained one."""
    return [tap for tap in range(1, bed.n) if min(abs(tap - own) for own in bed.taps) > 1]


def far(bed: Bed) -> list[int]:
    found = strangers(bed)
    return [found[0], found[len(found) // 2], found[-1]]


def inner_only(bed: Bed, subject: Subject) -> Subject:
    """As SpecForge writes a config: ids inside ``eagle_config`` alone, which vLLM's V1 runner takes as they stand."""
    return replace(subject, config={k: v for k, v in subject.config.items() if k != IDS})


def no_embedding_tap(bed: Bed) -> bool:
    return 0 not in bed.taps


MUTATIONS: list[Mutation] = [
    *both(
        Mutation("taps + 1", "T", "taps-off-by-one", declare(lambda bed: [t + 1 for t in bed.taps]),
                 also=("taps-ambiguous",)),  # of a DeepSeek target SGLang reads just these ids right
        "contract-edited",
    ),
    *both(
        Mutation(
            "taps - 1",
            "T",
            "taps-off-by-minus-one",
            declare(lambda bed: [t - 1 for t in bed.taps]),
            applies=no_embedding_tap,
        ),
        "contract-edited",
    ),
    Mutation("taps + 2", "T", "taps-differ", declare(lambda bed: [t + 2 for t in bed.taps])),
    Mutation("lowest tap + 1", "T", "taps-differ", declare(moved(0, 1))),
    Mutation("middle tap + 1", "T", "taps-differ", declare(moved(1, 1))),
    Mutation("middle tap - 1", "T", "taps-differ", declare(moved(1, -1))),
    Mutation("highest tap + 1", "T", "taps-differ", declare(moved(2, 1))),
    Mutation("highest tap - 2", "T", "taps-differ", declare(moved(2, -2))),
    Mutation("fc blocks 0 and 1 swapped", "T", "taps-swapped", blocks(1, 0, 2)),
    Mutation("fc blocks 1 and 2 swapped", "T", "taps-swapped", blocks(0, 2, 1)),
    Mutation("fc blocks reversed", "T", "taps-reversed", blocks(2, 1, 0), also=("taps-swapped",)),
    Mutation("fc blocks turned left", "T", "taps-swapped", blocks(1, 2, 0), also=("taps-differ",)),
    Mutation("fc blocks turned right", "T", "taps-swapped", blocks(2, 0, 1), also=("taps-differ",)),
    *both(
        Mutation(
            "engine's default taps", "T", "taps-engine-default", declare(default), also=("taps-differ",),
            applies=not_default,
        ),
        "contract-edited",
    ),
    Mutation("taps of nobody", "T", "taps-differ", declare(far), applies=lambda bed: len(strangers(bed)) > 2),
    Mutation(
        "the other fixture's taps", "T", "taps-differ", declare(lambda bed: [0, 2, bed.n // 2]),
        applies=lambda bed: bed.taps != (0, 2, bed.n // 2),
    ),
    *both(
        Mutation(
            "ids removed", "T", "taps-key-missing", keys(remove=[IDS]), also=("taps-engine-default", "taps-differ"),
            applies=not_default,
        ),
    ),
    Mutation(
        "ids removed where they were the default", "T", "healthy", keys(remove=[IDS]),
        applies=lambda bed: not not_default(bed),
    ),
    Mutation(
        "ids counted as layer outputs, inside eagle_config only", "T", "taps-off-by-minus-one", inner_only,
        also=("taps-ambiguous", "taps-differ"), applies=no_embedding_tap,
    ),
    Mutation(
        "ids + 1 inside eagle_config, for SGLang", "T", "taps-off-by-one",
        chain(
            lambda bed, s: replace(s, config=s.config | {"eagle_config": {IDS: list(bed.taps)}}),
            fields(engine="sglang"),
        ),
        also=("taps-branch", "keys-contradict"), inventory=True, keeps_contract=True,
        applies=lambda bed: bed.target.architecture == "LlamaForCausalLM",
    ),
    Mutation(
        "id out of range", "T", "taps-too-few", declare(lambda bed: [*bed.taps[:2], bed.n + 3]), also=("ids-odd",),
        inventory=True,
    ),
    Mutation(
        "one id twice", "T", "taps-too-few", declare(lambda bed: [bed.taps[0], bed.taps[1], bed.taps[1]]),
        also=("ids-odd", "weights-shape"), inventory=True,
    ),
    Mutation(
        "two ids for three blocks", "T", "taps-too-few", declare(lambda bed: bed.taps[:2]), also=("weights-shape",),
        inventory=True,
    ),
]  # fmt: skip
