"""The mutation bench on a tiny drafter: mutations do what they say, costs are right, rows are scored and kept."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import folders
from eyas import causes, checkpoint, curve, objective
from eyas import taps as capture
from eyas import target as targets
from eyas.engines import scrape
from eyas.records import Record
from eyas.results import LengthCounts, bootstrap_ratio
from eyas.target import Target

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runs.mutations import __main__ as program  # noqa: E402
from runs.mutations import bench, logs, naive, norms, score, states, subject, taps, texts, weights  # noqa: E402
from runs.mutations.bank import BankStock  # noqa: E402
from runs.mutations.catalogue import ALL, LEFT_OUT, by_name  # noqa: E402
from runs.mutations.subject import IDS, KINDS, Bed, Mutation, Subject, healthy  # noqa: E402


def own_text(target: Target, n: int = 8) -> list[Record]:
    """The target's own answers to prompts in its template."""
    tokenizer: Any = target.tokenizer
    rows = []
    for seed in range(n):
        said = [{"role": "user", "content": f"{seed}, and then?"}]
        ids = tokenizer(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))["input_ids"]
        first = len(ids)
        while len(ids) < first + 12 + seed:
            ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(Record(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= first, "own"))
    return rows


def teach(folder: Path, target: Target, records: Sequence[Record]) -> None:
    """A map of tokens that occur, and a head fitted by least squares, so that some of its tokens are right."""
    held = load_file(folder / "model.safetensors")
    said = Counter(int(i) for r in records for i in r.input_ids[r.loss_mask])
    ids = torch.tensor(sorted([*said, *(i for i in range(target.vocab_size) if i not in said)][:64]))
    held["d2t"] = ids - torch.arange(64)
    held["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    generator = torch.Generator().manual_seed(0)
    for name in (n for n in held if n.startswith("midlayer.") and held[n].ndim == 2):  # so that all it is fed matters
        held[name].normal_(0.0, 1.5 * held[name].shape[1] ** -0.5, generator=generator)
    save_file(held, folder / "model.safetensors")
    made = checkpoint.load(checkpoint.read(folder), target)
    inputs, labels = [], []
    with torch.no_grad():
        for record in records:
            x = torch.from_numpy(record.input_ids.astype("int64"))[None]
            read = capture.run(target, x, torch.tensor([x.shape[1]]), made.config.taps).taps
            slots = objective.drafted_slots(torch.from_numpy(record.loss_mask)[None], naive.DRAFT_TOKENS)
            for k, state in enumerate(objective.unroll(made, read, x, slots)):
                inputs.append(made.norm(state[0]))
                labels.append(x[0, (slots.index[0] + 2 + k).clamp(max=x.shape[1] - 1)])
        rows, said_ids = torch.cat(inputs), made.vocab.draft_ids()[torch.cat(labels)]
        wanted = torch.nn.functional.one_hot(said_ids.clamp(min=0), 64).float()
        square = rows.T @ rows + 1e-3 * torch.eye(rows.shape[1])
        held["lm_head.weight"] = torch.linalg.solve(square, rows.T @ wanted).T.contiguous()
    save_file(held, folder / "model.safetensors")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    place = tmp_path_factory.mktemp("bed")
    target = targets.load(str(folders.write_target(place / "target")))
    records = own_text(target)
    teach(folders.write_drafter(place / "drafter", target), target, records)
    config = json.loads((place / "drafter" / "config.json").read_text())
    config["eyas"]["contract"] |= {
        name: {"value": "0", "origin": "declared"} for name in ("template_sha256", "tokenizer_sha256")
    }
    (place / "drafter" / "config.json").write_text(json.dumps(config))
    return subject.bed("tiny", place / "drafter", target, records, {"template_sha256": "0"})


def fit(bed: Bed) -> list[Mutation]:
    return [mutation for mutation in ALL if mutation.applies(bed)]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def equal(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


# -- the catalogue ----------------------------------------------------------------------------------------------


def test_the_catalogue_is_whole() -> None:
    assert len({bench.file_of(Path(), f"d/{m.name}") for m in ALL}) == len(ALL)
    assert {m.kind for m in ALL} == set(KINDS)
    for mutation in ALL:
        assert {mutation.expected, *mutation.also} - {None, "healthy"} <= set(causes.CAUSES), mutation.name
        assert mutation.keeps_contract or "contract kept" not in mutation.name
    stripped = Counter(m.kind for m in ALL if not m.keeps_contract)
    kept = Counter(m.kind for m in ALL if m.keeps_contract)
    assert all(stripped[kind] >= 2 for kind in KINDS if kind != "C")
    assert all(kept[kind] >= 1 for kind in "TWVNFRDPQC")
    assert len([m for m in ALL if m.kind not in "HX"]) >= 60


def test_the_ten_negative_controls_are_there() -> None:
    """Section 5 of the taxonomy, in its order; temperature stands in records and in a log."""
    assert {m.name for m in ALL if m.kind == "X"} == {
        "map of zeros, whole vocabulary",
        "hidden tuple index + 1",
        "trailing zero slots",
        "first entry 1.00 in an old script",
        "4-bit drafter",
        "sparse target slow at batch 1",
        "answers drawn at temperature 1",
        "log at temperature 1 with greedy drafts",
        "depth 0 at one drafted token",
        "embedding distinct by 3e-8",
        "seventy-three drafts",
    }
    assert {m.expected for m in ALL if m.kind == "X"} == {"healthy"}


def test_three_drafters_give_at_least_180_rows_and_every_mutation_is_among_them(bed: Bed) -> None:
    beds = [replace(bed, name=name) for name in "abc"]
    rows = list(bench.rows(beds))
    assert len(rows) >= 180
    assert {row.mutation.name for row in rows} == {m.name for m in fit(bed)}
    assert len(rows) < len(list(bench.rows(beds, everywhere=True))) == 3 * len(fit(bed))
    times = Counter(row.mutation.name for row in rows)
    shared = Counter(row.bed.name for row in rows if times[row.mutation.name] == 1)
    assert max(shared.values()) - min(shared.values()) <= 1


# -- what mutations do ------------------------------------------------------------------------------------------


def differs(a: Subject, b: Subject) -> set[str]:
    """Fields in which two subjects are not the same."""
    found = {
        name
        for name in ("manifest", "log", "engine", "flags", "pickled", "shards", "cut", "feedback", "samples")
        if getattr(a, name) != getattr(b, name)
    }
    if [(r.id, r.loss_mask.tobytes()) for r in a.records] != [(r.id, r.loss_mask.tobytes()) for r in b.records]:
        found.add("records")
    if a.config != b.config:
        found.add("config")
    return found if same(a.tensors, b.tensors) else found | {"tensors"}


@pytest.mark.parametrize("mutation", ALL, ids=lambda m: f"{m.kind}-{m.name}")
def test_every_mutation_changes_something_can_be_written_and_leaves_the_bed_alone(
    mutation: Mutation, bed: Bed, tmp_path: Path
) -> None:
    if not mutation.applies(bed):
        pytest.skip("not on this drafter")
    config, tensors = json.dumps(bed.config), {name: tensor.clone() for name, tensor in bed.tensors.items()}
    made = mutation.subject(bed)
    changed = differs(made, healthy(bed, mutation.keeps_contract))
    assert bool(changed) or mutation.name in ("as it is", "without its contract", "saved in fp32")  # as this one is
    assert ("eyas" in made.config) == mutation.keeps_contract
    assert json.dumps(bed.config) == config
    assert same(bed.tensors, tensors)
    folder = made.write(tmp_path / "drafter")
    assert json.loads((folder / "config.json").read_text()) == made.config
    expected = {"config.json", *(["states"] if made.samples is not None else [])}
    files = {path.name for path in folder.iterdir()}
    assert expected < files
    assert all("model" in name for name in files - expected)
    if made.cut is None and made.shards == 1 and not made.pickled:
        assert same(load_file(folder / "model.safetensors"), made.tensors)


def once(change: subject.Change, bed: Bed) -> Subject:
    return change(bed, healthy(bed))


def test_taps_are_declared_in_both_numberings(bed: Bed) -> None:
    made = by_name("taps + 1").subject(bed)
    assert made.config[IDS] == [2, 3, 4]
    assert made.config["eagle_config"][IDS] == [1, 2, 3]
    back = taps.declare(lambda b: bed.taps)(bed, made)
    assert back.config == healthy(bed, False).config
    assert naive.engine(made, bed).taps == (2, 3, 4)


def test_fc_blocks_move_whole_and_back(bed: Bed) -> None:
    D = bed.target.hidden_size
    fc = bed.tensors["fc.weight"]
    turned = once(taps.blocks(1, 2, 0), bed)
    assert torch.equal(turned.tensors["fc.weight"][:, :D], fc[:, D : 2 * D])
    assert torch.equal(turned.tensors["fc.weight"][:, 2 * D :], fc[:, :D])
    assert same(taps.blocks(2, 0, 1)(bed, turned).tensors, bed.tensors)
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0)):
        assert same(taps.blocks(*order)(bed, once(taps.blocks(*order), bed)).tensors, bed.tensors)


def test_gains_go_up_and_down_and_only_those_named(bed: Bed) -> None:
    up = once(norms.gains(1.0), bed)
    for name, tensor in bed.tensors.items():
        assert torch.equal(up.tensors[name], tensor + 1 if name in norms.NORMS else tensor)
    down = norms.gains(-1.0)(bed, up)
    assert all(torch.allclose(down.tensors[n], bed.tensors[n], atol=1e-6) for n in norms.NORMS)
    one = once(norms.gains(1.0, norms.NORMS[2]), bed)
    assert [n for n in bed.tensors if not torch.equal(one.tensors[n], bed.tensors[n])] == [norms.NORMS[2]]


def test_rows_of_q_and_k_are_those_of_an_interleaved_rope(bed: Bed) -> None:
    """The permuted weights under a rope of neighbouring pairs are the old ones under a rope of halves."""
    made = once(subject.tensors(norms.interleaved()), bed)
    assert same(subject.tensors(norms.interleaved(undo=True))(bed, made).tensors, bed.tensors)
    drafter = naive.engine(healthy(bed), bed).drafter
    E, T = drafter.config.head_dim, 6
    x = torch.randn(1, T, 2 * drafter.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(T)[None]
    halves = drafter.queries(x, positions)
    q = (x @ made.tensors[norms.QK[0]].T).view(1, T, -1, E).transpose(1, 2)
    cos, sin = drafter.rotary(x, positions)
    even, odd, cos, sin = q[..., 0::2], q[..., 1::2], cos[..., : E // 2], sin[..., : E // 2]
    pairs = torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    assert torch.allclose(pairs, halves, atol=1e-5)


def test_partial_rotation_turns_the_first_part_alone(bed: Bed) -> None:
    made = once(subject.keys(partial_rotary_factor=0.5), bed)
    whole, part = (naive.engine(s, bed).drafter for s in (healthy(bed), made))
    E = whole.config.head_dim
    heads = torch.randn(1, 2, 5, E, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)[None]
    turned = part._rotated(heads, positions)
    assert torch.equal(turned[..., E // 2 :], heads[..., E // 2 :])
    inverse = 1 / whole.config.rope_parameters["rope_theta"] ** (torch.arange(0, E // 2, 2) / (E // 2))
    angles = torch.cat([positions[0][:, None] * inverse] * 2, dim=-1)
    expected = apply_rotary_pos_emb(heads[..., : E // 2], heads[..., : E // 2], angles.cos()[None], angles.sin()[None])
    assert torch.allclose(turned[..., : E // 2], expected[0], atol=1e-6)


def test_maps_are_what_they_say(bed: Bed) -> None:
    ids = bed.ids
    slots = torch.arange(len(ids))
    assert torch.equal(by_name("d2t holds ids").subject(bed).tensors["d2t"], ids)
    assert torch.equal(by_name("d2t is a ramp").subject(bed).tensors["d2t"], slots)
    shuffled = by_name("the whole map shuffled").subject(bed).tensors["d2t"] + slots
    assert torch.equal(shuffled.sort().values, ids)
    assert bool((shuffled != ids).all())
    little = weights.shuffled(0.05)(bed, ids)
    assert int((little != ids).sum()) == round(0.05 * len(ids))
    other = by_name("map of another run").subject(bed).tensors
    stale = other["d2t"] + slots
    assert bool((stale[1:] > stale[:-1]).all())
    assert torch.equal(other["t2d"].nonzero().flatten(), stale)
    assert len(set(stale.tolist()) - set(ids.tolist())) == len(ids) // 20
    fewer = by_name("mask of fewer ids").subject(bed).tensors["t2d"]
    assert int(fewer.sum()) < len(ids)
    assert set(fewer.nonzero().flatten().tolist()) < set(ids.tolist())
    whole = by_name("map of zeros, whole vocabulary").subject(bed)
    assert not whole.tensors["d2t"].any()
    assert torch.equal(whole.tensors["lm_head.weight"][ids], bed.tensors["lm_head.weight"])


def test_names_move_and_back(bed: Bed) -> None:
    there = once(weights.rename("midlayer.", "layers.0."), bed)
    assert not any(name.startswith("midlayer") for name in there.tensors)
    assert same(weights.rename("layers.0.", "midlayer.")(bed, there).tensors, bed.tensors)


def test_rotation_of_fc_and_of_states_are_one(bed: Bed) -> None:
    """A drafter trained on turned states, fed turned states, is the healthy one on plain states."""
    made = by_name("fc trained on rotated states").subject(bed)
    plain = bed.bank.states(bed.records[0], bed.taps)
    turn = states.orthogonal(bed.target.hidden_size)
    assert torch.allclose(turn @ turn.T, torch.eye(len(turn)), atol=1e-5)
    turned = torch.cat([part @ turn for part in plain.chunk(3, dim=-1)], dim=-1)
    assert torch.allclose(turned @ made.tensors["fc.weight"].T, plain @ bed.tensors["fc.weight"].T, atol=1e-3)


def stored(bed: Bed, name: str) -> list[list[Tensor]]:
    made = by_name(name).subject(bed).samples
    assert made is not None
    return [one.tensors for one in made]


def test_samples_hold_the_taps_and_tap_n_and_read_back(bed: Bed, tmp_path: Path) -> None:
    made = by_name("states as they should be").subject(bed)
    assert made.samples is not None
    first = torch.load(made.write(tmp_path / "d") / "states" / "00000.pt", weights_only=True)
    assert set(first) == {"input_ids", "loss_mask", "hidden_states"}
    assert first["input_ids"].tolist() == bed.records[0].input_ids.tolist()
    assert first["loss_mask"].bool().tolist() == bed.records[0].loss_mask.tolist()
    for tensor, tap in zip(first["hidden_states"], [*bed.taps, bed.n], strict=True):
        assert torch.equal(tensor, bed.bank.states(bed.records[0], [tap]).to(torch.bfloat16))


def test_states_are_mutated_row_by_row(bed: Bed) -> None:
    plain = stored(bed, "states as they should be")
    later, earlier = stored(bed, "row t holds the state of t + 1"), stored(bed, "row t holds the state of t - 1")
    mixed, zero = stored(bed, "taps of t + 1, tap n of t"), stored(bed, "5 % of rows zero")
    shuffled, before = stored(bed, "rows shuffled"), stored(bed, "states of the request before")
    rows = gone = 0
    for i, tensors in enumerate(plain):
        order = None
        for j, tensor in enumerate(tensors):
            assert torch.equal(later[i][j][:-1], tensor[1:])
            assert torch.equal(earlier[i][j][1:], tensor[:-1])
            assert torch.equal(mixed[i][j], tensor if j == 3 else later[i][j])
            kept = zero[i][j].any(-1)
            assert torch.equal(zero[i][j][kept], tensor[kept])
            n = min(len(tensor), len(plain[i - 1][j]))
            assert torch.equal(before[i][j][:n], plain[i - 1][j][:n])
            assert torch.equal(shuffled[i][j].sum(0, dtype=torch.float64), tensor.sum(0, dtype=torch.float64))
            found = torch.cdist(shuffled[i][j].double(), tensor.double()).argmin(-1)
            assert order is None or torch.equal(found, order)  # one order for all taps of a record
            order = found
        assert order is not None
        assert not torch.equal(order, torch.arange(len(order)))
        rows, gone = rows + len(tensors[0]), gone + int((~zero[i][0].any(-1)).sum())
    assert 0.02 < gone / rows < 0.1
    final = stored(bed, "highest stored state is the final one")[0]
    assert torch.equal(final[2], bed.bank.normed(bed.records[0]).to(torch.bfloat16))
    assert torch.equal(final[3], plain[0][3])


def test_ids_that_lost_their_first_stand_beside_earlier_states(bed: Bed) -> None:
    made = by_name("ids of the sample shifted by one").subject(bed)
    assert made.samples is not None
    for one, record in zip(made.samples, bed.records, strict=True):
        assert one.record.input_ids.tolist() == record.input_ids[1:].tolist()
        assert torch.equal(one.tensors[0], bed.bank.states(record, bed.taps[:1])[:-1].to(torch.bfloat16))


def test_rounding_is_rounding() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert 0.02 < float((states.int4(x) - x).norm() / x.norm()) < 0.2
    assert all(len(set(group.tolist())) <= 16 for group in states.int4(x).view(-1, 32))
    assert 0.001 < float((states.fp8_matrix(x) - x).norm() / x.norm()) < 0.05
    assert torch.equal(states.int4(states.int4(x)), states.int4(x))


def test_masks_and_prompts(bed: Bed) -> None:
    record = bed.records[0]
    at = int(record.loss_mask.argmax())
    later = by_name("mask one later").subject(bed).records[0].loss_mask
    assert int(later.argmax()) == at + 1
    back = texts.shifted(-1)(texts.shifted(1)(record.loss_mask))
    assert back[:-1].tolist() == record.loss_mask[:-1].tolist()
    text = texts.decode(bed, record.input_ids[:at])
    assert texts.turns(text) == [("user", "0, and then?")]
    for name, begins in (
        ("Llama 3 template", "<|begin_of_text|><|start_header_id|>user"),
        ("no chat template", "0, and then?\n"),
        ("system prompt never seen", "<|im_start|>system\nYou answer as a pirate"),
        ("empty think block in the prompt", text),
    ):
        made = by_name(name).subject(bed).records[0]
        first = int(made.loss_mask.argmax())
        assert texts.decode(bed, made.input_ids[:first]).startswith(begins), name
        assert made.input_ids[first:].tolist() == record.input_ids[at:].tolist()
    assert by_name("system prompt left out").subject(bed).records == []  # these have none
    think = by_name("empty think blocks supervised").subject(bed).records[0]
    assert texts.decode(bed, think.input_ids[at:]).startswith(texts.THINK)
    assert think.n_response_tokens == record.n_response_tokens + len(texts.THINK)
    halved = by_name("ids read at half their width").subject(bed).records[0]
    assert halved.input_ids[::2].tolist() == record.input_ids.tolist()
    assert not halved.input_ids[1::2].any()


# -- what they cost ---------------------------------------------------------------------------------------------


def measured(bed: Bed, made: Subject, tmp_path: Path) -> LengthCounts:
    """The walk that ``curve`` makes of these files: the oracle where they load as they stand."""
    drafter = checkpoint.load(checkpoint.read(made.write(tmp_path / "oracle")), bed.target)
    found = curve.measure(drafter, bed.target, bed.records, depths=naive.DRAFT_TOKENS)
    return found.lengths[-1]


@pytest.mark.parametrize(
    "name",
    [
        "without its contract", "taps + 1", "fc blocks reversed", "head is noise", "embedding is noise",
        "all gains + 1", "residual after the norm", "a norm for each tap added", "normed state fed back", "base / 10",
        "pairs interleaved", "linear scaling of 4", "map of another run", "map and head in another order",
        "fc trained on rotated states", "model. before every name",
    ],
)  # fmt: skip
def test_the_naive_walk_is_the_curve_s_where_both_can_run(bed: Bed, name: str, tmp_path: Path) -> None:
    made = by_name(name).subject(bed)
    played = naive.play(naive.engine(made, bed), bed.bank, bed.records).lengths
    expected = measured(bed, made, tmp_path)
    assert played.rounds.tolist() == expected.rounds.tolist()
    assert played.accepted.tolist() == expected.accepted.tolist()


def test_a_text_that_left_the_target_s_ends_a_chain(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A match at a token that the text did not take leads nowhere: one token in four is another here."""
    monkeypatch.setattr(curve, "ON_POLICY", 0.0)
    drafter = checkpoint.load(checkpoint.read(bed.folder), bed.target)
    records = []
    for record in bed.records:
        ids = record.input_ids.copy()
        ids[record.loss_mask.argmax() + 2 :: 4] = bed.ids[5]
        records.append(replace(record, input_ids=ids))
    played = naive.play(naive.engine(healthy(bed), bed), bed.bank, records).lengths
    expected = curve.measure(drafter, bed.target, records, depths=naive.DRAFT_TOKENS).lengths[-1]
    assert played.accepted.tolist() == expected.accepted.tolist()
    assert played.rounds.tolist() == expected.rounds.tolist()


def test_the_bank_holds_what_the_target_says_and_forgets_what_is_not_its_own(bed: Bed) -> None:
    bank, record = subject.Bank(bed.target, bed.records[:1]), bed.records[0]
    x = torch.from_numpy(record.input_ids.astype("int64"))[None]
    read = capture.run(bed.target, x, torch.tensor([record.seq_len]), [0, 2, 4])
    assert torch.equal(bank.states(record, [0, 2, 4]), read.taps[0])
    assert torch.allclose(bank.normed(record), read.last[0], atol=1e-5)
    assert torch.equal(bank.truth(record), bed.target.logits(read.last[0]).argmax(-1))
    stock = BankStock(bank, [bed.records[1], record])
    assert torch.equal(stock.states(1, [4, 0]), torch.cat(read.taps[0].chunk(3, -1)[::-2], -1))
    assert (stock.last, len(stock.taps)) == (bed.n, bed.n + 1)
    stock.states(0, [0])
    bank.forget()
    assert set(bank._taps) == {record.id}


def test_the_drafter_is_worth_breaking(bed: Bed) -> None:
    length = naive.play_healthy(bed, bed.records).lengths
    assert length.value is not None
    assert length.value > 1.3
    assert len(bed.walks) == len(bed.records)


def test_maps_that_no_loader_takes_are_played_as_they_stand(bed: Bed) -> None:
    none, ids, shuffled = (
        naive.engine(by_name(name).subject(bed), bed) for name in ("no map", "d2t holds ids", "the whole map shuffled")
    )
    assert none.ids.tolist()[:64] == list(range(64))
    expected = bed.ids + torch.arange(64)
    assert torch.equal(ids.ids, torch.where(expected < bed.target.vocab_size, expected, -1))
    assert torch.equal(shuffled.ids.sort().values, bed.ids)


def test_what_is_missing_is_as_a_fresh_layer_has_it(bed: Bed) -> None:
    norm = naive.engine(by_name("last norm dropped").subject(bed), bed).drafter.norm.weight
    assert torch.equal(norm, torch.ones_like(norm))
    head = naive.engine(by_name("no head").subject(bed), bed).drafter.lm_head.weight
    assert torch.equal(head, bed.target.head_weight[bed.ids])
    fc = naive.engine(by_name("fc dropped").subject(bed), bed).drafter.fc.weight
    assert 0.015 < float(fc.std()) < 0.025


@pytest.mark.parametrize("name", ["id out of range", "two ids for three blocks", "MLP of another width in config"])
def test_what_cannot_run_has_no_length(bed: Bed, name: str) -> None:
    lost = bench.cost(bed, by_name(name).subject(bed))
    assert lost.before is not None
    assert (lost.after, lost.error, lost.proven) == (None, None, False)


def test_an_engine_s_feedback_leaves_depth_0_alone(bed: Bed) -> None:
    runner = naive.engine(healthy(bed), bed)

    def leads(runner: naive.Engine) -> np.ndarray:
        given = ((bed.bank.states(record, bed.taps), record, bed.bank.truth(record)) for record in bed.records)
        return np.concatenate([runner.leads(*one) for one in given])

    own = leads(runner)
    for what in ("target", "stale", "zero"):
        lead = leads(replace(runner, feedback=what))
        assert ((lead > 0) == (own > 0)).all(), what
        assert (lead != own).any(), what
    state = torch.ones(1, 2, 3)
    fed = naive._Fed(runner.drafter, "stale", torch.zeros(1, 2, 3))
    assert [float(fed.feedback(state * k).sum()) for k in (1, 2, 3)] == [0.0, 6.0, 12.0]


def test_states_that_are_handed_over_are_what_is_played(bed: Bed) -> None:
    healthy_cost = bench.cost(bed, by_name("states as they should be").subject(bed))
    assert healthy_cost.before == pytest.approx(healthy_cost.after, abs=0.05)  # bf16
    dead = bench.cost(bed, by_name("all rows zero").subject(bed))
    assert dead.before == healthy_cost.before
    assert dead.after is not None
    assert dead.after < 0.9 * healthy_cost.before  # type: ignore[operator]


def test_records_that_are_not_the_target_s_text_are_not_walked(bed: Bed) -> None:
    assert bench.walkable(bed, bed.records) == bed.records
    assert bench.cost(bed, by_name("ids read at half their width").subject(bed)) == score.Loss(None, None, None)
    assert bench.cost(bed, by_name("mask all 0").subject(bed)) == score.Loss(None, None, None)


# -- logs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", [m for m in logs.MUTATIONS if m.kind != "F"], ids=lambda m: m.name)
def test_logs_are_read_and_say_what_they_should(bed: Bed, mutation: Mutation) -> None:
    """``eyas read`` alone finds what is wrong with a metric, and nothing grave in a control's log."""
    log = mutation.subject(bed).log
    assert log is not None
    found = scrape.read([log.encode()], "engine.log").findings
    grave = {f.cause for f in found if f.severity != "note"}
    if mutation.kind == "M":
        assert {mutation.expected, *mutation.also} & {f.cause for f in found}, found
    else:
        assert grave <= set(mutation.also)


def test_a_log_tells_the_walk(bed: Bed) -> None:
    (counts,) = scrape.read([by_name("log of vLLM").subject(bed).log.encode()], "log").observed  # type: ignore[union-attr]
    walked = naive.play_healthy(bed, bed.records).lengths
    assert (counts.rounds, counts.accepted) == (walked.total_rounds, int(walked.accepted.sum()))
    fed = by_name("engine feeds zeros").subject(bed)
    (broken,) = scrape.read([fed.log.encode()], "log").observed  # type: ignore[union-attr]
    runner = replace(naive.engine(healthy(bed), bed), feedback="zero")
    walked = naive.play(runner, bed.bank, bed.records).lengths
    assert (broken.rounds, broken.accepted) == (walked.total_rounds, int(walked.accepted.sum()))


# -- scores -----------------------------------------------------------------------------------------------------


def length(rounds: list[int], accepted: list[int]) -> LengthCounts:
    return LengthCounts(4, np.array(rounds), np.array(accepted))


def test_the_error_of_a_paired_difference_is_the_bootstrap_s() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(10, 40, 120)
    before = length(rounds.tolist(), rng.binomial(rounds, 0.7).tolist())
    kept = rng.binomial(before.accepted, 0.8)
    after = length((rounds + (before.accepted - kept) // 2).tolist(), kept.tolist())
    lost = score.loss(before, after)
    draws = rng.multinomial(120, np.full(120, 1 / 120), size=4000)
    ratios = [draws @ one.accepted / (draws @ one.rounds) for one in (before, after)]
    assert lost.error == pytest.approx(float((ratios[0] - ratios[1]).std()), rel=0.1)
    low, high = bootstrap_ratio(before.accepted, before.rounds)
    assert lost.error < (high - low) / 3.92  # type: ignore[operator]
    assert lost.proven
    assert not score.loss(before, before).proven
    assert score.loss(before, before).error == 0
    assert not score.Loss(2.0, 1.91, 0.03).proven  # above 4 %, not four errors
    assert not score.Loss(2.0, 1.93, 0.001).proven  # the other way round
    assert score.Loss(2.0, 1.91, 0.01).proven
    assert score.loss(before, None) == score.Loss(before.value, None, None)


def finding(cause: str, severity: str = "likely") -> dict[str, str]:
    return {"cause": cause, "severity": severity}


def test_first_and_second() -> None:
    missing = finding("contract-missing", "note")
    assert score.told("healthy", [missing], []) == ("healthy", None)
    assert score.told("undecided", [missing], []) == (None, None)
    assert score.told("miswired", [finding("a"), finding("b"), missing], []) == ("a", "b")
    assert score.told("miswired", [finding("a"), finding("a"), finding("b")], []) == ("a", "b")
    assert score.told("healthy", [finding("rates-padded", "note"), missing], ["x"]) == ("healthy", "rates-padded")
    assert score.told("healthy", [missing, finding("rates-padded", "note")], ["rates-padded"])[0] == "rates-padded"
    assert score.told("undecided", [finding("d2t-stale", "note"), missing], []) == ("d2t-stale", None)


@pytest.mark.parametrize(
    ("expected", "first", "confident", "verdict", "scored", "outcome"),
    [
        ("a", "a", True, "miswired", True, "right"),
        ("a", "b", False, "miswired", True, "right"),  # b is another name of it
        ("a", "c", True, "miswired", True, "wrong"),
        ("a", "c", True, "miswired", False, "wrong"),
        ("a", "c", False, "miswired", True, "undecided"),
        ("a", "healthy", False, "healthy", True, "wrong"),
        ("a", "healthy", False, "weak", False, "equivalent"),
        ("a", None, False, "undecided", True, "undecided"),
        ("healthy", "healthy", False, "healthy", False, "cleared"),
        ("healthy", "healthy", False, "weak", False, "cleared"),
        ("healthy", "c", True, "miswired", False, "wrong"),
        ("healthy", "c", False, "miswired", False, "undecided"),
        ("healthy", None, False, "undecided", False, "undecided"),
        ("healthy", "b", False, "undecided", False, "cleared"),
        (None, None, False, "undecided", False, "undecided"),
        (None, "healthy", False, "healthy", False, "undecided"),
        (None, "c", True, "miswired", False, "wrong"),
        (None, "b", True, "miswired", False, "right"),
    ],
)
def test_outcomes(
    expected: str | None, first: str | None, confident: bool, verdict: str, scored: bool, outcome: str
) -> None:
    assert score.outcome(expected, ["b"], first, confident, verdict, scored) == outcome


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "drafter": "d", "mutation": "m", "kind": "T", "expected": "taps-swapped", "first": "taps-swapped",
        "second": None, "confident": True, "accept_before": 2.0, "accept_after": 1.0, "standard_error": 0.01,
        "scored": True, "outcome": "right", "seconds": 60.0,
    }  # fmt: skip
    return usual | changes


def test_the_table_counts_what_it_says() -> None:
    rows = [
        row(),
        row(mutation="n", first="taps-reversed", outcome="wrong"),
        row(
            mutation="o",
            kind="H",
            expected="healthy",
            first="healthy",
            scored=False,
            confident=False,
            outcome="cleared",
        ),
        row(mutation="p", kind="V", scored=False, first="healthy", confident=False, outcome="equivalent"),
    ]
    s = score.summary(rows)
    assert (s["scored"], s["right"], s["confident"], s["confident_wrong"]) == (2, 1, 2, 1)
    assert (s["healthy"], s["cleared"]) == (1, 1)
    text = score.markdown(rows, LEFT_OUT, "make mutations", 7)
    assert "1 with the right cause first (50.0%)" in text
    assert "1 wrong: 50.00% of 2 confident answers" in text
    assert "7 more rows have not been run" in text
    assert "| T taps | 2 | 2 | 1 | 1 | 0 | 0 | 0 | 1 | 1 |" in text
    assert "| taps-swapped | 2 | taps-swapped 1, taps-reversed 1 |" in text
    assert "| d | n | taps-swapped | taps-reversed |" in text
    assert "| d | p |" not in text
    assert all(why in text for why in LEFT_OUT.values())
    assert score.bound(0, 150) == "at most 2.00% of confident answers (3/n, n = 150)"
    good = score.markdown([row()], {}, "make mutations")
    assert "Every scored row has its cause first" in good
    assert "0 wrong: at most" in good


# -- the program ------------------------------------------------------------------------------------------------

PICKED = ("taps + 1", "mask left out", "bonus token dropped", "as it is", "NaN in fc", "1 % of the map shuffled")


class Checked:
    """Stands in for ``check``: right on what it is told, and stopped at the ``stop``-th call."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls, self.stop = 0, stop

    def __call__(self, row: bench.Row, made: Subject) -> dict[str, Any]:
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        expected = row.mutation.expected
        told = [] if expected in (None, "healthy") else [finding(str(expected))]
        return {"verdict": "miswired" if told else "healthy", "confident": bool(told), "findings": told}


@pytest.fixture
def bench_of(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bench, "ALL", [m for m in ALL if m.name in PICKED])
    monkeypatch.setattr(program, "load", lambda options, console: [bed, replace(bed, name="second")])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 0.0)

    def run(place: Path, checked: Checked, *arguments: str) -> int:
        monkeypatch.setattr(bench, "judge", checked)
        (place / "docs").mkdir(parents=True, exist_ok=True)
        return program.main(["--out", str(place / "out"), "--docs", str(place / "docs"), *arguments])

    return run


def test_an_interrupted_bench_goes_on_and_ends_the_same(
    bench_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Checked()
    assert bench_of(tmp_path / "whole", whole) == 0
    assert whole.calls == 8  # two that are measured on each drafter, four that take turns
    assert bench_of(tmp_path / "cut", Checked(stop=4)) == 130
    assert not list((tmp_path / "cut" / "docs").iterdir())
    assert len(list((tmp_path / "cut" / "out" / "rows").iterdir())) == 3
    rest = Checked()
    assert bench_of(tmp_path / "cut", rest) == 0
    assert rest.calls == 5
    assert "8 rows on 2 drafters, 5 to run" in " ".join(capsys.readouterr().err.split())
    for name in ("mutations.jsonl", "mutations.md"):
        assert (tmp_path / "cut" / "docs" / name).read_bytes() == (tmp_path / "whole" / "docs" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "whole" / "docs" / "mutations.jsonl").read_text().splitlines()]
    assert [list(r) for r in rows] == [list(score.KEYS)] * 8
    assert {r["mutation"] for r in rows} == set(PICKED)
    scored = {r["mutation"]: r["scored"] for r in rows}
    assert scored["NaN in fc"]
    assert scored["bonus token dropped"]
    assert not scored["as it is"]


def test_chosen_rows_run_again(bench_of: Any, tmp_path: Path) -> None:
    assert bench_of(tmp_path, Checked()) == 0
    again = Checked()
    assert bench_of(tmp_path, again, "--only", "tiny/taps*", "--only", "NaN*") == 0
    assert again.calls == 2
    assert bench_of(tmp_path, Checked(), "--only", "nothing like it") == 2


def test_a_report_runs_nothing_and_says_what_is_owed(bench_of: Any, tmp_path: Path) -> None:
    assert bench_of(tmp_path, Checked(), "--only", "tiny/taps*") == 0
    reported = Checked()
    assert bench_of(tmp_path, reported, "--report") == 0
    assert reported.calls == 0
    told = (tmp_path / "docs" / "mutations.md").read_text()
    assert len((tmp_path / "docs" / "mutations.jsonl").read_text().splitlines()) == 1
    assert "7 more rows have not been run yet" in told
    assert bench_of(tmp_path, Checked(), "--everywhere", "--only", "second/NaN in fc") == 0
    assert bench_of(tmp_path, Checked(), "--report") == 0  # whichever drafter's turn it is, one row is one
    assert "6 more rows have not been run yet" in (tmp_path / "docs" / "mutations.md").read_text()


def test_a_row_says_why_and_a_crash_is_a_row(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench, "check", crash)
    made = bench.run(bench.Row(bed, by_name("taps + 1")))
    assert (made["first"], made["confident"], made["outcome"]) == (None, False, "undecided")
    assert made["told"]["verdict"] == bench.CRASHED
    assert "a bug" in made["told"]["not_checked"][0]


def test_wrong_arguments_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(["--records", "nobody=x"])
    assert stopped.value.code == 2
    assert "NAME one of" in capsys.readouterr().err
    assert program.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(mutation.name in " ".join(listed.split()) for mutation in ALL)


def test_drafters_that_are_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch, bed: Bed, tmp_path: Path) -> None:
    said: list[str] = []
    there = program.Known("tiny", bed.folder, "t")
    monkeypatch.setattr(program, "DRAFTERS", (program.Known("none", tmp_path / "no", "t"), there))
    monkeypatch.setattr(program.targets, "load", lambda spec: bed.target)
    file = folders.write_lines(tmp_path / "records.jsonl", [r.to_json() for r in bed.records])
    options = SimpleNamespace(drafter={}, records={"t": file})
    console: Any = SimpleNamespace(print=said.append)
    (found,) = program.load(options, console)  # type: ignore[arg-type]
    assert ["none is left out" in line for line in said] == [True]
    assert (found.taps, len(found.records)) == ((1, 2, 3), 8)
