"""speculators' folder layout: what its own drafters and its converter's say, and a contract written in it.

What its config class and vLLM 0.32.0 make of configs written here was recorded from them
(runs/speculators_layout.py -> fixtures/engines/speculators-layout.json).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.contract import FACTS, Contract, declared, from_json
from eyas.dialects import speculators
from eyas.dialects.meaning import Meaning, meaning
from eyas.dialects.wiring import CannotExpress, Files, TargetFacts
from eyas.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
QWEN3_8B = TargetFacts("Qwen3ForCausalLM", 36, 4096, 151936)
QWEN3_32B = TargetFacts("Qwen3ForCausalLM", 64, 5120, 151936)
GEMMA4 = TargetFacts("Gemma4ForConditionalGeneration", 60, 5376, 262144)
SCOUT = TargetFacts("Llama4ForConditionalGeneration", 48, 5120, 202048)


def config(name: str, **changes: Any) -> dict[str, Any]:
    found = json.loads((FIXTURES / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return {k: v for k, v in {**found, **changes}.items() if v is not ...}


def values(found: Meaning) -> dict[str, Any]:
    return {name: found.contract[name] for name in found.contract}


def test_a_missing_norm_before_residual_is_left_open() -> None:
    """vLLM takes it as true, the config class as false."""
    for name, on in (("redhat-gemma4-31b", GEMMA4), ("redhat-qwen3-32b", QWEN3_32B)):
        found = meaning(Files(config(name, norm_before_residual=...)), on, "x")
        assert [(a.fact, a.values) for a in found.ambiguous] == [
            ("residual", ("after hidden_norm", "before hidden_norm"))
        ]
        assert "residual" not in found.contract


def test_what_a_converter_says_of_layers_depends_on_who_handed_them() -> None:
    def taps_of(ids: list[int] | None, on: TargetFacts | None, **changes: Any) -> tuple[Any, list[Any]]:
        written = config("redhat-llama4-maverick", eagle_aux_hidden_state_layer_ids=ids, **changes)
        found = meaning(Files(written), on, "x")
        return values(found).get("taps"), [a.values for a in found.ambiguous if a.fact == "taps"]

    trained = {"architectures": ["Eagle3DraftModel"]}
    assert taps_of([1, 23, 44], SCOUT) == (None, [((2, 24, 45), (1, 23, 44))])
    assert taps_of([1, 23, 44], SCOUT, **trained) == ((1, 23, 44), [])
    assert taps_of([2, 24, 45], SCOUT) == ((2, 24, 45), [])
    assert taps_of([2, 24, 45], None) == (None, [((3, 25, 46), (2, 24, 45))])
    assert taps_of([44, 1, 23], SCOUT, **trained) == ((1, 23, 44), [])  # vLLM's capture is in the order of layers
    assert taps_of(None, SCOUT) == ((2, 24, 45), [])
    assert taps_of(None, None) == (None, [])


def test_layers_with_and_without_a_window_have_no_one_word() -> None:
    written = copy.deepcopy(config("speculators-qwen3-8b-eagle3.1"))
    written["transformer_layer_config"] |= {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    found = meaning(Files(written), QWEN3_8B, "x")
    assert "window" not in found.contract
    assert any("window" in note for note in found.notes)
    assert (found.contract["layers"], found.contract["later_norm"]) == (2, "input_layernorm")


def test_a_qwen3_layer_norms_queries_and_keys() -> None:
    written = copy.deepcopy(config("speculators-qwen3-8b-eagle3.1"))
    written["transformer_layer_config"]["model_type"] = "qwen3"
    assert meaning(Files(written), QWEN3_8B, "x").contract["qk_norm"] is True


# -- writing --------------------------------------------------------------------------------------------------

SHAPE = config("lmsys-llama4-scout", hidden_size=4096, vocab_size=151936)
OUTSIDE = {"vocab_sha256", "mask", "template_sha256", "tokenizer_sha256", "target"}  # no config says these


@st.composite
def expressible(draw: st.DrawFn) -> Contract:
    """Every contract that this layout has words for, on a target of 36 layers and 151936 tokens."""
    layers = draw(st.integers(1, 3))
    cut = draw(st.sampled_from([16, 32000, 151936]))
    kind = draw(st.sampled_from(["default", "yarn", "llama3"]))
    more = {} if kind == "default" else {"factor": draw(st.floats(1.0, 64.0)), "original_max_position_embeddings": 4096}
    facts = {
        "taps": tuple(sorted(draw(st.sets(st.integers(0, 36), min_size=1, max_size=5)))),
        "tap_state": "stream",
        "fc": "applied",
        "fc_norm": draw(st.sampled_from(["none", "joint", "each"])),
        "layers": layers,
        "attention": "gqa",
        "attention_bias": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "residual": draw(st.sampled_from(["before hidden_norm", "after hidden_norm"])),
        "head_norm": True,
        "feedback": draw(st.sampled_from(["before the last norm", "after the last norm"])),
        "token_shift": 1,
        "position_offset": 1,
        "rope": {"rope_type": kind, "rope_theta": draw(st.floats(1.0, 1e8)), **more},
        "window": draw(st.none() | st.integers(1, 8192)),
        "max_positions": draw(st.integers(1, 10**6)),
        "embedding": draw(st.sampled_from(["target", "own"])),
        "head": "own",
        "draft_vocab_size": cut,
        "vocab_map": "none" if cut == 151936 else "offsets",
        "depths": draw(st.integers(1, 8)),
    }
    if layers > 1:
        facts["later_norm"] = "input_layernorm"
    return declared(**facts)


@settings(max_examples=200, deadline=None)
@given(expressible())
def test_what_was_written_reads_back(contract: Contract) -> None:
    written = json.loads(json.dumps(speculators.write(contract, SHAPE, QWEN3_8B, "Qwen/Qwen3-8B")))
    found = meaning(Files(written), QWEN3_8B, "x")
    assert found.spelled_by == "speculators"
    assert {k: _plain(found.contract[k]) for k in found.contract} == {k: _plain(contract[k]) for k in contract}
    again = json.loads(json.dumps(speculators.write(found.contract, written, QWEN3_8B, "Qwen/Qwen3-8B")))
    assert again == written


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_the_round_trip_covers_every_fact_that_a_config_can_say() -> None:
    example = {"later_norm", *_some(taps=(2, 18, 33))}
    assert set(FACTS) - OUTSIDE == example


def _some(**facts: Any) -> Contract:
    """The facts of a drafter of speculators' trainer as released, some of them otherwise."""
    found = meaning(Files(config("speculators-qwen3-8b-eagle3.1")), QWEN3_8B, "x").contract
    return Contract({**found.facts, **declared(**facts).facts})


INEXPRESSIBLE = [
    ("head_norm", False, True),
    ("fc_norm", "joint, then each", "joint"),
    ("attention", "mla", "gqa"),
    ("tap_state", "branch", "stream"),
    ("fc", "skipped", "applied"),
    ("token_shift", 0, 1),
    ("later_norm", "hidden_norm", "input_layernorm"),
    ("head", "target", "own"),
    ("vocab_map", "ids", "offsets"),
]


@pytest.mark.parametrize(("fact", "wanted", "nearest"), INEXPRESSIBLE)
def test_what_it_has_no_word_for_is_refused_by_name(fact: str, wanted: Any, nearest: Any) -> None:
    with pytest.raises(CannotExpress, match=f"speculators cannot .*{fact}: ") as caught:
        speculators.write(_some(**{fact: wanted}), SHAPE, QWEN3_8B)
    (row,) = caught.value.facts
    assert (row.fact, row.wanted, row.nearest) == (fact, wanted, nearest)
    assert row.why
    assert row.source.where.startswith("speculators c05b95b ")


def test_several_are_named_at_once() -> None:
    with pytest.raises(CannotExpress) as caught:
        speculators.write(_some(head_norm=False, attention="mla", vocab_map="ids"), SHAPE, QWEN3_8B)
    assert {row.fact for row in caught.value.facts} == {"head_norm", "attention", "vocab_map"}


def test_a_position_offset_is_no_obstacle() -> None:
    """It turns queries and keys alike, so a drafter trained at offset 0 is served the same."""
    assert speculators.write(_some(position_offset=0), SHAPE, QWEN3_8B) == speculators.write(_some(), SHAPE, QWEN3_8B)


def test_states_of_another_width_are_refused() -> None:
    for shape, on in (({**SHAPE, "target_hidden_size": 8192}, QWEN3_8B), (SHAPE, QWEN3_32B)):
        with pytest.raises(CheckpointError, match=r"4096 wide and reads states (8192|5120) wide"):
            speculators.write(_some(), shape, on)


def test_a_shape_that_lacks_something_is_named() -> None:
    broken = {k: v for k, v in SHAPE.items() if k not in ("rms_norm_eps", "intermediate_size")}
    with pytest.raises(CheckpointError, match=r"lacks intermediate_size, rms_norm_eps\."):
        speculators.write(_some(), broken, QWEN3_8B)


def test_the_folder_s_own_block_is_kept_as_it_is() -> None:
    block = {"schema": 1, "contract": {"taps": {"value": [0, 1, 2], "origin": "declared"}}, "weights_sha256": "a"}
    assert speculators.write(_some(), {**SHAPE, "eyas": block}, QWEN3_8B)["eyas"] == block
    assert "eyas" not in speculators.write(_some(), SHAPE, QWEN3_8B)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.model.fc.weight", "model.fc.weight"),  # one prefix is a layout, two are a mistake
        ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("d2t", "d2t"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_tensors(name: str, theirs: str) -> None:
    assert speculators.tensor_name(name) == theirs


# -- what speculators and vLLM make of it (recorded) ------------------------------------------------------------

RECORDED = json.loads((FIXTURES / "engines" / "speculators-layout.json").read_text(encoding="utf-8"))
TINY = TargetFacts(**RECORDED["target"])


@pytest.fixture(params=RECORDED["cases"], ids=lambda case: case["name"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]


def test_what_was_recorded_is_what_is_written(case: dict[str, Any]) -> None:
    contract = from_json(case["contract"], "x")
    written = speculators.write(contract, RECORDED["shape"], TINY, "target")
    assert json.loads(json.dumps(written)) == case["written"]


@pytest.mark.parametrize("who", ["speculators", "vllm"])
def test_its_own_classes_read_the_contract(case: dict[str, Any], who: str) -> None:
    contract, said = from_json(case["contract"], "x"), case[who]
    switches = {
        "eagle_aux_hidden_state_layer_ids": contract["taps"],
        "draft_vocab_size": contract["draft_vocab_size"],
        "norm_before_fc": contract["fc_norm"] == "joint",
        "fc_norm": contract["fc_norm"] == "each",
        "norm_before_residual": contract["residual"] == "after hidden_norm",
        "norm_output": contract["feedback"] == "after the last norm",
    }
    assert {key: said[key] for key in switches} == switches
    if who == "vllm":
        assert said["architectures"] == [f"Eagle3{'Qwen3' if contract['qk_norm'] else 'Llama'}ForCausalLM"]
        assert said["speculative_config"] == {"method": "eagle3", "num_speculative_tokens": 3}
    else:
        assert said["class"] == "Eagle3SpeculatorConfig"
        assert said["embed_requires_grad"] == (contract["embedding"] == "own")


@pytest.mark.parametrize("who", ["speculators", "vllm"])
def test_its_own_classes_read_the_decoder(case: dict[str, Any], who: str) -> None:
    contract, layer = from_json(case["contract"], "x"), case[who]["layer"]
    kind = "full_attention" if contract["window"] is None else "sliding_attention"
    shape = {key: value for key, value in RECORDED["shape"].items() if key not in ("dtype", "eyas")}
    decoder = {
        **shape,
        "num_hidden_layers": contract["layers"],
        "max_position_embeddings": contract["max_positions"],
        "attention_bias": contract["attention_bias"],
        "layer_types": [kind] * contract["layers"],
        "sliding_window": contract["window"],
    }
    assert {key: layer[key] for key in decoder} == decoder
    rope = {key: layer["rope_parameters"][key] for key in contract["rope"]}
    assert rope == contract["rope"]


def test_its_drafter_has_the_tensors_of_ours_under_the_mapped_names(case: dict[str, Any]) -> None:
    """Names and shapes as in a folder that eyas saves, mapped; its own always has room for an embedding."""
    contract, shape = from_json(case["contract"], "x"), RECORDED["shape"]
    expected = {speculators.tensor_name(name): size for name, size in our_tensors(contract, shape).items()}
    assert case["speculators"]["tensors"] == expected


def our_tensors(contract: Contract, shape: dict[str, Any]) -> dict[str, list[int]]:
    H, I_, E = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    C, W, V = len(contract["taps"]), contract["draft_vocab_size"], shape["vocab_size"]
    q, kv = shape["num_attention_heads"] * E, shape["num_key_value_heads"] * E
    found = {"fc.weight": [H, C * H], "norm.weight": [H], "lm_head.weight": [W, H], "embed_tokens.weight": [V, H]}
    found |= {"d2t": [W], "t2d": [V]} if W < V else {}
    found |= {"input_norm.weight": [C * H]} if contract["fc_norm"] == "joint" else {}
    found |= {f"fc_norm.{i}.weight": [H] for i in range(C)} if contract["fc_norm"] == "each" else {}
    for i in range(contract["layers"]):
        layer, width = (f"layers.{i}", H) if i else ("midlayer", 2 * H)
        norms = ["input_layernorm", "post_attention_layernorm", *([] if i else ["hidden_norm"])]
        found |= {f"{layer}.{norm}.weight": [H] for norm in norms}
        projections = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (H, q)}
        for name, (rows, columns) in projections.items():
            found[f"{layer}.self_attn.{name}.weight"] = [rows, columns]
            if contract["attention_bias"]:
                found[f"{layer}.self_attn.{name}.bias"] = [rows]
        if contract["qk_norm"]:
            found |= {f"{layer}.self_attn.{n}_norm.weight": [E] for n in "qk"}
        found |= {f"{layer}.mlp.{name}.weight": [I_, H] for name in ("gate_proj", "up_proj")}
        found[f"{layer}.mlp.down_proj.weight"] = [H, I_]
    return found
