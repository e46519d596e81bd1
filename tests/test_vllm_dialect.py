"""vLLM's tables against what vLLM's own code said: fixtures/engines, recorded by the scripts in runs/."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from eyas import causes
from eyas.contract import FACTS, declared
from eyas.dialects import host, vllm
from eyas.dialects.vllm import reading, weights
from eyas.dialects.vllm.keys import taps_built_for
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts, Wiring
from eyas.errors import CheckpointError, UsageError
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
    """A recorded case put to the table; the folder's name, where it was to decide the method, as a path."""
    flags = list(case["flags"])
    if case["folder"] != "draft":
        at = flags.index("--speculative-config") + 1
        flags[at] = json.dumps({**json.loads(flags[at]), "model": f"/some/{case['folder']}"})
    return wired(case["config"], host.from_config(case["target_config"], "target"), *flags, runner=runner)


ASKED = cases("vllm-ask")
ANSWERED = [case for case in ASKED if "error" not in case.values[0]["answer"]]


def test_the_recordings_are_of_the_version_the_tables_are_of() -> None:
    for name in ("vllm-ask", "vllm-weights", "vllm-taps"):
        assert recorded(name)["version"] == vllm.VERSIONS[-1]
    assert len(ASKED) > 60


# -- vLLM's config objects and its selection functions --------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("case", ANSWERED)
def test_taps_are_those_its_own_functions_choose(case: dict[str, Any], runner: str) -> None:
    chosen = case["answer"]["taps"][runner]
    wiring = said_by_vllm(case, runner)
    if chosen is None:  # the target's class hands over none
        assert [r.cause for r in wiring.refusals] == ["engine-cannot-express"]
        return
    in_order = case["answer"]["target"]["class"].startswith("Transformers")
    assert wiring.taps == tuple(chosen if in_order else sorted(set(chosen)))
    assert wiring.facts["taps"] == list(wiring.taps or ())
    origin = "declared" if case["answer"]["from_config"][runner] else "defaulted"
    assert wiring.facts.facts["taps"].origin == origin


@pytest.mark.parametrize("case", ASKED)
def test_what_stops_it_is_said(case: dict[str, Any]) -> None:
    stops = [r for r in said_by_vllm(case, None).refusals if r.when == "start"]
    later = {"gemma3 target", "null target_hidden_size"}  # seen only when a model is built
    assert bool(stops) == ("error" in case["answer"] or case["name"] in later)


@pytest.mark.parametrize("case", ANSWERED)
def test_facts_are_what_its_config_classes_hand_to_the_drafter(case: dict[str, Any]) -> None:
    heard, facts = case["answer"]["drafter"]["config"], said_by_vllm(case, "v2").facts
    spoken = {False: "before hidden_norm", True: "after hidden_norm"}
    fed_back = {False: "before the last norm", True: "after the last norm"}
    rope = {k: v for k, v in heard.get("rope_parameters", {}).items() if k != "type"}
    assert facts["layers"] == heard["num_hidden_layers"]
    assert facts["residual"] == spoken[heard.get("norm_before_residual", False)]
    assert facts["feedback"] == fed_back[heard.get("norm_output", False)]
    assert facts["attention_bias"] == heard.get("attention_bias", False)
    assert facts["draft_vocab_size"] == (heard.get("draft_vocab_size") or heard["vocab_size"])
    assert facts["rope"] == (rope or {"rope_type": "default", "rope_theta": 10000.0})
    assert facts["max_positions"] == heard["max_position_embeddings"]
    sliding = heard.get("layer_types", [""])[0] == "sliding_attention"
    assert facts["window"] == (heard["sliding_window"] if sliding else None)
    norms = (heard.get("norm_before_fc", False), heard.get("fc_norm", False))
    words = {(False, False): "none", (True, False): "joint", (False, True): "each"}
    assert facts["fc_norm"] == words.get(norms, "joint, then each")


@pytest.mark.parametrize("case", ANSWERED)
def test_the_class_and_the_runner_are_those_it_takes(case: dict[str, Any]) -> None:
    read = reading.read(case["config"])
    assert read.architecture == case["answer"]["drafter"]["class"] or case["name"] == "method not told"
    cannot = case["answer"]["v2_cannot"]  # apart from Triton, which was not there
    assert said_by_vllm(case, None).runner == ("v1" if cannot else "v2")


@pytest.mark.parametrize("case", [case for case in ANSWERED if case.values[0]["answer"]["flags"]])
def test_flags_are_resolved_as_it_resolves_them(case: dict[str, Any]) -> None:
    theirs = {flag["flag"]: flag["resolved"] for flag in case["answer"]["flags"]}
    ours = {note.flag: note.resolved for note in said_by_vllm(case, None).flags}
    assert ours["method"] == theirs["method"]
    for name in ("draft_sample_method", "synthetic_acceptance_rates"):
        if name in ours:
            assert ours[name] == theirs[name]
    assert ("synthetic_acceptance_rates" in ours) == bool(theirs.get("synthetic_acceptance_rates"))


@pytest.mark.parametrize("case", ANSWERED)
def test_a_raised_limit_is_noted(case: dict[str, Any]) -> None:
    raised = any("max_position_embeddings from" in line["text"] for line in case["answer"]["said"])
    for runner in ("v1", "v2"):
        notes = [note.key for note in said_by_vllm(case, runner).keys if note.effect == "overridden"]
        assert any(key.endswith("max_position_embeddings") for key in notes) == raised


# -- vLLM's drafter classes and their loader ------------------------------------------------------------------


def judged(case: dict[str, Any], runner: Any = "v1") -> Wiring:
    tensors = {n: TensorInfo(n, "I64" if "2" in n else "F32", tuple(s), "f") for n, s in case["tensors"].items()}
    shape = recorded("vllm-weights")["target"]
    target = TargetFacts("LlamaForCausalLM", shape["num_layers"], shape["hidden_size"], shape["vocab_size"])
    return vllm.wire(Files(case["config"], tensors), target, Launch(NEWEST, runner))


def merged(names: set[str]) -> set[str]:
    """Our names of what is unfilled, as vLLM's parameters, which join what is multiplied together."""
    joins = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joins |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    made = set()
    for name in names:
        name = {"d2t": "draft_id_to_target_id"}.get(name, name if name.startswith("lm_head") else f"model.{name}")
        parts = [joins.get(part, part) for part in name.split(".")]
        made.add(".".join(parts))
    return made


@pytest.mark.parametrize("case", cases("vllm-weights"))
def test_tensors_fare_as_its_own_classes_let_them(case: dict[str, Any]) -> None:
    answer, wiring = case["answer"], judged(case)
    stops = [r for r in wiring.refusals if r.when == "start"]
    assert bool(stops) == ("raised" in answer)
    if "raised" in answer:
        return
    not_filled = {n.tensor for n in wiring.tensors if n.effect in ("unfilled", "shared")}
    never_called = {n for n in answer["left"] if n.endswith("hidden_norm.weight") and "layers.0" not in n}
    assert merged(not_filled) == set(answer["left"]) - never_called
    assert (wiring.facts["embedding"] == "own") == answer["has_own_embed_tokens"]
    assert (wiring.facts["head"] == "own") == answer["has_own_lm_head"]


def one(name: str, **changes: Any) -> Wiring:
    found = next(c for c in recorded("vllm-weights")["cases"] if c["name"] == name)
    return judged({**found, "config": {**found["config"], **changes}})


@pytest.mark.parametrize(
    ("name", "tensor", "loudness"),
    [
        ("input_norm off", "input_norm.weight", "silent"),
        ("qkv bias off", "midlayer.self_attn.q_proj.bias", "silent"),
        ("fc bias", "fc.bias", "silent"),
        ("mask_hidden", "mask_hidden", "warning"),
        ("norm_before_fc inside first", "input_norm.weight", "silent"),
        ("no aux", "fc.weight", "silent"),
        ("two layers, SGLang's norm", "layers.1.hidden_norm.weight", "silent"),
    ],
)
def test_a_tensor_that_is_dropped_is_said_with_its_loudness(name: str, tensor: str, loudness: str) -> None:
    found = {note.tensor: note for note in one(name).tensors if note.effect == "dropped"}
    assert found[tensor].loudness == loudness


def test_head_and_map_have_rules_of_their_own() -> None:
    assert one("usual").facts["vocab_map"] == "offsets"
    assert one("full vocabulary").facts["vocab_map"] == "none"
    lost = one("no map")
    assert lost.facts["vocab_map"] == "none"
    assert [cause for cause, _, _ in lost.warnings] == ["d2t-missing"]
    headless = one("no head")
    assert headless.facts["head"] == "target"
    assert [cause for cause, _, _ in headless.warnings] == ["head-missing"]
    assert [(n.tensor, n.effect, n.loudness) for n in headless.tensors if n.tensor == "lm_head.weight"] == [
        ("lm_head.weight", "shared", "info")
    ]
    (why,) = [r.why for r in one("full vocabulary with a map").refusals if r.when == "start"]
    assert "draft_id_to_target_id" in why


def test_an_embedding_of_another_width() -> None:
    """V1 keeps the drafter's own, which nothing fills; V2 puts the target's there, and the first pass fails."""
    case = next(c for c in recorded("vllm-weights")["cases"] if c["name"] == "usual")
    tensors = {n: TensorInfo(n, "F32", tuple(s), "f") for n, s in case["tensors"].items()}
    target = TargetFacts("LlamaForCausalLM", 5, 20, 48)
    v1, v2 = (vllm.wire(Files(case["config"], tensors), target, Launch(NEWEST, r)) for r in ("v1", "v2"))  # type: ignore[arg-type]
    assert ("embed_tokens.weight", "unfilled") in [(n.tensor, n.effect) for n in v1.tensors]
    assert ("hidden-size-mismatch", "first forward") in [(r.cause, r.when) for r in v2.refusals]


# -- taps of targets ------------------------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64, "vocab_size": 99}
SHAPE |= {"num_hidden_layers": 1, "num_aux_hidden_states": 3}


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


# -- every row ------------------------------------------------------------------------------------------------


def test_every_row_has_a_source_and_a_known_cause() -> None:
    wirings = [said_by_vllm(case.values[0], runner) for case in ASKED for runner in ("v1", "v2", None)]
    wirings += [judged(case.values[0], runner) for case in cases("vllm-weights") for runner in ("v1", "v2")]
    rows = 0
    for wiring in wirings:
        assert set(wiring.facts) <= set(FACTS)
        for slug, said, source in wiring.warnings:
            causes.cause(slug)
            assert said
            assert source.where.startswith("vllm 0.32.0 ")
        for refusal in wiring.refusals:
            causes.cause(refusal.cause)
        for row in (*wiring.keys, *wiring.tensors, *wiring.flags, *wiring.refusals):
            rows += 1
            assert row.source.where.startswith("vllm 0.32.0 ")
            assert ":" in row.source.where or "eagle3.py" in row.source.where
    assert rows > 2000


# -- writing --------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "start",
    ["top level", "inside eagle_config", "target_layer_ids", "switches", "speculators", "speculators, rope",
     "two thetas", "rope_scaling and rope_parameters", "qwen3 drafter, window", "unknown architecture",
     "null target_hidden_size", "dflash_config and eagle_config"],
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


def test_weights_know_their_shapes() -> None:
    """Every parameter of the recorded drafters has the shape that its tensor has."""
    for case in recorded("vllm-weights")["cases"]:
        if case["name"] in ("usual", "two layers", "qwen3", "fc_norm on", "qkv bias on"):
            read = reading.read(case["config"])
            shapes = weights.expected(read, taps_built_for(read)[0], None)
            known = {n.removeprefix("model.").replace("layers.0.", "midlayer."): s for n, s in shapes.items()}
            for name, shape in case["tensors"].items():
                if name in known:
                    assert known[name] == tuple(shape)


# -- the running engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("vllm-taps"))
def test_the_running_model_collects_and_feeds_what_the_table_says(case: dict[str, Any]) -> None:
    """Recorded from real vLLM by runs/vllm_taps.py: layers on the model, and the taps found in the drafter's input."""
    shape = recorded("vllm-taps")["target"]
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[case["kind"]]
    target = TargetFacts(name, shape["num_layers"], shape["hidden_size"], shape["vocab_size"])
    wiring = wired(case["config"], target, *case["flags"], runner="v1")
    assert bool(wiring.refusals) == ("error" in case)
    if "error" not in case:
        assert wiring.taps == tuple(case["layers"]) == tuple(case["fed"])
        assert case["error_of_fed"] < 1e-5 < 0.05 < case["error_of_next"]
