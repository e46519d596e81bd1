"""What a reading makes of the files, and what a pool counts: against plain drafters and plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from eyas import objective, taps, variants
from eyas.drafter import Drafter
from eyas.states.live import LiveStock
from eyas.target import Target
from eyas.variants import pool as pools
from eyas.variants import scores, table
from eyas.variants.parts import play
from eyas.variants.scores import FINAL, arranged

torch.set_num_threads(1)
K = 3


def weights(of: Drafter) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.state_dict().items()}


def parts(of: Drafter, changed: dict[str, Tensor] | None = None, **maps: Tensor) -> variants.Parts:
    held = {**weights(of), **(changed or {})}
    return variants.Parts(of.config, held, tiny.target("llama"), {"offsets": of.vocab.ids, **maps})


def facts(of: Drafter, **changes: Any) -> dict[str, Any]:
    told = {k: v for k, v in of.config.facts().items() if k in ("fc_norm", "residual", "feedback", "embedding")}
    return {
        **variants.RIGHT,
        "taps": of.config.taps,
        "vocab_map": "offsets",
        "head": "own",
        "head_norm": True,
        "token_shift": 1,
        "rope": dict(of.config.rope_parameters),
        "window": None,
        **told,
        **changes,
    }


def said(of: Drafter, how: objective.Play = objective.TRAINED) -> list[Tensor]:
    """Logits of every slot of some records, depth by depth."""
    records = tiny.tiny_records(4, seed=3)
    target = tiny.target("llama")
    out: list[Tensor] = []
    for record in records:
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        states = taps.run(target, ids, torch.tensor([len(ids[0])]), (1, 2, 4))
        slots = objective.drafted_slots(torch.from_numpy(record.loss_mask)[None], K)
        out += [
            of.logits(s[slots.valid[:, :, k]]) for k, s in enumerate(objective.unroll(of, states.taps, ids, slots, how))
        ]
    return out


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, atol=2e-5) for x, y in zip(a, b, strict=True))


def built(of: variants.Parts, told: dict[str, Any]) -> Drafter:
    made = variants.build(of, told)
    assert made is not None
    return made


# -- building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", sorted(tiny.SHAPES))
def test_the_reading_of_a_sound_drafter_is_that_drafter(shape: str) -> None:
    of = tiny.drafter("llama", **tiny.SHAPES[shape])
    assert equal(said(built(parts(of), facts(of))), said(of))


def turned(weight: Tensor, head_dim: int, back: bool) -> Tensor:
    """Rows of each head from halves apart to pairs side by side (pair i: rows i and i + E/2), or back."""
    rows = weight.reshape(-1, head_dim, weight.shape[-1])
    order = [i // 2 + (i % 2) * head_dim // 2 for i in range(head_dim)]
    if back:
        order = [order.index(i) for i in range(head_dim)]
    return rows[:, order].reshape(weight.shape)


def broken(of: Drafter, fault: str) -> tuple[variants.Parts, dict[str, Any]]:
    """Files with a fault in them, and the change that undoes it."""
    held = weights(of)
    ids, every = of.vocab.ids, torch.arange(len(of.vocab))
    if fault == "gains":
        up = {n: w + 1 for n, w in held.items() if "norm" in n}
        return parts(of, up), {"norm_gain": {"all": -1.0}}
    if fault == "one gain":
        name = "midlayer.hidden_norm"
        return parts(of, {f"{name}.weight": held[f"{name}.weight"] - 1}), {"norm_gain": {name: 1.0}}
    if fault in ("pairs", "pairs back"):
        names = [f"midlayer.self_attn.{p}_proj.weight" for p in "qk"]
        changed = {n: turned(held[n], of.config.head_dim, fault == "pairs back") for n in names}
        return parts(of, changed), {"rope_layout": "interleaved" if fault == "pairs" else "interleaved back"}
    if fault == "fc blocks":
        a, b, c = held["fc.weight"].chunk(3, -1)
        return parts(of, {"fc.weight": torch.cat((b, a, c), -1)}), {"taps": (2, 1, 4)}
    if fault == "embedding":
        noise = torch.randn(tiny.VOCAB, of.config.hidden_size)
        return parts(of, {"embed_tokens.weight": noise}), {"embedding": "target"}
    assert fault == "map"
    return parts(of, ids=ids, offsets=ids + every), {"vocab_map": "ids"}


@pytest.mark.parametrize("fault", ["gains", "one gain", "pairs", "pairs back", "fc blocks", "embedding", "map"])
def test_a_reading_undoes_what_was_done_to_the_files(fault: str) -> None:
    of = tiny.drafter("llama")
    files, change = broken(of, fault)
    wrong = facts(of, embedding="own") if fault == "embedding" else facts(of)
    pool = whole_pool()
    healthy = scores.score(pool, parts(of), facts(of))
    damaged, mended = scores.score(pool, files, wrong), scores.score(pool, files, {**wrong, **change})
    assert healthy is not None
    assert damaged is not None
    assert mended is not None
    assert np.array_equal(mended.said, healthy.said)
    assert np.allclose(mended.log_probability, healthy.log_probability, atol=1e-4)
    assert not np.array_equal(damaged.said, healthy.said)


def test_every_switch_that_is_tried_changes_what_is_said() -> None:
    """A variant that does nothing would be a check that cannot fail."""
    of = tiny.drafter("llama", own_embedding=True)
    held = parts(of)
    base = facts(of)
    pool = whole_pool()
    stock = pool.stock
    plain = scores.score(pool, held, base)
    assert plain is not None
    silent, tried = [], 0
    for change in table.candidates(base, held, stock, 5):
        got = scores.score(pool, held, {**base, **change})
        if got is None:
            continue
        tried += 1
        if np.allclose(got.log_probability, plain.log_probability, atol=1e-6):
            silent.append(table.name_of(change))
    assert tried > 35
    assert silent == []


def test_files_that_lack_what_a_reading_asks_for_are_not_read_so() -> None:
    of = tiny.drafter("llama")
    held = parts(of)
    assert variants.build(held, facts(of, embedding="own")) is None
    assert variants.build(variants.Parts(of.config, {k: v for k, v in held.tensors.items() if k != "lm_head.weight"},
                                         held.target, held.maps), facts(of)) is None  # fmt: skip


# -- playing ------------------------------------------------------------------------------------------------------


def naive(of: Drafter, told: dict[str, Any]) -> list[list[Tensor]]:
    """Logits of each slot, one chain at a time, one key list at a time: by slot, by depth."""
    target = tiny.target("llama")
    how = play(told)
    chains = []
    for record in tiny.tiny_records(2, seed=3):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        fed = taps.run(target, ids, torch.tensor([len(ids[0])]), (1, 2, 4)).taps
        fused = of.fuse(fed)
        slots = objective.drafted_slots(torch.from_numpy(record.loss_mask)[None], K)
        for s, t in enumerate(slots.index[0].tolist()):
            if not bool(slots.valid[0, s, 0]):
                continue
            seen = [
                u for u in range(t + 1) if (how.cache == "all" or u == t) and (how.window is None or t - u < how.window)
            ]
            keys, values = [], []
            for u in seen:
                k, v = of.keys_values(of.mix(ids[:, u + 1 : u + 2], fused[:, u : u + 1]), torch.tensor([[u]]))
                keys.append(k)
                values.append(v)
            states: list[Tensor] = []
            chain = []
            hidden = fused[:, t : t + 1]
            for depth in range(int(slots.valid[0, s].sum())):
                at = torch.tensor([[t + depth * how.step]])
                if depth:
                    first = fused[:, t : t + 1]
                    before = [first, *(of.feedback(state) for state in states)]
                    choices = {"own": before[-1], "target": first, "zeros": 0 * first, "stale": before[-2]}
                    hidden = choices[how.feedback]
                token = ids[:, t + 1 + depth : t + 2 + depth]
                residual, mixed = of.enter(hidden, token, 0)
                if depth:
                    k, v = of.keys_values(mixed, at)
                    keys.append(k)
                    values.append(v)
                attended = objective.attend(of.queries(mixed, at), torch.cat(keys, 2), torch.cat(values, 2), None)
                states.append(of.finish(residual, attended))
                chain.append(of.logits(states[-1])[0, 0])
            chains.append(chain)
    return chains


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"position_step": 0},
        {"position_step": 2},
        {"feedback": "the target's state"},
        {"feedback": "the state before"},
        {"feedback": "zeros"},
        {"cache": "own"},
        {"window": 5},
    ],
    ids=str,
)
def test_chains_are_played_as_a_plain_loop_plays_them(change: dict[str, Any]) -> None:
    of = tiny.drafter("llama")
    told = facts(of, **change)
    expected = naive(of, told)
    target, got = tiny.target("llama"), []
    for record in tiny.tiny_records(2, seed=3):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        fed = taps.run(target, ids, torch.tensor([len(ids[0])]), (1, 2, 4)).taps
        slots = objective.drafted_slots(torch.from_numpy(record.loss_mask)[None], K)
        depths = [of.logits(s)[0] for s in objective.unroll(of, fed, ids, slots, play(told))]
        for s in range(slots.index.shape[1]):
            if bool(slots.valid[0, s, 0]):
                got.append([depths[k][s] for k in range(int(slots.valid[0, s].sum()))])
    assert len(got) == len(expected) > 20
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-4)


# -- feeding ------------------------------------------------------------------------------------------------------


def test_states_are_arranged_as_they_are_asked_for() -> None:
    target: Target = tiny.target("llama")
    held = {t: torch.randn(7, target.hidden_size) for t in (1, 2, 5)}
    final = target.norm(held[5])
    got = arranged(held, target, {"taps": (2, None, FINAL, 1)}, 5, 7)
    assert torch.equal(got, torch.cat((held[2], torch.zeros(7, target.hidden_size), final, held[1]), -1))
    late = arranged(held, target, {"taps": (1,), "token_shift": 2}, 5, 7)
    assert torch.equal(late, held[1][[0, 0, 1, 2, 3, 4, 5]])
    early = arranged(held, target, {"taps": (1,), "token_shift": 0}, 5, 7)
    assert torch.equal(early, held[1][[1, 2, 3, 4, 5, 6, 6]])


def test_a_live_stock_holds_what_the_target_says() -> None:
    target, records = tiny.target("llama"), tiny.tiny_records(5, seed=2)
    stock = LiveStock(target, records[:3], batch_size=2)
    for record in records:  # also those it does not keep
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        plain = taps.run(target, ids, torch.tensor([record.seq_len]), (1, 4))
        got = stock.run(target, ids, torch.tensor([record.seq_len]), (1, 4))
        assert torch.equal(got.taps, plain.taps)
        assert torch.equal(got.last, plain.last)
    for i, record in enumerate(records[:3]):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        every = taps.run(target, ids, torch.tensor([record.seq_len]), range(6)).taps[0]
        assert torch.equal(stock.states(i, range(6)), every)
        D = target.hidden_size
        assert torch.equal(stock.states(i, (4, 0)), torch.cat((every[:, 4 * D : 5 * D], every[:, :D]), -1))


# -- counting -----------------------------------------------------------------------------------------------------


def whole_pool() -> pools.Pool:
    target = tiny.target("llama")
    stock = LiveStock(target, tiny.tiny_records(6, seed=3))
    return pools.make(
        stock, pools.Truths(stock, target), {i: np.ones(r.seq_len, bool) for i, r in enumerate(stock.records)}, K
    )


def test_kept_is_what_a_plain_loop_keeps() -> None:
    """A random drafter is never right, so half of the truth is made of what it says at depth 0."""
    of = tiny.drafter("llama")
    pool = whole_pool()
    first = scores.score(pool, parts(of), facts(of))
    assert first is not None
    (chunk,) = pool.chunks
    alive = chunk.slots.valid[:, :, 0]
    rows = torch.arange(len(alive))[:, None].expand_as(alive)[alive]
    at = chunk.slots.index[alive] + 1
    half = torch.arange(len(at)) % 4 < 3
    chunk.truth[rows[half], at[half]] = torch.from_numpy(first.said)[half]
    got = scores.score(pool, parts(of), facts(of))
    assert got is not None
    target, kept, logs = tiny.target("llama"), [], []
    inside = of.vocab.draft_ids()
    for row, index in enumerate(chunk.batch.index):
        record = pool.stock.records[index]
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        states = taps.run(target, ids, torch.tensor([record.seq_len]), (1, 2, 4))
        slots = objective.trained_slots(torch.from_numpy(record.loss_mask)[None], K)
        depths = [of.logits(s)[0].log_softmax(-1) for s in objective.unroll(of, states.taps, ids, slots)]
        for s, t in enumerate(slots.index[0].tolist()):
            if not bool(slots.valid[0, s, 0]):
                continue
            run, on, total, n = 0, True, 0.0, 0
            for k in range(int(slots.valid[0, s].sum())):
                label = int(chunk.truth[row, t + 1 + k])
                on = on and int(of.vocab.ids[depths[k][s].argmax()]) == label
                run += on
                place = int(inside[label])
                if k >= scores.LIKELY:
                    continue
                total += float(depths[k][s][place]) if place >= 0 else -float(np.log(tiny.VOCAB))
                n += 1
            kept.append(run)
            logs.append(total / n)
    assert got.kept.tolist() == kept
    assert np.allclose(got.log_probability, logs, atol=1e-4)
    assert len(kept) // 2 < sum(kept) < K * len(kept)
    assert max(kept) > 1


def test_the_truth_is_the_target_or_the_text() -> None:
    target, pool = tiny.target("llama"), whole_pool()
    (chunk,) = pool.chunks
    wanted = objective.label_positions(chunk.slots, chunk.batch.input_ids.shape[1])
    states = taps.run(target, chunk.batch.input_ids, chunk.batch.lengths, (1,))
    assert torch.equal(chunk.truth[wanted], target.logits(states.last).argmax(-1)[wanted])
    pool.stock.last = None  # type: ignore[misc]
    pool.stock.truth = lambda index: None  # type: ignore[method-assign]
    marks = {i: np.ones(r.seq_len, bool) for i, r in enumerate(pool.stock.records)}
    (chunk,) = pools.make(pool.stock, pools.Truths(pool.stock, target), marks, K).chunks
    following = chunk.batch.input_ids.roll(-1, 1)
    assert torch.equal(chunk.truth[wanted], following[wanted])


def test_pools_share_no_slot() -> None:
    stock = LiveStock(tiny.target("llama"), tiny.tiny_records(40, seed=1))
    a, b = pools.split(stock, 4, 200, 300, 0)
    assert a
    assert b
    assert not a.keys() & b.keys()
    few = LiveStock(tiny.target("llama"), tiny.tiny_records(3, seed=1))
    a, b = pools.split(few, 4, 200, 300, 0)
    for i in a.keys() & b.keys():
        assert not bool((a[i] & b[i]).any())


def test_standard_errors_are_those_of_units() -> None:
    unit = np.repeat(np.arange(50), 20)
    rng = np.random.default_rng(0)
    base = scores.Score(4, np.zeros(1000, int), np.zeros(1000), unit, np.zeros(1000, int), 50)
    shared = np.repeat(rng.integers(0, 2, 50), 20)  # all slots of a unit agree: fifty draws, not a thousand
    better = scores.Score(4, shared, np.zeros(1000), unit, np.zeros(1000, int), 50)
    share = shared.reshape(50, 20)[:, 0]
    assert np.isclose(scores.z_of(better, base), share.mean() / (share.std(ddof=1) / np.sqrt(50)), rtol=1e-6)
    assert scores.z_of(base, base) == 0


def staged() -> tuple[pools.Pool, pools.Pool, Drafter]:
    """The same slots in three parts and in one."""
    stock = LiveStock(tiny.target("llama"), tiny.tiny_records(24, seed=1))
    truths = pools.Truths(stock, tiny.target("llama"))
    marks = {i: np.ones(r.seq_len, bool) for i, r in enumerate(stock.records)}
    return pools.make(stock, truths, marks, K, [40, 40]), pools.make(stock, truths, marks, K), tiny.drafter("llama")


def test_stages_add_up_to_the_pool() -> None:
    parts_, whole, of = staged()
    assert len(parts_.stages) == 3
    assert parts_.slots == whole.slots == sum(stage.slots for stage in parts_.stages)
    known = scores.Scores(parts(of))
    got, want = known.of(parts_, facts(of)), scores.score(whole, parts(of), facts(of))
    assert got is not None
    assert want is not None
    assert len(set(got.unit.tolist())) == got.units == want.units
    assert sorted(zip(got.kept.tolist(), got.said.tolist(), strict=True)) == sorted(
        zip(want.kept.tolist(), want.said.tolist(), strict=True)
    )
    assert np.isclose(got.log_p, want.log_p)


def test_what_has_lost_is_not_run_on_all_slots() -> None:
    parts_, _, of = staged()
    known, good = scores.Scores(parts(of)), facts(of)
    bad = {**good, "taps": tuple(reversed(good["taps"]))}
    both = known.until(parts_, bad, good, lambda other, base, stage: True)
    assert both is not None
    assert [len(one.kept) for one in both] == [parts_.stages[0].slots] * 2
    whole = known.until(parts_, bad, good, lambda other, base, stage: False)
    assert whole is not None
    assert [len(one.kept) for one in whole] == [parts_.slots] * 2
    a, b = whole
    assert np.array_equal(a.unit, b.unit)


def test_behind_asks_for_both() -> None:
    unit = np.repeat(np.arange(10), 20)
    rng = np.random.default_rng(0)
    base = scores.Score(4, rng.integers(1, 4, 200), rng.normal(size=200), unit, np.zeros(200, int), 10)

    def other(fewer: int, less: float) -> scores.Score:
        noise = rng.normal(size=200)
        return scores.Score(4, base.kept - fewer, base.log_probability - less + noise, unit, base.said, 10)

    assert scores.behind(other(1, 1.0), base, 0)
    assert not scores.behind(other(1, -1.0), base, 0)
    assert not scores.behind(other(0, 1.0), base, 0)
    little = scores.Score(4, base.kept - (np.arange(200) % 60 == 0), base.log_probability - 0.1, unit, base.said, 10)
    assert [scores.behind(little, base, stage) for stage in (0, 1, 2)] == [False, True, True]
    assert scores.no_better(other(1, 1.0), base)
    assert not scores.no_better(other(1, -1.0), base)


def test_the_target_says_its_truth_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target("llama")
    stock = LiveStock(target, tiny.tiny_records(6, seed=1))
    for i, record in enumerate(stock.records):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))[None]
        want = target.logits(taps.run(target, ids, torch.tensor([record.seq_len]), (1,)).last).argmax(-1)[0]
        asked = taps.answered(record.loss_mask)
        known = stock.truth(i)
        assert known is not None
        assert torch.equal(known[asked], want[asked])
        assert bool((known[~asked] == -1).all())
        again = stock.run(target, ids, torch.tensor([record.seq_len]), (1,)).truth
        assert again is not None
        assert torch.equal(again[0], known)
    monkeypatch.setattr(taps, "greedy", lambda *a: pytest.fail("asked again"))
    truths = pools.Truths(stock, target)
    assert all((truths.of(i) >= -1).all() for i in range(len(stock.records)))
