"""Configs that are not what they should be: keys of the wrong type, two places that disagree, ids that no target has,
files of something else. Errors a user can act on, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.contract import declared
from eyas.dialects import hf, ids, rope
from eyas.dialects.contradictions import contradictions
from eyas.dialects.meaning import meaning
from eyas.dialects.wiring import Files, TargetFacts
from eyas.errors import CheckpointError

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
LLAMA = TargetFacts("LlamaForCausalLM", 32, 4096, 128256)
DEEPSEEK = TargetFacts("DeepseekV3ForCausalLM", 61, 7168, 129280)
KEY = "eagle_aux_hidden_state_layer_ids"


def config(name: str, **changes: Any) -> dict[str, Any]:
    found = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return {k: v for k, v in {**found, **changes}.items() if v is not ...}


# -- types ----------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("lmsys-llama4-scout", {"architectures": "LlamaForCausalLMEagle3"}, "architectures .* a list of names"),
    ("lmsys-llama4-scout", {"architectures": [7]}, "architectures .* a list of names"),
    ("lmsys-llama4-scout", {"eagle_config": [1, 2]}, "eagle_config .* an object"),
    ("lmsys-llama4-scout", {"eagle_config": {KEY: "1,2"}}, rf"eagle_config\.{KEY} .*'1,2'.* a list of layer numbers"),
    ("lmsys-llama4-scout", {KEY: [1, 2.0, 3]}, f"{KEY} .* a list of layer numbers"),
    ("lmsys-llama4-scout", {KEY: [True, 2, 3]}, f"{KEY} .* a list of layer numbers"),
    ("lmsys-llama4-scout", {"fc_norm": "yes"}, "fc_norm .*'yes'.* true or false"),
    ("lmsys-llama4-scout", {"norm_output": 1}, "norm_output .* true or false"),
    ("lmsys-llama4-scout", {"draft_vocab_size": -1}, "draft_vocab_size .*-1.* a number above zero"),
    ("lmsys-llama4-scout", {"num_hidden_layers": 1.0}, "num_hidden_layers .* a number above zero"),
    ("lmsys-llama4-scout", {"rope_theta": "10000"}, "rope_theta .*'10000'.* a number above zero"),
    ("lmsys-llama4-scout", {"rope_theta": True}, "rope_theta .* a number above zero"),
    ("lmsys-llama4-scout", {"rope_theta": float("nan")}, "rope_theta .* a number above zero"),
    ("lmsys-llama4-scout", {"rope_scaling": "yarn"}, "rope_scaling .* an object"),
    ("specforge-qwen3-8b", {"norm_output": "true"}, "norm_output .* true or false"),
    ("nvidia-gpt-oss-120b-v3", {"eagle_config": {"use_last_layernorm": 1}}, r"eagle_config\.use_last_layernorm .*1.*"),
    ("redhat-gemma4-31b", {"transformer_layer_config": []}, "transformer_layer_config .* an object"),
    ("redhat-gemma4-31b", {"transformer_layer_config": {"model_type": 3}}, r"transformer_layer_config\.model_type .*3"),
    ("redhat-gemma4-31b", {"transformer_layer_config": {"vocab_size": "x"}}, r"transformer_layer_config\.vocab_size"),
    ("redhat-gemma4-31b", {"speculators_config": "eagle3"}, "speculators_config .* an object"),
    ("angelslim-qwen3-4b", {"tie_word_embeddings": "no"}, "tie_word_embeddings .* true or false"),
    ("eagle-llama3.3-70b", {"target_hidden_size": [8192]}, "target_hidden_size .* a number above zero"),
    ("eagle-llama3.1-8b", {"eyas": []}, "the 'eyas' key holds a list"),
]


@pytest.mark.parametrize(("name", "changes", "said"), WRONG)
def test_a_key_of_the_wrong_type_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"^drafters/x: (?s:{said})") as caught:
        meaning(Files(config(name, **changes)), LLAMA, "drafters/x")
    assert caught.value.way_out


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 100) | st.floats() | st.sampled_from(["eagle3", "yarn", "qwen3", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([KEY, "rope_type", "rope_theta", "model_type", "use_aux_hidden_state"]), inner
        )
    ),
    max_leaves=6,
)
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
KNOWN = sorted(
    {key for name in NAMES for key in config(name)} | {KEY, "norm_before_fc", "rope_parameters", "use_aux_norm"}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KNOWN), values, max_size=4), st.booleans())
def test_whatever_stands_in_a_config_it_is_read_or_refused(name: str, changes: dict[str, Any], inner: bool) -> None:
    written = copy.deepcopy(config(name))
    within = next((k for k in ("transformer_layer_config", "eagle_config") if inner and k in written), None)
    (written[within] if within else written).update(changes)
    for look in (lambda: meaning(Files(written), LLAMA, "x"), lambda: contradictions(written, LLAMA)):
        with contextlib.suppress(CheckpointError):
            look()


# -- files of something else ------------------------------------------------------------------------------------

TARGETS_OWN = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 9}
OTHERS: list[tuple[dict[str, Any], str]] = [
    (TARGETS_OWN, r"model of 36 layers \(Qwen3ForCausalLM\), a target's"),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 26}}, "26 layers"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {}, "draft_vocab_size": 9}, "DFlash drafter"),
    ({"dflash_config": {"target_layer_ids": [1]}}, "DFlash drafter"),
    ({"architectures": ["PEagleDraftModel"], "draft_vocab_size": 9}, "P-EAGLE drafter"),
    ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "peagle"}, "P-EAGLE drafter"),
    ({"speculators_model_type": "mlp_speculator"}, "of kind 'mlp_speculator'"),
    ({"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}, "first generation"),
    ({"architectures": ["DeepSeekMTPModel"]}, "multi-token-prediction drafter"),
    ({}, "nothing in it speaks of a drafter"),
    ({"hidden_size": 4096}, "nothing in it speaks of a drafter"),
]


@pytest.mark.parametrize(("written", "said"), OTHERS)
def test_a_file_of_something_else_is_refused_by_what_it_is(written: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"^x: .*{said}.*EAGLE-3 drafter was expected") as caught:
        meaning(Files(written), LLAMA, "x")
    assert "--target" in caught.value.way_out


def test_a_drafter_without_architectures_is_read_and_said() -> None:
    found = meaning(Files(config("specforge-qwen3-8b", architectures=...)), LLAMA, "x")
    assert (found.spelled_by, found.contract["taps"]) == ("plain", (2, 16, 29))
    assert any("names no architecture" in note for note in found.notes)


# -- ids ------------------------------------------------------------------------------------------------------


def taps_of(deep: list[int] | None, top: list[int] | None, on: TargetFacts | None) -> Any:
    """Taps of an unrecognised drafter, or the values they may have."""
    written = config("lmsys-llama4-scout", eagle_config={KEY: deep} if deep else ..., **{KEY: top or ...})
    found = meaning(Files(written), on, "x")
    return found.contract["taps"] if "taps" in found.contract else {a.fact: a.values for a in found.ambiguous}


@pytest.mark.parametrize(
    ("deep", "top", "on", "expected"),
    [
        ([1, 15, 28], None, LLAMA, (2, 16, 29)),  # the default taps, as layer outputs
        (None, [1, 15, 28], LLAMA, (2, 16, 29)),  # wherever they stand
        (None, [2, 16, 29], LLAMA, (2, 16, 29)),  # the default taps themselves, where vLLM reads taps
        ([2, 16, 29], None, LLAMA, {"taps": ((3, 17, 30), (2, 16, 29))}),  # and where SGLang would add one
        ([4, 15, 28], None, LLAMA, {"taps": ((5, 16, 29), (4, 15, 28))}),
        (None, [4, 15, 28], LLAMA, {"taps": ((5, 16, 29), (4, 15, 28))}),
        ([3, 9, 20], [4, 10, 21], LLAMA, (4, 10, 21)),  # both written, and one fits the other
        ([3, 9, 20], [3, 9, 20], LLAMA, {"taps": ((4, 10, 21), (3, 9, 20))}),
        ([-1, 2, 30], None, DEEPSEEK, (0, 3, 31)),  # no tap lies below the embedding
        ([10, 20, 32], None, LLAMA, (10, 20, 32)),  # nor beyond the last layer
        ([-1, 20, 32], None, LLAMA, {"taps": ()}),  # nothing fits
        ([1, 15, 28], None, None, {"taps": ((2, 16, 29), (1, 15, 28))}),  # of which target is not known
        ([28, 1, 15], None, LLAMA, {"taps": ((2, 16, 29), (1, 15, 28))}),  # as layers run, whatever the order written
        ([], None, LLAMA, (2, 16, 29)),
    ],
)
def test_ids_of_an_unknown_trainer(deep: list[int] | None, top: list[int] | None, on: Any, expected: Any) -> None:
    assert taps_of(deep, top, on) == expected


SHAPE = config("lmsys-llama4-scout", draft_vocab_size=32000, head_dim=128) | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual"), False),
    **dict.fromkeys(("attention_bias", "qk_norm"), False),
    "target_hidden_size": 5120,
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 60), min_size=2, max_size=4))
def test_our_own_config_without_its_block_still_names_its_taps(architecture: str, chosen: set[int]) -> None:
    taps, on = tuple(sorted(chosen)), TargetFacts(architecture, 61, 5120, 202048)
    identity = {"architecture": architecture, "num_layers": 61, "fingerprint": ""}
    written = hf.write(SHAPE, declared(taps=taps, target=identity), "0", "float32")
    del written["eyas"]
    assert contradictions(written, on) == ()
    found = meaning(Files(written), on, "x")
    if "eagle_config" in written or ids.default_in(taps, 61):
        assert found.contract["taps"] == taps
    else:  # SGLang cannot be told, so nothing agrees with the list that vLLM reads
        assert taps in found.ambiguous[0].values


@pytest.mark.parametrize(
    ("written", "n", "what"),
    [
        ([1, 15, 28], 32, []),
        ([1, 15, 31], 32, []),
        ([1, 15, 32], 32, ["out of range"]),
        ([1, 15, 33], 32, ["out of range"]),
        ([-1, 2, 30], 61, ["negative"]),
        ([1, 1, 28], 32, ["repeated"]),
        ([28, 1, 15], 32, ["unsorted"]),
        ([40, -2, 40], 32, ["negative", "out of range", "repeated", "unsorted"]),
        ([40, 2, 40], None, ["repeated", "unsorted"]),
    ],
)
def test_what_is_wrong_with_ids(written: list[int], n: int | None, what: list[str]) -> None:
    rows = ids.troubles(ids.INNER, written, n)
    assert [row.what for row in rows] == what
    assert all((row.key, row.ids) == (ids.INNER, tuple(written)) for row in rows)
    assert all(row.why and ":" in row.source.where for row in rows)


def test_the_words_on_ids_name_those_at_fault() -> None:
    assert "[33] lies beyond the 32 layers" in ids.troubles(ids.KEY, [1, 15, 33], 32)[0].why
    assert "32 is the last tap" in ids.troubles(ids.KEY, [1, 15, 32], 32)[0].why
    assert "[-1] is tap [0] only" in ids.troubles(ids.KEY, [-1, 15, 30], 32)[0].why


# -- two places that disagree -----------------------------------------------------------------------------------


def rows(on: TargetFacts | None, **written: Any) -> list[tuple[str, Any, Any]]:
    return [(row.key, row.inner, row.outer) for row in contradictions(written, on)]


@pytest.mark.parametrize(
    ("deep", "top", "on", "clash"),
    [
        ([1, 15, 28], [2, 16, 29], None, False),
        ([1, 15, 28], [2, 16, 29], LLAMA, False),
        ([2, 16, 29], [2, 16, 29], LLAMA, True),
        ([2, 30, 58], [2, 30, 58], DEEPSEEK, False),  # SGLang takes these as they stand
        ([1, 29, 57], [2, 30, 58], DEEPSEEK, False),
        ([2, 30, 58], [3, 31, 59], DEEPSEEK, True),
        ([28, 1, 15], [29, 16, 2], LLAMA, False),
    ],
)
def test_ids_at_two_levels_clash_by_the_taps_they_mean(
    deep: list[int], top: list[int], on: TargetFacts | None, clash: bool
) -> None:
    found = rows(on, eagle_config={KEY: deep}, **{KEY: top})
    assert found == ([(ids.INNER, deep, top)] if clash else [])


def test_who_reads_which_of_two_lists() -> None:
    (row,) = contradictions({"eagle_config": {KEY: [2, 16, 29]}, KEY: [2, 16, 29]}, LLAMA)
    assert row.readers["sglang"] == row.readers["tensorrt-llm"] == "inner"
    assert row.readers["vllm"] == "outer"
    assert row.readers["llama.cpp"] == "neither"
    assert "spec_aux_hidden_state.py:185" in row.source.where


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("norm_before_fc", "norm_before_fc"),
        ("fc_norm", "fc_norm"),
        ("norm_output", "norm_output"),
        ("return_hidden_post_norm", "norm_output"),
        ("norm_before_residual", "norm_before_residual"),
    ],
)
def test_switches_at_two_levels(inner: str, outer: str) -> None:
    for one in (True, False):
        assert rows(None, eagle_config={inner: one}, **{outer: one}) == []
        assert rows(None, eagle_config={inner: one}, **{outer: not one}) == [(f"eagle_config.{inner}", one, not one)]
    assert rows(None, eagle_config={inner: True}) == rows(None, **{outer: True}) == []


def test_which_switch_is_believed() -> None:
    (joint,) = contradictions({"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False})
    assert set(joint.readers.values()) == {"inner"}
    (output,) = contradictions({"eagle_config": {"norm_output": True}, "norm_output": False})
    assert set(output.readers.values()) == {"outer"}


def test_rope_and_decoder_at_two_levels() -> None:
    default = {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rows(None, rope_parameters=default, rope_theta=500000) == []
    assert rows(None, rope_parameters=default, rope_theta=1e4) == [("rope_parameters.rope_theta", 5e5, 1e4)]
    assert rows(None, rope_parameters=default, rope_scaling=None, rope_theta=5e5) == []
    assert rows(None, rope_parameters={**yarn, "rope_theta": 1e4}, rope_scaling={"type": "yarn", "factor": 4.0}) == []
    assert rows(None, rope_parameters=default, rope_scaling=yarn) == [("rope_parameters", default, yarn)]
    layer = {"hidden_size": 64, "rope_theta": 1e4}
    assert rows(None, transformer_layer_config=layer, hidden_size=64, rope_theta=1e4) == []
    assert rows(None, transformer_layer_config=layer, hidden_size=32) == [
        ("transformer_layer_config.hidden_size", 64, 32)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_public_drafter_contradicts_itself(name: str) -> None:
    assert contradictions(config(name), LLAMA) == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ({"rope_type": "yarn", "type": "linear", "rope_theta": 5}, {"rope_type": "yarn", "rope_theta": 5.0}),
        ({"type": "mrope", "mrope_section": [1]}, {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}),
        ({"rope_type": "llama3", "factor": None}, {"rope_type": "llama3", "rope_theta": 1e4}),
    ],
)
def test_rope_in_one_shape(written: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope.normal(written) == expected
    assert rope.normal(rope.normal(written)) == expected
