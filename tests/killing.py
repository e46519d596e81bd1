"""Runs killed outright at chosen moments: at the n-th call or return inside chosen files of ours, in a process each."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL


def moments(n: int) -> list[float]:
    """n shares of a run, one drawn in each n-th of it; not its very last events, which may be fewer."""
    drawn = random.Random(n)
    return [0.98 * (i + drawn.random()) / n for i in range(n)]


def in_a_child(module: str, folder: Path, shares: Sequence[float]) -> dict[str, Any]:
    """Run ``module.child(folder, shares)`` in a process of its own, which may fork; what it printed."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); "
        f"import {module}; {module}.child(sys.argv[2], json.loads(sys.argv[3]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(folder), json.dumps(list(shares))],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


class Watch:
    """Counts what happens in files whose path holds one of ``places``; at event ``fatal`` the process dies."""

    def __init__(self, places: Sequence[str]) -> None:
        self.places, self.events, self.fatal = places, 0, -1

    def __call__(self, frame: Any, _event: str, _argument: object) -> None:
        if any(place in frame.f_code.co_filename for place in self.places):
            self.events += 1
            if self.events == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    def unwatched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function without counting: a pass of a model has thousands of events and touches no file."""

        def quiet(*given: Any, **named: Any) -> Any:
            sys.setprofile(None)
            found = function(*given, **named)
            sys.setprofile(self)
            return found

        return quiet

    def over(self, go: Callable[[Path], object], folder: Path, shares: Sequence[float]) -> None:
        """One run undisturbed, one counted, then one killed at each share of its events; prints how each ended."""
        go(folder / "whole")
        self.events = 0
        sys.setprofile(self)
        go(folder / "counted")
        sys.setprofile(None)
        total, told = self.events, []
        for i, share in enumerate(shares):
            pid = os.fork()
            if not pid:
                self.events, self.fatal = 0, 1 + int(share * total)
                sys.setprofile(self)
                go(folder / f"killed-{i}")
                os._exit(0)
            told.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(json.dumps({"total": total, "status": told}))
