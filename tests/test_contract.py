"""Contracts: round trip, equality, the words of a difference, and malformed ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.contract import FACTS, Contract, Fact, declared, from_json
from eyas.errors import CheckpointError

TARGET = {"fingerprint": "0123456789abcdef", "architecture": "LlamaForCausalLM", "num_layers": 30}


def some(**changes: Any) -> Contract:
    facts = {"taps": [2, 15, 27], "token_shift": 1, "rope": {"rope_theta": 1e4}, "target": TARGET}
    return declared(**{**facts, **changes})


def through_json(contract: Contract) -> Contract:
    return from_json(json.loads(json.dumps(contract.to_json())), "config.json")


def test_it_comes_back_from_json() -> None:
    contract = Contract(
        {
            "taps": Fact([0, 3, 31], "declared"),
            "rope": Fact({"rope_theta": 1e6, "rope_type": "default"}, "inferred"),
            "token_shift": Fact(1, "measured"),
            "residual": Fact("before hidden_norm", "defaulted"),
            "template_sha256": Fact(None, "inferred"),
        }
    )
    back = through_json(contract)
    assert back == contract
    assert dict(back.facts) == dict(contract.facts)  # origins too, which == leaves out
    assert back.to_json() == contract.to_json()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
origins = st.sampled_from(["declared", "inferred", "measured", "defaulted"])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(list(FACTS)), st.builds(Fact, values, origins)))
def test_any_facts_come_back(facts: dict[str, Fact]) -> None:
    back = through_json(Contract(facts))
    assert dict(back.facts) == facts
    assert back == Contract(facts)
    assert hash(back) == hash(Contract(facts))


def test_facts_are_written_in_the_order_of_the_table() -> None:
    shuffled = Contract({name: Fact(1, "declared") for name in reversed(FACTS)})
    assert list(shuffled.to_json()) == list(FACTS)


def test_the_facts_are_these() -> None:
    """The names travel in checkpoints: add some, never rename one."""
    assert list(FACTS) == [
        "taps",
        "tap_state",
        "fc",
        "fc_norm",
        "layers",
        "attention",
        "attention_bias",
        "qk_norm",
        "later_norm",
        "residual",
        "head_norm",
        "feedback",
        "token_shift",
        "position_offset",
        "rope",
        "window",
        "max_positions",
        "embedding",
        "head",
        "draft_vocab_size",
        "vocab_map",
        "vocab_sha256",
        "mask",
        "depths",
        "template_sha256",
        "tokenizer_sha256",
        "target",
    ]


def test_equality_is_of_values_and_not_of_origins() -> None:
    assert some() == some()
    assert some().with_origin("inferred") == some()
    assert {fact.origin for fact in some().with_origin("inferred").facts.values()} == {"inferred"}
    assert hash(some().with_origin("inferred")) == hash(some())
    assert some(taps=(2, 15, 27)) == some()  # JSON has no tuples
    assert some(token_shift=0) != some()
    assert some(depths=5) != some()  # a fact more
    assert some() != "a contract"


def test_differences_are_of_facts_both_know() -> None:
    ours, theirs = some(depths=5), some(taps=[3, 16, 28], token_shift=0, mask="all")
    assert list(ours.differences(theirs)) == [("taps", [2, 15, 27], [3, 16, 28]), ("token_shift", 1, 0)]
    assert list(some().differences(some(depths=5))) == []


def test_a_difference_in_words() -> None:
    assert some().diff(some(taps=[3, 16, 28])) == [
        "taps: [2, 15, 27] here, [3, 16, 28] there (states fed to fc, counted in layers done, in concatenation order)"
    ]
    assert some().diff(some()) == []


def test_facts_are_read_by_name() -> None:
    contract = some()
    assert contract["taps"] == [2, 15, 27]
    assert "taps" in contract
    assert "depths" not in contract
    assert list(contract) == ["taps", "token_shift", "rope", "target"]
    with pytest.raises(KeyError):
        contract["depths"]


def test_a_fact_outside_the_table_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="colour"):
        declared(colour="red")


def test_facts_of_a_later_version_are_left_alone() -> None:
    written = {**some().to_json(), "flavour": "not even a fact"}
    assert from_json(written, "config.json") == some()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "config.json: the contract is a NoneType, an object of facts was expected"),
        ([2, 15, 27], "config.json: the contract is a list"),
        ("taps", "config.json: the contract is a str"),
        ({"taps": [2, 15, 27]}, "config.json: fact 'taps' of the contract is [2, 15, 27]"),
        ({"taps": {"origin": "declared"}}, "fact 'taps' of the contract is {'origin': 'declared'}"),
        ({"taps": {"value": [2]}}, "fact 'taps' of the contract is {'value': [2]}"),
        ({"taps": {"value": [2], "origin": "guessed"}}, "fact 'taps' of the contract is"),
        ({"taps": {"value": [2], "origin": ["declared"]}}, "fact 'taps' of the contract is"),
        ({"token_shift": {"value": 1, "origin": "declared"}, "taps": None}, "fact 'taps' of the contract is None"),
    ],
)
def test_a_malformed_contract_is_refused(value: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        from_json(value, "config.json")
    assert caught.value.way_out.startswith("Remove the 'eyas' key")
