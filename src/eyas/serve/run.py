"""A server from its socket to its end: uvicorn around the application, bounds on connections, a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from eyas.errors import EnvironmentFault, UsageError
from eyas.serve.app import app
from eyas.serve.service import Service
from eyas.serve.settings import Settings

HEAD_SECONDS = 30.0  # in which a new connection must have asked something


def require_safe(host: str, settings: Settings) -> None:
    """Raise UsageError for an address that others reach where no key is set."""
    if settings.api_key is None and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and no API key is set.",
            way_out="Set EYAS_API_KEY (or --api-key), or leave --host out to be reached from this machine alone.",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 is any that is free."""
    made = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        raise EnvironmentFault(
            f"{host}:{port} cannot be listened on: {error.strerror or error}.",
            way_out="Name another --port (0 finds a free one), or stop what listens there.",
        ) from error
    return made


class Server(uvicorn.Server):
    """``stop`` may be called from any thread, a second time to end at once."""

    def __init__(self, service: Service, application: Any = None) -> None:
        self.service = service
        self.loop: asyncio.AbstractEventLoop | None = None
        settings = service.settings
        config = uvicorn.Config(
            application or app(service),
            http=_protocol(settings.stall_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(settings.grace_seconds) + 10,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def stop(self) -> None:
        """Take no more, end what runs within the grace time, then return from ``serve``."""
        assert self.loop is not None, "stopped before it began"
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.service.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Not uvicorn's way, which raises the signal again after a good end."""
        yield


def serve(service: Service, listening: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; opens and closes ``service``. ``ready`` is called once requests are taken."""

    async def run() -> None:
        server = Server(service)
        server.loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            server.loop.add_signal_handler(signum, server.stop)
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready()
        await serving

    service.open()
    try:
        asyncio.run(run())
    finally:
        service.close()


def _protocol(stall_seconds: float) -> type[H11Protocol]:
    """uvicorn's connections, with an end to those that ask nothing, and to those that do not read their answer."""

    class Protocol(H11Protocol):
        _stalled: asyncio.TimerHandle | None = None
        _silent: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Anything that the system does not take at once is a reader's fault, and starts the clock.
            transport.set_write_buffer_limits(high=0)
            self._silent = self.loop.call_later(HEAD_SECONDS, self._give_up)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._let_go("_stalled")

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._let_go("_stalled")
            self._let_go("_silent")

        def _give_up(self) -> None:
            if not self._asked:
                self.transport.abort()

        @property
        def _asked(self) -> bool:
            return vars(self).get("cycle") is not None

        def _let_go(self, name: str) -> None:
            if (timer := getattr(self, name)) is not None:
                timer.cancel()
                setattr(self, name, None)

    return Protocol
