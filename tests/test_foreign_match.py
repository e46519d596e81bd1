"""Foreign samples find their records, or are left out; the stock gives back the target's own rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from eyas.errors import InputError
from eyas.records import Record
from eyas.states.foreign import as_stock, open_states
from eyas.states.live import LiveStock
from eyas.states.own import stock_of
from stores import captured

torch.set_num_threads(1)

RECORDS = tiny.tiny_records(6)


def written(
    folder: Path, kind: str = "llama", *, ids: bool = False, taps: tuple[int, ...] = (0, 2, 4), **how: Any
) -> Any:
    """A loose file a record, under names that tell nothing unless ``numbered``; the stock that they come from."""
    target = tiny.target(kind)
    stock = LiveStock(target, RECORDS)
    order = list(range(len(RECORDS)))
    random.Random(1).shuffle(order)
    for place, index in enumerate(order):
        rows = stock.states(index, taps).to(how.get("dtype", torch.bfloat16)).split(target.hidden_size, dim=-1)
        rows = [how.get("cut", lambda x: x)(x).clone() for x in rows]
        held: Any = {"input_ids": torch.from_numpy(RECORDS[index].input_ids), "taps": rows} if ids else rows
        name = f"data_{index}" if how.get("numbered") else f"sample-{'abcdefgh'[place]}"
        torch.save(held, folder / f"{name}.pt")
    return target, stock


def same_rows(found: Any, wanted: Any, taps: tuple[int, ...] = (0, 2, 4)) -> int:
    """Every record of ``found`` with the rows that the target has for it, to the last bit of bf16."""
    by_id = {record.id: i for i, record in enumerate(wanted.records)}
    placed = found.placed(dict(zip(found.taps, taps, strict=True)))
    assert placed.taps == taps
    for index, record in enumerate(placed.records):
        rows = wanted.states(by_id[record.id], taps).bfloat16().float()
        assert torch.equal(placed.states(index, taps), rows)
        assert np.array_equal(record.loss_mask, wanted.records[by_id[record.id]].loss_mask)
    return len(found.records)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_samples_without_ids_are_matched_by_tap_0(tmp_path: Path, kind: str) -> None:
    target, live = written(tmp_path, kind)
    stock, notes = as_stock(open_states(tmp_path), RECORDS, target.embedding, target.hidden_size)
    assert same_rows(stock, live) == 6
    assert "6 of 6 samples matched by their lengths and tap 0" in notes


def test_of_equal_lengths_tap_0_tells_and_nothing_else(tmp_path: Path) -> None:
    target, live = written(tmp_path)
    rng = np.random.default_rng(5)
    others = [Record(rng.permutation(r.input_ids), r.loss_mask, "other") for r in RECORDS]
    stock, _ = as_stock(open_states(tmp_path), [*others, *RECORDS], target.embedding, target.hidden_size)
    assert same_rows(stock, live) == 6
    with pytest.raises(InputError, match=r"None of the 6 samples .* 6 of which several records have the length"):
        as_stock(open_states(tmp_path), [*others, *RECORDS], None, target.hidden_size)


def test_without_the_embedding_a_length_must_be_unique(tmp_path: Path) -> None:
    target, live = written(tmp_path)
    lengths = [r.seq_len for r in RECORDS]
    alone = sum(lengths.count(n) == 1 for n in lengths)
    stock, notes = as_stock(open_states(tmp_path), RECORDS, None, target.hidden_size)
    assert same_rows(stock, live) == alone
    assert f"{alone} of 6 samples matched by their lengths alone" in notes


def test_numbers_in_names_are_believed_only_with_tap_0(tmp_path: Path) -> None:
    target, live = written(tmp_path, numbered=True)
    stock, notes = as_stock(open_states(tmp_path), RECORDS, target.embedding, target.hidden_size)
    assert same_rows(stock, live) == 6
    assert "6 of 6 samples matched by their names, and tap 0 agrees" in notes
    turned = RECORDS[::-1]
    stock, _ = as_stock(open_states(tmp_path), turned, target.embedding, target.hidden_size)
    assert same_rows(stock, live) == 6


@pytest.mark.parametrize("by", [1, -1])
def test_states_one_position_off_are_told_and_shifted_back(tmp_path: Path, by: int) -> None:
    target, live = written(tmp_path, cut=lambda x: x.roll(by, 0))
    stock, notes = as_stock(open_states(tmp_path), RECORDS, target.embedding, target.hidden_size)
    told = f"whose rows stand 1 position too {'late' if by > 0 else 'early'}"
    assert f"6 of 6 samples matched by their lengths and tap 0, {told}" in notes
    mended = stock.shifted(by)
    assert len(mended.records) == 6
    for index, record in enumerate(stock.records):
        whole = next(i for i, r in enumerate(RECORDS) if r.id == record.id)
        kept = slice(0, -1) if by > 0 else slice(1, None)
        assert np.array_equal(mended.records[index].input_ids, record.input_ids[kept])
        assert np.array_equal(mended.records[index].loss_mask, record.loss_mask[kept])
        rows = live.states(whole, (0, 2, 4)).bfloat16().float()[kept]
        assert torch.equal(mended.states(index, mended.taps), rows)
    assert torch.equal(mended.shifted(-by).states(0, stock.taps), stock.states(0, stock.taps))


def test_samples_with_ids_become_records(tmp_path: Path) -> None:
    target, _ = written(tmp_path, ids=True)
    stock, notes = as_stock(open_states(tmp_path), None, None, target.hidden_size)
    assert sorted(r.id for r in stock.records) == sorted(r.id for r in RECORDS)
    assert all(not r.loss_mask[0] and r.loss_mask[1:].all() for r in stock.records)
    assert any("no mask: all but token 0" in note for note in notes)


def test_ids_find_their_records_and_strangers_are_counted(tmp_path: Path) -> None:
    target, live = written(tmp_path, ids=True)
    stock, notes = as_stock(open_states(tmp_path), RECORDS[:4], None, target.hidden_size)
    assert same_rows(stock, live) == 4
    assert any(note.startswith("2 samples left out, with ids that are no record's") for note in notes)


def test_cut_states_cut_the_record(tmp_path: Path) -> None:
    target, live = written(tmp_path, ids=True, cut=lambda x: x[:12])
    stock, notes = as_stock(open_states(tmp_path), RECORDS, None, target.hidden_size)
    assert [r.seq_len for r in stock.records] == [12] * 6
    assert "fewer rows than tokens: the record is cut (6 samples)" in notes
    for index, record in enumerate(stock.records):
        whole = next(i for i, r in enumerate(RECORDS) if np.array_equal(r.input_ids[:12], record.input_ids))
        assert torch.equal(stock.states(index, stock.taps), live.states(whole, (0, 2, 4)).bfloat16().float()[:12])


def test_bad_samples_are_left_out_and_bad_numbers_told(tmp_path: Path) -> None:
    target, _ = written(tmp_path, ids=True)
    first, second = sorted(tmp_path.iterdir())[1:3]
    first.write_bytes(first.read_bytes()[:500])
    held = torch.load(second)
    held["taps"][1][3] = float("nan")
    torch.save(held, second)
    stock, notes = as_stock(open_states(tmp_path), RECORDS, None, target.hidden_size)
    assert len(stock.records) == 5
    told = "\n".join(notes)
    assert f"1 samples left out, cannot be read, such as: {first.name}" in told.replace(f"{first.parent}/", "")
    assert f"taps[1]: 1 of {len(held['input_ids'])} rows hold NaN or infinity in {second.name}" in told


def test_a_copy_of_a_sample_is_no_second_record(tmp_path: Path) -> None:
    target, live = written(tmp_path, ids=True)
    (tmp_path / "z.pt").write_bytes(next(iter(sorted(tmp_path.iterdir()))).read_bytes())
    stock, notes = as_stock(open_states(tmp_path), RECORDS, None, target.hidden_size)
    assert same_rows(stock, live) == 6
    assert "1 samples left out, two samples for one record: z.pt" in notes


def test_placing_refuses_what_cannot_be(tmp_path: Path) -> None:
    target, _ = written(tmp_path, ids=True)
    stock, _ = as_stock(open_states(tmp_path), RECORDS, None, target.hidden_size)
    assert stock.taps == ("taps[0]", "taps[1]", "taps[2]")
    some = stock.placed({"taps[2]": 0, "taps[0]": 5}, last=5)
    assert (some.taps, some.last) == ((0, 5, "taps[1]"), 5)
    assert torch.equal(some.states(0, (5, "taps[1]")), stock.states(0, ("taps[0]", "taps[1]")))
    with pytest.raises(InputError, match=r"taps\[9\] is not stored"):
        stock.placed({"taps[9]": 1})
    with pytest.raises(InputError, match="Tap 1 is given to two tensors"):
        stock.placed({"taps[0]": 1, "taps[1]": 1})


def test_our_own_store_is_a_stock(tmp_path: Path) -> None:
    target = tiny.target("llama")
    store = captured(tmp_path / "s", RECORDS, batch=8)
    stock, live = stock_of(store, RECORDS[1:4]), LiveStock(target, RECORDS)
    assert (stock.taps, stock.last) == ((1, 2, 4, 5), 5)
    for index in range(3):
        wanted = live.states(index + 1, (4, 1, 5))
        assert torch.allclose(stock.states(index, (4, 1, 5)), wanted, rtol=2.0**-8, atol=1e-5)
    with pytest.raises(InputError, match="1 of 1 records are not in"):
        stock_of(store, tiny.tiny_records(1, seed=9))
