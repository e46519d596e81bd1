"""Every way through a target says what one dense pass over the text says, whatever was fed, dropped and kept before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import stacks
import tiny
from eyas.decode import compact, kernel, layers, passes, sight
from eyas.decode.passes import LibraryPasses, Passes
from eyas.errors import UsageError
from stacks import TAPS, dense, same

COMPACT = [name for name in (*tiny.KINDS, *stacks.COMPILED) if name != "deepseek"]
# 0 ── 1 ── 3 ── 7     rows of a tree: two branches of one parent, a second root, a branch of depth four
# └─── 2 ── 4
#      └─── 5
# 6 ── 8
PARENTS = [-1, 0, 0, 1, 2, 2, -1, 3, 6]
PATHS = [[0, 1, 3, 7], [0, 2, 4], [0, 2, 5], [6, 8], [6], []]


@pytest.fixture(params=["library", "compact, compiled", "compact, torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    monkeypatch.setattr(compact, "_STACKS", {})  # made anew, with the kernel or without
    if request.param == "compact, torch":
        monkeypatch.setattr(kernel, "load", lambda: (None, "not asked for"))
    elif request.param == "compact, compiled" and kernel.load()[0] is None:
        pytest.skip(str(kernel.load()[1]))
    return LibraryPasses if request.param == "library" else compact.CompactPasses


def made(way: type[Any], name: str, **choices: Any) -> Passes:
    if way is not LibraryPasses and name == "deepseek":
        pytest.skip("not an architecture of the compact way")
    return way(stacks.target(name), TAPS, **choices)  # type: ignore[no-any-return]


ALL = pytest.mark.parametrize("name", [*tiny.KINDS, *stacks.COMPILED])
SOME = pytest.mark.parametrize("name", ["llama", "wide heads in threes", "gemma3", "mistral", "deepseek"])


@ALL
def test_a_text_fed_in_parts_is_one_dense_pass(way: type[Any], name: str) -> None:
    ids = tiny.prompt(60)
    states, taps = dense(stacks.target(name), ids)
    fed = made(way, name)
    begin = 0
    for rows in (13, 1, 2, 1, 5, 6, 7, 9, 16):  # to both sides of the windows, and of what one tile holds
        same(fed.forward(ids[begin : begin + rows]), (states[begin : begin + rows], taps[begin : begin + rows]))
        begin += rows
    assert fed.length == len(ids)


@SOME
def test_a_long_prompt_in_chunks_is_the_same(way: type[Any], name: str) -> None:
    ids = tiny.prompt(61)
    for chunk in (7, 40, 60, 61):
        fed = made(way, name, chunk=chunk)
        same(fed.forward(ids), dense(stacks.target(name), ids))
        assert fed.length == 61


@ALL
def test_a_tree_is_each_of_its_paths_alone(way: type[Any], name: str) -> None:
    ids, drafted = tiny.prompt(20), tiny.prompt(len(PARENTS), seed=1)
    fed = made(way, name)
    fed.forward(ids)
    states, taps = fed.forward(drafted, PARENTS)
    for path in PATHS[:-1]:
        alone = dense(stacks.target(name), ids + [drafted[row] for row in path])
        same((states[path], taps[path]), (alone[0][20:], alone[1][20:]))


@ALL
def test_a_path_that_is_kept_was_fed_alone(way: type[Any], name: str) -> None:
    ids, drafted, after = tiny.prompt(20), tiny.prompt(len(PARENTS), seed=1), tiny.prompt(3, seed=2)
    for path in PATHS:
        fed = made(way, name)
        fed.forward(ids)
        fed.forward(drafted, PARENTS)
        fed.keep(path)
        text = ids + [drafted[row] for row in path]
        assert fed.length == len(text)
        alone = dense(stacks.target(name), text + after)
        same(fed.forward(after), (alone[0][-3:], alone[1][-3:]))
        fed.keep([0])  # and of a chain
        same(fed.forward(after[1:]), (alone[0][-2:], alone[1][-2:]))


@ALL
def test_what_was_truncated_was_never_fed(way: type[Any], name: str) -> None:
    """Past a window's length, where a cache that drops old rows could not take anything back."""
    ids, wrong = tiny.prompt(40), tiny.prompt(12, seed=3)
    states, taps = dense(stacks.target(name), ids)
    fed = made(way, name)
    for length in (30, 22, 5):
        fed.forward(ids[fed.length : length])
        fed.forward(wrong)
        fed.truncate(length)
        same(fed.forward(ids[length:]), (states[length:], taps[length:]))
        fed.truncate(min(length, 4))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_random_trees(way: type[Any], name: str, seed: int) -> None:
    rng = random.Random(seed)
    text, fed = tiny.prompt(3, seed), made(way, name)
    fed.forward(text)
    for _ in range(6):
        rows = rng.randint(1, 12)
        parents = [rng.randint(-1, row - 1) for row in range(rows)]
        drafted = [rng.randrange(tiny.VOCAB) for _ in range(rows)]
        states, taps = fed.forward(drafted, parents)
        path = [rng.randrange(rows)]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = dense(stacks.target(name), text + [drafted[row] for row in path])
        same((states[path], taps[path]), (alone[0][len(text) :], alone[1][len(text) :]))
        kept = path[: rng.randint(0, len(path))]
        fed.keep(kept)
        text = text + [drafted[row] for row in kept]


def test_a_tree_that_is_a_chain_is_a_chain(way: type[Any]) -> None:
    fed, other, ids = made(way, "qwen3"), made(way, "qwen3"), tiny.prompt(6)
    same(fed.forward(ids, range(-1, 5)), other.forward(ids))


def test_no_taps_are_none(way: type[Any]) -> None:
    fed = way(stacks.target("qwen3"), ())
    states, taps = fed.forward(tiny.prompt(5))
    assert (states.shape, taps.shape) == ((5, 48), (5, 0))
    with pytest.raises(UsageError, match="Tap 7 does not exist"):
        way(stacks.target("qwen3"), (1, 7))


def test_what_cannot_be_meant_is_refused(way: type[Any]) -> None:
    fed = made(way, "qwen3")
    fed.forward(tiny.prompt(5))
    with pytest.raises(AssertionError, match="no path"):
        fed.keep([0, 2])
    with pytest.raises(AssertionError, match="6 of 5"):
        fed.truncate(6)
    with pytest.raises(AssertionError, match="does not stand before it"):
        fed.forward([1, 2], [1, -1])
    with pytest.raises(AssertionError, match="one parent a token"):
        fed.forward([1, 2], [-1])
    fed.truncate(5)
    with pytest.raises(AssertionError, match="without a pass"):
        fed.keep([0])


def test_the_compact_way_is_taken_where_it_applies() -> None:
    for name in COMPACT:
        assert layers.unsuited(stacks.target(name)) is None
        assert isinstance(passes.of(stacks.target(name), TAPS), compact.CompactPasses)
    assert "DeepseekV3Model is none of" in str(layers.unsuited(stacks.target("deepseek")))
    assert isinstance(passes.of(stacks.target("deepseek"), TAPS), LibraryPasses)


def test_a_window_goes_by_position_not_by_row() -> None:
    tree = sight.tree([-1, 0, 0, 2, 3], torch.device("cpu"))
    assert tree.depths.tolist() == [0, 1, 1, 2, 3]
    assert tree.first(10, 3).tolist() == [8, 9, 9, 10, 10]
    assert tree.rows(3)[4].tolist() == [False, False, True, True, True]
    assert tree.rows(4)[4].tolist() == [True, False, True, True, True]
    assert tree.mask(2, None).sum(1).tolist() == [3, 4, 4, 5, 6]
