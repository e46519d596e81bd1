"""The one place where the server meets the decoder: a request becomes a session that is played step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eyas.answers import FinishReason, Logprob, Sampling
from eyas.decode.chain import Chain
from eyas.decode.loop import DraftSide, Generation
from eyas.decode.pack import packed
from eyas.drafter import Drafter
from eyas.serve.text import Span, Spelling
from eyas.target import Target


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. ``logprobs``: how many alternatives of each token, None for no logprobs at all."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Counts:
    """Rounds of an answer so far; ``drafted[k]`` and ``accepted[k]`` those that drafted, and kept, depth k."""

    rounds: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def accept_length(self) -> float | None:
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer. ``spans`` may be behind ``token_ids`` (characters and stop strings that are not
    whole yet). ``finish`` is None as long as more follows."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    counts: Counts
    logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None


class Answering:
    """A target, with a drafter or without, and how many tokens are drafted a round."""

    def __init__(self, target: Target, drafter: Drafter | None, *, draft_tokens: int) -> None:
        assert target.tokenizer is not None, "the caller has looked"
        self.target, self.drafter, self.draft_tokens = target, drafter, draft_tokens

    @contextmanager
    def open(self) -> Iterator[None]:
        """Weights laid out for few rows while it is open."""
        with packed(self.target, self.drafter):
            yield

    def begin(self, request: Request) -> Session:
        return Session(self, request)

    def side(self, request: Request) -> DraftSide | None:
        """What drafts for one answer."""
        return None if self.drafter is None else Chain(self.drafter)

    def decode(self, ids: Sequence[int]) -> str:
        assert self.target.tokenizer is not None
        return str(self.target.tokenizer.decode(list(ids), skip_special_tokens=True))


class Session:
    """One answer in the making: the prefill at the first step, then a round a step."""

    def __init__(self, answering: Answering, request: Request) -> None:
        self._answering, self._request = answering, request
        self._spelling = Spelling(answering.decode, request.stops)
        self._generation: Generation | None = None
        self._told = 0

    def step(self) -> Piece:
        if self._generation is None:
            self._generation = self._prefill()
        else:
            next(self._generation)
        return self._piece(self._generation)

    def _prefill(self) -> Generation:
        request, answering = self._request, self._answering
        side = answering.side(request)
        return Generation(
            answering.target,
            side,
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            draft_tokens=0 if side is None else answering.draft_tokens,
            sampling=request.sampling,
            name=request.name,
            logprobs=request.logprobs,
            stops=request.stops,
        )

    def _piece(self, generation: Generation) -> Piece:
        """What is new in the answer."""
        first, self._told = self._told, len(generation.token_ids)
        new = generation.token_ids[first:]
        spans = [
            span
            for token, drafted in zip(new, generation.was_drafted[first:], strict=True)
            for span in self._spelling.add(token, drafted=drafted)
        ]
        if generation.finished:
            spans += self._spelling.close()
        counts = Counts(generation.rounds, tuple(generation.drafted), tuple(generation.accepted))
        logprobs = tuple(generation.logprobs[first:])
        return Piece(tuple(new), tuple(spans), counts, logprobs, generation.finish_reason)
