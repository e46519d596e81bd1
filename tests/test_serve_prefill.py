"""A long prompt is read part by part: the same answer, and those who are being answered go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import serving
import tiny
from eyas import checkpoint, prompts, resolve
from eyas import target as targets
from eyas.decode.chain import Chain
from eyas.decode.loop import Generation
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.drafter import Drafter
from eyas.render import Renderer
from eyas.serve import Answering
from eyas.serve.answering import Counts, Piece, Request
from eyas.serve.outbox import Outbox
from eyas.serve.player import Job, Player, Session
from eyas.serve.settings import PREFILL_TOKENS
from serving import Hinted, Scripted
from serving import serving as served

PROMPT = 23
ROUNDING = {"atol": 2e-4, "rtol": 1e-3}  # of one row and of many, at most 6e-5 here; of a neighbour's slot about 1


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


# -- the same states, the same answer --------------------------------------------------------------------------


class Noted(Chain):
    """A chain that keeps what it was given."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.given: list[tuple[Tensor, list[int], int]] = []

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        self.given.append((taps.clone(), list(next_tokens), first_slot))
        super().extend(taps, next_tokens, first_slot)


def begun(kind: str, shape: str, tokens: int | None) -> tuple[Generation, Noted, int]:
    """An answer that has its first token, the prompt read ``tokens`` at a time; and in how many parts."""
    side, parts = Noted(tiny.drafter(kind, **tiny.SHAPES[shape])), 1
    run = Generation(
        tiny.target(kind), side, tiny.prompt(PROMPT), max_new_tokens=12, draft_tokens=3, whole_prompt=tokens is None
    )
    if tokens is not None:
        while not run.prefill(tokens):
            assert run.finish_reason is None
            assert not run.token_ids
            parts += 1
    return run, side, parts


@pytest.mark.parametrize("tokens", [1, 7, PROMPT, 99])
@pytest.mark.parametrize(
    ("kind", "shape"), [("llama", "usual"), ("llama", "layers"), ("gemma3", "usual"), ("deepseek", "usual")]
)
def test_parts_leave_what_the_whole_leaves(kind: str, shape: str, tokens: int) -> None:
    """On both sides: the taps of every position and the token after it, keys and values of every draft layer, the
    state that drafting starts from; then every round of the answer."""
    whole, side, _ = begun(kind, shape, None)
    run, noted, parts = begun(kind, shape, tokens)
    assert parts == -(-PROMPT // tokens)
    assert [len(given[1]) for given in noted.given] == [min(tokens, PROMPT - at) for at in range(0, PROMPT, tokens)]
    ((taps, following, _),) = side.given
    assert [token for given in noted.given for token in given[1]] == following == [*run.prompt_ids[1:], *run.token_ids]
    torch.testing.assert_close(torch.cat([given[0] for given in noted.given], dim=1), taps, **ROUNDING)
    assert noted.committed == PROMPT
    for mine, theirs in zip(noted.caches, side.caches, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, **ROUNDING)
        torch.testing.assert_close(mine.values, theirs.values, **ROUNDING)
    torch.testing.assert_close(noted.state, side.state, **ROUNDING)
    assert [r.tokens for r in run] == [r.tokens for r in whole]
    assert (run.token_ids, run.drafted, run.accepted) == (whole.token_ids, whole.drafted, whole.accepted)


def test_a_part_is_one_pass_over_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the head sees the last row of the last part alone."""
    heads: list[int] = []
    target = tiny.target()
    logits = type(target).logits
    monkeypatch.setattr(type(target), "logits", lambda self, states: heads.append(len(states)) or logits(self, states))
    run = Generation(target, None, tiny.prompt(10), max_new_tokens=1, draft_tokens=0, whole_prompt=False)
    lengths = []
    while not run.prefill(4):
        lengths.append(run._passes.length)
    assert (lengths, run._passes.length, heads) == ([4, 8], 10, [1])
    assert run.finished
    assert run.seconds > 0


def test_no_round_comes_before_the_first_token_and_no_prompt_is_read_twice() -> None:
    run = Generation(tiny.target(), None, tiny.prompt(9), max_new_tokens=4, draft_tokens=0, whole_prompt=False)
    with pytest.raises(AssertionError, match="before the prompt"):
        next(run)
    run.prefill()
    with pytest.raises(AssertionError, match="read already"):
        run.prefill()
    assert run.finish().token_ids == list(plain(tiny.target(), tiny.prompt(9), max_new_tokens=4))


@pytest.mark.real
def test_parts_say_the_same_on_the_real_target() -> None:
    target = targets.load("smollm2")
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    renderer = Renderer(target.tokenizer, target.eos_ids())
    with packed(target, drafter):
        for prompt in prompts.load("mt-bench", 2):
            ids, gaps = renderer.ids(prompt.messages(), prompt=True), list[float]()
            told = list(plain(target, ids, max_new_tokens=16, gaps=gaps))
            run = Generation(target, Chain(drafter), ids, max_new_tokens=16, draft_tokens=3, whole_prompt=False)
            while not run.prefill(16):
                pass
            difference = first_difference(told, run.finish().token_ids, gaps)
            assert difference is None or difference.excused, difference


# -- turns -----------------------------------------------------------------------------------------------------


class Standin:
    """A session of ``parts`` steps that say nothing and ``pieces`` that do; ``on`` is called at each."""

    def __init__(self, parts: int, pieces: int, on: Callable[[], None]) -> None:
        self._parts, self._pieces, self._on, self._at = parts, pieces, on, 0

    def step(self) -> Piece | None:
        self._on()
        self._at += 1
        told = self._at - self._parts
        if told <= 0:
            return None
        return Piece((told,), (), Counts(told - 1), (), "stop" if told == self._pieces else None)


@contextmanager
def player(begin: Callable[[Request], Session], heard: Callable[[Job, Piece], None]) -> Iterator[tuple[Player, Any]]:
    """And what makes a job of a name, whose pieces are kept in ``job.outbox._pieces``."""
    loop = asyncio.new_event_loop()
    made = Player(begin, max_running=4, max_queue=4, heard=heard)
    try:
        yield made, lambda name: Job(Request((1,), 9, name=name), Outbox(loop, 1, made.wake), 0)
    finally:
        made.close()
        loop.close()


def wait_for(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def test_a_part_of_a_prompt_is_one_turn() -> None:
    """Of a prompt in six parts each is followed by a round of whoever is being answered; nothing of it is told."""
    turns: list[str] = []
    heard: list[str] = []
    shape = {"long": (6, 3), "stream": (0, 8)}

    def begin(request: Request) -> Session:
        return Standin(*shape[request.name], lambda: turns.append(request.name))

    with player(begin, lambda job, _: heard.append(job.request.name)) as (made, job):
        jobs = [job("long"), job("stream")]
        made.submit(jobs)
        wait_for(lambda: not made.running and not made.waiting)
    assert turns == ["long", "stream"] * 8 + ["long"]
    assert heard == ["stream"] * 6 + ["long", "stream"] * 2 + ["long"]
    assert [len(one.outbox._pieces) for one in jobs] == [3, 8]
    assert [one.tokens for one in jobs] == [3, 8]


def test_what_is_cancelled_amid_its_prompt_is_read_no_further() -> None:
    steps: list[int] = []

    def on() -> None:
        steps.append(1)
        if len(steps) == 3:
            made.cancel(one)

    with player(lambda _: Standin(100_000, 1, on), lambda *_: None) as (made, job):
        one = job("long")
        made.submit([one])
        wait_for(lambda: not made.running and not made.waiting)
    assert len(steps) == 3
    assert one.session is None, "its caches are let go"


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_that_is_over_amid_a_prompt_is_told(stream: bool, bytes_: Any) -> None:
    """By a status of its own even in a stream, for nothing of the answer has gone out; and not only when the longest
    wait in the queue would have been over, for which no client here waits."""
    endless = Scripted(bytes_[0], lambda _: [None] * 100_000, pause=0.002)
    with served(endless, request_seconds=0.3, queue_seconds=3000.0) as server:
        late = server.ask(prompt="x", stream=stream)
        server.idle()
        page = server.service.metrics.page().decode()
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    assert "eyas_serve_first_token_seconds_count 0.0" in page
    assert "eyas_serve_prompt_tokens_total 0.0" in page


def test_a_client_that_hangs_up_amid_its_prompt_is_gone(bytes_: Any) -> None:
    endless = Scripted(bytes_[0], lambda _: [None] * 100_000, pause=0.002)
    with served(endless) as server:
        with server.client(headers={"X": "y"}) as client, pytest.raises(Exception, match="timed out"):
            client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
        server.idle()
        assert 'requests_total{outcome="cancelled"} 1.0' in server.service.metrics.page().decode()


class Watched(Hinted):
    """Notes who has a turn; the stream's third turn lasts until the long prompt is in the queue."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.turns: list[str] = []
        self.queued = threading.Event()

    def begin(self, request: Request) -> Any:
        session = super().begin(request)
        name, step = "long" if len(request.prompt_ids) > 50 else "stream", session.step

        def noted() -> Any:
            self.turns.append(name)
            if self.turns == ["stream"] * 3:
                assert self.queued.wait(60)
            return step()

        session.step = noted  # type: ignore[method-assign]
        return session


def test_a_stream_goes_on_while_a_long_prompt_is_read(bytes_: Any) -> None:
    """On a target of its own: between two parts of the prompt there is a round of the stream, and both answers are
    those of each alone."""
    answering = Watched(*bytes_, draft_tokens=1, prefill_tokens=16)
    texts = {"stream": ("ab", 150), "long": ("long prompt " * 17, 12)}
    oracle = {
        name: list(plain(bytes_[0], bytes_[0].tokenizer(text)["input_ids"], max_new_tokens=n))
        for name, (text, n) in texts.items()
    }

    def ask(name: str) -> list[int]:
        text, n = texts[name]
        told = server.ask(prompt=text, max_tokens=n, temperature=0, return_token_ids=True).json()
        return list(told["choices"][0]["token_ids"])

    with served(answering) as server, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(ask, "stream")
        wait_for(lambda: answering.turns == ["stream"] * 3)
        long = pool.submit(ask, "long")
        wait_for(lambda: server.service.player.waiting == 1)
        answering.queued.set()
        assert (stream.result(), long.result()) == (oracle["stream"], oracle["long"])
    parts = -(-len("long prompt " * 17) // 16)
    first = answering.turns.index("long")
    assert answering.turns[first : first + 2 * parts] == ["long", "stream"] * parts


def test_the_usual_part_is_less_than_a_long_prompt(bytes_: Any) -> None:
    """A default that reads everything at once would pass all of the above."""
    assert Answering(*bytes_, draft_tokens=1).prefill_tokens == PREFILL_TOKENS <= 256
