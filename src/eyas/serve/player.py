"""One thread plays the steps of all answers, one step each in turn.

    asyncio                              the thread
    submit ──> waiting (bounded) ──────> running (at most max_running) ──> an outbox a request ──> asyncio
    cancel ──> out of waiting, or a mark that the thread sees before its next step

A step is a round, or a part of the prompt with which an answer begins: whoever is being answered waits for one part of
another's long prompt at a time. No pass holds rows of two answers, so an answer is the same whoever else is served; R
answers at once each get 1/R of the steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from eyas.serve.answering import Counts, Piece, Request
from eyas.serve.outbox import Outbox


class Session(Protocol):
    """An answer in the making."""

    def step(self) -> Piece | None:
        """A part of the prompt a call, then a round a call; None as long as nothing is to be told yet. Never called
        again after a piece with ``finish``."""
        ...


class Full(Exception):
    """No more answers may wait."""


class Job:
    """One answer: what is asked, where it goes, and whether anybody still wants it. ``counts`` and ``tokens`` are what
    was played of it so far."""

    def __init__(self, request: Request, outbox: Outbox, choice: int) -> None:
        self.request, self.outbox, self.choice = request, outbox, choice
        self.begun = self.cancelled = False
        self.session: Session | None = None
        self.counts, self.tokens = Counts(), 0


Heard = Callable[[Job, Piece], None]


class Player:
    """``begin`` makes a session of a request; it, all steps and ``heard`` run in the player's own thread."""

    def __init__(
        self, begin: Callable[[Request], Session], *, max_running: int, max_queue: int, heard: Heard = lambda *_: None
    ) -> None:
        self._begin, self._heard = begin, heard
        self._max_running, self._max_queue = max_running, max_queue
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._play, name="eyas-rounds", daemon=True)
        self._thread.start()

    # -- from other threads -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them, or Full and none."""
        with self._changed:
            places = self._max_queue + max(0, self._max_running - len(self._running))
            if len(self._waiting) + len(jobs) > places or self._closing:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants this any more. What waits is forgotten at once, what runs before its next step."""
        job.cancelled = True
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.outbox.end(job.choice)
            self._changed.notify()

    def wake(self) -> None:
        """A full outbox was read."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Stop after the step under way; answers that were not finished end as they are."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for job in (*self._running, *self._waiting):
            job.outbox.end(job.choice)
        self._running.clear()
        self._waiting.clear()

    # -- the thread -------------------------------------------------------------------------------------------

    def _play(self) -> None:
        while self._turn():  # a call of its own, so that nothing of the last answer is held while none is there
            pass

    def _turn(self) -> bool:
        job = self._next()
        if job is not None and self._step(job):
            self._leave(job)
        return job is not None

    def _next(self) -> Job | None:
        """Whose turn it is, waiting until it is somebody's; None when closing."""
        with self._changed:
            while not self._closing:
                while self._waiting and len(self._running) < self._max_running:
                    self._running.append(self._waiting.popleft())
                    self._running[-1].begun = True
                for _ in range(len(self._running)):
                    self._running.rotate(-1)
                    job = self._running[-1]
                    if job.cancelled or not job.outbox.full:
                        return job
                self._changed.wait()
            return None

    def _step(self, job: Job) -> bool:
        """Play one step; whether it was the last."""
        if job.cancelled:
            return True
        try:
            if job.session is None:
                job.session = self._begin(job.request)
            piece = job.session.step()
            if piece is None:
                return False
            self._heard(job, piece)
        except Exception as error:  # one answer fails, the others go on
            job.outbox.fail(error)
            return True
        job.counts, job.tokens = piece.counts, job.tokens + len(piece.token_ids)
        job.outbox.put(job.choice, piece)
        return piece.finish is not None

    def _leave(self, job: Job) -> None:
        with self._changed:
            self._running.remove(job)
        job.session = None  # its caches go now, not when its reader is done
        job.outbox.end(job.choice)
