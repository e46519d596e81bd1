"""Where an engine's environment is: EYAS_ENGINE_VLLM names its python, or `make engines` built .engines/vllm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # contracts


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    named = os.environ.get("EYAS_ENGINE_VLLM")
    python = Path(named) if named else ROOT / ".engines" / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no vLLM here: run `make engines`, or name a python that has it in EYAS_ENGINE_VLLM")
    return python
