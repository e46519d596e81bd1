"""Decoding with a drafter gives the target's own answer, and its counts are exact (the chain: ``test_chain``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

import tiny
from eyas import taps
from eyas.decode import accept
from eyas.decode.cache import FIRST_CAPACITY, KeyValues, TargetCache, as_row
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation, generate
from eyas.decode.plain import plain
from eyas.decode.ties import Difference, first_difference
from eyas.errors import UsageError
from eyas.target import Target

TAPS = (1, 2, 4)
LONG = 34  # tokens the oracle says; the tests ask for fewer, so that a replay can draft past the end


@dataclass(frozen=True)
class Oracle:
    prompt: list[int]
    ids: list[int]
    gaps: list[float]


@cache
def oracle(kind: str, length: int = 11) -> Oracle:
    prompt, gaps = tiny.prompt(length), list[float]()
    ids = list(plain(tiny.target(kind), prompt, max_new_tokens=LONG, gaps=gaps))
    return Oracle(prompt, ids, gaps)


def assert_same(told: Oracle, answer: Sequence[int]) -> None:
    n = len(answer)
    difference = first_difference(told.ids[:n], answer, told.gaps[:n])
    assert difference is None or difference.excused, difference


@dataclass
class Replay:
    """Drafts the oracle's own tokens; in round i it errs at depth ``wrong(i)``, where that is not None."""

    told: Oracle
    wrong: Callable[[int], int | None] = lambda _: None
    taps: tuple[int, ...] = TAPS
    known: int = 0  # tokens of prompt and answer known so far
    rounds: int = 0
    extended: list[tuple[Tensor, list[int], int]] = field(default_factory=list)

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        assert first_slot == max(self.known - 1, 0)
        self.known = first_slot + len(next_tokens) + 1
        self.extended.append((taps.clone(), list(next_tokens), first_slot))

    def draft(self, draft_tokens: int) -> list[int]:
        start = self.known - len(self.told.prompt)
        tokens = self.told.ids[start : start + draft_tokens]
        miss = self.wrong(self.rounds)
        if miss is not None and miss < len(tokens):
            tokens[miss] = (tokens[miss] + 1) % tiny.VOCAB
        self.rounds += 1
        return tokens


def play(target: Target, side: Replay, n: int, K: int) -> Generation:
    return Generation(target, side, side.told.prompt, max_new_tokens=n, draft_tokens=K).finish()


# -- the oracle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_plain_is_the_argmax_of_a_pass_without_cache(kind: str) -> None:
    told, target = oracle(kind), tiny.target(kind)
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([told.prompt + told.ids]), use_cache=False).logits[0]
    steps = logits[len(told.prompt) - 1 : -1]
    best = steps.topk(2, dim=-1).values
    assert_same(told, steps.argmax(-1).tolist())
    assert torch.allclose(best[:, 0] - best[:, 1], torch.tensor(told.gaps), atol=1e-3)


def test_plain_stops_at_any_end_token_and_says_it() -> None:
    told = oracle("llama")
    end = next(i for i in range(5, LONG) if told.ids[i] not in told.ids[:i])
    target = tiny.ending_at(tiny.target("llama"), told.ids[end], tiny.VOCAB)
    assert list(plain(target, told.prompt, max_new_tokens=LONG)) == told.ids[: end + 1]


def test_no_mode_and_no_hook_is_left_behind_between_steps() -> None:
    told, target = oracle("llama"), tiny.target("llama")
    for _ in plain(target, told.prompt, max_new_tokens=2):
        assert not torch.is_inference_mode_enabled()
    for _ in generate(target, tiny.drafter("llama"), told.prompt, max_new_tokens=4, draft_tokens=2):
        assert not torch.is_inference_mode_enabled()
        assert not any(layer._forward_pre_hooks for layer in target.decoder.layers)  # type: ignore[union-attr]


def test_a_window_shorter_than_the_text_holds_with_cache_and_after_rejections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny.target("gemma3")
    ids = tiny.prompt(4 * tiny.WINDOW)
    with torch.no_grad():
        whole = target.decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        held, parts = TargetCache(target), []
        for start in range(0, len(ids), 6):
            held.forward(as_row([7] * 5, target))  # a rejected run
            held.truncate(start)
            parts.append(held.forward(as_row(ids[start : start + 6], target)))
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)
        monkeypatch.setattr(target.config, "sliding_window", 1000)
        wide = target.decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    assert not torch.allclose(wide, whole, atol=1e-1)


# -- greedy equality and exact counts ----------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_random_drafter_changes_nothing(kind: str, K: int) -> None:
    told, n = oracle(kind), 14
    done = generate(tiny.target(kind), tiny.drafter(kind), told.prompt, max_new_tokens=n, draft_tokens=K).finish()
    assert_same(told, done.token_ids)
    assert len(done.token_ids) == n
    assert done.drafted == [done.rounds] * K
    assert 1 + done.rounds + sum(done.accepted) >= n  # whole rounds, the last one may be cut
    assert done.seconds > 0


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_a_random_drafter_of_any_shape_changes_nothing(shape: str) -> None:
    told, drafter = oracle("llama"), tiny.drafter("llama", **tiny.SHAPES[shape])
    done = generate(tiny.target("llama"), drafter, told.prompt, max_new_tokens=9, draft_tokens=3).finish()
    assert_same(told, done.token_ids)


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_always_right(kind: str, K: int) -> None:
    told, n = oracle(kind), 15
    done = play(tiny.target(kind), Replay(told), n, K)
    rounds = -(-(n - 1) // (K + 1))
    assert done.token_ids == told.ids[:n]
    assert (done.rounds, done.drafted, done.accepted) == (rounds, [rounds] * K, [rounds] * K)
    assert done.was_drafted == [i % (K + 1) != 0 for i in range(n)]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_always_wrong(kind: str) -> None:
    told, n = oracle(kind), 14
    done = play(tiny.target(kind), Replay(told, lambda _: 0), n, 3)
    assert done.token_ids == told.ids[:n]
    assert (done.rounds, done.drafted, done.accepted) == (n - 1, [n - 1] * 3, [0, 0, 0])
    assert not any(done.was_drafted)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_partly_right_rounds_are_counted_by_depth_and_extended_from_target_taps(kind: str) -> None:
    told, target = oracle(kind), tiny.target(kind)
    misses = [2, 0, None, 1, 3, 0]  # of K = 4; kept 2, 0, 4, 1, 3, 0
    side = Replay(told, lambda i: misses[i])
    rounds = list(Generation(target, side, told.prompt, max_new_tokens=17, draft_tokens=4))
    assert [r.accepted for r in rounds] == [2, 0, 4, 1, 3, 0]
    assert [t for r in rounds for t in r.tokens] == told.ids[1:17]

    text = torch.tensor([told.prompt + told.ids])
    whole = taps.run(target, text, torch.tensor([text.shape[1]]), TAPS).taps
    for fed, tokens, first in side.extended:
        last = first + len(tokens)
        assert tokens == text[0, first + 1 : last + 1].tolist()
        assert torch.allclose(fed, whole[:, first:last], atol=1e-4)


def test_counts_by_depth_of_partly_right_rounds() -> None:
    told = oracle("qwen2")
    misses = [2, 0, None, 1, 3, 0]
    done = play(tiny.target("qwen2"), Replay(told, lambda i: misses[i]), 17, 4)
    assert (done.rounds, done.drafted, done.accepted) == (6, [6] * 4, [4, 3, 2, 1])


@pytest.mark.parametrize("shape", ["usual", "everything"])
def test_a_chain_is_as_good_as_new_after_rejections(shape: str) -> None:
    """Real drafting between scripted answers: the committed keys are those of the text alone."""
    told, target = oracle("qwen3"), tiny.target("qwen3")
    drafter = tiny.drafter("qwen3", **tiny.SHAPES[shape])

    class Scripted(Chain):
        script = Replay(told, lambda i: [2, 0, None, 1, 3, 0][i % 6])

        def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
            self.script.extend(taps, next_tokens, first_slot)
            super().extend(taps, next_tokens, first_slot)

        def draft(self, draft_tokens: int) -> list[int]:
            super().draft(draft_tokens)
            return self.script.draft(draft_tokens)

    chain = Scripted(drafter)
    running = Generation(target, chain, told.prompt, max_new_tokens=30, draft_tokens=4)
    for _ in range(7):
        next(running)
    text = told.prompt + running.token_ids
    fresh = Chain(drafter)
    seen = taps.run(target, torch.tensor([text]), torch.tensor([len(text)]), TAPS).taps
    fresh.extend(seen[:, :-1], text[1:], 0)
    assert chain.committed == fresh.committed == len(text) - 1
    assert len(chain.caches) == drafter.config.num_hidden_layers
    for held, new in zip(chain.caches, fresh.caches, strict=True):
        assert torch.allclose(held.keys, new.keys, atol=1e-4)
        assert torch.allclose(held.values, new.values, atol=1e-4)
    assert chain.state is not None
    assert fresh.state is not None
    assert torch.allclose(chain.state, fresh.state, atol=1e-4)
    assert Chain.draft(chain, 4) == fresh.draft(4)


# -- where an answer ends ----------------------------------------------------------------------------------


def first_new(ids: Sequence[int], start: int) -> int:
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def test_an_end_token_inside_a_drafted_run_cuts_the_answer_but_not_the_counts() -> None:
    told = oracle("llama")
    end = first_new(told.ids, 7)
    K = 4 if end % 5 else 3  # the end token is drafted, not a bonus
    target = tiny.ending_at(tiny.target("llama"), told.ids[end])
    done = play(target, Replay(told), LONG - 4, K)
    rounds = -(-end // (K + 1))
    assert done.token_ids == told.ids[: end + 1]
    assert (done.rounds, done.accepted) == (rounds, [rounds] * K)
    assert done.was_drafted[-1]
    with pytest.raises(StopIteration):
        next(done)


def test_an_end_token_may_be_the_bonus_or_the_first_token() -> None:
    told = oracle("llama")
    bonus = first_new(told.ids, 4)
    target = tiny.ending_at(tiny.target("llama"), told.ids[bonus])
    done = play(target, Replay(told, lambda _: 0), LONG - 4, 4)
    assert (done.token_ids, done.was_drafted[-1]) == (told.ids[: bonus + 1], False)
    at_once = play(tiny.ending_at(tiny.target("llama"), told.ids[0]), Replay(told), 9, 4)
    assert (at_once.token_ids, at_once.rounds, at_once.accepted) == (told.ids[:1], 0, [0] * 4)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8])
def test_max_new_tokens_inside_a_run_cuts_the_answer_but_not_the_counts(n: int) -> None:
    told = oracle("qwen3")
    done = play(tiny.target("qwen3"), Replay(told), n, 4)
    rounds = -(-(n - 1) // 5)
    assert done.token_ids == told.ids[:n]
    assert len(done.was_drafted) == n
    assert (done.rounds, done.drafted, done.accepted) == (rounds, [rounds] * 4, [rounds] * 4)


def with_positions(target: Target, positions: int) -> Target:
    config = copy.deepcopy(target.config)
    config.max_position_embeddings = positions
    return replace(target, config=config)


def test_near_the_context_limit_fewer_tokens_are_drafted_and_counted_so() -> None:
    told = oracle("llama")
    target = with_positions(tiny.target("llama"), len(told.prompt) + 9)
    done = play(target, Replay(told, lambda _: 0), 9, 4)
    assert done.token_ids == told.ids[:9]
    # Position t of the last known token runs from 11 to 18 of 20: room for 4, 4, 4, 4, 4, 3, 2, 1 drafted.
    assert (done.rounds, done.drafted) == (8, [8, 7, 6, 5])


def test_wrong_use_is_refused_with_a_way_out() -> None:
    told, target = oracle("llama"), with_positions(tiny.target("llama"), 20)
    drafter = tiny.drafter("llama")
    with pytest.raises(UsageError, match="at most 9 new tokens"):
        plain(target, told.prompt, max_new_tokens=10)
    with pytest.raises(UsageError, match="at most 9 new tokens"):
        generate(target, drafter, told.prompt, max_new_tokens=10, draft_tokens=2)
    with pytest.raises(UsageError, match="Shorten the prompt"):
        plain(target, told.prompt * 2, max_new_tokens=1)
    with pytest.raises(UsageError, match="without a drafter"):
        generate(target, drafter, told.prompt, max_new_tokens=5, draft_tokens=0)
    with pytest.raises(UsageError, match="no tokens"):
        plain(target, [], max_new_tokens=5)
    for strange in (tiny.VOCAB, -1):
        with pytest.raises(UsageError, match="rows for 0 to 210"):
            plain(target, [*told.prompt[:3], strange], max_new_tokens=5)
    with pytest.raises(UsageError, match="1 or more"):
        plain(target, told.prompt, max_new_tokens=0)


@pytest.mark.parametrize("tapped", [(0, 3, 5), (5,), (1, 2)])
def test_any_taps_the_last_included(tapped: tuple[int, ...]) -> None:
    told, target = oracle("llama"), tiny.target("llama")
    drafter = tiny.drafter("llama", taps=tapped)
    done = generate(target, drafter, told.prompt, max_new_tokens=8, draft_tokens=3).finish()
    assert_same(told, done.token_ids)


# -- the small parts ---------------------------------------------------------------------------------------


def test_rows_survive_growing_and_truncating() -> None:
    generator = torch.Generator().manual_seed(0)
    held, keys, values = KeyValues(), torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 6)
    for step, rows in enumerate([3, 1, FIRST_CAPACITY - 4, 1, 1, 2 * FIRST_CAPACITY + 9, 1]):
        k = torch.randn(1, 2, rows, 4, generator=generator)
        v = torch.randn(1, 2, rows, 6, generator=generator)
        held.append(k, v)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        if step % 2:
            held.truncate(held.length - 1)
            keys, values = keys[:, :, :-1], values[:, :, :-1]
        assert held.length == keys.shape[2]
        assert torch.equal(held.keys, keys)
        assert torch.equal(held.values, values)
    with pytest.raises(AssertionError):
        held.truncate(held.length + 1)


@pytest.mark.parametrize(
    ("drafted", "target_ids", "kept"),
    [
        ([5, 6, 7], [5, 6, 7, 8], (3, 8)),
        ([5, 6, 7], [5, 9, 7, 8], (1, 9)),  # a match after a miss is worth nothing
        ([5, 6, 7], [4, 6, 7, 8], (0, 4)),
        ([5], [5, 1], (1, 1)),
    ],
)
def test_greedy_keeps_leading_matches(drafted: list[int], target_ids: list[int], kept: tuple[int, int]) -> None:
    assert accept.greedy(drafted, target_ids) == kept


def test_first_difference() -> None:
    gaps = [1.0, 5e-4, 1.0]
    assert first_difference([1, 2, 3], [1, 2, 3], gaps) is None
    assert first_difference([1, 2, 3], [1, 9, 9], gaps) == Difference(1, excused=True)
    assert first_difference([1, 2, 3], [1, 2, 9], gaps) == Difference(2, excused=False)
    assert first_difference([1, 2, 3], [9, 2, 3], gaps, tie=2.0) == Difference(0, excused=True)
    assert first_difference([1, 2, 3], [1, 2], gaps) == Difference(2, excused=False)
    assert first_difference([1, 2, 3], [1, 2, 3, 4], gaps) == Difference(3, excused=False)
