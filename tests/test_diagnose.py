"""What is named when an engine goes wrong, on a tiny trained drafter and an engine in miniature (``played``)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas import checkpoint, diagnose, variants
from eyas import records as reading
from eyas import target as targets
from eyas.check import reading as told
from eyas.check import vocabulary
from eyas.diagnose import Collected, bundle, curves, outputs
from eyas.diagnose.reference import Reference
from eyas.diagnose.replay import replayed
from eyas.diagnose.served import records, served
from eyas.engines.live import About, Counters
from eyas.records import Record
from eyas.states.live import LiveStock
from eyas.target import Target
from played import Faults, play

CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"
K, TOKENS, TEXTS, FEW = 4, 40, 20, 8  # texts: 200 rounds clear a drafter, fewer will do to name a fault


@cache
def target() -> Target:
    return targets.load(str(CASE / "target"))


@cache
def parts() -> tuple[variants.Parts, dict[str, Any]]:
    files = checkpoint.read(CASE / "trained")
    tensors = checkpoint.finite_tensors(files)
    maps = vocabulary.read(tensors, target())
    found = variants.read_parts(files, tensors, target(), maps.ids)
    return found, told.told(files, target(), maps).declared


@cache
def texts() -> list[Record]:
    """The target's own greedy text, longer than what is served of it."""
    held = [r for r in reading.read(CASE / "heldout.jsonl") if r.n_response_tokens > TOKENS + K]
    assert len(held) >= TEXTS
    return held[:TEXTS]


def collected(faults: Faults, *, count: int = FEW, **changes: Any) -> Collected:
    answers, turns = play(target(), parts()[0], texts()[:count], TOKENS, K, faults)
    about = About("vllm", "launched", "0.32.0", "v1", model={"dtype": "float32", "drafter": "Eagle3LlamaForCausalLM"})
    return replace(Collected(about, answers, turns, None, TOKENS, 0.0), **changes)


def judged(faults: Faults, **changes: Any) -> dict[str, Any]:
    result = diagnose.diagnose(CASE / "trained", target(), collected(faults, **changes), draft_tokens=K)
    return json.loads(json.dumps(result.to_json(), default=lambda v: v.tolist()))  # type: ignore[no-any-return]


def grave(told: dict[str, Any]) -> list[str]:
    return [f["cause"] for f in told["findings"] if f["severity"] != "note"]


def healthy(**facts: Any) -> dict[str, Any]:
    return {**parts()[1], **facts}


@cache
def sound() -> dict[str, Any]:
    return judged(Faults(healthy()), count=TEXTS)


# -- a sound engine -----------------------------------------------------------------------------------------------


def test_a_sound_engine_is_cleared_and_every_stage_is_equal() -> None:
    told = sound()
    assert told["verdict"] == "healthy"
    assert grave(told) == []
    probes = told["probes"].values()
    stages = [stage["status"] for stage in probes if isinstance(stage, dict) and "status" in stage]
    assert len(stages) >= 9
    assert set(stages) <= {"equal", "not seen"}, stages
    assert told["divergence"] is None
    assert told["repairs"] == []
    kinds = {one["kind"] for one in told["ruled_out"]}
    assert {"taps", "vocab", "feedback", "rope", "norm", "weights", "shift"} <= kinds


def test_expected_and_observed_are_the_same_counts() -> None:
    told = sound()
    assert told["expected"]["by_text"] == told["observed"]["by_text"]
    assert told["gap"]["value"] == 0.0
    assert told["observed"]["rounds"] > 100


def test_the_replay_is_the_chain() -> None:
    """The chain that played the rounds shares no attention code with the replay."""
    found = collected(Faults(healthy()))
    theirs = served(found.answers, found.turns)
    drafter = variants.build(*parts())
    assert drafter is not None
    compared = 0
    for text in theirs[:3]:
        for played in replayed(drafter, parts()[1], text):
            torch.testing.assert_close(played.pre, torch.from_numpy(played.turn.pre), rtol=1e-4, atol=1e-4)
            compared += len(played.pre)
    assert compared > 100


def test_slots_are_told_without_positions() -> None:
    found = collected(Faults(healthy(), offset=5))
    for text in served(found.answers, found.turns):
        for now in text.rounds:
            assert now.turn.token_ids.tolist() == text_of(text)[now.first + 1 : now.last + 2]
            break


def text_of(text: Any) -> list[int]:
    return [int(i) for i in text.ids]


# -- faults, one at a time ------------------------------------------------------------------------------------------


def turned(width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]


SINGLE: dict[str, tuple[dict[str, Any], str]] = {
    "taps + 1": ({"facts": {"taps": (1, 4, 8)}}, "taps-off-by-one"),
    "taps of others": ({"facts": {"taps": (2, 3, 6)}}, "taps-differ"),
    "taps swapped": ({"facts": {"taps": (3, 0, 7)}}, "taps-swapped"),
    "feedback after the norm": ({"facts": {"feedback": "after the last norm"}}, "feedback-post-norm"),
    "head norm skipped": ({"facts": {"head_norm": False}}, "head-norm-skipped"),
    "feedback frozen": ({"feedback": "target"}, "feedback-target-state"),
    "feedback stale": ({"feedback": "before"}, "feedback-stale"),
    "residual": ({"facts": {"residual": "after hidden_norm"}}, "norm-before-residual-ignored"),
    "rope base": ({"facts": {"rope": {"rope_type": "default", "rope_theta": 1e6}}}, "rope-base-wrong"),
    "gains": ({"facts": {"norm_gain": {"all": 1.0}}}, "norm-gain-plus-one"),
    "fc norm": ({"facts": {"fc_norm": "joint"}}, "fc-norm-added"),
    "step frozen": ({"step": 0}, "step-positions-frozen"),
    "positions after the prompt": ({"after_prompt": 1}, "positions-off-by-one"),
    "rotated": ({"rotate": turned(64)}, "states-rotated"),
    "not shifted": ({"tokens_shifted": 0}, "token-shift-missing"),
    "kept by a rate": ({"keep": 4}, "acceptance-faked"),
    "stops": ({"stop_at": 60}, "position-limit-short"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_fault_is_named_first_and_alone(name: str) -> None:
    how, cause = SINGLE[name]
    facts = healthy(**how.get("facts", {}))
    told = judged(Faults(facts, **{k: v for k, v in how.items() if k != "facts"}))
    assert grave(told)[:1] == [cause], told["findings"]
    first = told["findings"][0]
    assert first["evidence"]
    assert first["fix"]
    assert told["verdict"] in ("miswired", "undecided")


def test_an_engine_that_never_drafts_past_a_limit() -> None:
    """Some prompts are longer than it: of those no round was ever seen."""
    longest = max(len(r.input_ids) - r.n_response_tokens for r in texts()[:FEW])
    told = judged(Faults(healthy(), stop_at=longest - 2))
    assert grave(told)[:1] == ["position-limit-short"], told["findings"]
    assert len(told["probes"]["stopped"]) == FEW


def test_a_map_of_the_running_drafter() -> None:
    ids = parts()[0].maps["offsets"]
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    assert grave(judged(Faults(healthy(), map_to=shuffled)))[0] == "d2t-stale"
    assert grave(judged(Faults(healthy(), map_to=torch.arange(len(ids)))))[0] == "d2t-missing"


def test_two_faults_are_named_and_what_mending_each_is_worth() -> None:
    told = judged(Faults(healthy(taps=(2, 3, 6)), feedback="target"))
    assert set(grave(told)[:2]) == {"taps-differ", "feedback-target-state"}
    steps = told["repairs"]
    assert [s["cause"] for s in steps] == grave(told)[:2]
    assert steps[-1]["reaches"] == pytest.approx(told["expected"]["accept_length"]["value"])
    assert sum(s["gain"] for s in steps) == pytest.approx(told["gap"]["value"], abs=0.02)
    assert told["gap"]["explained"] == pytest.approx(told["gap"]["value"], abs=0.02)


def test_positions_off_everywhere_are_a_note() -> None:
    told = judged(Faults(healthy(), offset=3), count=TEXTS)
    assert grave(told) == []
    assert "positions-off-by-one" in [f["cause"] for f in told["findings"]]
    assert told["verdict"] in ("healthy", "weak")


# -- counts -----------------------------------------------------------------------------------------------------------


def page(told: dict[str, Any], more: int = 0) -> Counters:
    hits = np.array(told["observed"]["by_text"]["hits"]).sum(0)
    rounds = told["observed"]["rounds"] + more
    return Counters(rounds, rounds * K, tuple(int(h) + more for h in hits), None)


def test_others_at_the_engine_are_seen_and_blame_nobody() -> None:
    told = judged(Faults(healthy()), count=TEXTS, page=page(sound(), more=40))
    assert [f["cause"] for f in told["findings"] if f["cause"] == "others-served"] == ["others-served"]
    assert told["verdict"] in ("healthy", "weak")
    assert judged(Faults(healthy()), count=TEXTS, page=page(sound()))["probes"]["metrics"]["status"] == "equal"


def test_a_page_that_counts_less_is_inconsistent() -> None:
    told = judged(Faults(healthy()), count=TEXTS, page=page(sound(), more=-40))
    assert "counts-inconsistent" in grave(told)


def test_an_engine_only_watched_falls_short_and_no_file_is_blamed() -> None:
    """Attached: rounds and tokens kept request by request, nothing of what was fed."""
    found = collected(Faults(healthy(taps=(2, 3, 6))))
    theirs = served(found.answers, found.turns)
    rounds, hits = outputs.counted(theirs, K)
    counts = zip(found.answers, rounds.tolist(), hits.tolist(), strict=True)
    answers = [replace(a, rounds=n, accepted=tuple(h)) for a, n, h in counts]
    about = About("vllm", "attached", "0.32.0")
    only = Collected(about, answers, {}, None, TOKENS, 0.0)
    told = diagnose.diagnose(CASE / "trained", target(), only, draft_tokens=K).to_json()
    assert told["probes"] is None
    assert grave(told) == ["engine-falls-short"]
    assert told["verdict"] == "undecided"


def test_the_observed_curve_is_that_of_the_reading_that_runs() -> None:
    """The reference run as the engine runs it keeps the engine's very tokens."""
    wrong = healthy(taps=(2, 3, 6))
    found = collected(Faults(wrong))
    theirs = served(found.answers, found.turns)
    reference = Reference(
        target(), parts()[0], healthy(), healthy(), LiveStock(target(), records(theirs)), theirs, 1e-3
    )
    walked = curves.walked(reference, wrong, K)
    assert walked is not None
    rounds, hits = outputs.counted(theirs, K)
    assert abs(int(walked.rounds.sum()) - int(rounds.sum())) <= 2
    assert np.abs(walked.hits.sum(0) - hits.sum(0)).max() <= 2


# -- the bundle -------------------------------------------------------------------------------------------------------


def test_a_bundle_is_judged_as_the_diagnosis_was(tmp_path: Path) -> None:
    told = judged(Faults(healthy(taps=(2, 3, 6)), feedback="target"))
    bundle.write(told, CASE / "trained", tmp_path / "b.zip")
    again = bundle.judged(tmp_path / "b.zip")
    assert [f["cause"] for f in again["findings"] if f["severity"] != "note"] == grave(told)
    assert again["verdict"] == told["verdict"]
    assert again["conversations"] == []
