"""TensorRT-LLM's dialect: layers from the launch, switches from two places, and what finds no place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from eyas.contract import declared
from eyas.dialects import tensorrt_llm
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts, Wiring
from eyas.errors import CheckpointError, UsageError
from eyas.inventory import TensorInfo

TARGET = TargetFacts("LlamaForCausalLM", 36, 64, 1000)
VERSION = Version(tensorrt_llm.VERSIONS[-1])
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "draft_vocab_size": 100,
    "rope_theta": 500000.0,
}


def wired(
    *flags: str, names: tuple[str, ...] | None = None, target: TargetFacts | None = TARGET, **keys: Any
) -> Wiring:
    tensors = {n: TensorInfo(n, "BF16", (1,), "x") for n in names} if names is not None else None
    return tensorrt_llm.wire(Files({**CONFIG, **keys}, tensors), target, Launch(VERSION, None, flags))


@pytest.mark.parametrize("n", [6, 7, 36, 61])
def test_default_layers(n: int) -> None:
    made = wired(target=TargetFacts("LlamaForCausalLM", n, 64, 1000))
    assert made.taps == (2, n // 2, n - 3)
    assert (made.facts["taps"], made.facts.facts["taps"].origin) == ([2, n // 2, n - 3], "defaulted")
    assert made.refusals == ()


def test_small_targets() -> None:
    assert wired(target=TargetFacts("LlamaForCausalLM", 1, 64, 1000)).taps == (1,)
    (refusal,) = wired(target=TargetFacts("LlamaForCausalLM", 5, 64, 1000)).refusals
    assert (refusal.cause, refusal.when) == ("taps-too-few", "start")
    assert wired(target=None).taps is None


@pytest.mark.parametrize(
    "flag",
    [
        "eagle3_layers_to_capture=[32,1,17]",
        "--speculative_config.eagle3_layers_to_capture 1,17,32",
        "eagle3_layers_to_capture: {1, 17, 32, 17}",
        '{"eagle3_layers_to_capture": [1, 17, 32]}',
    ],
)
def test_layers_of_the_launch_are_sorted_and_counted_from_one(flag: str) -> None:
    made = wired(flag, eagle_aux_hidden_state_layer_ids=[5, 6, 7])
    assert (made.taps, made.facts.facts["taps"].origin) == ((2, 18, 33), "declared")
    assert [(k.key, k.effect) for k in made.keys] == [("eagle_aux_hidden_state_layer_ids", "ignored")]


def test_layers_that_are_none() -> None:
    (refusal,) = wired("eagle3_layers_to_capture=[1,17,36]").refusals
    assert "layer 36 is none" in refusal.why
    with pytest.raises(UsageError, match="names no layers"):
        wired("eagle3_layers_to_capture=all")


BOTH = {"fc_norm": True, "eagle_config": {"norm_before_fc": True}}


@pytest.mark.parametrize(
    ("keys", "fact", "value", "ignored"),
    [
        ({"norm_before_fc": True}, "fc_norm", "none", ["norm_before_fc"]),
        ({"eagle_config": {"norm_before_fc": True}}, "fc_norm", "joint", []),
        ({"fc_norm": True}, "fc_norm", "each", []),
        (
            {"fc_norm": True, "eagle_config": {"norm_before_fc": True}},
            "fc_norm",
            "each",
            ["eagle_config.norm_before_fc"],
        ),
        ({"norm_output": True}, "feedback", "after the last norm", []),
        ({"eagle_config": {"return_hidden_post_norm": True}}, "feedback", "after the last norm", []),
        ({"norm_before_residual": True}, "residual", "before hidden_norm", ["norm_before_residual"]),
        ({"sliding_window": 2048}, "window", None, ["sliding_window"]),
        ({"attention_bias": True}, "attention_bias", True, []),
        ({"kv_lora_rank": 512}, "attention", "mla", []),
        ({"num_hidden_layers": 2}, "later_norm", "hidden_norm", []),
        ({"target_hidden_size": 128}, "embedding", "own", []),
        ({"draft_vocab_size": 1000}, "vocab_map", "none", []),
    ],
)
def test_switches(keys: dict[str, Any], fact: str, value: Any, ignored: list[str]) -> None:
    plain, made = wired(), wired(**keys)
    assert made.facts[fact] == value
    assert [k.key for k in made.keys] == ignored
    if not ignored:
        assert fact not in plain.facts or plain.facts[fact] != value


def test_fc_is_passed_over_where_the_widths_meet() -> None:
    made = wired("eagle3_layers_to_capture=[1]", fc_norm=True)
    assert (made.facts["fc"], made.facts["fc_norm"]) == ("skipped", "none")
    (refusal,) = wired("eagle3_layers_to_capture=[1]", target_hidden_size=128).refusals
    assert (refusal.cause, refusal.source.basis) == ("fc-skipped", "inferred")


def test_tensors_that_find_no_place() -> None:
    usual = ("fc.weight", "lm_head.weight", "d2t", "layers.0.mlp.up_proj.weight", "midlayer.hidden_norm.weight")
    strange = {
        "t2d",
        "embed_tokens.weight",
        "input_norm.weight",
        "fc_norm.0.weight",
        "midlayer.self_attn.q_norm.weight",
        "midlayer.self_attn.q_proj.bias",
        "model.norm.weight",
    }
    made = wired(names=(*usual, *strange))
    assert {n.tensor for n in made.tensors if n.effect == "dropped"} == strange
    assert all(n.loudness == "silent" for n in made.tensors)
    kept = wired(names=(*usual, *strange), fc_norm=True, attention_bias=True, target_hidden_size=128)
    assert {n.tensor for n in kept.tensors} == strange - {
        "embed_tokens.weight",
        "fc_norm.0.weight",
        "midlayer.self_attn.q_proj.bias",
    }


def test_what_is_missing_and_what_several_layers_are_called() -> None:
    made = wired(names=("fc.weight",))
    assert [(n.tensor, n.effect) for n in made.tensors] == [("lm_head.weight", "shared"), ("d2t", "unfilled")]
    assert made.facts["head"] == "target"
    names = ("lm_head.weight", "d2t", "midlayer.a", "layers.1.b", "layers.1.input_layernorm.weight")
    made = wired(names=names, num_hidden_layers=2)
    assert {n.tensor for n in made.tensors} == {"midlayer.a", "layers.1.input_layernorm.weight"}
    assert wired(names=("lm_head.weight", "d2t", "midlayer.0.a"), num_hidden_layers=2).tensors == ()


def test_a_missing_size_is_warned_of_and_an_unknown_version_said() -> None:
    made = tensorrt_llm.wire(Files({**CONFIG, "draft_vocab_size": None}), TARGET, Launch(Version("1.2.0")))
    assert made.warnings[0][1].startswith("draft_vocab_size is missing")
    assert made.facts["draft_vocab_size"] == 1000
    assert made.assumed is not None
    assert made.assumed.endswith("not from 1.2.0")


@pytest.mark.parametrize("key", ["fc_norm", "eagle_config", "num_hidden_layers", "target_hidden_size"])
def test_a_value_that_cannot_be_is_an_error(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        wired(**{key: "many"})


expressible = st.fixed_dictionaries(
    {"taps": st.just([2, 18, 33])},
    optional={
        "fc_norm": st.sampled_from(["none", "joint", "each"]),
        "feedback": st.sampled_from(["before the last norm", "after the last norm"]),
        "attention_bias": st.booleans(),
        "layers": st.integers(1, 3),
        "max_positions": st.integers(1, 10**6),
        "draft_vocab_size": st.integers(1, 1000),
        "rope": st.builds(lambda t: {"rope_type": "default", "rope_theta": float(t)}, st.integers(1, 10**7)),
        "residual": st.just("before hidden_norm"),
        "embedding": st.just("target"),
    },
)
before = st.dictionaries(
    st.sampled_from(["fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "use_aux_norm"]), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(expressible, before)
def test_what_is_written_is_wired(facts: dict[str, Any], held: dict[str, bool]) -> None:
    contract = declared(**facts)
    written = tensorrt_llm.write(contract, {**CONFIG, **held, "eyas": {"schema": 1}}, TARGET, Launch(VERSION))
    made = tensorrt_llm.wire(Files(written), TARGET, Launch(VERSION))
    assert list(contract.differences(made.facts)) == []
    assert made.keys == ()
    assert written["eyas"] == {"schema": 1}


@pytest.mark.parametrize(
    ("fact", "wanted", "nearest"),
    [
        ("residual", "after hidden_norm", "before hidden_norm"),
        ("fc_norm", "joint, then each", "each"),
        ("qk_norm", True, False),
        ("embedding", "own", "target"),
        ("window", 2048, None),
        ("vocab_map", "ids", "offsets"),
    ],
)
def test_what_has_no_place_is_named_with_the_nearest(fact: str, wanted: Any, nearest: Any) -> None:
    with pytest.raises(CannotExpress, match=fact) as caught:
        tensorrt_llm.write(declared(taps=[2, 18, 33], **{fact: wanted}), CONFIG, TARGET, Launch(VERSION))
    assert [(f.fact, f.wanted, f.nearest) for f in caught.value.facts] == [(fact, wanted, nearest)]


def test_other_taps_are_an_argument_of_the_launch() -> None:
    contract = declared(taps=[1, 18, 36])
    with pytest.raises(CannotExpress, match=r"eagle3_layers_to_capture=\[0, 17, 35\]"):
        tensorrt_llm.write(contract, CONFIG, TARGET, Launch(VERSION))
    launch = Launch(VERSION, None, ("eagle3_layers_to_capture=[0, 17, 35]",))
    written = tensorrt_llm.write(contract, CONFIG, TARGET, launch)
    assert tensorrt_llm.wire(Files(written), TARGET, launch).taps == (1, 18, 36)
    with pytest.raises(CannotExpress, match="no list of layers does"):
        tensorrt_llm.write(declared(taps=[0, 3, 31]), CONFIG, TARGET, Launch(VERSION))
