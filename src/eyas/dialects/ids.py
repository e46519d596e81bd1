"""Layer numbers of a drafter's config, which two conventions count differently under one key name.

    layer output   k is the state after layer k, counted from 0: tap k + 1   SpecForge, ModelOpt on Hugging Face, SGLang
    tap            k is the state after k layers                            speculators, ModelOpt on vLLM, vLLM, EAGLE

No key says which. Everybody's default is taps [2, n//2, n-3], so ids that spell these three in one convention all but
name it; an id that lies outside the target in one of them does too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.dialects import sglang
from eyas.dialects.wiring import Source, TargetFacts

KEY = "eagle_aux_hidden_state_layer_ids"
INNER = f"eagle_config.{KEY}"
Counting = Literal["layer output", "tap"]
_OFFSET: dict[Counting, int] = {"layer output": 1, "tap": 0}


def taps(ids: Sequence[int], counting: Counting) -> tuple[int, ...]:
    """Taps in concatenation order: whoever captures does so as the layers run."""
    return tuple(sorted({k + _OFFSET[counting] for k in ids}))


def captured(inner: Sequence[int], target: TargetFacts | None) -> tuple[int, ...]:
    """What SGLang makes of ids inside ``eagle_config``: by its rule for this target, or for most targets."""
    if target is None:
        return taps(inner, "layer output")
    config = {"eagle_config": {KEY: list(inner)}}
    return tuple(sglang.captured(config, target.architecture, target.num_layers))


def readings(ids: Sequence[int], num_layers: int | None) -> dict[Counting, tuple[int, ...]]:
    """The countings under which no id lies outside the target, each with its taps."""
    both: dict[Counting, tuple[int, ...]] = {counting: taps(ids, counting) for counting in _OFFSET}
    return {c: t for c, t in both.items() if t[0] >= 0 and (num_layers is None or t[-1] <= num_layers)}


def default_in(ids: Sequence[int], num_layers: int | None) -> Counting | None:
    """The counting in which ids are the three default taps of a target of ``num_layers``, where that is known."""
    if num_layers is None or num_layers <= 5:
        return None
    default = (2, num_layers // 2, num_layers - 3)
    return next((c for c, offset in _OFFSET.items() if tuple(k + offset for k in ids) == default), None)


@dataclass(frozen=True)
class Trouble:
    """Something wrong with a list of ids whatever its counting, or under the only reader of its key."""

    key: str
    ids: tuple[int, ...]
    what: Literal["out of range", "negative", "repeated", "unsorted"]
    why: str
    source: Source


def troubles(key: str, ids: Sequence[int], num_layers: int | None) -> tuple[Trouble, ...]:
    """Rows for a list of layer numbers of a config, ``key`` as dotted path."""
    found: list[Trouble] = []

    def row(what: Literal["out of range", "negative", "repeated", "unsorted"], why: str, where: str) -> None:
        found.append(Trouble(key, tuple(ids), what, why, Source(where)))

    if below := [k for k in ids if k < 0]:
        why = f"{below} is tap {[k + 1 for k in below]} only to a reader that adds one; to others no layer matches it"
        row("negative", why, "sglang 0.5.23 models/llama.py:929, models/deepseek_v2.py:3458")
    if num_layers is not None and (beyond := [k for k in ids if k > num_layers]):
        why = f"{beyond} lies beyond the {num_layers} layers of the target in every counting, so a state is missing"
        row("out of range", why, "vllm 0.32.0 model_executor/models/interfaces.py:1601")
    elif num_layers is not None and num_layers in ids:
        why = f"{num_layers} is the last tap to a reader of taps, and beyond the target to one that adds one"
        row("out of range", why, "sglang 0.5.23 models/llama.py:929")
    if len(set(ids)) < len(ids):
        row(
            "repeated",
            "engines hold ids as a set, so fewer states arrive than fc takes",
            "sglang 0.5.23 models/llama.py:485; vllm 0.32.0 model_executor/models/interfaces.py:1569",
        )
    if list(ids) != sorted(ids):
        row(
            "unsorted",
            "engines concatenate as the layers run; AngelSlim trains in the order of the list, as does vLLM's "
            "transformers backend",
            "angelslim 67394ce train/models/target/target_model_wrapper.py:629; "
            "vllm 0.32.0 model_executor/models/transformers/base.py:828",
        )
    return tuple(found)
