"""Decoding one token a pass: the oracle that every other way of decoding must agree with.

Letters: S rows, D target width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eyas.answers import Sampling
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.law import Law
from eyas.decode.sample import Chance
from eyas.decode.stops import Text
from eyas.errors import UsageError
from eyas.target import Target, no_tokenizer


def plain(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    gaps: list[float] | None = None,
    sampling: Sampling | None = None,
    name: str = "",
    stops: Sequence[str] = (),
) -> Iterator[int]:
    """The target's own answer, token by token, an end token included; its last token may complete one of ``stops``.

    Greedy where ``sampling`` is None; a sampled answer depends on its seed and on ``name`` alone, a draw a token. With
    a list as ``gaps`` the distance between the two best logits of each greedy step is appended to it.
    """
    sampling = sampling or Sampling()
    assert gaps is None or sampling.greedy, "a draw has no second best"
    require_room(target, prompt_ids, max_new_tokens)
    require_words(target, sampling)
    text = text_of(target, stops) if stops else None
    return _steps(target, list(prompt_ids), max_new_tokens, gaps, _Choice(sampling, prompt_ids, name), text)


class _Choice:
    """How the next token comes from its logits."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], name: str) -> None:
        self.law, self.chance = Law(sampling, prompt_ids), Chance(sampling.draws(name))

    def __call__(self, logits: Tensor, answer: Sequence[int], gaps: list[float] | None) -> int:
        """Of logits [V] after ``answer``."""
        if not self.law.sampling.greedy:
            return int(self.chance.pick(self.law.probabilities(logits[None], [answer])[0]))
        adjusted = self.law.adjusted(logits[None], [answer])[0]
        best, token = adjusted.max(-1)
        found = int(token)
        if gaps is not None:
            adjusted[found] = -torch.inf
            gaps.append(float(best - adjusted.max()))
        return found


def _steps(
    target: Target, fed: list[int], max_new_tokens: int, gaps: list[float] | None, choose: _Choice, text: Text | None
) -> Iterator[int]:
    cache, ends, answer = TargetCache(target), target.eos_ids(), list[int]()
    for _ in range(max_new_tokens):
        token = _step(target, cache, fed, answer, gaps, choose)
        yield token
        answer.append(token)
        if text is not None:
            text.feed([token])
        if token in ends or (text is not None and text.stopped is not None):
            return
        fed = [token]


@torch.inference_mode()  # on the step, not on the generator: a mode must not leak through a yield
def _step(
    target: Target, cache: TargetCache, fed: list[int], answer: list[int], gaps: list[float] | None, choose: _Choice
) -> int:
    return choose(last_logits(target, cache.forward(as_row(fed, target))), answer, gaps)


def last_logits(target: Target, states: Tensor) -> Tensor:
    """Logits [V] of the last of final-normed states [1, S, D]; of a prompt no other row is worth the head."""
    return target.logits(states[0, -1])


def require_room(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise UsageError for an empty prompt, a token the target has no row for, nothing to generate, or too much."""
    if not prompt_ids:
        raise UsageError("The prompt holds no tokens.", way_out="Give it at least one.")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise UsageError(
            f"The prompt holds token ids from {min(prompt_ids)} to {max(prompt_ids)}; the target has rows for 0 to "
            f"{target.vocab_size - 1}.",
            way_out="These are another tokenizer's ids: use the tokenizer that belongs to these weights.",
        )
    if max_new_tokens < 1:
        raise UsageError(f"{max_new_tokens} new tokens asked for.", way_out="Ask for 1 or more.")
    room = target.max_positions - len(prompt_ids)
    if max_new_tokens > room:
        raise UsageError(
            f"A prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones do not fit the target's "
            f"{target.max_positions} positions.",
            way_out=f"Ask for at most {room} new tokens." if room > 0 else "Shorten the prompt.",
        )


def require_words(target: Target, sampling: Sampling, logprobs: int | None = None) -> None:
    """Raise UsageError for a biased token that the target does not have, or more best tokens than it has."""
    strange = [token for token in sampling.bias if token >= target.vocab_size]
    if strange:
        raise UsageError(
            f"The logit bias names token {strange[0]}; the target has 0 to {target.vocab_size - 1}.",
            way_out="Leave it out: it is another tokenizer's id.",
        )
    if logprobs is not None and not 0 <= logprobs <= target.vocab_size:
        raise UsageError(
            f"The {logprobs} best of a target's {target.vocab_size} tokens were asked for.", way_out="Ask for 0 to 20."
        )


def text_of(target: Target, stops: Sequence[str], before: Sequence[int] = ()) -> Text:
    """The text of an answer of this target, special tokens left out; ``before`` is what it goes on from. Raises
    TargetError where it has no tokenizer."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise no_tokenizer(target.spec)
    return Text(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), stops, before)
