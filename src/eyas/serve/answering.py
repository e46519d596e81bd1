"""The one place where the server meets the decoder: a request becomes a session that is played step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eyas.answers import FinishReason, Logprob, Sampling
from eyas.decode.adaptive import Adaptive, Costs
from eyas.decode.cost import measure_cost
from eyas.decode.loop import Chooser, DraftSide, Generation
from eyas.decode.pack import packed
from eyas.decode.siblings import MEASURED, Siblings
from eyas.decode.swift import chain_of
from eyas.decode.worth import ByWorth
from eyas.drafter import Drafter
from eyas.serve.settings import PREFILL_TOKENS
from eyas.serve.text import Span, Spelling
from eyas.target import Target

log = logging.getLogger("eyas.serve")
SENTENCE = "Write three sentences about a river, and one about the sea."


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. ``logprobs``: how many alternatives of each token, None for no logprobs at all.

    ``continues``: its text goes on that of the prompt. ``repeatable``: asked again, it is to be answered the same.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    name: str = ""
    continues: bool = False
    repeatable: bool = False


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


@dataclass(frozen=True)
class Choosers:
    """Who says how much to draft. Of a sampled answer's chain more is kept, drawn, than of words that are chosen."""

    greedy: Chooser
    sampled: Chooser


class Answering:
    """A target, with a drafter or without, and how many tokens are drafted a round: with ``adaptive`` at most so many
    in depth, as many as pay, by a chooser for all greedy answers and one for all sampled ones. ``prefill_tokens`` of a
    prompt are read in one step."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        draft_tokens: int,
        adaptive: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        assert target.tokenizer is not None, "the caller has looked"
        self.target, self.drafter, self.draft_tokens = target, drafter, draft_tokens
        self.adaptive, self.prefill_tokens = adaptive and drafter is not None, prefill_tokens
        self.choosers: Choosers | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Weights laid out for few rows while it is open, and what passes cost with them is measured."""
        with packed(self.target, self.drafter):
            self.choosers = self._measured() if self.adaptive else None
            yield

    def _measured(self) -> Choosers:
        assert self.drafter is not None
        assert self.target.tokenizer is not None
        log.info("event=measuring what=passes for=draft_tokens_0_to_%d", self.draft_tokens)
        began = time.perf_counter()
        ids, counts = self.target.tokenizer(SENTENCE)["input_ids"], {*range(1, self.draft_tokens + 1), *MEASURED}
        costs = Costs.measured(measure_cost(self.target, self.drafter, ids, sorted(counts)))
        chain = Adaptive(costs, self.draft_tokens)
        told = ",".join(f"{cost:.2f}" for cost in chain.costs)
        log.info("event=measured seconds=%.1f round_costs=%s", time.perf_counter() - began, told)
        return Choosers(ByWorth(costs, self.draft_tokens), chain)

    def begin(self, request: Request) -> Session:
        return Session(self, request)

    def side(self, request: Request) -> DraftSide | None:
        """What drafts for one answer."""
        if self.drafter is None:
            return None
        return Siblings(self.drafter) if isinstance(self.chooser_for(request), ByWorth) else chain_of(self.drafter)

    def chooser_for(self, request: Request) -> Chooser | None:
        """Who says how much to draft for it. A chooser looks at the clock, and a sampled answer hangs on what is
        drafted: one that is to be the same again has none."""
        if self.choosers is None:
            return None
        if request.sampling.greedy:
            return self.choosers.greedy
        return None if request.repeatable else self.choosers.sampled

    def decode(self, ids: Sequence[int]) -> str:
        assert self.target.tokenizer is not None
        return str(self.target.tokenizer.decode(list(ids), skip_special_tokens=True))


class Session:
    """One answer in the making: the prompt, a part a step, then a round a step."""

    def __init__(self, answering: Answering, request: Request) -> None:
        self._answering, self._request = answering, request
        before = request.prompt_ids if request.continues else ()
        self._spelling = Spelling(answering.decode, request.stops, before)
        self._generation: Generation | None = None
        self._told = 0

    def step(self) -> Piece | None:
        """What it adds to the answer; None as long as the prompt is being read."""
        generation = self._generation = self._generation or self._begun()
        if generation.token_ids:
            next(generation)
        elif not generation.prefill(self._answering.prefill_tokens):
            return None
        return self._piece(generation)

    def _begun(self) -> Generation:
        request, answering = self._request, self._answering
        side = answering.side(request)
        return Generation(
            answering.target,
            side,
            request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            draft_tokens=0 if side is None else answering.draft_tokens,
            chooser=answering.chooser_for(request),
            sampling=request.sampling,
            name=request.name,
            logprobs=request.logprobs,
            stops=request.stops,
            continues=request.continues,
            whole_prompt=False,
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
