"""What SGLang 0.5.23 and vLLM 0.32.0 capture for the ids of a config, and a config that both read as its contract.

The SGLang numbers were got by executing its own setters, on 61 and 36 layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.contract import Contract, declared
from eyas.dialects import hf, sglang, vllm
from eyas.errors import CheckpointError

LLAMA, DEEPSEEK, GLM, GPT_OSS = (
    "LlamaForCausalLM",
    "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
)


def inside(ids: Sequence[int]) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}


# -- SGLang ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "n", "ids", "taps"),
    [
        (LLAMA, 61, [2, 30, 58], [3, 31, 59]),
        (GPT_OSS, 61, [2, 30, 58], [3, 31, 59]),
        ("Qwen3ForCausalLM", 61, [2, 30, 58], [3, 31, 59]),
        (DEEPSEEK, 61, [2, 30, 58], [2, 30, 58]),
        (GLM, 61, [2, 30, 58], [2, 30, 58]),
        (LLAMA, 61, [-1, 2, 30], [0, 3, 31]),
        (DEEPSEEK, 61, [-1, 2, 30], [2, 30]),  # -1 is never reached, so one state is missing
        (GLM, 61, [-1, 2, 30], [2, 30]),
        (DEEPSEEK, 61, [0, 3, 31], [0, 3, 31]),
        (GLM, 61, [0, 3, 31], [0, 3, 31]),
        (LLAMA, 61, [0, 3, 31], [1, 4, 32]),
        (GPT_OSS, 61, [0, 3, 31], [1, 4, 32]),
        (DEEPSEEK, 61, [1, 29, 57], [2, 30, 58]),  # the first id is 1: counted as everywhere else
        (GPT_OSS, 36, [1, 17, 36], [1, 17, 36]),
        (LLAMA, 36, [1, 17, 36], [2, 18]),  # nor is what lies past the last layer
        (DEEPSEEK, 36, [1, 17, 36], [2, 18]),
        (LLAMA, 36, [17, 1, 29], [2, 18, 30]),  # a set of layers, concatenated as they run
        (DEEPSEEK, 36, [17, 1, 29], [1, 17, 29]),  # the first as written, not the least
        (LLAMA, 36, [1, 1, 17], [2, 18]),
    ],
)
def test_sglang_captures(architecture: str, n: int, ids: list[int], taps: list[int]) -> None:
    assert sglang.captured(inside(ids), architecture, n) == taps


@pytest.mark.parametrize("architecture", [LLAMA, DEEPSEEK, GPT_OSS])
@pytest.mark.parametrize(("n", "default"), [(61, [2, 30, 58]), (36, [2, 18, 33]), (30, [2, 15, 27])])
def test_sglang_without_ids(architecture: str, n: int, default: list[int]) -> None:
    assert sglang.captured({}, architecture, n) == default
    assert sglang.captured({"eagle_config": None}, architecture, n) == default
    assert sglang.captured({"eagle_config": {"use_aux_hidden_state": True}}, architecture, n) == default
    assert sglang.captured({"eagle_aux_hidden_state_layer_ids": [0, 3, 31]}, architecture, n) == default


@pytest.mark.parametrize(
    ("taps", "architecture", "n", "ids"),
    [
        ([2, 15, 27], LLAMA, 30, [1, 14, 26]),
        ([0, 3, 31], LLAMA, 61, [-1, 2, 30]),
        ([0, 3, 31], DEEPSEEK, 61, [0, 3, 31]),
        ([0, 3, 31], GLM, 61, [0, 3, 31]),
        ([2, 30, 58], DEEPSEEK, 61, [1, 29, 57]),
        ([3, 30, 58], DEEPSEEK, 61, [3, 30, 58]),
        ([1, 30, 58], DEEPSEEK, 61, None),  # id 1 in front turns the meaning of the list, id 0 does not
        ([2, 18, 33], GPT_OSS, 36, [1, 17, 32]),
        ([2, 18, 36], GPT_OSS, 36, [1, 17, 35]),
        ([0, 18, 33], GPT_OSS, 36, [-1, 17, 32]),
        ([27, 2, 15], LLAMA, 30, None),
        ([2, 2, 15], LLAMA, 30, None),
    ],
)
def test_sglang_spells(taps: list[int], architecture: str, n: int, ids: list[int] | None) -> None:
    assert sglang.spell(taps, architecture, n) == ids


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 35), min_size=1, max_size=4),
    st.sampled_from([LLAMA, *sglang.FIRST_ID_RULE, *sglang.LAST_ID_RULE]),
)
def test_what_sglang_spells_it_captures(chosen: set[int], architecture: str) -> None:
    taps = sorted(chosen)
    ids = sglang.spell(taps, architecture, 36)
    if ids is None:
        assert architecture in sglang.FIRST_ID_RULE
        assert taps[0] == 1
    else:
        assert sglang.captured(inside(ids), architecture, 36) == taps


@pytest.mark.parametrize("architecture", [LLAMA, "Qwen2ForCausalLM", "Qwen3ForCausalLM", DEEPSEEK])
def test_sglang_cannot_capture_the_last_layers_output(architecture: str) -> None:
    """Capture happens at the entrance of a layer, so tap n needs code after the loop; gpt-oss and Gemma have it."""
    assert sglang.spell([2, 18, 36], architecture, 36) is None


# -- vLLM -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("taps", [[2, 30, 58], [0, 3, 31], [1, 17, 36]])
def test_vllm_ids_are_taps(runner: Any, taps: list[int]) -> None:
    config = {"eagle_aux_hidden_state_layer_ids": taps, **inside([7, 8, 9])}
    assert vllm.captured(config, 61, runner) == taps
    assert vllm.spell(taps) == taps


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_sorts_and_makes_distinct(runner: Any) -> None:
    assert vllm.captured({"eagle_aux_hidden_state_layer_ids": [31, 3, 0, 3]}, 61, runner) == [0, 3, 31]


def test_the_runners_differ_on_eagle_config_alone() -> None:
    assert vllm.captured(inside([0, 3, 31]), 61, "v1") == [0, 3, 31]
    assert vllm.captured(inside([0, 3, 31]), 61, "v2") == [2, 30, 58]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_without_ids(runner: Any) -> None:
    assert vllm.captured({}, 61, runner) == [2, 30, 58]
    assert vllm.captured({"eagle_config": None}, 36, runner) == [2, 18, 33]


# -- the config both read -------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "taps": (2, 15, 27),
    "target_hidden_size": 576,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_before_residual": False,
    "norm_output": False,
}


WRITTEN = {**SHAPE, "qk_norm": False}  # what a config does not say: it is in the names of tensors


def contract(taps: list[int], architecture: str = LLAMA, n: int = 30) -> Contract:
    return declared(taps=taps, target={"fingerprint": "f", "architecture": architecture, "num_layers": n})


def written(taps: list[int], architecture: str = LLAMA, n: int = 30, **shape: Any) -> dict[str, Any]:
    config = hf.write({**WRITTEN, "taps": taps, **shape}, contract(taps, architecture, n), "ab" * 32, "bfloat16")
    return dict(json.loads(json.dumps(config)))


@pytest.mark.parametrize("architecture", [LLAMA, DEEPSEEK, "DeepseekV3ForCausalLM", GLM, GPT_OSS, "Gemma3ForCausalLM"])
@pytest.mark.parametrize("taps", [[2, 18, 33], [0, 3, 31], [0, 1, 2], [5, 6, 35], [4]])
def test_every_engine_reads_the_contracts_taps(architecture: str, taps: list[int]) -> None:
    config = written(taps, architecture, 36)
    assert vllm.captured(config, 36, "v1") == taps
    assert vllm.captured(config, 36, "v2") == taps
    assert sglang.captured(config, architecture, 36) == taps
    assert config["eagle_config"]["use_aux_hidden_state"] is True


def test_the_two_spellings_of_a_config() -> None:
    config = written([2, 15, 27])
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True}


def test_what_sglang_cannot_express_is_left_out() -> None:
    config = written([1, 18, 33], DEEPSEEK, 36)
    assert "eagle_config" not in config
    assert vllm.captured(config, 36, "v2") == [1, 18, 33]


def test_the_keys_of_a_config_are_these() -> None:
    assert list(written([2, 15, 27])) == [
        "architectures",
        "model_type",
        "attention_bias",
        "dtype",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "norm_before_residual",
        "num_attention_heads",
        "num_aux_hidden_states",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_theta",
        "target_hidden_size",
        "tie_word_embeddings",
        "vocab_size",
        "eagle_config",
        "eyas",
    ]


def test_the_values_of_a_config_are_those_of_the_shape() -> None:
    config = written([2, 15, 27])
    same = set(SHAPE) - {"taps", "norm_before_fc", "fc_norm", "norm_output"}
    assert {key: config[key] for key in same} == {key: SHAPE[key] for key in same}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["dtype"] == "bfloat16"
    assert config["rope_theta"] == 100000.0
    assert config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False
    assert config["norm_before_residual"] is False
    assert set(config["eyas"]) == {"schema", "contract", "weights_sha256"}
    assert config["eyas"]["schema"] == 1


def test_switches_are_written_where_they_are_on() -> None:
    """The names both engines read; ``norm_output: false`` would mean something else to SpecForge."""
    usual = written([2, 15, 27])
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        assert key not in usual
        config = written([2, 15, 27], **{key: True})
        assert config[key] is True
        assert {k: v for k, v in config.items() if k != key} == usual
        assert hf.read_shape(config, (2, 15, 27), "config.json") == {**SHAPE, key: True}
    for key, value in (("norm_before_residual", True), ("attention_bias", True), ("num_hidden_layers", 2)):
        config = written([2, 15, 27], **{key: value})
        assert config == {**usual, key: value}
        assert hf.read_shape(config, (2, 15, 27), "config.json") == {**SHAPE, key: value}


def test_norm_before_fc_inside_eagle_config_comes_first() -> None:
    """As SGLang and vLLM look for it."""
    config = written([2, 15, 27], norm_before_fc=True)
    config["eagle_config"]["norm_before_fc"] = False
    assert hf.read_shape(config, (2, 15, 27), "config.json")["norm_before_fc"] is False


def test_the_number_of_taps_is_written_for_vllm() -> None:
    """Without an eagle_config, as here for SGLang's sake, vLLM would build fc for three."""
    config = written([1, 33], DEEPSEEK, 36)
    assert "eagle_config" not in config
    assert config["num_aux_hidden_states"] == 2


@pytest.mark.parametrize(
    ("change", "architecture", "reason"),
    [
        ({"norm_before_residual": True}, LLAMA, "norm_before_residual is not read"),
        ({"own_embedding": True}, LLAMA, "in the place of the drafter's own"),
        ({"attention_bias": True}, LLAMA, "have no bias"),
        ({"taps": (27,)}, LLAMA, "skips fc"),
        ({"taps": (2, 15, 30)}, LLAMA, r"capture taps \[2, 15, 30\] of LlamaForCausalLM"),
        ({}, "Gemma3ForCausalLM", "last branch of a layer"),
    ],
)
def test_sglang_refuses(change: dict[str, Any], architecture: str, reason: str) -> None:
    usual = {**WRITTEN, "own_embedding": False}
    assert sglang.refusals(usual, LLAMA, 30) == []
    (said,) = sglang.refusals({**usual, **change}, architecture, 30)
    assert re.search(reason, said)


@pytest.mark.parametrize("key", ["norm_before_fc", "fc_norm", "norm_output"])
def test_sglang_runs_the_switches_of_eagle_3_1(key: str) -> None:
    assert sglang.refusals({**WRITTEN, "own_embedding": False, key: True, "num_hidden_layers": 2}, LLAMA, 30) == []


def test_sglang_keeps_an_embedding_of_another_width() -> None:
    shape = {**WRITTEN, "own_embedding": True, "hidden_size": 512}
    assert sglang.refusals(shape, LLAMA, 30) == []


def test_scaled_rope_is_spelt_for_older_stacks_too() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    config = written([2, 15, 27], rope_parameters=rope)
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    assert "rope_scaling" not in written([2, 15, 27])


def test_contract_and_shape_come_back() -> None:
    config = written([2, 15, 27])
    back, digest = hf.read_contract(config, "config.json")
    assert back == contract([2, 15, 27])
    assert digest == "ab" * 32
    assert hf.read_shape(config, (2, 15, 27), "config.json") == SHAPE


def test_a_config_without_contract() -> None:
    config = written([2, 15, 27])
    del config["eyas"]
    assert hf.read_contract(config, "config.json") == (None, None)


def test_a_malformed_block_is_refused() -> None:
    with pytest.raises(CheckpointError, match="there: the 'eyas' key holds a list"):
        hf.read_contract({"eyas": []}, "there")
    with pytest.raises(CheckpointError, match="there: the contract is a NoneType"):
        hf.read_contract({"eyas": {"schema": 1}}, "there")


def test_older_spellings_of_the_shape_are_read() -> None:
    config = written([2, 15, 27])
    for key in ("rope_parameters", "head_dim", "draft_vocab_size"):
        del config[key]
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    config["target_hidden_size"] = 960
    shape = hf.read_shape(config, (2, 15, 27), "config.json")
    assert shape["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}
    assert shape["head_dim"] == 64
    assert shape["draft_vocab_size"] == 49152
    assert shape["target_hidden_size"] == 960
    del config["rope_scaling"], config["rope_theta"]
    default = hf.read_shape(config, (2, 15, 27), "config.json")["rope_parameters"]
    assert default == {"rope_type": "default", "rope_theta": 10000.0}


def test_missing_keys_of_the_shape_are_named() -> None:
    config = written([2, 15, 27])
    del config["hidden_size"]
    config["vocab_size"] = None
    with pytest.raises(CheckpointError, match=r"there: config\.json lacks hidden_size, vocab_size\."):
        hf.read_shape(config, (2, 15, 27), "there")
