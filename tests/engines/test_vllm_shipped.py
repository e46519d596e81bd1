"""The shipped drafter on the real target: vLLM accepts what our loop accepts, and its taps are the captured ones."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contracts
import numpy as np
import pytest
import torch

from eyas import checkpoint, prompts, resolve
from eyas import target as targets
from eyas.decode.loop import generate
from eyas.decode.pack import packed
from eyas.render import Renderer
from eyas.states.store import StoredStates
from eyas.target import Target

PROMPTS, TOKENS, K = 32, 48, 4
TAPS = (2, 15, 27)


@pytest.fixture(scope="module")
def target() -> Target:
    return targets.load("smollm2")


@pytest.fixture(scope="module")
def asked(target: Target) -> list[list[int]]:
    renderer = Renderer(target.tokenizer, target.eos_ids())  # type: ignore[arg-type]
    chosen = prompts.load("mt-bench")[:PROMPTS]
    return [renderer.ids(prompt.messages(), prompt=True) for prompt in chosen]


@pytest.fixture(scope="module")
def theirs(vllm_python: Path, target: Target, asked: list[list[int]], tmp_path_factory: Any) -> dict[str, Any]:
    out, drafter = tmp_path_factory.mktemp("shipped"), resolve.drafter("smollm2-eagle3")
    job = {"name": "shipped", "target": str(target.folder), "drafter": str(drafter)}
    longest = max(map(len, asked)) + TOKENS + K + 8
    settings = {"prompts": asked, "tokens": TOKENS, "k": K, "longest": longest, "ignore_eos": False, "jobs": [job]}
    contracts.in_vllm(vllm_python, out, settings, seconds=1800)
    answer: dict[str, Any] = json.loads((out / "shipped.json").read_text(encoding="utf-8"))
    assert "error" not in answer, answer["error"]
    return answer


def tell(told: dict[str, Any]) -> None:
    """A line for whoever writes the numbers down."""
    if where := os.environ.get("EYAS_ENGINE_RECORD"):
        with open(where, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(told) + "\n")


def test_accept_length_and_every_depth_are_ours(theirs: dict[str, Any], target: Target, asked: list[list[int]]) -> None:
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    rounds, accepted, equal = 0, np.zeros(K, dtype=int), 0
    with packed(target, drafter):
        for ids, answer in zip(asked, theirs["answers"], strict=True):
            ours = generate(target, drafter, ids, max_new_tokens=TOKENS, draft_tokens=K).finish()
            rounds, accepted = rounds + ours.rounds, accepted + np.array(ours.accepted)
            equal += ours.token_ids == answer
    told = {
        "prompts": len(asked),
        "equal_texts": equal,
        "vllm": theirs["counts"],
        "ours": {"rounds": rounds, "accepted": accepted.tolist()},
    }
    told["accept_length"] = [1 + sum(c["accepted"]) / c["rounds"] for c in (told["vllm"], told["ours"])]  # type: ignore[index]
    tell(told)
    assert theirs["layers"] == list(TAPS)
    assert equal >= 0.9 * len(asked)  # the rest part ways at a near tie
    assert abs(told["accept_length"][0] - told["accept_length"][1]) <= 0.02  # type: ignore[index]
    rates = [np.array(c["accepted"]) / c["rounds"] for c in (told["vllm"], told["ours"])]  # type: ignore[index]
    assert np.abs(rates[0] - rates[1]).max() <= 0.02


def test_a_capture_through_vllm_holds_the_taps_of_one_in_process(
    vllm_python: Path, target: Target, tmp_path: Path
) -> None:
    """``eyas capture --engine-python``: four texts, every stored tap against every tap of the capture here."""
    shipped = Path(__file__).parents[2] / "models" / "smollm2-135m-eagle3" / "heldout.jsonl.gz"
    few = tmp_path / "heldout.jsonl"
    few.write_bytes(b"".join(gzip.decompress(shipped.read_bytes()).splitlines(keepends=True)[:4]))
    n = target.num_layers
    stored, every = (*TAPS, n), tuple(range(n + 1))
    captured(few, tmp_path / "vllm", TAPS, "--engine-python", str(vllm_python))
    captured(few, tmp_path / "here", every[:-1])
    theirs, ours = StoredStates(tmp_path / "vllm"), StoredStates(tmp_path / "here")
    tables = []
    for record in theirs.records("heldout"):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        length = torch.tensor([record.seq_len])
        fed, taps = theirs.run(target, ids, length, stored).taps, ours.run(target, ids, length, every).taps
        by_tap = taps[0].view(-1, n + 1, target.hidden_size).transpose(0, 1)
        tables.append(contracts.errors_by_tap(fed[0].float().numpy(), by_tap.float().numpy()))
    assert len(tables) == 4
    worst = np.max(tables, axis=0)
    nearest = np.min(tables, axis=0)
    for slot, tap in enumerate(stored):
        others = np.delete(nearest[slot], tap).min()
        tell({"tap": tap, "worst": float(worst[slot, tap]), "next_best": float(others)})
        assert worst[slot, tap] < 0.004  # both are stored in bf16, whose last bit is 1/256 of a value
        assert others > 10 * worst[slot, tap]


def captured(records: Path, out: Path, taps: Sequence[int], *more: str) -> None:
    arguments = ["--records", str(records), "--out", str(out), "--taps", ",".join(map(str, taps)), *more]
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "capture", "--target", "smollm2", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
