"""vLLM 0.32.0: ids are taps.

The top-level ``eagle_aux_hidden_state_layer_ids`` is the first choice of both runners (V1:
v1/worker/gpu_model_runner.py:5251, V2: v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100). Failing that V1 takes
``eagle_config.eagle_aux_hidden_state_layer_ids`` as it stands and V2 ignores it. Ids are sorted and made distinct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Runner = Literal["v1", "v2"]


def captured(config: Mapping[str, Any], num_layers: int, runner: Runner) -> list[int]:
    """Taps this engine captures for a drafter's config, in concatenation order."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and runner == "v1":
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return [2, num_layers // 2, num_layers - 3]
    return sorted(set(ids))


def spell(taps: Sequence[int]) -> list[int]:
    """The top-level ids that make both runners capture ``taps``."""
    return list(taps)
