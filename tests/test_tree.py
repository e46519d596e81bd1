"""The draft tree: every node is what a chain along its path says, and the nodes kept are the likeliest there are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from eyas import checkpoint, resolve, taps
from eyas import target as targets
from eyas.decode import tree as trees
from eyas.decode.chain import Chain
from eyas.decode.tree import Candidates, Drafted, Tree, TreeSize
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.target import Target

TAPS = (1, 2, 4)
PROMPT = 12
Path = tuple[int, ...]
Side = TypeVar("Side", bound=Chain | Tree)
sizes = st.builds(TreeSize, depth=st.integers(1, 5), top_k=st.integers(1, 4), nodes=st.integers(1, 24))


@cache
def seen_of(kind: str) -> tuple[list[int], Tensor]:
    """A prompt, and the taps of its positions [1, T, C*D]."""
    ids = tiny.prompt(PROMPT)
    return ids, taps.run(tiny.target(kind), torch.tensor([ids]), torch.tensor([PROMPT]), TAPS).taps


def extended(side: Side, kind: str = "llama") -> Side:
    """``side`` after the prompt's slots but the last, which has no next token."""
    ids, seen = seen_of(kind)
    side.extend(seen[:, :-1], ids[1:], 0)
    return side


class Along:
    """What a chain says after a path, fed alone token by token."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.start = chain, chain.state

    @torch.inference_mode()
    def __call__(self, path: Path) -> tuple[Tensor, Tensor]:
        """State [H] and draft logits [W]."""
        self.chain.state = self.start
        for token in path:
            self.chain.feed(torch.tensor([[token]]))
        assert self.chain.state is not None
        said = self.chain.state[0, 0], self.chain.logits()
        self.chain.truncate(self.chain.committed)
        return said

    def children(self, path: Path) -> list[tuple[float, int]]:
        """Log probability and target id of every token of the draft vocabulary."""
        log_probs = self(path)[1].double().log_softmax(-1).tolist()
        return list(zip(log_probs, self.chain.drafter.vocab.ids.tolist(), strict=True))


class Watched(Tree):
    """Keeps the states [F, H] of every pass and the candidates they belong to."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.passes: list[Tensor] = []

    def _children(self, states: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self.passes.append(states.clone())
        return super()._children(states, top_k)


class Remembered(Candidates):
    made: Remembered

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fed: list[list[int]] = []
        Remembered.made = self

    def add(self, fed: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        self.fed.append(fed.tolist())
        super().add(fed, tokens, log_probs)


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Each node's path from the root, its own token last."""
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def assert_valid(drafted: Drafted, vocab: set[int], nodes: int) -> None:
    assert len(drafted.tokens) == len(drafted.parents) == len(drafted.log_probs) == nodes
    assert all(-1 <= parent < row for row, parent in enumerate(drafted.parents)), drafted.parents
    assert set(drafted.tokens) <= vocab
    found = paths(drafted.tokens, drafted.parents)
    assert len(set(found)) == len(found), "two children of a node are one token"
    scores = drafted.log_probs.tolist()
    assert scores == sorted(scores, reverse=True)
    assert all(score <= 0 for score in scores)


# -- every node against a chain along its path -------------------------------------------------------------


@torch.inference_mode()
def farthest(tree: Watched, along: Along, size: TreeSize, monkeypatch: pytest.MonkeyPatch) -> float:
    """Largest relative difference of states and logits over every node fed, tree against chain."""
    monkeypatch.setattr(trees, "Candidates", Remembered)
    tree.draft(size)
    made, worst = Remembered.made, 0.0
    path_of = dict(enumerate(paths(made.tokens.tolist(), made.parents.tolist())))
    for states, fed in zip(tree.passes, made.fed, strict=True):
        assert len(states) == len(fed) > 0
        for state, place in zip(states, fed, strict=True):
            expected, logits = along(path_of.get(place, ()))
            worst = max(worst, relative(state, expected), relative(tree.drafter.logits(state), logits))
    return worst


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, "usual") for kind in tiny.KINDS), *(("llama", shape) for shape in tiny.SHAPES)]
)
def test_every_node_is_what_a_chain_along_its_path_says(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny.drafter(kind, **tiny.SHAPES[shape])
    tree, along = extended(Watched(drafter), kind), Along(extended(Chain(drafter), kind))
    assert farthest(tree, along, TreeSize(4, 3, 30), monkeypatch) < 1e-5
    assert [len(states) for states in tree.passes] == [1, 3, 3, 3]


def test_nodes_left_out_of_a_pass_leave_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few are kept a later pass feeds fewer nodes than one before, a single one among them."""
    widths = set()
    for seed in range(12):
        drafter = tiny.drafter(seed=seed)
        tree, along = extended(Watched(drafter)), Along(extended(Chain(drafter)))
        assert farthest(tree, along, TreeSize(5, 3, 6), monkeypatch) < 1e-5
        widths.add(tuple(len(states) for states in tree.passes))
    assert any(1 in width[2:] and max(width) > 1 for width in widths), widths


class Spoilt(Watched):
    """Feeds its passes what ``spoil`` makes of it: states [1, F, H], tokens [F], ancestors [F, R], depth."""

    def __init__(self, drafter: Drafter, spoil: Callable[..., tuple[Tensor, Tensor, Tensor, int]]) -> None:
        super().__init__(drafter)
        self.spoil = spoil

    def _feed(self, *fed: Any) -> Tensor:
        return super()._feed(*self.spoil(*fed))


SPOILT: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor, int]]] = {
    "sees-all": lambda s, t, a, d: (s, t, torch.ones_like(a), d),
    "sees-itself-alone": lambda s, t, a, d: (s, t, F.pad(torch.eye(len(t)).bool(), (a.shape[1] - len(t), 0)), d),
    "next-position": lambda s, t, a, d: (s, t, a, d + 1),
    "other-parent": lambda s, t, a, d: (s.roll(1, dims=1), t, a, d),
}


@pytest.mark.parametrize("spoil", list(SPOILT))
def test_the_comparison_notices_a_miswired_pass(spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny.drafter()
    tree, along = extended(Spoilt(drafter, SPOILT[spoil])), Along(extended(Chain(drafter)))
    assert farthest(tree, along, TreeSize(4, 3, 30), monkeypatch) > 1e-2


# -- which nodes are kept ----------------------------------------------------------------------------------


def naive(
    children: Callable[[Path], list[tuple[float, int]]], size: TreeSize
) -> tuple[list[tuple[float, Path]], float]:
    """EAGLE-2's tree by plain lists, best first, and the least distance at which it was decided who is in."""
    proposed: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    nearest = float("inf")

    def best(of: list[tuple[float, Any]], n: int) -> list[tuple[float, Any]]:
        nonlocal nearest
        ranked = heapq.nlargest(n + 1, of, key=lambda one: one[0])  # stable, as sorted() is
        if len(ranked) > n:
            nearest = min(nearest, ranked[n - 1][0] - ranked[n][0])
        return ranked[:n]

    for _ in range(size.depth):
        told = [(score, path, best(children(path), size.top_k)) for score, path in frontier]
        level = [(score + own, (*path, token)) for score, path, below in told for own, token in below]
        proposed += level
        frontier = best(level, size.top_k)
    return best(proposed, size.nodes), nearest


@settings(max_examples=60, deadline=None)
@given(size=sizes, seed=st.integers(0, 1000), shape=st.sampled_from(["usual", "norm_output", "everything"]))
def test_the_tree_is_the_naive_builders(size: TreeSize, seed: int, shape: str) -> None:
    drafter = tiny.drafter(seed=seed, **tiny.SHAPES[shape])
    expected, nearest = naive(Along(extended(Chain(drafter))).children, size)
    assume(nearest > 1e-4)
    drafted = extended(Tree(drafter)).draft(size)
    assert_valid(drafted, set(drafter.vocab.ids.tolist()), size.rows - 1)
    found = dict(zip(paths(drafted.tokens, drafted.parents), drafted.log_probs.tolist(), strict=True))
    assert found == pytest.approx({path: score for score, path in expected}, abs=1e-4)


class Told(Tree):
    """A tree whose children are told by ``children``; a state is a number of a path."""

    def __init__(self, children: Callable[[Path], list[tuple[float, int]]]) -> None:
        super().__init__(tiny.drafter())
        self.children, self.known = children, [()]
        self.fed = 0
        self.chain.state = torch.zeros(1, 1, 1, dtype=torch.int64)

    def _feed(self, states: Tensor, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        self.fed += len(tokens)
        start = len(self.known)
        above = [self.known[i] for i in states.flatten().tolist()]
        self.known += [(*path, token) for path, token in zip(above, tokens.tolist(), strict=True)]
        return torch.arange(start, len(self.known))[None, :, None]

    def _children(self, states: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        told = [self.children(self.known[i])[:top_k] for i in states.flatten().tolist()]
        log_probs, tokens = torch.tensor(told, dtype=torch.float64).unbind(-1)
        return tokens.long(), log_probs.float()


def coarse(seed: int, steps: int, certain: bool) -> Callable[[Path], list[tuple[float, int]]]:
    """Children with log probabilities of few values, so that most are ties: eighths from 0 down, and -inf."""

    @cache
    def children(path: Path) -> list[tuple[float, int]]:
        draws = np.random.default_rng([seed, len(path), *path])
        values = [0.0 if certain else -0.125, *(-0.125 * step for step in range(1, steps)), -np.inf]
        own = sorted((float(draws.choice(values)) for _ in range(4)), reverse=True)
        return list(zip(own, draws.permutation(50)[:4].tolist(), strict=True))

    return children


@settings(max_examples=150, deadline=None)
@given(size=sizes, seed=st.integers(0, 10**6), steps=st.integers(1, 4), certain=st.booleans())
def test_ties_leave_a_tree_and_a_node_that_cannot_matter_changes_nothing(
    size: TreeSize, seed: int, steps: int, certain: bool
) -> None:
    children = coarse(seed, steps, certain)
    drafted, (expected, _) = Told(children).draft(size), naive(children, size)
    assert_valid(drafted, set(range(50)), size.rows - 1)
    assert paths(drafted.tokens, drafted.parents) == [path for _, path in expected]
    assert drafted.log_probs.tolist() == [score for score, _ in expected]


def test_nodes_that_cannot_matter_are_not_fed() -> None:
    """One sure path: of its eight nodes each but the last is fed, and nothing else."""

    def children(path: Path) -> list[tuple[float, int]]:
        return [(-0.01, 1), (-5.0, 2), (-6.0, 3)] if set(path) <= {1} else [(-1.0, 1), (-2.0, 2), (-3.0, 3)]

    told = Told(children)
    drafted = told.draft(TreeSize(8, 3, 8))
    assert (drafted.tokens, drafted.parents) == ([1] * 8, list(range(-1, 7)))
    assert told.fed < 7 * 3


def test_every_beginning_of_a_draft_is_the_smaller_draft() -> None:
    whole = extended(Tree(tiny.drafter(seed=5))).draft(TreeSize(4, 3, 20))
    for nodes in (1, 3, 8, 15):
        part = extended(Tree(tiny.drafter(seed=5))).draft(TreeSize(4, 3, nodes))
        assert part[:2] == (whole.tokens[:nodes], whole.parents[:nodes])


# -- a chain is a narrow tree ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(tiny.SHAPES))
@pytest.mark.parametrize("K", [1, 2, 5])
def test_a_tree_of_one_child_a_node_is_the_chain(shape: str, K: int) -> None:
    drafter = tiny.drafter(**tiny.SHAPES[shape])
    drafted = extended(Tree(drafter)).draft(TreeSize(K, 1, K))
    assert drafted.tokens == extended(Chain(drafter)).draft(K)
    assert drafted.parents == list(range(-1, K - 1))


def of_words(n: int) -> Drafter:
    usual = tiny.drafter()
    few = usual.config.model_copy(update={"draft_vocab_size": n})
    return Drafter(few, tiny.vocab(size=n), usual.embedding).requires_grad_(False)


def test_a_drafter_of_a_single_word_is_a_chain_however_wide() -> None:
    drafted = extended(Tree(of_words(1))).draft(TreeSize(3, 4, 9))
    assert (drafted.parents, drafted.log_probs.tolist()) == ([-1, 0, 1], [0.0] * 3)


def test_among_words_alike_the_tree_takes_the_chains() -> None:
    drafter = of_words(50)  # so few that topk would take another than the first
    drafter.lm_head.weight.zero_()
    assert extended(Tree(drafter)).draft(TreeSize(2, 1, 2)).tokens == extended(Chain(drafter)).draft(2)


def test_drafts_leave_nothing_behind() -> None:
    """Round after round, wide and narrow, a tree says what one made for the text so far says."""
    drafter, (ids, seen) = tiny.drafter(**tiny.SHAPES["layers"]), seen_of("llama")
    tree, committed = Tree(drafter), 0
    for until, size in (
        (4, TreeSize(4, 3, 12)),
        (7, TreeSize(2, 4, 20)),
        (8, TreeSize(3, 1, 3)),
        (11, TreeSize(3, 2, 9)),
    ):
        tree.extend(seen[:, committed:until], ids[committed + 1 : until + 1], committed)
        committed = until
        fresh = Tree(drafter)
        fresh.extend(seen[:, :until], ids[1 : until + 1], 0)
        ours, theirs = tree.draft(size), fresh.draft(size)
        assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
        assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-5)
        assert tree.chain.length == tree.chain.committed == until
    with pytest.raises(AssertionError, match="draft before extend"):
        tree.draft(TreeSize(1, 1, 1))


# -- drafters that are broken, sizes that are wrong --------------------------------------------------------


NAN, INF = float("nan"), float("inf")
BROKEN: dict[str, Callable[[Drafter], object]] = {
    "nan-everywhere": lambda drafter: drafter.fc.weight.fill_(NAN),
    "nan-word": lambda drafter: drafter.lm_head.weight[3].fill_(NAN),
    "infinite-words": lambda drafter: drafter.lm_head.weight[2:9].fill_(INF),
    "nan-after-some-tokens": lambda drafter: drafter.embedding.index_fill_(0, drafter.vocab.ids[::2], NAN),
    "all-words-alike": lambda drafter: drafter.lm_head.weight.zero_(),
}


@pytest.mark.parametrize("broken", list(BROKEN))
@pytest.mark.parametrize("size", [TreeSize(5, 4, 40), TreeSize(4, 3, 5), TreeSize(6, 1, 6)])
def test_a_broken_drafter_still_says_a_tree_of_its_words(broken: str, size: TreeSize) -> None:
    drafter = tiny.drafter(own_embedding=True)
    BROKEN[broken](drafter)
    drafted = extended(Tree(drafter)).draft(size)
    assert_valid(drafted, set(drafter.vocab.ids.tolist()), size.rows - 1)
    if size.top_k == 1:
        assert drafted.tokens == extended(Chain(drafter)).draft(size.depth)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-3, 2, 2)])
def test_a_size_without_a_node_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="1 or more was expected"):
        TreeSize(*numbers)


def test_rows_are_no_more_than_can_be_proposed() -> None:
    assert TreeSize(3, 2, 100).rows == 1 + 2 + 4 + 4
    assert TreeSize(4, 1, 9).rows == 5


# -- the shipped drafter -----------------------------------------------------------------------------------


@pytest.mark.real
def test_the_shipped_drafters_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.load("smollm2")
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    tree, chain = (real(side, target) for side in (Watched(drafter), Chain(drafter)))
    along, size = Along(chain), TreeSize(4, 3, 12)
    expected, nearest = naive(along.children, size)
    assert nearest > 1e-5
    assert farthest(tree, along, size, monkeypatch) < 1e-4

    drafted = real(Tree(drafter), target).draft(size)
    assert_valid(drafted, set(drafter.vocab.ids.tolist()), 12)
    found = dict(zip(paths(drafted.tokens, drafted.parents), drafted.log_probs.tolist(), strict=True))
    assert found == pytest.approx({path: score for score, path in expected}, abs=1e-3)
    assert real(Tree(drafter), target).draft(TreeSize(4, 1, 4)).tokens == real(Chain(drafter), target).draft(4)


def real(side: Side, target: Target) -> Side:
    assert target.tokenizer is not None
    ids = target.tokenizer("The capital of France is Paris. The capital of Italy is")["input_ids"]
    seen = taps.run(target, torch.tensor([ids]), torch.tensor([len(ids)]), side.taps).taps
    side.extend(seen[:, :-1], ids[1:], 0)
    return side
