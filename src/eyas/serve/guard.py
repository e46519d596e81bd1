"""What stands before every route: who asks whom, with which key, and how much is sent.

A browser that is led to a name of its attacker's which resolves to this machine says that name as Host (DNS rebinding),
so names are listed; addresses cannot be rebound and are let through. There is no CORS: a page of another origin cannot
send JSON here, since that needs a preflight that nobody answers.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.problem import Problem
from eyas.serve.settings import Settings

WITHOUT_KEY = ("/", "/health")  # the page holds nothing, and asks for the key
BODY_SECONDS = 30.0
ALL_BODIES = 16
"""Bodies of the largest size that may be held at once, all clients together."""


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._hosts = {"localhost", *(host.lower() for host in settings.hosts)}
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        try:
            self._require_host(value for name, value in headers if name == b"host")
            if scope["path"] not in WITHOUT_KEY:
                self._require_key([value for name, value in headers if name == b"authorization"])
            if scope["method"] == "POST":
                _require_json([value for name, value in headers if name == b"content-type"])
            self._require_size([value for name, value in headers if name == b"content-length"])
        except Problem as problem:
            await refuse(problem, send)
            return
        body = _Body(self, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._held -= body.held

    def _require_host(self, given: Iterable[bytes]) -> None:
        named = list(given)
        if len(named) != 1:
            raise Problem(400, f"{len(named)} Host headers; one was expected.", code="bad_host")
        try:
            host = (urlsplit(f"//{named[0].decode('ascii')}").hostname or "").rstrip(".")
        except ValueError:
            host = ""
        if host not in self._hosts and not _is_address(host):
            raise Problem(
                403,
                "This server does not go by the name in the Host header. Start it with --allow-host NAME.",
                code="bad_host",
            )

    def _require_key(self, given: list[bytes]) -> None:
        if self._key is None:
            return
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        if not hmac.compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
            raise Problem(
                401,
                "A key is needed: Authorization: Bearer KEY." if not given else "The API key is not the server's.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _require_size(self, given: list[bytes]) -> None:
        if given and given[0].isdigit() and int(given[0][:20]) > self._settings.body_bytes:
            raise self._too_large()

    def _too_large(self) -> Problem:
        return Problem(413, f"The body is larger than {self._settings.body_bytes} bytes.", code="body_too_large")

    def hold(self, more: int, so_far: int) -> None:
        """Count ``more`` bytes of a body that has ``so_far`` with them."""
        self._held += more
        if so_far > self._settings.body_bytes:
            raise self._too_large()
        if self._held > ALL_BODIES * self._settings.body_bytes:
            raise Problem(429, "Too much is being sent at once.", code="busy", headers={"Retry-After": "1"})


class _Body:
    """Receives a body within its bounds of size and time; what comes behind it is left alone."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard, self._receive = guard, receive
        self._until = asyncio.get_running_loop().time() + BODY_SECONDS
        self._whole = False
        self.held = 0

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise Problem(408, f"The body was not there after {BODY_SECONDS:g} s.", code="body_timeout") from None
        if message["type"] == "http.request":
            more = len(message.get("body", b""))
            self.held += more
            self._guard.hold(more, self.held)
            self._whole = not message.get("more_body", False)
        return message


def _require_json(given: list[bytes]) -> None:
    """Whatever FastAPI would take: a page of another origin may send other kinds, or none, without a preflight."""
    kind = given[0].partition(b";")[0].strip().lower() if len(given) == 1 else b""
    if kind != b"application/json":
        raise Problem(415, "A body must be sent with Content-Type: application/json.", code="unsupported_media_type")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def refuse(problem: Problem, send: Send) -> None:
    """An answer without an application. What still comes of the body is thrown away by uvicorn: a connection closed on
    it would take the answer with it."""
    body = json.dumps(problem.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(k.lower().encode(), v.encode()) for k, v in {**headers, **problem.headers}.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
