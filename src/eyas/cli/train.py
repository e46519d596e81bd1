from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.records import Record
    from eyas.states import StoredStates
    from eyas.target import Target


def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the best checkpoint; OUT.run keeps the run.")],
    records: Annotated[
        Path | None, typer.Option("--records", "-r", help="Folder written by `eyas prepare`, or its train file.")
    ] = None,
    states: Annotated[
        Path | None,
        typer.Option(help="Store written by `eyas capture`: its records (with --records only those), no target pass."),
    ] = None,
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    held_out: Annotated[
        Path | None, typer.Option(help="Held-out records; default: heldout.jsonl beside the train file.")
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(help="Layers to read, e.g. 2,15,27; 0 is the embedding. Default 2, n/2, n-3."),
    ] = None,
    init: Annotated[
        str,
        typer.Option(
            help="ridge (closed form), target (its last layers copied), random, or the folder of a checkpoint."
        ),
    ] = "ridge",
    ridge_tokens: Annotated[int, typer.Option(help="Supervised tokens the ridge start looks at.")] = 20_000,
    draft_vocab: Annotated[int, typer.Option(help="Entries of the draft vocabulary.")] = 8192,
    layers: Annotated[int, typer.Option(help="Decoder layers of the drafter.")] = 1,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of its MLP; default: the target's.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of its attention heads; default: the target's.")] = None,
    norm_before_fc: Annotated[
        bool, typer.Option("--norm-before-fc", help="EAGLE-3.1: one norm over the taps joined, before fc.")
    ] = False,
    fc_norm: Annotated[bool, typer.Option("--fc-norm", help="EAGLE-3.1: a norm for each tap, before fc.")] = False,
    norm_before_residual: Annotated[
        bool, typer.Option("--norm-before-residual", help="Start the residual after hidden_norm; not for SGLang.")
    ] = False,
    norm_output: Annotated[
        bool, typer.Option("--norm-output", help="EAGLE-3.1: feed the next depth what comes after the last norm.")
    ] = False,
    own_embedding: Annotated[
        bool, typer.Option("--own-embedding", help="Train an embedding of the drafter's own; not for SGLang.")
    ] = False,
    noise: Annotated[float, typer.Option(help="Uniform noise on the taps, in units of each feature's size.")] = 0.0,
    depths: Annotated[int, typer.Option(help="Draft depths unrolled in training.")] = 5,
    later_share: Annotated[float, typer.Option(help="Share of the slots carried past depth 0; less is faster.")] = 1.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate; warm-up, then cosine to zero.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Records a batch.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Batches a step.")] = 1,
    epochs: Annotated[float, typer.Option(help="Passes over the records.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Steps in all; overrides --epochs.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for about so long; overrides --steps.")] = None,
    measure_every: Annotated[int, typer.Option(help="Steps between measurements on held-out records.")] = 200,
    patience: Annotated[int | None, typer.Option(help="Stop after so many measurements without a better one.")] = None,
    measure_records: Annotated[int, typer.Option(help="Held-out records measured on.")] = 48,
    freeze_head: Annotated[bool, typer.Option("--freeze-head", help="Keep the head as it starts.")] = False,
    keep_states: Annotated[
        bool, typer.Option("--keep-states", help="Hold the target's states in memory after one epoch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Order of batches and random weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew over an output that exists.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Train a drafter; the best by held-out accept length is kept, in the form SGLang and vLLM load."""
    common.quiet_threads()
    from pydantic import ValidationError

    from eyas import train as training
    from eyas.errors import UsageError
    from eyas.resolve import drafter
    from eyas.starts import STARTS
    from eyas.states import StoredStates
    from eyas.target import default_taps

    if records is None and states is None:
        raise UsageError("Nothing to train on.", way_out="Pass --records, written by `eyas prepare`, or --states.")
    if keep_states and states is not None:
        raise UsageError("--keep-states and --states exclude each other.", way_out="Pass one of them.")
    stored = StoredStates(states) if states is not None else None
    if stored is None:
        loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
    elif device_map is None:
        loaded = common.load_ends(target, dtype, device, trust_remote_code)
    else:
        raise UsageError(
            "--states needs no more of the target than its ends, which --device-map cannot spread.",
            way_out="Pass --device.",
        )
    usual = list(stored.facts.taps) if stored is not None else default_taps(loaded.num_layers)
    try:
        config = training.TrainConfig(
            taps=parse_taps(taps) if taps else tuple(usual),
            init=init if init in STARTS else str(drafter(init)),
            layers=layers,
            intermediate_size=intermediate_size,
            head_dim=head_dim,
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_before_residual=norm_before_residual,
            norm_output=norm_output,
            own_embedding=own_embedding,
            noise=noise,
            draft_vocab=draft_vocab,
            ridge_tokens=ridge_tokens,
            depths=depths,
            later_share=later_share,
            lr=lr,
            batch=batch,
            accumulate=accumulate,
            epochs=epochs,
            steps=steps,
            minutes=minutes,
            measure_every=measure_every,
            patience=patience,
            measure_records=measure_records,
            freeze_head=freeze_head,
            keep_states=keep_states,
            seed=seed,
        )
    except ValidationError as error:
        raise common.invalid_option(error, "train") from error
    with common.err.status("reading records …"):
        chosen, held, facts = read_records(records, held_out, loaded, stored)
    with Drawn() as listener:
        progress = training.train(
            config,
            loaded,
            chosen,
            held,
            out,
            facts=facts,
            provenance_arguments={
                "verb": "train",
                "target": target,
                "dtype": dtype,
                "records": records.name if records is not None else None,
                "states": states.name if states is not None else None,
            },
            stored=stored,
            resume=resume,
            overwrite=overwrite,
            listener=listener,
        )
    best = progress.best
    result = {
        "schema": 1,
        "out": str(out),
        "best": best.to_json() if best else None,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "points": [p.to_json() for p in progress.points],
    }
    common.write_result(result, json)
    if best is not None:
        common.console_for(json).print(
            f"[bold]best: accept length {best.value:.3f} at step {best.step}[/], in {out}", highlight=False
        )


def read_records(
    records: Path | None, held_out: Path | None, target: Target, stored: StoredStates | None
) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Records to train and to measure on, and the facts their manifest knows: of files, of a store, or of both."""
    from eyas import records as reading
    from eyas.errors import RecordsError
    from eyas.prepare import HELD_OUT, TRAIN, read_manifest
    from eyas.states import HELD_OUT as HELD_OUT_SPLIT
    from eyas.states import TRAIN as TRAIN_SPLIT

    def of_file(file: Path) -> list[Record]:
        found = list(reading.fit(reading.read(file, vocab_size=target.vocab_size), target.max_positions))
        known = [r for r in found if stored is None or r in stored]
        if not known:
            raise RecordsError(
                f"None of the records of {file} is in {stored.folder if stored else ''}.",
                way_out=("Capture the states of these records, or leave --records out."),
            )
        if len(known) < len(found):
            common.err.print(f"{len(found) - len(known)} of {len(found)} records of {file} have no states: left out")
        return known

    keys = ("template_sha256", "tokenizer_sha256")
    facts: dict[str, Any] = {}
    if stored is not None:
        facts = {k: v for k in keys if (v := getattr(stored.facts, k)) is not None}
    if records is None:
        assert stored is not None
        chosen = stored.records(TRAIN_SPLIT)
        if not chosen:
            raise RecordsError(
                f"{stored.folder} holds no records to train on, only held-out ones.",
                way_out="Capture the whole folder that `eyas prepare` wrote.",
            )
        return chosen, of_file(held_out) if held_out else stored.records(HELD_OUT_SPLIT), facts
    train_file = records / TRAIN if records.is_dir() else records
    manifest = read_manifest(train_file)
    facts |= {k: manifest[k] for k in keys if k in manifest}
    return of_file(train_file), of_file(held_out or train_file.with_name(HELD_OUT)), facts


def parse_taps(text: str) -> tuple[int, ...]:
    from eyas.errors import UsageError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--taps {text!r} is not a list of layers.", way_out="Pass for example --taps 2,15,27."
        ) from error


class Drawn:
    """A run as a progress bar and one line a measurement, on standard error."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]:.3f}  depth 0 {task.fields[hit]:.1%}  {task.fields[speed]:.0f} tokens/s"
            ),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=common.err, transient=True)
        self._loss, self._hit, self._speed = 0.0, 0.0, 0.0
        self._task: TaskID | None = None

    def __enter__(self) -> Drawn:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def starting(self, steps: int, plan: dict[str, Any]) -> None:
        if self._task is not None:  # the pace is known now
            self._bar.update(self._task, total=steps)
            return
        table = Table(show_header=False, box=None)
        table.add_row(
            "steps",
            f"{plan['steps']:,} over {plan['records']:,} records, {plan['response_tokens']:,} supervised tokens",
        )
        table.add_row("drafter", f"{plan['parameters'] / 1e6:.1f} M parameters")
        table.add_row(
            "draft vocabulary",
            f"covers {plan['coverage_train']:.1%} of training and {plan['coverage_held_out']:.1%} of held-out tokens; "
            f"no more can be accepted at the first depth",
        )
        if plan["sglang_cannot"]:
            table.add_row("SGLang", f"cannot serve it: {'; '.join(plan['sglang_cannot'])}")
        if "states_gb" in plan:
            table.add_row("states in memory", f"{plan['states_gb']:.1f} GB")
        common.err.print(table)
        self._task = self._bar.add_task("training", total=steps, loss=0.0, hit=0.0, speed=0.0)

    def stepped(self, step: int, loss: float, hit_rate: float, tokens_per_second: float) -> None:
        fade = 0.9 if step > 1 else 0.0
        self._loss = fade * self._loss + (1 - fade) * loss
        self._hit = fade * self._hit + (1 - fade) * hit_rate
        self._speed = fade * self._speed + (1 - fade) * tokens_per_second
        assert self._task is not None
        self._bar.update(self._task, completed=step, loss=self._loss, hit=self._hit, speed=self._speed)

    def measured(self, point: Any, best: bool) -> None:
        interval = f" ({point.low:.2f} to {point.high:.2f})" if point.low is not None else ""
        rates = " ".join(f"{r:.2f}" if r is not None else "–" for r in point.conditional)
        common.err.print(
            f"step {point.step:>5}  {point.minutes:5.1f} min  accept length {point.value:.3f}{interval}  "
            f"conditional {rates}{'  [bold]best[/]' if best else ''}",
            highlight=False,
        )
