"""Training: it learns, it can be stopped anywhere and gone on with, and it keeps the best.

The target is tiny, the text its own greedy one, a run a few steps long.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import killing
import tiny
from eyas import batches, checkpoint, curve, files, objective, taps
from eyas import train as training
from eyas.errors import InputError, Interrupted, RecordsError, UsageError
from eyas.records import Record
from eyas.target import Target
from eyas.train import Point, Progress, Run, Silent, TrainConfig, noise, run, state, train
from eyas.train.memory import StatesInMemory
from eyas.train.parallel import Workers
from stores import captured

HERE = Path(__file__).parent
torch.set_num_threads(1)

TAPS = (1, 2, 4)
STEPS = 8
EVERY = 3  # so that a state lies at steps 3, 6 and 8
SAME = 1e-5


@cache
@torch.no_grad()
def texts() -> tuple[Record, ...]:
    """Seven greedy records of the tiny target, of three lengths."""
    target, made = tiny.target("llama"), []
    for i in range(7):
        length = 14 + 4 * (i % 3)
        ids = tiny.prompt(5, seed=i)
        while len(ids) < length:
            ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        made.append(Record(np.array(ids, dtype=np.int32), np.arange(length) >= 5, f"greedy/{i}"))
    return tuple(made)


def config(**changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "taps": TAPS,
        "draft_vocab": 60,
        "depths": 2,
        "init": "random",
        "lr": 3e-3,
        "batch": 2,
        "steps": STEPS,
        "measure_every": EVERY,
        "measure_records": 3,
    }
    return TrainConfig(**{**usual, **changes})


class Ears(Silent):
    """Keeps what it hears; ``stop`` is raised after step ``at``."""

    def __init__(self, at: int = 0, stop: BaseException | None = None) -> None:
        self.at, self.stop = at, stop
        self.losses: list[float] = []
        self.points: list[tuple[Point, bool]] = []
        self.steps: list[int] = []
        self.plans: list[dict[str, Any]] = []

    def starting(self, steps: int, plan: dict[str, Any]) -> None:
        self.steps.append(steps)
        self.plans.append(plan)

    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
        self.losses.append(loss)
        if step == self.at and self.stop is not None:
            raise self.stop

    def measured(self, point: Point, best: bool) -> None:
        self.points.append((point, best))


def go(out: Path, asked: TrainConfig | None = None, ears: Ears | None = None, **keywords: Any) -> Progress:
    given = {"target": tiny.target("llama"), "records": texts()[:5], "held_out": texts()[4:], **keywords}
    return train(asked or config(), out=out, listener=ears, **given)


def begun(folder: Path, asked: TrainConfig, target: Target | None = None) -> Run:
    """A run at step 0, outside ``train``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Run(asked, target or tiny.target("llama"), texts()[:5], texts()[4:], folder / "d", folder, {}, {})
    made.begin(resume=False, overwrite=False)
    return made


def place(out: Path) -> state.Saved:
    return state.load(out.with_name(out.name + ".run") / "state.safetensors")


def apart(out: Path, other: Path) -> float:
    """The largest difference of any weight or optimiser moment of two runs."""
    ours, theirs = place(out).tensors, place(other).tensors
    assert set(ours) == set(theirs)
    assert any(name.startswith("optimiser.") for name in ours)
    return max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in ours)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The batches of every run, in order."""
    found: list[tuple[int, ...]] = []
    feed = Run._feed

    def watched(self: Run) -> Iterator[batches.Batch]:
        for batch in feed(self):
            found.append(batch.index)
            yield batch

    monkeypatch.setattr(Run, "_feed", watched)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual run, undisturbed."""
    out = tmp_path_factory.mktemp("whole") / "d"
    go(out)
    return out


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The usual run, interrupted after its first step."""
    out = tmp_path_factory.mktemp("one_step") / "d"
    with pytest.raises(Interrupted):
        go(out, ears=Ears(1, KeyboardInterrupt()))
    return out


@pytest.fixture
def stopped(one_step: Path, tmp_path: Path) -> Path:
    """A copy of it to go on with."""
    shutil.copytree(one_step.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "d"


# -- learning -------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_everything_is_logged(tmp_path: Path) -> None:
    ears = Ears()
    progress = go(tmp_path / "d", config(steps=24, measure_every=12, lr=1e-2), ears)
    assert np.mean(ears.losses[-4:]) < np.mean(ears.losses[:4]) - 0.3
    assert ears.steps == [24]
    assert [p.step for p, _ in ears.points] == [p.step for p in progress.points] == [0, 12, 24]
    assert progress.points[-1].value > progress.points[0].value
    per_epoch = sum(r.n_response_tokens for r in texts()[:5])
    assert progress.tokens == 8 * per_epoch  # 3 batches an epoch
    rows = list(csv.DictReader((tmp_path / "d.run" / "log.csv").read_text().splitlines()))
    assert [int(r["step"]) for r in rows] == list(range(1, 25))
    assert [float(r["loss"]) for r in rows] == pytest.approx(ears.losses, abs=1e-6)
    assert ears.plans[0]["records"] == 5
    assert ears.plans[0]["response_tokens"] == per_epoch


def test_epochs_become_steps(tmp_path: Path, seen: list[tuple[int, ...]]) -> None:
    ears = Ears()
    go(tmp_path / "d", config(steps=None, epochs=2, measure_every=100), ears)
    assert ears.steps == [6]
    assert len(seen) == 6
    for epoch in (seen[:3], seen[3:]):
        assert sorted(i for index in epoch for i in index) == [0, 1, 2, 3, 4]
    assert seen[:3] != seen[3:]


def test_accumulating_is_one_batch_in_parts(tmp_path: Path) -> None:
    """Two records in one batch, or one by one: the tokens are the same, the gradient clipped to the same length."""
    go(tmp_path / "a", config(steps=4, batch=1, accumulate=2))
    go(tmp_path / "b", config(steps=4, batch=2))
    assert place(tmp_path / "a").progress.step == place(tmp_path / "b").progress.step == 4
    assert apart(tmp_path / "a", tmp_path / "b") < 0.05


def test_a_frozen_head_stays_the_targets(tmp_path: Path) -> None:
    go(tmp_path / "d", config(init="ridge", freeze_head=True, steps=3))
    tensors = place(tmp_path / "d").tensors
    target = tiny.target("llama")
    assert torch.equal(tensors["model.lm_head.weight"], target.head.weight[tensors["vocab"]])
    begin = begun(tmp_path / "other", config(init="ridge", freeze_head=True))
    assert not torch.equal(tensors["model.fc.weight"], begin.drafter.fc.weight)


def test_kept_states_train_the_same_up_to_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ears, other = Ears(), Ears()
    go(tmp_path / "on", config(keep_states=True), ears)
    go(tmp_path / "off", config(keep_states=False), other)
    assert ears.losses == pytest.approx(other.losses, rel=0.02)
    assert ears.losses != other.losses  # bf16 did happen
    assert 0 < apart(tmp_path / "on", tmp_path / "off") < 0.1


def test_kept_states_spare_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target, memory = tiny.target("llama"), StatesInMemory(torch.bfloat16)
    first, second = batches.collate(texts(), (0, 1)), batches.collate(texts(), (1, 0))
    wanted = taps.run(target, second.input_ids, second.lengths, TAPS)
    memory.run(target, first.input_ids, first.lengths, TAPS)
    monkeypatch.setattr(memory, "_source", None)
    found = memory.run(target, second.input_ids, second.lengths, TAPS)
    for row, length in enumerate(second.lengths.tolist()):
        for ours, theirs in ((found.taps, wanted.taps), (found.last, wanted.last)):
            assert torch.allclose(ours[row, :length], theirs[row, :length], rtol=1e-2, atol=1e-3)
            assert not ours[row, length:].any()
        logits = target.logits(wanted.last[row, :length])
        assert found.truth is not None
        assert found.truth[row, :length].tolist() == logits.argmax(-1).tolist()


def test_kept_held_out_states_measure_the_same(tmp_path: Path) -> None:
    ears, other = Ears(), Ears()
    go(tmp_path / "on", config(keep_states=True, steps=1), ears)
    go(tmp_path / "off", config(keep_states=False, steps=1), other)
    first, theirs = ears.points[0][0], other.points[0][0]  # before any step, so the drafters are one
    assert (first.value, first.conditional) == (theirs.value, theirs.conditional)


# -- stopping early, sampling, several processes -----------------------------------------------------------------


def test_patience_stops_when_nothing_gets_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1.2, 1.3, 1.25, 1.3, 1.29, 1.28])
    scored = run.point
    monkeypatch.setattr(run, "point", lambda *given: replace(scored(*given), value=next(values)))
    progress = go(tmp_path / "d", config(steps=40, patience=3))
    assert [p.step for p in progress.points] == [0, 3, 6, 9, 12]  # best at 3, then three in a row without a better one
    assert progress.step == 12


def test_a_sample_of_later_slots_trains_another_way_to_the_same_end(tmp_path: Path) -> None:
    ears, other = Ears(), Ears()
    go(tmp_path / "all", config(steps=40, measure_every=100), ears)
    go(tmp_path / "few", config(steps=40, measure_every=100, later_share=0.4), other)
    assert ears.losses != other.losses
    fall, other_fall = (np.mean(e.losses[:5]) - np.mean(e.losses[-5:]) for e in (ears, other))
    assert fall > 0.2
    assert other_fall == pytest.approx(fall, rel=0.25)


WORKER = """
import sys
from pathlib import Path
import torch
import test_train as t
torch.set_num_threads(1)
progress = t.go(Path(sys.argv[1]), t.config(**eval(sys.argv[2])))
"""


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """Batches of 2 over five records leave a last one of a single row, which the second process sits out."""
    changes = {"batch": 2, "later_share": 0.5, "accumulate": 2, "init": "ridge", "noise": 0.1}
    go(tmp_path / "one", config(**changes))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "--no-python", sys.executable, "-c", WORKER]
    done = subprocess.run(
        [*command, str(tmp_path / "two"), repr(changes)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert place(tmp_path / "two").progress.step == STEPS
    assert apart(tmp_path / "two", tmp_path / "one") < SAME
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert set(ours) == set(theirs)
    assert all(torch.allclose(ours[n].float(), theirs[n].float(), atol=1e-2) for n in ours)  # one bf16 step


def test_a_batch_too_small_to_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "count", 4)
    with pytest.raises(UsageError, match="batch of 2 cannot be split over 4"):
        go(tmp_path / "d")


online = taps.run


def rounded(target: Target, input_ids: Tensor, lengths: Tensor, tap_list: Sequence[int]) -> taps.States:
    """Online states, passed through bf16 where a store does: every tap, the last before the norm."""
    found = online(target, input_ids, lengths, (*tap_list, target.num_layers)).taps.to(torch.bfloat16).float()
    return taps.States(found[..., : -target.hidden_size], target.norm(found[..., -target.hidden_size :]))


@pytest.mark.parametrize("init", ["random", "ridge"])
def test_offline_is_online_passed_through_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str) -> None:
    """The same batches, losses, measurements and weights. Only what the batch's padding rounds otherwise may differ."""
    stored, asked = captured(tmp_path / "s", texts()), config(init=init)
    ears, other, exact = Ears(), Ears(), Ears()
    go(tmp_path / "offline", asked, ears, stored=stored)
    go(tmp_path / "exact", asked, exact)
    monkeypatch.setattr(taps, "run", rounded)
    go(tmp_path / "online", asked, other)
    assert ears.losses == pytest.approx(other.losses, abs=1e-5)
    assert [p.value for p, _ in ears.points] == [p.value for p, _ in other.points]
    assert apart(tmp_path / "offline", tmp_path / "online") < 1e-3
    assert exact.losses != pytest.approx(other.losses, abs=1e-5)  # rounding is seen at that scale


def test_offline_never_runs_the_target(tmp_path: Path) -> None:
    stored, usual = captured(tmp_path / "s", texts()), tiny.target("llama")
    hollow = copy.deepcopy(usual.model)
    hollow.model.layers = torch.nn.ModuleList()
    ends = Target("ends", None, hollow, None, usual.config, ends_only=True)
    ears, other = Ears(), Ears()
    go(tmp_path / "ends", config(init="ridge"), ears, target=ends, stored=stored)
    go(tmp_path / "full", config(init="ridge"), other, stored=stored)
    assert ears.losses == other.losses
    assert apart(tmp_path / "ends", tmp_path / "full") == 0


def test_offline_is_resumed_with_the_same_states(tmp_path: Path) -> None:
    stored = captured(tmp_path / "s", texts())
    with pytest.raises(Interrupted):
        go(tmp_path / "d", ears=Ears(5, KeyboardInterrupt()), stored=stored)
    coarse = captured(tmp_path / "t", texts(), dtype="fp8")
    for other in (None, coarse):
        with pytest.raises(UsageError, match="states are not those of the interrupted run"):
            go(tmp_path / "d", resume=True, stored=other)
    go(tmp_path / "d", resume=True, stored=stored)
    go(tmp_path / "whole", stored=stored)
    assert apart(tmp_path / "whole", tmp_path / "d") < SAME


def test_records_without_states_are_refused_at_once(tmp_path: Path) -> None:
    stored = captured(tmp_path / "s", texts()[:4])
    with pytest.raises(InputError, match="records are not in"):
        go(tmp_path / "d", stored=stored)
    with pytest.raises(UsageError, match="does not hold tap 3"):
        go(tmp_path / "d", config(taps=(1, 3)), stored=captured(tmp_path / "t", texts()))


# -- starts ---------------------------------------------------------------------------------------------------


def test_the_ridge_start_beats_a_random_one(tmp_path: Path) -> None:
    target, made, held = tiny.nearly_linear(), tiny.tiny_records(20), tiny.tiny_records(6, seed=99)
    batch = batches.collate(held, range(len(held)))
    entropy, hits = {}, {}
    for init in ("ridge", "random"):
        asked = config(init=init, batch=8, draft_vocab=150)
        (tmp_path / init).mkdir()
        start = Run(asked, target, made, held, tmp_path / "d", tmp_path / init, {}, {})
        start.begin(resume=False, overwrite=False)
        with torch.no_grad():
            found = start._loss(batch)
        entropy[init], hits[init] = float(found.sums[0] / found.counts[0]), int(found.hits[0])
    assert entropy["ridge"] < entropy["random"] - 0.3
    assert hits["ridge"] > hits["random"] + 10


def unrolled(drafter: Any) -> list[Tensor]:
    target, batch = tiny.target("llama"), batches.collate(texts(), range(5))
    states = taps.run(target, batch.input_ids, batch.lengths, TAPS)
    slots = objective.trained_slots(batch.loss_mask, 3)
    with torch.no_grad():
        found = objective.unroll(drafter, states.taps, batch.input_ids, slots)
        return [drafter.logits(s[slots.valid[:, :, k]]) for k, s in enumerate(found)]


def test_a_checkpoint_is_a_start_of_the_same_function(tmp_path: Path) -> None:
    go(tmp_path / "d", config(init="ridge", steps=3))
    loaded = checkpoint.load(checkpoint.read(tmp_path / "d"), tiny.target("llama"))
    begin = begun(tmp_path / "again", config(init=str(tmp_path / "d")))
    assert not torch.allclose(begin.drafter.tap_scale, torch.ones(()))
    assert not torch.allclose(begin.drafter.fc.weight, loaded.fc.weight, atol=1e-2)
    for ours, theirs in zip(unrolled(begin.drafter), unrolled(loaded), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all(p.requires_grad for p in begin.drafter.parameters())


def test_where_a_start_lay_stays_on_this_machine(tmp_path: Path) -> None:
    go(tmp_path / "first")
    go(tmp_path / "second", config(init=str(tmp_path / "first"), steps=1))
    written = (tmp_path / "second" / "provenance.json").read_text()
    assert str(tmp_path) not in written
    assert json.loads(written)["config"]["init"].endswith("first")


def test_a_checkpoint_of_other_taps_is_refused_as_a_start(tmp_path: Path) -> None:
    go(tmp_path / "d", config(steps=1))
    with pytest.raises(UsageError, match=r"was trained on taps \[1, 2, 4\], not \[1, 2, 3\]") as caught:
        go(tmp_path / "e", config(init=str(tmp_path / "d"), taps=(1, 2, 3)))
    assert caught.value.way_out == "Pass --taps 1,2,4."


ALL = {
    "layers": 2,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_before_residual": True,
    "norm_output": True,
    "own_embedding": True,
}


def test_a_run_of_every_switch_is_saved_as_what_it_was(tmp_path: Path) -> None:
    ears = Ears()
    go(tmp_path / "d", config(**ALL, steps=12, measure_every=12, lr=1e-2), ears)
    assert np.mean(ears.losses[-4:]) < np.mean(ears.losses[:4]) - 0.2
    assert len(ears.plans[0]["sglang_cannot"]) == 2
    target = tiny.target("llama")
    read = checkpoint.read(tmp_path / "d")
    assert [f.cause for f in checkpoint.inspect(read, target)] == ["engine-cannot-express"]
    assert read.contract is not None
    words = {name: read.contract[name] for name in ("fc_norm", "residual", "feedback", "embedding")}
    assert words == {
        "fc_norm": "joint, then each",
        "residual": "after hidden_norm",
        "feedback": "after the last norm",
        "embedding": "own",
    }
    loaded = checkpoint.load(read, target)
    assert loaded.config.num_hidden_layers == 2
    assert not torch.allclose(loaded.embedding, target.embedding, atol=1e-2), "the embedding was trained"
    trained = place(tmp_path / "d").drafter(target.embedding)
    if place(tmp_path / "d").progress.best == place(tmp_path / "d").progress.points[-1]:
        trained.fc.weight.data.mul_(trained.tap_scale)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, trained.get_parameter(name).bfloat16().float()), name


def test_a_checkpoint_keeps_its_switches_as_a_start(tmp_path: Path) -> None:
    go(tmp_path / "d", config(fc_norm=True, steps=1))
    begin = begun(tmp_path / "e", config(init=str(tmp_path / "d")))
    assert begin.drafter.config.fc_norm
    loaded = checkpoint.load(checkpoint.read(tmp_path / "d"), tiny.target("llama"))
    for ours, theirs in zip(unrolled(begin.drafter), unrolled(loaded), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="has norm_output False, not True"):
        begun(tmp_path / "f", config(init=str(tmp_path / "d"), norm_output=True))


def test_noise_is_within_its_bounds_and_follows_its_seed() -> None:
    batch = batches.collate(texts(), range(3))
    tapped = taps.run(tiny.target("llama"), batch.input_ids, batch.lengths, TAPS).taps
    tapped[..., 0] *= 1000.0
    seeds = [(4, row) for row in range(3)]
    noisy = noise.uniform(tapped, batch.lengths, 0.1, seeds)
    for row, n in enumerate(batch.lengths.tolist()):
        moved, size = (noisy - tapped)[row, :n], tapped[row, :n].pow(2).mean(0).sqrt()
        assert float((moved.abs() / size).max()) <= 0.1 + 1e-4
        spread = float((moved / size).pow(2).mean().sqrt())
        assert spread == pytest.approx(0.1 / 3**0.5, rel=0.05)
        assert float((moved / size).mean()) == pytest.approx(0.0, abs=0.01)
        alone = noise.uniform(tapped[row : row + 1, :n], batch.lengths[row : row + 1], 0.1, seeds[row : row + 1])
        assert torch.equal(alone[0], noisy[row, :n])
        assert torch.equal(noisy[row, n:], tapped[row, n:])
    assert not torch.equal(noisy, noise.uniform(tapped, batch.lengths, 0.1, [(5, row) for row in range(3)]))


def test_noise_is_another_one_for_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, uniform = list[tuple[int, ...]](), noise.uniform

    def watched(tapped: Tensor, lengths: Tensor, amount: float, seeds: Sequence[tuple[int, ...]]) -> Tensor:
        drawn.extend(seeds)
        return uniform(tapped, lengths, amount, seeds)

    monkeypatch.setattr(noise, "uniform", watched)
    for seed in (0, 1):
        go(tmp_path / str(seed), config(noise=0.5, steps=2, batch=1, accumulate=2, seed=seed))
    assert len(set(drawn)) == len(drawn) == 8


def test_noise_changes_the_loss_and_not_the_measurement(tmp_path: Path) -> None:
    ears, other = Ears(), Ears()
    go(tmp_path / "on", config(noise=0.5, steps=2), ears)
    go(tmp_path / "off", config(steps=2), other)
    assert ears.losses[0] != other.losses[0]
    assert ears.points[0] == other.points[0]


# -- stopped and gone on with ---------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep_states": True},
        {"batch": 1, "accumulate": 2},
        {"init": "ridge", "freeze_head": True},
        {**ALL, "init": "target", "noise": 0.1, "batch": 1, "accumulate": 2},
    ],
    ids=["plain", "keep_states", "accumulate", "freeze_head", "everything"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, seen: list[tuple[int, ...]], changes: dict[str, Any]
) -> None:
    asked = config(**changes)
    whole = go(tmp_path / "whole", asked)
    undisturbed = seen.copy()
    seen.clear()
    with pytest.raises(Killed):
        go(tmp_path / "killed", asked, Ears(7, Killed()))
    assert place(tmp_path / "killed").progress.step == 6
    assert seen == undisturbed[: 7 * asked.accumulate]
    seen.clear()
    resumed = go(tmp_path / "killed", asked, resume=True)
    assert seen == undisturbed[6 * asked.accumulate :]
    assert apart(tmp_path / "whole", tmp_path / "killed") < SAME
    assert resumed.step == whole.step == STEPS
    assert resumed.tokens == whole.tokens
    assert [(p.step, p.tokens, p.value) for p in resumed.points] == [(p.step, p.tokens, p.value) for p in whole.points]
    ours, theirs = (checkpoint.load(checkpoint.read(tmp_path / n), tiny.target("llama")) for n in ("killed", "whole"))
    assert torch.allclose(ours.fc.weight, theirs.fc.weight, rtol=0.02, atol=1e-3)


def child(folder: str, shares: list[float]) -> None:
    """Runs killed at each share of an undisturbed one's events; the maths of a step touches no file."""
    watch = killing.Watch(("/eyas/train/", "/eyas/files.py", "/eyas/checkpoint/"))
    for module, name in ((objective, "loss"), (objective, "teach"), (curve, "measure"), (taps, "run")):
        setattr(module, name, watch.unwatched(getattr(module, name)))
    watch.over(lambda out: go(out / "d"), Path(folder), shares)


def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    n = int(os.environ.get("EYAS_KILLS", "6"))
    told = killing.in_a_child("test_train", tmp_path, killing.moments(n))
    assert told["status"] == [killing.KILLED] * n
    steps = []
    for i in range(n):
        out = tmp_path / f"killed-{i}" / "d"
        saved = (out.parent / "d.run" / "state.safetensors").exists()
        steps.append(place(out).progress.step if saved else 0)
        if out.exists():
            checkpoint.load(checkpoint.read(out), tiny.target("llama"))  # what is there is whole
        go(out, resume=saved, overwrite=not saved)  # the lock went with the process
        assert apart(tmp_path / "whole" / "d", out) < SAME
        assert sorted(p.name for p in out.parent.iterdir()) == ["d", "d.run"]
        left = sorted(p.name for p in (out.parent / "d.run").iterdir())
        assert left == [".lock", "log.csv", "state.safetensors", "tensorboard"]
    assert len(set(steps)) > 1, "all were killed at one place"


def test_an_interrupted_run_says_so_and_keeps_the_step(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(Interrupted, match=r"Stopped at step 5 of 8; the place is kept in .*d\.run") as caught:
        go(tmp_path / "d", ears=Ears(5, KeyboardInterrupt()))
    assert caught.value.exit_code == 130
    assert "--resume" in caught.value.way_out
    assert place(tmp_path / "d").progress.step == 5
    go(tmp_path / "d", resume=True)
    assert apart(whole, tmp_path / "d") < SAME


def test_an_interrupt_inside_a_step_loses_nothing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = torch.optim.AdamW.step, 0

    def interrupted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        value = step(self, *arguments)
        if calls == 5:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        with pytest.raises(Interrupted):
            go(tmp_path / "d")
    go(tmp_path / "d", resume=True)
    assert apart(whole, tmp_path / "d") < SAME


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(0, id="first"),
        pytest.param(6, id="middle"),
        pytest.param(8, id="last"),
    ],
)
def test_an_interrupted_measurement_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    measure, points = curve.measure, [0, 3, 6, 8]
    left = [points.index(at)]

    def interrupted(*arguments: Any, **keywords: Any) -> curve.Measured:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return measure(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(curve, "measure", interrupted)
        with pytest.raises(Interrupted):
            go(tmp_path / "d")
    assert [p.step for p in go(tmp_path / "d", resume=True).points] == points


def test_an_interrupt_while_the_best_is_written_does_not_lose_it(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = place(whole).progress.best
    assert best is not None
    save = checkpoint.save

    def interrupted(drafter: Any, out: Path, contract: Any, extra: dict[str, Any]) -> None:
        if extra["curves.json"]["training"][-1]["step"] == best.step:
            raise KeyboardInterrupt
        save(drafter, out, contract, extra)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupted)
        with pytest.raises(Interrupted):
            go(tmp_path / "d")
    go(tmp_path / "d", resume=True)
    written = json.loads((tmp_path / "d" / "curves.json").read_text())["training"][-1]
    assert (written["step"], written["value"]) == (best.step, best.value)


def test_a_finished_run_has_nothing_left_to_do(whole: Path, seen: list[tuple[int, ...]]) -> None:
    ears, finished = Ears(), place(whole).progress
    assert go(whole, None, ears, resume=True) == finished
    assert seen == []
    assert ears.points == []


def test_the_log_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        go(tmp_path / "d", ears=Ears(5, Killed()))
    go(tmp_path / "d", resume=True)
    rows = list(csv.DictReader((tmp_path / "d.run" / "log.csv").read_text().splitlines()))
    assert [int(r["step"]) for r in rows] == list(range(1, STEPS + 1))


# -- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lr": 1e-4}, "lr 0.003 then, 0.0001 now"),
        ({"depths": 3, "seed": 1}, "depths 2 then, 3 now, seed 0 then, 1 now"),
        ({"taps": (1, 2, 3)}, "taps [1, 2, 4] then, [1, 2, 3] now"),
        ({"steps": 9}, "steps 8 then, 9 now"),
        ({"keep_states": True}, "keep_states False then, True now"),
    ],
)
def test_going_on_with_other_options_is_refused(one_step: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        go(one_step, config(**changes), resume=True)
    assert caught.value.message == f"This is not the run that was interrupted: {told}."
    assert caught.value.way_out
    assert place(one_step).progress.step == 1


def test_going_on_with_other_records_is_refused(one_step: Path) -> None:
    for other in (texts()[:4], texts()[1:6], texts()[:5][::-1]):
        with pytest.raises(UsageError, match="records are not those of the interrupted run"):
            go(one_step, resume=True, records=other)


def test_going_on_with_another_target_is_refused(stopped: Path) -> None:
    with pytest.raises(UsageError):
        go(stopped, resume=True, target=tiny.target("qwen2"))


def test_going_on_in_another_precision_is_refused(stopped: Path) -> None:
    same = tiny.target("llama")
    rough = replace(same, model=copy.deepcopy(same.model).bfloat16())
    assert rough.embedding.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="precision of the target is not that of the interrupted run"):
        go(stopped, resume=True, target=rough)


def test_going_on_with_other_held_out_records_is_refused(stopped: Path) -> None:
    with pytest.raises(UsageError):
        go(stopped, resume=True, held_out=texts()[:2])


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Nothing to resume"):
        go(tmp_path / "d", resume=True)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_damaged_state_is_refused(stopped: Path, keep: int) -> None:
    path = stopped.with_name("d.run") / "state.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="cannot be resumed from") as caught:
        go(stopped, resume=True)
    assert "--overwrite" in caught.value.way_out


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    go(tmp_path / "d", config(steps=1))
    before = place(tmp_path / "d").tensors
    with pytest.raises(UsageError, match="exists already") as caught:
        go(tmp_path / "d", config(steps=2))
    assert "--resume" in caught.value.way_out
    assert "--overwrite" in caught.value.way_out
    assert torch.equal(place(tmp_path / "d").tensors["model.fc.weight"], before["model.fc.weight"])
    assert go(tmp_path / "d", config(steps=2), overwrite=True).step == 2
    rows = (tmp_path / "d.run" / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2"]


def test_an_unfinished_run_is_not_overwritten_unasked(stopped: Path) -> None:
    stopped.rename(stopped.with_name("moved"))
    with pytest.raises(UsageError, match="holds an unfinished run"):
        go(stopped)
    assert place(stopped).progress.step == 1
    assert go(stopped, config(steps=2), overwrite=True).step == 2


def test_a_second_run_on_the_folder_is_refused(tmp_path: Path) -> None:
    refused: list[UsageError] = []

    class Rival(Ears):
        def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
            for resume in (True, False):
                with pytest.raises(UsageError) as caught:
                    go(tmp_path / "d", resume=resume, overwrite=not resume)
                refused.append(caught.value)

    assert go(tmp_path / "d", config(steps=1), Rival()).step == 1
    assert len(refused) == 2
    assert all("Another run is writing to" in error.message for error in refused)
    with files.only_writer(tmp_path / "d.run"), pytest.raises(UsageError, match="Another run"):
        go(tmp_path / "d", resume=True)


def test_no_held_out_records(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="No held-out records"):
        go(tmp_path / "d", held_out=[])
    assert not list(tmp_path.iterdir())


def test_taps_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Tap 6 does not exist"):
        go(tmp_path / "d", config(taps=(1, 2, 6)))


# -- the best -------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """A run that is spoilt after step 5 leaves the checkpoint of a step before."""
    folder = tmp_path / "d.run"
    folder.mkdir()
    target, made = tiny.target("llama"), texts()[:5]
    spoilt = Run(config(init="ridge", measure_every=2), target, made, made, tmp_path / "d", folder, {}, {})
    spoilt.begin(resume=False, overwrite=False)
    kept: dict[str, Tensor] = {}

    class Vandal(Ears):
        def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
            if step == 5:
                with torch.no_grad():
                    spoilt.drafter.lm_head.weight.neg_()

        def measured(self, point: Point, best: bool) -> None:
            super().measured(point, best)
            if best:
                kept.update({n: p.detach().clone() for n, p in spoilt.drafter.named_parameters()})
                kept["fc.weight"] *= spoilt.drafter.tap_scale

    ears = Vandal()
    spoilt.go(ears)
    best = spoilt.progress.best
    values = {p.step: p.value for p, _ in ears.points}
    assert best is not None
    assert best.step in (0, 2, 4)
    assert best.value == max(values.values()) > values[8] + 0.05
    assert [p.step for p, was in ears.points if was][-1] == best.step
    loaded = checkpoint.load(checkpoint.read(tmp_path / "d"), target)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, kept[name].bfloat16().float()), name
    again = curve.measure(loaded, target, spoilt.held_out, depths=4).lengths[3].value
    assert again == pytest.approx(best.value, abs=0.15)  # bf16 may turn a close call
    curves = json.loads((tmp_path / "d" / "curves.json").read_text())
    assert curves["training"][-1] == best.to_json()
    assert curves["accept_length"][3]["value"] == best.value


def test_a_checkpoint_carries_its_contract(tmp_path: Path) -> None:
    go(tmp_path / "d", config(steps=1), facts={"template_sha256": "ab"}, provenance_arguments={"lr": 1})
    read = checkpoint.read(tmp_path / "d")
    assert read.contract is not None
    assert checkpoint.inspect(read, tiny.target("llama")) == []
    assert read.contract["taps"] == list(TAPS)
    assert read.contract["template_sha256"] == "ab"
    assert read.contract["depths"] == 2
    assert read.contract["vocab_sha256"] == checkpoint.vocab_sha256(checkpoint.load(read, tiny.target("llama")).vocab)
    source = json.loads((tmp_path / "d" / "provenance.json").read_text())
    assert source["config"]["taps"] == list(TAPS)
    assert source["data"]["records"] == 5


def test_off_policy_text_trains_too(tmp_path: Path) -> None:
    made = tiny.tiny_records(4)
    progress = go(tmp_path / "d", config(steps=2), records=made, held_out=made[:2])
    assert [p.low for p in progress.points] == [None, None]
    assert all(p.value >= 1 for p in progress.points)
    assert json.loads((tmp_path / "d" / "curves.json").read_text())["walk"] is None


# -- where batches and minutes run out ------------------------------------------------------------------------


def test_an_epoch_of_fewer_batches_than_one_step_takes_goes_on_the_same(
    tmp_path: Path, seen: list[tuple[int, ...]]
) -> None:
    asked, made = config(steps=3, batch=1, accumulate=5, measure_every=1), texts()[:2]
    go(tmp_path / "whole", asked, records=made)
    undisturbed = seen.copy()
    seen.clear()
    with pytest.raises(Killed):
        go(tmp_path / "killed", asked, Ears(2, Killed()), records=made)
    seen.clear()
    go(tmp_path / "killed", asked, records=made, resume=True)
    assert len(undisturbed) == 3 * 5
    assert seen == undisturbed[5:]


def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time moves by 0.05 s whenever it is asked for."""
    now = [0.0]

    def ticking() -> float:
        now[0] += 0.05
        return now[0]

    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=ticking))


def timed(**changes: Any) -> TrainConfig:
    return config(steps=None, epochs=20, minutes=0.04, measure_every=1000, measure_records=1, **changes)


def test_minutes_set_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    ears = Ears()
    progress = go(tmp_path / "d", timed(), ears)
    assert ears.steps == [60, 23]  # ten steps took 21 ticks of 0.05 s; 2.4 s were asked for
    assert progress.step == 23


def test_minutes_survive_an_early_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    with pytest.raises(Interrupted):
        go(tmp_path / "d", timed(), Ears(8, KeyboardInterrupt()))
    ears = Ears()
    go(tmp_path / "d", timed(), ears, resume=True)
    assert ears.steps[-1] == 19  # the two steps after step eight took 5 ticks: a coarser pace than ten give


def test_minutes_override_few_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch)
    assert go(tmp_path / "d", timed().model_copy(update={"epochs": 1})).step == 23


def test_the_public_names_are_these() -> None:
    assert sorted(training.__all__) == ["Listener", "Point", "Progress", "Run", "Silent", "TrainConfig", "train"]


def texts_are_the_targets_own(made: Sequence[Record]) -> bool:
    return curve.measure(tiny.drafter(), tiny.target(), made, depths=1).on_policy


def test_the_text_of_these_tests_is_on_policy() -> None:
    assert texts_are_the_targets_own(texts())
