"""Rounds of draft and verify: the target's own answer, in fewer passes.

    x[0..t] known, x[0..t-1] in the target's cache, slots 0..t-1 committed in the chain
    draft   d1..dK after x[t]
    verify  one pass over [x[t], d1..dK]: the target's law of the token after each, and the taps of each
    keep    the leading a tokens that the law keeps (``accept``) and the bonus token: x[t+1..t+a+1]
    commit  target cache cut to t+a+1 positions; slots t..t+a extended from the *target's* taps

Letters: S rows fed, K drafted tokens, C taps, D target width, V target vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas import taps
from eyas.answers import FinishReason, Logprob, Sampling
from eyas.decode import accept
from eyas.decode.accept import Drawn, Kept
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.chain import Chain
from eyas.decode.law import Law, logprobs
from eyas.decode.plain import last_logits, require_room, require_words, text_of
from eyas.decode.sample import Chance
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.target import Target


class DraftSide(Protocol):
    """What a round needs of whatever drafts; ``Chain`` is the real one. Greedy answers ask for ``draft``, sampled ones
    for ``sample``. A drafted id that the target does not have is a wrong one."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None: ...
    def draft(self, draft_tokens: int) -> list[int]: ...
    def sample(self, draft_tokens: int, sampling: Sampling, chance: Chance) -> Drawn: ...


@dataclass(frozen=True)
class Round:
    """``tokens`` are new in the answer, cut at its end, ``logprobs`` theirs where asked for; ``accepted`` of
    ``drafted`` were kept, cut or not."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int
    logprobs: tuple[Logprob, ...] = ()


class Generation:
    """One answer. Made with its first token, which belongs to no round; iterate for rounds, or ``finish()``.

    ``side`` None (with ``draft_tokens`` 0) is an answer without drafts, one token a round. ``sampling`` is greedy where
    None; a sampled answer depends on its seed, on ``name``, and on drafter and ``draft_tokens``. ``logprobs``: so many
    of the best ids beside each token's own, None for nothing. It ends with an end token, with the first token that
    completes one of ``stops`` in its text (``stopped`` says which), or after ``max_new_tokens``.

    ``drafted[k]`` and ``accepted[k]``: rounds that drafted, and kept, depth k. ``was_drafted``: for each
    token of the answer, whether it was drafted and kept. A round cut by the end of the answer counts whole, so the
    counts may hold tokens that the answer does not. ``seconds`` leaves out what the caller does between rounds.
    """

    def __init__(
        self,
        target: Target,
        side: DraftSide | None,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        draft_tokens: int,
        sampling: Sampling | None = None,
        name: str = "",
        logprobs: int | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        sampling = sampling or Sampling()
        require_room(target, prompt_ids, max_new_tokens)
        require_words(target, sampling, logprobs)
        if draft_tokens < 1 and side is not None:
            raise UsageError(
                f"{draft_tokens} draft tokens a round leave nothing to verify.",
                way_out="Pass --draft-tokens 1 or more, or decode without a drafter.",
            )
        assert side is not None or not draft_tokens, "nobody drafts"
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.was_drafted: list[bool] = []
        self.logprobs: list[Logprob] = []
        self.rounds = 0
        self.drafted = [0] * draft_tokens
        self.accepted = [0] * draft_tokens
        self.seconds = 0.0
        self._target, self._side = target, side
        self._max_new_tokens, self._draft_tokens = max_new_tokens, draft_tokens
        self._sampling, self._law, self._top = sampling, Law(sampling, prompt_ids), logprobs
        self._chance = Chance(sampling.draws(name))
        self._text = text_of(target, stops) if stops else None
        self._ends = target.eos_ids()
        self._cache = TargetCache(target)
        self._prefill()

    def __iter__(self) -> Generation:
        return self

    @torch.inference_mode()
    def __next__(self) -> Round:
        if self.finished:
            raise StopIteration
        started = time.perf_counter()
        done = self._round()
        self.seconds += time.perf_counter() - started
        return done

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None as long as there is more to come."""
        if self.stopped is not None or self.token_ids[-1] in self._ends:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stopped if self._text is not None else None

    def finish(self) -> Generation:
        """Play all rounds that are left."""
        for _ in self:
            pass
        return self

    @torch.inference_mode()
    def _prefill(self) -> None:
        started = time.perf_counter()
        states, tapped = self._pass(self.prompt_ids)
        logits = last_logits(self._target, states)[None]
        kept = self._verify([], None, logits)
        self._append([kept.bonus], 0, logits)
        if self._side is not None and not self.finished:
            self._side.extend(tapped, [*self.prompt_ids[1:], kept.bonus], 0)
        self.seconds += time.perf_counter() - started

    def _round(self) -> Round:
        t = self._held  # position of the last known token, which the cache does not hold yet
        drafted, drawn = self._draft(min(self._draft_tokens, self._target.max_positions - 1 - t))
        words = self._target.vocab_size
        states, tapped = self._pass([self.token_ids[-1], *(d if 0 <= d < words else 0 for d in drafted)])
        logits = self._target.logits(states[0])
        kept = self._verify(drafted, drawn, logits)
        new = [*drafted[: kept.accepted], kept.bonus]
        self._count(len(drafted), kept.accepted)
        first = len(self.token_ids)
        self._append(new, kept.accepted, logits)
        if not self.finished:
            self._truncate(t + len(new))
            if self._side is not None:
                self._side.extend(tapped[:, : len(new)], new, t)
        return Round(tuple(self.token_ids[first:]), tuple(drafted), kept.accepted, tuple(self.logprobs[first:]))

    def _draft(self, draft_tokens: int) -> tuple[list[int], Drawn | None]:
        """Drafted tokens, and what they were drawn from where they were."""
        if self._side is None:
            return [], None
        if self._sampling.greedy:
            return self._side.draft(draft_tokens), None
        drawn = self._side.sample(draft_tokens, self._sampling, self._chance)
        return drawn.tokens, drawn

    def _verify(self, drafted: list[int], drawn: Drawn | None, logits: Tensor) -> Kept:
        """What the target keeps of ``drafted``, by its logits [K+1, V] after the last known token and after each."""
        before: list[list[int]] = []
        if self._sampling.penalises:
            before = [[*self.token_ids, *drafted[:k]] for k in range(len(drafted) + 1)]
        if self._sampling.greedy:
            return accept.greedy(drafted, self._law.best(logits, before))
        laws = self._law.probabilities(logits, before)
        draft_laws = laws[:0] if drawn is None else drawn.over(laws.shape[1])
        return accept.sampled(drafted, draft_laws, laws, self._chance)

    def _count(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        for k in range(drafted):
            self.drafted[k] += 1
            self.accepted[k] += k < accepted

    def _append(self, new: list[int], accepted: int, logits: Tensor) -> None:
        """Put the new tokens into the answer, up to its end; ``logits`` [K+1, V], a row for each."""
        first = len(self.token_ids)
        for i, token in enumerate(new):
            self.token_ids.append(token)
            self.was_drafted.append(i < accepted)
            if self._text is not None:
                self._text.feed([token])
            if self.finished:
                break
        if self._top is not None:
            added = self.token_ids[first:]
            self.logprobs += logprobs(logits[: len(added)], added, self._top)

    # -- the target's side ------------------------------------------------------------------------------------

    @property
    def _held(self) -> int:
        """Tokens in the target's cache."""
        return self._cache.length

    def _pass(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """One target pass over what follows the cache: final-normed states [1, S, D] and taps [1, S, C*D]."""
        if self._side is None:
            states = self._cache.forward(as_row(token_ids, self._target))
            return states, states[..., :0]
        with taps.reading(self._target, self._side.taps) as reader:
            states = self._cache.forward(as_row(token_ids, self._target))
            return states, reader.take()

    def _truncate(self, length: int) -> None:
        self._cache.truncate(length)


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    draft_tokens: int,
    sampling: Sampling | None = None,
    name: str = "",
    logprobs: int | None = None,
    stops: Sequence[str] = (),
) -> Generation:
    """The target's own answer to ``prompt_ids``, drafted by ``drafter``; iterate over its rounds."""
    return Generation(
        target,
        Chain(drafter),
        prompt_ids,
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        sampling=sampling,
        name=name,
        logprobs=logprobs,
        stops=stops,
    )
