"""Sampled answers of the real target with the shipped drafter follow the target's own law.

The first two tokens after a fixed prompt, top-k so that their law has few cells: the first is drawn without a draft,
the second is drafted, and kept or drawn anew. Its law is worked out from passes of the library's own forward. Seeds are
fixed, so the counts are the same each time on one machine; on another, rounding may move a few, and a right sampler
fails once in a thousand such machines (p > 0.001). That the test can fail is shown on the drafter's own law.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

import chances
from eyas import checkpoint, resolve
from eyas import target as targets
from eyas.answers import Sampling
from eyas.decode.chain import Chain
from eyas.decode.law import cut
from eyas.decode.loop import Generation
from eyas.decode.pack import packed
from eyas.target import Target

pytestmark = pytest.mark.real
SAMPLING = Sampling(temperature=1.4, top_k=4, top_p=0.98, repetition_penalty=1.1, frequency_penalty=0.3)
ANSWERS = 300
ALARM = 1e-3


@pytest.fixture(scope="module")
def target() -> Target:
    return targets.load("smollm2")


@torch.inference_mode()
def law(target: Target, prompt: list[int], answer: list[int]) -> dict[int, float]:
    logits = target.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, -1]
    shares = chances.law(logits.double().tolist(), SAMPLING, prompt, answer)
    return {word: share for word, share in enumerate(shares) if share > 0}


def test_two_tokens_of_the_real_target_follow_its_law(target: Target) -> None:
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    assert target.tokenizer is not None
    prompt = list(target.tokenizer("Once upon a")["input_ids"])
    expected = {
        (first, second): share * then
        for first, share in law(target, prompt, []).items()
        for second, then in law(target, prompt, [first]).items()
    }
    counts, laws, kept = Counter[tuple[int, int]](), dict[int, torch.Tensor](), 0
    with packed(target, drafter):
        for seed in range(ANSWERS):
            chain = Chain(drafter)
            run = Generation(
                target,
                chain,
                prompt,
                max_new_tokens=2,
                draft_tokens=1,
                sampling=Sampling(**{**vars(SAMPLING), "seed": seed}),
            )
            first = run.token_ids[0]
            if first not in laws:
                laws[first] = drafted_law(chain)
            run.finish()
            kept += sum(run.accepted)
            counts[run.token_ids[0], run.token_ids[1]] += 1
    assert set(counts) <= set(expected)
    assert 0.2 * ANSWERS < kept < 0.95 * ANSWERS, "keeping and drawing anew must both be there"
    assert p_value(counts, expected) > ALARM
    # The same counts are no sample of what the drafter would say, nor of a law next to the target's.
    drafts = {(a, b): expected_first(expected, a) * float(laws[a][b]) for a, b in expected}
    assert p_value(counts, drafts) < ALARM
    bent = {cell: share**0.7 for cell, share in expected.items()}
    assert p_value(counts, bent) < ALARM


def drafted_law(chain: Chain) -> torch.Tensor:
    """The drafter's law of its first token, over the target's words, without spending the draft."""
    laws = cut(chain.logits()[None], SAMPLING)[0]
    over = torch.zeros(chain.drafter.config.vocab_size)
    over[chain.drafter.vocab.ids] = laws
    return over


def expected_first(expected: dict[tuple[int, int], float], first: int) -> float:
    return sum(share for (a, _), share in expected.items() if a == first)


def p_value(counts: Counter[tuple[int, int]], shares: dict[tuple[int, int], float]) -> float:
    """Of a chi-square test; cells of which fewer than five are expected are one."""
    whole = sum(shares.values())
    scaled = {cell: share / whole * ANSWERS for cell, share in shares.items()}
    large = [cell for cell, count in scaled.items() if count >= 5]
    seen = [counts[cell] for cell in large]
    due = [scaled[cell] for cell in large]
    if len(large) < len(scaled):
        seen.append(ANSWERS - sum(seen))
        due.append(max(ANSWERS - sum(due), 1e-9))
    return float(chisquare(seen, due).pvalue)
