"""vLLM as a source of taps: a child process in its own environment that hands over what its model collects.

The engine's own store of hidden states needs a GPU; this way works wherever vLLM runs, and gives what a drafter in
that engine would be fed. Letters: T positions, C taps, D target width.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.engines import child
from eyas.errors import EnvironmentFault

SCRIPT = Path(__file__).parent / "inside" / "vllm_taps.py"


class Engine:
    """A vLLM that is up, to be used in a ``with``. Prompts go in as token ids, one at a time."""

    def __init__(
        self, python: Path, model: str, taps: Sequence[int], *, width: int, longest: int, dtype: str = "float32"
    ) -> None:
        """Start it (half a minute or more). ``python`` is the interpreter of an environment that has vLLM; ``longest``
        the most tokens a text will have."""
        self.width = len(taps) * width
        self._folder = Path(tempfile.mkdtemp(prefix="eyas-vllm-"))
        self._log = self._folder / "log.txt"
        replies, reply = os.pipe()
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(str(python), str(SCRIPT), "--model", model, "--dtype", dtype),
                        *("--taps", ",".join(map(str, taps)), "--longest", str(longest)),
                        *("--folder", str(self._folder), "--reply", str(reply)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reply,),
                    env=_environment(),
                    start_new_session=True,  # an interrupt is ours to handle
                )
        except OSError as error:
            os.close(replies)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EnvironmentFault(
                f"{python} could not be started: {error.strerror}.",
                way_out="Pass --engine-python, the python of an environment with vLLM (…/bin/python).",
            ) from error
        finally:
            os.close(reply)
        self._replies = os.fdopen(replies, encoding="utf-8")
        self.version = str(self._hear()["version"])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def states(self, ids: Sequence[int]) -> np.ndarray:
        """Taps [T, C*D] of one text in fp32, in ascending order of taps."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ids)}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error
        found: np.ndarray | None = None
        for name in self._hear()["passes"]:
            path = self._folder / Path(name).name
            with np.load(path, allow_pickle=False) as kept:
                if kept["ids"].tolist() == list(ids):  # the engine may have idle passes of its own
                    found = kept["taps"]
            path.unlink()
        if found is None or found.shape != (len(ids), self.width):
            self.close()
            raise EnvironmentFault(
                f"vLLM {self.version} ran no pass over a text of {len(ids)} tokens as a whole.",
                way_out="Capture in process instead (leave --engine-python out), and report this version.",
            )
        return found

    def close(self) -> None:
        """Stop it, whatever it does."""
        child.end_group(self._process.pid, self._process)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._replies.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hear(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise self._died()
        value: dict[str, Any] = json.loads(line)
        return value

    def _died(self) -> EnvironmentFault:
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        code = self._process.wait()
        self.close()
        return EnvironmentFault(
            f"vLLM ended with {code}. Its last words: {lines[-1] if lines else 'none'}",
            way_out="Check that `vllm serve` of that environment loads the target at all.",
        )


def _environment() -> dict[str, str]:
    """Ours, without what belongs to our Python; its workers must find the script by name."""
    kept = {k: v for k, v in os.environ.items() if k not in child.OURS}
    usual = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # room for the one generated token, which no pass ever sees
    }
    return {**usual, **kept, "PYTHONPATH": str(SCRIPT.parent)}
