"""The HTTP side: routes in the official API's shapes, errors in its shape too, streams as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from eyas.results import eyas_version
from eyas.serve import faults, metrics, page
from eyas.serve.answering import Piece
from eyas.serve.asked import Asked
from eyas.serve.bodies import ChatBody, CompletionBody, ErrorBody
from eyas.serve.guard import Guard
from eyas.serve.problem import Problem, bug
from eyas.serve.service import Exchange, Service
from eyas.serve.text import text_of

T = TypeVar("T")
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "Whole, or as events."},
    **ERRORS,
}
SSE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Gone(Exception):
    """The client has hung up."""


def app(service: Service) -> FastAPI:
    """Routes over a service that is open."""
    made = FastAPI(title="eyas serve", version=eyas_version(), docs_url=None, redoc_url=None)
    _add_answers(made, service)
    _add_facts(made, service)
    made.add_middleware(Guard, settings=service.settings)
    made.add_exception_handler(Problem, _told)
    made.add_exception_handler(RequestValidationError, _told_invalid)
    made.add_exception_handler(HTTPException, _told_http)
    made.add_exception_handler(Exception, _told_bug)
    return made


def _add_answers(made: FastAPI, service: Service) -> None:
    async def answer(request: Request, how: Callable[[Any], Asked], body: Any) -> Response:
        arrived = asyncio.get_running_loop().time()
        service.require_room()
        exchange = service.begin(await service.read(how, body), arrived)
        try:
            return await (_streamed if exchange.asked.stream else _whole)(request, exchange)
        except Gone:
            return Response(status_code=499)  # nobody reads it

    @made.post("/v1/chat/completions", responses=ANSWERS)
    async def chat(request: Request, body: ChatBody) -> Response:
        return await answer(request, service.reader.chat, body)

    @made.post("/v1/completions", responses=ANSWERS)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await answer(request, service.reader.completion, body)


def _add_facts(made: FastAPI, service: Service) -> None:
    model = {
        "id": service.settings.model,
        "object": "model",
        "created": service.created,
        "owned_by": "eyas",
        "max_model_len": service.reader.max_positions,
    }

    @made.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @made.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> dict[str, Any]:
        if name != model["id"]:
            raise Problem(404, f"There is no model {name[:200]!r} here.", param="model", code="model_not_found")
        return model

    @made.get("/health", responses=ERRORS)
    async def health() -> JSONResponse:
        well = service.player.alive and not service.stopping
        told = {"status": "ok" if well else "stopping", "running": service.player.running}
        return JSONResponse({**told, "waiting": service.player.waiting}, 200 if well else 503)

    @made.get("/metrics", responses=ERRORS, response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(service.metrics.page(), media_type=metrics.TYPE)

    @made.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        settings = service.settings
        html, headers = page.page(settings.model, service.reader.max_positions, needs_key=settings.api_key is not None)
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)


# -- answers ---------------------------------------------------------------------------------------------------------


async def _whole(request: Request, exchange: Exchange) -> Response:
    """All of it at once."""
    asked, answers = exchange.asked, [list[Piece]() for _ in exchange.jobs]

    async def collect() -> None:
        async for choice, piece in exchange.pieces():
            answers[choice].append(piece)

    with _Closing(exchange):
        await _unless_gone(request.receive, collect())
        ids = asked.prompts if asked.token_ids else None
        return JSONResponse(exchange.replies.whole(answers, exchange.usage(), ids))


async def _streamed(request: Request, exchange: Exchange) -> Response:
    """Headers go out with the first piece, so that what fails before it has a status of its own."""
    events = exchange.pieces()
    first: list[tuple[int, Piece]] = []

    async def begin() -> None:
        first.append(await anext(events))

    with _Closing(exchange, unless_well=True):
        await _unless_gone(request.receive, begin())
    return Stream(exchange, first[0], events)


class Stream(Response):
    """Server-sent events, until the answer ends or the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]) -> None:
        super().__init__(None, 200, SSE)
        del self.headers["content-length"]
        self._exchange, self._first, self._rest = exchange, first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with _Closing(self._exchange):
                await _unless_gone(receive, self._send(send))
        except (Gone, Problem):
            pass  # nobody listens; or it was told in the stream

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        problem = None
        try:
            async for told in self._chunks():
                await send({"type": "http.response.body", "body": _event(told), "more_body": True})
        except Problem as found:
            problem = found
            await send({"type": "http.response.body", "body": _event(found.body()), "more_body": True})
        end = b"" if problem else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})
        if problem:
            raise problem

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        asked, replies = self._exchange.asked, self._exchange.replies
        nothing = {"usage": None} if asked.include_usage else {}
        if asked.kind == "chat":
            for choice in range(len(asked.requests)):
                yield replies.opening(choice) | nothing
        offsets = [0] * len(asked.requests)
        async for choice, piece in self._pieces():
            yield replies.chunk(choice, piece, offsets[choice], token_ids=asked.token_ids) | nothing
            offsets[choice] += len(text_of(piece.spans))
        if asked.include_usage:
            yield replies.last(self._exchange.usage())

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        yield self._first
        async for found in self._rest:
            yield found


class _Closing:
    """Ends an exchange, whatever the end: with ``unless_well`` only for an error."""

    def __init__(self, exchange: Exchange, *, unless_well: bool = False) -> None:
        self._exchange, self._unless_well = exchange, unless_well

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None or not self._unless_well:
            self._exchange.close(error if isinstance(error, Problem) else None)


async def _unless_gone(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """``work``, given up when the client hangs up: raises Gone."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


# -- errors ----------------------------------------------------------------------------------------------------------


async def _told(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return JSONResponse(error.body(), error.status, error.headers)


async def _told_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _told(request, faults.problem(error.errors()))


async def _told_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, Problem):  # FastAPI hides what went wrong while it read the body
        return await _told(request, error.__cause__)
    told = Problem(error.status_code, str(error.detail), headers=error.headers)
    return await _told(request, told)


async def _told_bug(request: Request, error: Exception) -> JSONResponse:
    """uvicorn logs where it happened."""
    return await _told(request, bug(error))
