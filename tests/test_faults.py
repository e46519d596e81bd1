"""From what an engine would wire, to the name of the fault. Wirings are written by hand here: the engines' own tables
have tests of their own, and ``test_show`` has both together."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from eyas.contract import Contract, Fact, Origin, declared
from eyas.dialects.wiring import FlagNote, KeyNote, Refusal, Source, TargetFacts, TensorNote, Wiring
from eyas.show import faults

N = 61
TARGET = TargetFacts("LlamaForCausalLM", N, 64, 128)
READ, INFERRED = Source("engine 1.0 file.py:1"), Source("engine 1.0 file.py:1", "inferred")


def wired(origin: Origin = "declared", **facts: Any) -> Contract:
    return Contract({name: Fact(value, origin) for name, value in facts.items()})


def wiring(facts: Contract, **parts: Any) -> Wiring:
    taps = next((fact.value for name, fact in facts.facts.items() if name == "taps"), None)
    return Wiring("engine", str(Version("1.0")), None, "table", taps, facts, **parts)


def causes(trained: Contract, served: Wiring) -> list[str]:
    return [finding.cause for finding in faults.differences(trained, served, TARGET, lambda fact: f"mend {fact}")]


@pytest.mark.parametrize(
    ("trained", "served", "cause"),
    [
        ((2, 30, 58), (2, 30, 58), None),
        ((2, 30, 58), (3, 31, 59), "taps-off-by-one"),
        ((2, 30, 58), (1, 29, 57), "taps-off-by-minus-one"),
        ((0, 3, 31), (2, 30, 58), "taps-engine-default"),
        ((0, 3, 31), (3, 31, 59), "taps-differ"),
        ((0, 3, 31), (3, 0, 31), "taps-swapped"),
        ((0, 3, 31), (31, 3, 0), "taps-reversed"),
        ((0, 3), (3, 0), "taps-swapped"),
        ((0, 3, 31), (3, 31), "taps-too-few"),
        ((0, 3, 31), (0, 3, 30), "taps-differ"),
    ],
)
def test_taps(trained: tuple[int, ...], served: tuple[int, ...], cause: str | None) -> None:
    assert causes(declared(taps=trained), wiring(wired(taps=served))) == ([cause] if cause else [])


def test_taps_nobody_asked_for_are_the_engines_default_whatever_they_look_like() -> None:
    """(2, 30, 58) is also (1, 29, 57) raised by one: where the ids came from decides."""
    trained = declared(taps=(1, 29, 57))
    assert causes(trained, wiring(wired("defaulted", taps=(2, 30, 58)))) == ["taps-engine-default"]
    assert causes(trained, wiring(wired("declared", taps=(2, 30, 58)))) == ["taps-off-by-one"]


@pytest.mark.parametrize(
    ("fact", "ours", "theirs", "cause"),
    [
        ("fc_norm", "each", "none", "fc-norm-skipped"),
        ("fc_norm", "joint", "none", "input-norm-skipped"),
        ("fc_norm", "joint, then each", "joint", "fc-norm-skipped"),
        ("fc_norm", "joint, then each", "each", "input-norm-skipped"),
        ("fc_norm", "each", "joint", "fc-norm-joint"),
        ("fc_norm", "none", "each", "fc-norm-added"),
        ("residual", "after hidden_norm", "before hidden_norm", "norm-before-residual-ignored"),
        ("feedback", "before the last norm", "after the last norm", "feedback-post-norm"),
        ("feedback", "after the last norm", "before the last norm", "feedback-pre-norm"),
        ("head_norm", False, True, "head-norm-added"),
        ("embedding", "own", "target", "embedding-overwritten"),
        ("head", "own", "target", "head-overwritten"),
        ("vocab_map", "offsets", "none", "d2t-missing"),
        ("vocab_map", "offsets", "ids", "d2t-read-as-ids"),
        ("qk_norm", True, False, "qk-norm-dropped"),
        ("attention_bias", True, False, "attention-bias-dropped"),
        ("fc", "applied", "skipped", "fc-skipped"),
        ("fc", "skipped", "applied", "engine-cannot-express"),
        ("tap_state", "stream", "branch", "taps-branch"),
        ("layers", 2, 1, "layers-dropped"),
        ("window", None, 2048, "window-from-target"),
        ("max_positions", 4096, 2048, "position-limit-short"),
        ("max_positions", 2048, 4096, None),
        ("mask", "a", "b", None),
    ],
)
def test_every_fact_has_its_cause(fact: str, ours: Any, theirs: Any, cause: str | None) -> None:
    found = causes(declared(**{fact: ours}), wiring(wired(**{fact: theirs})))
    assert found == ([cause] if cause else [])


PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("ours", "theirs", "unread", "cause"),
    [
        (PLAIN, {"rope_theta": 500000}, False, None),
        (PLAIN, {"type": "default", "rope_theta": 500000}, False, None),
        (PLAIN, {**PLAIN, "rope_theta": 10000.0}, False, "rope-base-wrong"),
        (PLAIN, {**PLAIN, "rope_theta": 10000.0}, True, "rope-base-unread"),
        (PLAIN, YARN, False, "rope-scaling-added"),
        (YARN, PLAIN, False, "rope-scaling-dropped"),
        (YARN, {**YARN, "factor": 8.0}, False, "rope-scaling-differs"),
        (YARN, {**YARN}, False, None),
    ],
)
def test_rope(ours: dict[str, Any], theirs: dict[str, Any], unread: bool, cause: str | None) -> None:
    keys = (KeyNote("rope_theta", 5e5, "ignored", "it reads another block", READ),) if unread else ()
    found = causes(declared(rope=ours), wiring(wired(rope=theirs), keys=keys))
    assert found == ([cause] if cause else [])


def test_only_what_was_declared_is_said_without_a_rival() -> None:
    served = wiring(wired(taps=(3, 31, 59)))
    for origin, sure in (("declared", True), ("measured", True), ("inferred", False), ("defaulted", False)):
        trained = Contract({"taps": Fact((2, 30, 58), origin)})
        (finding,) = faults.differences(trained, served, TARGET, lambda fact: None)
        assert finding.severity == "likely"
        assert (not finding.rivals) == sure
        assert origin in finding.evidence[0].source


def test_the_fix_and_the_rows_behind_a_fault_are_told() -> None:
    key = KeyNote("eagle_config.eagle_aux_hidden_state_layer_ids", [1], "ignored", "this runner looks elsewhere", READ)
    served = wiring(wired("defaulted", taps=(2, 30, 58)), keys=(key,))
    (finding,) = faults.differences(declared(taps=(0, 3, 31)), served, TARGET, lambda fact: f"mend {fact}")
    assert finding.fix == "mend taps"
    assert [piece.expected for piece in finding.evidence] == [[0, 3, 31], "this runner looks elsewhere"]
    assert finding.evidence[1].source == "engine 1.0 file.py:1 (read)"


def test_what_was_only_inferred_is_a_note() -> None:
    for source, severity in ((READ, "fatal"), (INFERRED, "note")):
        refusing = wiring(wired(), refusals=(Refusal("taps-too-few", "it reads two", "first forward", source),))
        assert [f.severity for f in faults.refusals(refusing)] == [severity]
        unfilled = wiring(wired(), tensors=(TensorNote("fc.weight", "unfilled", "not there", "silent", source),))
        assert [(f.cause, f.severity) for f in faults.lost_tensors(unfilled, [])] == [("weights-missing", severity)]


def test_a_tensor_that_a_difference_has_told_is_not_told_twice() -> None:
    note = TensorNote("fc_norm.0.weight", "dropped", "the flag is off", "silent", READ)
    served = wiring(wired(fc_norm="none"), tensors=(note,))
    told = faults.differences(declared(fc_norm="each"), served, TARGET, lambda fact: None)
    assert [f.cause for f in told] == ["fc-norm-skipped"]
    assert "fc_norm.0.weight dropped (silent)" in [piece.measure for piece in told[0].evidence]
    assert faults.lost_tensors(served, told) == []
    assert [f.cause for f in faults.lost_tensors(served, [])] == ["fc-norm-skipped"]


def test_a_dropped_mask_of_training_is_nothing() -> None:
    served = wiring(wired(), tensors=(TensorNote("t2d", "dropped", "training's", "silent", READ),))
    assert faults.lost_tensors(served, []) == []


@pytest.mark.parametrize(
    ("flag", "requested", "resolved", "cause"),
    [
        ("--speculative-num-draft-tokens", 16, 2, "draft-tokens-lowered"),
        ("--speculative-num-draft-tokens", 2, 6, "draft-tokens-below-steps"),
        ("--speculative-algorithm", "EAGLE", "EAGLE", None),
        ("--speculative-algorithm", "NEXTN", "EAGLE", "algorithm-eagle"),
        ("--speculative-algorithm", "eagle3", "EAGLE3", None),
        ("--speculative-num-steps", None, 3, None),
        ("--max-running-requests", 64, 48, "flag-overridden"),
    ],
)
def test_flags(flag: str, requested: Any, resolved: Any, cause: str | None) -> None:
    served = wiring(wired(), flags=(FlagNote(flag, requested, resolved, "a rule", "warning", READ),))
    assert [f.cause for f in faults.flags(served)] == ([cause] if cause else [])
