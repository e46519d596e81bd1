"""Rounds of draft and verify: the target's own answer, in fewer passes.

    x[0..t] known, x[0..t-1] held by the target, slots 0..t-1 committed on the draft side
    draft   a chain d1..dK after x[t], or a tree of such tokens
    verify  one pass over x[t] and them: the target's law of the token after each, and the taps of each
    keep    the a tokens, one below the other, that the law keeps (``accept``) and the bonus token: x[t+1..t+a+1]
    commit  the target keeps x[t] and the a rows; slots t..t+a extended from the *target's* taps

Before them the prompt is read, whole or part by part. A slot is fed the token after its position, so the last one of a
part is fed the first token of the next, and the last of all the answer's first:

    prompt   x0 x1 x2 │ x3 x4 x5 │ x6 x7            a part a pass
    slots     0  1  2 │  3  4  5 │  6  7
    fed      x1 x2 x3 │ x4 x5 x6 │ x7 first token   of which only the last row is worth the head

Letters: S rows fed, K drafted tokens, C taps, D target width, V target vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.answers import FinishReason, Logprob, Sampling
from eyas.decode import accept, passes
from eyas.decode.accept import Drawn, Path
from eyas.decode.adaptive import Adaptive, AdaptiveTree, Costs
from eyas.decode.cost import measure_cost
from eyas.decode.law import Law, logprobs
from eyas.decode.plain import require_room, require_words, text_of
from eyas.decode.sample import Chance
from eyas.decode.swift import chain_of
from eyas.decode.tree import Drafted, Tree, TreeSize
from eyas.decode.worth import ByWorth, Weighing
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.target import Target


class Side(Protocol):
    """What a round needs of whatever drafts. A drafted id that the target does not have is a wrong one."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None: ...


class ChainSide(Side, Protocol):
    """``Chain`` and ``SwiftChain`` are the real ones. Greedy answers ask for ``draft``, sampled ones for ``sample``."""

    def draft(self, draft_tokens: int) -> list[int]: ...
    def sample(self, draft_tokens: int, sampling: Sampling, chance: Chance) -> Drawn: ...


class TreeSide(Side, Protocol):
    """``Tree`` is the real one. What it drafts it chooses and does not draw, so a sampled answer asks for the same."""

    def draft(self, size: TreeSize) -> Drafted: ...


class WeighedSide(Side, Protocol):
    """``Siblings`` is the real one, for a ``ByWorth``. It chooses too and does not draw."""

    def draft(self, weighing: Weighing) -> Drafted: ...


DraftSide = ChainSide | TreeSide | WeighedSide
Size = int | TreeSize | Weighing
MEASURED_AFTER = 64  # tokens
Chooser = Adaptive | AdaptiveTree | ByWorth


class Draft(NamedTuple):
    """``parents`` index into ``tokens`` (-1: the last known token), None for a chain; ``drawn`` is what a sampled chain
    was drawn from; ``levels`` is how deep it goes."""

    tokens: list[int]
    parents: list[int] | None = None
    drawn: Drawn | None = None
    levels: int = 0


@dataclass(frozen=True)
class Round:
    """``tokens`` are new in the answer, cut at its end, ``logprobs`` theirs where asked for; ``accepted`` of
    ``drafted`` (a tree's nodes, the likeliest first) were kept, cut or not."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int
    logprobs: tuple[Logprob, ...] = ()


class Generation:
    """One answer. Made with its first token, which belongs to no round; iterate for rounds, or ``finish()``. With
    ``whole_prompt`` False it is made with nothing read: ``prefill`` part by part until it has its first token.

    ``side`` None (with ``draft_tokens`` 0) is an answer without drafts, one token a round. With a ``TreeSize`` as
    ``draft_tokens`` the side drafts trees. ``chooser`` says round by round how much to draft, ``draft_tokens`` at most;
    several answers may share one. With a ``ByWorth`` the side is ``Siblings`` and ``draft_tokens`` counts depths.
    ``sampling`` is greedy where None; a sampled answer depends on its seed, on ``name``,
    on drafter and ``draft_tokens``, and with a ``chooser`` on the clock. ``logprobs``: so many
    of the best ids beside each token's own, None for nothing. It ends with an end token, with the first token that
    completes one of ``stops`` in its text (``stopped`` says which), or after ``max_new_tokens``. ``continues``: its
    text goes on that of the prompt, as a completion's does, so that its first space is one (``stops.Text``).

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
        draft_tokens: int | TreeSize,
        chooser: Chooser | None = None,
        sampling: Sampling | None = None,
        name: str = "",
        logprobs: int | None = None,
        stops: Sequence[str] = (),
        continues: bool = False,
        whole_prompt: bool = True,
    ) -> None:
        sampling = sampling or Sampling()
        require_room(target, prompt_ids, max_new_tokens)
        require_words(target, sampling, logprobs)
        levels = draft_tokens if isinstance(draft_tokens, int) else min(draft_tokens.depth, draft_tokens.nodes)
        if levels < 1 and side is not None:
            raise UsageError(
                f"{draft_tokens} draft tokens a round leave nothing to verify.",
                way_out="Pass --draft-tokens 1 or more, or decode without a drafter.",
            )
        assert side is not None or not levels, "nobody drafts"
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.was_drafted: list[bool] = []
        self.logprobs: list[Logprob] = []
        self.rounds = 0
        self.drafted = [0] * levels
        self.accepted = [0] * levels
        self.seconds = 0.0
        self._target, self._side, self._chooser = target, side, chooser
        self._max_new_tokens, self._draft_tokens = max_new_tokens, draft_tokens
        self._sampling, self._law, self._top = sampling, Law(sampling, prompt_ids), logprobs
        self._chance = Chance(sampling.draws(name))
        self._text = text_of(target, stops, prompt_ids if continues else ()) if stops else None
        self._ends = target.eos_ids()
        self._passes = self._hold(side.taps if side is not None else ())
        if whole_prompt:
            self.prefill()

    def __iter__(self) -> Generation:
        return self

    @torch.inference_mode()
    def __next__(self) -> Round:
        assert self.token_ids, "rounds before the prompt is read"
        if self.finished:
            raise StopIteration
        started = time.perf_counter()
        wanted = self._draft_tokens if self._chooser is None else self._chooser.choose()
        size = self._fitting(wanted, self._target.max_positions - 1 - self._passes.length)
        done = self._round(size)
        took = time.perf_counter() - started
        self.seconds += took
        if self._chooser is not None and size == wanted:  # a round cut by the end of the context teaches nothing
            told = (self._drafting, took - self._drafting) if isinstance(size, Weighing) else took
            self._chooser.saw(size, done.accepted, told)  # type: ignore[arg-type]  # of its own kind, for it chose it
        return done

    @torch.inference_mode()
    def prefill(self, tokens: int | None = None) -> bool:
        """Read so many more tokens of the prompt, None for all that are left; whether they were the last of it. Then
        the answer has its first token."""
        assert not self.token_ids, "the prompt is read already"
        started = time.perf_counter()
        begin = self._passes.length
        end = len(self.prompt_ids) if tokens is None else min(begin + tokens, len(self.prompt_ids))
        states, tapped = self._passes.forward(self.prompt_ids[begin:end])
        following = self.prompt_ids[begin + 1 : end + 1]
        if end == len(self.prompt_ids):
            logits = self._target.logits(states[-1:])
            following.append(self._verify(Draft([]), logits).bonus)
            self._append(following[-1:], 0, logits)
        if self._side is not None and not self.finished:
            self._side.extend(tapped[None], following, begin)
        self.seconds += time.perf_counter() - started
        return bool(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """None as long as there is more to come."""
        if not self.token_ids:
            return None
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

    def _hold(self, taps: Sequence[int]) -> passes.Passes:
        """What the target holds of the text: nothing yet."""
        return passes.of(self._target, taps)

    def _round(self, size: Size | None) -> Round:
        t = self._passes.length  # position of the last known token, which the target does not hold yet
        started = time.perf_counter()
        draft = self._draft(size)
        self._drafting = time.perf_counter() - started
        words = self._target.vocab_size
        fed = [self.token_ids[-1], *(d if 0 <= d < words else 0 for d in draft.tokens)]
        parents = [-1, *(p + 1 for p in draft.parents)] if draft.parents is not None else None
        if parents == list(range(-1, len(fed) - 1)):
            parents = None  # a tree that is a chain goes the shorter way
        states, tapped = self._passes.forward(fed, parents)
        logits = self._target.logits(states)
        kept = self._verify(draft, logits)
        rows = [0, *(row + 1 for row in kept.rows)]
        new = [*(draft.tokens[row] for row in kept.rows), kept.bonus]
        self._count(draft.levels, len(kept.rows))
        first = len(self.token_ids)
        self._append(new, len(kept.rows), logits[rows] if self._top is not None else logits)
        if not self.finished:
            self._passes.keep(rows)
            if self._side is not None:
                self._side.extend(tapped[None, rows], new, t)
        return Round(tuple(self.token_ids[first:]), tuple(draft.tokens), len(kept.rows), tuple(self.logprobs[first:]))

    def _fitting(self, size: Size | None, room: int) -> Size | None:
        """What to draft, with ``room`` for so many tokens after the last known one; None or 0 is nothing."""
        if isinstance(size, Weighing):
            return size.within(min(room, len(self.drafted)))
        if isinstance(size, TreeSize):
            return replace(size, depth=min(size.depth, room)) if room else None
        return None if size is None else min(size, room)

    def _draft(self, size: Size | None) -> Draft:
        side: DraftSide | None = self._side
        if side is None or not size:
            return Draft([])
        if not isinstance(size, int):
            tree = side.draft(size)  # type: ignore[arg-type]  # who asks for trees brings a side that drafts them
            assert isinstance(tree, Drafted)
            if not tree.tokens:
                return Draft([])
            return Draft(tree.tokens, tree.parents, levels=depth_of(tree.parents))
        assert not isinstance(side, Tree), "a tree's size is a TreeSize"
        if self._sampling.greedy:
            tokens = side.draft(size)  # type: ignore[arg-type]
            assert isinstance(tokens, list)
            return Draft(tokens, levels=len(tokens))
        drawn = side.sample(size, self._sampling, self._chance)  # type: ignore[union-attr]
        return Draft(drawn.tokens, drawn=drawn, levels=len(drawn.tokens))

    def _verify(self, draft: Draft, logits: Tensor) -> Path:
        """What the target keeps, by its logits [K+1, V] after the last known token and after each drafted one."""
        before = self._before(draft) if self._sampling.penalises else []
        if self._sampling.greedy:
            best = self._law.best(logits, before)
            if draft.parents is not None:
                return accept.walk(draft.tokens, draft.parents, lambda row: best[row + 1])
            kept = accept.greedy(draft.tokens, best)
        else:
            laws = self._law.probabilities(logits, before)
            if draft.parents is not None:
                pick = self._chance.pick
                return accept.walk(draft.tokens, draft.parents, lambda row: int(pick(laws[row + 1])))
            draft_laws = laws[:0] if draft.drawn is None else draft.drawn.over(laws.shape[1])
            kept = accept.sampled(draft.tokens, draft_laws, laws, self._chance)
        return Path(list(range(kept.accepted)), kept.bonus)

    def _before(self, draft: Draft) -> list[list[int]]:
        """The answer before each row of the pass, drafted tokens above it included."""
        parents = draft.parents if draft.parents is not None else range(-1, len(draft.tokens) - 1)
        found = [self.token_ids]
        for token, parent in zip(draft.tokens, parents, strict=True):
            found.append([*found[parent + 1], token])
        return found

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


def depth_of(parents: Sequence[int]) -> int:
    """Levels of a tree whose parents come before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    draft_tokens: int | TreeSize,
    chooser: Chooser | None = None,
    sampling: Sampling | None = None,
    name: str = "",
    logprobs: int | None = None,
    stops: Sequence[str] = (),
) -> Generation:
    """The target's own answer to ``prompt_ids``, drafted by ``drafter``; iterate over its rounds."""
    return Generation(
        target,
        Tree(drafter) if isinstance(draft_tokens, TreeSize) else chain_of(drafter),
        prompt_ids,
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        chooser=chooser,
        sampling=sampling,
        name=name,
        logprobs=logprobs,
        stops=stops,
    )


def chooser(target: Target, drafter: Drafter, prompt_ids: Sequence[int], draft_tokens: int) -> Adaptive:
    """Chooses how much of a chain to draft, ``draft_tokens`` at most, from what passes cost here and now: it times some
    after a beginning of ``prompt_ids``. Measure with ``packed`` open, as rounds are played."""
    beginning = prompt_ids[:MEASURED_AFTER]
    cost = measure_cost(target, drafter, beginning, range(1, draft_tokens + 1))
    return Adaptive(Costs.measured(cost), draft_tokens)
