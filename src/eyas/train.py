"""Training: a start, then steps over batches of records, measured as it goes, resumable at any moment.

``OUT`` is the best checkpoint so far, replaced whole. ``OUT.run`` holds what a resumed run needs (weights, optimiser,
place) and the logs. The order of batches is a function of seed and epoch, so a resumed run meets the same ones.

Letters: B batch, T positions, C taps, D target width, K depths.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from eyas import batches, checkpoint, curve, files, objective, provenance, starts, taps, vocab
from eyas.contract import Contract, declared
from eyas.drafter import Drafter
from eyas.errors import Interrupted, RecordsError, UsageError
from eyas.records import Record
from eyas.target import Target
from eyas.vocab import DraftVocab

RIDGE_TOKENS = 20_000  # supervised tokens the closed-form start looks at
JUDGED = 4  # drafted tokens at which checkpoints compete


class TrainConfig(BaseModel):
    """Every choice of a run; a resumed run must bring the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taps: tuple[int, ...]
    draft_vocab: int = Field(8192, gt=0)
    depths: int = Field(5, ge=1, le=16)
    depth_decay: float = Field(0.8, gt=0, le=1)
    init: str = "ridge"
    """ridge, random, or the folder of a checkpoint."""
    freeze_head: bool = False
    lr: float = Field(5e-4, gt=0)
    warmup: float = Field(0.03, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    batch: int = Field(4, gt=0)
    accumulate: int = Field(1, gt=0)
    epochs: float = Field(1.0, gt=0)
    steps: int | None = Field(None, gt=0)
    """Optimiser steps in all; given, it overrides ``epochs``."""
    measure_every: int = Field(200, gt=0)
    measure_records: int = Field(48, gt=0)
    keep_states: bool = False
    """Hold the target's states in memory (bf16) after the first epoch, so that later ones skip the target."""
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One measurement along the way."""

    step: int
    tokens: int
    minutes: float
    value: float
    low: float | None
    high: float | None
    conditional: list[float | None]

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class Progress:
    """Where a run is; with weights and optimiser all that a resumed run needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    points: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point | None:
        return max(self.points, key=lambda p: p.value, default=None)


class Listener(Protocol):
    """Hears of a run; the command line draws it, tests record it."""

    def starting(self, steps: int, plan: dict[str, Any]) -> None: ...
    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None: ...
    def measured(self, point: Point, best: bool) -> None: ...


class Silent:
    def starting(self, steps: int, plan: dict[str, Any]) -> None:
        pass

    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
        pass

    def measured(self, point: Point, best: bool) -> None:
        pass


def train(
    config: TrainConfig,
    target: Target,
    records: Sequence[Record],
    held_out: Sequence[Record],
    out: Path,
    *,
    facts: dict[str, Any] | None = None,
    provenance_arguments: dict[str, object] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Progress:
    """Train a drafter for ``target`` and leave the best one, by held-out accept length, in ``out``."""
    if not held_out:
        raise RecordsError("No held-out records to measure on.", way_out="Prepare with a held-out share above zero.")
    listener = listener or Silent()
    run_folder = out.with_name(out.name + ".run")
    if not resume:
        files.refuse_existing(out, overwrite=overwrite, resume_hint=True)
    with files.only_writer(run_folder):
        run = Run(config, target, records, held_out, out, run_folder, facts or {}, provenance_arguments or {})
        run.begin(resume=resume, overwrite=overwrite)
        listener.starting(run.total_steps, run.plan())
        run.go(listener)
    return run.progress


class Run:
    """One run of training: its drafter, its optimiser and its place."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        records: Sequence[Record],
        held_out: Sequence[Record],
        out: Path,
        folder: Path,
        facts: dict[str, Any],
        arguments: dict[str, object],
    ) -> None:
        self.config = config
        self.target = target
        self.records = records
        self.held_out = held_out[: config.measure_records]
        self.out, self.folder = out, folder
        self.facts, self.arguments = facts, arguments
        self.tap_list = taps.validate(config.taps, target.num_layers)
        self.steps_per_epoch = math.ceil(len(records) / (config.batch * config.accumulate))
        self.total_steps = config.steps or max(1, round(config.epochs * self.steps_per_epoch))
        self.weights = [config.depth_decay**k for k in range(config.depths)]
        self.progress = Progress()
        self.states = StatesInMemory() if config.keep_states else None

    # -- start and resume -------------------------------------------------------------------------------------

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        saved = self.folder / "state.safetensors"
        if resume and not saved.exists():
            raise UsageError(
                f"Nothing to resume in {self.folder}.", way_out="Run without --resume to start a new run."
            )
        if not resume and saved.exists() and not overwrite:
            raise UsageError(
                f"{self.folder} holds an unfinished run.", way_out="Pass --resume to go on with it, or --overwrite."
            )
        if resume:
            self._load_state(saved)
        else:
            for old in ("log.csv", "state.safetensors"):
                (self.folder / old).unlink(missing_ok=True)
            self.drafter = self._start()
            self.optimiser = self._optimiser()

    def _start(self) -> Drafter:
        config = self.config
        if config.init not in ("ridge", "random"):
            found = checkpoint.read(Path(config.init))
            drafter = checkpoint.load(found, self.target).train()
            if drafter.config.taps != self.tap_list:
                raise UsageError(
                    f"{config.init} was trained on taps {list(drafter.config.taps)}, not {list(self.tap_list)}.",
                    way_out=f"Pass --taps {','.join(map(str, drafter.config.taps))}.",
                )
            drafter.requires_grad_(True)
            self._rescale(drafter)
            return self._head_frozen(drafter)
        words = vocab.by_frequency(token_counts(self.records, self.target.vocab_size), config.draft_vocab)
        shape = starts.config_for(self.target, self.tap_list, len(words))
        rows = starts.sample_rows(self.target, self.tap_list, self._first_batches())
        if config.init == "ridge":
            drafter = starts.ridge(self.target, shape, words, rows, config.seed)
        else:
            drafter = starts.random(self.target, shape, words, config.seed)
            starts.scale_taps(drafter, rows[0])
        return self._head_frozen(drafter)

    def _rescale(self, drafter: Drafter) -> None:
        """Give a loaded drafter scaled taps, its fc undone by the same scale: the same function."""
        sample = starts.sample_rows(self.target, self.tap_list, self._first_batches(limit=4000))[0]
        starts.scale_taps(drafter, sample)
        with torch.no_grad():
            drafter.fc.weight.div_(drafter.tap_scale)

    def _first_batches(self, limit: int = RIDGE_TOKENS) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        tokens = 0
        for index in self._epoch(0):
            if tokens >= limit:
                return
            batch = batches.collate(self.records, index)
            tokens += int(batch.loss_mask.sum())
            yield batch.input_ids, batch.lengths, batch.loss_mask

    def _head_frozen(self, drafter: Drafter) -> Drafter:
        drafter.lm_head.requires_grad_(not self.config.freeze_head)
        return drafter

    def _optimiser(self) -> torch.optim.AdamW:
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.config.lr, betas=(0.9, 0.95), weight_decay=self.config.weight_decay)

    # -- the loop ---------------------------------------------------------------------------------------------

    def go(self, listener: Listener) -> None:
        """Steps until the end; measured every so often; interrupted at a step's edge, with the place kept."""
        writer = SummaryWriter(self.folder / "tensorboard")
        try:
            if not self.progress.points:
                self._measure(listener, writer)
            feed = self._feed()
            while self.progress.step < self.total_steps:
                self._step(feed, listener, writer)
                if self.progress.step % self.config.measure_every == 0 or self.progress.step == self.total_steps:
                    self._measure(listener, writer)
        except KeyboardInterrupt as error:
            self._save_state()
            raise Interrupted(
                f"Stopped at step {self.progress.step} of {self.total_steps}; the place is kept in {self.folder}.",
                way_out="Run the same command with --resume to go on.",
            ) from error
        finally:
            writer.close()

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        return batches.shuffled(self.records, self.config.batch, seed=self.config.seed, epoch=epoch)

    def _feed(self) -> Iterator[batches.Batch]:
        """Batches from the current place on, epoch after epoch."""
        done = self.progress.step * self.config.accumulate
        per_epoch = self.steps_per_epoch * self.config.accumulate
        epoch, skip = divmod(done, per_epoch)
        while True:
            order = self._epoch(epoch)
            order += order[: per_epoch - len(order)]  # a whole number of steps an epoch
            for index in order[skip:]:
                yield batches.collate(self.records, index)
            epoch, skip = epoch + 1, 0

    def _step(self, feed: Iterator[batches.Batch], listener: Listener, writer: SummaryWriter) -> None:
        began = time.perf_counter()
        config, progress = self.config, self.progress
        for group in self.optimiser.param_groups:
            group["lr"] = config.lr * self._schedule(progress.step)
        value, hits, slots, tokens = 0.0, 0, 0, 0
        for _ in range(config.accumulate):
            batch = next(feed).to(self.drafter.device)
            loss = self._loss(batch)
            (loss.value / config.accumulate).backward()  # type: ignore[no-untyped-call]
            value += float(loss.value.detach()) / config.accumulate
            hits, slots = hits + int(loss.hits[0]), slots + int(loss.slots[0])
            tokens += int(batch.loss_mask.sum())
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        hit_rate = hits / max(slots, 1)
        self._log(progress.step, value, hit_rate, tokens / seconds, float(norm), writer)
        listener.stepped(progress.step, value, hit_rate, tokens / seconds)

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero, by step."""
        warm = max(1, round(self.config.warmup * self.total_steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.total_steps - warm)))

    def _loss(self, batch: batches.Batch) -> objective.Loss:
        states = self.states.of(self.target, batch, self.tap_list) if self.states else self._run(batch)
        slots = objective.trained_slots(batch.loss_mask, self.config.depths)
        wanted = objective.label_positions(slots, batch.input_ids.shape[1])
        teacher = objective.teach(self.target, states.last, wanted, self.drafter)
        return objective.loss(self.drafter, teacher, states.taps, batch.input_ids, slots, self.weights)

    def _run(self, batch: batches.Batch) -> taps.States:
        return taps.run(self.target, batch.input_ids, batch.lengths, self.tap_list)

    # -- measuring and keeping --------------------------------------------------------------------------------

    def _measure(self, listener: Listener, writer: SummaryWriter) -> None:
        self.drafter.eval()
        measured = curve.measure(self.drafter, self.target, self.held_out, depths=max(self.config.depths, JUDGED))
        self.drafter.train()
        progress = self.progress
        forced = measured.teacher_forced
        if measured.lengths:
            length = measured.lengths[JUDGED - 1]
            value, (low, high) = length.value or 1.0, length.interval()
        else:  # off-policy text cannot be walked; the product of conditional rates still ranks checkpoints
            rates = [forced.joint_rate(k).rate or 0.0 for k in range(JUDGED)]
            value, low, high = 1 + sum(rates), None, None
        point = Point(
            progress.step,
            progress.tokens,
            progress.seconds / 60,
            value,
            low,
            high,
            [forced.conditional_rate(k).rate for k in range(forced.depths)],
        )
        best = progress.best is None or value > progress.best.value
        progress.points.append(point)
        if best:
            self._save_best(measured)
        self._save_state()
        writer.add_scalar("held_out/accept_length", value, progress.step)
        listener.measured(point, best)

    def _save_best(self, measured: curve.Measured) -> None:
        curves = {
            "teacher_forced": measured.teacher_forced.to_json(),
            "walk": measured.walk.to_json() if measured.walk else None,
            "accept_length": [length.to_json() for length in measured.lengths],
            "held_out_records": len(self.held_out),
            "training": [p.to_json() for p in self.progress.points],
        }
        source = {**provenance.collect(self.arguments), "config": self.config.model_dump(mode="json"), "data": self._data()}
        checkpoint.save(self.drafter, self.out, self.contract(), {"curves.json": curves, "provenance.json": source})

    def _data(self) -> dict[str, Any]:
        digest = provenance.sha256_text("\n".join(sorted(r.id for r in self.records)))
        return {
            "records": len(self.records),
            "response_tokens": sum(r.n_response_tokens for r in self.records),
            "records_sha256": digest,
            "trained_tokens": self.progress.tokens,
            "trained_minutes": round(self.progress.seconds / 60, 2),
        }

    def contract(self) -> Contract:
        """What this drafter will need true, as this trainer made it."""
        shape = self.drafter.config
        return declared(
            taps=list(shape.taps),
            fc_norm="none",
            residual="before hidden_norm",
            feedback="before the last norm",
            token_shift=1,
            position_offset=0,
            rope=shape.rope_parameters,
            embedding="target",
            head="own",
            draft_vocab_size=shape.draft_vocab_size,
            vocab_sha256=checkpoint.vocab_sha256(self.drafter.vocab),
            mask="token fed and token predicted are both response tokens",
            depths=self.config.depths,
            target={
                "fingerprint": self.target.fingerprint(),
                "architecture": self.target.architecture,
                "num_layers": self.target.num_layers,
                "hidden_size": self.target.hidden_size,
                "vocab_size": self.target.vocab_size,
            },
            **self.facts,
        )

    def plan(self) -> dict[str, Any]:
        """What the run will cost and what bounds it, to be said before it starts."""
        counts = token_counts(self.records, self.target.vocab_size)
        held = token_counts(self.held_out, self.target.vocab_size)
        plan: dict[str, Any] = {
            "steps": self.total_steps,
            "records": len(self.records),
            "response_tokens": int(counts.sum()),
            "coverage_train": self.drafter.vocab.coverage(counts),
            "coverage_held_out": self.drafter.vocab.coverage(held),
            "parameters": sum(p.numel() for p in self.drafter.parameters()),
        }
        if self.states is not None:
            tokens = sum(r.seq_len for r in self.records)
            plan["states_gb"] = tokens * (len(self.tap_list) + 1) * self.target.hidden_size * 2 / 1e9
        return plan

    # -- state on disk ----------------------------------------------------------------------------------------

    def _log(self, step: int, loss: float, hit: float, speed: float, norm: float, writer: SummaryWriter) -> None:
        log = self.folder / "log.csv"
        new = not log.exists()
        with open(log, "a", newline="", encoding="utf-8") as handle:
            rows = csv.writer(handle)
            if new:
                rows.writerow(["step", "loss", "hit_rate_depth_0", "tokens_per_second", "gradient_norm"])
            rows.writerow([step, f"{loss:.6f}", f"{hit:.4f}", f"{speed:.1f}", f"{norm:.4f}"])
        for name, value in (("loss", loss), ("hit_rate_depth_0", hit), ("tokens_per_second", speed)):
            writer.add_scalar(f"train/{name}", value, step)

    def _save_state(self) -> None:
        """Weights, optimiser and place in one file, replaced whole."""
        tensors = {f"model.{n}": p.detach().contiguous() for n, p in self.drafter.named_parameters()}
        tensors["tap_scale"] = self.drafter.tap_scale
        tensors["vocab"] = self.drafter.vocab.ids
        for i, state in self.optimiser.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optimiser.{i}.{name}"] = value.contiguous()
        place = {
            "config": self.config.model_dump(mode="json"),
            "shape": self.drafter.config.model_dump(mode="json"),
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "seconds": self.progress.seconds,
            "points": [p.to_json() for p in self.progress.points],
            "data": provenance.sha256_text("\n".join(r.id for r in self.records)),
        }
        with written_whole(self.folder / "state.safetensors") as path:
            save_file(tensors, path, metadata={"place": json.dumps(place)})

    def _load_state(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                place = json.loads((file.metadata() or {})["place"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise UsageError(f"{path} cannot be resumed from: {error}.", way_out="Start again with --overwrite.") from error
        self._same_run(place)
        words = DraftVocab(tensors["vocab"], self.target.vocab_size)
        self.drafter = Drafter(starts.DrafterConfig(**place["shape"]), words, self.target.embedding)
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
            self.drafter.tap_scale.copy_(tensors["tap_scale"])
        self._head_frozen(self.drafter)
        self.optimiser = self._optimiser()
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, i, key = name.split(".")
                state.setdefault(int(i), {})[key] = value
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        self.progress = Progress(
            place["step"], place["tokens"], place["seconds"], [Point(**p) for p in place["points"]]
        )

    def _same_run(self, place: dict[str, Any]) -> None:
        ours = self.config.model_dump(mode="json")
        changed = [k for k in ours if place["config"].get(k) != ours[k]]
        if changed:
            told = ", ".join(f"{k} {place['config'].get(k)!r} then, {ours[k]!r} now" for k in changed)
            raise UsageError(
                f"This is not the run that was interrupted: {told}.",
                way_out="Resume with the same options, or start again with --overwrite.",
            )
        if place["data"] != provenance.sha256_text("\n".join(r.id for r in self.records)):
            raise UsageError(
                "The records are not those of the interrupted run.",
                way_out="Resume with the same --records, or start again with --overwrite.",
            )


class StatesInMemory:
    """Target states of records seen before, as bf16. Also the first time they pass through bf16, so that a resumed
    run, whose memory is empty, computes what the undisturbed one did."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, target: Target, batch: batches.Batch, tap_list: tuple[int, ...]) -> taps.States:
        if not all(i in self._kept for i in batch.index):
            states = taps.run(target, batch.input_ids, batch.lengths, tap_list)
            for row, i in enumerate(batch.index):
                n = int(batch.lengths[row])
                self._kept[i] = (
                    states.taps[row, :n].to(torch.bfloat16).clone(),
                    states.last[row, :n].to(torch.bfloat16).clone(),
                )
        pad = torch.nn.utils.rnn.pad_sequence
        tapped, last = zip(*(self._kept[i] for i in batch.index), strict=True)
        return taps.States(pad(tapped, batch_first=True).float(), pad(last, batch_first=True).float())


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name for a library that insists on writing the file itself; renamed onto ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise files.explain_os_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def token_counts(records: Sequence[Record], vocab_size: int) -> Tensor:
    """How often each target id is supervised, [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for record in records:
        said = torch.from_numpy(record.input_ids[record.loss_mask].astype("int64"))
        counts += torch.bincount(said, minlength=vocab_size)
    return counts


Start = Literal["ridge", "random"]
