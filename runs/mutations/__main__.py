"""``python -m runs.mutations``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from runs.mutations import bench, score
from runs.mutations.catalogue import ALL, LEFT_OUT
from runs.mutations.subject import Bed, bed

from eyas import files
from eyas import records as reading
from eyas import target as targets
from eyas.errors import EyasError
from eyas.prepare import read_manifest
from eyas.target import Target

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = 128
GUESS = 75.0  # seconds a row where none has been timed yet: two cores, SmolLM2


@dataclass(frozen=True)
class Known:
    """A drafter of the bench. One that is not committed is left out where its folder is not there."""

    name: str
    folder: Path
    target: str
    spec: str = ""
    """Where the target lies, if its name does not say it."""

    @property
    def records(self) -> Path:
        return HERE / "records" / self.target / "heldout.jsonl.gz"


SHIPPED = ROOT / "models" / "smollm2-135m-eagle3"
FIXTURES = ROOT / "tests" / "fixtures" / "drafters"
TINY = FIXTURES / "tiny-deepseek-taps-0-3-7"
DRAFTERS = (
    Known("gemma3-taps-0-9-15", FIXTURES / "gemma3-taps-0-9-15", "gemma3-270m"),
    Known("smollm2-taps-0-2-15", FIXTURES / "smollm2-taps-0-2-15", "smollm2"),
    Known("smollm2-eagle3", SHIPPED, "smollm2"),
    Known("smollm2-eagle31", ROOT / "out" / "fixtures" / "smollm2-eagle31", "smollm2"),
    Known("tiny-deepseek-taps-0-3-7", TINY / "trained", "tiny-deepseek", str(TINY / "target")),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(stderr=True)
    if options.list:
        listed(Console())
        return 0
    try:
        with files.only_writer(options.out):
            return work(options, console)
    except EyasError as error:
        console.print(f"[red]{error.message}[/red]\n{error.way_out or ''}")
        return error.exit_code
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished rows are in {options.out}; the same command goes on.")
        return 130


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runs.mutations", description="The mutation bench.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutations", help="finished rows, and what was said")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the table goes")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="run rows again: a mutation, or drafter/mutation, with * and ?",
    )
    parser.add_argument(
        "--drafter", action="append", metavar="NAME=FOLDER", default=[], help="where a drafter lies, if not at home"
    )
    parser.add_argument(
        "--records", action="append", metavar="TARGET=FILE", default=[], help=f"held-out records; the first {RECORDS}"
    )
    parser.add_argument("--everywhere", action="store_true", help="every mutation on every drafter")
    parser.add_argument("--report", action="store_true", help="run nothing: the table of the rows that are there")
    parser.add_argument("--list", action="store_true", help="print the mutations, and what was left out and why")
    options = parser.parse_args(argv)
    for name in ("drafter", "records"):
        pairs = [given.partition("=") for given in getattr(options, name)]
        known = {known.name for known in DRAFTERS} if name == "drafter" else {known.target for known in DRAFTERS}
        for key, equals, value in pairs:
            if not equals or key not in known:
                parser.error(
                    f"--{name} {key}{equals}{value}: NAME=PATH was expected, NAME one of {', '.join(sorted(known))}"
                )
        setattr(options, name, {key: Path(value) for key, _, value in pairs})
    return options


def listed(console: Console) -> None:
    for mutation in ALL:
        also = f" (or {', '.join(mutation.also)})" if mutation.also else ""
        console.print(f"{mutation.kind}  {mutation.name}: {mutation.expected}{also}", highlight=False)
    for what, why in LEFT_OUT.items():
        console.print(f"-  {what}: {why}", highlight=False)


def work(options: argparse.Namespace, console: Console) -> int:
    beds = list(load(options, console))
    if options.report:
        return conclude(beds, options, console)
    asked = list(bench.rows(beds, everywhere=options.everywhere))
    done = bench.finished(options.out)
    again = [row for row in asked if options.only and any(matches(row, pattern) for pattern in options.only)]
    if options.only and not again:
        console.print(f"No row matches {', '.join(options.only)}; --list names them.")
        return 2
    left = again if options.only else [row for row in asked if row.id not in done]
    left.sort(key=lambda row: [one.name for one in beds].index(row.bed.name))
    timed = [row["seconds"] for row in done.values()]
    seconds = sum(timed) / len(timed) if timed else GUESS
    console.print(
        f"{len(asked)} rows on {len(beds)} drafters, {len(left)} to run: about {len(left) * seconds / 60:.0f} minutes "
        f"at {seconds:.0f} s a row ({'as timed' if timed else 'a guess'}). Ctrl-C loses at most the row it is at."
    )
    play(left, options.out, console)
    return conclude(beds, options, console)


def load(options: argparse.Namespace, console: Console) -> list[Bed]:
    loaded: dict[str, Target] = {}
    beds = []
    for known in DRAFTERS:
        folder = options.drafter.get(known.name, known.folder)
        if not folder.is_dir():
            console.print(f"{known.name} is left out: {folder} is not there (--drafter {known.name}=FOLDER).")
            continue
        file = options.records.get(known.target, known.records)
        if known.target not in loaded:
            loaded[known.target] = targets.load(known.spec or known.target)
        target = loaded[known.target]
        held_out = reading.fit(reading.read(file, vocab_size=target.vocab_size, limit=RECORDS), target.max_positions)
        beds.append(bed(known.name, folder, target, list(held_out), read_manifest(file)))
    return beds


def matches(row: bench.Row, pattern: str) -> bool:
    return fnmatchcase(row.id, pattern) or fnmatchcase(row.mutation.name, pattern)


def play(left: Sequence[bench.Row], out: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("mutations", total=len(left))
        bed_before: Bed | None = None
        for row in left:
            if bed_before is not None and bed_before is not row.bed:
                bed_before.bank.forget(everything=True)
            bed_before = row.bed
            progress.update(task, description=row.id)
            try:
                told = bench.run(row)
            finally:
                row.bed.bank.forget()
            bench.keep(out, told)
            progress.advance(task)
            lost = (
                "" if told["accept_after"] is None else f", {told['accept_before']:.2f} to {told['accept_after']:.2f}"
            )
            progress.console.print(
                f"{told['outcome']:10} {row.id}: {told['first']} for {told['expected']}"
                f"{', confident' if told['confident'] else ''}{lost}, {told['seconds']:.0f} s",
                highlight=False,
            )


def conclude(beds: Sequence[Bed], options: argparse.Namespace, console: Console) -> int:
    """The table of all rows that are there, in turn or not; how many are owed stands in it."""
    ids = {row.id for row in bench.rows(beds, everywhere=True)}
    done = {id: row for id, row in bench.finished(options.out).items() if id in ids}
    owed = bench.owed(bench.rows(beds, everywhere=options.everywhere), done)
    names = [bed.name for bed in beds]
    rows = bench.ordered(done, names)
    s = score.summary(rows)
    console.print(
        f"{s['right']} of {s['scored']} scored rows have the right cause first; "
        f"{s['confident_wrong']} confident and wrong ({score.bound(s['confident_wrong'], s['confident'])}); "
        f"{s['cleared']} of {s['healthy']} healthy ones cleared."
    )
    crashed = [id for id, row in done.items() if row["told"]["verdict"] == bench.CRASHED]
    if crashed:
        console.print(f"[red]check crashed on {len(crashed)}[/red]: {', '.join(crashed[:5])}")
    how = "python -m runs.mutations --everywhere" if options.everywhere else "make mutations"
    bench.write_docs(rows, options.docs, LEFT_OUT, how, owed)
    console.print(f"Wrote {options.docs / 'mutations.jsonl'} and {options.docs / 'mutations.md'}.")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
