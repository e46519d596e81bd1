"""What a capture is asked to do, and who hears of it."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.states.manifest import Dtype


class CaptureConfig(BaseModel):
    """Every choice of a capture; a resumed one must bring the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taps: tuple[int, ...]
    dtype: Dtype = "bf16"
    batch: int = Field(8, gt=0)
    part: tuple[int, int] = (1, 1)
    """(i, n): the i-th of n parts, from 1."""
    shard_bytes: int = Field(256 * 2**20, gt=0)

    @field_validator("part")
    @classmethod
    def _is_a_part(cls, part: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= part[0] <= part[1]:
            raise ValueError(f"parts of {part[1]} run from 1/{part[1]} to {part[1]}/{part[1]}")
        return part


class Listener(Protocol):
    """Hears of a capture; the command line draws it."""

    def starting(self, plan: dict[str, Any]) -> None: ...
    def captured(self, tokens: int) -> None: ...


class Silent:
    def starting(self, plan: dict[str, Any]) -> None:
        pass

    def captured(self, tokens: int) -> None:
        pass
