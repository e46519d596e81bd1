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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from eyas.errors import EnvironmentFault, InputError, UsageError

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
def atomic_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of ``path``; on success it is synced and renamed onto it, else it is removed."""
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        temporary = Path(name)
        encoding = None if "b" in mode else "utf-8"
        with os.fdopen(fd, mode, encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except EnvironmentFault:
        raise
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as handle:
        handle.write(text)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place at the end. An older ``path`` is swapped out whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    except OSError as error:
        raise explain_os_error(error, path) from error
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
            os.replace(path, old / path.name)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except EnvironmentFault:
        raise
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def refuse_existing(path: Path, *, overwrite: bool, resume_hint: bool = False) -> None:
    """Refuse an output that exists unless the user said what to do with it."""
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        ways = "--resume to go on with it, or --overwrite" if resume_hint else "--overwrite"
        raise UsageError(f"{path} exists already.", way_out=f"Pass {ways} to replace it, or another --out.")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Raw lines with their number from 1; ``.gz`` is decompressed as it streams; one line is bounded in size."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as handle:
            number = 0
            while line := handle.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MB.",
                        way_out="This is not JSON lines; put one JSON object on each line.",
                    )
                yield number, line
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name for a library that insists on writing the file itself; renamed onto ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    except EnvironmentFault:
        raise
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)
