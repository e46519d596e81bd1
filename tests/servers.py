"""A chat server for tests, in a thread: real HTTP over a real socket, answers and faults as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[["Exchange"], None]


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, request: Any, count: int) -> None:
        self._handler = handler
        self.path, self.headers, self.request, self.count = handler.path, handler.headers, request, count

    def send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._handler.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()
        self._handler.wfile.write(raw)

    def say(self, text: str | None, reason: str | None = "stop", **choice: object) -> None:
        self.send(200, completion(text, reason, **choice))

    def cut(self) -> None:
        """A connection that ends in the middle of the body."""
        raw = json.dumps(completion("whole", "stop")).encode()
        self._handler.send_response(200)
        self._handler.send_header("Content-Length", str(len(raw)))
        self._handler.end_headers()
        self._handler.wfile.write(raw[: len(raw) // 2])
        self.drop()

    def drop(self) -> None:
        self._handler.close_connection = True
        self._handler.connection.close()


def completion(text: str | None, reason: str | None, **choice: object) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason, **choice}],
    }


class Server:
    """Where it listens, and every chat request it got."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Any] = []
        self.headers: list[Any] = []


@contextmanager
def serving(
    answer: Answering, models: list[str] | None = None, pages: Mapping[str, object] | None = None
) -> Iterator[Server]:
    """``answer`` is called for each chat request; ``models`` None is a server that does not list them. ``pages``:
    bodies of other paths, or (status, body)."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            exchange = Exchange(self, None, 0)
            page = (pages or {}).get(self.path)
            if page is not None:
                exchange.send(*(page if isinstance(page, tuple) else (200, page)))
            elif models is None:
                exchange.send(404, {"detail": "Not Found"})
            else:
                exchange.send(200, {"object": "list", "data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.requests.append(request)
                server.headers.append(dict(self.headers))
                count = len(server.requests)
            try:
                answer(Exchange(self, request, count))
            except OSError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError, ValueError):  # the test dropped the connection
                super().finish()

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass

    http = Quiet(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
