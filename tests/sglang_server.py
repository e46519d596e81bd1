"""A stand-in for SGLang, started by us or by somebody else: ``standin_sglang`` as a process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.engines import child
from eyas.engines.sglang_live import Meant, Sglang
from test_engines_sglang import INFO, MODEL

STANDIN = Path(__file__).parent / "standin_sglang.py"


def shim(folder: Path) -> Path:
    """What is named as the engine's python: the stand-in instead of SGLang's module."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {STANDIN} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def told(fault: str | None = None, **more: Any) -> str:
    return json.dumps({"fault": fault, "info": INFO, "model": MODEL, **more})


@contextmanager
def engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None = None, flags: Sequence[str] = (), **more: Any
) -> Iterator[Sglang]:
    monkeypatch.setenv("EYAS_STANDIN", told(fault, **more))
    live = Sglang.launch(shim(folder), folder / "target", folder / "drafter", draft_tokens=None, flags=flags)
    try:
        yield live
    finally:
        live.stop()


@contextmanager
def running(fault: str | None = None, **more: Any) -> Iterator[str]:
    """One that somebody else started: its URL."""
    port = child.free_port()
    around = {**os.environ, "EYAS_STANDIN": told(fault, **more)}
    process = subprocess.Popen([sys.executable, str(STANDIN), "--port", str(port)], env=around)
    try:
        until = time.monotonic() + 60
        while not child.port_taken(port) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


NAMES = Meant("target", "drafter")


@contextmanager
def attached(fault: str | None = None, meant: Meant = NAMES, **more: Any) -> Iterator[Sglang]:
    with running(fault, **more) as url:
        live = Sglang.attach(url, meant)
        try:
            yield live
        finally:
            live.stop()
