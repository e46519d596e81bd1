"""Chat answers over real sockets: what passes is tried again, what does not is said at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from eyas import endpoint
from eyas.answers import Ask, Refusal, Sampling
from eyas.endpoint import Endpoint, Reply, base_url
from eyas.errors import EnvironmentFault, UsageError
from servers import Answering, Exchange, completion, serving


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in endpoint.KEYS:
        monkeypatch.delenv(name, raising=False)


def ask(number: int = 0, text: str = "Why?") -> Ask:
    return Ask(f"a{number}", (1, 2, 3), ({"role": "user", "content": text},))


class Waits:
    """Stands in for sleeping and remembers for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return False


def told(answer: Answering, asks: list[Ask], waits: Waits | None = None, **more: Any) -> list[Reply | Refusal]:
    """Everything that comes back of ``asks``."""
    with serving(answer, ["m"]) as server:
        return from_url(server.url, asks, waits, **more)


def from_url(url: str, asks: list[Ask], waits: Waits | None = None, **more: Any) -> list[Reply | Refusal]:
    settings = {"max_new_tokens": 16, "concurrency": 2, "timeout": 10.0, "pause": waits or Waits(), **more}
    with Endpoint(url, **settings) as there:
        for one in asks:
            there.submit(one)
        came: list[Reply | Refusal] = []
        while there.owed:
            came += there.take()
        assert there.take() == []
        return came


def fine(exchange: Exchange) -> None:
    exchange.say(f"to {exchange.request['messages'][-1]['content']}")


# -- what is asked, what comes back -------------------------------------------------------------------------


def test_every_ask_is_answered_once() -> None:
    came = told(fine, [ask(i, f"q{i}") for i in range(20)], concurrency=4)
    assert sorted(came, key=lambda r: int(r.id[1:])) == [
        Reply(f"a{i}", f"to q{i}", "stop", None, None) for i in range(20)
    ]


def test_so_many_at_once_and_no_more() -> None:
    lock, open_now, most = threading.Lock(), 0, 0
    full = threading.Barrier(3, timeout=10)

    def counting(exchange: Exchange) -> None:
        nonlocal open_now, most
        with lock:
            open_now += 1
            most = max(most, open_now)
        full.wait()  # passes only when three are here together
        with lock:
            open_now -= 1
        fine(exchange)

    told(counting, [ask(i) for i in range(12)], concurrency=3)
    assert most == 3


def test_the_request_says_how_to_answer() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=3)
    with serving(fine, ["only-one"]) as server:
        from_url(server.url, [ask(0), ask(0), ask(1)], sampling=sampling, max_new_tokens=77)
        first, again, other = sorted(server.requests, key=lambda r: r["seed"] == server.requests[-1]["seed"])
    assert first | {"seed": 0} == {
        "model": "only-one",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 77,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 0,
        "stream": False,
        "return_token_ids": True,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    seeds = {r["seed"] for r in (first, again, other)}
    assert len(seeds) == 2  # one for each id


@pytest.mark.parametrize("spelling", ["vllm", "sglang"])
def test_token_ids_in_both_spellings(spelling: str) -> None:
    def answer(exchange: Exchange) -> None:
        if spelling == "vllm":
            exchange.send(200, completion("Hi", "stop", token_ids=[7, 8]) | {"prompt_token_ids": [1, 2, 3]})
        else:
            exchange.say("Hi", prompt_token_ids=[1, 2, 3], response_token_ids=[7, 8])

    assert told(answer, [ask()]) == [Reply("a0", "Hi", "stop", (1, 2, 3), (7, 8))]


def test_a_server_that_knows_no_token_ids_is_asked_without() -> None:
    def strict(exchange: Exchange) -> None:
        if "return_token_ids" in exchange.request:
            exchange.send(400, {"error": {"message": "Unrecognized request argument: return_token_ids"}})
        else:
            fine(exchange)

    with serving(strict, ["m"]) as server:
        came = from_url(server.url, [ask(i) for i in range(5)], concurrency=1)
        assert len(server.requests) == 6  # refused once, then known
    assert all(isinstance(reply, Reply) for reply in came)


def test_one_bad_conversation_is_refused_and_the_others_are_answered() -> None:
    def answer(exchange: Exchange) -> None:
        if "long" in exchange.request["messages"][0]["content"]:
            exchange.send(400, {"error": {"message": "maximum context length is 9 tokens"}})
        else:
            fine(exchange)

    came = told(answer, [ask(0), ask(1, "long"), ask(2)])
    (refused,) = [r for r in came if isinstance(r, Refusal)]
    assert refused == Refusal("a1", "HTTP 400: maximum context length is 9 tokens")
    assert len(came) == 3


# -- vLLM's own bodies --------------------------------------------------------------------------------------

VLLM: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "endpoint" / "vllm-0.32.0.json").read_text())


@pytest.mark.parametrize("name", ["length", "stop", "two_turns", "without"])
def test_what_vllm_says_is_understood(name: str) -> None:
    body = VLLM[name]["body"]
    (reply,) = told(lambda e: e.send(200, body), [ask()])
    assert isinstance(reply, Reply)
    assert reply.text == body["choices"][0]["message"]["content"]
    assert reply.finish_reason == ("stop" if name in ("stop", "two_turns") else "length")
    if name == "without":
        assert reply.token_ids is reply.prompt_ids is None
    else:
        assert reply.token_ids == tuple(body["choices"][0]["token_ids"])
        assert len(reply.token_ids) == body["usage"]["completion_tokens"]
        assert reply.prompt_ids is not None
        assert len(reply.prompt_ids) == body["usage"]["prompt_tokens"]


def test_vllms_refusals_are_understood() -> None:
    def replay(name: str) -> list[Reply | Refusal]:
        return told(lambda e: e.send(VLLM[name]["status"], VLLM[name]["body"]), [ask()])

    (refused,) = replay("too_long")
    assert isinstance(refused, Refusal)
    assert "maximum context length is 1024 tokens" in refused.reason
    with pytest.raises(UsageError, match="The model `other` does not exist"):
        replay("no_model")


# -- faults that pass ---------------------------------------------------------------------------------------


def nothing_finished(exchange: Exchange) -> None:
    exchange.say("half", reason=None)


PASSING: dict[str, Callable[[Exchange], None]] = {
    "429": lambda e: e.send(429, {"error": {"message": "slow down"}}),
    "500": lambda e: e.send(500, b"oops"),
    "503": lambda e: e.send(503, b"<html>busy</html>"),
    "cut": lambda e: e.cut(),
    "dropped": lambda e: e.drop(),
    "html": lambda e: e.send(200, b"<html>Welcome to the proxy</html>"),
    "empty": lambda e: e.send(200, b""),
    "a list": lambda e: e.send(200, [1, 2]),
    "no choices": lambda e: e.send(200, {"choices": []}),
    "no message": lambda e: e.send(200, {"choices": [{"finish_reason": "stop"}]}),
    "error in 200": lambda e: e.send(200, {"error": {"message": "overloaded"}}),
    "unfinished": nothing_finished,
    "content of parts": lambda e: e.send(200, completion([{"type": "text"}], "stop")),  # type: ignore[arg-type]
    "ids of text": lambda e: e.say("x", token_ids=["a"]),
    "not UTF-8": lambda e: e.send(200, b"\xff\xfe{"),
    "wrong length": lambda e: e.send(200, completion("x", "stop"), {"Content-Encoding": "gzip"}),
    "nested": lambda e: e.send(200, b"[" * 200_000),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(fault: str) -> None:
    waits = Waits()

    def answer(exchange: Exchange) -> None:
        if exchange.count <= 2:
            PASSING[fault](exchange)
        else:
            fine(exchange)

    assert told(answer, [ask()], waits, concurrency=1) == [Reply("a0", "to Why?", "stop", None, None)]
    assert waits.seconds == [1.0, 2.0]


@pytest.mark.parametrize("fault", PASSING)
def test_what_does_not_pass_is_given_up_with_a_word_about_it(fault: str) -> None:
    waits = Waits()
    with pytest.raises(EnvironmentFault, match=r"does not answer \(8 tries\)") as caught:
        told(PASSING[fault], [ask()], waits, concurrency=1)
    assert waits.seconds == [1, 2, 4, 8, 16, 32, 60]
    assert len(str(caught.value)) < 900
    assert "same command" in caught.value.way_out


def test_no_server_at_all() -> None:
    with serving(fine, ["m"]) as server:
        gone = server.url
    with pytest.raises(EnvironmentFault, match="ConnectError"):
        from_url(gone, [ask()])


def test_a_server_that_does_not_answer_in_time() -> None:
    late = threading.Event()

    def answer(exchange: Exchange) -> None:
        if exchange.count == 1:
            late.wait(10)
        fine(exchange)

    came = told(answer, [ask()], timeout=0.2, concurrency=1)
    late.set()
    assert came == [Reply("a0", "to Why?", "stop", None, None)]


def test_an_endless_answer_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 1000)
    with pytest.raises(EnvironmentFault, match="more than"):
        told(lambda e: e.say("x" * 2000), [ask()])


@pytest.mark.parametrize("spelling", ["seconds", "date"])
def test_retry_after_is_honoured(spelling: str) -> None:
    waits = Waits()
    then = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)

    def answer(exchange: Exchange) -> None:
        if exchange.count == 1:
            exchange.send(429, {}, {"Retry-After": "30" if spelling == "seconds" else then})
        else:
            fine(exchange)

    told(answer, [ask()], waits, concurrency=1)
    (waited,) = waits.seconds
    assert 25 <= waited <= 30


@pytest.mark.parametrize("wish", ["0", "soon", "-5", "nan", "Thu, 99 Foo"])
def test_a_retry_after_that_is_none_is_no_wish(wish: str) -> None:
    waits = Waits()

    def answer(exchange: Exchange) -> None:
        exchange.send(503, {}, {"Retry-After": wish}) if exchange.count == 1 else fine(exchange)

    told(answer, [ask()], waits, concurrency=1)
    assert waits.seconds == [1.0]


def test_a_wait_of_a_day_is_not_sat_out() -> None:
    waits = Waits()
    with pytest.raises(EnvironmentFault, match=r"1 try.*HTTP 429"):
        told(lambda e: e.send(429, {}, {"Retry-After": "86400"}), [ask()], waits)
    assert waits.seconds == []


def test_answers_beside_a_fault_are_not_lost() -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.request["messages"][0]["content"] == "bad":
            exchange.send(403, {"error": {"message": "no"}})
        else:
            fine(exchange)

    with serving(answer, ["m"]) as server, Endpoint(server.url, max_new_tokens=4, concurrency=1) as there:
        for one in (ask(0), ask(1), ask(2, "bad")):
            there.submit(one)
        while there._done.qsize() < 3:
            time.sleep(0.01)
        came = there.take()
        with pytest.raises(UsageError, match="refuses us"):
            there.take()
    assert [reply.id for reply in came] == ["a0", "a1"]


def test_leaving_does_not_wait_for_what_is_under_way() -> None:
    never = threading.Event()

    def answer(exchange: Exchange) -> None:
        never.wait(20)

    with serving(answer, ["m"]) as server:
        began = datetime.now(UTC)
        with Endpoint(server.url, max_new_tokens=4, concurrency=2) as there:
            there.submit(ask())
        assert (datetime.now(UTC) - began).total_seconds() < 5
        never.set()


# -- faults that do not pass --------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "words"), [(401, "refuses us"), (403, "refuses us"), (404, "HTTP 404")])
def test_what_will_not_pass_is_said_at_once(status: int, words: str) -> None:
    waits = Waits()
    with pytest.raises(UsageError, match=words):
        told(lambda e: e.send(status, {"error": {"message": "no such thing"}}), [ask()], waits)
    assert waits.seconds == []


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-open")
    with serving(fine, ["m"]) as server:
        from_url(server.url, [ask()])
        monkeypatch.setenv("EYAS_API_KEY", "sk-ours")
        from_url(server.url, [ask()])
        assert [h["Authorization"] for h in server.headers] == ["Bearer sk-open", "Bearer sk-ours"]
    with pytest.raises(UsageError) as caught:
        told(lambda e: e.send(401, {"error": "bad key"}), [ask()])
    assert "EYAS_API_KEY" in str(caught.value)
    assert "sk-ours" not in str(caught.value)


def test_the_model_is_the_only_one_or_the_one_named() -> None:
    def model(models: list[str] | None, name: str | None) -> str:
        with serving(fine, models) as server, Endpoint(server.url, model=name, max_new_tokens=4) as there:
            return str(there.model)

    assert model(["one"], None) == "one"
    assert model(["one", "two"], "two") == "two"
    assert model(None, "unlisted") == "unlisted"
    with pytest.raises(UsageError, match="one, two"):
        model(["one", "two"], None)
    with pytest.raises(UsageError, match="Did you mean 'llama'"):
        model(["llama", "qwen"], "lama")
    with pytest.raises(UsageError, match="HTTP 404"):
        model(None, None)


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_urls_are_understood(url: str) -> None:
    assert base_url(url) == "http://h:1/v1"
    assert base_url("https://h/openai/v2") == "https://h/openai/v2"


@pytest.mark.parametrize(
    "url", ["h:1", "", "file:///etc/passwd", "http://", "http://me:secret@h/v1", "http://h/v1?key=s3cret"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        base_url(url)
    assert not [secret for secret in ("s3cret", "secret") if secret in str(caught.value)]
