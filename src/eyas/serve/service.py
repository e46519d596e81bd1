"""Requests between the loop and the player: taken in, timed, cancelled, and written down when they end."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from eyas.errors import EyasError
from eyas.serve.answering import Answering, Piece
from eyas.serve.asked import Asked, Reader
from eyas.serve.metrics import Metrics
from eyas.serve.outbox import Outbox
from eyas.serve.player import Full, Job, Player
from eyas.serve.problem import Problem, bug, busy, stopping
from eyas.serve.replies import Replies, usage
from eyas.serve.settings import Settings

log = logging.getLogger("eyas.serve")
Body = TypeVar("Body")
MOST_BEING_READ = 64  # requests whose texts wait to be tokenised


class Service:
    """All that the HTTP side asks. ``open`` before the first request, ``close`` after the last."""

    def __init__(self, answering: Answering, settings: Settings) -> None:
        self.answering, self.settings = answering, settings
        self.reader = Reader(answering.target, settings.model)
        self.created = int(time.time())
        self.stopping = False
        self._open: set[Exchange] = set()
        self._being_read = 0
        self._held = ExitStack()
        self.metrics = Metrics(lambda: self.player.running, lambda: self.player.waiting)

    def open(self) -> None:
        self._held.enter_context(self.answering.open())
        # A tokenizer is not made for two threads at once: one thread reads all requests.
        self._reading = self._held.enter_context(ThreadPoolExecutor(1, "eyas-reading"))
        limits = {"max_running": self.settings.max_running, "max_queue": self.settings.max_queue}
        self.player = Player(self.answering.begin, heard=self.metrics.heard, **limits)
        self._held.callback(self.player.close)

    def close(self) -> None:
        """No thread of ours is left afterwards."""
        self._held.close()

    async def read(self, how: Callable[[Body], Asked], body: Body) -> Asked:
        """A body understood, in the reading thread. Raises Problem."""
        if self._being_read >= MOST_BEING_READ:
            raise self._refused()
        self._being_read += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, how, body)
        except EyasError as error:
            raise Problem(400, str(error)) from error
        finally:
            self._being_read -= 1

    def require_room(self) -> None:
        """Raise 429 or 503 before anything is read that could not be answered anyway."""
        if self.stopping:
            raise stopping()
        if self.player.waiting >= self.settings.max_queue + max(0, self.settings.max_running - self.player.running):
            raise self._refused()

    def begin(self, asked: Asked, arrived: float) -> Exchange:
        """Into the queue with it. ``arrived``: the loop's time at which the request came."""
        if self.stopping:
            raise stopping()
        exchange = Exchange(self, asked, arrived)
        try:
            self.player.submit(exchange.jobs)
        except Full:
            raise self._refused() from None
        self._open.add(exchange)
        return exchange

    def _refused(self) -> Problem:
        self.metrics.requests.labels("refused").inc()
        mean = self.metrics.mean_seconds()
        waited = math.ceil(mean * (self.player.waiting + 1) / self.settings.max_running) if mean else 1
        return busy(self.player.waiting, max(1, min(60, waited)))

    def ended(self, exchange: Exchange) -> None:
        self._open.discard(exchange)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def drain(self) -> None:
        """Take nothing more; what is not done after the grace time is cut."""
        if not self.stopping:
            self.stopping = True
            asyncio.get_running_loop().call_later(self.settings.grace_seconds, self._cut)

    def _cut(self) -> None:
        for exchange in list(self._open):
            exchange.fail(stopping())


class Exchange:
    """One request being answered. Ends once, through ``close``."""

    def __init__(self, service: Service, asked: Asked, arrived: float) -> None:
        self._service, self.asked, self._arrived = service, asked, arrived
        loop = asyncio.get_running_loop()
        self._time, self._began = loop.time, loop.time()
        chat = asked.kind == "chat"
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        tokenizer = service.answering.target.tokenizer
        assert tokenizer is not None

        def spell(token: int) -> str:
            return str(tokenizer.decode([token]))

        self.replies = Replies(self.id, int(time.time()), service.settings.model, chat=chat, spell=spell)
        self._outbox = Outbox(loop, len(asked.requests), lambda: service.player.wake())
        self.jobs = [Job(request, self._outbox, i) for i, request in enumerate(asked.requests)]
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._finish: list[str] = []
        self._closed = False

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of all choices as they come. Raises Problem for an answer that cannot be ended."""
        while taken := await self._take():
            for choice, piece in taken:
                self._timed(choice, piece)
                yield choice, piece
        if len(self._finish) < len(self.jobs):
            raise stopping()  # the player was closed under it: better an error than half an answer

    async def _take(self) -> list[tuple[int, Piece]]:
        settings = self._service.settings
        try:
            if not self._begun:
                try:
                    async with asyncio.timeout_at(self._began + min(settings.queue_seconds, settings.request_seconds)):
                        return await self._outbox.take()
                except TimeoutError:
                    if not self._begun and settings.queue_seconds <= settings.request_seconds:
                        raise _late(503, "waited in the queue for", settings.queue_seconds, "queue_timeout") from None
            async with asyncio.timeout_at(self._began + settings.request_seconds):
                return await self._outbox.take()
        except TimeoutError:
            raise _late(504, "was being answered for", settings.request_seconds, "request_timeout") from None
        except EyasError as error:
            raise Problem(400, str(error)) from error
        except Problem:
            raise
        except Exception as error:
            log.exception("event=failed id=%s", self.id)
            raise bug(error) from error

    @property
    def _begun(self) -> bool:
        return any(job.begun for job in self.jobs)

    def _timed(self, choice: int, piece: Piece) -> None:
        now, metrics = self._time(), self._service.metrics
        if self._first is None:
            self._first = now
            metrics.first.observe(now - self._arrived)
        if (before := self._last.get(choice)) is not None and piece.token_ids:
            for _ in piece.token_ids:
                metrics.between.observe((now - before) / len(piece.token_ids))
        self._last[choice] = now
        if piece.finish is not None:
            self._finish.append(piece.finish)

    def usage(self) -> dict[str, Any]:
        prompts = sum(map(len, self.asked.prompts))
        return usage(prompts, sum(job.tokens for job in self.jobs), [job.counts for job in self.jobs])

    def fail(self, problem: Problem) -> None:
        """End it from outside; whoever reads is told ``problem``."""
        self._outbox.fail(problem)

    def close(self, problem: Problem | None = None) -> None:
        """Whatever was the end of it: nothing of it is played any more, and it is written down."""
        if self._closed:
            return
        self._closed = True
        for job in self.jobs:
            self._service.player.cancel(job)
        self._service.ended(self)
        if len(self._finish) == len(self.jobs):
            outcome = "length" if "length" in self._finish else "stop"
        else:
            outcome = "cancelled" if problem is None else problem.code or "error"
        self._service.metrics.requests.labels(outcome).inc()
        self._service.metrics.whole.observe(self._time() - self._arrived)
        log.info(self._line(outcome))

    def _line(self, outcome: str) -> str:
        """For the log: numbers alone, nothing that anybody wrote."""
        told = self.usage()
        rounds, tokens = told["eyas"]["rounds"], told["completion_tokens"]
        drafted, accepted = sum(told["eyas"]["drafted"]), sum(told["eyas"]["accepted"])
        seconds = self._time() - self._arrived
        facts = {
            "event": "request",
            "id": self.id,
            "outcome": outcome,
            "choices": len(self.jobs),
            "prompt_tokens": told["prompt_tokens"],
            "tokens": tokens,
            "rounds": rounds,
            "accept_len": f"{1 + accepted / rounds:.2f}" if rounds else "-",
            "accept_rate": f"{accepted / drafted:.2f}" if drafted else "-",
            "tokens_per_s": f"{tokens / seconds:.1f}" if seconds > 0 else "-",
            "first_token_s": f"{self._first - self._arrived:.3f}" if self._first is not None else "-",
            "seconds": f"{seconds:.3f}",
        }
        return " ".join(f"{name}={value}" for name, value in facts.items())


def _late(status: int, what: str, seconds: float, code: str) -> Problem:
    headers = {"Retry-After": "5"} if status == 503 else {}
    return Problem(status, f"This request {what} {seconds:g} s, the most there is.", code=code, headers=headers)
