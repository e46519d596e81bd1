"""SGLang 0.5.23: ``eagle_config.eagle_aux_hidden_state_layer_ids``.

For most targets an id k captures after layer k, which is tap k+1. Sources: models/llama.py:929, qwen2.py:781,
qwen3.py:778, gemma3_causal.py:917 (+1); models/deepseek_v2.py:3458 and glm4_moe_lite.py:805 (+1 only if the first id
is 1); models/gpt_oss.py:1337 (as given if the largest id is n). A list is a set of layers: states are concatenated in
execution order. The top-level key is not read for capture.
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
