"""What is said to a vLLM and what it says: command line, environment, answers, counters, settings. Pure.

Read off vLLM 0.32; bodies recorded from it are in tests/fixtures/engines/vllm-live.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.endpoint import KEYS
from eyas.engines import child
from eyas.engines.live import Answer, Counters
from eyas.engines.scrape import pages, sampled
from eyas.errors import InputError, UsageError

INSIDE = Path(__file__).parent / "inside"
SPECULATIVE = "--speculative-config"
OURS = ("--host", "--port", "--model", "--worker-extension-cls", "--served-model-name", "--api-key", "--root-path")
GENERATED = "vllm:generation_tokens_total"


def command(
    python: Path,
    target: Path,
    drafter: Path,
    port: int,
    draft_tokens: int | None,
    flags: Sequence[str],
    extension: str,
    probing: bool,
) -> list[str]:
    """The command line: the user's flags, then what is ours."""
    for flag in flags:
        if flag.split("=", 1)[0].replace("_", "-") in OURS:
            raise UsageError(f"{flag} is set by eyas.", way_out="Leave it out of --engine-flags.")
    rest, speculative = _without(flags, SPECULATIVE, "-sc")
    try:
        asked = json.loads(speculative) if speculative else {}
    except ValueError as error:
        raise UsageError(
            f"{SPECULATIVE} {speculative!r} is no JSON: {error}.", way_out="Quote it once more within --engine-flags."
        ) from error
    config = {"method": "eagle3", "num_speculative_tokens": 4, **asked, "model": str(drafter)}
    if draft_tokens is not None:
        config["num_speculative_tokens"] = draft_tokens
    # Not `vllm serve`: its entry asks for a package named vllm, which builds for a CPU are not.
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), *rest]
    words += [SPECULATIVE, json.dumps(config), "--worker-extension-cls", extension]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    if probing:
        words += [flag for flag in ("--enforce-eager", "--no-enable-prefix-caching") if flag not in rest]
    return words


def served_with(words: Sequence[str]) -> list[str]:
    """The flags of a command line of ours that the tables know: all but where it listens and what is mixed in."""
    known: list[str] = []
    left = iter(words[5:])  # python -m module --model PATH
    for word in left:
        if word in OURS:
            next(left, None)
        else:
            known.append(word)
    return known


def _without(flags: Sequence[str], *names: str) -> tuple[list[str], str | None]:
    """``flags`` without one of ``names`` and its value; and the value."""
    rest: list[str] = []
    value: str | None = None
    left = iter(flags)
    for flag in left:
        name, equals, behind = flag.partition("=")
        if name.replace("_", "-") in names:
            value = behind if equals else next(left, "")
        else:
            rest.append(flag)
    return rest, value


def environment(folder: Path) -> dict[str, str]:
    """Ours without what belongs to our Python; its workers find the probe by name in ``folder``."""
    kept = {k: v for k, v in os.environ.items() if k not in (*child.OURS, *KEYS)}
    usual = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    paths = os.pathsep.join(dict.fromkeys((str(folder), str(INSIDE))))
    return {**usual, **kept, "PYTHONPATH": paths, "VLLM_SERVER_DEV_MODE": "1"}


def answered(told: Any, request: str, ids: tuple[int, ...], seconds: float) -> Answer:
    """One answer out of a body of /v1/completions; InputError for one that is none."""
    try:
        choice = told["choices"][0]
        tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
        fed = choice.get("prompt_token_ids", told.get("prompt_token_ids"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(
            f"The engine's answer has no choices: {str(told)[:200]}", way_out="Check the engine's log; try again."
        ) from error
    whole = isinstance(tokens, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in tokens)
    if not whole:
        raise InputError(
            "The engine gives no token ids back (return_token_ids), so its text cannot be replayed.",
            way_out="Use vLLM 0.10.2 or newer.",
        )
    if isinstance(fed, list) and tuple(fed) != ids:
        raise InputError(
            f"The engine was asked {len(ids)} token ids and answered to {len(fed)} others.",
            way_out="Something between changes the prompt: ask the engine itself, not a proxy.",
        )
    return Answer(request, ids, tuple(tokens), str(reason), seconds)


def counters(text: str) -> Counters | None:
    """Counters of a metrics page, over all its engines; None where it knows no speculation."""
    try:
        told = sampled.grown(None, sampled.page(text.encode(), "metrics"))
    except InputError:
        return None
    made = [pages.sample(line)[2] for line in text.splitlines() if line.startswith(GENERATED)]
    return Counters(told.rounds, told.drafted, told.hits, int(sum(made)))


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What bears on speculation in vLLM's own dump of its configuration."""
    wanted = {
        "model_config": ("dtype", "max_model_len", "enforce_eager", "quantization"),
        "speculative_config": (
            "method", "num_speculative_tokens", "rejection_sample_method", "draft_sample_method",
            "disable_padded_drafter_batch", "quantization", "draft_tensor_parallel_size",
        ),
        "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling"),
        "cache_config": ("enable_prefix_caching", "cache_dtype"),
        "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for part, keys in wanted.items():
        block = config.get(part) or {}
        found |= {f"{part.removesuffix('_config')}.{key}": block[key] for key in keys if key in block}
    return found
