"""The installed engine's own word on a drafter: a short-lived child in the engine's environment, asked in JSON.

``inside/<engine>_ask.py`` runs there and nothing of ours does. One object goes in on its standard input; the last line
of its standard output is the answer. No network, a time limit, and no more output kept than ``MOST``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.dialects.wiring import Files, Runner
from eyas.engines.child import OURS
from eyas.errors import EnvironmentFault, UsageError, did_you_mean

INSIDE = Path(__file__).parent / "inside"
MOST = 4_000_000  # bytes of output that are read
SECONDS = 300.0  # vLLM's import alone can take one of them on a busy machine


@dataclass(frozen=True)
class Answer:
    """``taps`` by runner (one name, the engine's, where it has a single one), in the engine's order before it sorts;
    None where the target's class has none. ``runner`` is the one it would take on this machine, and ``why``; what a
    GPU server would take is ``raw["runner_with_triton"]``. ``error``: what stopped the engine, in its words. ``raw``:
    all it said."""

    engine: str
    version: str
    runner: Runner | None
    taps: Mapping[str, tuple[int, ...] | None]
    flags: tuple[Mapping[str, Any], ...]
    why: str | None
    error: str | None
    raw: Mapping[str, Any]


def engines() -> list[str]:
    return sorted(path.stem.removesuffix("_ask") for path in INSIDE.glob("*_ask.py"))


def ask(
    engine: str,
    python: Path,
    files: Files,
    target_config: Mapping[str, Any],
    flags: Sequence[str] = (),
    *,
    seconds: float = SECONDS,
) -> Answer:
    """Put ``files`` to the engine installed for ``python``. What the engine refuses is in the answer's ``error``.

    Raises UsageError for an engine that cannot be asked, EnvironmentFault where the child does not start, has no such
    engine, takes longer than ``seconds`` or answers nonsense.
    """
    script = INSIDE / f"{engine}_ask.py"
    if engine not in engines():
        raise UsageError(f"{engine!r} is no engine that can be asked.", way_out=did_you_mean(engine, engines()))
    request = {
        "config": dict(files.config),
        "target_config": dict(target_config),
        "tensors": sorted(files.tensors or ()),
        "flags": list(flags),
    }
    code, said, complaints = _run([str(python), str(script)], json.dumps(request).encode(), seconds, engine)
    return _understood(engine, python, code, said, complaints)


def _run(command: list[str], request: bytes, seconds: float, engine: str) -> tuple[int, str, str]:
    """Exit code, standard output and errors, each cut at ``MOST`` bytes from the end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=errors, env=_environment(), start_new_session=True
            )
        except OSError as error:
            raise EnvironmentFault(
                f"{command[0]} could not be started: {error.strerror}.",
                way_out=f"Pass --engine-python, the python of an environment with {engine} (…/bin/python).",
            ) from error
        try:
            child.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"{engine} did not answer within {seconds:g} s.",
                way_out="Try again on a machine with less to do, or leave --engine-python out and trust the table.",
            ) from error
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return child.returncode, _end_of(out), _end_of(errors)


def _end_of(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST))
    return str(file.read().decode("utf-8", errors="replace"))


def _understood(engine: str, python: Path, code: int, said: str, complaints: str) -> Answer:
    lines = [line for line in said.splitlines() if line.strip()]
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("version"), str) or answer.get("engine") != engine:
        last = [line.strip() for line in (complaints or said).splitlines() if line.strip()]
        words = last[-1][:300] if last else "none"
        missing = f"No module named '{engine}" in complaints
        raise EnvironmentFault(
            f"{python} has no {engine}." if missing else f"{engine} ended with {code}. Its last words: {words}",
            way_out=f"Check with: {python} -c 'import {engine}; print({engine}.__version__)'",
        )
    error = answer.get("error") or {}
    taps = {runner: tuple(found) if found is not None else None for runner, found in answer.get("taps", {}).items()}
    said_error = f"{error.get('type')}: {error.get('message')}" if error else None
    return Answer(
        engine,
        answer["version"],
        answer.get("runner"),
        taps,
        tuple(answer.get("flags", ())),
        answer.get("why"),
        said_error,
        answer,
    )


def _environment() -> dict[str, str]:
    """Ours without what belongs to our Python, and without a way to the network's model hub."""
    kept = {key: value for key, value in os.environ.items() if key not in OURS}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**kept, "VLLM_CPU_KVCACHE_SPACE": "1", **offline}
