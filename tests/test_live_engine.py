"""Engines as processes: started, asked, dying, hanging, answering garbage, interrupted; all of them real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas import target as targets
from eyas.engines import child, vllm_live, vllm_talk
from eyas.engines.child import Child, Identity
from eyas.engines.live import Counters
from eyas.engines.vllm_live import Vllm
from eyas.errors import EnvironmentFault, InputError, UsageError
from folders import call, write_drafter, write_lines, write_target

HERE = Path(__file__).parent
FIXTURE = HERE / "fixtures" / "engines" / "vllm-live.json"
ROOT = HERE.parent
Capture = pytest.CaptureFixture[str]


def shim(folder: Path) -> Path:
    """What is named as the engine's python: the stand-in instead of vLLM's module."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {HERE / "standin_vllm.py"} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


@contextmanager
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None = None, **more: Any) -> Iterator[Vllm]:
    monkeypatch.setenv("EYAS_STANDIN", json.dumps({"fault": fault, "fixture": str(FIXTURE), **more}))
    live = Vllm.launch(shim(folder), folder / "target", folder / "drafter", draft_tokens=4)
    try:
        yield live
    finally:
        live.stop()


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_child_ends_with_all_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); " \
           "print('up', flush=True); time.sleep(99)"  # fmt: skip
    one = Child([sys.executable, "-c", code], dict(os.environ), "a child")
    group = one._process.pid
    until = time.monotonic() + 30
    while "up" not in one.last_words() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(child.members(group)) == 2
    one.close(keep_log=tmp_path / "kept" / "log.txt")
    assert child.members(group) == []
    assert not one.folder.exists()
    assert (tmp_path / "kept" / "log.txt").read_text() == "up\n"


def test_one_that_ignores_the_first_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.5)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    one = Child([sys.executable, "-c", code], dict(os.environ), "a child")
    until = time.monotonic() + 30
    while "deaf" not in one.last_words() and time.monotonic() < until:
        time.sleep(0.05)
    one.close()
    assert child.members(one._process.pid) == []


def test_what_a_killed_eyas_left_is_ended_by_the_next(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys, tempfile
        from eyas.engines.child import Child
        one = Child([sys.executable, "-c", "import time; time.sleep(99)"], dict(os.environ), "a child")
        print(one._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    left = int(done.stdout)
    assert child.started(left) is not None
    assert child.reap(tmp_path) == 1
    until = time.monotonic() + 10
    while child.started(left) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert child.started(left) is None
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_came_round_again_is_left_alone(tmp_path: Path) -> None:
    """The record names this very process with another start: it is not ours to end."""
    folder = tmp_path / "eyas-engine-old"
    folder.mkdir()
    kept = {"group": os.getpid(), "started": 1, "owner": 2**22 - 1, "owned": 1}
    (folder / "child.json").write_text(json.dumps(kept))
    assert not Identity(os.getpid(), 1).alive
    assert child.reap(tmp_path) == 0
    assert not folder.exists()


def test_what_still_has_its_owner_is_left_alone(tmp_path: Path) -> None:
    me = os.getpid()
    folder = tmp_path / "eyas-engine-mine"
    folder.mkdir()
    kept = {"group": me, "started": child.started(me), "owner": me, "owned": child.started(me)}
    (folder / "child.json").write_text(json.dumps(kept))
    assert child.reap(tmp_path) == 0
    assert folder.exists()


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="could not be started") as told:
        Child([str(tmp_path / "no-python")], {}, "vLLM")
    assert "--engine-python" in told.value.way_out


# -- start ------------------------------------------------------------------------------------------------------------


def test_a_sound_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch) as live:
        live.ready()
        assert (live.about.version, live.about.runner) == ("0.32.0", "v1")
        assert live.about.model["taps"] == [2, 15, 27]
        assert live.about.resolved["speculative.method"] == "eagle3"
        (answer,) = live.generate([[1, 2, 3]], 8)
        assert answer.prompt_ids == (1, 2, 3)
        assert len(answer.token_ids) == 8
        assert live.metrics() == Counters(12, 48, (9, 2, 1, 1), live.metrics().generated)  # type: ignore[union-attr]
        assert not any(str(tmp_path) in word for word in live.about.command)


def test_one_that_dies_at_start_is_told_by_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "dies") as live:
        with pytest.raises(EnvironmentFault, match=r"ended with 3 while it started.*q_prj"):
            live.ready()
        assert "q_prj" in live.log()


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_live, "START_SECONDS", 2.0)
    with engine(tmp_path, monkeypatch, "hangs", children=1) as live:
        group = live._process._process.pid  # type: ignore[union-attr]
        with pytest.raises(EnvironmentFault, match="was not ready after 2 s"):
            live.ready()
    assert child.members(group) == []


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("no version", UsageError, "does not say that it is vLLM"),
        ("garbage", UsageError, "does not say that it is vLLM"),
        ("no models", InputError, "lists no model"),
    ],
)
def test_what_is_no_vllm(
    fault: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, monkeypatch, fault) as live, pytest.raises(error, match=words):
        live.ready()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port} is taken"):
            Vllm.launch(shim(tmp_path), tmp_path, tmp_path, draft_tokens=4, port=port)


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--worker-extension-cls"])
def test_flags_that_are_ours(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is set by eyas"):
        Vllm.launch(shim(tmp_path), tmp_path, tmp_path, draft_tokens=4, flags=[flag])


def test_the_users_speculative_config_stays(tmp_path: Path) -> None:
    given = [
        "--speculative-config",
        '{"method": "eagle", "num_speculative_tokens": 7, "model": "x"}',
        "--dtype",
        "half",
    ]
    words = vllm_talk.command(Path("py"), tmp_path, tmp_path / "d", 1, None, given, "a.B", True)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle", "num_speculative_tokens": 7, "model": str(tmp_path / "d")}
    assert words.count("--speculative-config") == 1
    assert words[words.index("--dtype") + 1] == "half"
    assert words[words.index("--host") + 1] == "127.0.0.1"


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("no ids", InputError, "no token ids"),
        ("other prompt", InputError, "answered to 2 others"),
        ("dies in between", EnvironmentFault, "OutOfMemoryError"),
    ],
)
def test_answers_that_are_none(
    fault: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, monkeypatch, fault) as live:
        live.ready()
        with pytest.raises(error, match=words):
            live.generate([[1, 2, 3]], 8)


def test_a_slow_answer_ends_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "stuck") as live:
        live.ready()
        with pytest.raises(EnvironmentFault, match="has not answered in time"):
            live.asker.ask("/v1/completions", {}, seconds=1.0)


def test_a_page_without_speculation_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "no speculation") as live:
        live.ready()
        assert live.metrics() is None


def test_an_engine_that_cannot_be_probed_is_asked_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, "no rpc") as live:
        live.ready()
        assert live.about.model == {}
        assert live.about.version == "0.32.0"


def test_counters_of_a_page() -> None:
    said = json.loads(FIXTURE.read_text(encoding="utf-8"))
    before, after = (vllm_talk.counters(said[f"/metrics {when}"]) for when in ("before", "after"))
    assert before is not None
    assert after is not None
    made = after.since(before)
    assert made.drafted == 4 * made.rounds == 48
    assert list(made.accepted) == sorted(made.accepted, reverse=True)
    assert vllm_talk.counters("nothing of speculation\n") is None


# -- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_drafter(folder / "drafter", targets.load(str(folder / "target")))
    lines: list[object] = [{"messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(4)]
    write_lines(folder / "prompts.jsonl", lines)
    return folder


def command(made: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "eyas", "diagnose", str(made / "drafter"), "-t", str(made / "target"), "-p",
            str(made / "prompts.jsonl"), "-n", "8", *more]  # fmt: skip


def environment(tmp_path: Path, fault: str | None) -> dict[str, str]:
    told = json.dumps({"fault": fault, "fixture": str(FIXTURE), "children": 1})
    return {**os.environ, "EYAS_STANDIN": told, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(made: Path, tmp_path: Path, sent: signal.Signals) -> None:
    python = shim(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    running = subprocess.Popen(
        command(made, "--engine-python", str(python)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(temporary, "stuck"),
    )  # fmt: skip
    records: list[Path] = []
    until = time.monotonic() + 120
    while time.monotonic() < until and not (records and list(temporary.glob("eyas-probe-*"))):
        records = list(temporary.glob("eyas-engine-*/child.json"))
        time.sleep(0.1)
    assert records, "the engine never started"
    group = json.loads(records[0].read_text())["group"]
    assert len(child.members(group)) == 2
    running.send_signal(sent)
    told, _ = running.communicate(timeout=90)
    assert running.returncode == 130, told
    assert "Traceback" not in told
    assert child.members(group) == []
    assert [p.name for p in temporary.iterdir() if p.name.startswith("eyas-")] == []


def test_an_engine_that_dies_is_judged_by_its_files_and_words(made: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        command(made, "--engine-python", str(shim(tmp_path)), "--json", "-", "--log", str(tmp_path / "log.txt")),
        capture_output=True, text=True, env=environment(tmp_path, "dies"), timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 4, ran.stderr
    told = json.loads(ran.stdout)
    assert told["verdict"] == "undecided"
    assert "q_prj" in json.dumps(told["not_checked"])
    assert "q_prj" in (tmp_path / "log.txt").read_text()
    assert told["probes"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either started"),
        (("--engine-python", "/nowhere", "--url", "http://localhost:1"), "either started"),
        (("--engine", "llama.cpp", "--url", "http://localhost:1"), "llama.cpp is not asked here yet"),
        (("--engine", "sglang"), "either started"),
        (("--engine", "vlm", "--url", "http://localhost:1"), "vllm"),
        (("--engine-python", "/nowhere/python"), "could not be started"),
        (("--engine-python", "/bin/true", "--engine-flags", "--a 'b"), "cannot be split"),
    ],
)
def test_wrong_use_is_told(
    made: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from folders import call

    ran = call(capsys, "diagnose", made / "drafter", "-t", made / "target", "-p", made / "prompts.jsonl", *arguments)
    assert ran.code in (2, 4)
    assert words in ran.err


def test_an_address_where_nobody_is(made: Path, capsys: Capture) -> None:
    url = f"http://127.0.0.1:{child.free_port()}"
    ran = call(capsys, "diagnose", made / "drafter", "-t", made / "target", "-p", made / "prompts.jsonl", "--url", url)
    assert ran.code == 4
    assert "cannot be reached" in ran.err
