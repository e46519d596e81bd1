"""Curves and walks against naive ones: a drafter written from its weights alone, drafting token by token, no cache.

The text is the tiny target's own greedy one, so rounds can be replayed on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from eyas import batches, curve, objective, starts, taps
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.target import Target
from eyas.vocab import by_frequency

torch.set_num_threads(1)

K = 5


# -- text -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def continued(target: Target, ids: list[int], tokens: int) -> list[int]:
    """``ids`` and that many greedy tokens more, the whole text run again for each."""
    ids = list(ids)
    for _ in range(tokens):
        ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def greedy(target: Target, seed: int, turns: Sequence[tuple[int, int]]) -> Record:
    """A conversation of (prompt tokens, response tokens) turns: random prompts, the target's own responses."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    mask: list[bool] = []
    for prompt, response in turns:
        ids = continued(target, ids + rng.integers(0, tiny.VOCAB, prompt).tolist(), response)
        mask += [False] * prompt + [True] * response
    return Record(np.array(ids, dtype=np.int32), np.array(mask), f"greedy/{seed}")


@cache
def texts(kind: str) -> tuple[Record, ...]:
    """One and two turns, of unequal length."""
    shapes = [[(4, 26)], [(6, 12), (5, 14)], [(3, 9), (2, 17)], [(7, 20)], [(5, 15), (4, 3), (3, 7)]]
    return tuple(greedy(tiny.target(kind), seed, turns) for seed, turns in enumerate(shapes))


@cache
def trained(kind: str) -> Drafter:
    """A drafter that knows most of these texts, so that chains of every length occur."""
    return trained_on(kind, texts(kind), 25)


def trained_on(kind: str, made: Sequence[Record], steps: int) -> Drafter:
    target = tiny.target(kind)
    words = by_frequency(batches.token_counts(made, tiny.VOCAB), 60)
    drafter = starts.random(target, starts.config_for(target, (1, 2, 4), len(words)), words, 0)
    batch = batches.collate(made, range(len(made)))
    states = taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps)
    starts.scale_taps(drafter, states.taps[batch.loss_mask])
    slots = objective.trained_slots(batch.loss_mask, 3)
    wanted = objective.label_positions(slots, batch.input_ids.shape[1])
    teacher = objective.teach(target, states, wanted, drafter)
    optimiser = torch.optim.Adam(drafter.parameters(), lr=4e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        found = objective.loss(drafter, teacher, states.taps, batch.input_ids, slots)
        found.mean([1.0, 0.8, 0.6]).backward()
        optimiser.step()
    return drafter.requires_grad_(False)


# -- a drafter from its weights alone -------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Heads [S, N, E] turned by their positions [S], halves apart."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Naive:
    """The drafter after one prefix: the keys of every earlier slot recomputed, then one query at a time."""

    def __init__(self, drafter: Drafter, taps_of_prefix: Tensor, following: list[int]) -> None:
        """``taps_of_prefix`` [t+1, C*D] of slots 0..t and the token after each."""
        self.drafter, self.config = drafter, drafter.config
        self.w = {name: p.detach() for name, p in drafter.named_parameters()}
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.position = len(following) - 1
        hidden = (taps_of_prefix * drafter.tap_scale) @ self.w["fc.weight"].T
        query = self.look(following, hidden, torch.arange(len(following)))
        self.hidden = self.layer(hidden[-1], query)

    def look(self, tokens: list[int], hidden: Tensor, positions: Tensor) -> Tensor:
        """Leave a key and a value for each token beside its hidden [S, H]; answer with the last one's query [N, E]."""
        w, c, eps = self.w, self.config, self.config.rms_norm_eps
        embedded = rms(self.drafter.embedding[tokens], w["midlayer.input_layernorm.weight"], eps)
        mixed = torch.cat((embedded, rms(hidden, w["midlayer.hidden_norm.weight"], eps)), 1)
        projected = [mixed @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv"]
        q, k, v = (p.view(len(tokens), -1, c.head_dim) for p in projected)
        theta = float(c.rope_parameters["rope_theta"])
        self.seen += zip(rotated(k, positions, theta), v, strict=True)
        return rotated(q, positions, theta)[-1]

    def layer(self, hidden: Tensor, query: Tensor) -> Tensor:
        w, c = self.w, self.config
        keys, values = (torch.stack(side) for side in zip(*self.seen, strict=True))  # [T, G, E]
        heads = []
        for head, q in enumerate(query):
            group = head // (c.num_attention_heads // c.num_key_value_heads)
            weights = (keys[:, group] @ q / math.sqrt(c.head_dim)).softmax(0)
            heads.append(weights @ values[:, group])
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = rms(hidden, w["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def says(self) -> int:
        logits = self.w["lm_head.weight"] @ rms(self.hidden, self.w["norm.weight"], self.config.rms_norm_eps)
        return int(self.drafter.vocab.ids[logits.argmax()])

    def feed(self, token: int) -> None:
        self.position += 1
        query = self.look([token], self.hidden[None], torch.tensor([self.position]))
        self.hidden = self.layer(self.hidden, query)


class Told:
    """What the target says about one record, run alone."""

    def __init__(self, target: Target, drafter: Drafter, record: Record) -> None:
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        self.ids = ids[0].tolist()
        self.taps = taps.run(target, ids, torch.tensor([len(self.ids)]), drafter.config.taps).taps[0]
        with torch.no_grad():
            self.truth = target.model(input_ids=ids).logits[0].argmax(-1).tolist()  # after each position
        self.drafts: dict[tuple[int, int], list[int]] = {}


def drafted(drafter: Drafter, told: Told, committed: int, depths: int) -> list[int]:
    """An engine's draft with x[committed] in hand: its own tokens fed back, after target states of 0..committed-1."""
    if (committed, depths) not in told.drafts:
        naive = Naive(drafter, told.taps[:committed], told.ids[1 : committed + 1])
        tokens = [naive.says()]
        while len(tokens) < depths:
            naive.feed(tokens[-1])
            tokens.append(naive.says())
        for k in range(1, depths + 1):  # a shorter draft is the beginning of a longer one
            told.drafts[committed, k] = tokens[:k]
    return told.drafts[committed, depths]


def naive_walk(drafter: Drafter, told: Told, spans: Sequence[tuple[int, int]], depths: int) -> list[int]:
    """Rounds by accepted tokens. A draft is checked as far as the text tells: one token beyond its last."""
    histogram = [0] * (depths + 1)
    for first, last in spans:
        committed = first  # the first token is prefill's
        while committed < last:
            accepted = 0
            for k, token in enumerate(drafted(drafter, told, committed, depths)):
                if committed + k > last or token != told.truth[committed + k]:
                    break
                accepted += 1
                if committed + k == last or told.truth[committed + k] != told.ids[committed + k + 1]:
                    break  # the text ends here, or took another token
            histogram[accepted] += 1
            committed += accepted + 1
    return histogram


def naive_counts(drafter: Drafter, told: Told, mask: list[bool], depths: int) -> dict[str, list[int] | int]:
    """Teacher-forced: every slot from the token it is fed first to the one it must say within the response."""
    n, prev, joint = ([0] * depths for _ in range(3))
    slots = covered = agreed = 0
    words = set(drafter.vocab.ids.tolist())
    for t in range(len(mask) - 2):
        if not (mask[t + 1] and mask[t + 2]):
            continue
        slots += 1
        covered += told.truth[t + 1] in words
        agreed += told.truth[t + 1] == told.ids[t + 2]
        naive, alive = Naive(drafter, told.taps[: t + 1], told.ids[1 : t + 2]), True
        for k in range(depths):
            if t + 2 + k >= len(mask) or not mask[t + 2 + k]:
                break
            if k:
                naive.feed(told.ids[t + 1 + k])
            n[k] += 1
            prev[k] += alive
            alive = alive and naive.says() == told.truth[t + 1 + k]
            joint[k] += alive
    return {"n": n, "prev": prev, "joint": joint, "slots": slots, "covered": covered, "agreed": agreed}


def compare(drafter: Drafter, target: Target, made: Sequence[Record], depths: int = K) -> curve.Measured:
    """Everything measured, against the naive counts of each record alone."""
    measured = curve.measure(drafter, target, made, depths=depths, batch_size=3)
    told = [Told(target, drafter, record) for record in made]
    wanted = [naive_counts(drafter, t, r.loss_mask.tolist(), depths) for t, r in zip(told, made, strict=True)]
    forced = measured.teacher_forced
    for name in ("n", "prev", "joint", "slots", "covered"):
        assert getattr(forced, name).tolist() == [w[name] for w in wanted], name
    assert measured.agreement == (sum(w["agreed"] for w in wanted), sum(w["slots"] for w in wanted))
    assert measured.walk is not None
    assert [length.draft_tokens for length in measured.lengths] == list(range(1, depths + 1))
    most: list[list[int]] = []
    for k, length in reversed(list(enumerate(measured.lengths, start=1))):
        walks = [naive_walk(drafter, t, r.spans(), k) for t, r in zip(told, made, strict=True)]
        assert length.rounds.tolist() == [sum(w) for w in walks], f"{k} drafted"
        assert length.accepted.tolist() == [sum(a * c for a, c in enumerate(w)) for w in walks], f"{k} drafted"
        most = most or walks
    for i, histogram in enumerate(most):
        kept = measured.walk.joint[i].tolist()
        rounds = measured.walk.n[i].tolist()
        assert rounds == [sum(histogram)] * depths
        assert kept == [sum(histogram[k + 1 :]) for k in range(depths)]
        assert measured.walk.prev[i].tolist() == [rounds[0], *kept[:-1]]
    return measured


# -- the comparisons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_curves_and_walks_are_the_naive_ones(kind: str) -> None:
    measured = compare(trained(kind), tiny.target(kind), texts(kind))
    walk = measured.walk
    assert walk is not None
    kept = walk.joint.sum(0).tolist()
    histogram = [a - b for a, b in zip([int(walk.n[:, 0].sum()), *kept], [*kept, 0], strict=True)]
    assert sum(c > 0 for c in histogram) >= 4, f"too poor a mixture of rounds to prove anything: {histogram}"
    assert 0 < int(measured.teacher_forced.covered.sum()) <= int(measured.teacher_forced.slots.sum())


def test_a_random_drafter_too() -> None:
    measured = compare(tiny.drafter("llama"), tiny.target("llama"), texts("llama")[:2], depths=2)
    assert measured.lengths[0].value == pytest.approx(1.0, abs=0.2)


def test_a_record_counts_the_same_in_any_batch() -> None:
    target, drafter, made = tiny.target("llama"), trained("llama"), texts("llama")
    whole = curve.measure(drafter, target, made, depths=3, batch_size=5)
    for i, record in enumerate(made):
        alone = curve.measure(drafter, target, [record], depths=3)
        assert alone.teacher_forced.joint[0].tolist() == whole.teacher_forced.joint[i].tolist()
        assert [x.accepted[0] for x in alone.lengths] == [x.accepted[i] for x in whole.lengths]


def test_a_text_that_strays_once_is_walked_past_the_strayed_token() -> None:
    """One foreign token in fifty: a match with the truth is kept, but what was drafted beyond it is not."""
    target, at = tiny.target("llama"), 16
    made = [texts("llama")[0], texts("llama")[3]]
    ids = made[0].input_ids[:at].tolist()
    foreign = (int(made[0].input_ids[at]) + 1) % tiny.VOCAB
    ids = continued(target, [*ids, foreign], made[0].seq_len - at - 1)
    strayed = Record(np.array(ids, dtype=np.int32), made[0].loss_mask, "strayed")
    drafter = trained_on("llama", [*made, strayed], 60)
    measured = compare(drafter, target, [*made, strayed])
    agreed, slots = measured.agreement
    assert agreed == slots - 1
    # The case is met: a draft that says the truth at the strayed place, and whose teacher-forced chain hits beyond it.
    told = Told(target, drafter, strayed)
    chain = Naive(drafter, told.taps[: at - 1], told.ids[1:at])
    assert chain.says() == told.truth[at - 1] != foreign
    chain.feed(foreign)
    assert chain.says() == told.truth[at]


def test_text_of_another_gives_no_walk() -> None:
    target, drafter = tiny.target("llama"), tiny.drafter("llama")
    made = tiny.tiny_records(4)
    measured = curve.measure(drafter, target, made, depths=2)
    assert not measured.on_policy
    assert measured.walk is None
    assert measured.lengths == []
    told = [Told(target, drafter, record) for record in made]
    wanted = [naive_counts(drafter, t, r.loss_mask.tolist(), 2) for t, r in zip(told, made, strict=True)]
    assert measured.teacher_forced.joint.tolist() == [w["joint"] for w in wanted]
    assert measured.teacher_forced.n.tolist() == [w["n"] for w in wanted]
    assert measured.agreement == (sum(w["agreed"] for w in wanted), sum(w["slots"] for w in wanted))


def test_the_share_of_own_text_decides() -> None:
    none = np.zeros(0, dtype=np.int64)
    forced = curve.CurveCounts("target", none, none, *[none.reshape(0, 1)] * 3)
    assert curve.Measured(forced, None, [], (98, 100)).on_policy
    assert not curve.Measured(forced, None, [], (97, 100)).on_policy
    assert not curve.Measured(forced, None, [], (0, 0)).on_policy


# -- edges ----------------------------------------------------------------------------------------------------


def test_a_response_of_one_token_has_no_round() -> None:
    target, drafter = tiny.target("llama"), trained("llama")
    single = greedy(target, 3, [(6, 1)])
    measured = compare(drafter, target, [texts("llama")[0], single, greedy(target, 4, [(6, 2)])], depths=2)
    assert [int(length.rounds[1]) for length in measured.lengths] == [0, 0]
    assert measured.teacher_forced.n[1].tolist() == [0, 0]
    assert [int(length.rounds[2]) for length in measured.lengths] == [1, 1]
    alone = curve.measure(drafter, target, [single], depths=2)
    assert alone.agreement == (0, 0)
    assert alone.walk is None


def test_a_record_that_ends_at_the_targets_length() -> None:
    target, drafter = tiny.target("llama"), trained("llama")
    record = greedy(target, 5, [(tiny.MAX_POSITIONS - 9, 9)])
    assert record.seq_len == target.max_positions
    compare(drafter, target, [record], depths=3)


def test_progress_hears_every_record() -> None:
    heard: list[int] = []
    made = texts("llama")
    curve.measure(trained("llama"), tiny.target("llama"), made, depths=1, batch_size=2, progress=heard.append)
    assert heard == [2, 4, 5]


# -- walking over given chains --------------------------------------------------------------------------------


def test_a_walk_by_hand() -> None:
    """Response at 3..9; x[3] is prefill's. With 5 drafted: slot 2 keeps 2, slot 5 none, slot 6 all; with 1: 2, 4, 6."""
    lead = np.array([-1, -1, 2, 9, 9, 0, 5, 9, 9, 9])
    assert curve.walk(lead, [(3, 9)], 5).tolist() == [1, 0, 1, 0, 0, 1]
    assert curve.walk(lead, [(3, 9)], 1).tolist() == [0, 3]
    assert curve.walk(lead, [], 3).tolist() == [0, 0, 0, 0]
    assert curve.walk(lead, [(3, 3)], 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 13])
def test_a_perfect_drafter_keeps_all_it_drafts(draft_tokens: int, length: int) -> None:
    lead = np.full(40, draft_tokens, dtype=np.int64)
    histogram = curve.walk(lead, [(4, 3 + length)], draft_tokens)
    assert histogram[:-1].sum() == 0
    assert histogram[-1] == math.ceil((length - 1) / (draft_tokens + 1))


def test_a_useless_drafter_takes_a_round_a_token() -> None:
    lead = np.zeros(40, dtype=np.int64)
    assert curve.walk(lead, [(4, 15), (20, 22)], 4).tolist() == [11 + 2, 0, 0, 0, 0]
