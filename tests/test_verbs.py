"""Each verb once, end to end, on the real target (SmolLM2-135M-Instruct) and the shipped drafter."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

import pytest
import torch

from eyas import checkpoint, prompts, records, resolve
from eyas import target as targets
from eyas.decode.loop import generate
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.render import Renderer
from eyas.target import Target
from folders import call

pytestmark = pytest.mark.real
SHIPPED = resolve.drafter("smollm2-eagle3")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target() -> Target:
    return targets.load("smollm2")


def questions(n: int) -> list[prompts.Prompt]:
    """A few of each set, so that chat, code and arithmetic are there."""
    return [p for name in prompts.BENCHMARKS for p in prompts.load(name, n)]


def test_target(capsys: Capture) -> None:
    ran = call(capsys, "target", "smollm2", "--json", "-")
    told = json.loads(ran.out)
    assert (told["num_layers"], told["hidden_size"], told["vocab_size"]) == (30, 576, 49152)
    assert told["default_taps"] == [2, 15, 27]
    assert (Path(told["path"]) / "model.safetensors").exists()


def test_check_of_the_shipped_drafter(capsys: Capture, tmp_path: Path) -> None:
    began = time.monotonic()
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    ran = call(capsys, "check", "smollm2-eagle3", "--target", "smollm2", "--json", result, "--html", page)
    told = json.loads(result.read_text())
    assert ran.code == 0
    assert told["verdict"] == "healthy"
    assert told["found"]["contract"]["taps"]["value"] == [2, 15, 27]
    assert {f["cause"] for f in told["findings"]} == set()
    assert told["curves"]["walk"]["depths"][0]["joint"]["n"] > 1000
    assert "HEALTHY" in ran.out
    assert "<svg" in page.read_text()
    assert told["seconds"] <= time.monotonic() - began


def test_the_shipped_drafter_is_what_its_papers_say(target: Target) -> None:
    found = checkpoint.read(SHIPPED)
    assert checkpoint.inspect(found, target) == []
    drafter = checkpoint.load(found, target)
    assert found.contract is not None
    assert found.contract["vocab_sha256"] == checkpoint.vocab_sha256(drafter.vocab)
    assert found.inventory.bytes < 21_000_000
    renderer = Renderer(target.tokenizer, target.eos_ids())  # type: ignore[arg-type]
    for fact, value in renderer.hashes().items():
        assert found.contract[fact] == value


def test_greedy_text_is_the_targets_own(target: Target) -> None:
    """Speculation, plain decoding and transformers' generate, token for token up to near ties."""
    drafter = checkpoint.load(checkpoint.read(SHIPPED), target)
    renderer = Renderer(target.tokenizer, target.eos_ids())  # type: ignore[arg-type]
    kept = 0
    for question in questions(1):
        ids = renderer.ids(question.messages(), prompt=True)
        gaps: list[float] = []
        oracle = list(plain(target, ids, max_new_tokens=48, gaps=gaps))
        with torch.inference_mode():
            whole = target.model.generate(  # type: ignore[operator]
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=48
            )
        theirs = first_difference(oracle, whole[0, len(ids) :].tolist(), gaps)
        assert theirs is None or theirs.excused
        with packed(target, drafter):
            for draft_tokens in (1, 4):
                run = generate(target, drafter, ids, max_new_tokens=48, draft_tokens=draft_tokens).finish()
                ours = first_difference(oracle, run.token_ids, gaps)
                assert ours is None or ours.excused
                kept += sum(run.accepted)
    assert kept > 25, "a drafter of which nothing is kept proves nothing"


def test_the_walk_predicts_the_loop(target: Target) -> None:
    """Accept counts of our own loop on the prompts of some held-out records equal the walk over their texts."""
    from eyas import curve

    drafter = checkpoint.load(checkpoint.read(SHIPPED), target)
    held = [r for r in records.read(SHIPPED / "heldout.jsonl.gz") if len(r.spans()) == 1]
    chosen = sorted(held, key=lambda r: abs(r.n_response_tokens - 60))[:4]
    walked = curve.measure(drafter, target, chosen, depths=4).lengths[3]
    rounds, accepted, same = [], [], 0
    for record in chosen:
        first, last = record.spans()[0]
        ids = record.input_ids[:first].tolist()
        run = generate(target, drafter, ids, max_new_tokens=last - first + 1, draft_tokens=4).finish()
        rounds.append(run.rounds)
        accepted.append(sum(run.accepted))
        same += run.token_ids == record.input_ids[first : last + 1].tolist()
    assert same >= len(chosen) - 1, "the held-out records are not this target's own text"
    assert abs(sum(rounds) - int(walked.rounds.sum())) <= 2
    assert abs(sum(accepted) - int(walked.accepted.sum())) <= 6  # the walk does not see matches past the end


def test_generate(capsys: Capture) -> None:
    ran = call(capsys, "generate", "Name three primary colours.", "-n", "24", "-k", "2", "--json", "-")
    told = json.loads(ran.out)
    assert len(told["drafted"]) == len(told["accepted"]) == 2
    assert told["rounds"] == told["drafted"][0] > 0
    assert 0 < len(told["token_ids"]) <= 24
    bare = json.loads(call(capsys, "generate", "Name three primary colours.", "-n", "24", "--plain", "--json", "-").out)
    assert bare["text"] == told["text"]


def test_bench(capsys: Capture) -> None:
    ran = call(capsys, "bench", "-p", "gsm8k", "--limit", "2", "-k", "1,2", "-n", "24", "--json", "-")
    told = json.loads(ran.out)
    assert ran.code == 0
    assert list(told["all"]["sides"]) == ["plain", "chain 1", "chain 2"]
    for side in ("chain 1", "chain 2"):
        assert told["all"]["sides"][side]["equal"]["hits"] == 2
        assert told["all"]["sides"][side]["bound"] > 0


def test_prepare_records_train_check(capsys: Capture, tmp_path: Path) -> None:
    """The road a user takes, on the demo's conversations, a few steps long."""
    made = tmp_path / "records"
    ran = call(capsys, "prepare", SHIPPED / "demo.jsonl.gz", "--target", "smollm2", "--out", made, "--held-out", "0.1")
    assert ran.code == 0
    assert "first supervised tokens" in ran.out
    shown = call(capsys, "records", made / "train.jsonl", "--target", "smollm2", "--show", "2")
    assert "<|im_start|>user" in shown.out
    quick = (
        "--steps",
        "6",
        "--batch",
        "2",
        "--depths",
        "3",
        "--draft-vocab",
        "2048",
        "--measure-every",
        "6",
        "--ridge-tokens",
        "1500",
    )
    out = tmp_path / "drafter"
    ran = call(
        capsys,
        "train",
        "--records",
        made,
        "--target",
        "smollm2",
        "--out",
        out,
        *quick,
        "--measure-records",
        "4",
        "--taps",
        "0,9,28",
        "--json",
        tmp_path / "run.json",
    )
    assert ran.code == 0, ran.err
    points = json.loads((tmp_path / "run.json").read_text())["points"]
    assert [p["step"] for p in points] == [0, 6]
    assert points[0]["value"] > 1.1, "the ridge start speaks before the first step"
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 9, 28]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 8, 27]
    ran = call(
        capsys, "check", out, "--target", "smollm2", "--records", made / "heldout.jsonl", "--limit", "6", "--json", "-"
    )
    told = json.loads(ran.out)
    assert told["verdict"] in ("weak", "undecided"), told["findings"]
    assert not [f for f in told["findings"] if f["severity"] != "note"]
    assert "template-differs" not in {f["cause"] for f in told["findings"]}


def test_demo(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = importlib.import_module("eyas.cli.demo")
    for name, fewer in (("SHIPPED_RECORDS", 8), ("TRAINED", 24), ("RECORDS", 6), ("PROMPTS", 1), ("NEW_TOKENS", 24)):
        monkeypatch.setattr(demo, name, fewer)
    ran = call(capsys, "demo", "--out", tmp_path / "demo", "--minutes", "0.2")
    assert ran.code == 0, ran.err
    for words in ("Where we are", "HEALTHY", "token for token", "A fresh drafter", "What that means", "index.html"):
        assert words in ran.out
    page = (tmp_path / "demo" / "index.html").read_text()
    assert page.count("<svg") >= 3
    assert (tmp_path / "demo" / "drafter" / "model.safetensors").exists()
