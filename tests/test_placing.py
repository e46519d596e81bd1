"""Which tap a stored tensor is: told from its values, with and without running the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import stocks
import tiny
from eyas.check.placing import Placement, place
from eyas.records import Record
from eyas.states.live import LiveStock
from eyas.target import Target
from stocks import Change, Held, case_live, case_target, stored

torch.set_num_threads(1)


def placed(stock: Held, configured: Sequence[int] | None = None, *, live: bool = False) -> Placement:
    return place(stock, case_target(), configured, live)


def taps_of(placement: Placement) -> list[int | None]:
    return [p.tap for p in placement.placed.values()]


def sure(placement: Placement) -> list[str]:
    return [p.confidence for p in placement.placed.values()]


def normed(which: int) -> Change:
    @torch.no_grad()
    def run(i: int, rows: Tensor, k: int) -> Tensor:
        return case_target().norm(rows).to(torch.bfloat16).float() if k == which else rows

    return run


@pytest.mark.parametrize("change", [lambda i, rows, k: rows, stocks.fp8], ids=["bf16", "fp8"])
def test_the_ends_are_known_without_running(change: Change) -> None:
    found = placed(stored(case_live(), (0, 3, 7, 12), change))
    assert taps_of(found) == [0, None, None, 12]
    assert [c for c, t in zip(sure(found), taps_of(found), strict=True) if t is not None] == ["certain", "certain"]
    assert (found.last, found.post_norm, found.shift) == ("h[3]", False, 0)
    assert found.mapping() == {"h[0]": 0, "h[3]": 12}


def test_the_tap_below_the_last_is_not_taken_for_it() -> None:
    found = placed(stored(case_live(), (0, 3, 7, 11)))
    assert (taps_of(found), found.last) == ([0, None, None, None], None)


def test_after_the_final_norm() -> None:
    for live in (False, True):
        found = placed(stored(case_live(), (0, 3, 7, 12), normed(3)), live=live)
        assert (found.last, found.post_norm) == ("h[3]", True)
        assert "h[3]" not in found.mapping()  # it is not the stream
        assert found.placed["h[3]"].tap == 12


def test_every_tap_is_known_by_running() -> None:
    order = (7, 0, 12, 3, 10)
    found = placed(stored(case_live(), order, stocks.fp8), live=True)
    assert tuple(taps_of(found)) == order
    assert set(sure(found)) == {"certain"}
    assert found.last == "h[2]"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("by", "shift"), [(1, -1), (-1, 1), (2, -2)])
def test_rows_stored_off_by_some(by: int, shift: int, live: bool) -> None:
    """Row t holds the state of t + by, so row t - by is that of position t."""
    found = placed(stored(case_live(), (0, 3, 7, 12), stocks.rolled(by)), live=live)
    assert found.shift == shift
    assert (found.placed["h[0]"].tap, found.placed["h[3]"].tap) == (0, 12)
    assert found.last == "h[3]"


def test_tensors_shifted_unlike_one_another_are_told() -> None:
    def change(i: int, rows: Tensor, which: int) -> Tensor:
        return stocks.rolled(1)(i, rows, which) if which == 3 else rows

    found = placed(stored(case_live(), (0, 3, 7, 12), change))
    assert found.shift == 0
    assert (found.placed["h[0]"].shift, found.placed["h[3]"].shift) == (0, -1)
    assert any("not shifted alike" in note for note in found.notes)


def test_the_rest_by_order_and_ids() -> None:
    """Ids that agree with a tensor that is known are likely, such as agree with none a guess at k + 1."""
    stock = stored(case_live(), (0, 3, 7))
    as_is = placed(stock, (0, 3, 7))
    assert (taps_of(as_is), sure(as_is)) == ([0, 3, 7], ["certain", "likely", "likely"])
    plus_one = placed(stock, (-1, 2, 6))
    assert (taps_of(plus_one), sure(plus_one)) == ([0, 3, 7], ["certain", "likely", "likely"])
    rest = placed(stored(case_live(), (3, 7, 10)), (2, 6, 9))
    assert (taps_of(rest), sure(rest)) == ([3, 7, 10], ["guess"] * 3)
    assert rest.mapping() == {}
    assert rest.mapping("guess") == {"h[0]": 3, "h[1]": 7, "h[2]": 10}
    assert taps_of(placed(stock, (2, 6, 9))) == [0, None, None]  # contradicts tap 0
    assert taps_of(placed(stock, (1, 2))) in ([0, 2, 3], [0, 1, 2])


def test_a_scaled_embedding() -> None:
    """Gemma multiplies its embedding; some store it before, some after."""
    target = tiny.target("gemma3")
    live = LiveStock(target, tiny.tiny_records(6), batch_size=1)
    live.fill()
    factor = target.hidden_size**0.5

    def raw(i: int, rows: Tensor, which: int) -> Tensor:
        return rows / factor if which == 0 else rows

    for change in (lambda i, rows, which: rows, raw):
        found = place(stored(live, (0, 3), change), target, None, False)
        assert taps_of(found) == [0, None]
        assert found.placed["h[0]"].confidence == "certain"


def test_what_the_head_says_is_counted() -> None:
    found = placed(stored(case_live(), (3, 12)))
    words = found.placed["h[1]"].how.split()
    at = words.index("in")
    agreed, slots = int(words[at + 1]), int(words[at + 3])
    assert slots >= 50
    assert 0.99 * slots <= agreed <= slots


def test_random_text_and_too_little_of_it_place_no_last_tap() -> None:
    target: Target = tiny.target("llama")
    live = LiveStock(target, tiny.tiny_records(6), batch_size=1)
    live.fill()
    assert place(stored(live, (1, 2, 5)), target, None, False).last is None
    short = Record(case_live().records[0].input_ids[:20], np.arange(20) > 3, "short")
    few = LiveStock(case_target(), [short], batch_size=1)
    assert placed(stored(few, (3, 12))).last is None
    assert placed(stored(few, (3, 12)), live=True).last == "h[1]"
