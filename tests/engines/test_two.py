"""One healthy and one miswired run of real vLLM, in `make test`: the rest of it is `make test-engines`."""

from __future__ import annotations

from pathlib import Path

import contracts
import numpy as np
import pytest
from contracts import CASES, Seen

from eyas.dialects import engines, host
from eyas.show import show

NAMES = ("other taps", "SGLang's spelling alone")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def seen(vllm_python: Path, place: Path) -> dict[str, Seen]:
    """Both in one process of vLLM, about two minutes."""
    _, found = contracts.run(vllm_python, place, [case for case in CASES if case.name in NAMES])
    return {one.case.name: one for one in found}


@pytest.mark.parametrize("name", NAMES)
def test_vllm_collects_and_feeds_what_show_says(name: str, seen: dict[str, Seen], place: Path) -> None:
    one = seen[name]
    target = host.read(place / "target-llama" / "config.json")
    shown = show(place / f"eagle3-{contracts.file_name(one.case)}", [engines.asked("vllm", "v1")], target=target)
    said = shown.engines[0].taps
    assert said == tuple(one.answer["layers"])
    assert (said == one.case.taps) == (name == NAMES[0])
    assert shown.miswired == (name == NAMES[1])
    assert one.fed is not None
    assert said is not None
    errors = contracts.errors_by_tap(one.fed, contracts.every_tap(one.target, contracts.PROMPT))
    for slot, tap in enumerate(said):
        assert errors[slot, tap] < 1e-5
        assert np.delete(errors[slot], tap).min() > 0.05


def test_the_miswired_one_drafts_other_tokens(seen: dict[str, Seen]) -> None:
    well, ill = (seen[name] for name in NAMES)
    assert well.answer["drafted"] != ill.answer["drafted"]
    assert well.answer["answers"] == ill.answer["answers"]  # which verification hides
