"""Rounds of draft and verify: the target's greedy answer, in fewer passes.

    x[0..t] known, x[0..t-1] in the target's cache, slots 0..t-1 committed in the chain
    draft   d1..dK after x[t]
    verify  one pass over [x[t], d1..dK]: the target's token after each, and the taps of each
    keep    the leading a matches and the bonus token: x[t+1..t+a+1]
    commit  target cache cut to t+a+1 positions; slots t..t+a extended from the *target's* taps

Letters: K drafted tokens, C taps, D target width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas import taps
from eyas.decode import accept
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.chain import Chain
from eyas.decode.plain import last_logits, require_room
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.target import Target


class DraftSide(Protocol):
    """What a round needs of whatever drafts; ``Chain`` is the real one."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None: ...
    def draft(self, draft_tokens: int) -> list[int]: ...


@dataclass(frozen=True)
class Round:
    """``tokens`` are new in the answer, cut at its end; ``accepted`` of ``drafted`` matched, cut or not."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int


class Generation:
    """One answer. Made with its first token, which belongs to no round; iterate for rounds, or ``finish()``.

    ``drafted[k]`` and ``accepted[k]``: rounds that drafted, and kept, depth k. ``was_drafted``: for each
    token of the answer, whether it was drafted and kept. A round cut by an end token or by ``max_new_tokens``
    counts whole, so the counts may hold tokens that the answer does not. ``seconds`` leaves out what the
    caller does between rounds.
    """

    def __init__(
        self,
        target: Target,
        side: DraftSide,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        draft_tokens: int,
    ) -> None:
        require_room(target, prompt_ids, max_new_tokens)
        if draft_tokens < 1:
            raise UsageError(
                f"{draft_tokens} draft tokens a round leave nothing to verify.",
                way_out="Pass --draft-tokens 1 or more, or decode without a drafter.",
            )
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.was_drafted: list[bool] = []
        self.rounds = 0
        self.drafted = [0] * draft_tokens
        self.accepted = [0] * draft_tokens
        self.seconds = 0.0
        self._target, self._side = target, side
        self._max_new_tokens, self._draft_tokens = max_new_tokens, draft_tokens
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
        return len(self.token_ids) >= self._max_new_tokens or self.token_ids[-1] in self._ends

    def finish(self) -> Generation:
        """Play all rounds that are left."""
        for _ in self:
            pass
        return self

    @torch.inference_mode()
    def _prefill(self) -> None:
        started = time.perf_counter()
        states, tapped = self._pass(self.prompt_ids)
        first = int(last_logits(self._target, states).argmax())
        self.token_ids.append(first)
        self.was_drafted.append(False)
        if not self.finished:
            self._side.extend(tapped, [*self.prompt_ids[1:], first], 0)
        self.seconds += time.perf_counter() - started

    def _round(self) -> Round:
        t = self._cache.length  # position of the last known token, which the cache does not hold yet
        drafted = self._side.draft(min(self._draft_tokens, self._target.max_positions - 1 - t))
        states, tapped = self._pass([self.token_ids[-1], *drafted])
        kept = accept.greedy(drafted, self._target.logits(states[0]).argmax(-1).tolist())
        new = [*drafted[: kept.accepted], kept.bonus]
        self._count(len(drafted), kept.accepted)
        tokens = self._append(new, kept.accepted)
        if not self.finished:
            self._cache.truncate(t + len(new))
            self._side.extend(tapped[:, : len(new)], new, t)
        return Round(tokens, tuple(drafted), kept.accepted)

    def _pass(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """One target pass over what follows the cache: final-normed states [1, S, D] and taps [1, S, C*D]."""
        with taps.reading(self._target, self._side.taps) as reader:
            states = self._cache.forward(as_row(token_ids, self._target))
            return states, reader.take()

    def _count(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        for k in range(drafted):
            self.drafted[k] += 1
            self.accepted[k] += k < accepted

    def _append(self, new: list[int], accepted: int) -> tuple[int, ...]:
        """Put the new tokens into the answer, up to its end."""
        new = new[: self._max_new_tokens - len(self.token_ids)]
        end = next((i + 1 for i, token in enumerate(new) if token in self._ends), len(new))
        self.token_ids += new[:end]
        self.was_drafted += [i < accepted for i in range(end)]
        return tuple(new[:end])


def generate(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], *, max_new_tokens: int, draft_tokens: int
) -> Generation:
    """The target's greedy answer to ``prompt_ids``, drafted by ``drafter``; iterate over its rounds."""
    side = Chain(drafter)
    return Generation(target, side, prompt_ids, max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
