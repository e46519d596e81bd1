"""An engine as a child process: its own group, its own log, gone when we are, whatever happens.

A child is known by its pid *and* the moment it was started, since pids come round again. Both stand in a small file
while it runs, so what a killed eyas left behind is found and ended by the next one (``reap``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EnvironmentFault

PATIENCE = 20.0  # seconds between asking it to end and ending it
MOST_LOG = 256 << 10  # bytes of the end of a log that are looked at
OURS = ("PYTHONHOME", "PYTHONSTARTUP", "PYTHONPATH", "VIRTUAL_ENV")
PREFIX = "eyas-engine-"


@dataclass(frozen=True)
class Identity:
    """A process, told from a later one with the same pid."""

    pid: int
    started: int
    """In clock ticks since the machine started (proc(5), stat field 22)."""

    @property
    def alive(self) -> bool:
        return started(self.pid) == self.started


def started(pid: int) -> int | None:
    """None for a process that is gone, a zombie included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


class Child:
    """``command``, in a process group of its own; its output goes to ``log``. Ends with ``close``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], what: str) -> None:
        """``what`` is started, in words, for errors."""
        self.what = what
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # 0700
        self.log = self.folder / "log.txt"
        try:
            with open(self.log, "wb") as out:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=dict(environment),
                    start_new_session=True,  # an interrupt is ours to handle
                )
        except OSError as error:
            _remove(self.folder)
            raise EnvironmentFault(
                f"{command[0]} could not be started: {error.strerror}.",
                way_out=f"Pass --engine-python, the python of an environment with {what} (…/bin/python).",
            ) from error
        me = os.getpid()
        kept = {"group": self._process.pid, "started": started(self._process.pid), "owner": me, "owned": started(me)}
        (self.folder / "child.json").write_text(json.dumps(kept), encoding="utf-8")

    @property
    def code(self) -> int | None:
        """Its exit code once it has ended; negative is a signal."""
        return self._process.poll()

    def last_words(self, lines: int = 12) -> list[str]:
        return last_words(self.log, lines)

    def end(self) -> None:
        end_group(self._process.pid, self._process)

    def close(self, *, keep_log: Path | None = None) -> None:
        """End it and all it started, then remove its folder; the log is kept at ``keep_log`` if asked."""
        self.end()
        if keep_log is not None:
            with suppress(OSError):
                keep_log.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.log, keep_log)
        _remove(self.folder)


def end_group(group: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """SIGTERM, a while, SIGKILL: to the whole group, for an engine's own children outlive it otherwise."""
    for sent, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, PATIENCE)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, sent)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if process is not None:
                process.poll()  # or it stays a zombie, and its group with it
            if not members(group):
                if process is not None:
                    process.wait()
                return
            time.sleep(0.05)


def members(group: int) -> list[int]:
    """Living processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def reap(where: Path | None = None) -> int:
    """End what an eyas that is gone has left running; how many."""
    ended = 0
    for file in (where or Path(tempfile.gettempdir())).glob(f"{PREFIX}*/child.json"):
        try:
            if file.stat().st_uid != os.getuid():
                continue
            kept = json.loads(file.read_text(encoding="utf-8"))
            owner, child = Identity(kept["owner"], kept["owned"]), Identity(kept["group"], kept["started"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if owner.alive:
            continue
        if child.alive:
            end_group(child.pid)
            ended += 1
        _remove(file.parent)
    return ended


def last_words(log: Path, lines: int) -> list[str]:
    """The last lines of a log that hold anything."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - MOST_LOG))
            text = handle.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def port_taken(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _remove(folder: Path) -> None:
    """Files of ours in a folder of ours; anything else in it is left where it is."""
    with suppress(OSError):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
