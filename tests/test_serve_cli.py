"""``eyas serve`` at the command line: what it refuses before it listens, and the engines it starts instead."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import checkpoint, resolve
from eyas import target as targets
from eyas.engines import serving as engines
from eyas.errors import EnvironmentFault, UsageError
from folders import call, write_drafter, write_target

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter") / "made", targets.load(str(target)))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYAS_API_KEY", raising=False)


# -- a drafter that does not fit -------------------------------------------------------------------------------


def test_another_target_s_drafter_is_refused(capsys: Capture, target: Path, drafter: Path, tmp_path: Path) -> None:
    """Same shapes, other weights: only the contract tells."""
    other = write_target(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.flip(weights["model.embed_tokens.weight"], [0])
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    ran = call(capsys, "serve", "--target", other, "--drafter", drafter, "--port", 0)
    assert ran.code == 2
    assert "trained on another target" in ran.err
    assert "eyas check" in ran.err
    assert "--plain" in ran.err


def test_a_drafter_of_other_shapes_is_refused_in_check_s_words(capsys: Capture, drafter: Path, tmp_path: Path) -> None:
    wide = write_target(tmp_path / "wide", hidden=64)
    ran = call(capsys, "serve", "--target", wide, "--drafter", drafter, "--port", 0)
    findings = checkpoint.inspect(checkpoint.read(drafter), targets.load(str(wide)))
    fatal = [finding for finding in findings if finding.severity == "fatal"]
    assert ran.code == 2
    assert fatal[0].summary in ran.err
    assert str(fatal[0].fix) in ran.err


def test_a_broken_drafter_is_refused(capsys: Capture, target: Path, drafter: Path, tmp_path: Path) -> None:
    weights = load_file(drafter / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    (tmp_path / "config.json").write_bytes((drafter / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ran = call(capsys, "serve", "--target", target, "--drafter", tmp_path, "--port", 0)
    assert (ran.code, "NaN or infinite values in norm.weight" in ran.err) == (2, True)


# -- addresses, keys, numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.7.7"])
def test_an_open_address_needs_a_key(host: str, capsys: Capture, target: Path) -> None:
    ran = call(capsys, "serve", "--target", target, "--plain", "--host", host)
    assert (ran.code, "no API key is set" in ran.err, "EYAS_API_KEY" in ran.err) == (2, True, True)
    ran = call(capsys, "serve", "--engine", "vllm", "--engine-python", sys.executable, "--host", host)
    assert (ran.code, "no API key is set" in ran.err) == (2, True)


def test_a_key_of_the_environment_is_shown_nowhere(
    capsys: Capture, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "short")
    ran = call(capsys, "serve", "--target", target, "--plain")
    assert (ran.code, "fewer than 8 characters" in ran.err) == (2, True)
    monkeypatch.setenv("EYAS_API_KEY", "correct-horse-battery")
    assert "correct-horse" not in call(capsys, "serve", "--help").out
    assert "correct-horse" not in call(capsys, "serve", "--target", target / "nowhere", "--port", 0).err


def test_a_port_that_is_taken_is_known_before_anything_is_loaded(capsys: Capture, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = call(capsys, "serve", "--target", tmp_path / "no-target", "--port", taken.getsockname()[1])
    assert (ran.code, "cannot be listened on" in ran.err) == (4, True)


@pytest.mark.parametrize(
    "wrong", [["--max-running", "0"], ["--max-queue", "-1"], ["--queue-timeout", "0"], ["--grace", "nan"]]
)
def test_numbers_that_are_none(wrong: list[str], capsys: Capture) -> None:
    ran = call(capsys, "serve", *wrong)
    assert ran.code == 2
    assert wrong[0] in ran.err


# -- engines ---------------------------------------------------------------------------------------------------


def test_the_words_for_vllm() -> None:
    words = engines.command(
        "vllm", Path("/v/python"), "/t", Path("/d"), draft_tokens=3, host="::1", port=9, name="m", flags=["--seed", "1"]
    )
    assert words[:5] == ["/v/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/t"]
    given = dict(zip(words[5::2], words[6::2], strict=True))
    assert given == {
        "--host": "::1",
        "--port": "9",
        "--served-model-name": "m",
        "--speculative-config": '{"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}',
        "--seed": "1",
    }


def test_the_words_for_sglang_are_read_back_as_they_were_meant() -> None:
    from eyas.dialects.sglang import flags

    words = engines.command("sglang", Path("p"), "/t", Path("/d"), draft_tokens=3, host="127.0.0.1", port=9, name="m")
    read = flags.parse(words[3:])
    assert read.values[flags.ALGORITHM] == "EAGLE3"
    assert (read.values[flags.STEPS], read.values[flags.TOPK], read.values[flags.TOKENS]) == (3, 1, 4)
    bare = engines.command("sglang", Path("p"), "/t", None, draft_tokens=3, host="127.0.0.1", port=9, name="m")
    assert not [word for word in bare if "speculative" in word]
    with pytest.raises(UsageError, match="no engine 'trt'"):
        engines.command("trt", Path("p"), "/t", None, draft_tokens=1, host="h", port=1, name="m")


def test_a_key_goes_to_vllm_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "correct-horse-battery")
    assert engines.environment("vllm", "correct-horse-battery")["VLLM_API_KEY"] == "correct-horse-battery"
    assert "correct-horse-battery" not in engines.environment("sglang", "correct-horse-battery").values()


ENGINE = """#!{python}
import json, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
json.dump({{"words": sys.argv, "child": child.pid, "key": os.environ.get("VLLM_API_KEY")}}, open({told!r}, "w"))
os.rename({told!r}, {told!r} + ".json")
def stop(signum, _):
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
time.sleep(600)
"""


def test_an_engine_is_started_told_and_ended_with_all_of_it(target: Path, drafter: Path, tmp_path: Path) -> None:
    """A stand-in for vLLM's python: it notes how it was called, has a child, and ends on a signal."""
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(ENGINE.format(python=sys.executable, told=str(told)), encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, "-m", "eyas", "serve", "--engine", "vllm", "--engine-python", str(python)]
    command += ["--target", str(target), "--drafter", str(drafter), "-k", "3", "--port", "8123"]
    command += ["--engine-flags", "--max-model-len 128"]
    key = "correct-horse-battery"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "EYAS_API_KEY": key})
    until = time.monotonic() + 120
    while not (found := Path(f"{told}.json")).exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    called = json.loads(found.read_text())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert shlex.split(out)[1:] == called["words"][1:], "what is printed is what is run"
    assert key not in out
    assert called["key"] == key
    assert called["words"][-2:] == ["--max-model-len", "128"]
    with pytest.raises(ProcessLookupError):
        os.kill(called["child"], 0)


def test_an_engine_that_is_not_there(capsys: Capture, target: Path, drafter: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="could not be started"):
        engines.run([str(tmp_path / "nowhere")], {})
    ran = call(capsys, "serve", "--engine", "sglang", "--target", target, "--drafter", drafter)
    assert (ran.code, "--engine-python" in ran.err) == (2, True)


def test_an_engine_that_ends_by_itself_tells_its_code() -> None:
    assert engines.run([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ)) == 7


def test_a_folder_that_an_engine_would_wire_otherwise_is_exported(drafter: Path, target: Path, tmp_path: Path) -> None:
    from contextlib import ExitStack

    from eyas.cli.serve import _spelled

    config = json.loads((drafter / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "config.json").write_text(json.dumps(config))
    (tmp_path / "edited" / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
    with ExitStack() as kept:
        assert _spelled("vllm", drafter, str(target), kept) == drafter.absolute()
        copy = _spelled("vllm", tmp_path / "edited", str(target), kept)
        assert copy != tmp_path / "edited"
        assert json.loads((copy / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert not copy.exists()


@pytest.mark.real
def test_the_shipped_drafter_goes_to_both_engines_as_it_is() -> None:
    from contextlib import ExitStack

    from eyas.cli.serve import _spelled

    shipped = resolve.drafter("smollm2-eagle3")
    with ExitStack() as kept:
        for engine in engines.ENGINES:
            assert _spelled(engine, shipped, "smollm2", kept) == shipped.absolute()
