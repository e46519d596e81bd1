"""An engine for `eyas watch` to look at: pages as the recordings have them, over real HTTP, with any counts."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "fixtures" / "engines"
VLLM = json.loads((RECORDED / "metrics-vllm-0.32.0.json").read_text(encoding="utf-8"))["cases"][0]
K = int(VLLM["truth"]["draft_tokens"])
SGLANG = (  # the gauges of test_scrape.py, and the counter and gauge of requests that stand beside them
    "# TYPE sglang:spec_accept_length gauge",
    'sglang:spec_accept_length{{engine_type="unified",model_name="m",tp_rank="0"}} {length}',
    'sglang:spec_accept_rate{{engine_type="unified",model_name="m",tp_rank="0"}} {rate}',
    'sglang:spec_num_steps{{engine_type="unified",model_name="m",tp_rank="0"}} 3.0',
    'sglang:spec_num_draft_tokens{{engine_type="unified",model_name="m",tp_rank="0"}} 4.0',
    'sglang:num_running_reqs{{engine_type="unified",model_name="m",tp_rank="0"}} {running}',
    "# TYPE sglang:spec_verify_calls_total counter",
    'sglang:spec_verify_calls_total{{model_name="m"}} {calls}',
)


class Vllm:
    """vLLM's counters: ``rounds`` plays rounds in which each depth hits with ``rate`` once all before it have."""

    def __init__(self, seed: int = 0, engine: str = "0", created: float | None = None) -> None:
        self.random = random.Random(seed)
        self.rounds = self.drafted = self.accepted = 0
        self.hits = [0] * K
        self.engine, self.created = engine, created
        self.running = 1

    def play(self, rounds: int, rate: float) -> Vllm:
        before = rounds
        self.rounds, self.drafted = self.rounds + rounds, self.drafted + K * rounds
        for k in range(K):
            before = self._hits(before, rate)
            self.hits[k] += before
            self.accepted += before
        return self

    def _hits(self, n: int, rate: float) -> int:
        if n < 200:
            return sum(self.random.random() < rate for _ in range(n))
        return min(n, max(0, round(self.random.gauss(n * rate, (n * rate * (1 - rate)) ** 0.5))))

    def page(self) -> str:
        """The recorded page with these counts in the place of its own."""
        values = {"drafts": self.rounds, "draft_tokens": self.drafted, "accepted_tokens": self.accepted}
        rows = []
        for row in VLLM["page"]:
            head, _, _ = row.rpartition(" ")
            short = head.removeprefix("vllm:spec_decode_num_").partition("{")[0]
            if row.startswith("#"):
                rows.append(row)
            elif short.endswith("_created"):
                rows.append(row if self.created is None else f"{head} {self.created}")
            elif short == "accepted_tokens_per_pos_total":
                rows.append(f"{head} {float(self.hits[int(head.partition('position=')[2][1])])}")
            else:
                rows.append(f"{head} {float(values[short.removesuffix('_total')])}")
        rows.append(f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {float(self.running)}')
        return "\n".join(rows).replace('engine="0"', f'engine="{self.engine}"') + "\n"


def sglang(length: float, calls: int | None, running: int = 1) -> str:
    rows = [row for row in SGLANG if calls is not None or "verify_calls" not in row]
    return "".join(
        row.format(length=length, rate=(length - 1) / 3, calls=float(calls or 0), running=float(running)) + "\n"
        for row in rows
    )


Answer = tuple[int, str, bytes] | None
"""Status, content type and body; None drops the connection."""


def text(page: str) -> Answer:
    return 200, "text/plain; version=0.0.4", page.encode()


@contextmanager
def engine(answer: Callable[[int], Answer]) -> Iterator[Any]:
    """A server that answers its n-th request, from 1, with ``answer(n)``; ``asked`` and ``paths`` tell of them."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked += 1
            server.paths.append(self.path)
            told = answer(server.asked)
            if told is None:
                self.connection.close()
                return
            status, kind, body = told
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            raise AssertionError("watching sends nothing")

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        asked = 0
        paths: list[str]
        url = ""

        def handle_error(self, *_: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    server.paths = []
    server.url = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
