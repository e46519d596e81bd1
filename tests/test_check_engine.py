"""What an engine would do with a drafter as findings of a check, and a contract spelled for engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from eyas import checkpoint
from eyas.check import Case
from eyas.check.engine import judge_engine, spelled_for
from eyas.contract import declared
from eyas.dialects.wiring import TargetFacts
from eyas.errors import UsageError
from test_checkpoint import saved

LLAMA = TargetFacts("LlamaForCausalLM", 30, 576, 49152)
DEEPSEEK = TargetFacts("DeepseekV3ForCausalLM", 61, 7168, 129280)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    folder = saved(tmp_path / "d", tiny.drafter("llama"))
    return Case("d", files=checkpoint.read(folder))


def edited(case: Case, **keys: Any) -> Case:
    assert case.files is not None
    path = case.files.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in keys.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    return Case("d", files=checkpoint.read(case.files.folder))


def grave(case: Case) -> list[str]:
    return [f.cause for f in case.findings if f.severity != "note"]


def test_a_drafter_wired_as_trained_leaves_nothing_grave(case: Case) -> None:
    for engine in ("vllm", "sglang"):
        judge_engine(case, engine)
    assert grave(case) == []
    assert case.not_checked == []


def test_taps_that_the_engine_reads_otherwise_with_the_keys_to_write(case: Case) -> None:
    case = edited(case, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    judge_engine(case, "vllm", "v2")
    (finding,) = [f for f in case.findings if f.severity == "likely"]
    assert finding.cause == "taps-off-by-minus-one"
    assert "set eagle_aux_hidden_state_layer_ids to [1, 2, 4]" in str(finding.fix)


def test_what_was_only_inferred_is_no_more_than_a_note(case: Case) -> None:
    case = edited(case, eyas=None, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    judge_engine(case, "sglang", target=TargetFacts("LlamaForCausalLM", 5, 48, 211))
    assert case.findings
    assert grave(case) == []


def test_flags(case: Case) -> None:
    words = ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "24"]
    judge_engine(case, "sglang", flags=words)
    assert "draft-tokens-lowered" in grave(case)
    judge_engine(case, "sglang", flags=["--speculative-algorithm", "EAGLE"])
    assert "algorithm-eagle" in grave(case)


def test_unknown_engines_and_unread_files(case: Case) -> None:
    with pytest.raises(UsageError):
        judge_engine(case, "llm")
    unread = Case("d")
    judge_engine(unread, "vllm")
    assert [n.what for n in unread.not_checked] == ["engine"]


@pytest.mark.parametrize(
    ("engine", "ids"),
    [
        ("vllm", "eagle_aux_hidden_state_layer_ids to [2, 15, 27]"),
        ("sglang==0.5.23", "[1, 14, 26]"),
    ],
)
def test_a_contract_is_spelled_for_one_engine(engine: str, ids: str) -> None:
    told = spelled_for(engine, declared(taps=[2, 15, 27]), {"hidden_size": 576}, LLAMA)
    assert ids in told
    assert told.startswith(engine.split("==")[0])


def test_none_asked_spells_for_the_usual_ones() -> None:
    told = spelled_for(None, declared(taps=[2, 30, 58]), {"hidden_size": 7168}, DEEPSEEK)
    lines = told.splitlines()
    assert lines[0].startswith("vllm 0.32.0: ")
    assert "[2, 30, 58]" in lines[0]
    assert {name for name in ("0.5.12.post1", "0.5.12.post1+minus", "0.5.23") if name in told} == {
        "0.5.12.post1",
        "0.5.12.post1+minus",
        "0.5.23",
    }
    assert len({line.split(": ", 1)[1] for line in lines}) == len(lines)


def test_what_cannot_be_spelled_names_the_nearest() -> None:
    told = spelled_for("sglang", declared(taps=[27, 2, 15]), {"hidden_size": 576}, LLAMA)
    assert "cannot be written" in told
    assert "nearest [" in told


def test_already_said_and_no_target() -> None:
    config = {"eagle_aux_hidden_state_layer_ids": [2, 15, 27], "num_aux_hidden_states": 3}
    told = spelled_for("vllm", declared(taps=[2, 15, 27]), config, LLAMA)
    assert "layer_ids" not in told
    assert "--target" in spelled_for(None, declared(taps=[1]), {}, None)
