"""`eyas diagnose --engine sglang`: a small trained drafter in a stand-in for SGLang, probed by the plugin itself.

With EYAS_SGLANG_WHEEL the methods that the plugin wraps are the engine's own. No SGLang was ever run here.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas import records as reading
from eyas.diagnose import outputs
from eyas.diagnose.served import served
from eyas.engines import child
from folders import Ran, call
from played import play
from sglang_server import running, shim, told
from test_diagnose import CASE, FEW, TEXTS, TOKENS, Faults, K, grave, healthy, parts, target
from test_engines_sglang import INFO, MODEL

ROOT = Path(__file__).parent.parent
WHEEL = os.environ.get("EYAS_SGLANG_WHEEL")
Capture = pytest.CaptureFixture[str]

CHANGES = {"model_path": "/models/target", "speculative_draft_model_path": "/models/trained",
           "speculative_num_steps": K, "speculative_num_draft_tokens": K + 1, "dtype": "float32"}  # fmt: skip
PLAYED_INFO = {**INFO, **CHANGES, "internal_states": [], "api_key": "sk-canary"}
PLAYED_MODEL = {**MODEL, "architectures": ["DeepseekV3ForCausalLM"]}


@cache
def known() -> list[tuple[list[int], list[int], str]]:
    """Texts that go on past what is served of them, their prompts' ids, and those as text, which gives the ids again:
    this target has no template."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    found = []
    for record in reading.read(CASE / "heldout.jsonl"):
        ids = record.input_ids.tolist()
        prompt = ids[: record.seq_len - record.n_response_tokens]
        text = tokenizer.decode(prompt)
        if record.n_response_tokens > TOKENS + K and tokenizer(text)["input_ids"] == prompt:
            found.append((ids, prompt, text))
    return found


def played(count: int, **changes: Any) -> dict[str, Any]:
    """Settings of a stand-in that plays the first texts."""
    play = {"case": str(CASE), "texts": [ids for ids, _, _ in known()[:count]], "K": K}
    return {
        "info": PLAYED_INFO,
        "model": PLAYED_MODEL,
        "play": {**play, **({"wheel": WHEEL} if WHEEL else {}), **changes},
    }


def counted(count: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a stand-in that answers as an engine would that reads the drafter so; what it keeps is played by
    another engine in miniature (``played``) than the stand-in's own."""
    chosen = [r for r in reading.read(CASE / "heldout.jsonl") if r.input_ids.tolist() in [ids for ids, _, _ in known()]]
    faults = Faults(healthy(**facts))
    answers, turns = play(target(), parts()[0], chosen[:count], TOKENS, K, faults)
    truths = [np.append(record.input_ids[1:], -1) for record in chosen[:count]]
    found = []
    for answer, rounds, hits in zip(answers, *outputs.counted(served(answers, turns), K, truths), strict=True):
        at_least = [int(rounds), *hits.tolist(), 0]
        histogram = [a - b for a, b in itertools.pairwise(at_least)]
        found.append({"prompt": answer.prompt_ids, "tokens": answer.token_ids, "histogram": histogram})
    return {"info": PLAYED_INFO, "model": PLAYED_MODEL, "answers": found}


def diagnosed(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, count: int, stood: Mapping[str, Any]
) -> tuple[Ran, dict[str, Any]]:
    """Launched where the stand-in plays, else attached to."""
    monkeypatch.setenv("TMPDIR", str(folder))
    file = folder / "prompts.jsonl"
    lines = [json.dumps({"id": str(i), "turns": [text]}) for i, (_, _, text) in enumerate(known()[:count])]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    asked: list[object] = [
        "diagnose", CASE / "trained", "-t", CASE / "target", "-e", "sglang", "-p", file, "-n", TOKENS, "--limit", count,
        "--json", "-",
    ]  # fmt: skip
    if "play" not in stood:
        with running(**stood, asked=str(folder / "asked.txt")) as url:
            ran = call(capsys, *asked, "--url", url)
    else:
        monkeypatch.setenv("EYAS_STANDIN", told(**stood))
        ran = call(capsys, *asked, "--engine-python", shim(folder))
    return ran, json.loads(ran.out)


def stages(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: one["status"] for name, one in found["probes"].items() if isinstance(one, dict) and "status" in one}


def test_a_sound_engine_is_cleared_and_every_stage_is_equal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, found = diagnosed(tmp_path, capsys, monkeypatch, TEXTS, played(TEXTS))
    assert ran.code == 0, (found["findings"], found["not_checked"], found["engine"])
    assert (found["verdict"], grave(found)) == ("healthy", [])
    seen = stages(found)
    assert {name for name, status in seen.items() if status != "equal"} <= {"prompt"}, seen
    assert {
        "tokens",
        "positions",
        "taps",
        "fused",
        "states",
        "said",
        "feedback",
        "drafted",
        "acceptance",
        "metrics",
    } <= set(seen)
    assert found["probes"]["metrics"]["page"]["rounds"] == found["observed"]["rounds"] > 100
    assert found["gap"]["value"] == 0.0
    assert found["engine"]["mode"] == "launched"
    assert found["engine"]["version"] == "0.5.23"
    assert any("off while it is probed" in what for what in found["engine"]["unseen"])
    assert str(tmp_path) not in json.dumps(found["engine"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("eyas-")] == []


def test_taps_off_by_one_are_named(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = diagnosed(tmp_path, capsys, monkeypatch, FEW, played(FEW, facts={"taps": [1, 4, 8]}))
    assert grave(found)[:1] == ["taps-off-by-one"], (found["findings"], stages(found))
    assert found["divergence"]["stage"] == "taps"
    assert found["probes"]["taps"]["observed"] == [1, 4, 8]
    assert found["verdict"] in ("miswired", "undecided")


def test_one_that_runs_is_read_one_at_a_time_and_nothing_else(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, found = diagnosed(tmp_path, capsys, monkeypatch, TEXTS, counted(TEXTS, {}))
    assert ran.code == 0, (found["findings"], found["not_checked"])
    assert (found["verdict"], grave(found)) == ("healthy", [])
    assert found["probes"] is None
    assert -0.05 < found["gap"]["value"] <= 0  # what a round kept past the end of a text is counted, and never walked
    assert found["observed"]["rounds"] > 100
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert set(asked) == {"GET /server_info", "GET /model_info", "POST /generate", "answered /generate"}
    rounds = [line for line in asked if "generate" in line]
    assert rounds == ["POST /generate", "answered /generate"] * TEXTS
    assert "reads /server_info, /model_info and /tokenize" in ran.err
    unseen = " ".join(found["engine"]["unseen"])
    for words in ("which taps", "only an engine that eyas starts", "SGLANG_SIMULATE_ACC_LEN"):
        assert words in unseen
    resolved = found["engine"]["resolved"]
    assert (resolved["speculative.method"], resolved["speculative.num_speculative_tokens"]) == ("eagle3", K)
    assert "canary" not in ran.out


def test_one_that_keeps_less_falls_short_and_no_file_is_blamed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, found = diagnosed(tmp_path, capsys, monkeypatch, FEW, counted(FEW, {"taps": (2, 3, 6)}))
    assert grave(found) == ["engine-falls-short"]
    assert (found["verdict"], ran.code) == ("undecided", 3)
    assert found["gap"]["low"] > 0


def test_an_address_where_nobody_is(capsys: Capture) -> None:
    url = f"http://127.0.0.1:{child.free_port()}"
    arguments = ["-t", CASE / "target", "-e", "sglang", "-p", "mt-bench", "--limit", 2, "--url", url]
    ran = call(capsys, "diagnose", CASE / "trained", *arguments)
    assert ran.code == 4
    assert "cannot be reached" in ran.err


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"id": str(i), "turns": ["a b c"]}) for i in range(2)))
    running = subprocess.Popen(
        [sys.executable, "-m", "eyas", "diagnose", str(CASE / "trained"), "-t", str(CASE / "target"), "-e", "sglang",
         "-p", str(tmp_path / "p.jsonl"), "-n", "8", "--engine-python", str(shim(tmp_path))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "EYAS_STANDIN": told("stuck", children=1), "TMPDIR": str(temporary),
             "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    records: list[Path] = []
    until = time.monotonic() + 120
    while time.monotonic() < until and not (records and list(temporary.glob("eyas-probe-*"))):
        records = list(temporary.glob("eyas-engine-*/child.json"))
        time.sleep(0.1)
    assert records, "the engine never started"
    group = json.loads(records[0].read_text())["group"]
    assert len(child.members(group)) == 2
    assert list(temporary.glob("eyas-sglang-*"))
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=90)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert child.members(group) == []
    assert [p.name for p in temporary.iterdir() if p.name.startswith("eyas-")] == []
