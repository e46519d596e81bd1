"""Weights of eight bits: one set of them, whichever way a row goes; and answers that are the rounded target's own."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import stacks
import tiny
from eyas import target as targets
from eyas.cli import common
from eyas.decode import compact, int8, kernel, pack
from eyas.decode.compact import CompactPasses
from eyas.decode.loop import generate
from eyas.decode.passes import LibraryPasses
from eyas.decode.plain import plain
from eyas.decode.swift import SwiftChain, chain_of
from eyas.errors import EXIT_USAGE
from eyas.target import Target
from stacks import TAPS, same

compiled, told = kernel.load()
needs_kernel = pytest.mark.skipif(compiled is None, reason=str(told))


def target(name: str) -> Target:
    """One of its own, since rounding is for good."""
    return copy.deepcopy(stacks.target(name))


def test_a_rounded_weight_is_half_a_step_away_at_most() -> None:
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 40)[:, None]
    weight[3], weight[5, 0] = 0.0, 1e30
    whole, scale = int8.split(weight)
    assert whole.dtype == torch.int8
    assert int(whole.abs().max()) == 127
    assert bool(((whole * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all())
    assert int(whole[3].abs().max()) == 0
    assert int(whole[5].abs().max()) == 127


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (7, 5), (19, 37), (33, 64), (130, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_weight_the_module_keeps(outputs: int, inputs: int, bias: bool) -> None:
    assert compiled is not None
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    before = layer.weight.clone()
    assert int8.rounded(layer).modules == 1
    assert not torch.equal(layer.weight, before)
    for rows in range(1, 20):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        said = compiled.linear(kernel.Linear.of(layer), x)
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert float((said - expected).abs().max()) < 1e-5
        for row in range(rows):
            assert torch.equal(compiled.linear(kernel.Linear.of(layer), x[row : row + 1])[0], said[row])


@needs_kernel
@pytest.mark.parametrize("name", [*stacks.COMPILED])
def test_every_way_through_a_rounded_target_is_the_same(name: str) -> None:
    made, ids = target(name), tiny.prompt(60)
    found = int8.rounded(made.model)
    assert found.modules == sum(type(module) is nn.Linear for module in made.model.modules())
    assert all(hasattr(module, "whole") for module in made.model.modules() if type(module) is nn.Linear)
    stack = compact.stack_of(made)
    assert stack.structures[0].fall.scale == made.decoder.layers[0].mlp.down_proj.scale.data_ptr()  # type: ignore[index, union-attr]
    few, many, library = CompactPasses(made, TAPS), CompactPasses(made, TAPS, chunk=200), LibraryPasses(made, TAPS)
    for begin, end in ((0, 20), (20, 21), (21, 25)):
        same(few.forward(ids[begin:end]), library.forward(ids[begin:end]))
    same(many.forward(ids[:50]), LibraryPasses(made, TAPS).forward(ids[:50]))


@needs_kernel
def test_structures_made_before_are_made_again() -> None:
    made = target("plain")
    early = compact.stack_of(made)
    int8.rounded(made.model)
    late = compact.stack_of(made)
    assert late is not early
    assert late.structures[0].fall.scale is not None
    drafter = tiny.drafter("llama", head_dim=16)
    before = chain_of(drafter)
    int8.rounded(drafter)
    after = chain_of(drafter)
    assert isinstance(before, SwiftChain)
    assert isinstance(after, SwiftChain)
    assert after._parts is not before._parts
    assert after._parts.head.scale == drafter.lm_head.scale.data_ptr()  # type: ignore[union-attr, operator]


def test_answers_with_a_drafter_are_the_rounded_targets_own() -> None:
    made, drafter = copy.deepcopy(tiny.target("llama")), tiny.drafter("llama", head_dim=16)
    ids = tiny.prompt(12)
    exact = list(plain(made, ids, max_new_tokens=40))
    int8.rounded(made.model, drafter)
    with pack.packed(made, drafter):
        run = generate(made, drafter, ids, max_new_tokens=40, draft_tokens=3).finish()
        alone = list(plain(made, ids, max_new_tokens=40))
    assert run.token_ids == alone
    assert len(exact) == len(alone)


def test_what_is_shared_stays_shared_and_is_rounded_once() -> None:
    embedding = nn.Embedding(50, 24)
    first, second = nn.Linear(24, 50, bias=False), nn.Linear(24, 50, bias=False)
    first.weight = second.weight = embedding.weight
    found = int8.rounded(nn.ModuleList([embedding, first]), second)
    assert found == (2, 50 * 24 + 4 * 50)
    assert first.weight is embedding.weight
    assert first.whole is second.whole
    again = first.weight.clone()
    assert int8.rounded(first, second).modules == 0
    assert torch.equal(first.weight, again)


def test_what_is_not_finite_or_not_fp32_stays_as_it_is() -> None:
    broken, half, missing = nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16), None
    with torch.no_grad():
        broken.weight[2, 3] = torch.nan
    assert int8.rounded(broken, half, missing) == (0, 0)
    assert bool(broken.weight[2, 3].isnan())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "hello", "--int8", "--dtype", "bf16"], "--dtype bf16"),
        (["bench", "--int8", "--device-map", "auto"], "auto"),
        (["serve", "--int8", "--engine", "vllm"], "--engine vllm"),
    ],
)
def test_where_nothing_can_be_rounded_it_is_refused(words: list[str], said: str) -> None:
    run = subprocess.run([sys.executable, "-m", "eyas", *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == EXIT_USAGE
    assert "--int8" in run.stderr
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_the_target_remembers_what_it_is_rounded_from() -> None:
    """So a drafter of the exact target is not taken for another's."""
    exact = targets.load("smollm2").fingerprint()
    assert common.load_target("smollm2", int8=True).fingerprint() == exact
