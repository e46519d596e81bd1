"""A body becomes what the decoder is asked: prompts as token ids, limits that fit the target, sampling, stops."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerBase

from eyas.answers import Sampling
from eyas.errors import TemplateError, did_you_mean
from eyas.render import Renderer
from eyas.serve.answering import Request
from eyas.serve.bodies import ChatBody, Common, CompletionBody, Message
from eyas.serve.problem import Problem, wrong
from eyas.serve.settings import MAX_CHOICES
from eyas.target import Target

Kind = Literal["chat", "completion"]
USUAL_COMPLETION = 16  # the official API's max_tokens of a completion that names none


@dataclass(frozen=True)
class Asked:
    """One HTTP request, understood. ``requests`` are its choices in order: the prompts, each ``n`` times."""

    kind: Kind
    requests: tuple[Request, ...]
    prompts: tuple[tuple[int, ...], ...]
    stream: bool
    include_usage: bool
    token_ids: bool


class Reader:
    """Reads bodies for one target. ``model`` is the name it goes by."""

    def __init__(self, target: Target, model: str) -> None:
        assert target.tokenizer is not None, "the caller has looked"
        self.model, self.vocab_size, self.max_positions = model, target.vocab_size, target.max_positions
        self._tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self._renderer = Renderer(target.tokenizer, target.eos_ids()) if target.tokenizer.chat_template else None

    def chat(self, body: ChatBody) -> Asked:
        """Raises Problem for what cannot be answered."""
        self._known(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise wrong("'top_logprobs' asks for what 'logprobs' leaves out: set 'logprobs' to true.", "top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise wrong("'max_tokens' and 'max_completion_tokens' differ: pass one of them.", "max_tokens")
        limit = body.max_completion_tokens or body.max_tokens
        prompt = self._rendered(body.messages)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._asked("chat", body, [prompt], limit, logprobs)

    def completion(self, body: CompletionBody) -> Asked:
        """Raises Problem for what cannot be answered."""
        self._known(body.model)
        limit = body.max_tokens or USUAL_COMPLETION
        return self._asked("completion", body, self._prompts(body.prompt), limit, body.logprobs)

    # -- prompts ----------------------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if self._renderer is None:
            raise wrong(
                f"{self.model} has no chat template, so messages have no text: use /v1/completions.", "messages"
            )
        turns = [{"role": _role(m), "content": _content(m)} for m in messages]
        self._require_short(sum(len(turn["content"]) for turn in turns), "messages")
        try:
            return tuple(self._renderer.ids(turns, prompt=True))
        except TemplateError as error:
            raise wrong(error.message, "messages") from error

    def _prompts(self, given: str | list[str] | list[int] | list[list[int]]) -> list[tuple[int, ...]]:
        several: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
        if isinstance(several[0], int):
            several = [list(several)]  # type: ignore[arg-type]
        return [self._ids(prompt) for prompt in several]  # type: ignore[arg-type]

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._require_short(len(prompt), "prompt")
            ids = tuple(self._tokenizer(prompt)["input_ids"])
            if not ids:
                raise wrong("The prompt is empty: one token at least is needed to go on from.", "prompt")
            return ids
        if max(prompt) >= self.vocab_size:
            raise wrong(f"Token id {max(prompt)}: the target has rows for 0 to {self.vocab_size - 1}.", "prompt")
        return tuple(prompt)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _require_short(self, characters: int, param: str) -> None:
        """A text that cannot fit whatever its tokens are is refused before it is tokenised."""
        least = characters // self._longest_token
        if least >= self.max_positions:
            raise self._overflow(f"at least {least}", None, param)

    # -- limits and laws --------------------------------------------------------------------------------------

    def _known(self, model: str | None) -> None:
        if model is not None and model != self.model:
            raise Problem(
                404,
                f"There is no model {model!r} here. {did_you_mean(model, [self.model])}",
                param="model",
                code="model_not_found",
            )

    def _asked(
        self, kind: Kind, body: Common, prompts: Sequence[tuple[int, ...]], limit: int | None, logprobs: int | None
    ) -> Asked:
        copies = body.n or 1
        if len(prompts) * copies > MAX_CHOICES:
            raise wrong(f"{len(prompts)} prompts, {copies} answers each: at most {MAX_CHOICES} in one request.", "n")
        sampling, stops = self._sampling(body), _stops(body.stop)
        if body.stream_options is not None and not body.stream:
            raise wrong("'stream_options' belongs to a streamed answer: set 'stream' to true.", "stream_options")
        param = "messages" if kind == "chat" else "prompt"
        limits = [self._limit(len(prompt), limit, param) for prompt in prompts]
        same = {"continues": kind == "completion", "repeatable": body.seed is not None}
        requests = tuple(
            Request(prompt, room, sampling, stops, logprobs, name=str(copy), **same)
            for prompt, room in zip(prompts, limits, strict=True)
            for copy in range(copies)
        )
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return Asked(kind, requests, tuple(prompts), bool(body.stream), usage, bool(body.return_token_ids))

    def _limit(self, prompt: int, asked: int | None, param: str) -> int:
        room = self.max_positions - prompt
        if room < 1 or (asked is not None and asked > room):
            raise self._overflow(str(prompt), asked, param)
        return room if asked is None else asked

    def _overflow(self, prompt: str, asked: int | None, param: str) -> Problem:
        wanted = f" and {asked} new ones were asked for" if asked is not None else ", which leaves none to answer with"
        return wrong(
            f"This model's maximum context length is {self.max_positions} tokens; the prompt has {prompt}{wanted}.",
            param,
            "context_length_exceeded",
        )

    def _sampling(self, body: Common) -> Sampling:
        given = {
            name: value
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            if (value := getattr(body, name)) is not None
        }
        return Sampling(
            **{"temperature": 1.0, **given},
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            logit_bias=self._bias(body.logit_bias),
        )

    def _bias(self, given: dict[str, float] | None) -> dict[int, float]:
        bias = {}
        for key, value in (given or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < self.vocab_size):
                raise wrong(
                    f"{key[:40]!r} in 'logit_bias' is no token id from 0 to {self.vocab_size - 1}.", "logit_bias"
                )
            bias[int(key)] = float(value)
        return bias


def _role(message: Message) -> str:
    """``developer`` is the official API's newer word for what templates call the system."""
    return "system" if message.role == "developer" else message.role


def _content(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
