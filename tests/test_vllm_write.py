"""Configs written for vLLM are wired as their contract says; what it has no spelling for is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.contract import declared
from eyas.dialects import vllm
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts
from vllm_said import IDS, NEWEST, recorded

TARGET = TargetFacts("LlamaForCausalLM", 8, 48, 211)
CONTRACT: dict[str, Any] = {
    "taps": [1, 2, 5], "tap_state": "stream", "fc": "applied", "fc_norm": "none", "layers": 1, "attention": "gqa",
    "attention_bias": False, "qk_norm": False, "residual": "before hidden_norm", "head_norm": True,
    "feedback": "before the last norm", "token_shift": 1, "position_offset": 0,
    "rope": {"rope_type": "default", "rope_theta": 5e5}, "window": None, "max_positions": 256,
    "draft_vocab_size": 97,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
STARTS = {case["name"]: case["config"] for case in recorded("vllm-ask")["cases"]}
STARTS["norm inside"] = {**STARTS["both"], "eagle_config": {"norm_before_fc": True, "layer_ids": [1, 2, 3]}}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "start",
    ["top level", "norm inside", "inside eagle_config", "target_layer_ids", "switches", "speculators",
     "speculators, rope", "two thetas", "rope_scaling and rope_parameters", "qwen3 drafter, window",
     "unknown architecture", "null target_hidden_size", "dflash_config and eagle_config"],
)  # fmt: skip
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"taps": [0, 3, 8]},
        {"taps": [2, 4, 5]},
        {"taps": [4]},
        {"fc_norm": "joint"},
        {"fc_norm": "each", "layers": 2, "later_norm": "input_layernorm"},
        {"fc_norm": "joint, then each"},
        {"residual": "after hidden_norm"},
        {"feedback": "after the last norm"},
        {"attention_bias": True},
        {"qk_norm": True},
        {"qk_norm": True, "window": 64},
        {"window": 64},
        {"rope": LLAMA3},
        {"draft_vocab_size": 211},
        {"max_positions": 512},
    ],
    ids=str,
)
def test_what_is_written_is_read_back(start: str, change: dict[str, Any], runner: Any) -> None:
    contract = declared(**{**CONTRACT, **change})
    launch = Launch(NEWEST, runner)
    config = vllm.write(contract, {**STARTS[start], "eyas": {"schema": 1}}, TARGET, launch)
    wiring = vllm.wire(Files(json.loads(json.dumps(config))), TARGET, launch)
    assert list(contract.differences(wiring.facts)) == []
    assert set(contract) - set(wiring.facts) == set()
    assert not wiring.refusals
    assert config["eyas"] == {"schema": 1}
    assert config.get("norm_output") is not False  # to SpecForge that means no norm before the head
    assert vllm.write(contract, config, TARGET, launch) == config


@pytest.mark.parametrize(
    ("change", "fact", "nearest"),
    [
        ({"taps": [5, 1]}, "taps", [1, 5]),
        ({"taps": [1, 2, 9]}, "taps", [1, 2]),
        ({"taps": []}, "taps", None),
        ({"tap_state": "branch"}, "tap_state", "stream"),
        ({"fc": "skipped"}, "fc", "applied"),
        ({"later_norm": "hidden_norm", "layers": 2}, "later_norm", "input_layernorm"),
        ({"head_norm": False}, "head_norm", True),
        ({"token_shift": 2}, "token_shift", 1),
        ({"head": "target"}, "head", "own"),
        ({"vocab_map": "ids"}, "vocab_map", "offsets"),
        ({"vocab_map": "offsets", "draft_vocab_size": 211}, "vocab_map", "none"),
        ({"attention": "mla", "fc_norm": "joint"}, "fc_norm", "none"),
    ],
)
def test_what_it_has_no_spelling_for_is_refused(change: dict[str, Any], fact: str, nearest: Any) -> None:
    with pytest.raises(CannotExpress) as caught:
        vllm.write(declared(**{**CONTRACT, **change}), STARTS["top level"], TARGET, Launch(NEWEST))
    assert [(f.fact, f.nearest) for f in caught.value.facts] == [(fact, nearest)]


def test_targets_decide_what_can_be_written() -> None:
    def taps(architecture: str, ids: list[int], *flags: str) -> None:
        target = TargetFacts(architecture, 8, 48, 211)
        vllm.write(declared(taps=ids), STARTS["top level"], target, Launch(NEWEST, None, flags))

    for architecture, ids in (("DeepseekV3ForCausalLM", [0, 2]), ("Gemma3ForCausalLM", [2]), ("Olmo2ForCausalLM", [0])):
        with pytest.raises(CannotExpress):
            taps(architecture, ids)
    taps("Olmo2ForCausalLM", [5, 1])
    taps("Gemma3ForCausalLM", [5, 1], "--model-impl", "transformers")


def test_another_engines_list_is_left_alone() -> None:
    """One folder for two engines: this one never looks inside eagle_config where the top level has a list."""
    start = {**STARTS["top level"], "eagle_config": {IDS: [0, 1, 4], "use_aux_hidden_state": True}}
    config = vllm.write(declared(**CONTRACT), start, TARGET, Launch(NEWEST))
    assert config["eagle_config"] == start["eagle_config"]
    assert config[IDS] == [1, 2, 5]
