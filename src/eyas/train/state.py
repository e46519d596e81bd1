"""What a run needs to go on after it was stopped, in one safetensors file replaced whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas import checkpoint, files
from eyas.drafter import Drafter, DrafterConfig
from eyas.errors import UsageError
from eyas.train.config import Point, Progress, TrainConfig
from eyas.vocab import DraftVocab

Optimiser = torch.optim.AdamW


@dataclass(frozen=True, eq=False)
class Saved:
    """A state as read: ``place`` is everything that is no tensor."""

    place: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def total_steps(self) -> int:
        return int(self.place["total_steps"])

    @property
    def progress(self) -> Progress:
        place = self.place
        return Progress(place["step"], place["tokens"], place["seconds"], [Point(**p) for p in place["points"]])

    def drafter(self, embedding: Tensor) -> Drafter:
        shape = DrafterConfig(**self.place["shape"])
        words = DraftVocab(self.tensors["vocab"], shape.vocab_size)
        drafter = Drafter(shape, words, None if shape.own_embedding else embedding)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(self.tensors[f"model.{name}"])
            drafter.tap_scale.copy_(self.tensors["tap_scale"])
        return drafter

    def restore(self, optimiser: Optimiser) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in self.tensors.items():
            if name.startswith("optimiser."):
                _, i, key = name.split(".")
                state.setdefault(int(i), {})[key] = value
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})

    def require_same(self, config: TrainConfig, identity: dict[str, str]) -> None:
        """Raise UsageError naming every option that differs from the interrupted run's."""
        ours, theirs = config.model_dump(mode="json"), self.place["config"]
        changed = [k for k in ours if theirs.get(k) != ours[k]]
        if changed:
            told = ", ".join(f"{k} {theirs.get(k)!r} then, {ours[k]!r} now" for k in changed)
            raise UsageError(
                f"This is not the run that was interrupted: {told}.",
                way_out="Resume with the same options, or start again with --overwrite.",
            )
        for what, value in identity.items():
            if self.place["identity"].get(what) != value:
                verb = "are not those" if what.endswith("s") else "is not that"
                raise UsageError(
                    f"The {what} {verb} of the interrupted run.",
                    way_out=f"Resume with the same {what}, or start again with --overwrite.",
                )


def save(
    path: Path,
    drafter: Drafter,
    optimiser: Optimiser,
    progress: Progress,
    total_steps: int,
    config: TrainConfig,
    identity: dict[str, str],
) -> None:
    tensors = {f"model.{n}": p.detach().contiguous() for n, p in drafter.named_parameters()}
    tensors["tap_scale"] = drafter.tap_scale
    tensors["vocab"] = drafter.vocab.ids
    for i, state in optimiser.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimiser.{i}.{name}"] = value.contiguous()
    place = {
        "config": config.model_dump(mode="json"),
        "shape": drafter.config.model_dump(mode="json"),
        "step": progress.step,
        "total_steps": total_steps,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "points": [p.to_json() for p in progress.points],
        "identity": identity,
    }
    with files.written_whole(path) as temporary:
        checkpoint.write_tensors(tensors, temporary, {"place": json.dumps(place)})


def load(path: Path) -> Saved:
    try:
        with safe_open(path, framework="pt") as file:
            place = json.loads((file.metadata() or {})["place"])
            return Saved(place, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UsageError(f"{path} cannot be resumed from: {error}.", way_out="Start again with --overwrite.") from error
