"""The law of the next token: each setting against the same worked out word by word."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chances
from eyas.answers import Sampling
from eyas.decode.law import Law, cut, logprobs
from eyas.decode.sample import choose, place, require_unadjusted
from eyas.errors import UsageError

WORDS = 12
PROMPT = [1, 4, 4, 7]
ANSWERS = [[], [2], [2, 2, 4], [5, 2, 2, 9]]

temperatures = st.floats(0.05, 5)
samplings = st.builds(
    Sampling,
    temperature=temperatures,
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    top_k=st.one_of(st.none(), st.integers(1, WORDS + 3)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.floats(0.2, 5),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, WORDS - 1), st.floats(-100, 100), max_size=4),
)


def some_logits(rows: int, seed: int = 0, words: int = WORDS) -> torch.Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@settings(max_examples=200, deadline=None)
@given(sampling=samplings, seed=st.integers(0, 10**6), narrow=st.sampled_from([2, 5, 256]))
def test_any_settings_are_the_word_by_word_law(sampling: Sampling, seed: int, narrow: int) -> None:
    logits = some_logits(len(ANSWERS), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.decode.law.NARROW", narrow)  # a nucleus that ends inside the words looked at, or does not
        found = Law(sampling, PROMPT).probabilities(logits, ANSWERS)
    for got, raw, answer in zip(found, logits.tolist(), ANSWERS, strict=True):
        expected = torch.tensor(chances.law(raw, sampling, PROMPT, answer), dtype=torch.float64)
        assert torch.allclose(got, expected, atol=1e-9), (got, expected)


@settings(max_examples=50, deadline=None)
@given(sampling=samplings, seed=st.integers(0, 10**6))
def test_adjusted_logits_and_their_best(sampling: Sampling, seed: int) -> None:
    logits = some_logits(len(ANSWERS), seed)
    before = logits.clone()
    expected = torch.tensor(
        [chances.adjusted(raw, sampling, PROMPT, a) for raw, a in zip(logits.tolist(), ANSWERS, strict=True)],
        dtype=torch.float64,
    )
    law = Law(sampling, PROMPT)
    assert torch.allclose(law.adjusted(logits, ANSWERS), expected, atol=1e-9)
    assert law.best(logits, ANSWERS) == expected.argmax(-1).tolist()
    assert torch.equal(logits, before), "the target's own logits are told as they are"


def test_settings_that_change_no_logit_do_not_touch_them() -> None:
    logits = some_logits(3).bfloat16()
    assert Law(Sampling(), PROMPT).adjusted(logits, []) is logits
    assert Law(Sampling(temperature=0.7, top_k=3), PROMPT).adjusted(logits, []) is logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_laws_are_at_least_fp32(dtype: torch.dtype) -> None:
    logits = some_logits(2).to(dtype)
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.7), Sampling(1.0, frequency_penalty=1)):
        found = Law(sampling, PROMPT).probabilities(logits, [[1], [2]])
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(found.sum(-1), torch.ones(2, dtype=found.dtype))


def test_the_smallest_and_largest_temperatures_are_numbers() -> None:
    logits = some_logits(2).float() * 1e4
    for temperature in (1e-5, 1e-3, 100.0):
        found = cut(logits, Sampling(temperature))
        assert torch.allclose(found.sum(-1), torch.ones(2))
    assert Sampling(1e-6).greedy


def test_a_word_of_a_draft_that_is_none_counts_nowhere() -> None:
    sampling = Sampling(1.0, frequency_penalty=1.5)
    logits = some_logits(2)
    strange = Law(sampling, []).adjusted(logits, [[2], [-1, 2, WORDS, 10**9]])
    assert torch.equal(strange, Law(sampling, []).adjusted(logits, [[2], [2]]))


def test_a_draw_follows_its_law_and_never_leaves_it() -> None:
    shares = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    n = 64
    at = torch.tensor([*(i / n for i in range(n)), 1 - 2**-53, math.nextafter(1, 0)], dtype=torch.float64)
    drawn = place(shares.expand(len(at), -1), at)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 16, 0, 32, 18, 0]
    next_to_1 = torch.tensor([1 - 2**-53], dtype=torch.float64)
    for seed in range(200):  # whatever fp32 shares add up to
        law = torch.rand(1, 40, generator=torch.Generator().manual_seed(seed)).softmax(-1)
        assert place(torch.cat((law, torch.zeros(1, 2)), dim=-1), next_to_1).tolist() == [39]


@pytest.mark.parametrize("narrow", [2, 256])
def test_many_rows_at_once_draw_from_the_same_law(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.decode.law.NARROW", narrow)
    n = 3000
    cuts: Sequence[dict[str, Any]] = [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_p": 0.9, "min_p": 0.1}, {}]
    for cutting in cuts:
        sampling = Sampling(temperature=0.9, **cutting)
        logits = some_logits(1)
        drawn = choose(logits.expand(n, -1), sampling, [(i + 0.5) / n for i in range(n)])
        shares = torch.bincount(torch.tensor(drawn), minlength=WORDS) / n
        expected = torch.tensor(chances.law(logits[0].tolist(), sampling, [], []))
        assert (shares - expected).abs().max() <= 1.5 / n, cutting
    mixed = torch.cat((some_logits(1) * 0.01, some_logits(1) * 9))  # one nucleus is wide, the other narrow
    assert choose(mixed, Sampling(1.0, top_p=0.9), [0.999, 0.999])[0] != int(mixed[0].argmax())


def test_batches_refuse_what_they_cannot_know() -> None:
    for sampling in (Sampling(logit_bias={1: 5.0}), Sampling(1.0, repetition_penalty=1.1)):
        with pytest.raises(UsageError, match="penalties"):
            require_unadjusted(sampling)
        with pytest.raises(AssertionError):
            choose(some_logits(2), sampling, [0.5, 0.5])
    require_unadjusted(Sampling(1.0, top_k=3))


def test_logprobs_are_of_the_logits_as_they_are() -> None:
    logits = some_logits(3)
    found = logprobs(logits, [4, 0, 11], 3)
    logs = logits.log_softmax(-1)
    for told, line, token in zip(found, logs, [4, 0, 11], strict=True):
        assert told.logprob == pytest.approx(float(line[token]))
        assert [word for word, _ in told.top] == line.argsort(descending=True)[:3].tolist()
        assert [value for _, value in told.top] == pytest.approx(line.sort(descending=True).values[:3].tolist())
    assert logprobs(logits, [4, 0, 11], 0)[0].top == ()


# -- the settings themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {"3": 1.0}},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**bad)


def test_settings_can_be_compared_and_hashed() -> None:
    one, other = Sampling(logit_bias={3: 1.0, 1: -2.0}), Sampling(logit_bias={1: -2.0, 3: 1.0})
    assert one == other
    assert hash(one) == hash(other)
    assert one.bias == {1: -2.0, 3: 1.0}
    assert Sampling(logit_bias=one.logit_bias) == one
    assert one.adjusts
    assert not one.penalises
    assert one != Sampling()


def test_what_depends_on_the_text_is_known_as_such() -> None:
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert Sampling(**{name: 1.5}).penalises
    assert not Sampling(1.0, top_p=0.5, top_k=3, min_p=0.1).adjusts


def test_draws_depend_on_seed_and_name() -> None:
    streams = {
        (seed, name): [Sampling(1.0, seed=seed).draws(name).random() for _ in range(2)]
        for seed, name in itertools.product((0, 1), ("a", "b"))
    }
    assert len({tuple(numbers) for numbers in streams.values()}) == 4
    assert streams[0, "a"][0] == streams[0, "a"][1]
