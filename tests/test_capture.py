"""A capture can be stopped at any moment, dealt out to many, and is the same store in the end."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import killing
import tiny
from eyas import checkpoint, files, taps
from eyas.capture import CaptureConfig, RecordFiles, capture, text_hashes
from eyas.capture.source import distinct, grouped
from eyas.errors import EnvironmentFault, InputError, Interrupted, RecordsError, TargetError, UsageError
from eyas.records import Record
from eyas.states import StoredStates
from eyas.target import Target
from folders import call, tokenizer, write_lines, write_target
from stores import LAST, TAPS, TOKEN_BYTES, captured, config, shards, splits

torch.set_num_threads(1)

RECORDS = tiny.tiny_records(11)
KILLS = 4
PART = Path("part-1-of-1")


def go(out: Path, records: list[Record] = RECORDS, target: Target | None = None, **keywords: Any) -> dict[str, Any]:
    flags = {k: keywords.pop(k) for k in ("resume", "overwrite", "listener") if k in keywords}
    return capture(splits(records), target or tiny.target("llama"), out, config(**keywords), **flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed capture."""
    out = tmp_path_factory.mktemp("whole") / "s"
    go(out)
    return out


class Ears:
    """Hears a capture; stops it after so many batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.left = stop_after
        self.plans: list[dict[str, Any]] = []
        self.tokens = 0

    def starting(self, plan: dict[str, Any]) -> None:
        self.plans.append(plan)

    def captured(self, tokens: int) -> None:
        self.tokens += tokens
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


# -- what is written ------------------------------------------------------------------------------------------


def test_the_cost_is_said_first_and_kept_to(tmp_path: Path) -> None:
    ears = Ears()
    result = go(tmp_path / "s", listener=ears)
    plan, tokens = ears.plans[0], sum(r.seq_len for r in RECORDS)
    assert (plan["records"], plan["tokens"], plan["taps"]) == (11, tokens, [*TAPS, LAST])
    assert plan["bytes_per_token"] == TOKEN_BYTES
    assert plan["free_bytes"] > 0
    assert ears.tokens == tokens
    written = sum(len(data) for data in shards(tmp_path / "s").values())
    assert result["bytes"] == written
    headers = 700 * result["shards"]
    assert tokens * TOKEN_BYTES < written < tokens * TOKEN_BYTES + headers
    assert (result["records"], result["tokens"], result["shards"]) == (11, tokens, len(shards(tmp_path / "s")))


def test_shards_are_bounded_and_hold_whole_records(whole: Path) -> None:
    manifest = json.loads((whole / PART / "manifest.json").read_text())
    sizes = [sum(tokens for _, _, tokens, _, _ in s["records"]) for s in manifest["shards"]]
    assert len(sizes) > 3
    assert all(size <= 100 for size in sizes)
    assert [r[0] for s in manifest["shards"] for r in s["records"]] == [r.id for r in RECORDS]


def test_a_record_longer_than_a_shard_is_a_shard_of_its_own() -> None:
    lengths = [5, 30, 4, 5, 6]
    items = [("train", Record(np.zeros(n, np.int32), np.ones(n, bool), "")) for n in lengths]
    assert [[r.seq_len for _, r in group] for group in grouped(items, 10)] == [[5], [30], [4, 5], [6]]


def test_a_text_is_captured_once(tmp_path: Path) -> None:
    twice = [*RECORDS[:3], RECORDS[0], *RECORDS[3:], RECORDS[2]]
    result = capture([("train", r) for r in twice], tiny.target("llama"), tmp_path / "s", config())
    assert (result["records"], result["duplicates"]) == (11, 2)
    assert [r.id for r in StoredStates(tmp_path / "s").records("train")] == [r.id for r in RECORDS]


def test_parts_share_the_records_out(tmp_path: Path) -> None:
    stored = captured(tmp_path / "s", RECORDS, parts=3)
    found = [
        [
            r[0]
            for s in json.loads((tmp_path / "s" / f"part-{i}-of-3" / "manifest.json").read_text())["shards"]
            for r in s["records"]
        ]
        for i in (1, 2, 3)
    ]
    assert [len(part) for part in found] == [4, 4, 3]
    assert sorted(record for part in found for record in part) == sorted(r.id for r in RECORDS)
    assert len(stored.records("train")) == 9


def test_files_are_streamed_and_cut_to_what_the_target_attends_to(tmp_path: Path) -> None:
    lines = [r.to_json() for r in RECORDS]
    path = write_lines(tmp_path / "train.jsonl", lines)
    source = RecordFiles({"train": path}, tiny.VOCAB, 25)
    for _ in range(2):  # read anew each time
        assert [(s, r.seq_len) for s, r in source] == [("train", min(r.seq_len, 25)) for r in RECORDS]
    with pytest.raises(RecordsError, match="line 1: token id"):
        list(RecordFiles({"train": path}, 3, 25))


def test_odd_names_of_sources_are_kept_as_far_as_they_go(tmp_path: Path) -> None:
    odd = [Record(RECORDS[0].input_ids, RECORDS[0].loss_mask, "half \ud800 ünï")]
    capture([("train", r) for r in odd], tiny.target("llama"), tmp_path / "s", config())
    assert StoredStates(tmp_path / "s").records("train")[0].source == "half ? ünï"


# -- stopped and gone on with ---------------------------------------------------------------------------------


def test_two_captures_are_the_same_byte_for_byte(tmp_path: Path, whole: Path) -> None:
    go(tmp_path / "s")
    assert shards(tmp_path / "s") == shards(whole)


@pytest.mark.parametrize("batches_done", [1, 3, 6])
def test_an_interrupted_capture_goes_on(tmp_path: Path, whole: Path, batches_done: int) -> None:
    out = tmp_path / "s"
    with pytest.raises(Interrupted, match=r"Stopped with \d shards finished") as caught:
        go(out, listener=Ears(batches_done))
    assert "--resume" in caught.value.way_out
    with pytest.raises(InputError, match="part 1/1 missing or unfinished"):
        StoredStates(out)
    done = shards(out)
    ears = Ears()
    result = go(out, resume=True, listener=ears)
    assert result["kept_shards"] == ears.plans[0]["kept_shards"] == len(done)
    assert shards(out) == shards(whole)
    assert sorted(p.name for p in (out / PART).iterdir()) == sorted(p.name for p in (whole / PART).iterdir())


def test_resuming_nothing_is_starting(tmp_path: Path, whole: Path) -> None:
    """So that every job of an array can be queued again with the same command."""
    assert go(tmp_path / "s", resume=True)["kept_shards"] == 0
    assert shards(tmp_path / "s") == shards(whole)


def test_a_finished_capture_has_nothing_left_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s"
    go(out)
    before = (out / PART / "manifest.json").read_bytes()
    monkeypatch.setattr(checkpoint, "write_tensors", None)
    result = go(out, resume=True)
    assert result["kept_shards"] == result["shards"]
    assert (out / PART / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_shard_is_made_again(tmp_path: Path, whole: Path, damage: str) -> None:
    out = tmp_path / "s"
    go(out)
    path = out / PART / "00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"flip": data, "cut": data[:-100], "empty": b""}[damage])
    result = go(out, resume=True)
    assert result["kept_shards"] == result["shards"] - 1
    assert shards(out) == shards(whole)


def test_a_torn_journal_line_is_a_shard_that_was_not_finished(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        go(out, listener=Ears(6))
    journal = out / PART / "journal.jsonl"
    text = journal.read_text()
    n = text.count("\n") - 1
    journal.write_text(text[:-30])
    (out / PART / ".00004.safetensors.part").write_bytes(b"half")
    assert go(out, resume=True)["kept_shards"] == n - 1
    assert shards(out) == shards(whole)
    assert not list((out / PART).glob("*.part"))


def child(folder: str, shares: list[float]) -> None:
    """Captures killed at each share of an undisturbed one's events."""
    watch = killing.Watch(("/eyas/capture/", "/eyas/files.py", "/eyas/states/"))
    taps.run = watch.unwatched(taps.run)
    watch.over(go, Path(folder), shares)


def test_a_capture_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    n = int(os.environ.get("EYAS_KILLS", KILLS))
    told = killing.in_a_child("test_capture", tmp_path, killing.moments(n))
    assert told["status"] == [killing.KILLED] * n
    wanted, kept = shards(tmp_path / "whole"), []
    for i in range(n):
        out = tmp_path / f"killed-{i}"
        if (out / PART / "manifest.json").exists():  # killed after the end
            StoredStates(out).verify()
        else:
            with pytest.raises(InputError, match=r"missing or unfinished|holds no states|does not exist"):
                StoredStates(out)
        kept.append(go(out, resume=True)["kept_shards"])
        assert shards(out) == wanted
        assert sorted(p.name for p in (out / PART).iterdir()) == [
            ".lock",
            *sorted(Path(p).name for p in wanted),
            "manifest.json",
        ]
    assert len(set(kept)) > 1, "all were killed at one place"


def test_two_runs_on_one_output_refuse(tmp_path: Path) -> None:
    with files.only_writer(tmp_path / "s" / PART), pytest.raises(UsageError, match="Another run is writing to"):
        go(tmp_path / "s")
    go(tmp_path / "s")
    with files.only_writer(tmp_path / "t" / "part-1-of-2"):
        go(tmp_path / "t", part=(2, 2))  # another part is another output


# -- refused --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(_path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=100_000)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    with pytest.raises(EnvironmentFault, match=r"The states need 0\.0 GB in .*, 0\.0 GB are free") as caught:
        go(tmp_path / "s")
    assert "fp8" in caught.value.way_out
    assert not shards(tmp_path)
    assert go(tmp_path / "s", records=RECORDS[:4])["records"] == 4  # fits


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = checkpoint.write_tensors, [2]

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        write(tensors, path, metadata)
        if not left[0]:
            os.truncate(path, 50)
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(EnvironmentFault, match="The disk is full"):
            go(tmp_path / "s")
    assert len(shards(tmp_path / "s")) == 2
    assert go(tmp_path / "s", resume=True)["kept_shards"] == 2
    assert shards(tmp_path / "s") == shards(whole)


def test_an_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="could not be written"):
        go(tmp_path / "file" / "s")


def test_existing_output_is_refused_without_a_word(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        go(out, listener=Ears(6))
    with pytest.raises(UsageError, match="holds an unfinished capture") as caught:
        go(out)
    assert "--resume" in caught.value.way_out
    assert shards(out)
    go(out, resume=True)
    with pytest.raises(UsageError, match="holds captured states"):
        go(out)
    go(out, overwrite=True, dtype="fp8")
    assert StoredStates(out).facts.dtype == "fp8"
    go(out, overwrite=True)
    assert shards(out) == shards(whole)
    with pytest.raises(UsageError, match="part of another cut than 1/2"):
        go(out, part=(1, 2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "fp8"}, "dtype 'bf16' and 'fp8' now"),
        ({"taps": (1, 2)}, "taps [1, 2, 4] and [1, 2] now"),
        ({"batch": 3}, "batch 2 and 3 now"),
        ({"records": RECORDS[:-1]}, "records 11 and 10"),
        ({"records": [RECORDS[1], RECORDS[0], *RECORDS[2:]]}, "records_sha256"),
        ({"target": tiny.target("qwen2")}, "target {'fingerprint'"),
    ],
)
def test_going_on_with_something_else_is_refused(whole: Path, changes: dict[str, Any], told: str) -> None:
    if "target" in changes:
        changes = {**changes, "taps": TAPS}
    with pytest.raises(UsageError, match="begun with other options or records") as caught:
        go(whole, resume=True, **changes)
    assert told in caught.value.message
    StoredStates(whole).verify()


def test_records_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    class Growing:
        reads = 0

        def __iter__(self) -> Iterator[tuple[str, Record]]:
            self.reads += 1
            return iter(splits(RECORDS if self.reads > 1 else RECORDS[:-1]))

    with pytest.raises(InputError, match="records changed while they were captured: 10 at first, 11 now"):
        capture(Growing(), tiny.target("llama"), tmp_path / "s", config())
    with pytest.raises(InputError, match="unfinished"):
        StoredStates(tmp_path / "s")


def test_no_records_for_a_part(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="No records to capture in part 12 of 12: there are 11 in all"):
        go(tmp_path / "s", part=(12, 12))
    with pytest.raises(RecordsError, match="there are 0 in all"):
        capture([], tiny.target("llama"), tmp_path / "s", config())
    with pytest.raises(ValueError, match="run from 1/4 to 4/4"):
        CaptureConfig(taps=TAPS, part=(0, 4))


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    usual = tiny.target("llama")
    model = copy.deepcopy(usual.model)
    model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
    broken = Target("broken", None, model, None, usual.config)
    with pytest.raises(TargetError, match=r"states of record [0-9a-f]{16} are not finite"):
        go(tmp_path / "s", target=broken)
    assert not shards(tmp_path)


def test_records_of_another_tokenizer_are_refused() -> None:
    target = Target("t", None, tiny.target("llama").model, tokenizer(), tiny.target("llama").config)
    ours = text_hashes({}, target)["tokenizer_sha256"]
    assert text_hashes({"tokenizer_sha256": ours, "template_sha256": "x"}, target) == {
        "tokenizer_sha256": ours,
        "template_sha256": "x",
    }
    with pytest.raises(RecordsError, match="another tokenizer than the target's"):
        text_hashes({"tokenizer_sha256": "0" * 64}, target)


def test_distinct_counts_from_zero() -> None:
    items = [("train", r) for r in (RECORDS[0], RECORDS[1], RECORDS[0], RECORDS[2])]
    assert [(r.id, n) for (_, r), n in distinct(items)] == [(RECORDS[i].id, i) for i in range(3)]


# -- the command line -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and prepared records of it."""
    place = tmp_path_factory.mktemp("cli")
    write_target(place / "target")
    made = tiny.tiny_records(12, seed=3)
    (place / "records").mkdir()
    write_lines(place / "records" / "train.jsonl", [r.to_json() for r in made[:9]])
    write_lines(place / "records" / "heldout.jsonl", [r.to_json() for r in made[9:]])
    return place


def test_capture_then_train_from_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = (
        "--records",
        folder / "records",
        "--target",
        folder / "target",
        "--out",
        tmp_path / "s",
        "--states-dtype",
        "fp8",
    )
    for i in (1, 2):
        ran = call(capsys, "capture", *usual, "--shard", f"{i}/2", "--json", "-")
        assert ran.code == 0, ran.err
        result = json.loads(ran.out)
        assert (result["part"], result["records"], result["dtype"]) == (f"{i}/2", 6, "fp8")
        assert "free" in ran.err
        assert "bytes a token" in ran.err
    ran = call(capsys, "capture", *usual, "--shard", "1/2")
    assert ran.code == 2
    assert "--resume" in ran.err
    quick = ("--steps", "2", "--batch", "2", "--depths", "2", "--draft-vocab", "64", "--init", "random")
    ran = call(
        capsys,
        "train",
        "--states",
        tmp_path / "s",
        "--target",
        folder / "target",
        "--out",
        tmp_path / "d",
        *quick,
        "--json",
        "-",
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == 2
    made = json.loads((tmp_path / "d" / "config.json").read_text())
    assert made["eagle_aux_hidden_state_layer_ids"] == [2]  # the defaults of five layers, as captured
    ran = call(
        capsys,
        "train",
        "--states",
        tmp_path / "s",
        "--records",
        folder / "records",
        "--target",
        folder / "target",
        "--out",
        tmp_path / "e",
        *quick,
        "--taps",
        "2,3",
    )
    assert ran.code == 2
    assert "does not hold tap 3" in ran.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shard", "0/4"), "is not a part such as 1/4"),
        (("--shard", "5/4"), "is not a part such as 1/4"),
        (("--shard", "two"), "is not a part such as 1/4"),
        (("--states-dtype", "int3"), "--states-dtype 'int3'"),
        (("--batch", "0"), "--batch 0"),
        (("--taps", "2,99"), "Tap 99 does not exist"),
        (("--taps", "a"), "not a list of layers"),
        (("--resume", "--overwrite"), "exclude each other"),
    ],
)
def test_wrong_use_is_explained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    ran = call(capsys, "capture", "-r", folder / "records", "-t", folder / "target", "-o", tmp_path / "s", *options)
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


def test_training_on_nothing_or_on_others_states(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", folder / "target", "--out", tmp_path / "d")
    ran = call(capsys, "train", *target)
    assert ran.code == 2
    assert "--records" in ran.err
    assert (
        call(capsys, "capture", "-r", folder / "records" / "train.jsonl", "-o", tmp_path / "s", *target[:2]).code == 0
    )
    ran = call(capsys, "train", "--states", tmp_path / "s", "--keep-states", *target)
    assert "exclude each other" in ran.err
    ran = call(capsys, "train", "--states", tmp_path / "s", *target)
    assert ran.code == 2
    assert "No held-out records" in ran.err
    others = write_lines(tmp_path / "train.jsonl", [r.to_json() for r in tiny.tiny_records(3, seed=8)])
    ran = call(capsys, "train", "--states", tmp_path / "s", "--records", others, *target)
    assert ran.code == 2
    assert "None of the records" in ran.err
    ran = call(capsys, "train", "--states", tmp_path / "nowhere", *target)
    assert "does not exist" in ran.err
