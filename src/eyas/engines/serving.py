"""SGLang or vLLM started to serve, in the foreground: its command line with a drafter, and its life as a child of ours.

Nothing is probed and nothing is turned off: this is what one would start by hand, spelled right.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from eyas.dialects.sglang import flags as sglang
from eyas.engines import child
from eyas.errors import EnvironmentFault, UsageError

ENGINES = ("vllm", "sglang")
KEY = "EYAS_API_KEY"


def command(
    engine: str,
    python: Path,
    target: str,
    drafter: Path | None,
    *,
    draft_tokens: int,
    host: str,
    port: int,
    name: str,
    flags: Sequence[str] = (),
) -> list[str]:
    """The words to start ``engine`` with; the user's ``flags`` come last, where both engines let them win."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine!r} to serve with.", way_out=f"Known: {', '.join(ENGINES)}.")
    where = ["--host", host, "--port", str(port), "--served-model-name", name]
    if engine == "vllm":
        words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target, *where]
        if drafter is not None:
            config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": draft_tokens}
            words += ["--speculative-config", json.dumps(config)]
        return [*words, *flags]
    words = [str(python), "-m", "sglang.launch_server", "--model-path", target, *where, "--enable-metrics"]
    if drafter is not None:
        words += [sglang.ALGORITHM, "EAGLE3", sglang.DRAFT, str(drafter), sglang.STEPS, str(draft_tokens)]
        words += [sglang.TOPK, "1", sglang.TOKENS, str(draft_tokens + 1)]
    return [*words, *flags]


def environment(engine: str, key: str | None) -> Mapping[str, str]:
    """Ours without what belongs to our Python; vLLM reads its key from there."""
    kept = {name: value for name, value in os.environ.items() if name not in (*child.OURS, KEY)}
    return kept | {"VLLM_API_KEY": key} if key is not None and engine == "vllm" else kept


def run(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Until it ends: SIGTERM and SIGINT are handed on to all of it, and none of it outlives us. Its exit code."""
    try:
        process = subprocess.Popen(list(words), env=dict(variables), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{words[0]} could not be started: {error.strerror}.",
            way_out="Pass --engine-python, the python of an environment with the engine (…/bin/python).",
        ) from error
    asked = False

    def hand_on(signum: int, _: FrameType | None) -> None:
        nonlocal asked
        asked = True
        process.send_signal(signum)

    before = {signum: signal.signal(signum, hand_on) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        child.end_group(process.pid, process)
    return 0 if asked and code <= 0 else code
