"""The shipped drafter on its real target: judged by the command, and proven to change no word of the text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from eyas import checkpoint, curve, prompts, records, resolve
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
