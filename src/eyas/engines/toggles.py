"""Settings of an engine that decide which of its code runs and should change no token: each can be turned, alone.

A fault inside an engine (its graphs, its cache, its batches) leaves every file sound, and some leave no trace in what
a probe can see; where it lives shows only in which setting makes it go away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GRAPHS_TAKE = 3.0  # times a start without them: vLLM 0.32 on 2 cores, 172 s against 30 to 53


@dataclass(frozen=True)
class Toggle:
    """``name`` is what is turned off; ``flags`` do it, beside the user's; ``why_not`` where there is nothing to turn.

    ``starts``: what a start with it costs, in starts without graphs. ``again``: the prompts are sent twice and the
    second time counts, which is what uptime and a warm cache do to an engine.
    """

    name: str
    setting: str
    flags: Sequence[str] = ()
    concurrency: int | None = None
    again: bool = False
    starts: float = 1.0
    why_not: str | None = None


EAGER, NO_PREFIX_CACHE = "--enforce-eager", "--no-enable-prefix-caching"
SERVED = Toggle("as served", "your flags")


def of_vllm(
    flags: Sequence[str], resolved: Mapping[str, Any], prompts: Sequence[int], concurrency: int
) -> list[Toggle]:
    """What can be turned in a vLLM that is served with ``flags``; ``prompts`` are the lengths of what is sent.

    ``resolved`` comes from a probed engine, which runs eager and without a prefix cache, so those two are read off the
    flags alone; vLLM has both on unless told otherwise.
    """
    eager = EAGER in flags
    starts = 1.0 if eager else GRAPHS_TAKE
    return [
        Toggle("restart", "the same prompts once more, without a restart", again=True, starts=starts),
        _batch(concurrency, starts),
        Toggle("graphs", EAGER, (EAGER,), why_not="it runs eager already" if eager else None),
        _prefix_cache(flags, starts),
        _chunks(resolved.get("scheduler.max_num_batched_tokens"), prompts, concurrency, starts),
    ]


def _batch(concurrency: int, starts: float) -> Toggle:
    why_not = "requests are sent one at a time already" if concurrency == 1 else None
    return Toggle("batch", "one request at a time", concurrency=1, starts=starts, why_not=why_not)


def _prefix_cache(flags: Sequence[str], starts: float) -> Toggle:
    off = NO_PREFIX_CACHE
    return Toggle("prefix cache", off, (off,), starts=starts, why_not="it is off already" if off in flags else None)


def _chunks(tokens: Any, prompts: Sequence[int], concurrency: int, starts: float) -> Toggle:
    """A pass large enough for all prompts that may come together cuts none of them."""
    needed = sum(sorted(prompts, reverse=True)[:concurrency])
    setting = f"--max-num-batched-tokens {needed}"
    why_not = None
    if not isinstance(tokens, int):
        why_not = "the engine does not say how many tokens it takes a pass"
    elif tokens >= needed:
        why_not = f"no prompt is cut: a pass takes {tokens:,} tokens, the {concurrency} longest prompts have {needed:,}"
    return Toggle("chunk size", setting, tuple(setting.split()), starts=starts, why_not=why_not)
