"""Answers under every setting: greedy ones are plain's whatever drafts, sampled ones hang on seed and name alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chances
import tiny
from chances import PROMPT, VOCAB, Played, Table, TableChain
from eyas.answers import Sampling
from eyas.decode.loop import Generation, generate
from eyas.decode.plain import plain
from eyas.drafter import Drafter
from eyas.errors import TargetError, UsageError
from eyas.target import Target

WARM = Sampling(0.9, top_p=0.9, min_p=0.02, seed=5)
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.6,
    "logit_bias": {2: 2.0, 0: -1.0},
}


# -- greedy, whatever drafts -----------------------------------------------------------------------------------


def best_words(sampling: Sampling, n: int) -> list[int]:
    answer: list[int] = []
    for _ in range(n):
        changed = chances.adjusted(chances.row((*PROMPT, *answer)), sampling, PROMPT, answer)
        answer.append(changed.index(max(changed)))
    return answer


class Anything(TableChain):
    """Drafts what it is told to, words that are none included; ``right`` says where it has the target's own."""

    def __init__(self, own: Sequence[int], drafts: Sequence[int], right: Sequence[bool]) -> None:
        super().__init__(lambda text: [0.0], [0])
        self._own, self._next = own, iter(zip(drafts, right, strict=True))

    def draft(self, draft_tokens: int) -> list[int]:
        start = len(self.text) - len(PROMPT)
        return [
            self._own[start + k] if right else word
            for k, (word, right) in zip(range(draft_tokens), self._next, strict=False)
        ] or [0]


greedy_settings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=2),
)
words = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([-1, VOCAB, 2**40, -(2**40)]))


@settings(max_examples=150, deadline=None)
@given(
    sampling=greedy_settings,
    K=st.integers(1, 5),
    drafts=st.lists(words, min_size=60, max_size=60),
    right=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_greedy_is_plain_whatever_is_drafted(sampling: Sampling, K: int, drafts: list[int], right: list[bool]) -> None:
    own = best_words(sampling, 20)
    side = Anything(own, drafts, right)
    run = Played(Table(), side, PROMPT, max_new_tokens=12, draft_tokens=K, sampling=sampling)  # type: ignore[arg-type]
    assert run.finish().token_ids == own[:12]
    assert run.rounds == run.drafted[0]


def spoilt(kind: str, value: float) -> Drafter:
    drafter = copy.deepcopy(tiny.drafter(kind))
    drafter.lm_head.weight.fill_(value) if value == value else drafter.fc.weight.fill_(value)
    return drafter


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0], ids=["nan", "inf", "zero"])
def test_a_broken_drafter_changes_no_greedy_answer_and_ends_no_sampled_one(value: float) -> None:
    target, drafter = tiny.target("llama"), spoilt("llama", value)
    for sampling in (Sampling(), Sampling(**PENALTIES)):
        own = list(plain(target, tiny.prompt(9), max_new_tokens=12, sampling=sampling))
        run = generate(target, drafter, tiny.prompt(9), max_new_tokens=12, draft_tokens=3, sampling=sampling)
        assert run.finish().token_ids == own
    run = generate(target, drafter, tiny.prompt(9), max_new_tokens=12, draft_tokens=3, sampling=WARM).finish()
    assert len(run.token_ids) == 12


def test_penalties_on_a_real_target_follow_the_drafted_tokens() -> None:
    """An oracle that is always drafted: a penalty that overlooked the draft would keep what plain does not say."""
    target = tiny.target("llama")
    sampling = Sampling(**PENALTIES)
    own = list(plain(target, tiny.prompt(9), max_new_tokens=20, sampling=sampling))
    assert own != list(plain(target, tiny.prompt(9), max_new_tokens=20))

    class Right(TableChain):
        taps = (1, 2, 4)

        def draft(self, draft_tokens: int) -> list[int]:
            return own[len(self.text) - 9 :][:draft_tokens]

    side = Right(lambda text: [0.0], [0], tiny.prompt(9))
    run = Generation(target, side, tiny.prompt(9), max_new_tokens=16, draft_tokens=4, sampling=sampling).finish()
    assert run.token_ids == own[:16]
    assert run.accepted == [3] * 4


# -- seeds -------------------------------------------------------------------------------------------------------


def answer(seed: int = 5, name: str = "a", K: int = 3, drafter: Drafter | None = None, n: int = 12) -> list[int]:
    run = generate(
        tiny.target("qwen3"),
        drafter or tiny.drafter("qwen3"),
        tiny.prompt(9),
        max_new_tokens=n,
        draft_tokens=K,
        sampling=replace(WARM, seed=seed),
        name=name,
    )
    return run.finish().token_ids


def test_a_sampled_answer_depends_on_seed_and_name() -> None:
    torch.manual_seed(1)
    first = answer()
    torch.manual_seed(2)
    assert answer() == first
    assert len({tuple(answer(seed=seed)) for seed in range(6)}) > 4
    assert len({tuple(answer(name=name)) for name in "abcdef"}) > 4


def test_answers_in_turn_are_those_of_each_alone() -> None:
    def begin(seed: int) -> Generation:
        return generate(
            tiny.target("qwen3"),
            tiny.drafter("qwen3"),
            tiny.prompt(9),
            max_new_tokens=12,
            draft_tokens=3,
            sampling=replace(WARM, seed=seed),
            name="a",
        )

    runs = [begin(seed) for seed in range(3)]
    while not all(run.finished for run in runs):
        for run in runs:
            next(run, None)
    assert [run.token_ids for run in runs] == [answer(seed=seed) for seed in range(3)]


@pytest.mark.parametrize("changes", [{}, PENALTIES, {"top_k": 7}], ids=["cut", "penalties", "top-k"])
def test_without_drafts_it_is_plain_draw_by_draw(changes: dict[str, Any]) -> None:
    target, sampling = tiny.target("llama"), replace(WARM, **changes)
    for seed in range(3):
        seeded = replace(sampling, seed=seed)
        own = list(plain(target, tiny.prompt(9), max_new_tokens=20, sampling=seeded, name="b"))
        run = Generation(
            target, None, tiny.prompt(9), max_new_tokens=20, draft_tokens=0, sampling=seeded, name="b"
        ).finish()
        assert run.token_ids == own
        assert (run.rounds, run.drafted, run.accepted) == (19, [], [])


def test_plain_draws_where_its_numbers_fall_in_the_law() -> None:
    target, prompt = tiny.target("llama"), tiny.prompt(9)
    sampling = Sampling(0.7, top_k=9, seed=3, **PENALTIES)
    said = list(plain(target, prompt, max_new_tokens=12, sampling=sampling, name="c"))
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([prompt + said]), use_cache=False).logits[0].tolist()
    draws = sampling.draws("c")
    for i, token in enumerate(said):
        shares = chances.law(logits[len(prompt) - 1 + i], sampling, prompt, said[:i])
        number, before = draws.random(), sum(shares[:token])
        assert before - 1e-5 <= number <= before + shares[token] + 1e-5


def test_a_drafter_that_is_right_is_kept_when_sampling() -> None:
    """Its laws are the target's own, so everything is kept: the laws are compared at their own rows."""
    side = TableChain(lambda text: chances.row(text), range(VOCAB))
    run = Played(Table(), side, PROMPT, max_new_tokens=40, draft_tokens=3, sampling=WARM).finish()  # type: ignore[arg-type]
    assert run.accepted == run.drafted
    assert run.was_drafted[1:4] == [True] * 3


# -- logprobs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), WARM, Sampling(0.8, **PENALTIES)], ids=["greedy", "warm", "changed"])
def test_logprobs_are_the_targets_own_whatever_is_drafted(sampling: Sampling) -> None:
    target, prompt = tiny.target("llama"), tiny.prompt(9)
    run = generate(
        target, tiny.drafter("llama"), prompt, max_new_tokens=13, draft_tokens=4, sampling=sampling, logprobs=3
    )
    told = [one for done in run for one in done.logprobs]
    assert run.logprobs[1:] == told
    assert len(run.logprobs) == 13
    with torch.no_grad():
        whole = target.model(input_ids=torch.tensor([prompt + run.token_ids]), use_cache=False).logits[0]
    logs = whole[len(prompt) - 1 : -1].log_softmax(-1)
    for line, token, one in zip(logs, run.token_ids, run.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(line[token]), abs=1e-4)
        best = line.topk(3)
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert one.top[0][0] == best.indices[0]


def test_logprobs_end_with_the_answer_and_are_left_out_unasked() -> None:
    side = TableChain(lambda text: chances.row(text), range(VOCAB))
    asked = Played(Table(), side, PROMPT, max_new_tokens=4, draft_tokens=5, logprobs=0).finish()  # type: ignore[arg-type]
    assert len(asked.logprobs) == len(asked.token_ids) == 4
    assert all(one.top == () for one in asked.logprobs)
    assert Played(Table(), side, PROMPT, max_new_tokens=4, draft_tokens=5).finish().logprobs == []  # type: ignore[arg-type]


# -- stop strings --------------------------------------------------------------------------------------------------

SPELLED = {0: "a", 1: " b", 2: "€c", 3: "d ", 4: "."}


def spelled(target: Any = None) -> Any:
    """A target whose words are spelt; its stop strings may lie across them."""
    tokenizer = SimpleNamespace(
        eos_token_id=None,
        decode=lambda ids, skip_special_tokens: "".join(SPELLED[id % VOCAB] for id in ids),
    )
    return Table(tokenizer=tokenizer) if target is None else replace(target, tokenizer=tokenizer)


def text(ids: Sequence[int]) -> str:
    return "".join(SPELLED[id % VOCAB] for id in ids)


def until(own: Sequence[int], stop: str) -> list[int]:
    """The tokens up to the first that completes the stop string, found in the whole text."""
    return next(list(own[:n]) for n in range(1, len(own) + 1) if stop in text(own[:n]))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, seed=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_a_stop_string_ends_an_answer_wherever_it_falls_in_a_round(sampling: Sampling, K: int) -> None:
    def play(stops: Sequence[str]) -> Generation:
        side = TableChain(lambda text: chances.row(text), range(VOCAB))
        return Played(
            spelled(), side, PROMPT, max_new_tokens=30, draft_tokens=K, sampling=sampling, stops=stops, logprobs=1
        ).finish()  # type: ignore[arg-type]

    whole = play(()).token_ids
    tried = 0
    for at in range(1, 20):
        stop = text(whole)[at : at + 3]
        run = play(["never said", stop])
        expected = until(whole, stop)
        assert run.token_ids == expected
        assert (run.stopped, run.finish_reason) == (stop, "stop")
        assert len(run.was_drafted) == len(run.logprobs) == len(expected)
        rounds = -(-(len(expected) - 1) // (K + 1))
        assert (run.rounds, run.drafted, run.accepted) == (rounds, [rounds] * K, [rounds] * K)  # whole rounds count
        tried += (len(expected) - 1) % (K + 1) != 0
    assert tried or K == 1, "no stop string inside a round proves nothing"


def test_plain_stops_with_the_same_token() -> None:
    target = spelled(tiny.target("llama"))
    own = list(plain(target, tiny.prompt(9), max_new_tokens=20))
    stop = text(own)[9:12]
    assert list(plain(target, tiny.prompt(9), max_new_tokens=20, stops=[stop])) == until(own, stop)
    run = generate(target, tiny.drafter("llama"), tiny.prompt(9), max_new_tokens=20, draft_tokens=3, stops=[stop])
    assert run.finish().token_ids == until(own, stop)


def test_why_an_answer_ended() -> None:
    side = TableChain(lambda text: chances.row(text), range(VOCAB))
    run = Played(Table(), side, PROMPT, max_new_tokens=4, draft_tokens=1)  # type: ignore[arg-type]
    assert run.finish_reason is None
    assert run.finish().finish_reason == "length"
    ended = Played(Table(ends=frozenset({run.token_ids[1]})), side, PROMPT, max_new_tokens=9, draft_tokens=3)  # type: ignore[arg-type]
    assert ended.finish().finish_reason == "stop"
    assert ended.stopped is None


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_with_a_way_out() -> None:
    target, drafter, prompt = tiny.target("llama"), tiny.drafter("llama"), tiny.prompt(5)

    def ask(of: Target = target, **more: Any) -> Generation:
        return generate(of, drafter, prompt, max_new_tokens=5, draft_tokens=2, **more)

    with pytest.raises(UsageError, match="names token 211"):
        ask(sampling=Sampling(logit_bias={tiny.VOCAB: 1.0}))
    with pytest.raises(UsageError, match="names token 211"):
        plain(target, prompt, max_new_tokens=5, sampling=Sampling(logit_bias={tiny.VOCAB: 1.0}))
    for count in (-1, tiny.VOCAB + 1):
        with pytest.raises(UsageError, match="best"):
            ask(logprobs=count)
    with pytest.raises(TargetError, match="no tokenizer"):
        ask(stops=["x"])
    with pytest.raises(UsageError, match="empty"):
        ask(spelled(target), stops=[""])


def test_a_draft_is_dropped_after_sampling_it() -> None:
    """The chain holds what is committed and nothing else, as after a greedy draft."""
    target, drafter = tiny.target("llama"), tiny.drafter("llama")
    run = generate(target, drafter, tiny.prompt(9), max_new_tokens=20, draft_tokens=3, sampling=WARM)
    for _ in range(4):
        next(run)
    chain: Any = run._side
    assert [cache.length for cache in chain.caches] == [chain.committed] == [9 + len(run.token_ids) - 1]
    drawn = chain.sample(3, WARM, run._chance)
    assert set(drawn.tokens) <= set(drafter.vocab.ids.tolist())
    laws: Tensor = drawn.laws
    assert laws.shape == (3, tiny.DRAFT_VOCAB)
    assert torch.allclose(laws.sum(-1), torch.ones(3))
    assert torch.equal(drawn.words, drafter.vocab.ids)
