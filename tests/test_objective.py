"""The unroll against its dense oracle, the slots and the loss against plain loops, and proof that both can fail."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from eyas import batches, objective, taps
from eyas.drafter import Drafter
from eyas.records import Record

torch.set_num_threads(1)

DEPTHS = 5
CLOSE = 2e-4  # states of a tiny drafter are of size 1 to 10 and come by two orders of summation
APART = 0.1  # what a real fault moves them by, at the very least


def records(lengths: Sequence[int] = (31, 22, 27, 17)) -> list[Record]:
    """Unequal lengths; the second and fourth with two turns; the third supervised in its middle only."""
    rng = np.random.default_rng(7)
    made = []
    for i, length in enumerate(lengths):
        mask = np.arange(length) >= 6 + i
        if i % 2:
            mask[13:15] = False
        if i == 2:
            mask[-5:] = False
        made.append(Record(rng.integers(0, tiny.VOCAB, length).astype(np.int32), mask, f"made/{i}"))
    return made


def prepared(kind: str, made: Sequence[Record], depths: int = DEPTHS, shape: str = "usual") -> Any:
    """One batch of all the records, with everything that a loss needs."""
    target, drafter = tiny.target(kind), tiny.drafter(kind, **tiny.SHAPES[shape])
    batch = batches.collate(made, range(len(made)))
    states = taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps)
    slots = objective.trained_slots(batch.loss_mask, depths)
    return SimpleNamespace(target=target, drafter=drafter, batch=batch, states=states, slots=slots)


def unrolled(p: Any, *, tap_values: Tensor | None = None, ids: Tensor | None = None) -> list[Tensor]:
    """[M, H] states of the valid slots, a depth each."""
    given_taps = p.states.taps if tap_values is None else tap_values
    given_ids = p.batch.input_ids if ids is None else ids
    states = objective.unroll(p.drafter, given_taps, given_ids, p.slots)
    return [state[p.slots.valid[:, :, k]] for k, state in enumerate(states)]


def dense(p: Any) -> list[Tensor]:
    """The same rows out of the oracle's tables over all positions."""
    found = []
    tables = objective.dense_unroll(p.drafter, p.states.taps, p.batch.input_ids, p.slots.depths)
    for k, table in enumerate(tables):
        rows, columns = p.slots.valid[:, :, k].nonzero(as_tuple=True)
        found.append(table[rows, p.slots.index[rows, columns]])
    return found


def gaps(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    assert [len(a) for a in ours] == [len(b) for b in theirs]
    assert all(len(a) for a in ours), "nothing was compared"
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]


# -- unroll against its oracle --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, "usual") for kind in tiny.KINDS), *(("llama", shape) for shape in tiny.SHAPES)]
)
def test_unroll_is_the_dense_unroll_at_every_valid_slot_and_depth(kind: str, shape: str) -> None:
    p = prepared(kind, records(), shape=shape)
    assert int(p.slots.valid[:, :, 0].sum()) > int(p.slots.valid[:, :, -1].sum()) > 10
    assert max(gaps(unrolled(p), dense(p))) < CLOSE


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_slots_of_the_walk_too(kind: str) -> None:
    p = prepared(kind, records())
    p.slots = objective.drafted_slots(p.batch.loss_mask, DEPTHS)
    assert max(gaps(unrolled(p), dense(p))) < CLOSE


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, "usual") for kind in tiny.KINDS), ("llama", "eagle31"), ("llama", "everything")],
)
def test_gradients_are_those_of_the_dense_unroll(kind: str, shape: str) -> None:
    p = prepared(kind, records(), shape=shape)
    p.drafter.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    found = []
    for states in (unrolled(p), dense(p)):
        generator.manual_seed(0)
        total = sum((s * torch.randn(s.shape, generator=generator)).sum() for s in states)
        unused = {"lm_head.weight"} if p.drafter.config.norm_output else {"lm_head.weight", "norm.weight"}
        names = [n for n, _ in p.drafter.named_parameters() if n not in unused]
        parameters = dict(p.drafter.named_parameters())
        found.append(dict(zip(names, torch.autograd.grad(total, [parameters[n] for n in names]), strict=True)))
    for name, ours in found[0].items():
        theirs = found[1][name]
        assert float(theirs.abs().max()) > 0, name
        assert float((ours - theirs).norm()) < 1e-4 * float(theirs.norm()), name


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_padding_does_not_leak(kind: str) -> None:
    made = records()
    together = prepared(kind, made)
    whole = list(objective.unroll(together.drafter, together.states.taps, together.batch.input_ids, together.slots))
    for row, record in enumerate(made):
        alone = prepared(kind, [record])
        width = alone.slots.index.shape[1]
        assert torch.equal(together.slots.index[row, :width], alone.slots.index[0])
        assert torch.equal(together.slots.valid[row, :width], alone.slots.valid[0])
        assert not together.slots.valid[row, width:].any()
        states = objective.unroll(alone.drafter, alone.states.taps, alone.batch.input_ids, alone.slots)
        for k, state in enumerate(states):
            valid = alone.slots.valid[0, :, k]
            assert valid.any() or k > 2  # the shortest turn has four tokens
            assert torch.allclose(whole[k][row, :width][valid], state[0][valid], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("shape", ["usual", "layers"])
def test_what_stands_in_the_padding_is_never_seen(shape: str) -> None:
    p = prepared("llama", records(), shape=shape)
    before = unrolled(p)
    beyond = torch.arange(p.batch.input_ids.shape[1])[None] >= p.batch.lengths[:, None]
    assert beyond.any()
    p.batch.input_ids[beyond] = 5
    p.states.taps[beyond] = 1e4
    assert gaps(unrolled(p), before) == [0.0] * DEPTHS


@pytest.mark.parametrize("shape", ["usual", "layers"])
def test_a_slot_sees_nothing_of_what_follows_it(shape: str) -> None:
    p = prepared("llama", records((31,)), shape=shape)
    before = list(objective.unroll(p.drafter, p.states.taps, p.batch.input_ids, p.slots))
    t = 14
    slot = int((p.slots.index[0] == t).nonzero())
    p.states.taps[:, t + 1 :] += 3.0
    p.batch.input_ids[:, t + 3 :] = 0  # beyond what depth 1 is fed
    after = list(objective.unroll(p.drafter, p.states.taps, p.batch.input_ids, p.slots))
    moved = [float((a[0, slot] - b[0, slot]).abs().max()) for a, b in zip(after, before, strict=True)]
    assert moved[:2] == [0.0, 0.0]
    assert min(moved[2:]) > APART


# -- mutations: each must be seen -----------------------------------------------------------------------------


def test_taps_of_the_next_layer_are_seen() -> None:
    p = prepared("llama", records())
    shifted = [t + 1 for t in p.drafter.config.taps]
    wrong = taps.run(p.target, p.batch.input_ids, p.batch.lengths, shifted).taps
    assert min(gaps(unrolled(p, tap_values=wrong), dense(p))) > APART


def test_taps_in_another_order_are_seen() -> None:
    p = prepared("llama", records())
    wrong = torch.cat(p.states.taps.chunk(3, -1)[::-1], -1)
    assert min(gaps(unrolled(p, tap_values=wrong), dense(p))) > APART


def test_a_dropped_token_shift_is_seen() -> None:
    p = prepared("llama", records())
    own = torch.cat((p.batch.input_ids[:, :1], p.batch.input_ids[:, :-1]), 1)  # now x[t] stands where x[t+1] did
    assert min(gaps(unrolled(p, ids=own), dense(p))) > APART


def test_embedding_and_hidden_swapped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("llama", records())
    right, mix = dense(p), Drafter.mix

    def swapped(self: Drafter, token_ids: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat(mix(self, token_ids, hidden).chunk(2, -1)[::-1], -1)

    monkeypatch.setattr(Drafter, "mix", swapped)
    assert min(gaps(unrolled(p), right)) > APART


def test_a_dropped_own_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("llama", records())
    right, attend = dense(p), objective._attend_own

    def forgetful(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: Any) -> Tensor:
        return attend(q, keys, values, seen, [])

    monkeypatch.setattr(objective, "_attend_own", forgetful)
    apart = gaps(unrolled(p), right)
    assert apart[0] < CLOSE  # depth 0 has no key of its own
    assert min(apart[1:]) > APART


def test_a_dropped_older_own_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("llama", records())
    right, attend = dense(p), objective._attend_own
    monkeypatch.setattr(objective, "_attend_own", lambda q, k, v, seen, own: attend(q, k, v, seen, own[-1:]))
    apart = gaps(unrolled(p), right)
    assert max(apart[:2]) < CLOSE
    assert min(apart[2:]) > APART


def test_positions_that_stand_still_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("llama", records())
    right, queries = dense(p), Drafter.queries
    monkeypatch.setattr(Drafter, "queries", lambda self, mixed, at, _: queries(self, mixed, p.slots.index))
    apart = gaps(unrolled(p), right)
    assert apart[0] < CLOSE
    assert min(apart[1:]) > APART


def test_a_later_layer_that_reads_the_firsts_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared("llama", records(), shape="layers")
    right, attend, first = dense(p), objective._attend_own, list[Any]()

    def shared(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: Any) -> Tensor:
        first.append((keys, values))
        return attend(q, *first[0], seen, own)

    monkeypatch.setattr(objective, "_attend_own", shared)
    apart = gaps(unrolled(p), right)
    assert apart[0] < CLOSE  # depth 0 asks for the last layer alone, whose keys come first here
    assert min(apart[1:]) > APART


# -- slots ----------------------------------------------------------------------------------------------------


def naive_slots(mask: list[bool], depths: int, *, last_predicted: bool) -> dict[int, list[bool]]:
    """All of x[t+1] (fed first) to x[t+2+k] (predicted), or to x[t+1+k] (fed last), are response tokens."""
    found = {}
    for t in range(len(mask)):
        row = []
        for k in range(depths):
            end = t + 2 + k if last_predicted else t + 1 + k
            row.append(end < len(mask) and all(mask[i] for i in range(t + 1, end + 1)))
        if row[0]:
            found[t] = row
    return found


@settings(max_examples=150, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4),
    depths=st.integers(1, 5),
    trained=st.booleans(),
)
def test_slots_are_those_of_the_definition(masks: list[list[bool]], depths: int, trained: bool) -> None:
    T = max(map(len, masks))
    padded = torch.tensor([m + [False] * (T - len(m)) for m in masks])
    slots = (objective.trained_slots if trained else objective.drafted_slots)(padded, depths)
    assert slots.depths == depths
    expected = [naive_slots(m, depths, last_predicted=trained) for m in masks]
    assert slots.index.shape[1] == max(1, *map(len, expected), 1)
    for row, wanted in enumerate(expected):
        n = len(wanted)
        assert slots.index[row, :n].tolist() == list(wanted)
        assert slots.valid[row, :n].tolist() == list(wanted.values())
        assert not slots.index[row, n:].any()
        assert not slots.valid[row, n:].any()
    at = {t + 1 + k for row in expected[:1] for t, valid in row.items() for k in range(depths) if valid[k]}
    assert set(objective.label_positions(slots, T)[0].nonzero().flatten().tolist()) == at


def test_the_first_slot_is_the_last_prompt_token() -> None:
    """p0 p1 p2 r0 r1 r2: the slot of p2 is fed r0 and predicts r1, as an engine does right after prefill."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    slots = objective.trained_slots(mask, 3)
    assert slots.index.tolist() == [[2, 3]]
    assert slots.valid.int().tolist() == [[[1, 1, 0], [1, 0, 0]]]
    slots = objective.drafted_slots(mask, 3)
    assert slots.index.tolist() == [[2, 3, 4]]
    assert slots.valid.int().tolist() == [[[1, 1, 1], [1, 1, 0], [1, 0, 0]]]


# -- the teacher ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_truth_is_the_full_models_argmax(kind: str) -> None:
    p = prepared(kind, records())
    wanted = objective.label_positions(p.slots, p.batch.input_ids.shape[1])
    teacher = objective.teach(p.target, p.states, wanted, p.drafter, chunk=7)
    attention = torch.arange(wanted.shape[1])[None] < p.batch.lengths[:, None]
    with torch.no_grad():
        logits = p.target.model(input_ids=p.batch.input_ids, attention_mask=attention.long()).logits
    assert int(wanted.sum()) == len(teacher.truth) > 20
    assert torch.equal(teacher.truth[teacher.row[wanted]], logits.argmax(-1)[wanted])
    restricted = logits[wanted][:, p.drafter.vocab.ids].softmax(-1)
    assert torch.allclose(teacher.probabilities[teacher.row[wanted]], restricted, atol=1e-5)


def test_nothing_wanted_gives_empty_labels() -> None:
    p = prepared("llama", records((17,)))
    none = torch.zeros(1, 17, dtype=torch.bool)
    teacher = objective.teach(p.target, p.states, none, p.drafter)
    assert teacher.truth.shape == (0,)
    assert teacher.probabilities.shape == (0, tiny.DRAFT_VOCAB)


# -- the loss -------------------------------------------------------------------------------------------------


def naive_loss(p: Any, weights: list[float]) -> tuple[Any, ...]:
    """Loops over records, slots and depths; logits from the oracle, labels from the full model."""
    attention = torch.arange(p.batch.input_ids.shape[1])[None] < p.batch.lengths[:, None]
    with torch.no_grad():
        full = p.target.model(input_ids=p.batch.input_ids, attention_mask=attention.long()).logits
    tables = objective.dense_unroll(p.drafter, p.states.taps, p.batch.input_ids, len(weights))
    words = p.drafter.vocab.ids.tolist()
    total: Any = 0.0
    sums, counts, hits, slots = [], [], [], []
    for k, weight in enumerate(weights):
        losses, hit, seen = [], 0, 0
        for b, n in enumerate(p.batch.lengths.tolist()):
            mask = p.batch.loss_mask[b, :n].tolist()
            for t in range(n):
                if t + 2 + k >= n or not all(mask[t + 1 : t + 3 + k]):
                    continue
                seen += 1
                logits = p.drafter.logits(tables[k][b, t])
                truth = int(full[b, t + 1 + k].argmax())
                hit += truth == words[int(logits.argmax())]
                if truth in words:
                    aim = full[b, t + 1 + k][words].softmax(-1)
                    losses.append(-(aim * logits.log_softmax(-1)).sum())
        total = total + weight * sum(losses) / max(len(losses), 1)
        sums.append(sum(float(one.detach()) for one in losses))
        counts.append(len(losses))
        hits.append(hit)
        slots.append(seen)
    return total / sum(weights), sums, counts, hits, slots


def loss_of(p: Any) -> objective.Loss:
    wanted = objective.label_positions(p.slots, p.batch.input_ids.shape[1])
    teacher = objective.teach(p.target, p.states, wanted, p.drafter)
    return objective.loss(p.drafter, teacher, p.states.taps, p.batch.input_ids, p.slots)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_loss_and_counts_are_the_naive_ones(kind: str) -> None:
    weights = [1.0, 0.7, 0.3]
    p = prepared(kind, records(), depths=3)
    found = loss_of(p)
    value, sums, counts, hits, slots = naive_loss(p, weights)
    assert float(found.mean(weights)) == pytest.approx(float(value), rel=1e-4)
    assert found.sums.tolist() == pytest.approx(sums, rel=1e-4)
    assert found.counts.tolist() == counts
    assert found.hits.tolist() == hits
    assert found.slots.tolist() == slots
    assert all(0 < c < s for c, s in zip(counts, slots, strict=True)), "some truths must lie outside"


def test_gradient_of_the_loss_is_the_naive_one() -> None:
    weights = [1.0, 0.5]
    p = prepared("llama", records((20, 15)), depths=2)
    p.drafter.requires_grad_(True)
    parameters = dict(p.drafter.named_parameters())
    ours = torch.autograd.grad(loss_of(p).mean(weights), parameters.values())
    theirs = torch.autograd.grad(naive_loss(p, weights)[0], parameters.values())
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert float(b.abs().max()) > 0, name
        assert float((a - b).norm()) < 1e-4 * float(b.norm()), name


def test_a_truth_outside_the_draft_vocabulary_is_a_miss_but_no_loss() -> None:
    """With a vocabulary that holds every truth but one token's, exactly the slots of that token leave the loss."""
    made = records((31, 22))
    p = prepared("llama", made, depths=1)
    wanted = objective.label_positions(p.slots, p.batch.input_ids.shape[1])
    truths = objective.teach(p.target, p.states, wanted, p.drafter).truth
    common = int(truths.mode().values)
    others = [i for i in truths.unique().tolist() if i != common]
    fill = [i for i in range(tiny.VOCAB) if i != common and i not in others]
    ids = sorted(others + fill[: tiny.DRAFT_VOCAB - len(others)])
    drafter = copy.deepcopy(p.drafter)
    drafter.vocab = type(drafter.vocab)(torch.tensor(ids), tiny.VOCAB)
    drafter.draft_to_target.copy_(torch.tensor(ids))
    p.drafter = drafter
    found = loss_of(p)
    outside = int((truths == common).sum())
    assert outside > 0
    assert int(found.slots) == int(p.slots.valid.sum())
    assert int(found.counts) == int(found.slots) - outside


def test_depth_weights_weigh_and_are_divided_out() -> None:
    p = prepared("llama", records(), depths=3)
    found = loss_of(p)
    single = [found.mean([float(k == j) for k in range(3)]) for j in range(3)]
    assert len({round(float(v), 4) for v in single}) == 3
    mixed = float(found.mean([1.0, 0.8, 0.64]))
    assert mixed == pytest.approx(sum(w * float(v) for w, v in zip((1, 0.8, 0.64), single, strict=True)) / 2.44)
    assert mixed == pytest.approx(float(found.mean([5.0, 4.0, 3.2])))


def test_no_valid_slot_is_a_loss_of_zero() -> None:
    p = prepared("llama", records((17,)), depths=2)
    p.slots = objective.trained_slots(torch.zeros(1, 17), 2)
    found = loss_of(p)
    assert float(found.mean([1.0, 1.0])) == 0.0
    assert found.slots.tolist() == [0, 0]
    assert not math.isnan(float(found.sums.sum()))


# -- a sample of the slots past depth 0 -----------------------------------------------------------------------


def seeds(rows: int, step: int = 0) -> list[tuple[int, int]]:
    return [(step, row) for row in range(rows)]


def test_a_sampled_slot_has_the_state_it_has_unsampled() -> None:
    p = prepared("llama", records(), depths=3)
    few = objective.sampled(p.slots, 0.4, seeds(len(p.batch.index)))
    assert few.going_on is not None
    whole = list(objective.unroll(p.drafter, p.states.taps, p.batch.input_ids, p.slots))
    part = list(objective.unroll(p.drafter, p.states.taps, p.batch.input_ids, few))
    assert torch.equal(part[0], whole[0])
    for row, going_on in enumerate(few.going_on.tolist()):
        alive = int(p.slots.valid[row, :, 0].sum())
        kept = [s for s in going_on if s >= 0]
        assert len(kept) == len(set(kept)) == math.ceil(0.4 * alive)
        assert max(kept) < alive
        for k in (1, 2):
            assert torch.allclose(part[k][row, : len(kept)], whole[k][row, kept], atol=1e-5)
            index, valid = few.at(k)
            assert index[row, : len(kept)].tolist() == p.slots.index[row, kept].tolist()
            assert valid[row, : len(kept)].tolist() == p.slots.valid[row, kept, k].tolist()
            assert not valid[row, len(kept) :].any()


def test_a_row_draws_the_same_whatever_it_is_batched_with() -> None:
    alone, beside = prepared("llama", records((20,)), depths=2), prepared("llama", records((20, 33)), depths=2)
    one = objective.sampled(alone.slots, 0.5, [(7, 3)]).going_on
    two = objective.sampled(beside.slots, 0.5, [(7, 3), (7, 4)]).going_on
    assert one is not None
    assert two is not None
    assert one[0].tolist() == [s for s in two[0].tolist() if s >= 0]


def test_sampling_leaves_the_mean_where_it_was() -> None:
    """Over many draws the mean of the sampled loss is the loss; depth 0 is never touched."""
    p = prepared("llama", records(), depths=3)
    whole, slots, drawn = loss_of(p), p.slots, []
    for step in range(60):
        p.slots = objective.sampled(slots, 0.3, seeds(len(p.batch.index), step))
        drawn.append(loss_of(p))
    assert all(torch.equal(one.sums[0], whole.sums[0]) for one in drawn)
    counts = torch.stack([one.counts for one in drawn]).double()
    sums = torch.stack([one.sums.detach() for one in drawn]).double()
    assert (counts[:, 1:].mean(0) < 0.5 * whole.counts[1:]).all()
    means = (sums / counts)[:, 1:]
    wanted = (whole.sums / whole.counts)[1:].double()
    assert ((means.mean(0) - wanted).abs() < 4 * means.std(0) / len(drawn) ** 0.5).all()


def test_a_truth_already_known_is_taken() -> None:
    p = prepared("llama", records())
    wanted = objective.label_positions(p.slots, p.batch.input_ids.shape[1])
    known = torch.full_like(p.batch.input_ids, -1)
    known[wanted] = torch.arange(int(wanted.sum()))
    states = type(p.states)(p.states.taps, p.states.last, known)
    assert objective.teach(p.target, states, wanted, p.drafter).truth.tolist() == list(range(int(wanted.sum())))
