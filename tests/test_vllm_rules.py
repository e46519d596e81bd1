"""vLLM's rules one by one: targets, runners, flags, keys, bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from packaging.version import Version

from eyas.dialects import vllm
from eyas.dialects.vllm import reading
from eyas.dialects.vllm.keys import taps_built_for
from eyas.dialects.wiring import Files, Launch, TargetFacts, Wiring
from eyas.errors import CheckpointError, UsageError
from vllm_said import IDS, SHAPE, wired


def of(architecture: str, ids: list[int], n: int = 36, *flags: str, runner: Any = "v2") -> Wiring:
    return wired({**SHAPE, IDS: ids}, TargetFacts(architecture, n, 64, 99), *flags, runner=runner)


def test_a_tap_no_layer_matches_is_lost_and_fc_starves() -> None:
    fates = {(2, 18, 36): (2, 18, 36), (2, 18, 37): (2, 18), (-1, 2, 18): (2, 18), (2, 2, 9): (2, 9)}
    for ids, arrive in fates.items():
        wiring = of("LlamaForCausalLM", list(ids))
        assert wiring.taps == arrive
        starved = [(r.cause, r.when) for r in wiring.refusals]
        assert starved == ([] if len(arrive) == 3 else [("taps-too-few", "first forward")])


def test_tap_0_of_deepseek() -> None:
    wiring = of("DeepseekV3ForCausalLM", [0, 2, 18])
    assert [(r.when, "TypeError" in r.why) for r in wiring.refusals] == [("first forward", True)]
    assert not of("Qwen3ForCausalLM", [0, 2, 18]).refusals


def test_the_last_tap_of_deepseek_v32() -> None:
    assert of("DeepseekV32ForCausalLM", [2, 18, 36]).taps == (2, 18)
    assert of("DeepseekV3ForCausalLM", [2, 18, 36]).taps == (2, 18, 36)


def test_the_transformers_backend_keeps_the_order_of_the_config() -> None:
    asked_for = of("LlamaForCausalLM", [18, 2, 30], 36, "--model-impl", "transformers")
    for wiring in (of("Olmo2ForCausalLM", [18, 2, 30]), asked_for):
        assert wiring.taps == (18, 2, 30)
    assert of("LlamaForCausalLM", [18, 2, 30]).taps == (2, 18, 30)
    assert [r.when for r in of("Olmo2ForCausalLM", [0, 2, 18]).refusals] == ["start"]


def test_a_target_class_without_the_interface() -> None:
    (stop,) = of("Gemma3ForCausalLM", [2, 18, 30]).refusals
    assert stop.when == "start"
    assert "--model-impl transformers" in stop.why
    assert not of("Gemma3ForCausalLM", [2, 18, 30], 36, "--model-impl", "transformers").refusals


def test_without_a_target_only_explicit_ids_are_known() -> None:
    assert wired({**SHAPE, IDS: [5, 1]}, None).taps == (1, 5)
    unknown = wired(SHAPE, None)
    assert unknown.taps is None
    assert "taps" not in unknown.facts


def test_a_drafter_without_aux_states() -> None:
    config = {**SHAPE, "eagle_config": {"use_aux_hidden_state": False}}
    v1, v2 = (wired(config, TargetFacts("LlamaForCausalLM", 36, 64, 99), runner=r) for r in ("v1", "v2"))
    for wiring in (v1, v2):
        assert wiring.taps is None
        assert wiring.facts["fc"] == "skipped"
    assert [cause for cause, _, _ in v1.warnings] == ["tap-post-norm"]
    assert [(r.cause, r.when) for r in v2.refusals] == [("engine-cannot-express", "first forward")]


# -- runner, version, flags -----------------------------------------------------------------------------------


def test_without_a_runner_it_is_v2_and_a_different_v1_is_said() -> None:
    config = {**SHAPE, "eagle_config": {IDS: [1, 17, 32]}}
    wiring = wired(config, TargetFacts("LlamaForCausalLM", 36, 64, 99))
    assert (wiring.runner, wiring.taps) == ("v2", (2, 18, 33))
    ((cause, said, _),) = wiring.warnings
    assert cause == "taps-engine-default"
    assert "[1, 17, 32]" in said
    assert wired(config, TargetFacts("LlamaForCausalLM", 36, 64, 99), "VLLM_USE_V2_MODEL_RUNNER=0").taps == (1, 17, 32)
    assert not of("LlamaForCausalLM", [1, 17, 32]).warnings


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 4}'),
        ('--speculative-config={"method": "eagle3", "num_speculative_tokens": 4}',),
        ("-sc", '{"method": "eagle3", "num_speculative_tokens": 4}'),
        ('{"method": "eagle3", "num-speculative-tokens": 4}',),
        ("--speculative-config.method", "eagle3", "--speculative-config.num_speculative_tokens", "4"),
        ("--spec-method", "eagle3", "--spec-tokens", "4", "--max-model-len", "8k"),
    ],
)
def test_every_way_to_write_the_flags(flags: tuple[str, ...]) -> None:
    wiring = of("LlamaForCausalLM", [2, 18, 33], 36, *flags)
    assert not wiring.refusals
    assert {note.flag: note.resolved for note in wiring.flags}["method"] == "eagle3"


def test_flags_that_are_no_command_line() -> None:
    for flags, said in (
        (("--speculative-config", "{method: eagle3}"), "no JSON"),
        (("-sc", "[1]"), "an object was expected"),
        (("--max-model-len", "long"), "a number of tokens was expected"),
    ):
        with pytest.raises(UsageError, match=said):
            of("LlamaForCausalLM", [2], 36, *flags)


def test_made_up_acceptance_is_warned_of() -> None:
    flags = json.dumps(
        {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
         "synthetic_acceptance_length": 2.5}
    )  # fmt: skip
    assert [cause for cause, _, _ in of("LlamaForCausalLM", [2, 18, 33], 36, flags).warnings] == ["acceptance-faked"]


def test_another_version_is_answered_by_the_nearest_and_said() -> None:
    wiring = vllm.wire(Files(SHAPE), None, Launch(Version("0.31.2")))
    assert "0.31.2" in str(wiring.assumed)
    assert vllm.VERSIONS[-1] in str(wiring.assumed)
    assert vllm.wire(Files(SHAPE), None, Launch(Version("0.32.0+cpu"))).assumed is None


# -- keys -----------------------------------------------------------------------------------------------------


def effects(config: dict[str, Any], runner: Any = "v2") -> dict[str, tuple[str, Any]]:
    wiring = wired({**SHAPE, **config}, TargetFacts("LlamaForCausalLM", 36, 64, 99), runner=runner)
    return {note.key: (note.effect, note.value) for note in wiring.keys}


def test_a_list_that_does_not_decide_is_noted_by_runner() -> None:
    config = {"eagle_config": {IDS: [1, 17, 32]}}
    assert effects(config)[f"eagle_config.{IDS}"] == ("ignored", [1, 17, 32])
    assert effects(config)[IDS] == ("defaulted", [2, 18, 33])
    assert f"eagle_config.{IDS}" not in effects(config, "v1")
    assert effects({"eagle_config": {"layer_ids": [1, 2, 3]}}, "v1")["eagle_config.layer_ids"][0] == "ignored"
    assert effects({IDS: [9, 2, 5]})[IDS] == ("overridden", [9, 2, 5])


@pytest.mark.parametrize(
    ("config", "key", "effect"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings", ("ignored", True)),
        ({"use_aux_norm": True}, "use_aux_norm", ("ignored", True)),
        ({"dtype": "float16"}, "dtype", ("overridden", "float16")),
        ({}, "norm_before_residual", ("defaulted", False)),
        ({}, "draft_vocab_size", ("defaulted", 99)),
        ({"draft_vocab_size": None}, "draft_vocab_size", ("defaulted", 99)),
        ({"num_hidden_layers": None}, "num_hidden_layers", ("defaulted", 32)),
        ({"num_aux_hidden_states": None}, "num_aux_hidden_states", ("defaulted", 3)),
        ({}, "rope_theta", ("defaulted", 10000.0)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e6}, "rope_theta", ("ignored", 1e6)),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters",
         ("ignored", {"rope_theta": 5e5})),
        ({"sliding_window": 64}, "sliding_window", ("ignored", 64)),
        ({"eagle_config": {"norm_before_fc": False}, "norm_before_fc": True}, "norm_before_fc", ("ignored", True)),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "norm_before_fc": True}, "norm_before_fc",
         ("ignored", True)),
    ],
)  # fmt: skip
def test_a_key_is_noted_as_it_is_taken(config: dict[str, Any], key: str, effect: Any) -> None:
    assert effects(config)[key] == effect


def test_speculators_files_default_the_other_way() -> None:
    layer = {k: v for k, v in SHAPE.items() if k not in ("architectures", "num_aux_hidden_states")}
    config = {"speculators_config": {}, "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    wiring = wired(config, TargetFacts("LlamaForCausalLM", 36, 64, 99))
    assert wiring.facts["residual"] == "after hidden_norm"
    assert ("norm_before_residual", "defaulted", True) in [(n.key, n.effect, n.value) for n in wiring.keys]
    assert taps_built_for(reading.read(config)) == (3, "nothing")
    assert wired({**config, "model_type": "llama"}, None).facts["residual"] == "before hidden_norm"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({IDS: "2,18,33"}, f"{IDS} of config.json is '2,18,33'; a list of layer numbers"),
        ({IDS: [2, "x"]}, "a list of layer numbers"),
        ({IDS: [True, 2]}, "a list of layer numbers"),
        ({"eagle_config": [1]}, "eagle_config of config.json is .*an object"),
        ({"eagle_config": {IDS: 3}}, rf"eagle_config\.{IDS} of config.json"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers .* a number above zero"),
        ({"norm_output": "yes"}, "norm_output .* true or false"),
        ({"architectures": "Llama"}, "a list of names"),
        ({"rope_parameters": []}, "rope_parameters .* an object"),
        ({"rope_theta": "high"}, "rope_theta .* a number above zero"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_with_a_way_out(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        wired({**SHAPE, **config}, None)
    assert caught.value.way_out
