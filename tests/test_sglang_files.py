"""What SGLang does with keys and tensors of a drafter's files, and the installed engine's own word through a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from eyas import causes
from eyas.dialects import sglang
from eyas.dialects.wiring import Files, Launch, TargetFacts
from test_dialect_sglang import CONFIG, KIMI, NEW, OLD, wire, with_ids

ASK = Path(__file__).parents[1] / "src" / "eyas" / "engines" / "inside" / "sglang_ask.py"
LAYER = {
    **{f"self_attn.{p}_proj.weight": (4, 4) for p in "qkvo"},
    **{f"mlp.{p}_proj.weight": (4, 4) for p in ("gate", "up", "down")},
    **{f"{n}.weight": (7168,) for n in ("input_layernorm", "post_attention_layernorm", "hidden_norm")},
}
TENSORS: dict[str, tuple[int, ...]] = {
    **{f"midlayer.{name}": shape for name, shape in LAYER.items()},
    "fc.weight": (7168, 21504),
    "norm.weight": (7168,),
    "lm_head.weight": (32000, 7168),
    "d2t": (32000,),
}
EMBEDDING = {"embed_tokens.weight": (163840, 7168)}


def notes(config: dict[str, Any], tensors: dict[str, tuple[int, ...]], **options: Any) -> set[tuple[str, str, str]]:
    return {(n.tensor, n.effect, n.loudness) for n in wire(config, tensors=tensors, **options).tensors}


def without(*names: str) -> dict[str, tuple[int, ...]]:
    return {k: v for k, v in TENSORS.items() if k not in names}


CLEAN = {("embed_tokens.weight", "shared", "silent")}


def test_a_whole_drafter_of_either_layout_loads() -> None:
    renamed = {name.replace("midlayer", "layers.0"): shape for name, shape in TENSORS.items()}
    prefixed = {f"model.{n}" if n not in ("lm_head.weight", "d2t") else n: shape for n, shape in renamed.items()}
    for tensors in (TENSORS, renamed, prefixed):
        assert notes(with_ids(0, 3, 31), tensors) == CLEAN
        wiring = wire(with_ids(0, 3, 31), tensors=tensors)
        assert (wiring.refusals, wiring.facts["vocab_map"]) == ((), "offsets")


@pytest.mark.parametrize(
    ("keys", "more", "expected"),
    [
        ({}, EMBEDDING, {("embed_tokens.weight", "overwritten", "silent")}),
        ({}, {"t2d": (163840,)}, {*CLEAN, ("t2d", "dropped", "silent")}),
        ({"attention_bias": True}, {"midlayer.self_attn.q_proj.bias": (4,)},
         {*CLEAN, ("midlayer.self_attn.q_proj.bias", "dropped", "silent"),
          ("layers.0.self_attn.o_proj.bias", "unfilled", "silent")}),
        ({}, {"midlayer.self_attn.q_norm.weight": (4,)},
         {*CLEAN, ("midlayer.self_attn.q_norm.weight", "dropped", "silent")}),
        ({}, {"input_norm.weight": (21504,)}, {*CLEAN, ("input_norm.weight", "dropped", "silent")}),
        ({"norm_before_fc": True}, {"input_norm.weight": (21504,)}, CLEAN),
        ({"norm_before_fc": True}, {}, {*CLEAN, ("input_norm.weight", "unfilled", "silent")}),
        ({"use_aux_norm": True}, {f"aux_norm_{p}.weight": (7168,) for p in ("low", "mid", "high")}, CLEAN),
        ({}, {"model.model.norm.weight": (7168,)}, {*CLEAN, ("model.model.norm.weight", "dropped", "silent")}),
        ({}, {"layers.1.hidden_norm.weight": (7168,)}, {*CLEAN, ("layers.1.hidden_norm.weight", "dropped", "silent")}),
        ({"draft_vocab_size": None}, {},
         {*CLEAN, ("lm_head.weight", "overwritten", "silent")}),
        ({"tie_word_embeddings": True}, {}, {*CLEAN, ("lm_head.weight", "dropped", "silent")}),
    ],
)  # fmt: skip
def test_tensors_that_are_not_simply_loaded(keys: dict[str, Any], more: Any, expected: Any) -> None:
    assert notes(with_ids(0, 3, 31, **keys), {**TENSORS, **more}) == expected


@pytest.mark.parametrize(
    ("name", "as_named"),
    [
        ("lm_head.weight", "lm_head.weight"), ("fc.weight", "fc.weight"), ("d2t", "d2t"),
        ("midlayer.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight"),
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
    ],
)  # fmt: skip
def test_missing_tensors_are_named(name: str, as_named: str) -> None:
    assert notes(with_ids(0, 3, 31), without(name)) == {*CLEAN, (as_named, "unfilled", "silent")}


@pytest.mark.parametrize(("words", "expected"), [(32000, "offsets"), (163840, "none")])
def test_a_map_of_the_whole_vocabulary_is_none(words: int, expected: str) -> None:
    tensors = {**TENSORS, "lm_head.weight": (words, 7168), "d2t": (words,)}
    assert wire(with_ids(0, 3, 31, draft_vocab_size=words), tensors=tensors).facts["vocab_map"] == expected


def test_an_embedding_of_another_width_is_kept() -> None:
    target = TargetFacts("LlamaForCausalLM", 30, 576, 163840)
    config = with_ids(1, 14, 26, target_hidden_size=576)
    wiring = wire(config, target, tensors={**TENSORS, **EMBEDDING, "fc.weight": (7168, 3 * 576)})
    assert (wiring.facts["embedding"], wiring.tensors, wiring.refusals) == ("own", (), ())


def test_a_later_layer_is_normed_by_hidden_norm() -> None:
    second = {f"layers.1.{name}": shape for name, shape in LAYER.items() if name != "hidden_norm.weight"}
    wiring = wire(with_ids(0, 3, 31, num_hidden_layers=2), tensors={**TENSORS, **second})
    assert wiring.facts["later_norm"] == "hidden_norm"
    assert {(n.tensor, n.effect) for n in wiring.tensors} == {
        ("embed_tokens.weight", "shared"),
        ("layers.1.hidden_norm.weight", "unfilled"),
        ("layers.1.input_layernorm.weight", "dropped"),
    }


def test_latent_attention_warns_of_what_it_drops() -> None:
    mla = with_ids(0, 3, 31, architectures=["Eagle3DeepseekV2ForCausalLM"], norm_before_fc=True, fc_norm=True)
    wiring = wire(mla, tensors={"model.norm.weight": (7168,), "input_norm.weight": (1,), "norm.weight": (7168,)})
    assert (wiring.facts["attention"], wiring.facts["fc_norm"]) == ("mla", "each")
    dropped = {(n.tensor, n.loudness) for n in wiring.tensors if n.effect == "dropped"}
    assert dropped == {("model.norm.weight", "warning"), ("input_norm.weight", "warning")}
    assert "layers.0.self_attn.kv_b_proj.weight" in {n.tensor for n in wiring.tensors if n.effect == "unfilled"}
    assert wire(mla, version=OLD).facts["fc_norm"] == "none"


@pytest.mark.parametrize(
    ("config", "key", "effect", "fact", "value"),
    [
        ({**CONFIG, "eagle_aux_hidden_state_layer_ids": [0, 3, 31]},
         "eagle_aux_hidden_state_layer_ids", "ignored", "taps", [2, 30, 58]),
        (CONFIG, "eagle_config.eagle_aux_hidden_state_layer_ids", "defaulted", "taps", [2, 30, 58]),
        (with_ids(0, 3, 31, norm_before_residual=True), "norm_before_residual", "ignored", "residual",
         "before hidden_norm"),
        (with_ids(0, 3, 31, attention_bias=True), "attention_bias", "overridden", "attention_bias", False),
        (with_ids(0, 3, 31, sliding_window=2048), "sliding_window", "ignored", "window", None),
        (with_ids(0, 3, 31, tie_word_embeddings=True), "tie_word_embeddings", "overridden", "head", "target"),
        (with_ids(0, 3, 31, draft_vocab_size=None), "draft_vocab_size", "defaulted", "head", "target"),
        (with_ids(0, 3, 31, rope_theta=None), "rope_theta", "defaulted", "rope",
         {"rope_type": "default", "rope_theta": 10000.0}),
        (with_ids(0, 3, 31, rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "rope_theta", "ignored",
         "rope", {"rope_type": "default", "rope_theta": 7.0}),
    ],
)  # fmt: skip
def test_keys_not_taken_at_their_word(config: dict[str, Any], key: str, effect: str, fact: str, value: Any) -> None:
    wiring = wire(config)
    assert (key, effect) in {(note.key, note.effect) for note in wiring.keys}
    assert wiring.facts[fact] == value


def test_the_nested_switch_wins_and_the_old_release_reads_neither() -> None:
    config = with_ids(0, 3, 31, norm_before_fc=True)
    config["eagle_config"]["norm_before_fc"] = False
    assert wire(config).facts["fc_norm"] == "none"
    config["eagle_config"]["norm_before_fc"] = True
    assert wire(config).facts["fc_norm"] == "joint"
    assert wire(config, version="0.5.17").facts["fc_norm"] == "joint"
    assert wire(config, version="0.5.16").facts["fc_norm"] == "none"


def test_fc_is_skipped_where_widths_coincide() -> None:
    wiring = wire(with_ids(1, hidden_size=7168), TargetFacts("LlamaForCausalLM", 30, 7168, 163840))
    assert (wiring.taps, wiring.facts["fc"], wiring.refusals) == ((2,), "skipped", ())


@pytest.mark.parametrize(
    ("architecture", "ids", "taps", "state"),
    [
        ("Gemma3ForConditionalGeneration", [2, 30, 58], (3, 31, 59), "branch"),
        ("Gemma4ForConditionalGeneration", [2, 30, 58], (3, 31, 59), "stream"),
        ("MiniMaxM3SparseForConditionalGeneration", None, (3, 31, 59), "stream"),
        ("GptOssForCausalLM", [2, 30, 61], (2, 30, 61), "stream"),
        ("GptOssForCausalLM", [58, 2, 30], (3, 31, 59), "stream"),
    ],
)
def test_taps_by_target(architecture: str, ids: Any, taps: tuple[int, ...], state: str) -> None:
    wiring = wire(CONFIG if ids is None else with_ids(*ids), TargetFacts(architecture, 61, 7168, 163840))
    assert (wiring.taps, wiring.facts["tap_state"]) == (taps, state)


def test_targets_that_cannot() -> None:
    no_method = wire(with_ids(1, 2, 3), TargetFacts("NemotronHForCausalLM", 61, 7168, 163840))
    assert [r.cause for r in no_method.refusals] == ["engine-cannot-express"]
    assert "set_eagle3_layers_to_capture" in no_method.refusals[0].why
    past = wire(with_ids(1, 2, 60), TargetFacts("Qwen3MoeForCausalLM", 61, 7168, 163840))
    assert [(r.cause, r.when) for r in past.refusals] == [("taps-too-few", "start")]
    unnamed = wire(with_ids(1, 2, 3), None)
    assert unnamed.taps is None
    assert "no target" in str(unnamed.assumed)


@pytest.mark.parametrize(
    ("line", "slug"),
    [
        ("SGLANG_SIMULATE_ACC_LEN=3", "acceptance-faked"),
        ("--speculative-algorithm EAGLE", "algorithm-eagle"),
        ("--quantization fp8", "drafter-target-quantisation"),
        ("--device cpu", "verify-greedy"),
    ],
)
def test_launches_that_are_warned_of(line: str, slug: str) -> None:
    wiring = wire(with_ids(0, 3, 31), line=line)
    assert slug in [found for found, *_ in wiring.warnings]
    assert all(causes.cause(found) for found, *_ in wiring.warnings)


def test_positions_window_and_overrides() -> None:
    target = TargetFacts("LlamaForCausalLM", 61, 7168, 163840, {"max_position_embeddings": 32768})
    stopped = wire(with_ids(1, 29, 57), target)
    assert [r.cause for r in stopped.refusals] == ["position-limit-short"]
    raised = wire(with_ids(1, 29, 57), target, line="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1")
    assert (raised.refusals, raised.facts["max_positions"]) == ((), 32768)
    assert wire(with_ids(1, 29, 57), target, line="--context-length 4096").refusals == ()
    assert wire(CONFIG, line="--speculative-draft-window-size 2048").facts["window"] == 2048
    overridden = wire(CONFIG, line="--json-model-override-args '{\"rope_theta\": 9.0}'")
    assert overridden.facts["rope"]["rope_theta"] == 9.0
    (unknown,) = [n for n in wire(CONFIG, line="--tp 8").flags if n.flag == "--tp"]
    assert unknown.requested == "8"


def test_versions_between_and_beside_say_what_stands_in() -> None:
    def assumed(version: str) -> str | None:
        return sglang.wire(Files(with_ids(2, 30, 58)), KIMI, Launch(Version(version))).assumed

    assert assumed(NEW) is None
    assert "0.5.23 stand in for 0.5.19" in str(assumed("0.5.19"))
    assert f"{OLD} stand in for 0.5.9" in str(assumed("0.5.9"))
    assert "minus-one" in str(assumed(f"{NEW}+cu129"))
    old = sglang.wire(Files(with_ids(2, 30, 58)), KIMI, Launch(Version("0.5.10.post1")))
    assert "rate-definition-old" in [slug for slug, *_ in old.warnings]


# -- the installed engine's own word -------------------------------------------------------------------------------

MODEL = """
class MiniModel:
    def forward(self, hidden_states, residual):
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux.append(hidden_states + residual)
class MiniForCausalLM:
    def __init__(self, config):
        self.model = MiniModel(config)
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        self.model.layers_to_capture = [val + 1 for val in layer_ids]
EntryClass = MiniForCausalLM
"""
RUNNER = """
def init():
    try:
        eagle_config = getattr(draft_model_config.hf_config, "eagle_config", None)
        self.eagle_use_aux_hidden_state = eagle_config.get("use_aux_hidden_state", True)
        self.eagle_aux_hidden_state_layer_ids = eagle_config["eagle_aux_hidden_state_layer_ids"]
    except:
        self.eagle_aux_hidden_state_layer_ids = None
"""
ARGUMENTS = """
class ServerArgs:
    speculative_algorithm: Optional[str] = None
    speculative_num_steps: Optional[int] = None
    speculative_eagle_topk: Optional[int] = None
    speculative_num_draft_tokens: Optional[int] = None
    def _handle_speculative_decoding(self):
        if self.speculative_eagle_topk == 1 and self.speculative_num_draft_tokens != self.speculative_num_steps + 1:
            logger.warning("adjusted to %s", self.speculative_num_steps + 1)
            self.speculative_num_draft_tokens = self.speculative_num_steps + 1
def _resolve_speculative_algorithm_alias(algorithm, path):
    return algorithm
"""


@pytest.mark.parametrize(("ids", "taps", "why"), [([2, 4], [3, 5], None), ([-1, 2], None, "TypeError")])
def test_the_installed_engine_is_asked(tmp_path: Path, ids: list[int], taps: Any, why: str | None) -> None:
    for name, text in {
        "__init__.py": "raise ImportError('needs a GPU')",
        "_version.py": "__version__ = '9.9'",
        "srt/models/mini.py": MODEL,
        "srt/model_executor/model_runner.py": RUNNER,
        "srt/server_args.py": ARGUMENTS,
    }.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    request = {
        "config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        "target_config": {"architectures": ["MiniForCausalLM"], "num_hidden_layers": 8},
        "flags": [
            "--speculative-num-steps",
            "1",
            "--speculative-num-draft-tokens",
            "16",
            "--speculative-eagle-topk",
            "1",
        ],
    }
    done = subprocess.run(
        [sys.executable, str(ASK)],
        input=json.dumps(request), capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["engine"], answer["version"], answer["taps"]) == ("sglang", "9.9", {"sglang": taps})
    assert why is None or why in answer["why"]
    assert {"flag": "--speculative-num-draft-tokens", "requested": 16, "resolved": 2} in answer["flags"]
    assert answer["said"] == [["warning", "adjusted to 2"]]
