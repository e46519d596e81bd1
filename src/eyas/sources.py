"""Rows of whatever people keep conversations in, one at a time, each with its place for complaints.

    .jsonl .ndjson      one JSON object on each line                       (.gz too)
    .json               an array, JSON lines, or an object with one array  (.gz too)
    .txt                one bare prompt on each line                       (.gz too)
    .parquet .arrow     a row each                                         eyas[datasets]
    folder              written by save_to_disk                            eyas[datasets]
    folder              of files of one kind above
    org/name            of the Hugging Face hub                            eyas[datasets]
    mt-bench, …         a prompt set by name (prompts.py)

Nothing is held but a line, an element or a batch. A row that cannot be read comes as a row with an error, so that the
reader may go on behind it; where a file breaks off, that is its last row.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import files, json_stream, prompts
from eyas.errors import EnvironmentFault, InputError, UsageError, did_you_mean

BATCH_ROWS = 256
KINDS = {".jsonl": "lines", ".ndjson": "lines", "": "lines", ".json": "json", ".txt": "text"}
KINDS |= {".parquet": "parquet", ".arrow": "arrow"}
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_EXTRA = "pip install 'eyas[datasets]'"


@dataclass(frozen=True)
class Row:
    """``data`` as the source has it, or the ``error`` that stands in its place. ``source`` is where it came from."""

    where: str
    source: str
    data: Mapping[str, Any] = field(default_factory=dict)
    error: InputError | None = None


def read(inputs: Sequence[str | Path], *, split: str | None = None, subset: str | None = None) -> Iterator[Row]:
    """The rows of every input in turn. An input that is not there is an error before the first row is read.

    ``split`` and ``subset`` (a configuration's name) choose within folders and hub data sets.
    """
    readers = [_reader(str(name), split, subset) for name in inputs]
    if (split or subset) and not any(Path(name).is_dir() or _is_hub_id(str(name)) for name in inputs):
        raise UsageError("--split and --subset choose within a folder or a hub data set.", way_out="Leave them out.")
    return (row for reader in readers for row in reader())


def _reader(name: str, split: str | None, subset: str | None) -> Callable[[], Iterable[Row]]:
    path = Path(name)
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return lambda: _saved(path, split)
        inside = _data_files(path, split)
        return lambda: (row for file in inside for row in _file(file))
    if path.exists():
        _kind(path)
        return lambda: _file(path)
    if name in prompts.names():
        return lambda: _prompts(name)
    if _is_hub_id(name):
        return lambda: _hub(name, split, subset)
    known = did_you_mean(name, prompts.names())
    raise InputError(
        f"{name} does not exist.", way_out=f"Check the path; or name a hub data set (org/name) or a prompt set. {known}"
    )


def _is_hub_id(name: str) -> bool:
    """Of the form org/name, and not the name of a file we could have read."""
    stem = name.removesuffix(".gz")
    return bool(_HUB_ID.fullmatch(name)) and stem == name and Path(stem).suffix not in KINDS.keys() - {""}


# -- files ----------------------------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    kind = KINDS.get(plain.suffix.lower())
    if kind is None or (plain != path and kind in ("parquet", "arrow")):
        raise InputError(
            f"{path} is of no kind that can be read.",
            way_out=f"Readable: {' '.join(k for k in KINDS if k)}, the first four with .gz too.",
        )
    return kind


def _file(path: Path) -> Iterator[Row]:
    """The rows of one file. What breaks off in the middle is its last row; a file that changes meanwhile is refused."""
    reader = {"lines": _lines, "json": _json, "text": _text, "parquet": _parquet, "arrow": _arrow}[_kind(path)]
    with _explained(path):
        before = os.stat(path)
    number = 0
    try:
        with _explained(path):
            for number, row in enumerate(reader(path), start=1):  # noqa: B007
                yield row
    except InputError as error:
        if not number:  # nothing of it can be read: that is no bad row
            raise
        yield Row(f"{path}, after row {number}", path.name, error=error)
    with _explained(path):
        after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InputError(
            f"{path} changed while it was read ({before.st_size:,} bytes then, {after.st_size:,} now).",
            way_out="Wait until it is written whole, and run the same command again.",
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason}).", way_out="Convert it, e.g. iconv -t utf-8.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}).", way_out="Fetch or write it again.") from error
    except EnvironmentFault:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.", way_out="Check the path.") from error


def _lines(path: Path) -> Iterator[Row]:
    for number, line in files.read_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield Row(where, path.name, files.parse_json_line(path, number, line))
        except InputError as error:
            yield Row(where, path.name, error=error if line.endswith(b"\n") else _unfinished(where, error))


def _unfinished(where: str, error: InputError) -> InputError:
    return InputError(
        f"{error.message[:-1]}, in a last line without an end: the file was cut off, or is still being written.",
        way_out=f"Fetch or write {where.rpartition(', ')[0]} again, or pass --skip-bad to leave that line out.",
    )


def _json(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as handle:
        for number, value in enumerate(json_stream.values(handle, str(path)), start=1):
            where = f"{path}, item {number}"
            yield _object(where, path.name, value)


def _object(where: str, source: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(where, source, value)
    error = InputError(
        f"{where}: a JSON {type(value).__name__} where an object was expected.",
        way_out="Make each element an object, or pass --skip-bad to keep the others.",
    )
    return Row(where, source, error=error)


def _text(path: Path) -> Iterator[Row]:
    for number, line in files.read_lines(path):
        where = f"{path}, line {number}"
        try:
            if text := line.decode("utf-8").strip():
                yield Row(where, path.name, {"prompt": text})
        except UnicodeDecodeError as error:
            told = InputError(
                f"{where}: not UTF-8 (byte {line[error.start]:#04x} at offset {error.start}).",
                way_out="Convert the file, e.g. iconv -f latin1 -t utf-8, or pass --skip-bad to keep the other lines.",
            )
            yield Row(where, path.name, error=told)


def _parquet(path: Path) -> Iterator[Row]:
    _need("pyarrow")
    import pyarrow
    import pyarrow.parquet

    with _as_input_error(path, pyarrow.ArrowException, OSError), pyarrow.parquet.ParquetFile(path) as file:
        yield from _batches(path, file.iter_batches(batch_size=BATCH_ROWS, use_threads=False))


def _arrow(path: Path) -> Iterator[Row]:
    _need("pyarrow")
    import pyarrow

    with _as_input_error(path, pyarrow.ArrowException, OSError), pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(mapped)
            yield from _batches(path, (file.get_batch(i) for i in range(file.num_record_batches)))
        else:
            mapped.seek(0)
            yield from _batches(path, pyarrow.ipc.open_stream(mapped))


def _batches(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    """Rows of record batches, a few at a time: a batch of a file may be as large as the file."""
    number = 0
    for batch in batches:
        for i in range(batch.num_rows):
            number += 1
            where = f"{path}, row {number}"
            try:
                yield Row(where, path.name, batch.slice(i, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                told = InputError(f"{where}: not UTF-8 ({error.reason}).", way_out="Mend it, or pass --skip-bad.")
                yield Row(where, path.name, error=told)


@contextmanager
def _as_input_error(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} cannot be read: {line}", way_out="Is it whole? Fetch or write it again.") from error


# -- folders --------------------------------------------------------------------------------------------------


def _data_files(folder: Path, split: str | None) -> list[Path]:
    """Every data file below a folder, by name. More than one kind is refused: one of them is not meant."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file() and not _is_hidden(p.relative_to(folder))]
    known = {p: kind for p in found if (kind := _kind_or_none(p)) is not None and p.name not in ABOUT_DATA}
    if split:
        known = {p: k for p, k in known.items() if split in re.split(r"[^\w]+|_", str(p.relative_to(folder)))}
    if not known:
        within = f" of split {split!r}" if split else ""
        raise InputError(
            f"{folder} holds no data files{within}; it holds {', '.join(p.name for p in found[:8]) or 'nothing'}.",
            way_out=f"Readable: {' '.join(k for k in KINDS if k)}, or a folder written by save_to_disk.",
        )
    if len(set(known.values())) > 1:
        raise InputError(
            f"{folder} holds files of several kinds: {', '.join(p.name for p in list(known)[:8])}.",
            way_out="Name the files that are meant, e.g. FOLDER/*.parquet.",
        )
    return list(known)


def _kind_or_none(path: Path) -> str | None:
    try:
        return _kind(path) if path.suffix else None
    except InputError:
        return None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _saved(folder: Path, split: str | None) -> Iterator[Row]:
    library = _need("datasets")
    with _as_input_error(folder, Exception):  # whatever the library makes of files that are not whole
        dataset = library.load_from_disk(str(folder))
    yield from _of_dataset(_split(dataset, split, str(folder)), str(folder), folder.name)


def _hub(name: str, split: str | None, subset: str | None) -> Iterator[Row]:
    """Streamed; from the library's own cache when offline. Data sets that are programs are refused by the library."""
    library = _need("datasets")
    try:
        dataset = library.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # the library's errors have no common root
        line = (str(error).splitlines() or [""])[0]
        if isinstance(error, ConnectionError):
            raise EnvironmentFault(
                f"{name} is no file or folder here, and could not be fetched from the hub: {line}",
                way_out="Check the network, or download it first and name the folder.",
            ) from error
        raise InputError(
            f"{name} is no file or folder here, and no hub data set that could be opened "
            f"({type(error).__name__}: {line}).",
            way_out="Check the name, and --subset and --split; offline, run it once with a network or name a folder.",
        ) from error
    yield from _of_dataset(_split(dataset, split, name), name, name)


def _split(dataset: Any, split: str | None, name: str) -> Any:
    """One split: the one asked for, else ``train``, else the only one."""
    if not isinstance(dataset, dict):
        if split and str(getattr(dataset, "split", split)) != split:
            raise UsageError(f"{name} has no split {split!r}, it is {dataset.split!r}.", way_out="Leave --split out.")
        return dataset
    wanted = split or ("train" if "train" in dataset else next(iter(dataset)) if len(dataset) == 1 else None)
    if wanted not in dataset:
        given = f"no split {split!r}" if split else "several splits and none is called train"
        raise UsageError(f"{name} has {given}.", way_out=f"Pass --split with one of: {', '.join(dataset)}.")
    return dataset[wanted]


def _of_dataset(dataset: Any, name: str, source: str) -> Iterator[Row]:
    number = 0
    try:
        for number, data in enumerate(dataset, start=1):
            yield Row(f"{name}, row {number}", source, data)
    except ConnectionError as error:
        raise EnvironmentFault(f"{name} broke off after row {number}: {error}", way_out="Run it again.") from error
    except Exception as error:  # see _hub; among them a column whose type changes from file to file
        line = (str(error).splitlines() or [""])[0]
        told = InputError(
            f"{name}, after row {number}: cannot be read on ({type(error).__name__}: {line}).",
            way_out="Is every file of it whole, and of one schema? Name the files themselves to read them one by one.",
        )
        if not number:
            raise told from error
        yield Row(f"{name}, after row {number}", source, error=told)


def _need(library: str) -> Any:
    """The optional library, quiet; or how to get it."""
    import importlib

    try:
        found = importlib.import_module(library)
    except ImportError as error:
        raise UsageError(f"Reading this needs {library}, which is not installed.", way_out=f"{_EXTRA}.") from error
    if library == "datasets":
        found.disable_progress_bars()
        found.logging.set_verbosity_error()
    return found


# -- prompt sets ----------------------------------------------------------------------------------------------


def _prompts(name: str) -> Iterator[Row]:
    for prompt in prompts.load(name):
        yield Row(f"prompt {prompt.id}", name, {"id": prompt.id, "turns": list(prompt.turns)})
