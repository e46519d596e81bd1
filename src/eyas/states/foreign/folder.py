"""A folder of states that somebody else wrote, a file a sample, read one at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.states.foreign import baldeagle, load, loose, modelopt, specforge, speculators
from eyas.states.foreign.parts import Parts
from eyas.states.foreign.sample import Sample, Stored
from eyas.states.foreign.shapes import Ambiguous, Axes, Known, oddities, planes

FORMATS = (specforge, speculators, modelopt, baldeagle, loose)  # the first that recognises a file has it
SUFFIXES = (".ckpt", ".ckpt.gz", ".pt", ".pth", ".bin", ".safetensors")
MAX_FILES = 2_000_000
LOOKED_AT = 8  # samples asked how the folder is laid out when one of them can be read in two ways
UNDERSTOOD = (
    "Understood are SpecForge (input_ids, loss_mask, aux_hidden_state, hidden_state), speculators (token_ids, "
    "hidden_states), ModelOpt (input_ids, hidden_states, aux_hidden_states), BaldEagle (input_ids, hidden_state), and "
    "any list, dictionary or stack of tensors [T, D]."
)


class ForeignStates:
    """Samples in the order of their numbers. ``notes`` grow with what was odd in the samples read so far.

    Nothing but the list of files is held: a sample is read when asked for, memory-mapped.
    """

    def __init__(self, path: Path, width: int | None = None) -> None:
        """``width`` is the target's, where known. Raises InputError where no file of states is found."""
        self.path, self.width = Path(path), width
        self._files, skipped = _files(self.path)
        self._notes: dict[str, None] = dict.fromkeys(
            [f"{len(skipped)} other files not read: {', '.join(skipped[:3])}"] if skipped else []
        )
        self._axes: dict[str, Axes] = {}
        self._format = _format_of(self._files[0], load.read(self._files[0]))

    @property
    def format(self) -> str:
        name: str = self._format.NAME
        return name

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return str(self._files[index].relative_to(self.path)) if self.path.is_dir() else self._files[index].name

    def sample(self, index: int, *, length: int | None = None) -> Sample:
        """One sample; ``length`` is its number of tokens where somebody knows it and the file has no ids.

        Raises InputError naming the file, its keys and shapes.
        """
        try:
            return self._sample(index, length, self._axes)
        except Ambiguous:
            self._learn(index)
            return self._sample(index, length, self._axes)

    def _learn(self, but: int) -> None:
        """How other samples' tensors are laid out: which of two equal sizes is which, only they can tell."""
        for index in [i for i in range(len(self)) if i != but][:LOOKED_AT]:
            try:
                self._sample(index, None, {})
            except InputError:
                continue
            return

    def _sample(self, index: int, length: int | None, usual: Mapping[str, Axes]) -> Sample:
        path, where = self._files[index], self.name(index)
        held = load.read(path)
        if (form := _format_of(path, held)) is not self._format:
            raise InputError(
                f"{where} is of {form.NAME}, {self.name(0)} of {self.format}: the folder mixes formats.",
                way_out="Put the files of each into a folder of their own.",
            )
        found: Parts = form.parts(held)
        ids, mask = _flat(found.input_ids, "ids", where), _flat(found.loss_mask, "loss_mask", where)
        notes = list(found.notes)
        if ids is not None and mask is not None and len(ids) != len(mask):
            notes.append(f"loss_mask of {len(mask)} entries for {len(ids)} ids is not used")
            mask = None
        known = Known(len(ids) if ids is not None else length, self.width or found.width)
        if self.width and found.width and self.width != found.width:
            raise InputError(
                f"{where}: states of width {found.width}, the target's is {self.width}.",
                way_out="Name the target that these states come from.",
            )
        tensors: list[Stored] = []
        for field, value, claimed in found.tensors:
            each, axes = planes(value, field, where, known, usual.get(field))
            self._axes.setdefault(field, axes)
            notes += oddities(value, axes, field) if form is loose else _dtype_only(oddities(value, axes, field))
            for number, plane in enumerate(each):
                last = found.last_block if number == len(each) - 1 else None
                tensors.append(Stored(f"{field}[{number}]" if len(each) > 1 else field, plane, claimed or last))
        if len({stored.values.shape for stored in tensors}) > 1:
            shapes = ", ".join(f"{stored.field} {list(stored.values.shape)}" for stored in tensors)
            if len({stored.values.shape[1] for stored in tensors}) > 1:
                raise InputError(
                    f"{where}: tensors of several widths: {shapes}.",
                    way_out="If some are concatenations, name the target: its width cuts them into blocks.",
                )
            notes.append("tensors with different numbers of rows; the shortest counts")
        if ids is not None and any(len(stored.values) != len(ids) for stored in tensors):
            notes.append(f"states of {len(tensors[0].values)} rows for {len(ids)} ids")
        self._notes.update(dict.fromkeys(note for note in notes if " rows" not in note))
        return Sample(found.name or where, ids, mask, tuple(tensors), tuple(notes))


def open_states(path: Path, width: int | None = None) -> ForeignStates:
    """States that another program stored: a folder, or the file of one sample. Raises InputError."""
    return ForeignStates(path, width)


def _files(path: Path) -> tuple[list[Path], list[str]]:
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise InputError(f"{path} does not exist.", way_out="Check the path given with --states.")
    found: list[Path] = []
    other: list[str] = []
    for number, file in enumerate(p for p in path.rglob("*") if p.is_file()):
        if number > MAX_FILES:
            raise InputError(f"{path} holds more than {MAX_FILES:,} files.", way_out="Name a folder of states alone.")
        wanted = file.name.endswith(SUFFIXES) and file.name not in ("vocab_mapping.pt", "cache.pt")
        (found if wanted else other).append(file if wanted else file.name)  # type: ignore[arg-type]
    if not found:
        raise InputError(
            f"{path} holds no states: {len(other)} files, none of which ends in {', '.join(SUFFIXES)}.",
            way_out="Name the folder that the trainer wrote, or one file of it.",
        )
    return sorted(found, key=_natural), sorted(other)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """data_2 before data_10."""
    return [(0, int(x), "") if x.isdigit() else (1, 0, x) for x in re.split(r"(\d+)", str(path)) if x]


def _format_of(path: Path, held: Any) -> Any:
    for form in FORMATS:
        if form.recognises(held):
            return form
    if isinstance(held, Mapping):
        there = "keys " + (", ".join(sorted(map(str, held))[:20]) or "none")
    else:
        there = f"a {type(held).__name__}"
    raise InputError(f"{path} holds no states that are understood; there: {there}.", way_out=UNDERSTOOD)


def _flat(value: Any, what: str, where: str) -> Tensor | None:
    """Ids or mask as [T], whatever empty dimensions it has, and lists of numbers too."""
    if value is None:
        return None
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{where}: {what} is no row of numbers.", way_out="One entry a token.") from error
    if tensor.numel() != max(tensor.shape, default=0) or not tensor.numel():
        raise InputError(f"{where}: {what} {list(tensor.shape)} is no row of numbers.", way_out="One entry a token.")
    if what == "ids" and tensor.is_floating_point():
        raise InputError(f"{where}: ids are {tensor.dtype}, whole numbers were expected.", way_out=load.AGAIN)
    return tensor.flatten()


def _dtype_only(said: list[str]) -> list[str]:
    return [note for note in said if "stacked" not in note]
