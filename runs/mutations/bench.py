"""One row, from a mutation to what came of it; and the rows that are already there."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs.mutations import naive, score
from runs.mutations.bank import BankStock
from runs.mutations.catalogue import ALL
from runs.mutations.subject import Bed, Mutation, Subject
from torch import Tensor

from eyas import curve, files, provenance
from eyas.check import check
from eyas.cli import check as cli_check
from eyas.errors import EyasError
from eyas.records import Record
from eyas.results import LengthCounts
from eyas.states.given import given
from eyas.states.stock import Stock

CRASHED = "crashed"


@dataclass(frozen=True, eq=False)
class Row:
    bed: Bed
    mutation: Mutation

    @property
    def id(self) -> str:
        return f"{self.bed.name}/{self.mutation.name}"


def rows(beds: Sequence[Bed], *, everywhere: bool = False) -> Iterator[Row]:
    """What has to be measured runs on every drafter. What files or a log show by themselves, folders that keep their
    contract, and good drafters in odd files say the same of each: they take turns, unless ``everywhere``."""
    turns: Counter[str] = Counter()
    for mutation in ALL:
        fit = [bed for bed in beds if mutation.applies(bed)]
        if fit and not everywhere and (mutation.inventory or mutation.keeps_contract or mutation.kind == "H"):
            fit = [min(fit, key=lambda bed: turns[bed.name])]
            turns[fit[0].name] += 1
        yield from (Row(bed, mutation) for bed in fit)


def owed(asked: Iterable[Row], done: Mapping[str, Mapping[str, Any]]) -> int:
    """Rows that are still to be run; of a mutation that takes turns any drafter's row will do."""
    rows_ = list(asked)
    times = Counter(row.mutation.name for row in rows_)
    seen = {row["mutation"] for row in done.values()}
    return sum(row.id not in done and (times[row.mutation.name] > 1 or row.mutation.name not in seen) for row in rows_)


# -- one row ----------------------------------------------------------------------------------------------------


def run(row: Row) -> dict[str, Any]:
    """A row of docs/mutations.jsonl, and under ``told`` what check said, for whoever asks why."""
    began = time.perf_counter()
    subject = row.mutation.subject(row.bed)
    result = judge(row, subject)
    lost = cost(row.bed, subject)
    names = [name for name in (row.mutation.expected, *row.mutation.also) if name not in (None, "healthy")]
    first, second = score.told(result["verdict"], result["findings"], [str(name) for name in names])
    fault = row.mutation.expected not in (None, "healthy")
    scored = fault and (row.mutation.inventory or lost.proven)
    return {
        "drafter": row.bed.name,
        "mutation": row.mutation.name,
        "kind": row.mutation.kind,
        "expected": row.mutation.expected,
        "first": first,
        "second": second,
        "confident": result["confident"],
        "accept_before": lost.before,
        "accept_after": lost.after,
        "standard_error": lost.error,
        "scored": scored,
        "outcome": score.outcome(
            row.mutation.expected, row.mutation.also, first, result["confident"], result["verdict"], scored
        ),
        "seconds": round(time.perf_counter() - began, 1),
        "told": {
            key: result.get(key) for key in ("verdict", "findings", "not_checked", "configured", "found", "states")
        },
    }


def judge(row: Row, subject: Subject) -> dict[str, Any]:
    """What ``check`` says, as JSON. An error that reaches a user is a verdict of its own: nothing was concluded.

    A folder with its contract is checked as a user would, the target running. Without, everything has to be measured
    and the target's states come from the bank.
    """
    stock: Stock | None = None if row.mutation.keeps_contract else BankStock(row.bed.bank, subject.records)
    with tempfile.TemporaryDirectory() as place:
        folder = subject.write(Path(place) / "drafter")
        form, notes = "eyas", ()
        try:
            if subject.samples is not None:
                stock, form, notes = given(folder / "states", row.bed.target, subject.records)
            result = check(
                folder,
                row.bed.target,
                subject.records,
                name=row.bed.name,
                manifest=subject.manifest,
                states=stock,
                form=form,
                notes=notes,
                engine=subject.engine,
                evidence=_beside(subject, row.bed, Path(place)),
            )
        except EyasError as error:
            return {"verdict": "undecided", "confident": False, "findings": [], "not_checked": [str(error)]}
        except Exception:  # a row must not end the bench; that one crashed is the first thing its report says
            return {"verdict": CRASHED, "confident": False, "findings": [], "not_checked": [traceback.format_exc()]}
        told: dict[str, Any] = json.loads(json.dumps(result.to_json()))
        return told


def _beside(subject: Subject, bed: Bed, place: Path) -> list[Any]:
    """The steps that ``eyas check --engine --flags --observed`` adds."""
    log = None
    if subject.log is not None:
        log = place / "engine.log"
        log.write_text(subject.log, encoding="utf-8")
    return cli_check.beside(str(log) if log else None, subject.engine, None, subject.flags, bed.target.spec)


def cost(bed: Bed, subject: Subject) -> score.Loss:
    """Walks of the healthy drafter and of the mutated files, on the records handed over."""
    records = walkable(bed, subject.records)
    if records is None:
        return score.Loss(None, None, None)
    before = naive.play_healthy(bed, records).lengths
    fed = None
    if subject.samples is not None:
        by_id = {sample.record.id: sample for sample in subject.samples}
        fed = [_fed(by_id[record.id].tensors, len(bed.taps)) for record in records]
    if fed is not None:
        return score.loss(before, _walked(bed, subject, records, fed))
    key = _digest(subject, records)
    if key not in bed.mutated:
        bed.mutated[key] = _walked(bed, subject, records, None)
    return score.loss(before, bed.mutated[key])


def _walked(bed: Bed, subject: Subject, records: Sequence[Record], fed: Sequence[Tensor] | None) -> LengthCounts | None:
    try:
        return naive.play(naive.engine(subject, bed), bed.bank, records, fed).lengths
    except naive.CannotRun:
        return None


def _digest(subject: Subject, records: Sequence[Record]) -> str:
    """Of all that an engine sees: two subjects of one digest keep the same tokens."""
    config = {key: value for key, value in subject.config.items() if key != "eyas"}
    digest = hashlib.sha256(json.dumps([config, subject.feedback], sort_keys=True).encode())
    for name, tensor in sorted(subject.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for record in records:
        digest.update(f"{record.id} {record.loss_mask.tobytes().hex()}".encode())
    return digest.hexdigest()


def _fed(tensors: Sequence[Tensor], taps: int) -> Tensor:
    return torch.cat([t.float() for t in tensors[:taps]], dim=-1)


def walkable(bed: Bed, records: Sequence[Record]) -> list[Record] | None:
    """The records if they are the target's own text and something in them is supervised."""
    kept = [record for record in records if record.loss_mask.any()]
    if not kept or len(kept) < len(records) or naive.agreement(bed.bank, kept) < curve.ON_POLICY:
        return None
    return kept


# -- rows that are there ----------------------------------------------------------------------------------------


def file_of(out: Path, id: str) -> Path:
    """Readable, and with a digest, since ``taps + 1`` and ``taps - 1`` have the same letters."""
    letters = re.sub(r"[^a-z0-9]+", "-", id.lower()).strip("-")
    return out / "rows" / f"{letters}-{provenance.sha256_text(id)[:6]}.json"


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """Rows by id, as they were written."""
    found = {}
    for path in sorted((out / "rows").glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        found[f"{row['drafter']}/{row['mutation']}"] = row
    return found


def keep(out: Path, row: Mapping[str, Any]) -> None:
    """Whole or not at all; a row run again takes the place of the old one."""
    path = file_of(out, f"{row['drafter']}/{row['mutation']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, dict(row))


def ordered(found: Mapping[str, Mapping[str, Any]], beds: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of mutations and drafters that still exist, in their order, with the keys that are committed."""
    place = {mutation.name: i for i, mutation in enumerate(ALL)}
    known = [row for row in found.values() if row["mutation"] in place and row["drafter"] in beds]
    known.sort(key=lambda row: (place[row["mutation"]], beds.index(row["drafter"])))
    return [{key: row[key] for key in score.KEYS} for row in known]


def rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float | np.floating) else value


def write_docs(
    rows: Sequence[Mapping[str, Any]], docs: Path, left_out: Mapping[str, str], how: str, missing: int
) -> None:
    text = "".join(json.dumps({k: rounded(v) for k, v in row.items()}) + "\n" for row in rows)
    files.write_text(docs / "mutations.jsonl", text)
    files.write_text(docs / "mutations.md", score.markdown(rows, left_out, how, missing))
