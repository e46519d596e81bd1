"""Rounds that draft trees, or choose how much to draft: the answer stays the target's own (chains: ``test_decode``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import tiny
from eyas import checkpoint, prompts, resolve
from eyas import target as targets
from eyas.answers import Sampling
from eyas.decode.adaptive import Adaptive, AdaptiveTree, Costs
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation, depth_of, generate
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.decode.tree import Drafted, Tree, TreeSize
from eyas.render import Renderer

LONG = 30
SIZES = [TreeSize(1, 3, 3), TreeSize(3, 2, 5), TreeSize(4, 3, 20), TreeSize(2, 1, 2)]
KINDS = ["llama", "qwen3", "gemma3"]
FLAT = Costs({1: 1.0, 2: 1.02, 5: 1.1}, {1: 0.05})


@cache
def oracle(kind: str, sampling: Sampling | None = None) -> tuple[list[int], list[int], list[float]]:
    prompt, gaps = tiny.prompt(11), list[float]()
    ids = plain(tiny.target(kind), prompt, max_new_tokens=LONG, gaps=gaps, sampling=sampling)
    return prompt, list(ids), gaps


def assert_same(kind: str, answer: Sequence[int], sampling: Sampling | None = None) -> None:
    _, ids, gaps = oracle(kind, sampling)
    difference = first_difference(ids, answer, gaps)
    assert difference is None or difference.excused, difference


class Knowing(Tree):
    """Drafts a tree around the oracle's own tokens: right ones in the last child of every node, wrong ones before."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny.drafter(kind))
        self.told = oracle(kind)[1]
        self.known = 0

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        super().extend(taps, next_tokens, first_slot)
        self.known = first_slot + len(next_tokens) + 1 - len(oracle("llama")[0])

    def draft(self, size: TreeSize) -> Drafted:
        super().draft(size)
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for right in self.told[self.known : self.known + size.depth]:
            wrong = [(right + 1 + i) % tiny.VOCAB for i in range(size.top_k - 1)]
            parents += [above] * size.top_k
            tokens += [*wrong, right]
            above = len(tokens) - 1
        return Drafted(tokens, parents, torch.zeros(len(tokens)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_tree_says_what_the_target_says(kind: str, size: TreeSize) -> None:
    run = generate(
        tiny.target(kind), tiny.drafter(kind), oracle(kind)[0], max_new_tokens=LONG, draft_tokens=size
    ).finish()
    assert_same(kind, run.token_ids)
    assert len(run.drafted) == min(size.depth, size.nodes)
    assert run.rounds == run.drafted[0]
    assert 1 + run.rounds + sum(run.accepted) >= len(run.token_ids)


@pytest.mark.parametrize("size", [TreeSize(3, 2, 6), TreeSize(5, 3, 15)], ids=str)
def test_a_path_through_a_tree_is_kept_whole(size: TreeSize) -> None:
    """The right token is the last child of each node, so every kept row but the first lies behind rejected ones."""
    prompt = oracle("llama")[0]
    run = Generation(
        tiny.target("llama"), Knowing("llama"), prompt, max_new_tokens=LONG - 6, draft_tokens=size
    ).finish()
    assert run.token_ids == oracle("llama")[1][: LONG - 6]
    assert run.accepted == [run.rounds] * size.depth
    assert run.rounds == -(-(LONG - 6 - 1) // (size.depth + 1))
    taken = [drafted for drafted in run.was_drafted if drafted]
    assert len(taken) >= run.rounds * (size.depth - 1)


def test_penalties_follow_the_path() -> None:
    sampling = Sampling(repetition_penalty=1.7, presence_penalty=0.5)
    prompt = oracle("llama", sampling)[0]
    for size in SIZES:
        run = generate(tiny.target(), tiny.drafter(), prompt, max_new_tokens=LONG, draft_tokens=size, sampling=sampling)
        assert_same("llama", run.finish().token_ids, sampling)
    assert oracle("llama", sampling)[1] != oracle("llama")[1], "the penalties change nothing here"


def test_a_law_of_one_word_is_greedy() -> None:
    sampling = Sampling(temperature=0.7, top_k=1, seed=3)
    run = generate(
        tiny.target(), tiny.drafter(), oracle("llama")[0], max_new_tokens=LONG, draft_tokens=SIZES[1], sampling=sampling
    )
    assert_same("llama", run.finish().token_ids)


def test_a_sampled_tree_has_the_targets_law() -> None:
    """Of the second token of many answers, against the law that plain passes give after the first (chi square)."""
    target, drafter, prompt = tiny.target(), tiny.drafter(), tiny.prompt(7)
    sampling = Sampling(temperature=1.0, top_k=3, seed=1)
    pairs: dict[tuple[int, int], int] = {}
    n = 600
    for i in range(n):
        run = generate(
            target, drafter, prompt, max_new_tokens=2, draft_tokens=TreeSize(2, 3, 6), sampling=sampling, name=str(i)
        ).finish()
        pair = (run.token_ids[0], run.token_ids[1]) if len(run.token_ids) > 1 else (run.token_ids[0], -1)
        pairs[pair] = pairs.get(pair, 0) + 1

    def law(ids: list[int]) -> dict[int, float]:
        best = target.model(torch.tensor([ids])).logits[0, -1].float().topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    with torch.no_grad():
        expected = {
            (first, second): n * p * q
            for first, p in law(prompt).items()
            for second, q in (law([*prompt, first]).items() if first not in target.eos_ids() else [(-1, 1.0)])
        }
    assert set(pairs) <= set(expected)
    chi = sum((pairs.get(pair, 0) - mean) ** 2 / mean for pair, mean in expected.items())
    assert chi < 26.1, (chi, pairs)  # 8 degrees of freedom, p = 0.001


def test_the_end_of_the_context_cuts_a_tree() -> None:
    target = tiny.target()
    prompt = tiny.prompt(target.max_positions - 4)
    run = generate(target, tiny.drafter(), prompt, max_new_tokens=4, draft_tokens=TreeSize(4, 2, 8)).finish()
    assert run.token_ids == list(plain(target, prompt, max_new_tokens=4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chosen_length_changes_no_token(kind: str) -> None:
    chooser = Adaptive(FLAT, 4)
    run = generate(
        tiny.target(kind),
        tiny.drafter(kind),
        oracle(kind)[0],
        max_new_tokens=LONG,
        draft_tokens=4,
        chooser=chooser,
    ).finish()
    assert_same(kind, run.token_ids)


def test_a_useless_drafter_is_soon_asked_no_more() -> None:
    prompt = oracle("llama")[0]
    dear = Adaptive(Costs({1: 1.0, 2: 1.8, 5: 3.0}, {1: 0.5}), 4)
    runs = [
        generate(
            tiny.target(), tiny.drafter(seed=i), prompt, max_new_tokens=LONG, draft_tokens=4, chooser=dear
        ).finish()
        for i in range(3)
    ]
    assert all(run.token_ids == runs[0].token_ids for run in runs)
    last = runs[-1]
    assert last.drafted[0] < last.rounds / 2


def test_trees_are_chosen_among() -> None:
    chooser = AdaptiveTree(FLAT, [TreeSize(2, 2, 4), TreeSize(3, 2, 6)])
    prompt = oracle("llama")[0]
    side = Tree(tiny.drafter())
    run = Generation(
        tiny.target(), side, prompt, max_new_tokens=LONG, draft_tokens=TreeSize(3, 2, 6), chooser=chooser
    ).finish()
    assert_same("llama", run.token_ids)


def test_depths_of_a_tree() -> None:
    assert depth_of([]) == 0
    assert depth_of([-1, -1, 0, 2, 1]) == 3


@pytest.mark.real
def test_on_the_real_target() -> None:
    target = targets.load("smollm2")
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    renderer = Renderer(target.tokenizer, target.eos_ids())
    chosen = prompts.load("mt-bench", 2)
    with packed(target, drafter):
        for prompt in chosen:
            ids, gaps = renderer.ids(prompt.messages(), prompt=True), list[float]()
            told = list(plain(target, ids, max_new_tokens=24, gaps=gaps))
            for size in (TreeSize(4, 2, 8), TreeSize(3, 3, 6)):
                run = generate(target, drafter, ids, max_new_tokens=24, draft_tokens=size).finish()
                difference = first_difference(told, run.token_ids, gaps)
                assert difference is None or difference.excused, difference
            alone = Generation(target, Chain(drafter), ids, max_new_tokens=24, draft_tokens=3).finish()
            difference = first_difference(told, alone.token_ids, gaps)
            assert difference is None or difference.excused, difference
