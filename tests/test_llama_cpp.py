"""llama.cpp: what its converter makes of a folder, what its loader makes of a GGUF, and what has no place in one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from eyas.contract import Contract, declared
from eyas.dialects import llama_cpp
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts, Wiring
from eyas.errors import CheckpointError
from eyas.inventory import TensorInfo

TARGET = TargetFacts("LlamaForCausalLM", 32, 64, 1000)
LAUNCH = Launch(Version(llama_cpp.VERSIONS[-1]))
OLD = Launch(Version(llama_cpp.VERSIONS[0]))
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "draft_vocab_size": 100,
    "rope_theta": 500000.0,
}
NAMES = {
    "fc.weight": (64, 192),
    "d2t": (100,),
    "t2d": (1000,),
    "norm.weight": (64,),
    "lm_head.weight": (100, 64),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.self_attn.q_proj.weight": (64, 128),
}


def tensors(names: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {n: TensorInfo(n, "BF16", shape, "model.safetensors") for n, shape in names.items()}


def wired(names: dict[str, tuple[int, ...]] | None = None, target: TargetFacts | None = TARGET, **keys: Any) -> Wiring:
    return llama_cpp.wire(Files({**CONFIG, **keys}, tensors(NAMES if names is None else names)), target, LAUNCH)


def values(contract: Contract) -> dict[str, Any]:
    return {name: contract[name] for name in contract}


PLAIN = {
    "taps": [2, 16, 29],
    "tap_state": "stream",
    "fc": "applied",
    "fc_norm": "none",
    "layers": 1,
    "attention": "gqa",
    "attention_bias": False,
    "qk_norm": False,
    "residual": "before hidden_norm",
    "head_norm": True,
    "feedback": "before the last norm",
    "token_shift": 1,
    "position_offset": 0,
    "rope": {"rope_type": "default", "rope_theta": 500000.0},
    "window": None,
    "max_positions": 2048,
    "embedding": "target",
    "head": "own",
    "draft_vocab_size": 100,
    "vocab_map": "offsets",
}


def test_the_usual_folder() -> None:
    made = wired()
    assert values(made.facts) == PLAIN
    assert made.taps == (2, 16, 29)
    assert (made.keys, made.refusals, made.warnings, made.assumed) == ((), (), (), None)
    assert [(n.tensor, n.effect) for n in made.tensors] == [("t2d", "dropped"), ("embed_tokens.weight", "shared")]
    assert made.facts.facts["taps"].origin == "defaulted"


def test_a_lone_config_says_what_it_decides() -> None:
    made = llama_cpp.wire(Files(CONFIG), None, Launch(Version("0.4.2")))
    assert made.taps is None
    assert set(PLAIN) - set(made.facts) == {"taps", "embedding", "head", "vocab_map"}
    assert made.assumed == "llama.cpp 0.4.2 is not in the tables; what 0+0274f0f does is said"


@pytest.mark.parametrize("n", [6, 28, 61])
def test_ids_are_never_read(n: int) -> None:
    inner, outer = [0, 3, 5], [1, 4, 6]
    target = TargetFacts("LlamaForCausalLM", n, 64, 1000)
    made = wired(
        target=target,
        eagle_config={"eagle_aux_hidden_state_layer_ids": inner},
        eagle_aux_hidden_state_layer_ids=outer,
    )
    assert made.taps == (2, n // 2, n - 3)
    assert {(k.key, tuple(k.value), k.effect) for k in made.keys} == {
        ("eagle_aux_hidden_state_layer_ids", (1, 4, 6), "ignored"),
        ("eagle_config.eagle_aux_hidden_state_layer_ids", (0, 3, 5), "ignored"),
    }


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
        ({"use_aux_norm": True}, "use_aux_norm"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"sliding_window": 2048}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_switches_that_change_nothing(keys: dict[str, Any], noted: str) -> None:
    made = wired(**keys)
    assert values(made.facts) == PLAIN
    assert [(k.key, k.effect, k.source.basis) for k in made.keys] == [(noted, "ignored", "read")]


def test_the_one_switch_it_reads() -> None:
    made = wired(norm_before_residual=True)
    assert values(made.facts) == {**PLAIN, "residual": "after hidden_norm"}
    assert made.keys == ()


@pytest.mark.parametrize(
    ("keys", "names", "cause", "said"),
    [
        ({"num_hidden_layers": 2}, {}, "engine-cannot-express", "one layer; here 100 and 2"),
        ({"draft_vocab_size": None}, {}, "engine-cannot-express", "here None and 1"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {}, "engine-cannot-express", "knows no Eagle3Qwen3"),
        ({}, {"fc_norm.0.weight": (64,)}, "weights-unexpected", "no name for fc_norm.0.weight"),
        ({}, {"input_norm.weight": (192,)}, "weights-unexpected", "no name for input_norm.weight"),
        ({}, {"model.midlayer.mlp.up_proj.weight": (1,)}, "weights-unexpected", "model.midlayer.mlp.up_proj"),
        ({}, {"midlayer.self_attn.q_proj.bias": (64,)}, "engine-cannot-express", "no tensor for midlayer.self_attn.q"),
        ({}, {"midlayer.self_attn.k_norm.weight": (16,)}, "engine-cannot-express", "wrong number of tensors"),
        ({}, {"fc.weight": (64, 256)}, "taps-too-few", "rows 256 wide and three taps are 192"),
    ],
)
def test_where_it_stops(keys: dict[str, Any], names: dict[str, tuple[int, ...]], cause: str, said: str) -> None:
    (refusal,) = wired({**NAMES, **names}, **keys).refusals
    assert (refusal.cause, refusal.when) == (cause, "start")
    assert said in refusal.why


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"])
def test_names_that_it_renames(name: str) -> None:
    assert wired({**NAMES, name: (128, 64)}).refusals == ()


def test_sharing_follows_the_names() -> None:
    made = wired({**NAMES, "embed_tokens.weight": (1000, 64)})
    assert made.facts["embedding"] == "own"
    bare = {n: s for n, s in NAMES.items() if n not in ("lm_head.weight", "d2t", "t2d")}
    made = wired(bare)
    assert (made.facts["head"], made.facts["vocab_map"], made.facts["draft_vocab_size"]) == ("target", "none", 1000)
    assert {n.tensor for n in made.tensors} == {"lm_head.weight", "embed_tokens.weight"}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def test_the_original_length_of_llama3_is_looked_for_elsewhere() -> None:
    made = wired(rope_parameters=LLAMA3)
    assert made.facts["rope"] == {**LLAMA3, "original_max_position_embeddings": 8192}
    assert [k.key for k in made.keys] == ["rope_parameters.original_max_position_embeddings"]
    made = wired(rope_parameters=LLAMA3, original_max_position_embeddings=4096)
    assert (made.facts["rope"], made.keys) == (LLAMA3, ())


@pytest.mark.parametrize("key", ["draft_vocab_size", "norm_before_residual", "eagle_config", "architectures"])
def test_a_value_that_cannot_be_is_an_error(key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        wired(**{key: "many"})
    assert key in str(caught.value)
    assert caught.value.way_out


# -- writing ----------------------------------------------------------------------------------------------------------

ropes = st.one_of(
    st.builds(lambda t: {"rope_type": "default", "rope_theta": float(t)}, st.integers(1, 10**7)),
    st.builds(
        lambda t, f: {"rope_type": "linear", "rope_theta": float(t), "factor": f / 4},
        st.integers(1, 10**7),
        st.integers(1, 400),
    ),
    st.builds(lambda f: {**LLAMA3, "factor": f / 4}, st.integers(5, 400)),
)
expressible = st.fixed_dictionaries(
    {
        "taps": st.lists(st.integers(0, 31), min_size=3, max_size=3),
        "residual": st.sampled_from(["before hidden_norm", "after hidden_norm"]),
        "rope": ropes,
        "max_positions": st.integers(1, 2**31 - 1),
    },
    optional={
        "fc_norm": st.sampled_from(["none", "joint"]),
        "feedback": st.just("before the last norm"),
        "window": st.none(),
        "layers": st.just(1),
        "draft_vocab_size": st.just(100),
        "embedding": st.just("own"),
        "vocab_map": st.just("offsets"),
    },
)


@settings(max_examples=200, deadline=None)
@given(expressible)
def test_what_is_written_is_wired(facts: dict[str, Any]) -> None:
    contract = declared(**facts)
    fields = llama_cpp.write(contract, CONFIG, TARGET, LAUNCH)
    made = llama_cpp.wire(Files(fields), TARGET, LAUNCH)
    assert list(contract.differences(made.facts)) == []
    assert made.taps == tuple(facts["taps"])
    assert made.refusals == ()
    old = {**facts, "fc_norm": "none"}
    fields = llama_cpp.write(declared(**old), CONFIG, TARGET, OLD)
    assert list(declared(**old).differences(llama_cpp.wire(Files(fields), TARGET, OLD).facts)) == []


def test_the_joint_norm_came_with_a_release() -> None:
    with pytest.raises(CannotExpress, match="fc_norm: joint is wanted, the nearest there is none"):
        llama_cpp.write(declared(taps=[1, 2, 3], fc_norm="joint"), CONFIG, TARGET, OLD)


OUTSIDE = {
    "feedback": ("after the last norm", "before the last norm"),
    "fc_norm": ("each", "none"),
    "layers": (2, 1),
    "attention_bias": (True, False),
    "qk_norm": (True, False),
    "window": (2048, None),
    "head_norm": (False, True),
    "position_offset": (1, 0),
    "attention": ("mla", "gqa"),
    "tap_state": ("branch", "stream"),
    "rope": (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 1e4},
    ),
}


@pytest.mark.parametrize("fact", OUTSIDE)
def test_what_has_no_place_is_named_with_the_nearest(fact: str) -> None:
    wanted, nearest = OUTSIDE[fact]
    with pytest.raises(CannotExpress, match=fact) as caught:
        llama_cpp.write(declared(taps=[1, 2, 3], **{fact: wanted}), CONFIG, TARGET, LAUNCH)
    (lost,) = caught.value.facts
    assert (lost.fact, lost.wanted, lost.nearest) == (fact, wanted, nearest)
    assert lost.why
    assert "0274f0f" in lost.source.where


@pytest.mark.parametrize("taps", [[2, 16], [1, 2, 3, 4], [2, 16, 32], [-1, 2, 3]])
def test_three_taps_that_are_inputs_of_layers(taps: list[int]) -> None:
    with pytest.raises(CannotExpress) as caught:
        llama_cpp.write(declared(taps=taps), CONFIG, TARGET, LAUNCH)
    (lost,) = caught.value.facts
    assert (lost.fact, lost.wanted, lost.nearest) == ("taps", taps, [2, 16, 29])


def test_everything_that_is_lost_is_said_at_once() -> None:
    facts = {name: wanted for name, (wanted, _) in OUTSIDE.items()}
    with pytest.raises(CannotExpress) as caught:
        llama_cpp.write(declared(taps=[1, 2, 3, 4], **facts), CONFIG, TARGET, LAUNCH)
    assert {lost.fact for lost in caught.value.facts} == {"taps", *OUTSIDE}


def test_taps_that_nobody_knows_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="taps are not known"):
        llama_cpp.write(declared(layers=1), CONFIG, TARGET, LAUNCH)


# -- a GGUF of somebody ----------------------------------------------------------------------------------------------


def gguf(**changed: Any) -> Wiring:
    fields = llama_cpp.write(declared(taps=[1, 2, 3]), CONFIG, TARGET, LAUNCH)
    return llama_cpp.wire(Files({**fields, **{k.replace("__", "."): v for k, v in changed.items()}}), TARGET, LAUNCH)


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"eagle3__target_layers": [1, 2]}, "taps-too-few"),
        ({"eagle3__target_layers": [1, 2, 32]}, "taps-too-few"),
        ({"eagle3__block_count": 2}, "layers-dropped"),
        ({"tokenizer__ggml__model": None}, "tokenizer-differs"),
    ],
)
def test_a_gguf_that_is_not_loaded(changed: dict[str, Any], cause: str) -> None:
    assert [r.cause for r in gguf(**changed).refusals] == [cause]


def test_a_gguf_of_another_model() -> None:
    with pytest.raises(CheckpointError, match="architecture 'llama'"):
        gguf(general__architecture="llama")
    with pytest.raises(CheckpointError, match=r"rope\.freq_base of the GGUF is 'x'"):
        gguf(eagle3__rope__freq_base="x")
