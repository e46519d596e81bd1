"""A server as a side, over a real socket: streams, counts, waits, and everything that goes wrong on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from eyas import bench
from eyas.bench import SideResult
from eyas.bench.url import UrlSide
from eyas.errors import EnvironmentFault, UsageError
from eyas.prompts import Prompt
from servers import Exchange, Server, completion, serving

PROMPTS = [Prompt(f"p{i}", (f"say {i}",)) for i in range(4)]
WORDS = ("one ", "two ", "three")


def events(words: Sequence[str] = WORDS, *, usage: Any = "count", finish: str | None = "stop", **extra: Any) -> bytes:
    """A stream as vLLM, SGLang and llama.cpp write it: a role, text, an end, then usage without choices."""
    sent: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], **extra}]
    sent += [{"choices": [{"delta": {"content": word}, "finish_reason": None}], **extra} for word in words]
    sent.append({"choices": [{"delta": {}, "finish_reason": finish}], **extra})
    if usage is not None:
        told = {"prompt_tokens": 5, "completion_tokens": len(words)} if usage == "count" else usage
        sent.append({"choices": [], "usage": told, **extra})
    lines = [f"data: {json.dumps(event)}\n\n" for event in sent]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def streams(**how: Any) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.send(200, events(**how), {"Content-Type": "text/event-stream"})


@contextmanager
def side(
    answer: Callable[[Exchange], None], models: list[str] | None = None, **how: Any
) -> Iterator[tuple[UrlSide, Server]]:
    waits: list[float] = []

    def pause(seconds: float) -> bool:
        waits.append(seconds)
        return False

    with serving(answer, ["m"] if models is None else models) as server:
        made = UrlSide(server.url, max_new_tokens=8, **{"timeout": 5.0, "pause": pause, **how})
        made.waits = waits  # type: ignore[attr-defined]
        with made:
            yield made, server


def test_a_stream_is_counted_by_usage_and_timed_by_its_first_token() -> None:
    def slowly(exchange: Exchange) -> None:
        raw = events(usage={"completion_tokens": 7})
        parts = raw.split(b"\n\n")
        exchange._handler.send_response(200)
        exchange._handler.send_header("Content-Length", str(len(raw)))
        exchange._handler.end_headers()
        for i, part in enumerate(parts[:-1]):
            time.sleep({1: 0.15, 4: 0.5}.get(i, 0.0))  # before the first word, and before the end
            exchange._handler.wfile.write(part + b"\n\n")
            exchange._handler.wfile.flush()

    with side(slowly) as (asked, server):
        result = asked(PROMPTS[0])
    assert (result.tokens, result.text, result.token_ids) == (7, "one two three", [])
    assert result.first_seconds is not None
    assert 0.15 <= result.first_seconds < result.seconds
    assert result.seconds >= 0.65
    request = server.requests[0]
    assert request["messages"] == [{"role": "user", "content": "say 0"}]
    assert (request["stream"], request["stream_options"], request["temperature"]) == (True, {"include_usage": True}, 0)
    assert (request["max_tokens"], request["model"]) == (8, "m")


def test_without_a_stream_there_is_no_first_token() -> None:
    def whole(exchange: Exchange) -> None:
        exchange.send(200, completion("one two", "length") | {"usage": {"completion_tokens": 2}, "model": "m"})

    with side(whole, stream=False) as (asked, server):
        result = asked(PROMPTS[0])
    assert (result.tokens, result.text, result.first_seconds) == (2, "one two", None)
    assert "stream_options" not in server.requests[0]


def test_ids_and_rounds_are_taken_where_they_are_told() -> None:
    raw = events(usage={"completion_tokens": 3, "eyas": {"rounds": 2, "drafted": [2, 2], "accepted": [1, 0]}})
    raw = raw.replace(b'"finish_reason": null}', b'"finish_reason": null, "token_ids": [5]}')
    with side(lambda exchange: exchange.send(200, raw)) as (asked, _):
        result = asked(PROMPTS[0])
    assert (result.token_ids, result.rounds, result.drafted, result.accepted) == ([5, 5, 5], 2, [2, 2], [1, 0])


@pytest.mark.parametrize(
    "usage",
    [
        {"completion_tokens": 3, "eyas": {"rounds": 2, "drafted": [2], "accepted": [3]}},
        {"completion_tokens": 3, "eyas": {"rounds": 2, "drafted": [2], "accepted": []}},
        {"completion_tokens": 3, "eyas": {"rounds": "2", "drafted": [], "accepted": []}},
        {"completion_tokens": 3, "eyas": {}},
    ],
)
def test_counts_that_are_none_are_no_answer(usage: Any) -> None:
    with side(streams(usage=usage)) as (asked, _), pytest.raises(EnvironmentFault, match="does not answer"):
        asked(PROMPTS[0])


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": 0}, {"completion_tokens": "3"}])
def test_an_uncounted_answer_is_a_fault_with_a_way_out(usage: Any) -> None:
    with side(streams(usage=usage)) as (asked, _), pytest.raises(UsageError, match=r"how many tokens.*--no-stream"):
        asked(PROMPTS[0])


def test_429_is_waited_out_as_asked_and_not_timed() -> None:
    def busy(exchange: Exchange) -> None:
        if exchange.count < 3:
            time.sleep(0.3)
            exchange.send(429, {"error": {"message": "slow down"}}, {"Retry-After": "7"})
        else:
            exchange.send(200, events())

    with side(busy) as (asked, server):
        began = time.perf_counter()
        result = asked(PROMPTS[0])
        took = time.perf_counter() - began
    assert asked.waits == [7.0, 7.0]  # type: ignore[attr-defined]
    assert (len(server.requests), asked.retries) == (3, 2)
    assert took - result.seconds >= 0.6


def cut(exchange: Exchange) -> None:
    raw = events()
    exchange._handler.send_response(200)
    exchange._handler.send_header("Content-Length", str(len(raw)))
    exchange._handler.end_headers()
    exchange._handler.wfile.write(raw[: len(raw) // 2])
    exchange._handler.wfile.flush()
    exchange.drop()


@pytest.mark.parametrize(
    "bad",
    [
        cut,
        lambda exchange: exchange.drop(),
        lambda exchange: exchange.send(500, {"error": "boom"}),
        lambda exchange: exchange.send(200, b"<html>\xff\x00 not a stream"),
        lambda exchange: exchange.send(200, b"data: {not json}\n\n"),
        lambda exchange: exchange.send(200, b'data: {"error": {"message": "worker died"}}\n\n'),
        lambda exchange: exchange.send(200, b'data: {"choices": [7]}\n\n'),
        lambda exchange: exchange.send(200, b"data: [1, 2]\n\n"),
        streams(finish=None),
    ],
)
def test_what_goes_wrong_once_is_asked_again_and_stays_is_a_fault(bad: Callable[[Exchange], None]) -> None:
    with side(lambda exchange: bad(exchange) if exchange.count == 1 else exchange.send(200, events())) as (asked, _):
        assert asked(PROMPTS[0]).text == "one two three"
        assert asked.retries == 1
    with side(bad) as (asked, server), pytest.raises(EnvironmentFault, match="4 tries"):
        asked(PROMPTS[0])
    assert len(server.requests) == 4


def test_a_server_that_is_too_slow_is_a_fault() -> None:
    def hangs(exchange: Exchange) -> None:
        time.sleep(1.0)

    with side(hangs, timeout=0.2) as (asked, _), pytest.raises(EnvironmentFault, match="no answer in time"):
        asked(PROMPTS[0])


def test_extras_are_left_out_where_they_are_refused() -> None:
    def strict(exchange: Exchange) -> None:
        if "return_token_ids" in exchange.request:
            exchange.send(400, {"error": {"message": "unknown field"}})
        else:
            exchange.send(200, events())

    with side(strict) as (asked, server):
        assert asked(PROMPTS[0]).tokens == 3
        assert asked(PROMPTS[1]).tokens == 3
    assert len(server.requests) == 3
    assert server.requests[1]["stream"] is True


def test_a_refused_prompt_is_told_with_the_servers_words() -> None:
    def full(exchange: Exchange) -> None:
        exchange.send(400, {"error": {"message": "context length exceeded"}})

    with side(full) as (asked, _), pytest.raises(UsageError, match="refuses p0: HTTP 400: context length exceeded"):
        asked(PROMPTS[0])


def test_another_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with side(streams(model="quite-another")) as (asked, _):
        asked(PROMPTS[0])
        assert (asked.model, asked.models) == ("m", {"quite-another"})
    with (
        serving(streams(), ["big", "small"]) as server,
        pytest.raises(UsageError, match="has no model 'tiny'"),
        UrlSide(server.url, model="tiny", max_new_tokens=8),
    ):
        pass
    with (
        serving(streams(), ["big", "small"]) as server,
        pytest.raises(UsageError, match="has 2 models"),
        UrlSide(server.url, max_new_tokens=8),
    ):
        pass


def test_the_key_is_read_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_API_KEY", "for-all")
    monkeypatch.setenv("MINE", "for-one")
    for how, wanted in (({}, "Bearer for-all"), ({"key_variable": "MINE"}, "Bearer for-one")):
        with side(streams(), **how) as (asked, server):
            asked(PROMPTS[0])
        assert {k.lower(): v for k, v in server.headers[0].items()}["authorization"] == wanted
    monkeypatch.delenv("MINE")
    with pytest.raises(UsageError, match="MINE is empty"):
        UrlSide("http://localhost:1", max_new_tokens=8, key_variable="MINE")


def test_servers_side_by_side_and_one_that_dies_midway() -> None:
    """What the other sides measured stays, and equal texts are compared as text."""

    def dies(exchange: Exchange) -> None:
        if exchange.count > 2:
            exchange.drop()
        else:
            exchange.send(200, events(("one ", "two ", "three ")))

    def local(prompt: Prompt) -> SideResult:
        return SideResult((1, 2, 3), 1.0, text="one two three")

    other = streams(words=("un ", "deux"))
    with side(streams()) as (good, _), side(dies) as (bad, _), side(other) as (another, _):
        done = bench.run({"plain": local, "good": good, "bad": bad, "other": another}, PROMPTS)
    found = done.summary()
    assert {name: side.prompts for name, side in found.items()} == {"plain": 4, "good": 4, "bad": 2, "other": 4}
    assert {name: (side.equal.hits, side.equal.n) for name, side in found.items()} == {
        "plain": (4, 4), "good": (4, 4), "bad": (2, 2), "other": (0, 4),
    }  # fmt: skip
    assert found["good"].tokens == 12
    assert [fault.side for fault in done.faults] == ["bad", "bad"]
    assert "4 tries" in done.faults[0].why


def test_a_looping_text_is_seen_by_its_words() -> None:
    with side(streams(words=("la ",) * 30)) as (asked, _):
        assert asked(PROMPTS[0]).repeats.loops
