"""A store of states gives back what the target said, and nothing where it cannot."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from eyas import batches, curve, taps
from eyas.errors import EyasError, InputError, TargetError, UsageError
from eyas.states import StoredStates, shard, store
from eyas.target import Target
from stores import LAST, TAPS, captured

torch.set_num_threads(1)

RECORDS = tiny.tiny_records(8)
BF16 = 2.0**-8  # half a step relative to the number, and as much for another batch's rounding
FP8 = 2.0**-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of several shards in one part."""
    out = tmp_path_factory.mktemp("states") / "store"
    captured(out, RECORDS)
    return out


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return shutil.copytree(folder, tmp_path / "store")


def part(out: Path) -> Path:
    return out / "part-1-of-1"


def batch(*index: int) -> batches.Batch:
    return batches.collate(RECORDS, index)


def of(stored: StoredStates, target: Target, given: batches.Batch, tap_list: tuple[int, ...]) -> taps.States:
    return stored.run(target, given.input_ids, given.lengths, tap_list)


def online(given: batches.Batch, tap_list: tuple[int, ...] = TAPS, target: Target | None = None) -> taps.States:
    return taps.run(target or tiny.target("llama"), given.input_ids, given.lengths, tap_list)


# -- given back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_stored_states_are_the_targets_up_to_bf16(tmp_path: Path, kind: str) -> None:
    target = tiny.target(kind)
    stored, given = captured(tmp_path / "s", RECORDS, target), batch(5, 0, 3)
    found, wanted = of(stored, target, given, TAPS), online(given, TAPS, target)
    assert found.taps.shape == wanted.taps.shape
    assert found.taps.dtype == found.last.dtype == torch.float32
    for row, n in enumerate(given.lengths.tolist()):
        assert torch.allclose(found.taps[row, :n], wanted.taps[row, :n], rtol=BF16, atol=1e-5)
        assert torch.allclose(found.last[row, :n], wanted.last[row, :n], rtol=2 * BF16, atol=1e-3)
        assert not found.taps[row, n:].any()
        assert not found.last[row, n:].any()


def test_the_last_tap_is_kept_before_the_norm(folder: Path) -> None:
    given, target = batch(2, 1), tiny.target("llama")
    found = of(StoredStates(folder), target, given, (LAST,))
    wanted = online(given, (LAST,))
    n = int(given.lengths.min())
    assert torch.allclose(found.taps[:, :n], wanted.taps[:, :n], rtol=BF16, atol=1e-5)
    assert torch.equal(found.last, target.norm(found.taps))
    assert not torch.allclose(found.taps[:, :n], wanted.last[:, :n], rtol=0.1)


def test_some_of_the_stored_taps_are_these(folder: Path) -> None:
    stored, given, target = StoredStates(folder), batch(4, 6), tiny.target("llama")
    whole = of(stored, target, given, TAPS).taps.split(48, dim=-1)
    some = of(stored, target, given, (1, 4)).taps
    assert torch.equal(some, torch.cat((whole[0], whole[2]), dim=-1))
    assert not torch.equal(whole[0], whole[1])


def test_the_last_tap_may_be_a_drafters_too(tmp_path: Path) -> None:
    stored, given, target = captured(tmp_path / "s", RECORDS, taps=(2, LAST)), batch(1, 2), tiny.target("llama")
    assert stored.facts.stored == (2, LAST)
    found, n = of(stored, target, given, (2, LAST)), int(given.lengths.min())
    assert torch.allclose(found.taps[:, :n], online(given, (2, LAST)).taps[:, :n], rtol=BF16, atol=1e-5)


def test_records_come_back_by_split(folder: Path) -> None:
    stored = StoredStates(folder)
    for split, wanted in (("train", RECORDS[:-2]), ("heldout", RECORDS[-2:])):
        found = stored.records(split)
        assert [r.id for r in found] == [r.id for r in wanted]
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.array_equal(ours.input_ids, theirs.input_ids)
            assert np.array_equal(ours.loss_mask, theirs.loss_mask)
            assert (ours.input_ids.dtype, ours.loss_mask.dtype) == (np.int32, bool)
            assert ours.source == theirs.source
    assert all(r in stored for r in RECORDS)
    assert tiny.tiny_records(1, seed=7)[0] not in stored


def test_only_asked_rows_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, read, rows = StoredStates(folder), [], store._rows

    def watched(file: Any, path: Path, name: str, asked: slice, *rest: Any) -> torch.Tensor:
        read.append((path.name, name, asked.stop - asked.start))
        return rows(file, path, name, asked, *rest)

    monkeypatch.setattr(store, "_rows", watched)
    of(stored, tiny.target("llama"), batch(4), (2,))
    names = {name for _, name, _ in read}
    assert names == {"input_ids", "tap.2", f"tap.{LAST}"}
    assert {n for _, _, n in read} == {RECORDS[4].seq_len}
    assert len({file for file, _, _ in read}) == 1


def test_a_drafter_is_measured_without_the_target(folder: Path) -> None:
    """Held-out curves from a store: the same slots, and nearly the same hits."""
    target = tiny.target("llama")
    hollow = copy.deepcopy(target.model)
    hollow.model.layers = torch.nn.ModuleList()  # what is left cannot run
    ends = Target("ends", None, hollow, None, target.config, ends_only=True)
    drafter = tiny.drafter("llama", taps=TAPS)
    found = curve.measure(drafter, ends, RECORDS, depths=3, run=StoredStates(folder).run).teacher_forced
    wanted = curve.measure(drafter, target, RECORDS, depths=3).teacher_forced
    assert np.array_equal(found.n, wanted.n)
    assert np.array_equal(found.slots, wanted.slots)
    assert int(abs(found.joint - wanted.joint).sum()) <= 2
    assert int(abs(found.covered - wanted.covered).sum()) <= 4


# -- fp8 ------------------------------------------------------------------------------------------------------


def test_fp8_is_within_a_sixteenth_and_spares_the_last_tap(tmp_path: Path, folder: Path) -> None:
    given, target = batch(0, 3, 5), tiny.target("llama")
    coarse = of(captured(tmp_path / "s", RECORDS, dtype="fp8"), target, given, TAPS)
    fine = of(StoredStates(folder), target, given, TAPS)
    assert torch.equal(coarse.last, fine.last)
    assert not torch.equal(coarse.taps, fine.taps)
    largest = fine.taps.unflatten(-1, (3, 48)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 48).flatten(-2)
    assert (
        (coarse.taps - fine.taps).abs() <= FP8 * fine.taps.abs() + BF16 * fine.taps.abs() + largest / 448 / 512
    ).all()
    relative = ((coarse.taps - fine.taps).norm() / fine.taps.norm()).item()
    assert 0.005 < relative < 0.04


def test_every_token_and_tap_has_a_scale_of_its_own() -> None:
    rows = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    for size in (1e-6, 1.0, 1e6):
        mixed = torch.cat((rows[:3] * size, rows[3:]))
        values, scale = shard.quantise(mixed)
        assert values.dtype == torch.float8_e4m3fn
        assert scale.shape == (6,)
        relative = (values.float() * scale[:, None] - mixed).norm(dim=1) / mixed.norm(dim=1)
        assert (relative < 0.04).all()
    values, scale = shard.quantise(torch.zeros(2, 48))
    assert not (values.float() * scale[:, None]).any()


def test_fp8_is_little_more_than_half_of_bf16() -> None:
    three, last, width = (2, 15, 27), 30, 576
    assert shard.bytes_per_token(three, last, width, "bf16") == 4 * 2 * width + 5
    assert shard.bytes_per_token(three, last, width, "fp8") == 3 * (width + 4) + 2 * width + 5
    assert shard.bytes_per_token((2, 30), last, width, "bf16") == 2 * 2 * width + 5


# -- parts ----------------------------------------------------------------------------------------------------


def test_parts_are_read_as_one(tmp_path: Path, folder: Path) -> None:
    stored = captured(tmp_path / "s", RECORDS, parts=3)
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [f"part-{i}-of-3" for i in (1, 2, 3)]
    assert {r.id for r in stored.records("train")} == {r.id for r in RECORDS[:-2]}
    held = {r.id for r in stored.records("heldout")}
    assert held == {r.id for r in RECORDS[-2:]}
    given, target = batch(0, 1, 2, 7), tiny.target("llama")
    ours, theirs = of(stored, target, given, TAPS), of(StoredStates(folder), target, given, TAPS)
    assert torch.allclose(ours.taps, theirs.taps, rtol=BF16, atol=1e-5)  # batched otherwise


def told(out: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        StoredStates(out)
    assert caught.value.way_out
    return caught.value


def test_missing_parts_are_named(tmp_path: Path) -> None:
    out = tmp_path / "s"
    captured(out, RECORDS, parts=4)
    shutil.rmtree(out / "part-2-of-4")
    (out / "part-4-of-4" / "manifest.json").unlink()
    error = told(out)
    assert "parts 2/4, 4/4 missing or unfinished" in error.message
    assert "--shard 2/4" in error.way_out


def test_parts_of_two_cuts_are_refused(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "s"
    captured(out, RECORDS, parts=2)
    shutil.copytree(part(folder), out / "part-1-of-1")
    assert "mixes parts of 1 and of 2" in told(out).message


def test_parts_of_two_captures_are_refused(tmp_path: Path) -> None:
    captured(tmp_path / "a", RECORDS, parts=2)
    captured(tmp_path / "b", RECORDS[1:], parts=2)
    shutil.rmtree(tmp_path / "a" / "part-2-of-2")
    shutil.copytree(tmp_path / "b" / "part-2-of-2", tmp_path / "a" / "part-2-of-2")
    message = told(tmp_path / "a").message
    assert "not of one capture" in message
    assert "records 8 and 7" in message


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "s"
    captured(out, RECORDS, parts=2)
    shutil.rmtree(out / "part-2-of-2")
    shutil.copytree(out / "part-1-of-2", out / "part-2-of-2")
    assert "says that it is part-1-of-2" in told(out).message


def test_no_store(tmp_path: Path) -> None:
    assert "does not exist" in told(tmp_path / "nowhere").message
    assert "holds no states" in told(tmp_path).message
    assert "eyas capture" in told(tmp_path).way_out


# -- refused --------------------------------------------------------------------------------------------------


def test_another_targets_states_are_refused(folder: Path) -> None:
    stored, given = StoredStates(folder), batch(0)
    usual = tiny.target("llama")
    model = copy.deepcopy(usual.model)
    model.model.norm.weight.mul_(1.5)
    other = Target("other", None, model, None, usual.config)
    for target in (other, tiny.target("qwen2")):
        with pytest.raises(TargetError, match="holds states of another target: LlamaForCausalLM of 5 layers") as caught:
            of(stored, target, given, TAPS)
        assert "--target" in caught.value.way_out


def test_taps_that_are_not_stored_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"does not hold tap 0, 3; it holds 1,2,4,5") as caught:
        of(StoredStates(folder), tiny.target("llama"), batch(0), (0, 2, 3))
    assert "--taps 0,1,2,3,4" in caught.value.way_out


def test_unknown_records_are_named(folder: Path) -> None:
    stored, others = StoredStates(folder), tiny.tiny_records(7, seed=5)
    with pytest.raises(InputError, match=f"Record {others[0].id} .* is not in"):
        of(stored, tiny.target("llama"), batches.collate(others, [0]), TAPS)
    with pytest.raises(InputError, match=rf"7 of 15 records are not in .*{others[0].id}.*…") as caught:
        stored.require(tiny.target("llama"), TAPS, (*RECORDS, *others))
    assert "Capture them too" in caught.value.way_out


def rewritten(out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The store with its manifest changed."""
    path = part(out) / "manifest.json"
    value = json.loads(path.read_text())
    value = change(value) or value
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return out


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["shards"][0]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(schema=2), "has schema 2; this eyas reads schema 1"),
        (lambda m: m.pop("schema") and None, "has schema None"),
        (lambda m: "[1, 2]", "has schema None"),
        (lambda m: "{" * 20, "is not a manifest"),
        (lambda m: '{"a":' * 100_000, "is not a manifest"),
        (lambda m: json.dumps(m)[:-40], "is not a manifest"),
        (lambda m: m.pop("facts") and None, "facts"),
        (lambda m: first(m).update(file="../../secret.safetensors"), "shards.0.file"),
        (lambda m: first(m).update(file="/etc/passwd"), "shards.0.file"),
        (lambda m: first(m).update(bytes=-1), "shards.0.bytes"),
        (lambda m: first(m)["records"][1].__setitem__(1, 3), "overlap or leave gaps"),
        (lambda m: first(m)["records"][0].__setitem__(2, -3), "shards.0.records"),
        (lambda m: m["shards"].pop() and None, "of the 8 records"),
        (lambda m: m["facts"].update(dtype="int3"), "facts.dtype"),
    ],
)
def test_a_bad_manifest_is_refused(copied: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    assert words in told(rewritten(copied, change)).message


@pytest.mark.parametrize("by", [-1, -1000, 1])
def test_a_cut_or_grown_shard_is_refused_when_opened(copied: Path, by: int) -> None:
    path = part(copied) / "00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size + by)
    error = told(copied)
    assert f"00001.safetensors has {size + by:,} bytes, {size:,} were written" in error.message
    assert "--resume" in error.way_out


def test_a_missing_shard_is_refused(copied: Path) -> None:
    (part(copied) / "00001.safetensors").unlink()
    assert "00001.safetensors is missing" in told(copied).message


def test_hashes_are_compared_on_request(copied: Path) -> None:
    seen: list[int] = []
    StoredStates(copied).verify(seen.append)
    assert seen == list(range(1, len(list(part(copied).glob("*.safetensors"))) + 1))
    path = part(copied) / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"00001\.safetensors is not what was captured"):
        StoredStates(copied).verify()


def spoilt(out: Path, data: bytes) -> Path:
    """The first shard replaced by ``data``, and the manifest says so: only the reading itself can object."""
    (part(out) / "00000.safetensors").write_bytes(data)
    return rewritten(out, lambda m: first(m).update(bytes=len(data)))


def refuses_to_read(out: Path) -> EyasError:
    stored, target = StoredStates(out), tiny.target("llama")
    with pytest.raises(InputError, match=r"00000\.safetensors") as caught:
        of(stored, target, batch(0), TAPS)
    with pytest.raises(InputError, match=r"00000\.safetensors"):
        stored.records("train")
    assert caught.value.way_out
    return caught.value


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["torch", "numpy", "pickle"])
def test_a_pickle_in_the_place_of_a_shard_is_not_run(copied: Path, tmp_path: Path, form: str) -> None:
    trace, made = tmp_path / "executed", tmp_path / "bomb"
    if form == "torch":
        torch.save({"tap.1": Bomb(trace)}, made)
    elif form == "numpy":
        with open(made, "wb") as handle:
            np.save(handle, np.array([Bomb(trace)], dtype=object), allow_pickle=True)
    else:
        made.write_bytes(pickle.dumps(Bomb(trace)))
    error = refuses_to_read(spoilt(copied, made.read_bytes()))
    assert "is not a shard of states" in error.message
    assert not trace.exists()
    if form == "pickle":  # the bomb is one
        pickle.loads(made.read_bytes())
        assert trace.exists()


@pytest.mark.parametrize("length", [2**63 - 1, 2**40, 200_000_000, 10**6, 0])
def test_a_forged_header_length_is_refused(copied: Path, length: int) -> None:
    data = (part(copied) / "00000.safetensors").read_bytes()
    assert "is not a shard of states" in refuses_to_read(spoilt(copied, struct.pack("<Q", length) + data[8:])).message


def test_tensors_of_another_shape_or_name_are_refused(copied: Path) -> None:
    from safetensors.torch import load, save

    tensors = load((part(copied) / "00000.safetensors").read_bytes())
    for change in (
        {name: value[:5].clone() for name, value in tensors.items()},
        {name: value for name, value in tensors.items() if name != "input_ids"},
        {**tensors, "input_ids": tensors["input_ids"].long()},
    ):
        refuses_to_read(spoilt(copied, save(change)))
    without = spoilt(copied, save({name: value for name, value in tensors.items() if name != "tap.2"}))
    with pytest.raises(InputError, match=r"tap\.2 cannot be read"):
        of(StoredStates(without), tiny.target("llama"), batch(0), TAPS)


def test_swapped_records_are_noticed(copied: Path) -> None:
    """The manifest names record 1 where record 0 lies."""

    def swap(manifest: dict[str, Any]) -> None:
        rows = first(manifest)["records"]
        rows[0][0], rows[1][0] = rows[1][0], rows[0][0]

    stored = StoredStates(rewritten(copied, swap))
    with pytest.raises(InputError, match="does not hold record"):
        of(stored, tiny.target("llama"), batch(0), TAPS)
