"""Files written whole or not at all, and JSON lines read with the line number in every complaint."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from eyas.errors import EnvironmentFault, InputError, UsageError

PART, OLD = ".part", ".old"  # suffixes of what is not finished, and of what steps aside
MAX_LINE_BYTES = 64 * 2**20  # one record of a million tokens is about 20 MB of JSON


def explain_os_error(error: OSError, path: Path) -> EnvironmentFault:
    """An operating system error in our words: what could not be written, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path("/")).free
        return EnvironmentFault(
            f"The disk is full: {path} could not be written ({free / 1e6:.0f} MB free).",
            way_out="Nothing half-written was left behind. Free some space and run the same command again.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFault(
            f"{path} may not be written ({error.strerror}).", way_out="Choose an output you may write to."
        )
    return EnvironmentFault(
        f"{path} could not be written: {error.strerror or error}.",
        way_out="Check the path and run the same command again.",
    )


@contextmanager
def _in_place_of(path: Path, make: Callable[[], Path], mode: int) -> Iterator[Path]:
    """What ``make`` makes beside ``path``: at the end it is on the disk and takes its place, or it is gone."""
    made: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = make()
        yield made
        for file in [p for p in made.rglob("*") if p.is_file()] if made.is_dir() else [made]:
            _sync(file)
        os.chmod(made, mode)
        _replace(made, path)
        with suppress(OSError):  # some file systems refuse to sync a folder; the rename is done
            _sync(path.parent)
    except EnvironmentFault:
        raise
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        if made is not None:
            _remove(made)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(made: Path, path: Path) -> None:
    """Rename; a folder cannot be renamed onto one that holds something, so that one steps aside first."""
    if made.is_dir() and path.exists():
        old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=OLD))
        os.replace(path, old / path.name)
        os.replace(made, path)
        _remove(old)
    else:
        os.replace(made, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of ``path``; on success it is synced and renamed onto it, else it is removed."""
    path = Path(path)

    def make() -> Path:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        os.close(fd)
        return Path(name)

    with _in_place_of(path, make, 0o644) as made, open(made, mode, encoding=None if "b" in mode else "utf-8") as handle:
        yield handle


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place at the end. An older ``path`` is swapped out whole."""
    path = Path(path)
    with _in_place_of(
        path, lambda: Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)), 0o755
    ) as made:
        yield made


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name for a library that insists on writing the file itself; renamed onto ``path`` at the end."""
    with _in_place_of(path, lambda: path.with_name(f".{path.name}{PART}"), 0o644) as made:
        yield made


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as handle:
        handle.write(text)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` against a second run; released by the system when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"Another run is writing to {folder}.", way_out="Wait for it to end, or choose another --out."
            ) from error
        yield


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the output ``path`` against a second run, and put right what a killed one left beside it.

    The lock is a hidden neighbour of ``path``, since ``path`` itself is swapped; it is gone again at the end.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(lock, path)
    except EnvironmentFault:
        raise
    except OSError as error:
        raise explain_os_error(error, path) from error
    try:
        _put_right(path)
        yield
    finally:
        lock.unlink(missing_ok=True)  # before the lock is released: who waits for it looks whether it is still there
        os.close(handle)


def _locked(lock: Path, path: Path) -> int:
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise UsageError(
                f"Another run is writing to {path}.", way_out="Wait for it to end, or choose another --out."
            ) from error
        if lock.exists() and os.path.samestat(os.fstat(handle), os.stat(lock)):
            return handle
        os.close(handle)  # its last holder removed it between our opening and our locking


def _put_right(path: Path) -> None:
    """Remove unfinished neighbours; an old ``path`` that stepped aside for a new one that never came steps back."""
    start = f".{path.name}."
    for left in [p for p in path.parent.iterdir() if p.name.startswith(start)]:
        unique, dot, kind = left.name.removeprefix(start).rpartition(".")
        if "." in unique:  # the neighbour of another output, whose name begins as ours does
            continue
        if dot + kind == OLD and not path.exists() and (left / path.name).exists():
            os.replace(left / path.name, path)
        if dot + kind in (PART, OLD):
            _remove(left)


def refuse_existing(path: Path, *, overwrite: bool, resume_hint: bool = False) -> None:
    """Refuse an output that exists unless the user said what to do with it."""
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        ways = "--resume to go on with it, or --overwrite" if resume_hint else "--overwrite"
        raise UsageError(f"{path} exists already.", way_out=f"Pass {ways} to replace it, or another --out.")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Raw lines with their number from 1; ``.gz`` is decompressed as it streams; one line is bounded in size."""
    with open_bytes(path) as (handle, _):
        number = 0
        while line := handle.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MB.",
                    way_out="This is not JSON lines; put one JSON object on each line.",
                )
            yield number, line


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file to read from, unpacked as it streams if it ends in ``.gz``, and the packed file for its position."""
    try:
        with open(path, "rb") as raw:
            if path.suffix != ".gz":
                yield raw, raw
                return
            with gzip.open(raw, "rb") as handle:
                yield handle, raw  # type: ignore[misc]
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist.", way_out="Check the path.") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder, a file was expected.", way_out="Name the file in it.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}).", way_out="Fetch or write it again.") from error


def parse_json_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One JSON object, or an error that names file, line and column."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start}).",
            way_out="Convert the file, e.g. iconv -f latin1 -t utf-8, or pass --skip-bad to keep the other lines.",
        ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}, line {number}: broken JSON, {error.msg} at column {error.colno}.",
            way_out="Mend the line, or pass --skip-bad to keep the other lines.",
        ) from error
    except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
        raise InputError(
            f"{path}, line {number}: JSON that cannot be read ({type(error).__name__}).",
            way_out="Mend the line, or pass --skip-bad to keep the other lines.",
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{path}, line {number}: a JSON {type(value).__name__} where an object was expected.",
            way_out="Put one JSON object on each line, or pass --skip-bad to keep the other lines.",
        )
    return value
