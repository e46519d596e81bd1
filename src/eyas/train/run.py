"""Training: a start, then steps over batches of records, measured as it goes, resumable at any moment.

``OUT`` is the best checkpoint so far, replaced whole. ``OUT.run`` holds what a resumed run needs (weights, optimiser,
place) and the logs. The order of batches is a function of seed and epoch, so a resumed run meets the same ones.

Letters: B batch, T positions, C taps, D target width, K depths.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from eyas import batches, checkpoint, curve, files, objective, provenance, starts, taps, vocab
from eyas.contract import Contract, declared
from eyas.dialects import sglang
from eyas.drafter import Drafter
from eyas.errors import Interrupted, RecordsError, UsageError
from eyas.records import Record
from eyas.target import Target
from eyas.train import noise, state
from eyas.train.config import Listener, Point, Progress, Silent, TrainConfig
from eyas.train.memory import StatesInMemory

JUDGED = 4  # drafted tokens at which checkpoints compete
TIMED = 10  # steps from which the pace of a run is taken


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
        if config.minutes:
            self.total_steps = max(self.total_steps, TIMED)  # until the pace is known
        self.weights = [config.depth_decay**k for k in range(config.depths)]
        self.progress = Progress()
        self._whole = True  # weights, optimiser and count agree: not so in the middle of a step
        self._saved_step: int | None = None
        self.states = StatesInMemory() if config.keep_states else None

    # -- start and resume -------------------------------------------------------------------------------------

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        saved = self.folder / "state.safetensors"
        if resume and not saved.exists():
            raise UsageError(f"Nothing to resume in {self.folder}.", way_out="Run without --resume to start a new run.")
        if not resume and saved.exists() and not overwrite:
            raise UsageError(
                f"{self.folder} holds an unfinished run.",
                way_out="Pass --resume to go on with it, or --overwrite.",
            )
        if resume:
            self._restore(state.load(saved))
        else:
            for old in ("log.csv", "state.safetensors"):
                (self.folder / old).unlink(missing_ok=True)
            self.drafter = self._start()
            self.optimiser = self._optimiser()

    def _restore(self, saved: state.Saved) -> None:
        saved.require_same(self.config, self._identity())
        self.total_steps, self.progress = saved.total_steps, saved.progress
        self.drafter = self._head_frozen(saved.drafter(self.target.embedding))
        self.optimiser = self._optimiser()
        saved.restore(self.optimiser)
        self._saved_step = self.progress.step
        self._trim_log()

    def _start(self) -> Drafter:
        config = self.config
        if config.init not in starts.STARTS:
            found = checkpoint.read(Path(config.init))
            drafter = checkpoint.load(found, self.target).train()
            if drafter.config.taps != self.tap_list:
                raise UsageError(
                    f"{config.init} was trained on taps {list(drafter.config.taps)}, not {list(self.tap_list)}.",
                    way_out=f"Pass --taps {','.join(map(str, drafter.config.taps))}.",
                )
            config.require_shape(drafter.config)
            drafter.requires_grad_(True)
            self._rescale(drafter)
            return self._head_frozen(drafter)
        words = vocab.by_frequency(batches.token_counts(self.records, self.target.vocab_size), config.draft_vocab)
        shape = starts.config_for(self.target, self.tap_list, len(words), **config.choices())
        rows = starts.sample_rows(self.target, self.tap_list, self._first_batches())
        return self._head_frozen(starts.STARTS[config.init](self.target, shape, words, rows, config.seed))

    def _rescale(self, drafter: Drafter) -> None:
        """Give a loaded drafter scaled taps, its fc undone by the same scale: the same function."""
        sample = starts.sample_rows(self.target, self.tap_list, self._first_batches())[0]
        starts.scale_taps(drafter, sample)
        with torch.no_grad():
            drafter.fc.weight.div_(drafter.tap_scale)

    def _first_batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        tokens = 0
        for index in self._epoch(0):
            if tokens >= self.config.ridge_tokens:
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
            if self._measurement_is_due():
                self._measure(listener, writer)
            feed = self._feed()
            began, first = time.perf_counter(), self.progress.step
            while self.progress.step < self.total_steps:
                self._step(feed, listener, writer)
                if self.config.minutes and self.progress.step == TIMED:
                    self._set_pace((time.perf_counter() - began) / (TIMED - first), listener)
                if self._measurement_is_due():
                    self._measure(listener, writer)
        except KeyboardInterrupt as error:
            raise self._stopped() from error
        finally:
            writer.close()

    def _stopped(self) -> Interrupted:
        """The error of an interrupted run. A step cut in the middle is not kept; the last whole state is."""
        if self._whole:
            self._save_state()
        if self._saved_step is None:
            return Interrupted(
                "Stopped before the first state was written; nothing is kept.", way_out="Run it again with --overwrite."
            )
        return Interrupted(
            f"Stopped at step {self._saved_step} of {self.total_steps}; the place is kept in {self.folder}.",
            way_out="Run the same command with --resume to go on.",
        )

    def _measurement_is_due(self) -> bool:
        step, points = self.progress.step, self.progress.points
        at_a_mark = step % self.config.measure_every == 0 or step == self.total_steps
        return at_a_mark and (not points or points[-1].step != step)

    def _set_pace(self, seconds: float, listener: Listener) -> None:
        """As many steps of so many seconds as fit the minutes asked for, measurements left out of account."""
        assert self.config.minutes is not None
        self.total_steps = max(TIMED + 1, round(self.config.minutes * 60 / seconds))
        listener.starting(self.total_steps, self.plan())

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        return batches.shuffled(self.records, self.config.batch, seed=self.config.seed, epoch=epoch)

    def _feed(self) -> Iterator[batches.Batch]:
        """Batches from the current place on, epoch after epoch."""
        done = self.progress.step * self.config.accumulate
        per_epoch = self.steps_per_epoch * self.config.accumulate
        epoch, skip = divmod(done, per_epoch)
        while True:
            order = islice(cycle(self._epoch(epoch)), per_epoch)  # a whole number of steps an epoch
            for index in islice(order, skip, None):
                yield batches.collate(self.records, index)
            epoch, skip = epoch + 1, 0

    def _step(self, feed: Iterator[batches.Batch], listener: Listener, writer: SummaryWriter) -> None:
        began = time.perf_counter()
        config, progress = self.config, self.progress
        for group in self.optimiser.param_groups:
            group["lr"] = config.lr * self._schedule(progress.step)
        value, hits, slots, tokens = 0.0, 0, 0, 0
        for part in range(config.accumulate):
            batch = next(feed).to(self.drafter.device)
            loss = self._loss(batch, part)
            (loss.value / config.accumulate).backward()  # type: ignore[no-untyped-call]
            value += float(loss.value.detach()) / config.accumulate
            hits, slots = hits + int(loss.hits[0]), slots + int(loss.slots[0])
            tokens += int(batch.loss_mask.sum())
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)
        self._whole = False
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        self._whole = True
        hit_rate = hits / max(slots, 1)
        self._log(progress.step, value, hit_rate, tokens / seconds, float(norm), writer)
        listener.stepped(progress.step, value, hit_rate, tokens / seconds)

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero, by step."""
        warm = max(1, round(self.config.warmup * self.total_steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.total_steps - warm)))

    def _loss(self, batch: batches.Batch, part: int = 0) -> objective.Loss:
        states = self.states.of(self.target, batch, self.tap_list) if self.states else self._run(batch)
        tapped = states.taps
        if self.config.noise:
            drawn = self.progress.step * self.config.accumulate + part  # a resumed run draws the same
            tapped = noise.uniform(tapped, batch.lengths, self.config.noise, (self.config.seed << 32) + drawn)
        slots = objective.trained_slots(batch.loss_mask, self.config.depths)
        wanted = objective.label_positions(slots, batch.input_ids.shape[1])
        teacher = objective.teach(self.target, states.last, wanted, self.drafter)
        return objective.loss(self.drafter, teacher, tapped, batch.input_ids, slots, self.weights)

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
        if best:
            self._save_best(measured, [*progress.points, point])
        progress.points.append(point)  # only now: a point says that the checkpoint it speaks of is there
        self._save_state()
        writer.add_scalar("held_out/accept_length", value, progress.step)
        listener.measured(point, best)

    def _save_best(self, measured: curve.Measured, points: Sequence[Point]) -> None:
        curves = {
            "teacher_forced": measured.teacher_forced.to_json(),
            "walk": measured.walk.to_json() if measured.walk else None,
            "accept_length": [length.to_json() for length in measured.lengths],
            "held_out_records": len(self.held_out),
            "training": [p.to_json() for p in points],
        }
        source = {
            **provenance.collect(self.arguments),
            "config": self.config.model_dump(mode="json"),
            "data": self._data(),
        }
        checkpoint.save(self.drafter, self.out, self.contract(), {"curves.json": curves, "provenance.json": source})

    def _identity(self) -> dict[str, str]:
        """What a resumed run must share with the interrupted one besides its options."""

        def digest(records: Sequence[Record]) -> str:
            return provenance.sha256_text("\n".join(r.id for r in records))

        fingerprint = self.target.fingerprint()
        return {"records": digest(self.records), "held-out records": digest(self.held_out), "target": fingerprint}

    def _data(self) -> dict[str, Any]:
        return {
            "records": len(self.records),
            "response_tokens": sum(r.n_response_tokens for r in self.records),
            "records_sha256": self._identity()["records"],
            "trained_tokens": self.progress.tokens,
            "trained_minutes": round(self.progress.seconds / 60, 2),
        }

    def contract(self) -> Contract:
        """What this drafter will need true, as this trainer made it."""
        shape = self.drafter.config
        return declared(
            taps=list(shape.taps),
            **shape.facts(),
            token_shift=1,
            position_offset=0,
            rope=shape.rope_parameters,
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
        counts = batches.token_counts(self.records, self.target.vocab_size)
        held = batches.token_counts(self.held_out, self.target.vocab_size)
        plan: dict[str, Any] = {
            "steps": self.total_steps,
            "records": len(self.records),
            "response_tokens": int(counts.sum()),
            "coverage_train": self.drafter.vocab.coverage(counts),
            "coverage_held_out": self.drafter.vocab.coverage(held),
            "parameters": sum(p.numel() for p in self.drafter.parameters()),
            "sglang_cannot": sglang.refusals(
                self.drafter.config.model_dump(), self.target.architecture, self.target.num_layers
            ),
        }
        if self.states is not None:
            tokens = sum(r.seq_len for r in self.records)
            plan["states_gb"] = tokens * (len(self.tap_list) + 1) * self.target.hidden_size * 2 / 1e9
        return plan

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

    def _trim_log(self) -> None:
        """Steps logged after the last state are taken again; the log has every step once."""
        log = self.folder / "log.csv"
        if log.exists():
            head, *rows = log.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [r for r in rows if r.split(",")[0].isdigit() and int(r.split(",")[0]) <= self.progress.step]
            files.write_text(log, "".join([head, *kept]))

    def _save_state(self) -> None:
        state.save(
            self.folder / "state.safetensors",
            self.drafter,
            self.optimiser,
            self.progress,
            self.total_steps,
            self.config,
            self._identity(),
        )
        self._saved_step = self.progress.step
