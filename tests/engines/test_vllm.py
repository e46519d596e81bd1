"""Real vLLM, V1 runner on the CPU: what the running model collects and feeds is what the tables say it would.

``make test-engines``; nothing here runs in ``make test``, which has the recording (test_vllm_dialect).
"""

from __future__ import annotations

from pathlib import Path

import contracts
import numpy as np
import pytest
from contracts import CASES, Case, Seen

from eyas.decode.loop import generate


@pytest.fixture(scope="module")
def seen(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All cases in one run of vLLM, some minutes."""
    _, found = contracts.run(vllm_python, tmp_path_factory.mktemp("vllm"))
    return {one.case.name: one for one in found}


def runs(case: Case) -> bool:
    return case.stops is None


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_it_loads_what_the_table_says_it_loads_and_stops_where_it_says(name: str, seen: dict[str, Seen]) -> None:
    one = seen[name]
    assert bool(one.wiring.refusals) == (one.error is not None), one.error
    assert (one.case.stops is not None) == (one.error is not None), one.error
    if one.case.stops:
        assert one.case.stops.lower() in str(one.error).lower()


@pytest.mark.parametrize("name", [case.name for case in CASES if runs(case)])
def test_the_model_collects_the_layers_of_the_wiring(name: str, seen: dict[str, Seen]) -> None:
    assert tuple(seen[name].answer["layers"]) == seen[name].wiring.taps
    assert seen[name].answer["runner"] == "vllm.v1.worker.cpu_model_runner"
    if seen[name].case.spelt is None:
        assert seen[name].wiring.taps == seen[name].case.taps


@pytest.mark.parametrize("name", [case.name for case in CASES if runs(case)])
def test_each_slot_is_fed_its_tap_row_by_row(name: str, seen: dict[str, Seen]) -> None:
    one = seen[name]
    taps = contracts.every_tap(one.target, contracts.PROMPT)
    assert one.fed is not None
    assert one.wiring.taps is not None
    errors = contracts.errors_by_tap(one.fed, taps)
    assert len(errors) == len(one.wiring.taps)
    for slot, tap in enumerate(one.wiring.taps):
        assert errors[slot, tap] < 1e-5
        assert np.delete(errors[slot], tap).min() > 0.05  # neither neighbour could be meant
    assert np.allclose(one.fed, np.concatenate([taps[t] for t in one.wiring.taps], axis=-1), rtol=1e-3, atol=1e-4)


WELL = [case.name for case in CASES if runs(case) and case.spelt is None]


@pytest.mark.parametrize("name", WELL)
def test_it_drafts_what_the_drafter_drafts_here(name: str, seen: dict[str, Seen]) -> None:
    """Norms, residual, feedback, head, embedding, layers: a wrong one drafts other tokens."""
    one = seen[name]
    tokens, k = contracts.TOKENS, contracts.K
    ours = generate(one.target, one.drafter, contracts.PROMPT, max_new_tokens=tokens, draft_tokens=k)
    rounds = [list(r.drafted) for r in ours]
    assert one.answer["answers"][0] == ours.token_ids
    theirs = [drafted[0] for drafted in one.answer["drafted"]]
    assert len(rounds) >= 3
    assert theirs[: len(rounds)] == rounds  # it drafts once more after the last token


def test_another_spelling_drafts_other_tokens(seen: dict[str, Seen]) -> None:
    """The comparison above can fail: fed the neighbouring layers, the same drafter says something else."""
    wrong = seen["SGLang's spelling alone"]
    assert wrong.wiring.taps == (0, 2, 5)
    assert wrong.answer["drafted"] != seen["other taps"].answer["drafted"]
