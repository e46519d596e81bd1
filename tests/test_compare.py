"""Stored states against the states they should be: tap, row, direction."""

from __future__ import annotations

import pytest
import torch

import stocks
import tiny
from eyas.compare import rotation, row_order, tap_matrix
from eyas.states.live import LiveStock

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def live() -> LiveStock:
    made = LiveStock(tiny.target("llama"), tiny.tiny_records(12), batch_size=1)
    made.fill()
    return made


def pooled(live: LiveStock, tap: int) -> torch.Tensor:
    return torch.cat([live.states(i, (tap,)) for i in range(len(live.records))])


def test_each_tensor_is_nearest_to_its_tap(live: LiveStock) -> None:
    taps = [pooled(live, t) for t in range(6)]
    order = (4, 0, 5, 2)
    matrix = tap_matrix([taps[t].to(torch.bfloat16).float() for t in order], taps)
    assert matrix.best == order
    assert min(matrix.margin) > 10
    assert matrix.cosine.shape == matrix.error.shape == (4, 6)
    for i, t in enumerate(order):  # against every row, the plain way
        errors = [float(((taps[order[i]].bfloat16() - x).norm(dim=1) / x.norm(dim=1)).median()) for x in taps]
        torch.testing.assert_close(matrix.error[i], torch.tensor(errors))
        assert float(matrix.cosine[i, t]) > 0.999


def test_a_huge_first_row_decides_nothing() -> None:
    """First positions are a hundred times as large in real targets: they must not hide that all others differ."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 8, generator=generator), torch.randn(20, 8, generator=generator)
    b[0] = a[0] = 1000 * a[0]
    matrix = tap_matrix([a], [b, a])
    assert matrix.best == (1,)
    assert float(matrix.error[0, 0]) > 0.5


@pytest.mark.parametrize("tap", [0, 2, 5])
@pytest.mark.parametrize(("by", "kind", "shift"), [(0, "home", 0), (1, "shifted", 1), (-2, "shifted", -2)])
def test_rows_are_found_where_they_stand(live: LiveStock, tap: int, by: int, kind: str, shift: int) -> None:
    """Shift s: stored row t + s is row t."""
    rows = live.states(0, (tap,))
    moved = torch.zeros_like(rows)
    T = len(rows)
    moved[max(by, 0) : T + min(by, 0)] = rows[max(-by, 0) : T - max(by, 0)]
    order = row_order(moved, rows)
    assert (order.kind, order.shift, order.found) == (kind, shift, 1.0)
    assert order.counted == T - abs(by)  # rows of zeros are nobody's


def test_other_orders_and_other_rows(live: LiveStock) -> None:
    rows = live.states(0, (2,))
    assert row_order(stocks.shuffled(0, rows, 0), rows).kind == "permuted"
    other = row_order(live.states(1, (2,)), rows)
    assert (other.kind, other.found < 0.5) == ("other", True)
    assert row_order(torch.full_like(rows, float("nan")), rows).kind == "other"


def test_one_token_twice_is_at_home_in_either_place() -> None:
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))[[0, 1, 2, 1, 4, 5, 1, 0]]
    assert row_order(rows, rows).kind == "home"


def test_a_rotation_is_told_from_other_states(live: LiveStock) -> None:
    rows = pooled(live, 3)
    turn = rotation(stocks.turned(0, rows, 0).to(torch.bfloat16).float(), rows)
    assert turn.proven
    assert turn.unexplained is not None
    assert turn.unexplained < 0.05
    assert turn.rows == len(rows)
    assert not rotation(rows, rows).proven  # nothing is turned
    assert not rotation(stocks.turned(0, rows, 0), pooled(live, 4)).proven  # another tap
    assert not rotation(rows.roll(1, 0), rows).proven
    generator = torch.Generator().manual_seed(1)
    stretched = rows @ torch.randn(48, 48, generator=generator) / 48**0.5  # linear, but no rotation
    assert not rotation(stretched, rows).proven


def test_few_rows_show_lengths_and_angles_only(live: LiveStock) -> None:
    rows = pooled(live, 3)[:40]
    turn = rotation(stocks.turned(0, rows, 0), rows)
    assert turn.unexplained is None
    assert turn.proven
    assert not rotation(stocks.turned(0, rows[:20], 0), rows[:20]).proven
