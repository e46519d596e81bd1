"""What is mutated and what comes of it.

Letters: T positions, D target width, C taps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs.mutations.bank import Bank
from safetensors.torch import save_file
from torch import Tensor

from eyas import checkpoint
from eyas.records import Record
from eyas.results import LengthCounts
from eyas.target import Target

KINDS: dict[str, str] = {
    "T": "taps",
    "W": "weights",
    "V": "vocabulary map",
    "N": "norms and residual",
    "F": "feedback",
    "R": "rotary, positions, limits",
    "S": "token shift",
    "D": "data, states, masks",
    "P": "prompt and template",
    "Q": "precision and rotation",
    "C": "flags and declarations",
    "M": "metrics",
    "H": "healthy controls",
    "X": "the taxonomy's ten negative controls",
}
IDS = "eagle_aux_hidden_state_layer_ids"
SAMPLES = 64  # records whose states are handed over as files


@dataclass(frozen=True, eq=False)
class Bed:
    """A drafter that is good, its target and records held out from its training."""

    name: str
    folder: Path
    target: Target
    records: list[Record]
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]
    bank: Bank
    manifest: Mapping[str, Any] = field(default_factory=dict)
    walks: dict[tuple[str, bytes], np.ndarray] = field(default_factory=dict)
    """Rounds by tokens kept of the healthy drafter, by record and mask: every row compares with them."""
    mutated: dict[str, LengthCounts | None] = field(default_factory=dict)
    """What came of mutated files, by their digest: many rows differ in what only check sees."""

    @property
    def n(self) -> int:
        return self.target.num_layers

    @property
    def ids(self) -> Tensor:
        """Target ids of the draft vocabulary, by draft id."""
        return self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))

    @property
    def chat(self) -> bool:
        """Whether its records were rendered by a chat template."""
        return getattr(self.target.tokenizer, "chat_template", None) is not None


def bed(
    name: str, folder: Path, target: Target, records: list[Record], manifest: Mapping[str, Any] | None = None
) -> Bed:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors, _ = checkpoint.every_tensor(folder)
    taps = tuple(config["eyas"]["contract"]["taps"]["value"])
    return Bed(name, folder, target, records, config, tensors, taps, Bank(target, records), manifest or {})


@dataclass(frozen=True, eq=False)
class Sample:
    """Stored states of one record, as a trainer would keep them: tensors [T, D] in a list, nothing said of them."""

    record: Record
    tensors: list[Tensor]

    def write(self, path: Path) -> None:
        ids = torch.from_numpy(self.record.input_ids.astype("int64"))
        held = [t.contiguous().clone() for t in self.tensors]
        mask = torch.from_numpy(self.record.loss_mask.astype("int64"))
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": held}, path)


@dataclass(frozen=True, eq=False)
class Subject:
    """One drafter as it is handed to ``check``, with whatever else is handed over."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    records: list[Record]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    samples: list[Sample] | None = None
    log: str | None = None
    engine: str | None = None
    flags: str | None = None
    pickled: bool = False
    shards: int = 1
    cut: float | None = None
    """Share of the weights' file that is left."""
    feedback: str | None = None
    """A fault of the engine that no file shows: what it feeds from the second step on (``naive``)."""

    def write(self, folder: Path) -> Path:
        """Config and weights alone: nothing else that lay beside the healthy drafter travels along."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        held = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        if self.pickled:
            torch.save(held, folder / "pytorch_model.bin")
        elif self.shards > 1:
            self._sharded(folder, held)
        else:
            path = folder / "model.safetensors"
            save_file(held, path, metadata={"format": "pt"})
            if self.cut is not None:
                whole = path.read_bytes()
                path.write_bytes(whole[: int(self.cut * len(whole))])
        if self.samples is not None:
            (folder / "states").mkdir()
            for number, sample in enumerate(self.samples):
                sample.write(folder / "states" / f"{number:05d}.pt")
        return folder

    def _sharded(self, folder: Path, held: dict[str, Tensor]) -> None:
        where = {}
        for shard in range(self.shards):
            name = f"model-{shard + 1:05d}-of-{self.shards:05d}.safetensors"
            mine = {key: held[key] for key in sorted(held)[shard :: self.shards]}
            save_file(mine, folder / name, metadata={"format": "pt"})
            where.update(dict.fromkeys(mine, name))
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


Change = Callable[[Bed, Subject], Subject]
Applies = Callable[[Bed], bool]


@dataclass(frozen=True)
class Mutation:
    """``expected``: the slug of the cause, "healthy", or None where what is handed over cannot show it.

    ``also``: other slugs that name the very same fault. ``inventory``: names, shapes, keys, the map's algebra, a log or
    the records by themselves show it, whatever it costs.
    """

    name: str
    kind: str
    expected: str | None
    change: Change
    also: tuple[str, ...] = ()
    inventory: bool = False
    keeps_contract: bool = False
    applies: Applies = lambda bed: True

    def subject(self, bed: Bed) -> Subject:
        return self.change(bed, healthy(bed, self.keeps_contract))


def healthy(bed: Bed, keeps_contract: bool = True) -> Subject:
    config = json.loads(json.dumps(bed.config))
    if not keeps_contract:
        del config["eyas"]
    return Subject(config, dict(bed.tensors), bed.records, bed.manifest if keeps_contract else {})


def both(mutation: Mutation, *also: str) -> list[Mutation]:
    """A mutation without the contract, and again with it: a user's own folder, edited."""
    kept = replace(mutation, name=f"{mutation.name}, contract kept", keeps_contract=True, also=(*mutation.also, *also))
    return [mutation, kept]


# -- small changes that mutations are made of -------------------------------------------------------------------


def unchanged(bed: Bed, subject: Subject) -> Subject:
    return subject


def chain(*changes: Change) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        for change in changes:
            subject = change(bed, subject)
        return subject

    return run


def keys(remove: Sequence[str] = (), **values: Any) -> Change:
    """Keys of config.json set, or taken away at top level and inside ``eagle_config``."""

    def run(bed: Bed, subject: Subject) -> Subject:
        config = {key: value for key, value in subject.config.items() if key not in remove}
        if isinstance(config.get("eagle_config"), dict):
            config["eagle_config"] = {k: v for k, v in config["eagle_config"].items() if k not in remove}
        return replace(subject, config=config | values)

    return run


def tensors(change: Callable[[Bed, dict[str, Tensor]], Mapping[str, Tensor]]) -> Change:
    """``change`` gives the tensors that take the place of those of the same name, or are added."""

    def run(bed: Bed, subject: Subject) -> Subject:
        return replace(subject, tensors={**subject.tensors, **change(bed, subject.tensors)})

    return run


def drop(*names: str) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        assert set(names) <= set(subject.tensors), names
        return replace(subject, tensors={n: t for n, t in subject.tensors.items() if n not in names})

    return run


def fields(**values: Any) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        return replace(subject, **values)

    return run


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """Values worked out in fp32, in the precision the tensor was saved in."""
    return values.to(tensor.dtype)


def noise(shape: Sequence[int], scale: float, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
