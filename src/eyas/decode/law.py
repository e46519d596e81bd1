"""What may come next and how likely it is: rows of logits under the settings of an answer.

    logits ─ bias ─ repetition ─ frequency ─ presence ─▶ adjusted ─ temperature ─ top-k ─ top-p ─ min-p ─▶ law
                                                            └─▶ its best: greedy

``eyas.answers.Sampling`` says what each step is and whose order this is.

Letters: R rows, V vocabulary (of the target, or of a drafter), B some of the rows, N words looked at, best first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.answers import Logprob, Sampling

NARROW = 256  # words in which a nucleus nearly always ends; a whole sort of 49 k words costs 4 ms a row


class Law:
    """The law of the next token of one answer. Settings that leave logits as they are cost nothing in ``adjusted``."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self.sampling = sampling
        self._prompt_ids = list(prompt_ids) if sampling.repetition_penalty != 1 else []
        self._asked: Tensor | None = None
        self._bias_ids = torch.tensor(list(sampling.bias), dtype=torch.int64)
        self._bias = torch.tensor(list(sampling.bias.values()), dtype=torch.float64)

    def adjusted(self, logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """Logits [R, V] after bias and penalties, what greedy takes the best of; ``logits`` itself where none is set.

        ``answers[r]``: the answer's tokens before row r, drafted ones on the way to it included.
        """
        sampling = self.sampling
        if not sampling.adjusts:
            return logits
        logits = _full(logits).clone()
        if sampling.logit_bias:
            logits[:, self._bias_ids] += self._bias.to(logits)
        if sampling.penalises:
            assert len(answers) == len(logits), "one answer a row"
            if self._asked is None:
                self._asked = _counts([self._prompt_ids], logits)
            said = _counts(answers, logits)
            seen = (self._asked + said) > 0
            r = sampling.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
            logits -= sampling.frequency_penalty * said.to(logits)
            logits -= sampling.presence_penalty * (said > 0).to(logits)
        return logits

    def best(self, logits: Tensor, answers: Sequence[Sequence[int]]) -> list[int]:
        """The greedy token of each row."""
        return argmax(self.adjusted(logits, answers))

    def probabilities(self, logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """The law of each row [R, V], fp32 or what is more precise in ``logits``; not for greedy settings."""
        return cut(self.adjusted(logits, answers), self.sampling)


def argmax(logits: Tensor) -> list[int]:
    """The first of the largest in each row [R, V], what is not a number before all. Alike on every device; on the CPU
    numpy's, which wakes no threads for it."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return logits.detach().numpy().argmax(-1).tolist()  # type: ignore[no-any-return]
    best: list[int] = logits.argmax(-1).tolist()
    return best


def cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Laws [R, V] of logits [R, V]: tempered, then cut by top-k, top-p and min-p."""
    laws = torch.zeros_like(_full(logits))
    for part in parts(logits, sampling):
        if part.words is None:
            return part.shares
        laws[part.rows] = torch.zeros_like(laws[part.rows]).scatter_(1, part.words, part.shares)
    return laws


class Part(NamedTuple):
    """Laws of ``rows`` [B] over ``words`` [B, N] alone (None: over all V in their order): shares [B, N], sum 1."""

    rows: Tensor
    words: Tensor | None
    shares: Tensor


def parts(logits: Tensor, sampling: Sampling) -> Iterator[Part]:
    """The laws of ``cut``, over the words that may come: a law of few words is not spread over V to be drawn from."""
    assert not sampling.greedy, "greedy draws nothing"
    vocabulary = logits.shape[1]
    logits = _full(logits)
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # the best is 0, whatever the temperature
    rows = torch.arange(len(logits), device=logits.device)
    if sampling.top_k is not None and sampling.top_k < vocabulary:
        best, words = scaled.topk(sampling.top_k, dim=-1)
        yield Part(rows, words, _kept(best.softmax(-1), sampling))
    elif sampling.top_p == 1:
        yield Part(rows, None, _kept(scaled.softmax(-1), sampling))
    else:
        best, words = scaled.topk(min(NARROW, vocabulary), dim=-1)
        shares = (best - scaled.logsumexp(-1, keepdim=True)).exp()
        inside = shares.sum(-1, dtype=torch.float64) >= sampling.top_p
        yield Part(rows[inside], words[inside], _kept(shares[inside], sampling))
        if not inside.all():
            best, words = scaled[~inside].sort(dim=-1, descending=True)
            yield Part(rows[~inside], words, _kept(best.softmax(-1), sampling))


def _kept(shares: Tensor, sampling: Sampling) -> Tensor:
    """Shares [B, N], best first where top-p is to cut, after top-p and min-p; they sum to 1."""
    if sampling.top_p < 1:
        last = (shares.cumsum(-1, dtype=torch.float64) < sampling.top_p).sum(-1, keepdim=True)
        shares = shares.where(torch.arange(shares.shape[1], device=shares.device) <= last, 0.0)
    if sampling.min_p > 0:
        shares = shares.where(shares >= sampling.min_p * shares.amax(-1, keepdim=True), 0.0)
    return shares / shares.sum(-1, keepdim=True)


def logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[Logprob]:
    """What the target thought of each token: log-softmax of logits [R, V] as they are, and its ``top`` best."""
    logs = _full(logits).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(token_ids, device=logs.device)[:, None])[:, 0].tolist()
    best, words = logs.topk(min(top, logs.shape[1]), dim=-1)
    ranked = zip(words.tolist(), best.tolist(), strict=True)
    return [
        Logprob(own, tuple(zip(ids, values, strict=True))) for own, (ids, values) in zip(chosen, ranked, strict=True)
    ]


def _full(logits: Tensor) -> Tensor:
    """In fp32, or more where it is more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _counts(texts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """How often each of V words is in each text: [len(texts), V], on the device of logits ``like`` [R, V].

    What a drafter made up and is no word counts nowhere.
    """
    vocabulary = like.shape[1]
    cells = [row * vocabulary + token for row, text in enumerate(texts) for token in text if 0 <= token < vocabulary]
    flat = torch.tensor(cells, dtype=torch.int64, device=like.device)
    return flat.bincount(minlength=len(texts) * vocabulary).view(len(texts), vocabulary)
