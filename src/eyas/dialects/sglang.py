"""SGLang 0.5.23: ``eagle_config.eagle_aux_hidden_state_layer_ids``.

For most targets an id k captures after layer k, which is tap k+1. Sources: models/llama.py:929, qwen2.py:781,
qwen3.py:778, gemma3_causal.py:917 (+1); models/deepseek_v2.py:3458 and glm4_moe_lite.py:805 (+1 only if the first id
is 1); models/gpt_oss.py:1337 (as given if the largest id is n). A list is a set of layers: states are concatenated in
execution order. The top-level key is not read for capture.

Its drafter is models/llama_eagle3.py; what that cannot do is what ``refusals`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIRST_ID_RULE = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK2ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
LAST_ID_RULE = ("GptOssForCausalLM",)
# Capture happens at the entrance of a layer; only these look once more after their loop (gpt_oss.py:723,
# gemma3_causal.py:669, gemma4_causal.py:1091, minimax_m3.py:1959), so elsewhere tap n is never reached.
REACH_LAST_TAP = (
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "MiniMaxM3ForCausalLM",
)


# These keep hidden and residual apart from layer to layer and hand the drafter the first alone: what a layer's MLP
# branch adds, not the stream (gemma3_causal.py:369 and :635).
CAPTURE_A_BRANCH = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")


def captured(config: Mapping[str, Any], architecture: str, num_layers: int) -> list[int]:
    """Taps this engine captures for a drafter's config, in concatenation order."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return [2, num_layers // 2, num_layers - 3]
    taps = {k + _offset(ids, architecture, num_layers) for k in ids}
    last = num_layers if architecture in REACH_LAST_TAP else num_layers - 1
    return sorted(t for t in taps if 0 <= t <= last)


def _offset(ids: Sequence[int], architecture: str, num_layers: int) -> int:
    if architecture in FIRST_ID_RULE:
        return 1 if ids and ids[0] == 1 else 0
    if architecture in LAST_ID_RULE:
        return 0 if ids and max(ids) == num_layers else 1
    return 1


def spell(taps: Sequence[int], architecture: str, num_layers: int) -> list[int] | None:
    """Ids that make SGLang capture ``taps``, or None where no list does."""
    for offset in (1, 0):
        ids = [t - offset for t in taps]
        if captured({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, architecture, num_layers) == list(
            taps
        ):
            return ids
    return None


def refusals(shape: Mapping[str, Any], architecture: str, num_layers: int) -> list[str]:
    """Why this engine cannot run a drafter of ``shape`` (DrafterConfig as a dict) on such a target; empty if it can."""
    taps, reasons = list(shape["taps"]), []
    if spell(taps, architecture, num_layers) is None:
        reasons.append(f"no list of layers makes it capture taps {taps} of {architecture}")
    if architecture in CAPTURE_A_BRANCH and any(taps):
        reasons.append(f"of {architecture} it captures the last branch of a layer, not the residual stream")
    if len(taps) * shape["target_hidden_size"] == shape["hidden_size"]:  # llama_eagle3.py:238
        reasons.append("it skips fc where what fc takes is as wide as what it gives")
    if shape["norm_before_residual"]:  # no line of it reads the key
        reasons.append("its residual always starts before hidden_norm (norm_before_residual is not read)")
    if shape["attention_bias"]:  # llama_eagle3.py:70
        reasons.append("its queries, keys and values have no bias")
    if shape["qk_norm"]:  # llama_eagle3.py:325, load_weights: names it has no parameter for are dropped
        reasons.append("its queries and keys have no norm")
    if shape["own_embedding"] and shape["target_hidden_size"] == shape["hidden_size"]:  # llama.py:910
        reasons.append("it puts the target's embedding in the place of the drafter's own")
    return reasons
