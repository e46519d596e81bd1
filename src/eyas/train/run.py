"""Training: a start, then steps over batches of records, measured as it goes, resumable at any moment.

``OUT`` is the best checkpoint so far, replaced whole. ``OUT.run`` holds what a resumed run needs (weights, optimiser,
place) and the logs. The order of batches is a function of seed and epoch, so a resumed run meets the same ones.

Letters: B batch, T positions, C taps, D target width, K depths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas import batches, checkpoint, curve, files, objective, starts, taps, vocab
from eyas.dialects import sglang
from eyas.drafter import Drafter
from eyas.errors import Interrupted, RecordsError, UsageError
from eyas.records import Record
from eyas.states import StoredStates
from eyas.target import Target
from eyas.train import noise, state
from eyas.train.config import Listener, Progress, Silent, TrainConfig
from eyas.train.log import Log
from eyas.train.memory import StatesInMemory
from eyas.train.outcome import JUDGED, Outcome, digest, point
from eyas.train.parallel import Workers

TIMED = 10  # steps from which the pace of a run is taken


class Trainee(nn.Module):
    """The drafter as something with a forward pass, which is what distributed wrappers want."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, teacher: objective.Teacher, tapped: Tensor, input_ids: Tensor, slots: objective.Slots
    ) -> objective.Loss:
        return objective.loss(self.drafter, teacher, tapped, input_ids, slots)


def train(
    config: TrainConfig,
    target: Target,
    records: Sequence[Record],
    held_out: Sequence[Record],
    out: Path,
    *,
    facts: dict[str, Any] | None = None,
    provenance_arguments: dict[str, object] | None = None,
    stored: StoredStates | None = None,
    resume: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Progress:
    """Train a drafter and leave the best, by held-out accept length, in ``out``; ``stored`` states spare the target."""
    if not held_out:
        raise RecordsError("No held-out records to measure on.", way_out="Prepare with a held-out share above zero.")
    run_folder = out.with_name(out.name + ".run")
    if not resume:
        files.refuse_existing(out, overwrite=overwrite, resume_hint=True)
    workers = Workers(target.device)
    workers.require_rows(config.batch)
    with ExitStack() as held:
        if workers.first:
            held.enter_context(files.only_writer(run_folder))
            held.enter_context(files.sole_writer(out))  # also removes what a killed run left beside it
        facts, arguments = facts or {}, provenance_arguments or {}
        run = Run(config, target, records, held_out, out, run_folder, facts, arguments, stored, workers)
        run.begin(resume=resume, overwrite=overwrite)
        listener = listener if listener and workers.first else Silent()
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
        stored: StoredStates | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.config, self.target, self.records = config, target, records
        self.held_out = held_out[: config.measure_records]
        self.folder = folder
        self.workers = workers or Workers(target.device)
        self.outcome = Outcome(out, config, target, records, facts, arguments)
        self.tap_list = taps.validate(config.taps, target.num_layers)
        self.steps_per_epoch = math.ceil(len(records) / (config.batch * config.accumulate))
        self.total_steps = config.steps or max(1, round(config.epochs * self.steps_per_epoch))
        if config.minutes:
            self.total_steps = max(self.total_steps, TIMED)  # until the pace is known
        self.weights = [config.depth_decay**k for k in range(config.depths)]
        self.progress = Progress()
        self._whole = True  # weights, optimiser and count agree: not so in the middle of a step
        self._saved_step: int | None = None
        self.stored = stored
        source = stored.run if stored else taps.run
        keep = config.keep_states
        self._run: taps.Run = StatesInMemory(torch.bfloat16, source).run if keep else source
        self._run_held_out: taps.Run = StatesInMemory(torch.float32, source).run if keep else source
        if stored:
            stored.require(target, self.tap_list, (*records, *self.held_out))

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
            if self.workers.first:
                for old in ("log.csv", "state.safetensors"):
                    (self.folder / old).unlink(missing_ok=True)
            self.drafter = self._start()
            self.optimiser = self._optimiser()
        self.trainee = self.workers.wrapped(Trainee(self.drafter))

    def _restore(self, saved: state.Saved) -> None:
        saved.require_same(self.config, self._identity())
        self.total_steps, self.progress = saved.total_steps, saved.progress
        self.drafter = self._head_frozen(saved.drafter(self.target.embedding).to(self.target.device))
        self.optimiser = self._optimiser()
        saved.restore(self.optimiser)
        self._saved_step = self.progress.step

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
        rows = starts.sample_rows(self.target, self.tap_list, self._first_batches(), self._run)
        return self._head_frozen(starts.STARTS[config.init](self.target, shape, words, rows, config.seed))

    def _rescale(self, drafter: Drafter) -> None:
        """Give a loaded drafter scaled taps, its fc undone by the same scale: the same function."""
        sample = starts.sample_rows(self.target, self.tap_list, self._first_batches(), self._run)[0]
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
        log = Log(self.folder, self.progress.step) if self.workers.first else None
        try:
            if self._measurement_is_due():
                self._measure(listener, log)
            feed = self._feed()
            began, first = time.perf_counter(), self.progress.step
            while self.progress.step < self.total_steps and not self._out_of_patience():
                self._step(feed, listener, log)
                if self.config.minutes and self.progress.step == TIMED:
                    self._set_pace((time.perf_counter() - began) / (TIMED - first), listener)
                if self._measurement_is_due():
                    self._measure(listener, log)
        except KeyboardInterrupt as error:
            raise self._stopped() from error
        finally:
            if log:
                log.close()

    def _out_of_patience(self) -> bool:
        """Whether the latest ``patience`` measurements all fell short of the best one."""
        points, patience = self.progress.points, self.config.patience
        return patience is not None and self.progress.best not in points[-patience:] and len(points) > patience

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
        self.total_steps = self.workers.told(max(TIMED + 1, round(self.config.minutes * 60 / seconds)))
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
                yield self._part(index)
            epoch, skip = epoch + 1, 0

    def _part(self, index: tuple[int, ...]) -> batches.Batch:
        """This worker's rows of a batch; of one too short to share, a row that counts for nothing."""
        rows = self.workers.share(index)
        batch = batches.collate(self.records, rows or index[:1])
        return batch if rows else replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    def _step(self, feed: Iterator[batches.Batch], listener: Listener, log: Log | None) -> None:
        began = time.perf_counter()
        config, progress = self.config, self.progress
        for group in self.optimiser.param_groups:
            group["lr"] = config.lr * self._schedule(progress.step)
        value, hits, slots, tokens = 0.0, 0, 0, 0
        for part in range(config.accumulate):
            batch = next(feed).to(self.drafter.device)
            loss = self._loss(batch, part)
            mean = loss.mean(self.weights, self.workers.summed(loss.counts))
            # Wrapped gradients are averaged over workers; the parts of a batch add up.
            (mean * self.workers.count / config.accumulate).backward()  # type: ignore[no-untyped-call]
            value += float(self.workers.summed(mean.detach())) / config.accumulate
            counts = torch.stack((loss.hits[0], loss.slots[0], batch.loss_mask.sum()))
            hits, slots, tokens = (a + b for a, b in zip((hits, slots, tokens), self._sum(counts), strict=True))
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
        if log:
            log.step(progress.step, value, hit_rate, tokens / seconds, float(norm))
        listener.stepped(progress.step, value, hit_rate, tokens / seconds)

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero, by step."""
        warm = max(1, round(self.config.warmup * self.total_steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.total_steps - warm)))

    def _loss(self, batch: batches.Batch, part: int = 0) -> objective.Loss:
        config = self.config
        seeds = [(config.seed, self.progress.step, part, row) for row in batch.index]  # a resumed run draws the same
        states = self._run(self.target, batch.input_ids, batch.lengths, self.tap_list)
        slots = objective.sampled(objective.trained_slots(batch.loss_mask, config.depths), config.later_share, seeds)
        wanted = objective.label_positions(slots, batch.input_ids.shape[1])
        teacher = objective.teach(self.target, states, wanted, self.drafter)
        tapped = noise.uniform(states.taps.float(), batch.lengths, config.noise, seeds)
        loss: objective.Loss = self.trainee(teacher, tapped, batch.input_ids, slots)
        return loss

    def _sum(self, counts: Tensor) -> list[int]:
        return [int(n) for n in self.workers.summed(counts).tolist()]

    # -- measuring and keeping --------------------------------------------------------------------------------

    def _measure(self, listener: Listener, log: Log | None) -> None:
        """Measure on the held-out records; keep the checkpoint where it is the best. The first worker does it."""
        progress = self.progress
        made, best = None, False
        if self.workers.first:
            self.drafter.eval()
            depths, run = max(self.config.depths, JUDGED), self._run_held_out
            measured = curve.measure(self.drafter, self.target, self.held_out, depths=depths, run=run)
            self.drafter.train()
            made = point(measured, progress)
            best = progress.best is None or made.value > progress.best.value
            if best:
                self.outcome.save(self.drafter, measured, len(self.held_out), progress, [*progress.points, made])
        made = self.workers.told(made)
        assert made is not None
        progress.points.append(made)  # only now: a point says that the checkpoint it speaks of is there
        self._save_state()
        if log:
            log.measured(progress.step, made.value)
        listener.measured(made, best)

    def _identity(self) -> dict[str, str]:
        """What a resumed run must share with the interrupted one besides its options."""
        return {
            "records": digest(self.records),
            "held-out records": digest(self.held_out),
            "target": self.target.fingerprint(),
            "precision of the target": str(self.target.dtype).removeprefix("torch."),
            "states": self.stored.identity if self.stored else "not stored",
        }

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
        if self.config.keep_states:
            tokens = sum(r.seq_len for r in self.records)
            plan["states_gb"] = tokens * (len(self.tap_list) + 1) * self.target.hidden_size * 2 / 1e9
        return plan

    def _save_state(self) -> None:
        self._saved_step = self.progress.step
        if not self.workers.first:
            return
        state.save(
            self.folder / "state.safetensors",
            self.drafter,
            self.optimiser,
            self.progress,
            self.total_steps,
            self.config,
            self._identity(),
        )
