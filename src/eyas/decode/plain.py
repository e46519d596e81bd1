"""Greedy decoding one token a pass: the oracle that every other way of decoding must agree with.

Letters: S rows, D target width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eyas.decode.cache import TargetCache, as_row
from eyas.errors import UsageError
from eyas.target import Target


def plain(
    target: Target, prompt_ids: Sequence[int], *, max_new_tokens: int, gaps: list[float] | None = None
) -> Iterator[int]:
    """The target's own answer, token by token, an end token included.

    With a list as ``gaps`` the distance between the two best logits of each step is appended to it.
    """
    require_room(target, prompt_ids, max_new_tokens)
    return _steps(target, list(prompt_ids), max_new_tokens, gaps)


def _steps(target: Target, fed: list[int], max_new_tokens: int, gaps: list[float] | None) -> Iterator[int]:
    cache, ends = TargetCache(target), target.eos_ids()
    for _ in range(max_new_tokens):
        token = _step(target, cache, fed, gaps)
        yield token
        if token in ends:
            return
        fed = [token]


@torch.inference_mode()  # on the step, not on the generator: a mode must not leak through a yield
def _step(target: Target, cache: TargetCache, fed: list[int], gaps: list[float] | None) -> int:
    logits = last_logits(target, cache.forward(as_row(fed, target)))
    best, token = logits.max(-1)
    found = int(token)
    if gaps is not None:
        logits[found] = -torch.inf
        gaps.append(float(best - logits.max()))
    return found


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
