"""Packed linear layers say the same, and leave no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from eyas.decode import kernel, pack
from eyas.decode.loop import generate
from eyas.decode.plain import plain
from eyas.target import Target

pytestmark = pytest.mark.skipif(pack.unsuited(tiny.target("llama")) is not None, reason="this torch has no oneDNN")


@pytest.fixture(params=["layouts", "kernel"])
def everything_counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiny weights are below the size worth packing, and tiny heads are not wide."""
    monkeypatch.setattr(pack, "SMALLEST", 1)
    monkeypatch.setattr(pack, "WIDE", tiny.DRAFT_VOCAB)
    if request.param == "layouts":
        monkeypatch.setattr(kernel, "load", lambda: (None, "not asked for"))
    elif kernel.load()[0] is None:
        pytest.skip(str(kernel.load()[1]))
    return str(request.param)


def outputs(module: nn.Linear) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(module.in_features,), *((1, rows, module.in_features) for rows in (1, 2, 5, 9, 32, 33))]
    with torch.inference_mode():
        return [module(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])  # qwen2 has biases, qwen3 a tied head
def test_every_linear_layer_says_the_same_and_is_itself_again(kind: str, everything_counts: str) -> None:
    target, drafter = tiny.target(kind), tiny.drafter(kind)
    linears = [m for model in (target.model, drafter) for m in model.modules() if isinstance(m, nn.Linear)]
    before = [outputs(module) for module in linears]
    with pack.packed(target, drafter) as packing:
        assert (packing.modules, packing.reason) == (len(linears), None)
        copies = sum(module.weight.numel() * 4 for module in linears)
        assert packing.bytes == (copies if everything_counts == "layouts" else 0)
        assert packing.told == ("not asked for" if everything_counts == "layouts" else None)
        assert all("forward" in vars(module) for module in linears)
        during = [outputs(module) for module in linears]
    assert not any("forward" in vars(module) for module in linears)
    for plainly, packed in zip(before, during, strict=True):
        for a, b in zip(plainly, packed, strict=True):
            assert a.shape == b.shape
            assert float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())


@pytest.mark.skipif(kernel.load()[0] is None, reason=str(kernel.load()[1]))
def test_the_kernel_is_for_few_rows_and_reads_weights_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: torch.full((*x.shape[:-1], self.out_features), 7.0))
    module = nn.Linear(16, 8, bias=False).requires_grad_(False)
    forward = pack.fast_forward(module)
    module.weight.fill_(0.25)
    with torch.no_grad():
        said = {rows: float(forward(torch.ones(1, rows, 16)).unique()) for rows in (1, 2, 32, 33)}
    assert said == {1: 4.0, 2: 4.0, 32: 4.0, 33: 7.0}
    assert float(forward(torch.ones(1, 2, 16)).unique()) == 7.0  # with gradients: the module's own
    module.weight = nn.Parameter(torch.zeros(8, 16))
    with torch.no_grad():
        assert float(forward(torch.ones(1, 2, 16)).unique()) == 7.0  # what lay there is not looked at again


def test_batches_of_many_rows_are_laid_out() -> None:
    with pack.packed(tiny.target("llama"), rows=96) as packing:
        assert "many" in str(packing.told)


@pytest.mark.usefixtures("everything_counts")
def test_the_packed_way_is_taken_for_few_rows_only() -> None:
    narrow, wide = nn.Linear(16, 8, bias=False), nn.Linear(16, tiny.DRAFT_VOCAB, bias=False)
    for module, packed_rows in ((narrow, {2, 5, 32}), (wide, {1, 2, 5, 32})):
        forward = pack.packed_forward(module)
        with torch.no_grad():
            module.weight.zero_()  # a packed copy still holds the old weights
            taken = {rows for rows in (1, 2, 5, 32, 33) if bool(forward(torch.ones(1, rows, 16)).any())}
        assert taken == packed_rows
        assert not forward(torch.ones(1, 5, 16)).any()  # with gradients: the module's own


@pytest.mark.usefixtures("everything_counts")
def test_decoding_packed_gives_the_same_answer() -> None:
    target, drafter, prompt = tiny.target("llama"), tiny.drafter("llama"), tiny.prompt(11)
    expected = list(plain(target, prompt, max_new_tokens=16))
    with pack.packed(target, drafter):
        assert list(plain(target, prompt, max_new_tokens=16)) == expected
        done = generate(target, drafter, prompt, max_new_tokens=16, draft_tokens=3).finish()
    assert done.token_ids == expected


@pytest.mark.usefixtures("everything_counts")
def test_modules_are_restored_after_an_error_and_when_nested() -> None:
    target = tiny.target("llama")

    def fails_inside() -> None:
        with pack.packed(target):
            with pack.packed(target) as inner:
                assert inner.modules == 0
            assert "forward" in vars(target.head)
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert "forward" not in vars(target.head)


def test_small_layers_are_left_alone() -> None:
    with pack.packed(tiny.target("llama")) as packing:
        assert packing.modules == 0
        assert packing.reason is not None
        assert "large enough" in packing.reason


class OnlyAHead(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.mark.usefixtures("everything_counts")
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"dtype": torch.bfloat16}, "the target is bfloat16, packing is for float32"),
        ({"device": "meta"}, "the target is on meta, packing is for the CPU"),
    ],
)
def test_other_types_and_devices_are_left_alone_and_the_reason_is_given(where: dict[str, Any], reason: str) -> None:
    head = nn.Linear(4, 4, bias=False, **where)
    target: Target = replace(tiny.target("llama"), model=OnlyAHead(head))
    with pack.packed(target) as packing:
        assert (packing.modules, packing.reason) == (0, reason)
        assert "forward" not in vars(head)
