"""The compiled kernel, what happens without it, and the compact way on the real target."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stacks
import tiny
from eyas import target as targets
from eyas.decode import compact, kernel, pack
from eyas.decode.compact import CompactPasses
from eyas.decode.passes import LibraryPasses, of
from stacks import TAPS, same

compiled, told = kernel.load()
needs_kernel = pytest.mark.skipif(compiled is None, reason=str(told))


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (7, 5), (19, 37), (33, 64), (130, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_any_shape(outputs: int, inputs: int, bias: bool) -> None:
    assert compiled is not None
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    for rows in range(1, 20):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        expected = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert float((compiled.linear(kernel.Linear.of(layer), x) - expected).abs().max()) < 1e-5


@needs_kernel
@pytest.mark.parametrize("name", [*stacks.COMPILED])
def test_a_row_is_the_same_bits_alone_and_with_others(name: str) -> None:
    """So a verify pass says exactly what plain decoding says; and so with any number of threads."""
    ids, threads = tiny.prompt(25), torch.get_num_threads()
    together = CompactPasses(stacks.target(name), TAPS)
    together.forward(ids[:14])
    states, taps = together.forward(ids[14:])
    try:
        for count in (1, 2, 3, 7):  # more than there are processors: who waits for long must sleep
            torch.set_num_threads(count)
            alone = CompactPasses(stacks.target(name), TAPS)
            alone.forward(ids[:14])
            for row, token in enumerate(ids[14:]):
                told = alone.forward([token])
                assert torch.equal(told[0][0], states[row])
                assert torch.equal(told[1][0], taps[row])
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_the_kernel_and_torch_agree_on_long_texts() -> None:
    """Many blocks of columns, several threads, a cache that grew twice; the torch way takes more rows than are few."""
    made = stacks.target("wide heads in threes")
    few, many = CompactPasses(made, TAPS, chunk=kernel.FEW), CompactPasses(made, TAPS, chunk=200)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for begin in range(0, 1200, 400):
            ids = tiny.prompt(400, seed=begin)
            same(few.forward(ids), many.forward(ids))
    finally:
        torch.set_num_threads(threads)


def test_the_cache_grows_and_holds_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "FIRST_CAPACITY", 8)
    ids, made = tiny.prompt(70), stacks.target("mistral")
    states, taps = stacks.dense(made, ids)
    fed = CompactPasses(made, TAPS)
    for begin in range(0, 70, 7):
        same(fed.forward(ids[begin : begin + 7]), (states[begin : begin + 7], taps[begin : begin + 7]))


def test_texts_share_the_layers_and_nothing_else() -> None:
    made = stacks.target("qwen3")
    one, other = CompactPasses(made, TAPS), CompactPasses(made, TAPS)
    assert compact.stack_of(made) is compact.stack_of(made)
    first = one.forward(tiny.prompt(9))
    other.forward(tiny.prompt(30, seed=1))
    one.truncate(5)
    again = one.forward(tiny.prompt(9)[5:])
    same(again, (first[0][5:], first[1][5:]))


def test_weights_that_change_are_seen() -> None:
    """In their place at once, elsewhere with the next text."""
    made = tiny.model("qwen3")
    target = targets.Target("changing", None, made, None, made.config)
    ids = tiny.prompt(9)
    fed = CompactPasses(target, TAPS)
    before, _ = fed.forward(ids)
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight.mul_(2)
    fed.truncate(0)
    same(fed.forward(ids), stacks.dense(target, ids))
    made.model.layers[1].mlp.up_proj.weight = nn.Parameter(made.model.layers[1].mlp.up_proj.weight / 2, False)
    again, _ = CompactPasses(target, TAPS).forward(ids)
    assert torch.allclose(again, before, atol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda model: model.double(), "float64"),
        (lambda model: setattr(model.config, "hidden_act", "relu"), "activation 'relu'"),
        (lambda model: model.config.rope_parameters.update(rope_type="dynamic"), "rope of type 'dynamic'"),
        (lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Bilinear(2, 2, 2)), "not plain"),
        (lambda model: setattr(model.model.layers[0].self_attn.k_norm, "variance_epsilon", 0.1), "epsilons"),
        (lambda model: setattr(model.model.layers[0], "forward", None), "replaced the forward"),
    ],
)
def test_what_the_compact_way_does_not_know_goes_the_librarys(spoil, reason: str) -> None:  # type: ignore[no-untyped-def]
    made = tiny.model("qwen3")
    spoil(made)
    target = targets.Target("spoilt", None, made, None, made.config)
    assert reason in str(compact.unsuited(target))
    assert isinstance(of(target, TAPS), LibraryPasses)


# -- making the kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a ``load`` that remembers nothing."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel, "load", kernel.load.__wrapped__)
    return tmp_path / "kernels"


def test_without_a_compiler_the_reason_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    found, why = kernel.load()
    assert found is None
    assert "no C compiler" in str(why)
    with pack.packed(tiny.target("llama")) as packing:
        assert packing.told == why
    monkeypatch.setattr(compact, "_STACKS", {})
    same(of(stacks.target("qwen3"), TAPS).forward(tiny.prompt(9)), stacks.dense(stacks.target("qwen3"), tiny.prompt(9)))


@needs_kernel
def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "pass.c"
    source.write_text("#error nothing here\n")
    monkeypatch.setattr(kernel, "SOURCE", source)
    found, why = kernel.load()
    assert found is None
    assert "could not make the fast kernel" in str(why)
    assert "nothing here" in str(why)
    assert not list(fresh.iterdir()), "nothing half made stays"


@needs_kernel
def test_a_kernel_that_computes_wrongly_is_not_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native = shutil.copytree(kernel.SOURCE.parent, tmp_path / "native")
    lanes = native / "lanes.h"
    right = lanes.read_text()
    lanes.write_text(right.replace("(s0 + s2) + (s1 + s3)", "(s0 + s2) - (s1 + s3)"))
    assert lanes.read_text() != right
    monkeypatch.setattr(kernel, "SOURCE", native / kernel.SOURCE.name)
    found, why = kernel.load()
    assert found is None
    assert "computes wrongly" in str(why)


@needs_kernel
def test_it_is_made_once_and_never_taken_from_others(fresh: Path) -> None:
    assert kernel.load()[0] is not None
    (library,) = fresh.iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o700
    made = library.stat().st_ino
    assert kernel.load()[0] is not None
    assert library.stat().st_ino == made
    os.chmod(library, 0o722)  # now anybody could have written it
    assert kernel.load()[0] is not None
    assert library.stat().st_ino != made
    assert stat.S_IMODE(library.stat().st_mode) == 0o700


# -- the real target --------------------------------------------------------------------------------------------------


def test_smollm2() -> None:
    target = targets.load("smollm2")
    ids = torch.randint(0, target.vocab_size, (180,), generator=torch.Generator().manual_seed(0)).tolist()
    ours, library = of(target, (2, 15, 27)), LibraryPasses(target, (2, 15, 27))
    assert isinstance(ours, CompactPasses)
    for begin, end in ((0, 150), (150, 151), (151, 156)):
        same(ours.forward(ids[begin:end]), library.forward(ids[begin:end]))
    parents = [-1, 0, 0, 2, 3, 1]
    found, expected = ours.forward(ids[156:162], parents), library.forward(ids[156:162], parents)
    same(found, expected)
    assert float((target.logits(found[0]) - target.logits(expected[0])).abs().max()) < 1e-3, "far below a tie"
    for fed in (ours, library):
        fed.keep([0, 2, 3])
    same(ours.forward(ids[162:]), library.forward(ids[162:]))
