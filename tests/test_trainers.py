"""What a drafter's files mean, as its trainer wrote them: the public drafters' configs, rebuilt, each with the whole
contract expected of it; how trainers are told apart; and what is left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.contract import declared
from eyas.dialects.meaning import TRAINERS, Meaning, meaning
from eyas.dialects.reading import EAGLE_3
from eyas.dialects.wiring import Files, TargetFacts
from eyas.inventory import TensorInfo

CONFIGS = Path(__file__).parent / "fixtures" / "configs"


def config(name: str, **changes: Any) -> dict[str, Any]:
    found = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return {k: v for k, v in {**found, **changes}.items() if v is not ...}


def target(architecture: str, layers: int, width: int, vocab: int) -> TargetFacts:
    return TargetFacts(architecture, layers, width, vocab)


QWEN3_8B = target("Qwen3ForCausalLM", 36, 4096, 151936)
QWEN3_30B = target("Qwen3MoeForCausalLM", 48, 2048, 151936)
QWEN_VL = target("Qwen2_5_VLForConditionalGeneration", 28, 3584, 152064)
DEEPSEEK = target("DeepseekV3ForCausalLM", 61, 7168, 129280)
KIMI = target("KimiK25ForConditionalGeneration", 61, 7168, 163840)
GPT_OSS = target("GptOssForCausalLM", 36, 2880, 201088)
GPT_OSS_20B = target("GptOssForCausalLM", 24, 2880, 201088)
GEMMA3 = target("Gemma3ForCausalLM", 26, 1152, 262144)
LLAMA_8B = target("LlamaForCausalLM", 32, 4096, 128256)
LLAMA_70B = target("LlamaForCausalLM", 80, 8192, 128256)
VICUNA = target("LlamaForCausalLM", 40, 5120, 32000)
SCOUT = target("Llama4ForConditionalGeneration", 48, 5120, 202048)
MINIMAX = target("MiniMaxM2ForCausalLM", 62, 3072, 200064)
GEMMA4 = target("Gemma4ForConditionalGeneration", 60, 5376, 262144)
QWEN3_32B = target("Qwen3ForCausalLM", 64, 5120, 151936)
QWEN3_4B = target("Qwen3ForCausalLM", 36, 2560, 151936)


def usual(theta: float = 1e4, **changes: Any) -> dict[str, Any]:
    """The facts of an EAGLE-3 drafter that differs from the usual one as said; ``...`` for one that is open."""
    facts = {
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
        "window": None,
        "embedding": "target",
        "head": "own",
        "draft_vocab_size": 32000,
        "vocab_map": "offsets",
        "rope": {"rope_type": "default", "rope_theta": theta},
    }
    return {k: v for k, v in {**facts, **changes}.items() if v is not ...}


AFTER: dict[str, Any] = {"residual": "after hidden_norm", "position_offset": 1}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
KIMI_YARN = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
WHOLE: dict[str, Any] = {"draft_vocab_size": 201088, "vocab_map": "none", "max_positions": 131072}

PUBLIC: dict[str, tuple[TargetFacts, str, dict[str, Any]]] = {
    "specforge-qwen3-8b": (QWEN3_8B, "specforge", usual(1e6, taps=(2, 18, 33), max_positions=40960)),
    "specforge-qwen3-30b-eagle3.1": (
        QWEN3_30B,
        "specforge",  # norm_output true: a norm before the head, and the next depth is fed the state before it
        usual(1e6, taps=(2, 24, 45), fc_norm="each", max_positions=2048),
    ),
    "specforge-deepseek-v3": (DEEPSEEK, "plain", usual(taps=(2, 30, 58), max_positions=163840)),
    "specforge-gpt-oss-120b": (GPT_OSS, "plain", usual(max_positions=4096)),
    "specforge-qwen2.5-vl-7b": (
        QWEN_VL,
        "specforge",
        usual(
            taps=(2, 14, 25),
            rope={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            max_positions=8192,
        ),
    ),
    "specforge-gemma3-1b": (
        GEMMA3,
        "specforge",  # its sliding_window of 512 is the target's and read by nobody
        usual(1e6, taps=(2, 13, 23), tap_state="branch", max_positions=32768),
    ),
    "torchspec-kimi-k2.5": (
        KIMI,
        "specforge",
        usual(1e6, taps=(2, 30, 58), draft_vocab_size=163840, vocab_map="none", max_positions=262144),
    ),
    "lmsys-llama4-scout": (SCOUT, "plain", usual(5e5, taps=(2, 24, 45), max_positions=1048576)),
    "eagle-llama3.1-8b": (LLAMA_8B, "eagle", usual(taps=(2, 16, 29), max_positions=2048)),
    "eagle-llama3.3-70b": (LLAMA_70B, "eagle", usual(taps=(2, 40, 77), embedding="own", max_positions=2048)),
    "eagle-vicuna-13b": (
        VICUNA,
        "eagle",  # num_hidden_layers 40 is the target's; there is one layer
        usual(taps=(2, 20, 37), vocab_map="none", max_positions=2048),
    ),
    "thoughtworks-minimax-m2.5": (MINIMAX, "plain", usual(5e6, taps=(2, 31, 59), max_positions=32768)),
    "nebius-gpt-oss-20b": (
        GPT_OSS_20B,
        "plain",
        usual(
            taps=(2, 12, 21),
            draft_vocab_size=64000,
            rope={"rope_type": "yarn", "rope_theta": 1.5e5, **YARN, "truncate": False},
            max_positions=131072,
        ),
    ),
    "redhat-llama3.1-8b": (
        LLAMA_8B,
        "speculators",
        usual(
            **AFTER,
            taps=(2, 16, 29),
            embedding=...,
            rope={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            max_positions=131072,
        ),
    ),
    "redhat-qwen3-32b": (
        QWEN3_32B,
        "speculators",
        usual(1e6, **AFTER, taps=(2, 32, 61), embedding=..., max_positions=40960),
    ),
    "redhat-gpt-oss-20b": (
        GPT_OSS_20B,
        "speculators",
        usual(**AFTER, taps=(2, 12, 21), fc_norm="joint", draft_vocab_size=64000, max_positions=131072, depths=3),
    ),
    "redhat-gemma4-31b": (GEMMA4, "speculators", usual(**AFTER, taps=(2, 30, 57), max_positions=262144, depths=3)),
    "speculators-qwen3-8b-eagle3.1": (
        QWEN3_8B,
        "speculators",
        usual(
            1e6,
            **AFTER,
            taps=(2, 18, 33),
            fc_norm="joint",
            feedback="after the last norm",
            window=2048,
            max_positions=40960,
            depths=3,
        ),
    ),
    "redhat-llama4-maverick": (
        SCOUT,
        "speculators",
        usual(5e5, position_offset=1, embedding=..., draft_vocab_size=202048, vocab_map="none", max_positions=1048576),
    ),
    "nvidia-gpt-oss-120b-long-context": (
        GPT_OSS,
        "modelopt",
        usual(1.5e5, taps=(2, 18, 33), head=..., **WHOLE),
    ),
    "nvidia-gpt-oss-120b-short-context": (GPT_OSS, "modelopt", usual(1.5e5, fc="skipped", head=..., **WHOLE)),
    "nvidia-gpt-oss-120b-v3": (
        GPT_OSS,
        "modelopt",
        usual(taps=(24, 30, 36), fc_norm="joint", head=..., rope=..., **WHOLE),
    ),
    "nvidia-llama4-maverick": (
        SCOUT,
        "modelopt",
        usual(5e5, taps=(2, 24, 45), head=..., draft_vocab_size=202048, vocab_map="none", max_positions=1048576),
    ),
    "nvidia-kimi-k2.5": (
        KIMI,
        "modelopt",
        usual(
            taps=(2, 30, 58),
            attention="mla",
            head=...,
            draft_vocab_size=163840,
            vocab_map="none",
            rope={"rope_type": "yarn", "rope_theta": 5e4, **KIMI_YARN, "original_max_position_embeddings": 4096},
            max_positions=262144,
        ),
    ),
    "angelslim-qwen3-4b": (QWEN3_4B, "angelslim", usual(taps=(2, 18, 33), rope=..., max_positions=40960)),
    "angelslim-qwen3-vl-4b": (
        QWEN3_4B,
        "angelslim",
        usual(
            taps=(2, 18, 33),
            rope={
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
            max_positions=262144,
        ),
    ),
    "case-kimi-k2.5": (KIMI, "plain", usual(5e4, max_positions=262144)),
}
LEFT_OPEN: dict[str, dict[str, tuple[Any, ...]]] = {
    "specforge-gpt-oss-120b": {"taps": ((2, 18, 34), (1, 17, 33))},
    "case-kimi-k2.5": {"taps": ((3, 31, 59), (2, 30, 58))},
    "redhat-llama4-maverick": {"taps": ((2, 24, 45), (1, 23, 44))},
    "nvidia-gpt-oss-120b-v3": {
        "rope": (
            {"rope_type": "default", "rope_theta": 1.5e5},
            {
                "rope_type": "yarn",
                "rope_theta": 1.5e5,
                "factor": 32.0,
                "original_max_position_embeddings": 2048,
            },
        )
    },
    "angelslim-qwen3-4b": {
        "rope": ({"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6})
    },
}


def values(found: Meaning) -> dict[str, Any]:
    return {name: found.contract[name] for name in found.contract}


def test_every_rebuilt_config_is_in_the_table() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_drafter_is_read_as_it_was_trained(name: str) -> None:
    on, trainer, facts = PUBLIC[name]
    found = meaning(Files(config(name)), on, name)
    assert (found.spelled_by, values(found)) == (trainer, facts)
    assert {a.fact: a.values for a in found.ambiguous} == LEFT_OPEN.get(name, {})
    assert found.why
    assert all(a.separate for a in found.ambiguous)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_two_trainers_claim_one_folder(name: str) -> None:
    claims = [trainer for trainer, recognise, _ in TRAINERS if recognise(Files(config(name)))]
    assert claims == [t for t in (PUBLIC[name][1],) if t != "plain"]


@pytest.mark.parametrize("name", PUBLIC)
def test_without_a_target_nothing_else_is_claimed(name: str) -> None:
    """Facts are the same where they are still known, and taps are never guessed."""
    with_target, without = (values(meaning(Files(config(name)), on, name)) for on in (PUBLIC[name][0], None))
    differing = {k for k, v in with_target.items() if without.get(k, v) != v}
    assert differing <= {"tap_state"}
    assert set(without) <= set(with_target)
    assert set(with_target) - set(without) <= {"taps"}


def test_the_table_of_defaults_is_the_usual_drafter() -> None:
    assert {k: v for k, v in usual().items() if k in EAGLE_3} == dict(EAGLE_3)


# -- told by tensors ------------------------------------------------------------------------------------------


def shapes(*names: str, **widths: tuple[int, ...]) -> dict[str, TensorInfo]:
    every = {**dict.fromkeys(names, (1,)), **{k.replace("__", "."): v for k, v in widths.items()}}
    return {name: TensorInfo(name, "BF16", shape, "model.safetensors") for name, shape in every.items()}


EXPORTED = shapes("midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t")


def test_specforge_is_told_by_what_its_exporter_leaves_out() -> None:
    """gpt-oss with layers that are nobody's default: SpecForge's are counted as SGLang counts them."""
    gpt_oss = config("specforge-gpt-oss-120b")
    found = meaning(Files(gpt_oss, EXPORTED), GPT_OSS, "x")
    assert (found.spelled_by, found.contract["taps"], found.ambiguous) == ("specforge", (2, 18, 34), ())
    assert found.contract.facts["taps"].origin == "declared"
    with_embedding = Files(gpt_oss, EXPORTED | shapes("embed_tokens.weight"))
    assert meaning(with_embedding, GPT_OSS, "x").spelled_by == "plain"
    named_otherwise = Files(gpt_oss, {name.replace("midlayer.", "layers.0."): i for name, i in EXPORTED.items()})
    assert meaning(named_otherwise, GPT_OSS, "x").spelled_by == "plain"


@pytest.mark.parametrize(
    ("on", "ids", "taps", "open_"),
    [
        (DEEPSEEK, [1, 29, 57], (2, 30, 58), ()),
        (DEEPSEEK, [2, 30, 58], None, ((2, 30, 58), (3, 31, 59))),  # before and after SGLang looked at the first id
        (GPT_OSS, [1, 17, 36], None, ((1, 17, 36), (2, 18, 37))),  # and at the last
        (QWEN3_8B, [2, 18, 33], (3, 19, 34), ()),
        (None, [1, 17, 33], (2, 18, 34), ()),
        (None, [2, 18, 33], None, ((2, 18, 33), (3, 19, 34))),
    ],
)
def test_specforge_counts_as_the_sglang_that_captured(
    on: TargetFacts | None, ids: list[int], taps: tuple[int, ...] | None, open_: tuple[tuple[int, ...], ...]
) -> None:
    written = config("specforge-gpt-oss-120b", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    found = meaning(Files(written, EXPORTED), on, "x")
    assert found.spelled_by == "specforge"
    assert found.contract.facts["taps"].value == taps if taps else "taps" not in found.contract
    assert [a.values for a in found.ambiguous] == ([open_] if open_ else [])


NORM_OUTPUT = [
    # key, SpecForge: head_norm and feedback; who else; what plain leaves open
    (..., True, None),
    (True, True, ("feedback", ("after the last norm", "before the last norm"))),
    (False, False, ("head_norm", (True, False))),
]


@pytest.mark.parametrize(("key", "head_norm", "open_"), NORM_OUTPUT)
def test_norm_output_to_specforge_and_to_who_knows(key: Any, head_norm: bool, open_: tuple[str, Any] | None) -> None:
    trained = meaning(Files(config("specforge-qwen3-8b", norm_output=key)), QWEN3_8B, "x")
    assert trained.spelled_by == "specforge"
    assert trained.contract["head_norm"] is head_norm
    assert trained.contract["feedback"] == "before the last norm"
    assert trained.contract.facts["head_norm"].origin == ("defaulted" if key is ... else "declared")
    unknown = meaning(Files(config("lmsys-llama4-scout", norm_output=key)), SCOUT, "x")
    assert unknown.spelled_by == "plain"
    assert [(a.fact, a.values) for a in unknown.ambiguous] == ([open_] if open_ else [])
    assert open_ is None or open_[0] not in unknown.contract


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (["layers.0.self_attn.q_proj.bias", "lm_head.weight"], {"attention_bias": True, "head": "own"}),
        (["midlayer.self_attn.q_norm.weight"], {"qk_norm": True, "head": "target", "embedding": "target"}),
        (["model.embed_tokens.weight", "aux_norm_low.weight"], {"embedding": "own", "fc_norm": "each"}),
        (["input_norm.weight"], {"fc_norm": "joint"}),
        (["input_norm.weight", "fc_norm.0.weight"], {"fc_norm": "joint, then each"}),
        (["midlayer.self_attn.kv_b_proj.weight"], {"attention": "mla"}),
        (["midlayer.norm", "layers.1.hidden_norm.weight"], {"layers": 2, "later_norm": "hidden_norm"}),
        (["layers.0.norm", "layers.1.input_layernorm.weight"], {"layers": 2, "later_norm": "input_layernorm"}),
        (["layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight", "layers.0.x"], {"layers": 2}),
    ],
)
def test_tensors_tell_where_no_key_does(names: list[str], facts: dict[str, Any]) -> None:
    found = meaning(Files(config("lmsys-llama4-scout"), shapes(*names)), SCOUT, "x")
    told = {**{"embedding": "target", "head": "target"}, **facts}
    without = values(meaning(Files(config("lmsys-llama4-scout")), SCOUT, "x"))
    assert values(found) == {**without, **told}
    assert all(found.contract.facts[name].origin == "inferred" for name in told)


def test_four_states_and_no_layers_named_stay_unknown() -> None:
    four = Files(config("lmsys-llama4-scout"), shapes(fc__weight=(5120, 4 * 5120)))
    found = meaning(four, SCOUT, "x")
    assert "taps" not in found.contract
    assert any("fc takes 4 states" in note for note in found.notes)


def test_modelopt_s_switches_and_head() -> None:
    def read(names: list[str] | None, **inner: Any) -> Meaning:
        block = {**config("nvidia-gpt-oss-120b-long-context")["eagle_config"], **inner}
        written = config("nvidia-gpt-oss-120b-long-context", eagle_config=block)
        return meaning(Files(written, None if names is None else shapes(*names)), GPT_OSS, "x")

    usual_one, without_norm = read(None), read(None, use_last_layernorm=False)
    assert {**values(usual_one), "head_norm": False} == values(without_norm)
    assert {without_norm.contract.facts["head_norm"].origin, usual_one.contract.facts["head_norm"].origin} == {
        "declared"
    }
    assert "head" not in usual_one.contract  # a full vocabulary, and no tensors to tell
    assert read(["lm_head.weight"]).contract["head"] == "own"
    assert read(["fc.weight"]).contract["head"] == "target"
    # Hugging Face or vLLM's dump: nothing tells, but for ids that only one of them could mean
    assert [a.values for a in read(None, eagle_aux_hidden_state_layer_ids=[3, 9, 20]).ambiguous] == [
        ((4, 10, 21), (3, 9, 20))
    ]
    assert read(None, eagle_aux_hidden_state_layer_ids=[-1, 9, 20]).contract["taps"] == (0, 10, 21)


# -- eyas first -----------------------------------------------------------------------------------------------


def test_the_contract_in_the_file_comes_first_whatever_the_keys_say() -> None:
    ours = declared(taps=[0, 3, 31], feedback="after the last norm")
    block = {"schema": 1, "contract": ours.to_json(), "weights_sha256": "0"}
    for name in ("case-kimi-k2.5", "speculators-qwen3-8b-eagle3.1", "nvidia-gpt-oss-120b-v3"):
        found = meaning(Files(config(name, eyas=block)), KIMI, "x")
        assert (found.contract, found.spelled_by, found.ambiguous) == (ours, "eyas", ())
