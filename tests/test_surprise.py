"""Whether a text is a sample of its target: as likely as samples are, and neither more nor less."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from eyas import taps
from eyas import target as targets
from eyas.diagnose.outputs import surprise
from eyas.diagnose.reference import Reference
from eyas.diagnose.stage_findings import APART, of_acceptance
from eyas.target import Target

CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7" / "target"
TEXTS, PROMPT, TOKENS = 6, 4, 40


@cache
def target() -> Target:
    return targets.load(str(CASE))


@torch.inference_mode()
def drawn(temperature: float, seed: int = 0) -> list[list[int]]:
    """Texts drawn from the target itself; at 0 greedily."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 200, (TEXTS, PROMPT), generator=generator)
    for _ in range(TOKENS):
        logits = target().model(ids).logits[:, -1].float()
        if temperature:
            new = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
        else:
            new = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, new), 1)
    return cast("list[list[int]]", ids.tolist())


def asked(texts: list[list[int]], temperature: float) -> float:
    n = target().num_layers

    def states(i: int, wanted: Any) -> torch.Tensor:
        assert wanted == (n,)
        return taps.run(target(), torch.tensor([texts[i]]), torch.tensor([len(texts[i])]), [n]).taps[0]

    served = [SimpleNamespace(ids=text, prompt=PROMPT) for text in texts]
    reference = SimpleNamespace(target=target(), texts=served, stock=SimpleNamespace(states=states))
    return surprise(cast("Reference", reference), temperature)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0])
def test_a_sample_is_no_surprise(temperature: float) -> None:
    found = [asked(drawn(temperature, seed), temperature) for seed in range(3)]
    assert max(map(abs, found)) < APART
    assert sum(map(abs, found)) > 0


def test_hotter_text_surprises_and_colder_text_does_too_little() -> None:
    assert asked(drawn(1.6), 0.8) > APART
    assert asked(drawn(0.0), 0.8) < -APART


def test_it_is_named_before_anything_is_said_of_what_was_kept() -> None:
    told = {"status": "differs", "rounds": 300, "more": 0, "fewer": 0, "z": -13.5, "text_z": 22.0,
            "sampled": [{"depth": 0, "reached": 300, "kept": 12, "likely": 102.0}]}  # fmt: skip
    (finding,) = of_acceptance(told)
    assert finding.cause == "sampling-differs"
    assert "less likely" in finding.summary
    (other,) = of_acceptance(told | {"text_z": 1.0})
    assert other.cause == "flag-overridden"
