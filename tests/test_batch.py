"""Batched answers are plain's, whatever shares the batch; sampling follows its law; memory keeps its bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tiny
from eyas import target as targets
from eyas.answers import Answer, Ask, Sampling
from eyas.decode import batch, cohort
from eyas.decode.batch import Batch, answer
from eyas.decode.plain import plain
from eyas.decode.sample import choose
from eyas.decode.ties import first_difference
from eyas.errors import UsageError
from eyas.target import Target

LENGTHS = (3, 17, 5, 30, 4, 4, 23, 11, 9, 2, 14, 8, 6, 19, 27, 12, 3, 7, 21, 10, 5, 16, 2, 13)
NEW = 14
SIZE = 16  # cohorts of two, and more prompts than rows: gaps are filled and prompts come in while others go on


def asks(lengths: Sequence[int] = LENGTHS, beginning: Sequence[int] = ()) -> list[Ask]:
    return [Ask(f"a{i}", (*beginning, *tiny.prompt(n, seed=i))) for i, n in enumerate(lengths)]


def told(
    target: Target, asked: Sequence[Ask], *, new: int = NEW, size: int = SIZE, **more: object
) -> dict[str, Answer]:
    return {a.id: a for a in answer(target, asked, max_new_tokens=new, batch=size, **more)}  # type: ignore[arg-type]


_PLAIN: dict[tuple[object, ...], tuple[list[int], list[float]]] = {}


def by_plain(target: Target, ask: Ask, new: int = NEW) -> tuple[list[int], list[float]]:
    """The oracle's answer and gaps; asked once for each prompt, since it is what takes the time here."""
    key = (target.spec, target.eos_ids(), ask.prompt_ids, new)
    if key not in _PLAIN:
        gaps: list[float] = []
        _PLAIN[key] = (list(plain(target, ask.prompt_ids, max_new_tokens=new, gaps=gaps)), gaps)
    return _PLAIN[key]


def same_as_plain(target: Target, asked: Sequence[Ask], answers: dict[str, Answer], new: int = NEW) -> int:
    """Every answer is plain's, ties aside; how many were excused."""
    assert sorted(answers) == sorted(ask.id for ask in asked)
    excused = 0
    for ask in asked:
        oracle, gaps = by_plain(target, ask, new)
        differs = first_difference(oracle, answers[ask.id].token_ids, gaps)
        assert differs is None or differs.excused, (ask.id, differs)
        excused += differs is not None
        assert differs is not None or (answers[ask.id].finish_reason == "stop") == (oracle[-1] in target.eos_ids())
    return excused


# -- greedy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_answers_are_plains_with_ends_at_many_places(kind: str) -> None:
    target = tiny.target(kind)
    common = Counter(token for ask in asks() for token in by_plain(target, ask)[0]).most_common(6)
    ending = tiny.ending_at(target, *(token for token, _ in common[2:]))
    answers = told(ending, asks())
    assert same_as_plain(ending, asks(), answers) == 0
    lengths = {len(a.token_ids) for a in answers.values()}
    assert len(lengths) > 3  # rows left at different times, so gaps were filled
    assert {a.finish_reason for a in answers.values()} <= {"stop", "length"}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])  # Gemma's window of 9 is shorter than the beginning
def test_a_shared_beginning_is_computed_once_and_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = tiny.target(kind), asks(beginning=tiny.prompt(12, seed=99))
    fed: list[int] = []
    real = cohort.Prefill.token_ids

    def counted(self: cohort.Prefill) -> list[int]:
        fed.append(len(real(self)))
        return real(self)

    monkeypatch.setattr(cohort.Prefill, "token_ids", counted)
    assert same_as_plain(target, asked, told(target, asked)) == 0
    whole = sum(len(ask.prompt_ids) for ask in asked)
    assert whole - 12 * (len(asked) - 1) <= sum(fed) < whole


@pytest.mark.parametrize("size", [1, 3, 40, 64])  # cohorts of 1, 1, 5 and 8
def test_the_batch_size_changes_nothing(size: int) -> None:
    target = tiny.target("llama")
    assert same_as_plain(target, asks(), told(target, asks(), size=size)) == 0


def test_prompts_are_read_as_needed_and_answers_come_as_they_finish() -> None:
    taken = 0

    def source() -> object:
        nonlocal taken
        for ask in asks((6,) * 200):
            taken += 1
            yield ask

    stream = answer(tiny.target("llama"), source(), max_new_tokens=3, batch=2)  # type: ignore[arg-type]
    next(stream)
    assert taken <= 2 * batch.WINDOW + 2
    assert 1 + len(list(stream)) == 200


def test_an_answer_ends_where_positions_end() -> None:
    target, ask = tiny.target("llama"), Ask("long", tuple(tiny.prompt(tiny.MAX_POSITIONS - 4)))
    (done,) = answer(target, [ask], max_new_tokens=50)
    assert list(done.token_ids) == by_plain(target, ask, 4)[0]
    assert done.finish_reason == "length"
    with pytest.raises(UsageError, match="positions"):
        list(answer(target, [Ask("full", tuple(tiny.prompt(tiny.MAX_POSITIONS)))], max_new_tokens=1))
    with pytest.raises(UsageError, match="no tokens"):
        list(answer(target, [Ask("empty", ())], max_new_tokens=1))


def test_the_target_is_itself_between_passes() -> None:
    target = tiny.target("gemma3")
    before = target.decoder.config._attn_implementation
    stream = answer(target, asks()[:4], max_new_tokens=9, batch=3)
    next(stream)
    assert target.decoder.config._attn_implementation == before
    assert not torch.is_inference_mode_enabled()
    assert by_plain(target, asks()[0], 9)[0]
    stream.close()


def test_other_maths_of_attention_is_refused() -> None:
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(UsageError, match="caps or sinks"):
        cohort.attend(torch.nn.Identity(), q, q, q, None, parts=[], softcap=30.0)


# -- memory -------------------------------------------------------------------------------------------------


def test_bytes_a_token_are_what_the_buffers_take() -> None:
    for kind in tiny.KINDS:
        target = tiny.target(kind)
        running = Batch(target, max_new_tokens=6, batch=4)
        running.submit(Ask("a", tuple(tiny.prompt(10))))
        running.step()
        (held,) = running._cohorts
        real = sum(t.numel() * t.element_size() for t in (*held._keys.values(), *held._values.values()))
        assert running.held_bytes == real == 16 * batch.kv_bytes_per_token(target)


def test_keys_and_values_stay_inside_their_bound() -> None:
    target = tiny.target("llama")
    bound = 3 * (30 + NEW) * batch.kv_bytes_per_token(target)
    running = Batch(target, max_new_tokens=NEW, batch=64, kv_bytes=bound)
    for ask in asks():
        running.submit(ask)
    answers, most = {}, 0
    while running.waiting or running.running:
        answers.update({a.id: a for a in running.step()})
        most = max(most, running.held_bytes)
    assert 0 < most <= bound
    assert same_as_plain(target, asks(), answers) == 0
    # A prompt that needs more than the bound is answered all the same, alone.
    assert same_as_plain(target, asks(), told(target, asks(), kv_bytes=1)) == 0


# -- sampling -----------------------------------------------------------------------------------------------

WARM = Sampling(temperature=0.9, top_p=0.8, top_k=20, seed=5)


@pytest.mark.parametrize("sampling", [WARM, Sampling(temperature=1.3), Sampling(temperature=0.7, top_p=0.5)])
def test_a_sampled_answer_depends_on_seed_and_id_alone(sampling: Sampling) -> None:
    target = tiny.target("llama")
    together = told(target, asks(), sampling=sampling)
    alone = {}
    for ask in reversed(asks()):
        alone.update(told(target, [ask], size=1, sampling=sampling))
    assert together == alone
    other = told(target, asks(), sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed=6))
    assert sum(other[i] == together[i] for i in other) < len(other) / 2
    twins = [Ask(f"twin{i}", asks()[0].prompt_ids) for i in range(6)]
    assert len({a.token_ids for a in told(target, twins, sampling=sampling).values()}) > 3


def law(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution itself, word by word: temperature, then top-k, then top-p."""
    shares = (logits.double() / sampling.temperature).softmax(-1)
    order = shares.argsort(descending=True).tolist()[: sampling.top_k]
    mass = float(shares[order].sum())
    kept, before = torch.zeros_like(shares), 0.0
    for word in order:
        if before >= sampling.top_p:
            break
        kept[word] = shares[word]
        before += float(shares[word]) / mass
    return kept / kept.sum()


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.001])
@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("narrow", [4, 256])  # a nucleus that ends inside the candidates looked at, or does not
def test_draws_follow_the_law(top_p: float, top_k: int | None, narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.decode.law.NARROW", narrow)
    sampling = Sampling(temperature=0.8, top_p=top_p, top_k=top_k)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    n = 4000
    drawn = choose(logits.expand(n, -1), sampling, [(i + 0.5) / n for i in range(n)])
    shares = torch.bincount(torch.tensor(drawn), minlength=40) / n
    expected = law(logits, sampling)
    assert (shares - expected).abs().max() <= 1.5 / n
    assert set(drawn) <= set(expected.nonzero().flatten().tolist())


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(2))
    assert choose(logits, Sampling(), []) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}]
)
def test_impossible_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}])
def test_what_a_batch_cannot_follow_is_refused_before_anything_is_played(law: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="neither penalties nor a logit bias"):
        Batch(tiny.target(), max_new_tokens=4, sampling=Sampling(temperature=1.0, **law))


# -- the real target ----------------------------------------------------------------------------------------


@pytest.mark.real
def test_smollm2_answers_as_plain_does() -> None:
    target = targets.load("smollm2")
    assert target.tokenizer is not None
    texts = ["What is a comet?", "Write a haiku about rain.", "List three prime numbers.", "Why is the sky blue?"]
    asked = []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        rendered = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked.append(Ask(text, tuple(target.tokenizer(rendered, add_special_tokens=False)["input_ids"])))
    answers = told(target, asked, new=24, size=3)
    assert same_as_plain(target, asked, answers, new=24) == 0
