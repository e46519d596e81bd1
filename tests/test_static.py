"""The static way says what the library says, and its rounds are the loop's (that they trace: ``test_static_trace``)."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import stacks
import tiny
from eyas import batches, starts, taps
from eyas.decode import static, static_round
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation, generate
from eyas.decode.passes import LibraryPasses
from eyas.decode.plain import plain
from eyas.decode.static import ROWS, StaticPasses
from eyas.decode.static_round import GreedyRounds, StaticChain
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.target import Target
from stacks import TAPS, dense, same

KINDS = [kind for kind in tiny.KINDS if kind != "deepseek"]
ALL = pytest.mark.parametrize("name", [*KINDS, "yarn rope", "qwen2, some windows", "biases, odd widths"])
PARENTS = [-1, 0, 0, 1, 2, 2, -1, 3, 6]
PATHS = [[0, 1, 3, 7], [0, 2, 5], [6, 8], []]


def both(name: str, capacity: int = 200, tapped: Sequence[int] = TAPS) -> tuple[StaticPasses, LibraryPasses]:
    target = stacks.target(name)
    return StaticPasses(target, tapped, capacity=capacity), LibraryPasses(target, tapped)


def fed_alike(name: str, ours: StaticPasses, theirs: LibraryPasses, *what: Any) -> None:
    """States, taps and logits of one pass either way."""
    spoil(ours)
    found, expected = ours.forward(*what), theirs.forward(*what)
    same(found, expected)
    logits = stacks.target(name).logits
    same((logits(found[0]), found[1]), (logits(expected[0]), expected[1]))
    assert ours.length == theirs.length == int(ours.buffers.held)


def spoil(passes: StaticPasses) -> None:
    """Put garbage where nothing is held: whoever looks there is found out."""
    for held in (*passes.buffers.keys, *passes.buffers.values):
        held[:, :, passes.length :] = 50.0


# -- the target's side ---------------------------------------------------------------------------------------------


@ALL
def test_a_text_in_parts_is_what_the_library_says(name: str) -> None:
    ids, begin = tiny.prompt(45), 0
    tapped = (0, 1, stacks.target(name).num_layers)  # the last one stands before the final norm
    ours, theirs = both(name, tapped=tapped)
    for rows in (13, 1, 2, 1, 5, 9, 14):
        fed_alike(name, ours, theirs, ids[begin : begin + rows])
        begin += rows
    assert begin == len(ids)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_text_goes_in_chunks_and_is_one_dense_pass(name: str) -> None:
    ids = tiny.prompt(ROWS[-1] + 21)
    ours, _ = both(name)
    same(ours.forward(ids), dense(stacks.target(name), ids))
    assert ours.length == len(ids)


@ALL
def test_what_was_truncated_was_never_fed(name: str) -> None:
    ids, wrong = tiny.prompt(40), tiny.prompt(12, seed=3)
    ours, theirs = both(name)
    for length in (30, 22, 5):
        for fed in (ours, theirs):
            fed.forward(ids[fed.length : length])
            fed.forward(wrong)
            fed.truncate(length)
        fed_alike(name, ours, theirs, ids[length:])
        ours.truncate(3)
        theirs.truncate(3)


@ALL
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_tree_and_the_path_that_is_kept_of_it(name: str, path: list[int]) -> None:
    ids, drafted, after = tiny.prompt(20), tiny.prompt(len(PARENTS), seed=1), tiny.prompt(3, seed=2)
    ours, theirs = both(name)
    fed_alike(name, ours, theirs, ids)
    fed_alike(name, ours, theirs, drafted, PARENTS)
    for fed in (ours, theirs):
        fed.keep(path)
    fed_alike(name, ours, theirs, after)
    for fed in (ours, theirs):
        fed.keep([0])  # and of a chain
    fed_alike(name, ours, theirs, after[1:])


def test_nothing_moves() -> None:
    ours, _ = both("gemma3")
    ids = tiny.prompt(90)

    def places() -> list[int]:
        size = ours._sizes[8]
        lasting = (*ours.buffers.keys, *ours.buffers.values, ours.buffers.held)
        return [t.data_ptr() for t in (*lasting, size.ids, size.depths, size.seen, size.states, size.taps)]

    ours.forward(ids[:7])
    before, states = places(), ours.forward(ids[7:14])[0]
    said = states.clone()
    ours.forward(ids[14:80])
    ours.truncate(20)
    ours.forward(ids[20:26], [-1, 0, 0, 1, 2, 3])
    ours.keep([0, 2, 4])
    ours.forward(ids[20:28])
    assert places() == before
    assert torch.equal(states, said), "what was handed out is the caller's own"


def test_no_taps_are_no_columns() -> None:
    ours, theirs = both("llama", tapped=())
    found, expected = ours.forward(tiny.prompt(5)), theirs.forward(tiny.prompt(5))
    assert found[1].shape == expected[1].shape == (5, 0)
    same(found[:1], expected[:1])  # type: ignore[arg-type]


# -- the draft side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_static_chain_is_the_chain(shape: str) -> None:
    """States, logits and drafts, over rounds whose rejected rows are fed like the others."""
    drafter, K = tiny.drafter("llama", **tiny.SHAPES[shape]), 4
    ids = torch.tensor([tiny.prompt(40)])
    seen = taps.run(tiny.target(), ids, torch.tensor([40]), drafter.config.taps).taps
    ours, theirs, begin = StaticChain(drafter, 64), Chain(drafter), 0
    with torch.no_grad():
        for kept in (9, 1, 3, 5, 2):
            rows = max(kept, K + 1)
            fed = seen[0, begin : begin + rows].clone()
            fed[kept:] = 7.0  # rejected
            ours.extend(fed, ids[0, begin + 1 : begin + rows + 1], torch.tensor([kept - 1]))
            theirs.extend(seen[:, begin : begin + kept], ids[0, begin + 1 : begin + kept + 1].tolist(), begin)
            begin += kept
            assert theirs.state is not None
            same((ours.state, drafter.logits(ours.state[0, 0])), (theirs.state, theirs.logits()))
            assert ours.draft(K).tolist() == theirs.draft(K)
            assert int(ours.buffers.held) == theirs.committed == begin


# -- whole rounds --------------------------------------------------------------------------------------------------


def alike(rounds: GreedyRounds, target: Target, drafter: Drafter, prompt: list[int], n: int) -> static_round.Answer:
    found = rounds.generate(prompt, n)
    expected = generate(target, drafter, prompt, max_new_tokens=n, draft_tokens=rounds.draft_tokens).finish()
    assert found.token_ids == expected.token_ids
    assert (found.drafted, found.accepted, found.rounds) == (expected.drafted, expected.accepted, expected.rounds)
    return found


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_the_loops(kind: str, K: int) -> None:
    target, drafter = tiny.target(kind), tiny.drafter(kind)
    rounds = GreedyRounds(target, drafter, draft_tokens=K, capacity=60)
    for length in (11, 30, 1):  # one text after the other, a shorter one after a longer
        alike(rounds, target, drafter, tiny.prompt(length), 16)


def foretelling() -> tuple[Target, Drafter]:
    """A target that a linear map foretells now and then, and a drafter made of that map."""
    target, words = tiny.nearly_linear(), tiny.vocab(size=150)
    batch = batches.collate(tiny.tiny_records(20), range(20))
    rows = starts.sample_rows(target, (1, 2, 4), [(batch.input_ids, batch.lengths, batch.loss_mask)])
    return target, starts.ridge(target, starts.config_for(target, (1, 2, 4), len(words)), words, rows, 0)


@dataclass
class Told:
    """Drafts the oracle's own tokens and errs at a depth that goes by round; for ``loop`` and as a device's table."""

    prompt: list[int]
    ids: list[int]
    K: int
    taps: tuple[int, ...] = (1, 2, 4)
    known: int = 0
    drafts: list[list[int]] = field(default_factory=list)

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        self.known = first_slot + len(next_tokens) + 1

    def draft(self, draft_tokens: int) -> list[int]:
        return self.at(self.known, draft_tokens)

    def at(self, known: int, K: int) -> list[int]:
        """What is drafted where so many tokens of prompt and answer are known."""
        tokens = self.ids[known - len(self.prompt) :][:K]
        wrong = random.Random(f"3 {known}").randrange(K + 2)
        if wrong < K:
            tokens[wrong] = (tokens[wrong] + 1) % tiny.VOCAB
        return tokens

    def table(self) -> Tensor:
        """[known, K]."""
        n = len(self.prompt)
        rows = [[0] * self.K if known < n else self.at(known, self.K) for known in range(n + len(self.ids) - self.K)]
        return torch.tensor(rows)


@cache
def oracle(kind: str) -> tuple[list[int], list[int]]:
    prompt = tiny.prompt(11)
    return prompt, list(plain(tiny.target(kind), prompt, max_new_tokens=50))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_kept_in_part_or_whole_are_counted_as_the_loop_counts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    K, n = 4, 34
    prompt, ids = oracle(kind)
    told = Told(prompt, ids, K)
    expected = Generation(tiny.target(kind), told, prompt, max_new_tokens=n, draft_tokens=K).finish()
    rounds = GreedyRounds(tiny.target(kind), tiny.drafter(kind), draft_tokens=K, capacity=60)
    table = told.table()
    monkeypatch.setattr(rounds.chain, "draft", lambda K: table.index_select(0, rounds.passes.buffers.held + 1)[0][:K])
    found = rounds.generate(prompt, n)
    assert found.token_ids == expected.token_ids == ids[:n]
    assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)
    assert len(set(expected.accepted)) > 2, "every depth is kept equally often"
    assert expected.accepted[-1] > 0, "no draft is kept whole"


def test_a_drafter_that_is_sometimes_right() -> None:
    target, drafter = foretelling()
    rounds = GreedyRounds(target, drafter, draft_tokens=3, capacity=80)
    kept = sum(sum(alike(rounds, target, drafter, tiny.prompt(9, seed), 40).accepted) for seed in range(3))
    assert kept > 3


def test_a_draft_outside_the_targets_words_is_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, ids = oracle("llama")
    rounds = GreedyRounds(tiny.target(), tiny.drafter(), draft_tokens=2, capacity=60)
    monkeypatch.setattr(rounds.chain, "draft", lambda K: torch.full((K,), tiny.VOCAB + 5))
    found = rounds.generate(prompt, 9)
    assert found.token_ids == ids[:9]
    assert found.accepted == [0, 0]


def test_an_end_token_that_was_drafted_ends_the_answer_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round goes on behind it; the answer does not."""
    prompt, ids = oracle("llama")
    end = next(i for i in range(4, 20) if i % 5 == 2 and ids[i] not in ids[:i])  # rounds of all four begin at 1, 6, …
    rounds = GreedyRounds(tiny.ending_at(tiny.target(), ids[end]), tiny.drafter(), draft_tokens=4, capacity=80)
    right = torch.tensor(ids)
    start = len(prompt) - 1  # held when the first round begins is start + 1, and ids[0] is known
    monkeypatch.setattr(rounds.chain, "draft", lambda K: right[rounds.passes.buffers.held - start + torch.arange(K)])
    found = rounds.generate(prompt, 40)
    assert found.token_ids == ids[: end + 1]
    assert found.accepted == [found.rounds] * 4, "the round counts whole"


def test_an_answer_ends_with_its_end_token_and_at_the_last_position() -> None:
    prompt, ids = oracle("llama")
    end = next(i for i in range(4, 50) if ids[i] not in ids[:i])
    target, drafter = tiny.ending_at(tiny.target(), ids[end]), tiny.drafter()
    rounds = GreedyRounds(target, drafter, draft_tokens=3, capacity=tiny.MAX_POSITIONS)
    assert alike(rounds, target, drafter, prompt, 50).token_ids == ids[: end + 1]
    assert len(alike(rounds, target, drafter, tiny.prompt(tiny.MAX_POSITIONS - 6), 6).token_ids) == 6
    assert rounds.generate(prompt, 1).rounds == 0


# -- what does not fit ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    target, drafter = tiny.target(), tiny.drafter()
    with pytest.raises(UsageError, match="DeepseekV3Model is none of"):
        StaticPasses(tiny.target("deepseek"), (1,), capacity=9)
    with pytest.raises(UsageError, match="Tap 9 does not exist"):
        StaticPasses(target, (9,), capacity=9)
    with pytest.raises(UsageError, match="12 tokens do not fit a static cache of 9"):
        StaticPasses(target, (1,), capacity=9).forward(tiny.prompt(12))
    for K in (0, static_round.LONGEST + 1):
        with pytest.raises(UsageError, match=f"{K} draft tokens a round"):
            GreedyRounds(target, drafter, draft_tokens=K, capacity=9)
    with pytest.raises(UsageError, match=r"the drafter is torch.bfloat16 on cpu, the target torch.float32"):
        GreedyRounds(target, copy.deepcopy(drafter).bfloat16(), draft_tokens=2, capacity=9)
    rounds = GreedyRounds(target, drafter, draft_tokens=2, capacity=9)
    with pytest.raises(UsageError, match="7 tokens of prompt and 3 new ones do not fit a static cache of 9"):
        rounds.generate(tiny.prompt(7), 3)
    with pytest.raises(UsageError, match="no tokens"):
        rounds.generate([], 3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_text_is_refused(kind: str) -> None:
    target = tiny.target()
    told = copy.deepcopy(target.model)
    told.model.rotary_emb.rope_type = kind
    assert kind in str(static.unsuited(replace(target, model=told)))
