"""Many at once: answers are those of the same request alone, the queue and what is unread are bounded, nothing of a
client that is gone goes on, and nothing is left when the server stops."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import serving
from eyas.decode.plain import plain
from eyas.serve import bound
from eyas.serve.answering import Request
from eyas.serve.player import Job
from eyas.serve.service import Exchange
from eyas.serve.settings import UNREAD
from serving import Hinted, Running, Scripted
from serving import serving as served

LONG = [("word ", False)] * 100_000  # an answer that nobody sees the end of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


def scripted(tiny: Any, script: Callable[[Request], Sequence[tuple[str, bool]]], pause: float = 0.0) -> Scripted:
    return Scripted(tiny[0], script, pause)


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


# -- side by side ----------------------------------------------------------------------------------------------


def test_answers_side_by_side_are_those_of_each_alone(tiny: Any) -> None:
    """Four are played in turn, the rest waits; streamed and whole, a few hang up in between."""
    prompts = [f"{'abcdefghij'[i] * (i + 1)}" for i in range(8)]
    oracle = {
        p: list(plain(tiny[0], tiny[0].tokenizer(p)["input_ids"], max_new_tokens=20)) for p in prompts
    }  # fmt: skip

    def ask(prompt: str) -> list[int]:
        told = server.ask(prompt=prompt, max_tokens=20, temperature=0, return_token_ids=True).json()
        return list(told["choices"][0]["token_ids"])

    def hang_up(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())

    with served(Hinted(*tiny, draft_tokens=3)) as server, ThreadPoolExecutor(10) as pool:
        gone = [pool.submit(hang_up, p) for p in prompts[:2]]
        answers = list(pool.map(ask, prompts))
        assert [g.result() for g in gone] == [None, None]
        server.idle()
    assert answers == [oracle[p] for p in prompts]


def test_rounds_are_played_in_turn(tiny: Any) -> None:
    """Nobody waits for another's end: between two steps of one answer is one of each other."""
    played: list[str] = []

    class Noted(Scripted):
        def begin(self, request: Request) -> Any:
            session = super().begin(request)
            step = session.step

            def noted() -> Any:
                played.append(request.prompt_ids[0])  # type: ignore[arg-type]
                return step()

            session.step = noted  # type: ignore[method-assign]
            return session

    noted = Noted(tiny[0], lambda _: [("x", False)] * 100, pause=0.005)
    with served(noted, max_running=3) as server, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: server.ask(prompt=[i]), range(3)))
    together = [i for i in range(len(played) - 3) if len(set(played[i : i + 3])) == 3]
    first, last = together[0], together[-1] + 3
    assert last - first > 20, "they ran side by side for a while"
    assert all(len(set(played[i : i + 3])) == 3 for i in range(first, last - 2))


def test_no_more_run_than_may(tiny: Any) -> None:
    seen: list[int] = []
    slow = scripted(tiny, lambda _: [("x", False)] * 60, pause=0.01)
    with served(slow, max_running=2) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.ask, prompt="x") for _ in range(6)]
        while not all(a.done() for a in asked):
            seen.append(server.service.player.running)
            time.sleep(0.005)
        assert all(a.result().status_code == 200 for a in asked)
    assert max(seen) == 2


# -- the queue -------------------------------------------------------------------------------------------------


def test_a_full_queue_is_told_at_once(tiny: Any) -> None:
    stuck = threading.Event()

    def script(_: Request) -> list[tuple[str, bool]]:
        stuck.wait(60)
        return [("x", False)]

    with served(scripted(tiny, script), max_running=1, max_queue=2) as server, ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(server.ask, prompt="x") for _ in range(3)]
        until(lambda: server.service.player.waiting == 2)
        refused = server.ask(prompt="x")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        stuck.set()
        assert [t.result().status_code for t in taken] == [200, 200, 200]
        assert server.ask(prompt="x").status_code == 200, "there is room again"


def test_ten_thousand_requests_meet_a_bound(tiny: Any) -> None:
    """All are answered, all but what the queue holds by 429 at once, and none of them stays in memory."""
    stuck = threading.Event()

    def script(_: Request) -> list[tuple[str, bool]]:
        stuck.wait(300)
        return [("x", False)]

    async def one_connection(server: Running, count: int) -> list[int]:
        """``count`` requests one after another, as cheaply as can be: it is the server that is to work."""
        host, port = server.host.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "' + b"x" * 100 + b'"}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        codes = []
        for _ in range(count):
            writer.write(request)
            told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            codes.append(int(told.split(" ")[1]))
            await reader.readexactly(int(told.split("content-length: ")[1].split("\r")[0]))
        writer.close()
        return codes

    async def storm(server: Running, count: int) -> list[int]:
        asked = [asyncio.ensure_future(one_connection(server, count // 100)) for _ in range(100)]
        while sum(a.done() for a in asked) < 91:  # of the others 1 runs and 8 wait
            await asyncio.sleep(0.05)
            assert server.service.player.waiting <= 8
            assert server.service.open_requests <= 9
        stuck.set()
        return [code for codes in await asyncio.gather(*asked) for code in codes]

    with served(scripted(tiny, script), max_running=1, max_queue=8, queue_seconds=600) as server:
        codes = asyncio.run(storm(server, 10_000))
        server.idle()
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, Exchange | Job)]
    assert len(codes) == 10_000
    assert set(codes) == {200, 429}
    assert codes.count(429) >= 91 * 100, "those that were told at once never waited"


def test_who_waits_too_long_is_told(tiny: Any) -> None:
    slow = scripted(tiny, lambda _: LONG, pause=0.005)
    with served(slow, max_running=1, queue_seconds=0.3, request_seconds=2.0) as server:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.ask, prompt="x")
            until(lambda: server.service.player.running == 1)
            late = server.ask(prompt="x")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
            assert late.headers["retry-after"]
            cut = first.result()
            assert (cut.status_code, cut.json()["error"]["code"]) == (504, "request_timeout")
        server.idle()


def test_a_stream_that_lasts_too_long_ends_with_an_error(tiny: Any) -> None:
    slow = scripted(tiny, lambda _: LONG, pause=0.005)
    with served(slow, request_seconds=0.5) as server:
        text = server.ask(prompt="x", stream=True).text
        server.idle()
    last = text.strip().split("\n\n")[-1]
    assert "request_timeout" in last
    assert "[DONE]" not in text


# -- clients that go away or do not read -----------------------------------------------------------------------


def raw_request(server: Running, body: bytes, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection with a request on it, of which nothing has been read."""
    host, port = server.host.split(":")
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_client_that_hangs_up_is_played_no_more(how: str, stream: bytes, tiny: Any) -> None:
    with served(scripted(tiny, lambda _: LONG, pause=0.002), max_running=1) as server:
        gone = raw_request(server, b'{"prompt": "x", "stream": ' + stream + b"}")
        waits = raw_request(server, b'{"prompt": "x", "stream": ' + stream + b"}")
        until(lambda: (server.service.player.running, server.service.player.waiting) == (1, 1))
        for client in (waits, gone):  # one from the queue, one from the middle of its answer
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        server.idle()
        values = server.service.metrics.page().decode()
        assert 'eyas_serve_requests_total{outcome="cancelled"} 2.0' in values


def small_sends() -> socket.socket:
    """A listening socket whose connections hold little, so that what is unread is soon the server's own."""
    made = bound("127.0.0.1", 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return made


def test_who_reads_nothing_stops_nobody_and_is_cut_off(tiny: Any) -> None:
    """Its rounds wait when enough is unread, those of others go on; then its connection ends."""
    steps: list[int] = []

    def script(request: Request) -> Any:
        return LONG if request.prompt_ids[0] == 1 else [("x", False)] * 20

    class Counted(Scripted):
        def begin(self, request: Request) -> Any:
            session = super().begin(request)
            if request.prompt_ids[0] == 1:
                step = session.step
                session.step = lambda: steps.append(1) or step()  # type: ignore[func-returns-value, method-assign]
            return session

    with served(Counted(tiny[0], script), listening=small_sends(), stall_seconds=6.0) as server:
        lazy = raw_request(server, b'{"prompt": [1], "stream": true}', receive_buffer=4096)
        until(lambda: len(steps) > UNREAD)
        before = -1
        while before != len(steps):  # until it stands still
            before = len(steps)
            time.sleep(0.5)
        assert server.service.open_requests == 1, "its rounds wait already, and it is not cut off yet"
        assert server.ask(prompt=[2]).json()["choices"][0]["text"] == "x" * 20
        assert len(steps) == before
        until(lambda: server.service.open_requests == 0)
        assert len(steps) <= before + UNREAD, "what is thrown away with the connection makes room for a few more"
        server.idle()
        lazy.close()


def test_a_whole_answer_that_is_not_read_is_cut_off_too(tiny: Any) -> None:
    large = scripted(tiny, lambda _: [("word " * 400_000, False)])
    with served(large, listening=small_sends(), stall_seconds=0.5) as server:
        lazy = raw_request(server, b'{"prompt": [1]}', receive_buffer=4096)
        until(lambda: len(server.server.server_state.connections) == 1)
        until(lambda: len(server.server.server_state.connections) == 0)
        lazy.close()


def test_who_reads_slowly_gets_all_of_it(tiny: Any) -> None:
    """Its rounds wait, and go on each time something was read."""
    words = [(f"{i} ", False) for i in range(2000)]
    with served(scripted(tiny, lambda _: words), listening=small_sends()) as server:
        slow = raw_request(server, b'{"prompt": [1], "stream": true}', receive_buffer=4096)
        slow.settimeout(60)
        told = b""
        while b"[DONE]" not in told:
            told += slow.recv(30_000)
            time.sleep(0.001)
        slow.close()
    assert told.count(b'"finish_reason":"stop"') == 1
    assert all(f'[["{i} ",false]]'.encode() in told for i in range(2000))


# -- faults and the end ----------------------------------------------------------------------------------------


def test_an_answer_that_fails_fails_alone(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request) -> Any:
        if request.prompt_ids[0] == 1:
            raise RuntimeError("secret words")
        return [("x", False)] * 5

    with served(scripted(tiny, script)) as server:
        failed = server.ask(prompt=[1])
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "secret" not in failed.text
        assert server.ask(prompt=[2]).status_code == 200
        server.idle()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_stop_ends_what_runs_and_leaves_no_thread(tiny: Any) -> None:
    before = threads()
    answer = scripted(tiny, lambda _: [("x", False)] * 30, pause=0.03)
    with served(answer) as server, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.ask, prompt="x")
        until(lambda: server.service.player.running == 1)
        with server.client() as kept:
            assert kept.get("/health").status_code == 200
            server.server.stop()
            until(lambda: server.service.stopping)
            assert whole.result().json()["choices"][0]["text"] == "x" * 30, "what runs within the grace time ends well"
        with pytest.raises(httpx.TransportError):
            server.ask(prompt="x")
    assert threads() <= before


def test_a_stop_cuts_what_does_not_end(tiny: Any) -> None:
    before = threads()
    endless = scripted(tiny, lambda _: LONG, pause=0.01)
    with served(endless, grace_seconds=0.3) as server, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.ask, prompt="x")
        stream = pool.submit(server.ask, prompt="x", stream=True)
        until(lambda: server.service.player.running == 2)
        server.server.stop()
        cut, told = whole.result(), stream.result().text
    assert (cut.status_code, cut.json()["error"]["code"]) == (503, "stopping")
    assert '"code":"stopping"' in told
    assert "[DONE]" not in told
    assert threads() <= before


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """``eyas serve`` as a process of its own, and its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "eyas", "serve", "--port", "0", *map(str, arguments)]
        made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
        started.append(made)
        assert made.stderr is not None
        said = ""
        for line in made.stderr:
            said += line
            if "http://" in line:
                return made, line.split("http://")[1].split("/")[0]
        raise AssertionError(said)

    yield start
    for one in started:
        one.kill()
        one.wait()
        assert one.stderr is not None
        one.stderr.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_well(signum: signal.Signals, process: Any, tmp_path: Path) -> None:
    serving.load(tmp_path)
    running, address = process("--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--name", "tiny")
    told = httpx.post(
        f"http://{address}/v1/completions", json={"prompt": "x", "max_tokens": 8}, timeout=300, trust_env=False
    ).json()
    assert told["usage"]["completion_tokens"] == 8
    running.send_signal(signum)
    assert running.wait(timeout=60) == 0
    assert f"id={told['id']}" in running.stderr.read()
