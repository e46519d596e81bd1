"""Two places of one config that say different things, and who believes which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.dialects import ids, rope
from eyas.dialects.keys import Keys
from eyas.dialects.wiring import Source, TargetFacts


@dataclass(frozen=True)
class Contradiction:
    """``inner`` is the value inside the block that ``key`` starts with, ``outer`` the one at top level. ``readers``:
    whoever reads this pair, with the place that counts there."""

    key: str
    inner: Any
    outer: Any
    readers: Mapping[str, str]
    source: Source


def contradictions(config: Mapping[str, Any], target: TargetFacts | None = None) -> tuple[Contradiction, ...]:
    """Rows for a drafter's config. With a target, ids are compared as the taps that their readers make of them.

    Raises CheckpointError where a value is not of the type its key is for.
    """
    keys = Keys(config)
    return (*_ids(keys, target), *_switches(keys), *_rope(keys), *_decoder(keys))


def _ids(keys: Keys, target: TargetFacts | None) -> list[Contradiction]:
    deep, top = keys.inside("eagle_config").ids(ids.KEY), keys.ids(ids.KEY)
    if deep is None or top is None:
        return []
    if ids.captured(deep, target) == ids.taps(top, "tap"):
        return []
    readers = {
        "sglang": "inner",
        "vllm": "outer",
        "tensorrt-llm": "inner",
        "specforge": "inner",
        "llama.cpp": "neither",
    }
    source = Source(
        "sglang 0.5.23 model_runner_components/spec_aux_hidden_state.py:185; "
        "vllm 0.32.0 v1/worker/gpu_model_runner.py:5251, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100"
    )
    return [Contradiction(ids.INNER, list(deep), list(top), readers, source)]


# A switch at two levels: who takes the one inside eagle_config, who the one at top level.
_SWITCHES: tuple[tuple[str, str, Mapping[str, str], str], ...] = (
    (
        "norm_before_fc",
        "norm_before_fc",
        {"sglang": "inner", "vllm": "inner", "tensorrt-llm": "inner"},
        "sglang 0.5.23 models/llama_eagle3.py:173; vllm 0.32.0 models/llama_eagle3.py; "
        "tensorrt-llm 00679c66 modeling_speculative.py",
    ),
    ("fc_norm", "fc_norm", {"sglang": "outer", "vllm": "outer"}, "sglang 0.5.23 models/llama_eagle3.py:184"),
    ("norm_output", "norm_output", {"sglang": "outer", "vllm": "outer"}, "sglang 0.5.23 models/llama_eagle3.py:207"),
    (
        "return_hidden_post_norm",
        "norm_output",
        {"sglang": "outer", "vllm": "outer", "tensorrt-llm": "either"},
        "tensorrt-llm 00679c66 modeling_speculative.py",
    ),
    (
        "norm_before_residual",
        "norm_before_residual",
        {"vllm": "outer", "sglang": "neither", "tensorrt-llm": "neither"},
        "vllm 0.32.0 models/llama_eagle3.py:101",
    ),
)


def _switches(keys: Keys) -> list[Contradiction]:
    block = keys.inside("eagle_config")
    rows = []
    for inner, outer, readers, where in _SWITCHES:
        if inner in block and outer in keys:
            within, without = block.flag(inner).value, keys.flag(outer).value
            if within != without:
                rows.append(Contradiction(f"eagle_config.{inner}", within, without, readers, Source(where)))
    return rows


def _rope(keys: Keys) -> list[Contradiction]:
    block = keys.inside("rope_parameters")
    if "sliding_attention" in block or not block.config:
        return []
    legacy = {**keys.inside("rope_scaling").config}
    rows = []
    readers = {"transformers 5": "inner", "sglang": "inner", "vllm": "inner", "transformers 4": "outer"}
    source = Source("sglang 0.5.23 models/llama.py:322; specforge a6b6b02 export/checkpoint_io.py:35")
    if "rope_theta" in keys and "rope_theta" in block:
        within, without = block.config["rope_theta"], keys.config["rope_theta"]
        if within != without:
            rows.append(Contradiction("rope_parameters.rope_theta", within, without, readers, source))
    if "rope_scaling" in keys:
        within, without = (rope.normal({**p, "rope_theta": None}) for p in (block.config, legacy))
        if within != without:
            rows.append(Contradiction("rope_parameters", dict(block.config), legacy, readers, source))
    return rows


def _decoder(keys: Keys) -> list[Contradiction]:
    """A shape written beside ``transformer_layer_config``, where whoever reads that format looks first."""
    layer = keys.inside("transformer_layer_config")
    readers = {"speculators": "inner", "vllm": "inner", "sglang": "neither"}
    source = Source("vllm 0.32.0 transformers_utils/configs/speculators/base.py:65")
    return [
        Contradiction(f"transformer_layer_config.{key}", layer.config[key], keys.config[key], readers, source)
        for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "rope_theta")
        if key in layer and key in keys and layer.config[key] != keys.config[key]
    ]
