"""The installed engine's word: what goes in, what comes back, and every way a child can fail. The child is a fake."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.dialects.wiring import Files
from eyas.engines import ask as asking
from eyas.engines.ask import ask
from eyas.errors import EnvironmentFault, UsageError
from eyas.inventory import TensorInfo

RECORDED = Path(__file__).parent / "fixtures" / "engines" / "vllm-ask.json"
Fake = Callable[[str], Path]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A python that runs ``code`` instead of the script it is given; what it was asked lies in ``request``."""

    def make(code: str) -> Path:
        asked, seen = str(tmp_path / "request"), str(tmp_path / "seen")
        (tmp_path / "child.py").write_text(
            "import json, os, sys\n"
            f"open({asked!r}, 'w').write(sys.stdin.read())\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({seen!r}, 'w'))\n{code}"
        )
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/child.py "$@"\n')
        wrapper.chmod(0o755)
        return wrapper

    return make


def recorded(name: str) -> dict[str, Any]:
    told = json.loads(RECORDED.read_text(encoding="utf-8"))
    case = next(c for c in told["cases"] if c["name"] == name)
    case["answer"] = {"version": told["version"], **case["answer"]}
    return dict(case)


def says(answer: object) -> str:
    return f"print('noise of the engine')\nprint({json.dumps(json.dumps(answer))})\nprint()\n"


def test_a_recorded_answer_comes_back(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    case = recorded("inside eagle_config")
    tensors = {"fc.weight": TensorInfo("fc.weight", "F32", (48, 144), "model.safetensors")}
    files = Files(case["config"], tensors)
    answer = ask("vllm", fake(says(case["answer"])), files, case["target_config"], case["flags"])
    assert (answer.engine, answer.version, answer.runner) == ("vllm", "0.32.0", "v1")
    assert answer.taps == {"v1": (1, 2, 5), "v2": (2, 4, 5)}
    assert answer.error is None
    assert {f["flag"]: f["resolved"] for f in answer.flags}["num_speculative_tokens"] == 3
    assert answer.raw["default_taps"] == [2, 4, 5]
    asked = json.loads((tmp_path / "request").read_text())
    assert asked == {
        "config": case["config"],
        "target_config": case["target_config"],
        "tensors": ["fc.weight"],
        "flags": case["flags"],
    }
    arguments, environment = json.loads((tmp_path / "seen").read_text())
    assert arguments == [str(asking.INSIDE / "vllm_ask.py")]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "PYTHONPATH" not in environment


def test_what_stops_the_engine_is_an_answer(fake: Fake) -> None:
    case = recorded("unknown field")
    answer = ask("vllm", fake(says(case["answer"])), Files(case["config"]), case["target_config"], case["flags"])
    assert answer.taps == {}
    assert "disable_by_batch_size" in str(answer.error)


def test_a_target_without_layers_to_hand_over(fake: Fake) -> None:
    case = recorded("gemma3 target")
    answer = ask("vllm", fake(says(case["answer"])), Files(case["config"]), case["target_config"])
    assert answer.taps == {"v1": None, "v2": None}


def test_an_engine_that_cannot_be_asked(fake: Fake) -> None:
    with pytest.raises(UsageError, match="'vlm' is no engine that can be asked") as caught:
        ask("vlm", fake(""), Files({}), {})
    assert "'vllm'" in caught.value.way_out
    assert "vllm" in asking.engines()


def test_no_such_python(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="could not be started") as caught:
        ask("vllm", tmp_path / "nowhere" / "python", Files({}), {})
    assert "--engine-python" in caught.value.way_out


def test_a_python_without_the_engine(tmp_path: Path) -> None:
    """The real script, in an environment that has nothing."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"python has no vllm\.") as caught:
        ask("vllm", bare, Files({}), {})
    assert "import vllm" in caught.value.way_out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "ended with 0. Its last words: none"),
        ("print('hello')", "Its last words: hello"),
        ("print('[1, 2]')", "Its last words"),
        ('print(\'{"engine": "sglang", "version": "1"}\')', "Its last words"),
        ('print(\'{"engine": "vllm"}\')', "Its last words"),
        ("sys.exit('no room')", "ended with 1. Its last words: no room"),
        ("os.kill(os.getpid(), 9)", "ended with -9"),
        ('print(\'{"engine": "vllm", "version": "0.32\')', "Its last words"),
    ],
)
def test_nonsense(fake: Fake, code: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        ask("vllm", fake(code), Files({}), {})


def test_a_child_that_takes_too_long_is_stopped(fake: Fake, tmp_path: Path) -> None:
    code = f"import time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    started = time.monotonic()
    with pytest.raises(EnvironmentFault, match="did not answer within 3 s"):
        ask("vllm", fake(code), Files({}), {}, seconds=3)
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_endless_talker_is_read_from_its_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MOST", 10_000)
    answer = {"engine": "vllm", "version": "1.0", "taps": {"v1": [1]}}
    made = ask("vllm", fake("print('x' * 300_000)\n" + says(answer)), Files({}), {})
    assert made.taps == {"v1": (1,)}
