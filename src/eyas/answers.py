"""What is asked of a target and what it says, whoever lets it speak: this process or an endpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyas.errors import UsageError

FinishReason = Literal["stop", "length"]
GREEDY_BELOW = 1e-5
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
class Logprob:
    """Of one token of an answer: the target's own log-probability of it, and its ``top`` ids with theirs, best first.

    The target's own: of its logits as they are, before bias, penalties and temperature.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: what is done to the logits before it, and what is drawn from.

    1. ``logit_bias`` is added: id to -100 .. 100 (OpenAI). Given as a mapping, held as sorted pairs.
    2. ``repetition_penalty`` r, over prompt and answer: a positive logit of a seen token becomes logit / r, another one
       logit * r. Then ``frequency_penalty`` for each time, and ``presence_penalty`` once, taken off the logits of
       tokens of the answer (OpenAI).
    3. Temperature; 0, or less than 1e-5 (vLLM's bound), is greedy: the best logit after the steps above.
    4. ``top_k`` keeps the k best, then ``top_p`` the fewest whose shares reach it, then ``min_p`` those with at least
       that part of the best one's share.

    1 and 2 are in vLLM's order (0.32, ``v1/sample/sampler.py``), 4 in that of transformers; vLLM cuts by min-p first,
    which keeps the same words unless top-p cuts as well.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

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
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"A min-p of {self.min_p} is not between 0 and 1.", way_out="0 keeps every token.")
        self._check_penalties()
        pairs = tuple(sorted(self.bias.items()))
        for token, bias in pairs:
            if not (isinstance(token, int) and token >= 0 and -100 <= bias <= 100):
                raise UsageError(
                    f"A logit bias of {bias} for token {token!r}: ids are 0 or more, a bias is between -100 and 100.",
                    way_out="Write it like {1234: -100}; -100 all but forbids a token.",
                )
        object.__setattr__(self, "logit_bias", pairs)

    def _check_penalties(self) -> None:
        if not 0 < self.repetition_penalty <= 100:
            raise UsageError(
                f"A repetition penalty of {self.repetition_penalty} is not above 0 and at most 100.",
                way_out="1 is none.",
            )
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= value <= 2:
                raise UsageError(f"A {name} penalty of {value} is not between -2 and 2.", way_out="0 is none.")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def bias(self) -> dict[int, float]:
        return dict(self.logit_bias)

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it in prompt and answer."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before temperature."""
        return bool(self.logit_bias) or self.penalises

    def draws(self, id: str) -> random.Random:
        """The random numbers of one answer: they depend on the seed and its id, on nothing beside it."""
        return random.Random(f"{self.seed}/{id}")
