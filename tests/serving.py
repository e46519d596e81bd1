"""A server of ``eyas serve`` in a thread of the test: real sockets, tiny target, or answers that a test wrote."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx

from eyas import checkpoint
from eyas import target as targets
from eyas.decode.chain import Chain
from eyas.decode.plain import plain
from eyas.drafter import Drafter
from eyas.serve import Answering, Server, Service, Settings, bound
from eyas.serve.answering import Counts, Piece, Request
from eyas.serve.player import Session
from eyas.serve.text import Span
from eyas.target import Target
from folders import write_drafter, write_target

MODEL = "tiny"


class Running:
    """A server that runs: its address, and what a test looks into."""

    def __init__(self, server: Server, address: str) -> None:
        self.server, self.service, self.url = server, server.service, address

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300.0, trust_env=False, **options)

    def ask(self, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json=body)

    def idle(self, seconds: float = 60.0) -> None:
        """Wait until nothing is being answered."""
        player = self.service.player
        until = time.monotonic() + seconds
        while self.service.open_requests or player.running or player.waiting:
            assert time.monotonic() < until, "something is still being answered"
            time.sleep(0.01)


def load(folder: Path) -> tuple[Target, Any]:
    """A tiny target (256 positions, 320 words, bytes as tokens) and a drafter for it, through their files."""
    target = targets.load(str(write_target(folder / "target")))
    return target, checkpoint.load(checkpoint.read(write_drafter(folder / "drafter", target)), target)


@contextmanager
def serving(
    answering: Answering,
    *,
    listening: socket.socket | None = None,
    wrap: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """``wrap`` puts something of the test's around the application."""
    from eyas.serve.app import app

    service = Service(answering, Settings(**{"model": MODEL, **settings}))
    service.open()
    listening = listening or bound("127.0.0.1", 0)
    host, port = listening.getsockname()[:2]
    made = app(service)
    server = Server(service, wrap(made) if wrap is not None else made)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="test-server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Running(server, f"http://{host}:{port}")
    finally:
        server.stop()
        thread.join(timeout=60)
        service.close()
        assert not thread.is_alive(), "the server did not stop"


class Hinted(Answering):
    """With a drafter that is told the greedy answer, and drafts from none to all of a round's tokens right in turn."""

    def side(self, request: Request) -> Chain:
        assert self.drafter is not None
        return HintedChain(self.drafter, [*request.prompt_ids, *self.truth(request.prompt_ids, request.max_new_tokens)])

    @lru_cache(maxsize=64)  # noqa: B019 (a test's own object)
    def truth(self, prompt_ids: tuple[int, ...], length: int) -> tuple[int, ...]:
        return tuple(plain(self.target, prompt_ids, max_new_tokens=length))


class HintedChain(Chain):
    def __init__(self, drafter: Drafter, truth: Sequence[int]) -> None:
        super().__init__(drafter)
        self._truth = truth

    def draft(self, draft_tokens: int) -> list[int]:
        known = self.committed + 1
        own = super().draft(draft_tokens)
        right = self._truth[known : known + draft_tokens][: known % (draft_tokens + 1)]
        return [*right, *own[len(right) :]]


class Scripted(Answering):
    """Answers that a test wrote: for each request a list of (text, drafted), a step each; None reads on in a prompt."""

    def __init__(
        self, target: Target, script: Callable[[Request], Sequence[tuple[str, bool] | None]], pause: float = 0.0
    ) -> None:
        super().__init__(target, None, draft_tokens=1)
        self._script, self._pause = script, pause

    def begin(self, request: Request) -> Session:
        return _Script(self._script(request), self._pause)  # type: ignore[return-value]


class _Script:
    def __init__(self, steps: Sequence[tuple[str, bool] | None], pause: float) -> None:
        self._steps, self._pause, self._at = steps, pause, 0

    def step(self) -> Piece | None:
        time.sleep(self._pause)
        step = self._steps[self._at]
        self._at += 1
        if step is None:
            return None
        text, drafted = step
        told = [kept for _, kept in filter(None, self._steps[: self._at])]
        counts = Counts(len(told) - 1, (len(told) - 1,), (sum(told[1:]),))
        finish = "stop" if self._at == len(self._steps) else None
        return Piece((1,), (Span(text, drafted),), counts, (), finish)
