"""Weights on large pages are the same weights: values, sharing and objects; and nothing moves where it should not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.decode import pages

given = pytest.mark.skipif(not pages.given(), reason="no large pages for who asks on this system")


class Tied(nn.Module):
    """A head that is the embedding, a layer of its own, and a small one that is not worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 200)
        self.head = nn.Linear(200, 300, bias=False)
        self.head.weight = self.embed.weight
        self.wide = nn.Linear(200, 400)
        self.small = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(200, 100))


class Borrows(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("borrowed", weight.detach())
        self.own = nn.Linear(200, 200)


@given
def test_what_moves_is_what_it_was() -> None:
    model = Tied()
    borrower, parameters = Borrows(model.embed.weight), list(model.parameters())
    before = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    x = torch.randn(4, 200)
    said = model.head(x)
    moved = pages.settle(model, borrower)
    assert moved == 4 * (300 * 200 + 400 * 200 + 200 * 100 + 200 * 200)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for tensor, old in zip((*model.parameters(), *model.buffers()), before, strict=True):
        assert torch.equal(tensor, old)
    assert torch.equal(model.head(x), said)
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr() == borrower.borrowed.data_ptr()  # type: ignore[operator]
    assert model.embed.weight.data_ptr() % 64 == 0


@given
def test_it_is_done_once_and_again_for_what_was_replaced() -> None:
    model = Tied()
    assert pages.settle(model) > 0
    assert pages.settle(model) == 0
    later = Borrows(model.embed.weight)
    assert pages.settle(model, later) == 4 * 200 * 200  # what it shares has settled already
    assert later.borrowed.data_ptr() == model.embed.weight.data_ptr()  # type: ignore[operator]
    model.wide.weight.data = torch.zeros(400, 200)
    assert pages.settle(model, later) >= 4 * 400 * 200
    assert int(model.wide.weight.count_nonzero()) == 0


@given
def test_memory_outlives_everything_but_the_tensors_in_it() -> None:
    model = Tied()
    pages.settle(model)
    weight = model.wide.weight.detach()
    value = float(weight[7, 7])
    del model
    assert float(weight[7, 7]) == value
    weight[0, 0] = 3.0
    assert float(weight[0, 0]) == 3.0


@given
def test_the_system_is_asked_for_large_pages() -> None:
    """And gives them: what was touched lies on them, by the kernel's own account."""
    tensor = pages.empty(40, 2**20 // 4).fill_(1.0)
    at, found = tensor.data_ptr(), 0
    assert at % pages.LARGE == 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            inside = low <= at < high
        if inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            found += 1
    assert found == 1


def test_nothing_moves_where_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Tied()
    where = [tensor.data_ptr() for tensor in model.parameters()]
    switch = tmp_path / "enabled"
    for told in ("always madvise [never]", None):
        if told is not None:
            switch.write_text(told)
        monkeypatch.setattr(pages, "SWITCH", switch if told is not None else tmp_path / "none")
        assert pages.settle(model) == 0
        assert pages.empty(1024, 2048).shape == (1024, 2048)
    switch.write_text("always [madvise] never")
    monkeypatch.setattr(pages, "SWITCH", switch)
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    monkeypatch.setattr(pages, "MEMORY", memory)
    assert pages.settle(model) == 0, "more than half of what is left"
    assert [tensor.data_ptr() for tensor in model.parameters()] == where


@given
def test_other_numbers_stay_where_they_are() -> None:
    model = Tied().to(torch.bfloat16)
    where = [tensor.data_ptr() for tensor in model.parameters()]
    assert pages.settle(model, None) == 0
    assert [tensor.data_ptr() for tensor in model.parameters()] == where
