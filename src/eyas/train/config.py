"""What a training run is asked to do, where it is, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from eyas.drafter import DrafterConfig
from eyas.errors import UsageError


class TrainConfig(BaseModel):
    """Every choice of a run; a resumed run must bring the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taps: tuple[int, ...]
    draft_vocab: int = Field(8192, gt=0)
    depths: int = Field(5, ge=1, le=16)
    depth_decay: float = Field(0.8, gt=0, le=1)
    later_share: float = Field(1.0, gt=0, le=1)
    """Share of the slots that is carried past depth 0, drawn anew every step."""
    init: str = "ridge"
    """One of ``starts.STARTS``, or the folder of a checkpoint, whose shape is then kept."""
    layers: int = Field(1, ge=1, le=8)
    intermediate_size: int | None = Field(None, gt=0)
    """Width of the drafter's MLP; the target's if None, as for ``head_dim``."""
    head_dim: int | None = Field(None, gt=0)
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    noise: float = Field(0.0, ge=0, le=1)
    """Uniform noise on the taps, in units of each feature's size."""
    freeze_head: bool = False
    lr: float = Field(5e-4, gt=0)
    warmup: float = Field(0.03, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    batch: int = Field(4, gt=0)
    accumulate: int = Field(1, gt=0)
    epochs: float = Field(1.0, gt=0)
    steps: int | None = Field(None, gt=0)
    """Optimiser steps in all; given, it overrides ``epochs``."""
    minutes: float | None = Field(None, gt=0)
    """About how long to train; steps are then chosen from the time the first ten took, and override the rest."""
    ridge_tokens: int = Field(20_000, gt=0)
    """Supervised tokens the closed-form start looks at."""
    measure_every: int = Field(200, gt=0)
    patience: int | None = Field(None, gt=0)
    """Stop after so many measurements in a row without a better one."""
    measure_records: int = Field(48, gt=0)
    keep_states: bool = False
    """Hold the target's states in memory (bf16) after the first epoch, so that later ones skip the target."""
    seed: int = 0

    def choices(self) -> dict[str, Any]:
        """What is asked of the drafter's shape beyond the usual, by DrafterConfig's names."""
        named = {"norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "own_embedding"}
        sizes = self.model_dump(include={"intermediate_size", "head_dim"}, exclude_none=True)
        return {"num_hidden_layers": self.layers, **sizes, **self.model_dump(include=named)}

    def require_shape(self, shape: DrafterConfig) -> None:
        """Raise UsageError where a checkpoint to go on from lacks what is asked for."""
        for name, asked in self.choices().items():
            unasked, there = DrafterConfig.model_fields[name].default, getattr(shape, name)
            if asked not in (unasked, there):
                raise UsageError(
                    f"{self.init} has {name} {there}, not {asked}.",
                    way_out="Leave the option out, or start with --init ridge.",
                )


@dataclass(frozen=True)
class Point:
    """One measurement along the way."""

    step: int
    tokens: int
    minutes: float
    value: float
    low: float | None
    high: float | None
    conditional: list[float | None]

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class Progress:
    """Where a run is; with weights and optimiser all that a resumed run needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    points: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point | None:
        return max(self.points, key=lambda p: p.value, default=None)


class Listener(Protocol):
    """Hears of a run; the command line draws it, tests record it."""

    def starting(self, steps: int, plan: dict[str, Any]) -> None: ...
    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None: ...
    def measured(self, point: Point, best: bool) -> None: ...


class Silent:
    def starting(self, steps: int, plan: dict[str, Any]) -> None:
        pass

    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
        pass

    def measured(self, point: Point, best: bool) -> None:
        pass
