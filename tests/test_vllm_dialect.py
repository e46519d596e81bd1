"""vLLM's tables against what vLLM's own code said, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from eyas import causes
from eyas.contract import FACTS
from eyas.dialects import vllm
from eyas.dialects.vllm import reading, targets, weights
from eyas.dialects.vllm.keys import taps_built_for
from eyas.dialects.wiring import Files, Launch, TargetFacts, Wiring
from eyas.inventory import TensorInfo
from vllm_said import NEWEST, cases, judged, recorded, said_by_vllm, wired

ASKED = cases("vllm-ask")
ANSWERED = [case for case in ASKED if "error" not in case.values[0]["answer"]]


def test_the_recordings_are_of_the_version_the_tables_are_of() -> None:
    for name in ("vllm-ask", "vllm-weights", "vllm-taps"):
        assert recorded(name)["version"] == vllm.VERSIONS[-1]
    assert len(ASKED) > 60


def test_targets_classes_are_those_of_its_registry() -> None:
    """What cannot be imported in an environment without CUDA and pictures is read only."""
    classes = recorded("vllm-ask")["classes"]
    assert set(classes) == targets.SUPPORTING | targets.OTHERS
    assert {n for n, has in classes.items() if has} <= targets.SUPPORTING
    stub = {"DeepseekV4ForConditionalGeneration"}  # that raises, in the place of the class CUDA has
    assert {n for n, has in classes.items() if has is False} <= targets.OTHERS | stub
    assert sum(has is not None for has in classes.values()) > 150


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
    sliding = heard.get("layer_types", [""])[0] == "sliding_attention"
    assert facts["window"] == (heard["sliding_window"] if sliding else None)
    norms = (heard.get("norm_before_fc", False), heard.get("fc_norm", False))
    words = {(False, False): "none", (True, False): "joint", (False, True): "each"}
    assert facts["fc_norm"] == words.get(norms, "joint, then each")


@pytest.mark.parametrize("case", ANSWERED)
def test_the_class_and_the_runner_are_those_it_takes(case: dict[str, Any]) -> None:
    read = reading.read(case["config"])
    assert read.architecture == case["answer"]["drafter"]["class"] or case["name"] == "method not told"
    assert said_by_vllm(case, None).runner == case["answer"]["runner_with_triton"]


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
    """The drafter's own limit stays its own; how far it is driven past it differs between the runners."""
    heard, own = case["answer"]["drafter"], said_by_vllm(case, "v2").facts["max_positions"]
    raised = any("max_position_embeddings from" in line["text"] for line in case["answer"]["said"])
    assert raised == (own < heard["config"]["max_position_embeddings"])
    for runner in ("v1", "v2"):
        wiring = said_by_vllm(case, runner)
        (note,) = [
            n for n in wiring.keys if n.key.endswith("max_position_embeddings") and n.effect == "overridden"
        ] or [None]
        assert (note is not None) == raised == ("position-limit-short" in [cause for cause, _, _ in wiring.warnings])
        if note is not None:
            assert str(heard["config"]["max_position_embeddings"]) in note.why
            assert ("drafts no more" in note.why) == (runner == "v1")
            assert heard["max_model_len"] == own  # what the V1 runner compares with


# -- vLLM's drafter classes and their loader ------------------------------------------------------------------


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
