"""`eyas prepare --regenerate`: what the inputs ask comes out as records of the target's own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eyas import target as targets
from eyas.decode.plain import plain
from eyas.journal import NAME
from eyas.records import read
from eyas.render import Renderer
from folders import call, conversation, write_lines, write_target
from servers import serving

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A conversation whose own answers are not to be learnt, and bare prompts."""
    two_turns = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "NOT THIS"},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "NOR THIS"},
        ]
    }
    return write_lines(
        tmp_path / "asked.jsonl", [two_turns, {"prompt": "Why?"}, {"question": "How?", "source": "mine"}]
    )


def regenerate(capsys: pytest.CaptureFixture[str], target: Path, file: Path, *more: object):
    out = file.parent / "out"
    return call(
        capsys, "prepare", file, "--target", target, "--out", out, "--held-out", 0, "--regenerate",
        "--max-new-tokens", 8, *more,
    )  # fmt: skip


def test_records_are_the_targets_own_greedy_answers(
    capsys: pytest.CaptureFixture[str], target: Path, asked: Path
) -> None:
    done = regenerate(capsys, target, asked)
    assert done.code == 0, done.err
    loaded = targets.load(str(target))
    assert loaded.tokenizer is not None
    renderer = Renderer(loaded.tokenizer, loaded.eos_ids())
    made = read(asked.parent / "out" / "train.jsonl")
    assert [r.source for r in made] == ["asked.jsonl", "asked.jsonl", "mine"]
    for record, question in zip(made[1:], ("Why?", "How?"), strict=True):
        prompt = renderer.ids([{"role": "user", "content": question}], prompt=True)
        answer = list(plain(loaded, prompt, max_new_tokens=8))
        assert record.input_ids.tolist() == [*prompt, *answer]
        assert record.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
    said = loaded.tokenizer.decode(made[0].input_ids.tolist())
    assert "Be brief." in said
    assert "And?" not in said  # the first answer ended at the limit, and a cut answer is not talked on
    assert "THIS" not in said
    manifest = json.loads((asked.parent / "out" / "manifest.json").read_text())
    assert manifest["provenance"]["arguments"]["sampling"]["temperature"] == 0.0


def test_what_cannot_be_asked_stops_it_before_anything_is_answered(
    capsys: pytest.CaptureFixture[str], target: Path, asked: Path
) -> None:
    with asked.open("a") as handle:
        handle.write(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}) + "\n")
    done = regenerate(capsys, target, asked)
    assert done.code == 2
    assert "line 4" in done.err
    assert not (asked.parent / "out").exists()
    assert not (asked.parent / "out.answers").exists()
    done = regenerate(capsys, target, asked, "--skip-bad", "--json", "-")
    assert done.code == 0, done.err
    audit = json.loads(done.out)["audit"]
    assert (audit["records"], audit["bad"]) == (3, 1)


def test_an_existing_output_is_refused_before_the_target_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: Path
) -> None:
    target = write_target(tmp_path / "weightless")
    (target / "model.safetensors").unlink()
    (asked.parent / "out").mkdir()
    (asked.parent / "out" / "train.jsonl").write_text("precious")
    done = regenerate(capsys, target, asked)
    assert done.code == 2
    assert "exists already" in done.err
    assert (asked.parent / "out" / "train.jsonl").read_text() == "precious"


def test_an_endpoint_answers_without_the_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: Path
) -> None:
    target = write_target(tmp_path / "weightless")
    (target / "model.safetensors").unlink()
    with serving(lambda exchange: exchange.say("Yes"), ["tiny"]) as server:
        done = regenerate(capsys, target, asked, "--url", server.url)
    assert done.code == 0, done.err
    made = read(asked.parent / "out" / "train.jsonl")
    assert len(made) == 3
    assert all(r.input_ids[r.loss_mask].tolist()[-1] == 257 for r in made)


def test_answers_of_a_killed_run_are_kept(capsys: pytest.CaptureFixture[str], target: Path, asked: Path) -> None:
    assert regenerate(capsys, target, asked).code == 0
    whole = (asked.parent / "out" / "train.jsonl").read_bytes()
    journal = asked.parent / "out.answers" / NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # torn by the kill
    (asked.parent / "out" / "train.jsonl").unlink()
    done = regenerate(capsys, target, asked, "--overwrite")
    assert done.code == 0, done.err
    assert "2 of 3 are answered already" in done.err
    assert (asked.parent / "out" / "train.jsonl").read_bytes() == whole


def test_an_endpoint_without_regenerate_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [conversation("Hi", "Hello")])
    done = call(capsys, "prepare", file, "--target", target, "--out", tmp_path / "o", "--url", "http://localhost:1")
    assert done.code == 2
    assert "--regenerate" in done.err
