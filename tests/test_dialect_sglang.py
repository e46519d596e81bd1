"""SGLang's tables against its own code, run: tests/fixtures/engines/sglang-*.json (runs/sglang_setters.py and
runs/sglang_arguments.py). And what a wiring says is what a config was written for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from eyas.contract import Contract, declared
from eyas.dialects import sglang
from eyas.dialects.sglang import flags, releases, taps
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts, Wiring
from eyas.errors import CheckpointError, UsageError
from eyas.inventory import TensorInfo

HERE = Path(__file__).parent / "fixtures" / "engines"
SETTERS = json.loads((HERE / "sglang-setters.json").read_text(encoding="utf-8"))
ARGUMENTS = json.loads((HERE / "sglang-arguments.json").read_text(encoding="utf-8"))
NEW, OLD = "0.5.23", "0.5.12.post1"
KIMI = TargetFacts("KimiK25ForConditionalGeneration", 61, 7168, 163840)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "target_hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_hidden_layers": 1,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}


def with_ids(*ids: int, **keys: Any) -> dict[str, Any]:
    return {**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}, **keys}


def wire(
    config: dict[str, Any],
    target: TargetFacts | None = KIMI,
    version: str = NEW,
    line: str = "",
    tensors: dict[str, tuple[int, ...]] | None = None,
) -> Wiring:
    infos = None if tensors is None else {n: TensorInfo(n, "BF16", shape, "f") for n, shape in tensors.items()}
    return sglang.wire(Files(config, infos), target, Launch(Version(version), flags=tuple(shlex.split(line))))


def causes(wiring: Wiring) -> list[str]:
    return [refusal.cause for refusal in wiring.refusals]


# -- the tables and the engine's own code --------------------------------------------------------------------------


def said(version: str) -> Iterator[tuple[str, int, list[int] | None, Any]]:
    """(architecture, layers, ids, taps or the error) of every question put to a wheel."""
    record = SETTERS["versions"][version]
    for group in record["groups"]:
        for architecture in group["architectures"]:
            for n, answers in zip(record["layers"], group["captured"], strict=True):
                for ids, answer in zip(SETTERS["ids"][str(n)], answers, strict=True):
                    yield architecture, n, ids, answer


@pytest.mark.parametrize("version", list(SETTERS["versions"]))
def test_every_class_captures_what_its_own_setter_says(version: str) -> None:
    table = taps.targets(Version(version))
    asked = list(said(version))
    assert {architecture for architecture, *_ in asked} == set(table), "a class has a setter and no row, or none"
    wrong = []
    for architecture, n, ids, answer in asked:
        got = taps.capture(table[architecture], n, ids)
        if (got.stops or list(got.taps)) != answer:
            wrong.append((architecture, n, ids, answer, got))
    assert wrong == []
    assert len(asked) > 800


def test_rows_say_where_the_setter_stands() -> None:
    for group in SETTERS["versions"][NEW]["groups"]:
        for architecture, where in group["architectures"].items():
            assert taps.TARGETS[architecture].where == where


@pytest.mark.parametrize("version", [OLD, NEW])
def test_flags_resolve_as_its_own_functions_do(version: str) -> None:
    of = releases.release(Version(version))
    names = {flag: flag.lstrip("-").replace("-", "_") for flag in flags.KNOWN}
    refused = 0
    for architecture, line, resolved, lines, error in ARGUMENTS["versions"][version]:
        target = TargetFacts(architecture, 61, 8, 8)
        ours = flags.resolve(shlex.split(line), target, of)
        where = (version, architecture, line)
        if version == OLD and ("block-verification" in line or "rejection-sampling" in line):
            assert ours.refusals, where  # argparse does not know the flag; the functions never see it
            continue
        refused += error is not None
        assert (error is None) == (not ours.refusals), (where, error, ours.refusals)
        if error is not None:
            continue
        for flag in (flags.ALGORITHM, flags.STEPS, flags.TOPK, flags.TOKENS, "--max-running-requests"):
            assert ours.values.get(flag) == resolved.get(names[flag]), (where, flag)
        path = ours.values.get(flags.DRAFT)
        assert ("TARGET" if path == "the target's path" else path) == resolved.get(names[flags.DRAFT]), where
        if "unquant" not in line:
            assert ours.values.get(flags.QUANTISED) == resolved.get(names[flags.QUANTISED]), where
        loud = {note.flag: note.loudness for note in ours.notes}
        assert (loud.get(flags.TOKENS) == "warning") == any("num_draft_tokens" in text for _, text in lines), where
        assert (loud.get("--max-running-requests") == "warning") == any("Max running" in t for _, t in lines), where
        assert (loud.get(flags.DRAFT) == "warning") == any("DeepSeek MTP" in text for _, text in lines), where
    assert refused >= 10


# -- the case ------------------------------------------------------------------------------------------------------

CASE = "--speculative-num-steps 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1"


@pytest.mark.parametrize(
    ("version", "ids", "seen"),
    [
        (OLD, [2, 30, 58], (3, 31, 59)),
        (f"{OLD}+minus-one", [2, 30, 58], (3, 31, 59)),
        (f"{OLD}+minus-one", [-1, 2, 30], (0, 3, 31)),
        (NEW, [2, 30, 58], (2, 30, 58)),
        (NEW, [0, 3, 31], (0, 3, 31)),
    ],
)
def test_the_case_is_wired_as_its_engine_did(version: str, ids: list[int], seen: tuple[int, ...]) -> None:
    wiring = wire(with_ids(*ids), version=version)
    assert wiring.taps == seen
    assert wiring.facts["taps"] == list(seen)
    assert wiring.facts["fc"] == "applied"
    assert causes(wiring) == []


@pytest.mark.parametrize(
    ("version", "ids", "cause", "words"),
    [
        (OLD, [-1, 2, 30], "engine-cannot-express", "TypeError"),  # the patch exists for this
        ("0.5.13", [0, 3, 31], "engine-cannot-express", "TypeError"),
        (NEW, [-1, 2, 30], "taps-too-few", "3 states are asked for"),
    ],
)
def test_the_case_stops_elsewhere(version: str, ids: list[int], cause: str, words: str) -> None:
    wiring = wire(with_ids(*ids), version=version)
    assert causes(wiring) == [cause]
    assert words in wiring.refusals[0].why
    assert wiring.refusals[0].when == "first forward"


@pytest.mark.parametrize(
    ("version", "ids"), [(NEW, [0, 3, 31]), ("0.5.14", [0, 3, 31]), (f"{OLD}+minus-one", [-1, 2, 30])]
)
def test_the_case_is_spelled(version: str, ids: list[int]) -> None:
    made = sglang.write(declared(taps=[0, 3, 31]), with_ids(2, 30, 58), KIMI, Launch(Version(version)))
    assert made["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids


@pytest.mark.parametrize("version", [OLD, "0.5.13"])
def test_the_case_has_no_spelling_before(version: str) -> None:
    with pytest.raises(CannotExpress, match="the nearest there is") as raised:
        sglang.write(declared(taps=[0, 3, 31]), CONFIG, KIMI, Launch(Version(version)))
    (fact,) = raised.value.facts
    assert (fact.fact, fact.wanted, fact.source.basis) == ("taps", [0, 3, 31], "executed")
    sglang.write(declared(taps=fact.nearest), CONFIG, KIMI, Launch(Version(version)))


@pytest.mark.parametrize("version", [OLD, NEW])
def test_sixteen_tokens_become_two(version: str) -> None:
    wiring = wire(with_ids(0, 3, 31), version=version, line=CASE)
    (note,) = [n for n in wiring.flags if n.flag == "--speculative-num-draft-tokens"]
    assert (note.requested, note.resolved, note.loudness) == (16, 2, "warning")
    assert "1 drafted" in note.rule
    assert [slug for slug, *_ in wiring.warnings] == ["draft-path-defaulted", "draft-tokens-lowered"][1:]
    assert version in note.source.where


# -- what is written is what is wired ------------------------------------------------------------------------------

FC_NORMS = ["none", "joint", "each", "joint, then each"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_write_and_wire_agree_or_the_fact_is_named(data: st.DataObject) -> None:
    version = Version(data.draw(st.sampled_from([OLD, f"{OLD}+minus-one", "0.5.13", "0.5.20", NEW])))
    table = taps.targets(Version(version.public))
    architecture = data.draw(st.sampled_from(sorted(table)))
    n = data.draw(st.integers(6, 94))
    target = TargetFacts(architecture, n, 64, 1000)
    wanted = data.draw(st.lists(st.integers(0, n), min_size=2, max_size=4, unique=data.draw(st.booleans())))
    facts: dict[str, Any] = {
        "taps": sorted(wanted) if data.draw(st.booleans()) else wanted,
        "tap_state": data.draw(st.sampled_from(["stream", "branch"])),
        "fc_norm": data.draw(st.sampled_from(FC_NORMS)),
        "feedback": data.draw(st.sampled_from(["before the last norm", "after the last norm"])),
        "residual": data.draw(st.sampled_from(["before hidden_norm", "after hidden_norm"])),
        "attention_bias": data.draw(st.booleans()),
        "layers": data.draw(st.integers(1, 3)),
        "embedding": data.draw(st.sampled_from(["own", "target"])),
        "head": "own",
        "draft_vocab_size": data.draw(st.integers(10, 1000)),
        "max_positions": data.draw(st.integers(64, 4096)),
        "rope": {"rope_type": "default", "rope_theta": data.draw(st.sampled_from([10000.0, 5e5]))},
    }
    hidden = data.draw(st.sampled_from([64, 128, 32]))
    before = {**CONFIG, "hidden_size": hidden, "vocab_size": 1000, "norm_before_fc": True, "use_aux_norm": True}
    before["eagle_config"] = {"norm_before_fc": data.draw(st.booleans()), "use_aux_hidden_state": False}
    launch = Launch(version)
    contract = declared(**facts)
    for _ in range(2):
        try:
            made = sglang.write(contract, before, target, launch)
        except CannotExpress as refused:
            nearer = {f.fact: f.nearest for f in refused.facts}
            assert set(nearer) <= set(facts)
            assert all(facts[name] != value for name, value in nearer.items())
            if nearer.get("taps", ()) is None:
                assert table[architecture].unread
                return
            contract = declared(**{**facts, **nearer})  # what is offered must be expressible
            continue
        wired = sglang.wire(Files(made), target, launch)
        assert list(contract.differences(wired.facts)) == []
        assert wired.refusals == ()
        return
    pytest.fail(f"what was offered instead is refused too: {contract}")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_list_that_is_spelled_is_captured(data: st.DataObject) -> None:
    version = data.draw(st.sampled_from([OLD, "0.5.13", "0.5.17", "0.5.22", NEW]))
    table = taps.targets(Version(version))
    how = table[data.draw(st.sampled_from(sorted(table)))]
    n = data.draw(st.integers(4, 40))
    wanted = sorted(data.draw(st.sets(st.integers(0, n), min_size=1, max_size=4)))
    ids = taps.spell(how, n, wanted)
    if ids is not None:
        assert taps.capture(how, n, ids) == taps.Captured(tuple(wanted), tuple(wanted))
    else:
        near = taps.nearest(how, n, wanted)
        assert near != wanted
        assert near is None or taps.spell(how, n, near) is not None


def test_what_is_kept_when_writing() -> None:
    before = with_ids(2, 30, 58, eyas={"schema": 1}, custom=3)
    contract = Contract({})
    made = sglang.write(contract, before, KIMI, Launch(Version(NEW)))
    assert made == before
    assert before["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**CONFIG, "eagle_config": [1]}, "eagle_config .* is \\[1\\]; an object"),
        ({**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2"}}, "a list of layer numbers"),
        ({**CONFIG, "eagle_aux_hidden_state_layer_ids": [1.5]}, "a list of layer numbers"),
        ({**CONFIG, "architectures": "X"}, "architectures"),
        ({**CONFIG, "hidden_size": None}, "hidden_size"),
        ({**CONFIG, "num_hidden_layers": True}, "num_hidden_layers"),
        ({**CONFIG, "draft_vocab_size": "32000"}, "draft_vocab_size"),
        ({**CONFIG, "norm_output": "no"}, "true or false"),
        ({**CONFIG, "rope_scaling": "yarn"}, "rope_scaling"),
        ({**CONFIG, "rope_theta": "1e6"}, "rope_theta"),
    ],
)
def test_a_config_of_wrong_types_is_told(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        wire(config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--speculative-num-steps", "has no value"),
        ("--speculative-num-steps three", "a whole number"),
        ("stray", "belongs to no flag"),
        ("--json-model-override-args {", "no JSON"),
        ("--json-model-override-args [1]", "an object"),
    ],
)
def test_flags_that_are_no_command_line(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wire(with_ids(0, 3, 31), line=line)
