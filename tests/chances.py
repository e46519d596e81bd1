"""Every way chance can go, with its probability; and targets and drafters that are tables of logits.

The laws here are worked out word by word in plain Python and share no line with ``eyas.decode``: they are what its
answers must follow.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from eyas.answers import Sampling
from eyas.decode import loop
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation
from eyas.decode.sample import Chance

T = TypeVar("T")
VOCAB = 5
PROMPT = (3, 0, 3)
EXACT = 1e-9


# -- every way chance can go -------------------------------------------------------------------------------


class Every(Chance):
    """Answers as its script says, then always the first possible; ``path`` holds (answer, how many there were)."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script, self.path, self.weight = script, list[tuple[int, int]](), 1.0

    def happens(self, probability: float) -> bool:
        assert 0 <= probability <= 1
        return bool(self._ask([1 - probability, probability]))

    def pick(self, law: Tensor) -> Tensor:
        shares = law.tolist()
        assert abs(sum(shares) - 1) < EXACT, f"no law: {shares}"
        return torch.tensor(self._ask(shares))

    def _ask(self, shares: Sequence[float]) -> int:
        possible = [i for i, share in enumerate(shares) if share > 0]
        n = self.script[len(self.path)] if len(self.path) < len(self.script) else 0
        self.path.append((n, len(possible)))
        self.weight *= shares[possible[n]]
        return possible[n]


def every(play: Callable[[Chance], T]) -> dict[T, float]:
    """What ``play`` can give, and how likely each is: probabilities multiplied, nothing sampled."""
    found: dict[T, float] = defaultdict(float)
    script: list[int] = []
    while True:
        chance = Every(script)
        found[play(chance)] += chance.weight
        path = chance.path
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return dict(found)
        script = [n for n, _ in path[:-1]] + [path[-1][0] + 1]


# -- the law, word by word -----------------------------------------------------------------------------------


def adjusted(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    out, said = [], Counter(answer)
    for word, logit in enumerate(logits):
        logit += dict(sampling.logit_bias).get(word, 0.0)
        if word in said or word in prompt:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * said[word]
        logit -= sampling.presence_penalty * (word in said)
        out.append(logit)
    return out


def law(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Bias, penalties, temperature, top-k, top-p, min-p, in this order."""
    changed = adjusted(logits, sampling, prompt, answer)
    best = max(changed)
    weights = [math.exp((logit - best) / sampling.temperature) for logit in changed]
    order = sorted(range(len(weights)), key=lambda word: -weights[word])[: sampling.top_k]
    whole, before, nucleus = sum(weights[word] for word in order), 0.0, []
    for word in order:
        if before >= sampling.top_p:
            break
        nucleus.append(word)
        before += weights[word] / whole
    kept = [word for word in nucleus if weights[word] >= sampling.min_p * weights[order[0]]]
    whole = sum(weights[word] for word in kept)
    return [weights[word] / whole if word in kept else 0.0 for word in range(len(weights))]


# -- tables --------------------------------------------------------------------------------------------------


@cache
def row(text: tuple[int, ...], words: int = VOCAB, salt: str = "target") -> tuple[float, ...]:
    """Logits after ``text``: any numbers, always the same. An answer can begin with two words only: fewer branches."""
    draws = random.Random(f"{salt}/{text}")
    logits = tuple(draws.gauss(0, 1.3) for _ in range(words))
    return (-math.inf, logits[1], -math.inf, logits[3], -math.inf) if text == PROMPT and words == VOCAB else logits


@dataclass
class Table:
    """As much of a target as a generation asks for; its states are its logits, in double precision."""

    vocab_size: int = VOCAB
    max_positions: int = 999
    spec: str = "table"
    tokenizer: Any = None
    ends: frozenset[int] = frozenset()
    device: str = "cpu"
    decoder: Any = field(default_factory=lambda: SimpleNamespace(forward=lambda: None))

    def eos_ids(self) -> frozenset[int]:
        return self.ends

    def logits(self, states: Tensor) -> Tensor:
        return states


class Played(Generation):
    """A generation whose target is a ``Table``: it holds the text itself, and rejects what no target could embed."""

    def _hold(self, taps: Sequence[int]) -> TablePasses:
        return TablePasses()


class TablePasses:
    """See ``eyas.decode.passes.Passes``."""

    def __init__(self) -> None:
        self.text: tuple[int, ...] = ()
        self._paths: list[tuple[int, ...]] = []

    @property
    def length(self) -> int:
        return len(self.text)

    def forward(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        assert all(0 <= token < VOCAB for token in token_ids), "no row of the embedding"
        above = parents if parents is not None else range(-1, len(token_ids) - 1)
        self._paths = []
        for token, parent in zip(token_ids, above, strict=True):
            self._paths.append((*(self.text if parent < 0 else self._paths[parent]), token))
        self.text = self._paths[-1]
        rows = [row(path) for path in self._paths]
        return torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows), 1)

    def truncate(self, length: int) -> None:
        self.text = self.text[:length]

    def keep(self, rows: Sequence[int]) -> None:
        self.text = self._paths[rows[-1]]


Drafts = Callable[[tuple[int, ...]], Sequence[float]]


class TableChain(Chain):
    """The real chain's drafting over a table: ``drafts`` gives the logits of ``words`` after a text."""

    taps = (1,)
    committed = 0

    def __init__(self, drafts: Drafts, words: Sequence[int], prompt: Sequence[int] = PROMPT) -> None:
        self.words = torch.tensor(list(words))
        self.drafter = SimpleNamespace(  # type: ignore[assignment]
            draft_to_target=self.words, to_target_ids=lambda ids: self.words[ids]
        )
        self._drafts, self.text, self._fed = drafts, list(prompt[:1]), list[int]()

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        self.text = self.text[: first_slot + 1] + list(next_tokens)

    def feed(self, token: Tensor) -> None:
        self._fed.append(int(token))

    def logits(self) -> Tensor:
        logits = torch.tensor(self._drafts((*self.text, *self._fed)), dtype=torch.float64)
        assert len(logits) == len(self.words)
        return logits

    def truncate(self, length: int) -> None:
        self._fed = []


@contextmanager
def chance_is(chance: Chance) -> Iterator[None]:
    usual, loop.Chance = loop.Chance, lambda draws: chance  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        loop.Chance = usual  # type: ignore[misc]


# -- comparing with plain -------------------------------------------------------------------------------------


def plain_laws(sampling: Sampling, n: int, given: Sequence[int] = ()) -> dict[tuple[int, ...], float]:
    """The law of the answer's first ``n`` tokens, given those it begins with."""
    found = {tuple(given): 1.0}
    for _ in range(n - len(given)):
        found = {
            (*answer, word): weight * share
            for answer, weight in found.items()
            for word, share in enumerate(law(row((*PROMPT, *answer)), sampling, PROMPT, answer))
            if share > 0
        }
    return found


def assert_as_plain(found: dict[tuple[int, ...], float], sampling: Sampling, n: int) -> None:
    """``found``, each answer shorter than ``n`` gone on with as plain would, is plain's law of ``n`` tokens."""
    assert abs(sum(found.values()) - 1) < EXACT
    whole: dict[tuple[int, ...], float] = defaultdict(float)
    for answer, weight in found.items():
        for longer, share in plain_laws(sampling, n, answer[:n]).items():
            whole[longer] += weight * share
    expected = plain_laws(sampling, n)
    worst = max(abs(whole.get(answer, 0.0) - expected.get(answer, 0.0)) for answer in {*whole, *expected})
    assert worst < EXACT, f"off by {worst}"
