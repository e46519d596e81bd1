"""The draft side through the kernel says what torch's says, by tensors, whatever it is asked, in whatever order."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from eyas import taps
from eyas.answers import Sampling
from eyas.decode import kernel, swift
from eyas.decode.chain import Chain
from eyas.decode.sample import Chance
from eyas.decode.swift import SwiftChain, chain_of
from eyas.decode.tree import Tree, TreeSize
from eyas.drafter import Drafter

compiled, told = kernel.load()
needs_kernel = pytest.mark.skipif(compiled is None, reason=str(told))
TAPS = (1, 2, 4)
TEXT = 90
SHAPES: dict[str, dict[str, Any]] = {
    **{name: choices for name, choices in tiny.SHAPES.items() if choices.get("num_hidden_layers", 1) == 1},
    "qk_norm": {"qk_norm": True},
}


@cache
def seen_of(kind: str, length: int = TEXT) -> tuple[list[int], Tensor]:
    """A text and the taps of its positions [1, T, C*D]."""
    ids = tiny.prompt(length)
    return ids, taps.run(tiny.target(kind), torch.tensor([ids]), torch.tensor([length]), TAPS).taps


def made(kind: str, **choices: Any) -> Drafter:
    """Of a head width that the kernel takes."""
    return tiny.drafter(kind, **{"head_dim": 16, **choices})


def both(drafter: Drafter) -> tuple[SwiftChain, Chain]:
    chain = chain_of(drafter)
    assert isinstance(chain, SwiftChain)
    return chain, Chain(drafter)


def near(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert got.shape == expected.shape
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


@needs_kernel
@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, "usual") for kind in tiny.KINDS), *(("llama", shape) for shape in SHAPES)]
)
def test_states_logits_keys_and_values_agree(kind: str, shape: str) -> None:
    """Rounds of every length, fed along other words than were drafted, with rounds in which nobody looks."""
    drafter = made(kind, **SHAPES[shape])
    ids, seen = seen_of(kind)
    chains, chance, at = both(drafter), random.Random(3), 0
    while at < TEXT - 8:
        rows = chance.choice((1, 2, 3, 5, 9))
        rows = min(rows, TEXT - 1 - at)
        for chain in chains:
            chain.extend(seen[:, at : at + rows], ids[at + 1 : at + rows + 1], at)
        at += rows
        if chance.random() < 0.3:
            continue
        near(chains[0].state, chains[1].state)
        near(chains[0].logits(), chains[1].logits())
        for _ in range(chance.randrange(4)):
            token = torch.tensor([[chance.randrange(50)]])
            for chain in chains:
                chain.feed(token)
            near(chains[0].logits(), chains[1].logits())
            near(chains[0].state, chains[1].state)
    for chain in chains:
        chain.truncate(chain.committed)
    swift_cache, cache_ = chains[0].caches[0], chains[1].caches[0]
    assert swift_cache.length == cache_.length == chains[0].length == at
    near(swift_cache.keys, cache_.keys)
    near(swift_cache.values, cache_.values)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [TreeSize(4, 1, 4), TreeSize(3, 3, 9), TreeSize(5, 2, 24)])
def test_trees_are_the_same_trees(shape: str, size: TreeSize) -> None:
    drafter = made("llama", **SHAPES[shape])
    ids, seen = seen_of("llama")
    trees = Tree(drafter), Tree(drafter)
    assert isinstance(trees[0].chain, SwiftChain)
    trees[1].chain = Chain(drafter)
    for begin, end in ((0, 40), (40, 41), (41, 44)):
        said = []
        for tree in trees:
            tree.extend(seen[:, begin:end], ids[begin + 1 : end + 1], begin)
            said.append(tree.draft(size))
        assert said[0][:2] == said[1][:2]
        near(said[0].log_probs, said[1].log_probs)


@needs_kernel
def test_a_slot_is_the_same_bits_alone_and_with_others() -> None:
    """So what waits may go together. With any number of threads."""
    drafter, (ids, seen) = made("llama"), seen_of("llama")
    threads, said = torch.get_num_threads(), []
    try:
        for count, step in ((1, 1), (2, 1), (2, 7), (3, 20)):
            torch.set_num_threads(count)
            chain = both(drafter)[0]
            for at in range(0, 20, step):
                rows = min(step, 20 - at)
                chain.extend(seen[:, at : at + rows], ids[at + 1 : at + rows + 1], at)
                if step == 1:
                    assert chain.state is not None
            said.append((chain.logits(), chain.caches[0].keys.clone(), chain.caches[0].values.clone()))
    finally:
        torch.set_num_threads(threads)
    # One slot at a time fuses its taps by another product than many do, so only what the kernel does is compared.
    fused = torch.randn(6, drafter.config.hidden_size)
    chain = both(drafter)[0]
    tokens = torch.tensor(ids[:6])
    embedded = chain._embedded(tokens)
    together = chain._pass(fused, embedded.data_ptr(), 0, first_asked=0)
    chain.truncate(0)
    alone = [chain._pass(fused[i : i + 1], embedded[i].data_ptr(), i, first_asked=0) for i in range(6)]
    assert torch.equal(torch.cat(alone), together)
    for logits, keys, values in said[1:]:
        near(logits, said[0][0])
        near(keys, said[0][1])
        near(values, said[0][2])


@needs_kernel
def test_slots_wait_until_somebody_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, (ids, seen) = made("llama"), seen_of("llama", 300)
    chain, _ = both(drafter)
    passes: list[int] = []
    real = SwiftChain._pass

    def watched(self: SwiftChain, hidden: Tensor, *rest: object, **more: object) -> Tensor:
        passes.append(hidden.shape[0])
        return real(self, hidden, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SwiftChain, "_pass", watched)
    chain.extend(seen[:, :200], ids[1:201], 0)  # a prompt goes at once, the torch way
    for at in range(200, 205):
        chain.extend(seen[:, at : at + 1], [ids[at + 1]], at)
    assert (passes, chain.committed) == ([], 205)
    drafted = chain.draft(3)
    assert passes == [5, 1, 1]
    for at in range(205, 205 + kernel.FEW + 4):
        chain.extend(seen[:, at : at + 1], [ids[at + 1]], at)
    assert passes == [5, 1, 1, kernel.FEW]
    assert chain.length == 205 + kernel.FEW + 4
    assert passes == [5, 1, 1, kernel.FEW, 4]

    plain = Chain(drafter)
    plain.extend(seen[:, :205], ids[1:206], 0)
    assert plain.draft(3) == drafted


@needs_kernel
def test_a_sampled_draft_is_drawn_from_the_same_laws() -> None:
    drafter, (ids, seen) = made("llama"), seen_of("llama")
    sampling = Sampling(temperature=0.8, top_k=7, seed=5)
    drawn = []
    for chain in both(drafter):
        chain.extend(seen[:, :30], ids[1:31], 0)
        drawn.append(chain.sample(4, sampling, Chance(sampling.draws("x"))))
        assert chain.length == chain.committed == 30
    assert drawn[0].tokens == drawn[1].tokens
    near(drawn[0].laws, drawn[1].laws)


@needs_kernel
def test_weights_that_change_or_move_are_seen() -> None:
    drafter, (ids, seen) = made("llama", seed=4), seen_of("llama")
    early, _ = both(drafter)
    for weight in (drafter.midlayer.mlp.down_proj.weight, drafter.lm_head.weight):
        weight.data = weight.detach() * 2  # elsewhere
    assert early._parts.head.weight in {weight.data_ptr() for weight in early._parts._weights}
    swift_, plain = both(drafter)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(0.5)  # in its place
    for chain in (swift_, plain, early):
        chain.extend(seen[:, :10], ids[1:11], 0)
    near(swift_.logits(), plain.logits())
    assert (
        float((early.logits() - plain.logits()).abs().max()) > 1e-3
    )  # it goes on as it began, and reads no freed memory


def test_what_the_kernel_does_not_know_goes_the_torch_way(monkeypatch: pytest.MonkeyPatch) -> None:
    several = next(choices for choices in tiny.SHAPES.values() if choices.get("num_hidden_layers", 1) > 1)
    assert "layers" in str(swift.unsuited(made("llama", **several)))
    assert "float32" in str(swift.unsuited(made("llama").to(torch.bfloat16)))
    assert swift.unsuited(made("llama")) is None
    assert type(chain_of(made("llama", **several))) is Chain
    monkeypatch.setattr(kernel, "load", lambda: (None, "no compiler"))
    assert type(chain_of(made("llama"))) is Chain
