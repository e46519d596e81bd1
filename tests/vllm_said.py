"""What vLLM's own code said (fixtures/engines, recorded by the scripts in runs/), and the table asked the same."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from eyas.dialects import host, vllm
from eyas.dialects.wiring import Files, Launch, TargetFacts, Wiring
from eyas.inventory import TensorInfo

RECORDED = Path(__file__).parent / "fixtures" / "engines"
NEWEST = Version(vllm.VERSIONS[-1])


@cache
def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")))


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in recorded(name)["cases"]]


def wired(config: dict[str, Any], target: TargetFacts | None, *flags: str, runner: Any = None) -> Wiring:
    return vllm.wire(Files(config), target, Launch(NEWEST, runner, flags))


def said_by_vllm(case: dict[str, Any], runner: Any) -> Wiring:
    """A recorded case put to the table."""
    return wired(case["config"], host.from_config(case["target_config"], "target"), *case["flags"], runner=runner)


def judged(case: dict[str, Any], runner: Any = "v1") -> Wiring:
    tensors = {n: TensorInfo(n, "I64" if "2" in n else "F32", tuple(s), "f") for n, s in case["tensors"].items()}
    shape = recorded("vllm-weights")["target"]
    target = TargetFacts("LlamaForCausalLM", shape["num_layers"], shape["hidden_size"], shape["vocab_size"])
    return vllm.wire(Files(case["config"], tensors), target, Launch(NEWEST, runner))


IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 99,
    "num_hidden_layers": 1,
    "num_aux_hidden_states": 3,
}
