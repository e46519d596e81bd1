"""Which record each foreign sample is of, and the stock of those for which that is sure.

By the sample's own ids; else by the record's id or number in its name, where the length agrees and, given the
embedding, tap 0 does too; else by its length together with tap 0: the tensor whose rows are the record's rows of the
embedding, up to one factor (Gemma scales them) and the rounding of the dtype. What could be two records is left out.

Letters: T positions, D target width, C taps, V target vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.records import Record
from eyas.states.foreign.folder import ForeignStates
from eyas.states.foreign.sample import Sample
from eyas.states.foreign.shapes import wrong_numbers
from eyas.states.stock import Tap, place_of

CLOSE = 0.05  # of the rows' norm; bf16 rounds by 0.002, fp8 by 0.03, other rows differ by about 1
LOOKED_AT = 64  # rows compared
NAMED = 5


@dataclass(frozen=True, eq=False)
class _Matched:
    """Sample ``index``, of ``record``; ``record`` is cut to the rows there are."""

    index: int
    record: Record


class ForeignStock:
    """The matched samples as a stock. Its taps are the fields' names until ``placed`` gives them numbers."""

    def __init__(
        self,
        foreign: ForeignStates,
        matched: Sequence[_Matched],
        fields: Sequence[str],
        *,
        numbers: Mapping[str, int] | None = None,
        last: Tap | None = None,
        offset: int = 0,
    ) -> None:
        self._foreign, self._matched, self._fields = foreign, tuple(matched), tuple(fields)
        self._numbers, self._last, self._offset = dict(numbers or {}), last, offset
        self._records = tuple(_shifted(m.record, offset) for m in self._matched)
        by_tap = {self._numbers.get(field, field): field for field in self._fields}
        known = sorted(tap for tap in by_tap if isinstance(tap, int))
        self._taps: tuple[Tap, ...] = (*known, *(tap for tap in by_tap if isinstance(tap, str)))
        self._field_of = by_tap

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self._taps

    @property
    def last(self) -> Tap | None:
        return self._last

    @property
    def samples(self) -> tuple[int, ...]:
        """The number of each record's sample among the foreign ones."""
        return tuple(m.index for m in self._matched)

    def sample(self, index: int) -> Sample:
        """The sample of record ``index`` as it is stored: neither cut nor shifted."""
        record = self._matched[index].record
        return self._foreign.sample(self._matched[index].index, length=record.seq_len)

    def states(self, index: int, taps: Sequence[Tap]) -> Tensor:
        """As ``Stock.states``: [T, C*D], fp32, in the order asked for."""
        fields = [self._field_of[self._taps[place_of(tap, self._taps)]] for tap in taps]
        values = {stored.field: stored.values for stored in self.sample(index).tensors}
        start = max(self._offset, 0)
        rows = slice(start, start + self._records[index].seq_len)
        return torch.cat([values[field][rows].float() for field in fields], dim=-1)

    def truth(self, index: int) -> None:
        return None

    def placed(self, mapping: Mapping[str, int], last: int | None = None) -> ForeignStock:
        """The same with numbers for the fields in ``mapping``; ``last`` is the number that is tap n, if one is.

        Fields without a number keep their names. Raises InputError for a field not stored or a number given twice.
        """
        if unknown := [field for field in mapping if field not in self._fields]:
            raise InputError(f"{', '.join(unknown)} is not stored.", way_out=f"Stored are {', '.join(self._fields)}.")
        if twice := [tap for tap, n in Counter(mapping.values()).items() if n > 1]:
            raise InputError(f"Tap {twice[0]} is given to two tensors.", way_out="Keep the better one.")
        return ForeignStock(self._foreign, self._matched, self._fields, numbers=mapping, last=last, offset=self._offset)

    def shifted(self, by: int) -> ForeignStock:
        """For states stored off by so many positions: row p + by is that of position p.

        by = 1:   ids  x0 x1 x2 x3       by = -1:  ids     x0 x1 x2 x3
                  rows r0 r1 r2 r3                 rows    r0 r1 r2 r3
                  x0 gets r1, x3 is cut off        x1 gets r0, x0 is cut off
        """
        return ForeignStock(
            self._foreign,
            self._matched,
            self._fields,
            numbers=self._numbers,
            last=self._last,
            offset=self._offset + by,
        )


def as_stock(
    foreign: ForeignStates, records: Sequence[Record] | None, embedding: Tensor | None, width: int
) -> tuple[ForeignStock, tuple[str, ...]]:
    """The samples whose record is known, and what there is to say about all of them.

    ``embedding`` [V, D]; without ``records`` samples with ids become records. A sample that cannot be read is left
    out and named. Raises InputError where none is left, or where the first is of another width.
    """
    foreign.width = width
    matcher = _Matcher(records, embedding)
    said: Counter[str] = Counter()
    left: dict[str, list[str]] = defaultdict(list)
    chosen: list[tuple[_Matched, tuple[str, ...], str]] = []
    for index in range(len(foreign)):
        name = foreign.name(index)
        try:
            sample = foreign.sample(index, length=matcher.length_of(name))
        except InputError as error:
            if len(foreign) == 1:
                raise
            left[f"cannot be read, such as: {error.message}"[:300] if not left else "cannot be read"].append(name)
            continue
        for stored in sample.tensors:
            if wrong := wrong_numbers(stored.values):
                said[f"{stored.field}: {wrong} in {name}"] += 1
                break
        record, how = matcher.record_of(sample)
        if record is None:
            left[how].append(name)
            continue
        rows = min(record.seq_len, sample.rows)
        if rows < record.seq_len:
            said["fewer rows than tokens: the record is cut"] += 1
        record = replace(record, input_ids=record.input_ids[:rows], loss_mask=record.loss_mask[:rows])
        chosen.append((_Matched(index, record), tuple(s.field for s in sample.tensors), how))
    if not chosen:
        raise InputError(
            f"None of the {len(foreign)} samples in {foreign.path} belongs to a record: {_told(left)}.",
            way_out="Name the records that these states were made of with --records, and their target.",
        )
    fields = Counter(fields for _, fields, _ in chosen).most_common(1)[0][0]
    kept = [(m, how) for m, found, how in chosen if found == fields]
    for m, found, _ in chosen:
        if found != fields:
            left[f"other tensors than {', '.join(fields)}"].append(foreign.name(m.index))
    kept, twice = _once(kept)
    for m in twice:
        left["two samples for one record"].append(foreign.name(m.index))
    notes = [*foreign.notes]
    notes += [f"{n} of {len(foreign)} samples matched {how}" for how, n in Counter(how for _, how in kept).items()]
    notes += [f"{text} ({n} samples)" for text, n in said.most_common() if n][: 2 * NAMED]
    notes += [f"{len(names)} samples left out, {why}: {_some(names)}" for why, names in left.items()]
    return ForeignStock(foreign, [m for m, _ in kept], fields), tuple(notes)


def _once(kept: list[tuple[_Matched, str]]) -> tuple[list[tuple[_Matched, str]], list[_Matched]]:
    """Of samples with one record those that say so themselves come first; two guesses at one are no match."""
    by_record: dict[str, list[tuple[_Matched, str]]] = defaultdict(list)
    for m, how in kept:
        by_record[m.record.id].append((m, how))
    good: list[tuple[_Matched, str]] = []
    twice: list[_Matched] = []
    for group in by_record.values():
        sure = [pair for pair in group if pair[1].startswith("by their ids")]
        first = sure[:1] or (group if len(group) == 1 else [])
        good += first
        twice += [m for m, how in group if (m, how) not in first]
    return sorted(good, key=lambda pair: pair[0].index), twice


class _Matcher:
    def __init__(self, records: Sequence[Record] | None, embedding: Tensor | None) -> None:
        self.records, self.embedding = records, embedding
        self._by_id = {record.id: record for record in records or ()}
        self._by_length: dict[int, list[Record]] = defaultdict(list)
        for record in records or ():
            self._by_length[record.seq_len].append(record)

    def length_of(self, name: str) -> int | None:
        record = self._named(name)
        return record.seq_len if record else None

    def record_of(self, sample: Sample) -> tuple[Record | None, str]:
        """The record and how it was found, or None and why not."""
        if sample.input_ids is not None:
            return self._by_ids(sample)
        if self.records is None:
            return None, "without ids, and no records are given"
        named = self._named(sample.name)
        if named is not None and abs(named.seq_len - sample.rows) <= 1:
            if self.embedding is None:
                return named, "by their names"
            if (shift := self._shift(sample, named)) is not None:
                return named, f"by their names, and tap 0 agrees{_told_shift(shift)}"
        return self._by_rows(sample)

    def _by_ids(self, sample: Sample) -> tuple[Record | None, str]:
        assert sample.input_ids is not None
        ids = sample.input_ids.to(torch.int64).numpy()
        if ids.min() < 0 or ids.max() >= 2**31:
            return None, "with ids that are no token ids"
        if self.records is None:
            if sample.loss_mask is not None and bool(sample.loss_mask.any()):
                mask, how = sample.loss_mask.bool().numpy(), "by their ids, which are the records; masks are theirs"
            else:
                mask, how = np.arange(len(ids)) > 0, "by their ids, which are the records; no mask: all but token 0"
            return Record(ids.astype(np.int32), mask.copy(), sample.name), how
        exact = self._by_id.get(Record(ids.astype(np.int32), ids > 0, "").id)
        if exact is not None:
            return exact, "by their ids"
        longer = [r for r in self.records if r.seq_len > len(ids) and np.array_equal(r.input_ids[: len(ids)], ids)]
        if longer:
            cut = replace(longer[0], input_ids=ids.astype(np.int32), loss_mask=longer[0].loss_mask[: len(ids)])
            return cut, "by their ids, which are the beginning of a record"
        shorter = [r for r in self.records if r.seq_len < len(ids) and np.array_equal(r.input_ids, ids[: r.seq_len])]
        if shorter:
            return max(shorter, key=lambda r: r.seq_len), "by their ids, which begin with a record"
        return None, "with ids that are no record's"

    def _named(self, name: str) -> Record | None:
        """The record whose id stands in the name, or whose number is the last in it."""
        for word in re.findall(r"[0-9a-f]{16}", name):
            if word in self._by_id:
                return self._by_id[word]
        numbers = re.findall(r"\d{1,9}", name.rpartition("/")[2].partition(".")[0])
        if self.records and numbers and int(numbers[-1]) < len(self.records):
            return self.records[int(numbers[-1])]
        return None

    def _by_rows(self, sample: Sample) -> tuple[Record | None, str]:
        same = self._by_length.get(sample.rows, [])
        if self.embedding is not None:
            near = [*same, *self._by_length.get(sample.rows + 1, []), *self._by_length.get(sample.rows - 1, [])]
            found = {r.id: (r, shift) for r in near if (shift := self._shift(sample, r)) is not None}
            if len(found) == 1:
                record, shift = next(iter(found.values()))
                return record, f"by their lengths and tap 0{_told_shift(shift)}"
            if len(found) > 1:
                return None, "of which several records have these rows"
        if len(same) == 1:
            return same[0], "by their lengths alone"
        return None, f"of which {'several records have' if same else 'no record has'} the length"

    def _shift(self, sample: Sample, record: Record) -> int | None:
        """By how many positions tap 0 is off, where some tensor is the record's rows of the embedding; else None."""
        assert self.embedding is not None
        if int(record.input_ids.max()) >= len(self.embedding):
            return None
        ids = torch.from_numpy(record.input_ids[: LOOKED_AT + 1].astype(np.int64)).to(self.embedding.device)
        rows = self.embedding[ids].float().cpu()
        for by in (0, 1, -1):
            for stored in sample.tensors:
                held = stored.values[: LOOKED_AT + 1].float()
                ours, theirs = rows[max(-by, 0) :], held[max(by, 0) :]
                n = min(len(ours), len(theirs))
                if n > 1 and ours.shape[1] == theirs.shape[1] and _same(ours[:n], theirs[:n]):
                    return by
        return None


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two [T, D] agree up to one factor."""
    scale = (ours * theirs).sum() / (ours * ours).sum().clamp(min=1e-30)
    return bool(theirs.norm() > 0) and bool((theirs - scale * ours).norm() <= CLOSE * theirs.norm())


def _shifted(record: Record, by: int) -> Record:
    """What of a record keeps a row when row p + by is that of position p."""
    kept = slice(max(-by, 0), record.seq_len - max(by, 0))
    return replace(record, input_ids=record.input_ids[kept], loss_mask=record.loss_mask[kept]) if by else record


def _told_shift(by: int) -> str:
    return f", whose rows stand {abs(by)} position too {'late' if by > 0 else 'early'}" if by else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _told(left: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{len(names)} {why} ({_some(names)})" for why, names in left.items())
