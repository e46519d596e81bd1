"""A chain with siblings, grown by worth: the draft is what a chain along it says, the answer the target's own."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tiny
from eyas import checkpoint, prompts, resolve
from eyas import target as targets
from eyas.answers import Sampling
from eyas.decode.adaptive import Costs
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.siblings import Siblings, by_worth, likeliest
from eyas.decode.swift import SwiftChain
from eyas.decode.ties import first_difference
from eyas.decode.worth import ByWorth, Weighing
from eyas.drafter import Drafter
from eyas.render import Renderer
from test_rounds import LONG, assert_same, oracle
from test_tree import BROKEN, Along, assert_valid, paths, seen_of
from test_weighing import BOX, DEPTHS, believed

FLAT = Costs({1: 1.0, 2: 1.01, 8: 1.05}, {1: 0.001})  # all but everything pays
CHEAP = believed([1.0 + 0.001 * m for m in range(8)], draft=0.001)


def extended(drafter: Drafter, kind: str = "llama") -> Siblings:
    """After a prompt's slots but the last, which has no next token."""
    side = Siblings(drafter)
    ids, seen = seen_of(kind)
    side.extend(seen[:, :-1], ids[1:], 0)
    return side


def played(side: Siblings, kind: str = "llama", chooser: ByWorth | None = None, **more: object) -> Generation:
    wanted = {"max_new_tokens": LONG, "draft_tokens": DEPTHS} | more
    return Generation(
        tiny.target(kind), side, oracle(kind)[0], chooser=chooser or ByWorth(FLAT, DEPTHS), **wanted,  # type: ignore[arg-type]
    ).finish()  # fmt: skip


class Watched(ByWorth):
    """Keeps the rounds it was told of: the draft, how many were kept, the seconds."""

    def __init__(self, costs: Costs = FLAT, draft_tokens: int = DEPTHS) -> None:
        super().__init__(costs, draft_tokens)
        self.rounds: list[tuple[Weighing, int, tuple[float, float] | None]] = []

    def saw(self, played: Weighing, accepted: int, seconds: tuple[float, float] | None = None) -> None:
        super().saw(played, accepted, seconds)
        self.rounds.append((played, accepted, seconds))


class Told(Siblings):
    """Proposes the oracle's own next tokens as every depth's word of ``rank``, ``by`` added, wrong ones around them."""

    def __init__(self, kind: str = "llama", *, rank: int = 0, by: int = 0, slow: float = 0.0) -> None:
        super().__init__(tiny.drafter(kind))
        self.told, self.start = oracle(kind)[1], len(oracle(kind)[0])
        self.rank, self.by, self.slow = rank, by, slow
        self.known = self.depth = 0

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        super().extend(taps, next_tokens, first_slot)
        self.known, self.depth = first_slot + len(next_tokens) + 1 - self.start, 0

    def _next(self, newest: Sequence[int]) -> tuple[list[int], list[float]]:
        super()._next([word % tiny.VOCAB for word in newest])
        time.sleep(self.slow)
        at, self.depth = self.known + self.depth, self.depth + 1
        right = (self.told[at] if at < len(self.told) else 0) + self.by
        words = [(right + 1 + i) % tiny.VOCAB for i in range(3)]
        words[self.rank] = right
        return words, [0.5, 0.3, 0.15]


# -- the draft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_it_is_what_a_chain_along_it_says(kind: str) -> None:
    drafter = tiny.drafter(kind)
    side, alone = extended(drafter, kind), Chain(drafter)
    ids, seen = seen_of(kind)
    alone.extend(seen[:, :-1], ids[1:], 0)
    along = Along(alone)
    weighing = Weighing(CHEAP, DEPTHS)
    drafted = side.draft(weighing)
    assert_valid(drafted, set(drafter.vocab.ids.tolist()), len(weighing.chosen))

    expected: dict[tuple[int, ...], float] = {}
    path, score = (), 0.0
    for _ in range(weighing.depths):
        words = sorted(along.children(path), reverse=True)[:3]
        expected |= {(*path, token): score + share for share, token in words}
        path, score = (*path, words[0][1]), score + words[0][0]
    best = sorted(expected.items(), key=lambda item: -item[1])[: len(weighing.chosen)]
    assert weighing.depths >= 3
    assert paths(drafted.tokens, drafted.parents) == [path for path, _ in best]
    assert drafted.log_probs.tolist() == pytest.approx([score for _, score in best], abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_passes_are_as_many_as_depths(kind: str, depths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first depth is the committed slot's own; what waits waits on where nothing is drafted."""
    side = extended(tiny.drafter(kind), kind)
    seen, ids = seen_of(kind)[1], seen_of(kind)[0]
    side.extend(seen[:, -1:], [ids[3]], len(ids) - 1)
    calls: list[str] = []
    for name in ("feed_id", "logits"):
        usual = getattr(side.chain, name)
        monkeypatch.setattr(side.chain, name, lambda *args, u=usual, n=name: (calls.append(n), u(*args))[1])
    drafted = side.draft(Weighing(CHEAP, DEPTHS).within(depths))
    assert calls == (["logits", "feed_id"] * depths)[:-1] if depths else not calls
    assert bool(drafted.tokens) == bool(depths)
    if isinstance(side.chain, SwiftChain):
        assert bool(side.chain._waiting) == (depths == 0)
    assert side.chain.length == side.chain.committed == len(ids)


def test_a_draft_leaves_nothing_behind() -> None:
    drafter = tiny.drafter()
    ids, seen = seen_of("llama")
    used, fresh = extended(drafter), extended(drafter)
    used.draft(Weighing(CHEAP, DEPTHS))
    for side in (used, fresh):
        side.extend(seen[:, -1:], [ids[3]], len(ids) - 1)
    ours, theirs = (side.draft(Weighing(CHEAP, DEPTHS)) for side in (used, fresh))
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
    with pytest.raises(AssertionError, match="before extend"):
        used.draft(Weighing(CHEAP, DEPTHS))


@pytest.mark.parametrize("broken", list(BROKEN))
def test_a_broken_drafter_still_says_a_tree_of_its_words_or_nothing(broken: str) -> None:
    drafter = tiny.drafter(own_embedding=True)
    BROKEN[broken](drafter)
    weighing = Weighing(CHEAP, DEPTHS)
    drafted = extended(drafter).draft(weighing)
    assert_valid(drafted, set(drafter.vocab.ids.tolist()), len(weighing.chosen))
    assert broken not in ("nan-everywhere", "nan-word", "infinite-words") or not drafted.tokens
    run = played(Siblings(drafter))
    assert_same("llama", run.token_ids)


def test_the_likeliest_words_and_their_shares() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -1.0])
    words, shares = likeliest(logits, 3)
    assert words == [1, 3, 2]
    assert shares == pytest.approx(logits.softmax(-1)[[1, 3, 2]].tolist())
    for width in (1, 2, 3, 4, 9):  # among equals the first is argmax's; no word twice
        words, shares = likeliest(torch.zeros(4), width)
        assert words[0] == torch.zeros(4).argmax()
        assert len(set(words)) == len(shares) == min(width, 4)
        assert shares == pytest.approx([0.25] * len(shares))
    assert likeliest(torch.tensor([0.0, float("nan"), 1.0]), 3)[1] == [0.0, 0.0, 0.0]


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_random_drafter_changes_no_token(kind: str) -> None:
    chooser = Watched()
    run = played(Siblings(tiny.drafter(kind)), kind, chooser)
    assert_same(kind, run.token_ids)
    assert max(len(weighing.chosen) for weighing, _, _ in chooser.rounds) > 3
    assert run.rounds == len(chooser.rounds)
    assert sum(run.accepted) == sum(accepted for _, accepted, _ in chooser.rounds)
    verified = [max((depth_in(w, place) for place in w.chosen), default=0) for w, _, _ in chooser.rounds]
    assert run.drafted == [sum(depth > k for depth in verified) for k in range(DEPTHS)]


def depth_in(weighing: Weighing, place: int) -> int:
    return 1 + (depth_in(weighing, weighing.parents[place]) if weighing.parents[place] >= 0 else 0)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_words_always_right_are_kept_whichever_sibling_they_are(kind: str, rank: int) -> None:
    """Below the first of its depth only: of the others' depths one is kept."""
    chooser = Watched()
    run = played(Told(kind, rank=rank), kind, chooser, max_new_tokens=LONG - DEPTHS)
    assert run.token_ids == oracle(kind)[1][: LONG - DEPTHS]
    for weighing, accepted, _ in chooser.rounds:
        right = [place for place in weighing.chosen if place % 3 == rank and (rank == 0 or place < 3)]
        assert accepted == len(right)
    most = max(accepted for _, accepted, _ in chooser.rounds)
    assert most == 1 if rank else most >= 2
    assert chooser.trust > 1 if rank == 0 else chooser.trust < 1.1


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("by", [7, tiny.VOCAB, -1000])
def test_words_always_wrong_or_not_the_targets_at_all_are_never_kept(kind: str, by: int) -> None:
    chooser = Watched(BOX)
    run = played(Told(kind, by=by), kind, chooser)
    assert run.token_ids == oracle(kind)[1]
    assert sum(run.accepted) == 0
    assert run.drafted[0] > 0
    assert chooser.trust < 0.6
    assert run.rounds == LONG - 1


def test_a_chooser_is_shared_by_answers_and_played_in_turns() -> None:
    chooser = Watched()
    runs = [
        Generation(
            tiny.target(), Siblings(tiny.drafter(seed=seed)), oracle("llama")[0], max_new_tokens=LONG,
            draft_tokens=DEPTHS, chooser=chooser,
        )
        for seed in range(3)
    ]  # fmt: skip
    while not all(run.finished for run in runs):
        for run in runs:
            next(run, None)
    for run in runs:
        assert_same("llama", run.token_ids)
    assert len(chooser.rounds) == sum(run.rounds for run in runs)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.9, seed=4), Sampling(temperature=1.0, top_k=20, seed=1)])
def test_a_sampled_answer_is_drawn_as_without_drafts(sampling: Sampling) -> None:
    """Words are chosen and not drawn, so the same draws give the same answer; some of it was drafted."""
    run = played(Siblings(tiny.drafter()), sampling=sampling)
    assert run.token_ids == list(plain(tiny.target(), oracle("llama")[0], max_new_tokens=LONG, sampling=sampling))
    assert run.drafted[0] > 0


def test_penalties_follow_the_path() -> None:
    sampling = Sampling(repetition_penalty=1.7, presence_penalty=0.5)
    assert_same("llama", played(Siblings(tiny.drafter()), sampling=sampling).token_ids, sampling)


def test_drafting_is_timed_apart_from_the_rest() -> None:
    chooser = Watched()
    run = played(Told(slow=0.02), chooser=chooser, max_new_tokens=8)
    for weighing, _, seconds in chooser.rounds:
        assert seconds is not None
        drafting, verifying = seconds
        assert drafting >= 0.02 * weighing.depths
        assert 0 < verifying < 0.02 * 8
    assert max(weighing.depths for weighing, _, _ in chooser.rounds) >= 2
    assert sum(sum(seconds) for _, _, seconds in chooser.rounds if seconds) <= run.seconds


def test_no_deeper_than_draft_tokens_and_than_the_context() -> None:
    chooser = Watched()
    run = played(Told(), chooser=chooser, draft_tokens=2)
    assert run.token_ids == oracle("llama")[1]
    assert max(weighing.depths for weighing, _, _ in chooser.rounds) == 2 == len(run.drafted)

    target = tiny.target()
    prompt = tiny.prompt(target.max_positions - 4)
    run = Generation(
        target, Siblings(tiny.drafter()), prompt, max_new_tokens=4, draft_tokens=DEPTHS, chooser=ByWorth(FLAT, DEPTHS)
    ).finish()
    assert run.token_ids == list(plain(target, prompt, max_new_tokens=4))


@pytest.mark.real
def test_on_the_real_target() -> None:
    target = targets.load("smollm2")
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    renderer = Renderer(target.tokenizer, target.eos_ids())
    with packed(target, drafter):
        chooser = by_worth(target, drafter, renderer.ids(prompts.load("mt-bench", 1)[0].messages(), prompt=True), 4)
        for prompt in prompts.load("mt-bench", 2):
            ids, gaps = renderer.ids(prompt.messages(), prompt=True), list[float]()
            told = list(plain(target, ids, max_new_tokens=24, gaps=gaps))
            run = Generation(target, Siblings(drafter), ids, max_new_tokens=24, draft_tokens=4, chooser=chooser)
            difference = first_difference(told, run.finish().token_ids, gaps)
            assert difference is None or difference.excused, difference
            assert sum(run.accepted) > 0
