"""Each verb once, end to end, on the real target (SmolLM2-135M-Instruct) and the shipped drafter."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import gguf
import pytest

from eyas import resolve
from eyas.dialects import engines
from folders import call

pytestmark = pytest.mark.real
SHIPPED = resolve.drafter("smollm2-eagle3")
Capture = pytest.CaptureFixture[str]


def test_target(capsys: Capture) -> None:
    ran = call(capsys, "target", "smollm2", "--json", "-")
    told = json.loads(ran.out)
    assert (told["num_layers"], told["hidden_size"], told["vocab_size"]) == (30, 576, 49152)
    assert told["default_taps"] == [2, 15, 27]
    assert (Path(told["path"]) / "model.safetensors").exists()


def test_generate(capsys: Capture) -> None:
    ran = call(capsys, "generate", "Name three primary colours.", "-n", "24", "-k", "2", "--json", "-")
    told = json.loads(ran.out)
    assert len(told["drafted"]) == len(told["accepted"]) == 2
    assert told["rounds"] == told["drafted"][0] > 0
    assert 0 < len(told["token_ids"]) <= 24
    bare = json.loads(call(capsys, "generate", "Name three primary colours.", "-n", "24", "--plain", "--json", "-").out)
    assert bare["text"] == told["text"]


def test_show_and_export(capsys: Capture, tmp_path: Path) -> None:
    """The shipped drafter for every engine; as a GGUF with the target's own tokenizer in it."""
    asked = [x for engine in engines.ENGINES for x in ("-e", engine)]
    ran = call(capsys, "show", "smollm2-eagle3", *asked, "--json", "-")
    told = json.loads(ran.out)
    assert ran.code == 0
    assert {e["name"]: e["taps"] for e in told["engines"]} == {engine: [2, 15, 27] for engine in engines.ENGINES}
    for engine in ("sglang", "vllm"):
        assert call(capsys, "export", "smollm2-eagle3", "--to", engine, "-o", tmp_path / engine).code == 0
        ran = call(capsys, "check", tmp_path / engine, "--records", SHIPPED / "heldout.jsonl.gz", "--limit", "2",
                   "--json", "-")  # fmt: skip
        assert json.loads(ran.out)["verdict"] not in ("broken", "miswired")
    out = tmp_path / "drafter.gguf"
    ran = call(capsys, "export", "smollm2-eagle3", "--to", "llama.cpp", "--target", "smollm2", "-o", out)
    assert ran.code == 0, ran.err
    reader = gguf.GGUFReader(out)
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 49152
    ran = call(capsys, "export", "smollm2-eagle3-taps", "--to", "llama.cpp", "-o", out)
    assert ran.code == 2


def test_read(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 10.00 tokens/s, Drafted throughput: "
        "26.67 tokens/s, Accepted: 600 tokens, Drafted: 1600 tokens, Per-position acceptance rate: 0.800, 0.400, "
        "0.200, 0.100, Avg Draft acceptance rate: 37.5%\n"
    )
    ran = call(capsys, "read", log, "--json", "-")
    (run,) = json.loads(ran.out)["observed"]
    assert (run["engine"], run["rounds"], run["drafted"], run["accepted"], run["draft_tokens"]) == (
        "vllm", 400, 1600, 600, 4,
    )  # fmt: skip
    assert run["accept_length"]["value"] == 2.5


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


def test_regenerate_capture_and_train_from_states(capsys: Capture, tmp_path: Path) -> None:
    """The road of somebody who has prompts alone, and trains where the target is not run."""
    asked, made, states, out = (tmp_path / name for name in ("asked.txt", "records", "states", "drafter"))
    asked.write_text(
        "".join(f"Name {n} things that are {c}.\n" for n in ("two", "five") for c in ("red", "cold", "old"))
    )
    ran = call(
        capsys, "prepare", asked, "--target", "smollm2", "--regenerate", "--max-new-tokens", "24", "--out", made,
        "--held-out", "0.34",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "6 turns to answer" in ran.err
    ran = call(capsys, "capture", "--records", made, "--target", "smollm2", "--out", states, "--states-dtype", "fp8")
    assert ran.code == 0, ran.err
    ran = call(
        capsys, "train", "--states", states, "--target", "smollm2", "--out", out, "--steps", "3", "--depths", "2",
        "--draft-vocab", "2048", "--measure-every", "3", "--json", tmp_path / "run.json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    told = json.loads((tmp_path / "run.json").read_text())
    assert [p["step"] for p in told["points"]] == [0, 3]
    assert json.loads((out / "config.json").read_text())["eyas"]["contract"]["taps"]["value"] == [2, 15, 27]


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
