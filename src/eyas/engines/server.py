"""What every engine that serves over HTTP has: a process of ours or of others, waited for, asked, and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyas.engines import child
from eyas.engines.child import Child
from eyas.engines.http import Asker
from eyas.engines.live import About, Answer
from eyas.errors import EnvironmentFault, InputError
from eyas.provenance import publishable

PAUSE = 0.25


def port_of(wished: int | None) -> int:
    """A free one; EnvironmentFault where the one wished for is taken."""
    if wished is not None and child.port_taken(wished):
        raise EnvironmentFault(
            f"Port {wished} is taken.", way_out="Leave --port out, and a free one is found, or stop who has it."
        )
    return wished or child.free_port()


ELSEWHERE = ("see root cause above", "see stack trace")  # a process that only says that another one failed


def told(words: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """A command as it may be written down: no folders of this machine."""
    python, *rest = words
    return [Path(python).name, *(str(publishable(_named(word, folders))) for word in rest)]


def _named(word: str, folders: Sequence[Path]) -> str:
    for folder in folders:
        word = word.replace(str(folder), folder.name)
    return word


def last_error(lines: Sequence[str]) -> str:
    """The line that says why: the last that names an error and does not point at another, else the last."""
    named = [line for line in lines if "Error: " in line or "Error:" in line.split(" ", 1)[0]]
    first = [line for line in named if not any(words in line.lower() for words in ELSEWHERE)]
    words = (first or named or list(lines) or ["none"])[-1]
    return str(publishable(words.strip()[-400:]))


class Server:
    """``process`` is ours, None for an engine of others, which is asked one request at a time."""

    def __init__(self, asker: Asker, about: About, process: Child | None, concurrency: int) -> None:
        self.about = about
        self.asker = asker
        self.notes: Sequence[str] = ()
        """What of the user's flags should be known before anything is asked."""
        self._process = process
        self._concurrency = concurrency if process is not None else 1

    # -- start ------------------------------------------------------------------------------------------------

    def _wait(self, heard: Callable[[str], None], seconds: float, patience: float) -> None:
        """Until it says that it is well, each time within ``patience``; EnvironmentFault with its last words."""
        assert self._process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (code := self._process.code) is not None:
                raise self._died(f"ended with {code} while it started")
            with suppress(EnvironmentFault):
                if self.asker.text("/health", seconds=patience) is not None:
                    return
            heard((self._process.last_words(1) or ["starting"])[0])
            time.sleep(PAUSE)
        raise self._died(f"was not ready after {seconds:.0f} s")

    def _died(self, what: str) -> EnvironmentFault:
        assert self._process is not None
        return EnvironmentFault(
            f"{self.asker.what} {what}. Its last words: {last_error(self._process.last_words(400))}",
            way_out="The whole log is kept beside the result with --log FILE. `eyas show CHECKPOINT --engine "
            f"{self.about.name}` says what {self.asker.what} refuses in a drafter.",
        )

    # -- ask --------------------------------------------------------------------------------------------------

    def _each(
        self,
        prompts: Sequence[Sequence[int]],
        one: Callable[[int, Sequence[int]], Answer],
        heard: Callable[[int], None],
    ) -> list[Answer]:
        """``one`` of every prompt and its number, as many at a time as are allowed; in the order of the prompts."""
        done, lock = 0, threading.Lock()

        def counted(numbered: tuple[int, Sequence[int]]) -> Answer:
            nonlocal done
            answer = one(*numbered)
            with lock:
                done += 1
                heard(done)
            return answer

        pool = ThreadPoolExecutor(self._concurrency)
        try:
            return list(pool.map(counted, enumerate(prompts)))
        finally:  # not to wait: a request under way ends with the engine, or with its own time limit
            pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A request that fails on an engine of ours is told by the engine's last words."""
        try:
            yield
        except EnvironmentFault as fault:
            if self._process is not None:
                raise self._died(f"failed while it answered ({fault.message})") from None
            raise

    def _tokenized(self, body: Mapping[str, Any]) -> tuple[int, ...] | None:
        """What /tokenize makes of ``body``; None where it does not tell."""
        try:
            ids = self.asker.ask("/tokenize", body, seconds=60.0)["tokens"]
        except (InputError, KeyError, TypeError):
            return None
        whole = isinstance(ids, list) and all(isinstance(t, int) for t in ids)
        return tuple(ids) if whole else None

    # -- end --------------------------------------------------------------------------------------------------

    def log(self) -> str:
        """What it wrote so far."""
        return "\n".join(self._process.last_words(100_000)) if self._process is not None else ""

    def stop_engine(self) -> None:
        """End a process of ours; its log stays until ``stop``."""
        if self._process is not None:
            self._process.end()

    def stop(self, keep_log: Path | None = None) -> None:
        self.asker.close()
        if self._process is not None:
            self._process.close(keep_log=keep_log)
