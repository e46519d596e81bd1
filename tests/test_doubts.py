"""No drafter is blamed while its wiring is only assumed: what keeps a low curve from being its fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eyas import check
from eyas.check import Case
from eyas.contract import Contract, declared
from eyas.results import Evidence, Finding


def doubts(contract: Contract | None, *causes: str) -> str | None:
    case = Case("d", files=SimpleNamespace(contract=contract))  # type: ignore[arg-type]
    case.findings = [Finding(cause, "note", "said", [Evidence("a", 1, 2, "here")]) for cause in causes]
    return check.wiring_doubts(case)


WHOLE: dict[str, Any] = {
    "taps": [1, 2, 3],
    "tap_state": "stream",
    "fc": "applied",
    "attention": "gqa",
    "head_norm": True,
    "token_shift": 1,
    "window": None,
}


def test_a_contract_that_is_run_as_it_says_leaves_no_doubt() -> None:
    assert doubts(declared(**WHOLE)) is None
    assert doubts(declared(taps=[1, 2, 3])) is None  # an older contract, which says less
    assert doubts(declared(**WHOLE), "coverage-low") is None


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("attention", "mla"),
        ("tap_state", "branch"),
        ("fc", "skipped"),
        ("later_norm", "hidden_norm"),
    ],
)
def test_a_fact_that_the_forward_here_does_not_do_is_a_doubt(fact: str, value: Any) -> None:
    told = doubts(declared(**{**WHOLE, fact: value}))
    assert told is not None
    assert f"{fact} {value}" in told


@pytest.mark.parametrize("cause", ["weights-changed", "target-differs", "template-differs", "tokenizer-differs"])
def test_other_weights_targets_and_texts_are_doubts(cause: str) -> None:
    assert doubts(declared(**WHOLE), cause)


def test_without_a_contract_everything_is_doubted() -> None:
    assert doubts(None)
