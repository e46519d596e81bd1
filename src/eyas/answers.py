"""What is asked of a target and what it says, whoever lets it speak: this process or an endpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.errors import UsageError

FinishReason = Literal["stop", "length"]
IdsFrom = Literal["target", "text", "text-differs"]


@dataclass(frozen=True)
class Ask:
    """One turn to be answered: the rendered prompt, and the messages it was rendered from."""

    id: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """``token_ids`` hold the end token where the target said it; ``length`` is an answer cut at the limit.

    ``text`` is None where the ids say it all. ``ids`` says where they come from: the target itself, its text
    tokenised again, or such a text that the ids do not give back whole.
    """

    id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    text: str | None = None
    ids: IdsFrom = "target"


@dataclass(frozen=True)
class Refusal:
    """This one was not answered, and why; others may be."""

    id: str
    reason: str


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; then ``top_k`` keeps the k best, then ``top_p`` the fewest
    whose shares reach it (what vLLM and transformers do, in this order)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise UsageError(
                f"A temperature of {self.temperature} is not between 0 and 100.",
                way_out="0 is greedy, 1 the target's own.",
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"A top-p of {self.top_p} is not above 0 and at most 1.", way_out="1 keeps every token.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"A top-k of {self.top_k} keeps no token.", way_out="Leave it out to keep every token.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def draws(self, id: str) -> random.Random:
        """The random numbers of one answer: they depend on the seed and its id, on nothing beside it."""
        return random.Random(f"{self.seed}/{id}")
