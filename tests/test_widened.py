"""Weights held narrow give the numbers of their fp32 copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eyas import records, target_ends, variants, widened
from eyas import target as targets
from eyas.check import check
from eyas.widened import BLOCK, Widened, widen_on_use

CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [3, BLOCK, 2 * BLOCK + 5])
def test_it_is_the_product_of_the_wide_copy(rows: int, bias: bool) -> None:
    plain = nn.Linear(16, rows, bias=bias).bfloat16()
    layer = Widened(plain.weight.detach(), plain.bias.detach() if plain.bias is not None else None)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    want = plain.float()(x)
    got = layer(x)
    assert got.dtype == torch.float32
    assert torch.allclose(got, want, atol=1e-6)
    assert layer.weight.dtype == torch.bfloat16


def test_only_narrow_linear_layers_change() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4).bfloat16(), "b": nn.Linear(4, 4), "c": nn.Embedding(4, 4).bfloat16()})
    widen_on_use(model)
    assert [type(model[name]) for name in "abc"] == [Widened, nn.Linear, nn.Embedding]


def test_a_check_says_the_same_of_a_drafter_too_big_for_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.load(str(CASE / "target"))
    held_out = records.read(CASE / "heldout.jsonl", limit=8)
    limits = variants.Limits(screen=100, confirm=300)

    def told() -> dict[str, object]:
        found = check(CASE / "trained", target, held_out, sweeping="always", limits=limits).to_json()
        del found["sweep"]["seconds"]
        return {key: found[key] for key in ("verdict", "findings", "found", "sweep")}

    want = told()
    monkeypatch.setattr("eyas.variants.parts.BIG", 0)
    built: list[type] = []
    swap = widened.widen_on_use
    monkeypatch.setattr("eyas.variants.parts.widen_on_use", lambda m: (swap(m), built.append(type(m.fc))))
    assert told() == want
    assert set(built) == {Widened}


def test_ends_too_big_for_fp32_stay_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = target_ends.read(CASE / "target", torch.float32)
    monkeypatch.setattr(target_ends, "BIG", 0)
    got, _ = target_ends.read(CASE / "target", torch.float32)
    assert want.lm_head.weight.dtype == torch.float32
    assert got.lm_head.weight.dtype == got.model.embed_tokens.weight.dtype == torch.bfloat16
    x = torch.randn(7, want.lm_head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.allclose(got.lm_head(got.model.norm(x)), want.lm_head(want.model.norm(x)), atol=1e-5)
    assert got.model.norm.weight.dtype == torch.float32
