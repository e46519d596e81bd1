"""Tests share the machine with whatever else runs: waiting threads sleep, tokenizers do not fork pools."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("COLUMNS", "160")
