"""Sampling with drafts is sampling without: every way chance can go, multiplied out, gives plain's law.

Chains are enumerated through the real loop, drafting and keeping included, over tables (``chances``); trees through
``accept.walk``. One round from every first token, gone on with as plain would, is enough by induction; a few settings
play several rounds all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import chances
from chances import PROMPT, VOCAB, Played, Table, TableChain, assert_as_plain, chance_is, every, row
from eyas.answers import Sampling
from eyas.decode import accept
from eyas.decode.accept import Drawn, Path
from eyas.decode.law import Law
from eyas.decode.sample import Chance

SETTINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "repetition": {"repetition_penalty": 1.6},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.9},
    "bias": {"logit_bias": {1: 1.5, 4: -2.0}},
}
COMBINATIONS = [names for n in range(len(SETTINGS) + 1) for names in itertools.combinations(SETTINGS, n)]
ALL = tuple(SETTINGS)
SOME_WORDS = (0, 2, 3)


def sampling_of(names: Sequence[str], temperature: float = 0.9) -> Sampling:
    merged = {key: value for name in names for key, value in SETTINGS[name].items()}
    return Sampling(temperature, **merged)


def own(words: int) -> chances.Drafts:
    """A drafter with a mind of its own."""
    return lambda text: row(text, words, "draft")


def rounds(
    sampling: Sampling, K: int, drafts: chances.Drafts, words: Sequence[int], n: int = 99, most: int = 1
) -> dict[tuple[int, ...], float]:
    """Every answer after at most ``most`` rounds or ``n`` tokens, and its probability."""

    def play(chance: Chance) -> tuple[int, ...]:
        with chance_is(chance):
            side = TableChain(drafts, words)
            run = Played(Table(), side, PROMPT, max_new_tokens=n, draft_tokens=K, sampling=sampling)  # type: ignore[arg-type]
            while not run.finished and run.rounds < most:
                next(run)
            assert run.finished or side.text == [*PROMPT, *run.token_ids]
            return tuple(run.token_ids)

    return every(play)


# -- a chain -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_a_chain_has_plains_law_under_every_combination_of_settings(names: tuple[str, ...]) -> None:
    sampling = sampling_of(names)
    assert_as_plain(rounds(sampling, 2, own(2), (0, 3)), sampling, 4)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_a_chain_of_any_depth_and_temperature(K: int, temperature: float) -> None:
    for names in ((), ("top_p", "penalties"), ALL):
        sampling = sampling_of(names, temperature)
        words = SOME_WORDS if K < 3 else (1, 3)
        assert_as_plain(rounds(sampling, K, own(len(words)), words), sampling, K + 2)


@pytest.mark.parametrize("names", [(), ("top_k", "repetition", "penalties", "bias")], ids=["bare", "many"])
def test_several_rounds(names: tuple[str, ...]) -> None:
    sampling = sampling_of(names)
    assert_as_plain(rounds(sampling, 1, own(2), (0, 3), n=3, most=9), sampling, 3)
    assert_as_plain(rounds(sampling, 2, own(1), (2,), n=3, most=9), sampling, 3)


def right(text: tuple[int, ...]) -> Sequence[float]:
    return row(text)


def wrong(text: tuple[int, ...]) -> Sequence[float]:
    return [-9 * logit for logit in row(text)]


def sure(text: tuple[int, ...]) -> Sequence[float]:
    return [math.inf if word == len(text) % VOCAB else -math.inf for word in range(VOCAB)]


def nothing(text: tuple[int, ...]) -> Sequence[float]:
    return [math.nan] * VOCAB


def partly_nothing(text: tuple[int, ...]) -> Sequence[float]:
    return [math.nan, math.inf, 0.5, -math.inf, 1.0]


def barely(text: tuple[int, ...]) -> Sequence[float]:
    return [logit + 1e-13 * word for word, logit in enumerate(row(text))]


ADVERSARIES = {
    "right": (right, range(VOCAB)),
    "wrong": (wrong, range(VOCAB)),
    "sure": (sure, range(VOCAB)),
    "nan": (nothing, range(VOCAB)),
    "some-nan": (partly_nothing, range(VOCAB)),
    "rounding": (barely, range(VOCAB)),
    "other-words": (right, (4, 3, 2, 1, 0)),
    "outside": (right, (1, 3, VOCAB, -1, 10**6)),
    "all-outside": (sure, (-2, -1, VOCAB, VOCAB + 1, 10**6)),
    "twice": (right, (2, 2, 0, 4, 4)),
    "one-word": (lambda text: [0.3], (3,)),
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_drafter_changes_the_law(adversary: str) -> None:
    drafts, words = ADVERSARIES[adversary]
    for K, names in ((1, ()), (2, ("top_k", "repetition", "bias"))):
        sampling = sampling_of(names)
        assert_as_plain(rounds(sampling, K, drafts, list(words)), sampling, K + 2)


def test_a_right_drafter_is_always_kept_and_a_wrong_one_never() -> None:
    sampling = Sampling(0.9, top_k=2)
    assert {len(answer) for answer in rounds(sampling, 2, right, range(VOCAB))} == {4}
    assert {len(answer) for answer in rounds(sampling, 2, wrong, range(VOCAB))} == {2}


# -- keeping, by itself ----------------------------------------------------------------------------------------

P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.6, 0.2, 0.0], [0.0, 0.1, 0.1, 0.8]], dtype=torch.float64)


def test_shares_kept_and_what_is_left() -> None:
    assert accept.kept_shares([1, 3], Q, P[:-1]) == pytest.approx([0.5, 0.5])
    assert accept.kept_shares([0, 1], Q, P[:-1]) == [1.0, 1.0]
    assert accept.residual(P[0], Q[0]).tolist() == pytest.approx([1.0, 0, 0, 0])
    assert accept.residual(P[1], Q[1]).tolist() == pytest.approx([0.25, 0.25, 0.5, 0])
    assert torch.equal(accept.residual(P[0], P[0]), P[0])


def test_what_cannot_have_been_drawn_is_not_kept() -> None:
    assert accept.kept_shares([-1, 4], Q, P[:-1]) == [0.0, 0.0]
    assert accept.kept_shares([3, 0], Q, P[:-1]) == [0.0, 0.0]
    bad = torch.full_like(Q, math.nan)
    assert accept.kept_shares([1, 3], bad, P[:-1]) == [0.0, 0.0]
    assert torch.equal(accept.residual(P[0], bad[0]), P[0])
    found = every(lambda chance: accept.sampled([1, 3], bad, P, chance).bonus)
    assert [found[word] for word in range(3)] == pytest.approx(P[0, :3].tolist())


def test_laws_of_draft_words_lie_at_their_target_ids() -> None:
    laws = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    assert Drawn([2, 0], laws, torch.tensor([3, 0, 2])).over(5).tolist() == [
        pytest.approx([0.25, 0, 0.25, 0.5, 0]),
        pytest.approx([0.2, 0, 0.7, 0.1, 0]),
    ]
    assert Drawn([2, 0], laws, torch.tensor([3, 9, -1])).over(4).tolist() == [
        pytest.approx([0, 0, 0, 0.5]),
        pytest.approx([0, 0, 0, 0.1]),
    ]


# -- a tree ----------------------------------------------------------------------------------------------------

#        -1 ─┬─ 0: a ─┬─ 2: c            tokens by row; a node's children are chosen by the drafter, not drawn
#            └─ 1: b  └─ 3: d ── 4: e
PARENTS = [-1, -1, 0, 0, 3]
TREES: dict[str, tuple[list[int], list[int]]] = {
    "tree": ([0, 3, 1, 2, 4], PARENTS),
    "same-words": ([2, 0, 2, 0, 2], PARENTS),
    "twins": ([2, 2, 1, 3, 1], PARENTS),
    "outside": ([VOCAB, 3, 1, -1, 10**6], PARENTS),
    "chain": ([3, 1, 0], [-1, 0, 1]),
    "star": ([0, 1, 2, 3, 4], [-1] * 5),
    "nothing": ([], []),
}


def branch(tokens: Sequence[int], parents: Sequence[int], at: int) -> list[int]:
    """The tokens from the root to row ``at``."""
    return [] if at < 0 else [*branch(tokens, parents, parents[at]), tokens[at]]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_a_walk_has_plains_law_under_every_combination_of_settings(names: tuple[str, ...]) -> None:
    sampling = sampling_of(names)
    law = Law(sampling, PROMPT)
    for tokens, parents in TREES.values():

        def play(chance: Chance, tokens: Sequence[int] = tokens, parents: Sequence[int] = parents) -> tuple[int, ...]:
            def say(at: int) -> int:
                answer = branch(tokens, parents, at)
                logits = torch.tensor([row((*PROMPT, *answer))], dtype=torch.float64)
                return int(chance.pick(law.probabilities(logits, [answer])[0]))

            path = accept.walk(tokens, parents, say)
            return (*(tokens[at] for at in path.rows), path.bonus)

        assert_as_plain(every(play), sampling, 4)


def test_a_walk_follows_the_targets_tokens_to_their_rows() -> None:
    tokens, parents = TREES["tree"]
    told = {-1: 0, 0: 2, 1: 9, 2: 9, 3: 4, 4: 7}
    assert accept.walk(tokens, parents, told.__getitem__) == Path([0, 3, 4], 7)
    assert accept.walk(tokens, parents, {**told, 3: 2}.__getitem__) == Path([0, 3], 2)
    assert accept.walk(tokens, parents, {**told, -1: 3}.__getitem__) == Path([1], 9)
    assert accept.walk(tokens, parents, lambda _: 8) == Path([], 8)
    assert accept.walk(*TREES["twins"], {-1: 2, 0: 3, 3: 1, 4: 0}.__getitem__) == Path([0, 3, 4], 0)


def test_a_walk_along_a_chain_is_greedy_keeping() -> None:
    for said in itertools.product(range(3), repeat=4):
        kept = accept.greedy([0, 1, 2], said)
        path = accept.walk([0, 1, 2], [-1, 0, 1], lambda at, said=said: said[at + 1])  # type: ignore[misc]
        assert (len(path.rows), path.bonus) == kept


@pytest.mark.parametrize("tree", TREES)
def test_a_walk_says_what_plain_says_with_the_same_draws(tree: str) -> None:
    tokens, parents = TREES[tree]
    sampling = sampling_of(("top_p", "penalties"))
    law = Law(sampling, PROMPT)
    for seed in range(30):
        along, alone = (Chance(sampling.draws(str(seed))) for _ in range(2))

        def draw(chance: Chance, answer: list[int]) -> int:
            logits = torch.tensor([row((*PROMPT, *answer))], dtype=torch.float64)
            return int(chance.pick(law.probabilities(logits, [answer])[0]))

        path = accept.walk(tokens, parents, lambda at, c=along: draw(c, branch(tokens, parents, at)))  # type: ignore[misc]
        told = [*(tokens[at] for at in path.rows), path.bonus]
        answer: list[int] = []
        for _ in told:
            answer.append(draw(alone, answer))
        assert told == answer
