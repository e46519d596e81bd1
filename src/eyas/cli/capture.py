from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from eyas.cli import common


def capture(
    records: Annotated[
        Path, typer.Option("--records", "-r", help="Folder written by `eyas prepare`, or one file of records.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the store; a part of it is written.")],
    target: common.TargetOption = "smollm2",
    dtype: common.DtypeOption = "fp32",
    device: common.DeviceOption = "cpu",
    device_map: common.DeviceMapOption = None,
    trust_remote_code: common.TrustOption = False,
    taps: Annotated[
        str | None,
        typer.Option(help="Layers to keep, e.g. 2,15,27; 0 is the embedding. Default 2, n/2, n-3. Tap n comes along."),
    ] = None,
    states_dtype: Annotated[
        str, typer.Option(help="How taps are stored: bf16, or fp8 with a scale per token and tap.")
    ] = "bf16",
    shard: Annotated[
        str, typer.Option(help="i/n: capture the i-th of n parts, for job arrays; all into the same OUT.")
    ] = "1/1",
    batch: Annotated[int, typer.Option(help="Records the target runs at once.")] = 8,
    engine_python: Annotated[
        Path | None, typer.Option(help="Run the target in vLLM: the python of an environment that has it.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a capture, or start it; checks the hash of all there is.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start this part anew.")] = False,
    json: common.JsonOption = None,
) -> None:
    """Store the target's states of records on disk, for `eyas train --states`."""
    common.quiet_threads()
    from pydantic import ValidationError

    from eyas import capture as capturing
    from eyas.cli.train import parse_taps
    from eyas.errors import UsageError
    from eyas.prepare import read_manifest
    from eyas.target import default_taps

    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other.", way_out="Pass one of them.")
    part = parse_part(shard)
    paths = splits(records)
    loaded = common.load_target(target, dtype, device, device_map, trust_remote_code)
    try:
        config = capturing.CaptureConfig(
            taps=parse_taps(taps) if taps else tuple(default_taps(loaded.num_layers)),
            dtype=states_dtype,
            batch=batch,
            part=part,
        )
    except ValidationError as error:
        raise common.invalid_option(error, "capture", dtype="states-dtype") from error
    with Drawn() as listener:
        result = capturing.capture(
            capturing.RecordFiles(paths, loaded.vocab_size, loaded.max_positions),
            loaded,
            out,
            config,
            engine_python=engine_python,
            text_hashes=capturing.text_hashes(read_manifest(next(iter(paths.values()))), loaded),
            arguments={"verb": "capture", "target": target, "dtype": dtype, "records": records.name, "shard": shard},
            resume=resume,
            overwrite=overwrite,
            listener=listener,
        )
    common.write_result(result, json)
    common.console_for(json).print(
        f"[bold]{result['records']:,} records, {result['tokens']:,} tokens, {result['bytes'] / 1e9:.2f} GB[/], part "
        f"{result['part']}, in {out}",
        highlight=False,
    )


def splits(records: Path) -> dict[str, Path]:
    """Files by split: both of a prepared folder, or the one that was named."""
    from eyas.errors import RecordsError
    from eyas.prepare import HELD_OUT, TRAIN
    from eyas.states import HELD_OUT as HELD_OUT_SPLIT
    from eyas.states import TRAIN as TRAIN_SPLIT

    if not records.is_dir():
        return {HELD_OUT_SPLIT if records.name.startswith("heldout") else TRAIN_SPLIT: records}
    both = {TRAIN_SPLIT: records / TRAIN, HELD_OUT_SPLIT: records / HELD_OUT}
    found = {split: path for split, path in both.items() if path.is_file()}
    if not found:
        raise RecordsError(
            f"{records} holds neither {TRAIN} nor {HELD_OUT}.", way_out="Name a folder written by `eyas prepare`."
        )
    return found


def parse_part(text: str) -> tuple[int, int]:
    from eyas.errors import UsageError

    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise UsageError(
            f"--shard {text!r} is not a part such as 1/4.", way_out="Pass i/n with i from 1 to n; a job array counts i."
        )
    return int(i), int(n)


class Drawn:
    """A capture as a progress bar, its cost said first, on standard error."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=common.err, transient=True)
        self._counting = common.err.status("counting records …")
        self._task: TaskID | None = None

    def __enter__(self) -> Drawn:
        self._counting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._counting.stop()
        self._bar.stop()

    def starting(self, plan: dict[str, Any]) -> None:
        self._counting.stop()
        table = Table(show_header=False, box=None)
        table.add_row("part", f"{plan['part']}: {plan['records']:,} records, {plan['tokens']:,} tokens")
        table.add_row("taps", ", ".join(map(str, plan["taps"])))
        table.add_row(
            "on disk",
            f"{plan['bytes'] / 1e9:.2f} GB ({plan['bytes_per_token']:,} bytes a token); "
            f"{plan['free_bytes'] / 1e9:.1f} GB free",
        )
        if plan["kept_shards"]:
            table.add_row("there already", f"{plan['kept_shards']} shards, whole")
        common.err.print(table)
        self._task = self._bar.add_task("capturing", total=plan["tokens"], speed=0.0)
        self._bar.start()

    def captured(self, tokens: int) -> None:
        assert self._task is not None
        self._bar.advance(self._task, tokens)
        self._bar.update(self._task, speed=self._bar.tasks[0].speed or 0.0)
