"""The way of the answers to one request, from the thread that computes them to the loop that sends them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from eyas.serve.answering import Piece
from eyas.serve.settings import UNREAD


class Outbox:
    """Pieces of ``choices`` answers in the order they were made, each with its choice's number; then nothing, or an
    error. ``put``, ``end`` and ``full`` are the computing thread's, ``take`` is the loop's; a deque needs no lock for
    that. ``drained`` is called when a full one was read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, choices: int, drained: Callable[[], None]) -> None:
        self._loop, self._drained = loop, drained
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._stirred = asyncio.Event()
        self._open = set(range(choices))
        self._error: Exception | None = None

    @property
    def full(self) -> bool:
        """As much is unread as may be: no further round until some of it is read."""
        return len(self._pieces) >= UNREAD

    def put(self, choice: int, piece: Piece) -> None:
        self._pieces.append((choice, piece))
        self._stir()

    def end(self, choice: int) -> None:
        """No more of this choice will come."""
        self._open.discard(choice)
        self._stir()

    def fail(self, error: Exception) -> None:
        """No more at all will come, because of ``error``; the first is told."""
        self._error = self._error or error
        self._open.clear()
        self._stir()

    async def take(self) -> list[tuple[int, Piece]]:
        """All that is unread, once there is something; empty at the end. Raises what ended it."""
        while not self._pieces and self._open:
            self._stirred.clear()
            if not self._pieces and self._open:  # it may have come between the look and the clearing
                await self._stirred.wait()
        was_full = self.full
        taken = [self._pieces.popleft() for _ in range(len(self._pieces))]
        if was_full:
            self._drained()
        if not taken and self._error is not None:
            raise self._error
        return taken

    def _stir(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stirred.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._pieces.clear()
