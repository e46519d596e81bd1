"""States that the target says on the spot, and those of our own store, tap by tap."""

from __future__ import annotations

import pytest
import torch

import tiny
from eyas import batches, taps
from eyas.errors import UsageError
from eyas.states.live import LiveStock, bytes_needed

torch.set_num_threads(1)

RECORDS = tiny.tiny_records(7)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek"])
def test_live_states_are_the_targets_to_the_last_bit(kind: str) -> None:
    target = tiny.target(kind)
    heard: list[int] = []
    stock = LiveStock(target, RECORDS, batch_size=3, progress=heard.append)
    n = target.num_layers
    assert (stock.taps, stock.last, list(stock.records)) == (tuple(range(n + 1)), n, RECORDS)
    assert heard == [3, 6, 7]
    asked = (n, 0, 2, 0)
    for batch in batches.in_order(RECORDS, 3):
        wanted = taps.run(target, batch.input_ids, batch.lengths, range(n + 1)).taps.split(target.hidden_size, dim=-1)
        for row, (index, length) in enumerate(zip(batch.index, batch.lengths.tolist(), strict=True)):
            found = stock.states(index, asked)
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.cat([wanted[t][row, :length] for t in asked], dim=-1))


def test_live_states_of_some_taps_in_bf16() -> None:
    target = tiny.target("llama")
    whole, some = LiveStock(target, RECORDS), LiveStock(target, RECORDS, (4, 1), dtype=torch.bfloat16)
    assert (some.taps, some.last) == ((1, 4), None)
    held = 0
    for index in range(len(RECORDS)):
        assert torch.equal(some.states(index, (4, 1)), whole.states(index, (4, 1)).bfloat16().float())
        held += some._kept[index].untyped_storage().nbytes()
    assert held == bytes_needed(target, RECORDS, (4, 1), torch.bfloat16) == 2 * 2 * 48 * sum(r.seq_len for r in RECORDS)


def test_a_tap_that_is_not_there_is_named() -> None:
    target = tiny.target("llama")
    with pytest.raises(UsageError, match="Tap 3 is not among the states at hand") as caught:
        LiveStock(target, RECORDS[:1], (1, 4)).states(0, (1, 3))
    assert caught.value.way_out == "These are: 1, 4."
    with pytest.raises(UsageError, match="Tap 6 does not exist"):
        LiveStock(target, RECORDS[:1], (6,))
