"""What ``eyas serve`` refuses, and how: OpenAI's error shape, a status that fits, the field's name; never a crash."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import serving
from eyas.errors import UsageError
from eyas.serve import Answering, Settings, require_safe
from eyas.serve.guard import Guard
from serving import Running
from serving import serving as served

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Running]:
    with served(Answering(*tiny, draft_tokens=2), body_bytes=100_000) as running:
        yield running


def refused(server: Running, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error of a body, which is raw where it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with server.client() as client:
        response = client.post(path, content=raw, headers={"Content-Type": "application/json", **headers})
    told = response.json()
    assert set(told) == {"error"}, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return response.status_code, told["error"]


TURN = {"role": "user", "content": "hi"}
COMPLETION: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": 3}, "prompt", "Invalid"),
    ({}, "prompt", "Missing required parameter"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [1, 320]}, "prompt", "320: the target has rows for 0 to 319"),
    ({"prompt": [1, -1]}, "prompt[1]", "greater than or equal to 0"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "valid integer"),
    ({"prompt": [True]}, "prompt[0]", "Invalid"),
    ({"prompt": "x" * 300}, "prompt", "maximum context length is 256 tokens; the prompt has 300"),
    ({"prompt": "x", "max_tokens": 256}, "prompt", "256 tokens; the prompt has 1 and 256 new ones were asked for"),
    ({"prompt": "x" * 90_000}, "prompt", "at least 7500"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"prompt": "x", "max_tokens": "7"}, "max_tokens", "valid integer"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "valid integer"),
    ({"prompt": "x", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "x", "temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"prompt": "x", "min_p": 1.1}, "min_p", "less than or equal to 1"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "no token id from 0 to 319"),
    ({"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias", "no token id from 0 to 319"),
    ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
    ({"prompt": "x", "seed": "a"}, "seed", "valid integer"),
    ({"prompt": "x", "stop": ""}, "stop", "at least 1 character"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop[1]", "at least 1 character"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"prompt": "x", "stop": 3}, "stop", "Invalid"),
    ({"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "x", "n": 17}, "n", "less than or equal to 16"),
    ({"prompt": ["x"] * 16, "n": 2}, "n", "at most 16"),
    ({"prompt": "x", "best_of": 2}, "best_of", "cannot be honoured"),
    ({"prompt": "x", "echo": True}, "echo", "cannot be honoured"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "cannot be honoured"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "x", "stream": "yes"}, "stream", "valid boolean"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "set 'stream' to true"),
    ({"prompt": "x", "temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ({"prompt": "x", "tools": [1]}, "tools", "Unknown parameter: 'tools'."),
]
CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "Missing required parameter"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [3]}, "messages[0]", "Invalid"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "Missing required parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "Invalid"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system', 'developer', 'user'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "'text'"),
    ({"messages": [TURN], "tools": [{"type": "function"}]}, "tools", "cannot be honoured: no tools are called here"),
    ({"messages": [TURN], "tool_choice": "required"}, "tool_choice", "cannot be honoured"),
    ({"messages": [TURN], "functions": [{}]}, "functions", "cannot be honoured"),
    ({"messages": [TURN], "response_format": {"type": "json_object"}}, "response_format", "answers are text"),
    ({"messages": [TURN], "modalities": ["audio"]}, "modalities", "cannot be honoured"),
    ({"messages": [TURN], "top_logprobs": 2}, "top_logprobs", "set 'logprobs' to true"),
    ({"messages": [TURN], "logprobs": 1}, "logprobs", "valid boolean"),
    ({"messages": [TURN], "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"messages": [TURN], "max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"messages": [{"role": "user", "content": "x" * 250}]}, "messages", "maximum context length is 256 tokens"),
    ({"messages": [TURN], "reasoning_effort": "high"}, "reasoning_effort", "Unknown parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "said"), COMPLETION, ids=[str(c[0])[:50] for c in COMPLETION])
def test_a_completion_that_cannot_be(body: Any, param: str | None, said: str, server: Running) -> None:
    status, error = refused(server, "/v1/completions", body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(("body", "param", "said"), CHAT, ids=[str(c[0])[:60] for c in CHAT])
def test_a_chat_that_cannot_be(body: Any, param: str | None, said: str, server: Running) -> None:
    status, error = refused(server, "/v1/chat/completions", body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"3", b'"text"', b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "stop": "\\udfff"}', b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b"{" + b'"a":{' * 9000 + b"}" * 9000 + b"}",
    ],
    ids=lambda raw: str(raw[:24]),
)  # fmt: skip
def test_what_is_no_json_or_no_text(raw: bytes, server: Running) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, error = refused(server, path, raw)
        assert status == 400
        assert error["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0}, {"repetition_penalty": 11}, {"presence_penalty": 3}, {"frequency_penalty": -3},
        {"logit_bias": {"320": 1}}, {"prompt": ["x", "y" * 300]}, {"prompt": [[1], [1, 320]]},
    ],
    ids=str,
)  # fmt: skip
def test_of_a_batch_nothing_is_played_if_any_of_it_is_refused(wrong: dict[str, Any], tiny: Any) -> None:
    class Played(Answering):
        def begin(self, request: Any) -> Any:
            raise AssertionError("it was begun on")

    with served(Played(*tiny, draft_tokens=2)) as server:
        told = server.ask(**{"prompt": ["x", "y"], "n": 2, **wrong})
    assert (told.status_code, told.json()["error"]["type"]) == (400, "invalid_request_error")


def test_other_content_types_are_not_read(server: Running) -> None:
    """What a page of another origin may send without a preflight; a Blob has no type at all."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        status, error = refused(server, "/v1/completions", {"prompt": "x"}, **{"Content-Type": kind})
        assert (status, error["code"]) == (415, "unsupported_media_type")
    with server.client() as client:
        request = client.build_request("POST", "/v1/completions", content=b'{"prompt": "x"}')
        assert "content-type" not in request.headers
        assert client.send(request).status_code == 415


def test_what_changes_no_answer_is_taken(server: Running) -> None:
    extras = {"user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
              "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
              "logit_bias": None, "stop": None, "n": 1, "seed": None, "stream_options": None, "stream": False,
              "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # fmt: skip
    turn = {**TURN, "name": "me"}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": [turn], "max_tokens": 1, **extras})
    assert response.status_code == 200, response.text


def test_a_template_s_own_refusal_is_told(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from templates import GEMMA

    monkeypatch.setattr(tiny[0].tokenizer, "chat_template", GEMMA)
    with served(Answering(*tiny, draft_tokens=2)) as strict:
        status, error = refused(strict, "/v1/chat/completions", {"messages": [TURN, TURN]})
    assert (status, error["param"]) == (400, "messages")
    assert "roles must alternate" in error["message"]


def test_without_a_template_there_are_completions_alone(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny[0].tokenizer, "chat_template", None)
    with served(Answering(*tiny, draft_tokens=2)) as raw:
        status, error = refused(raw, "/v1/chat/completions", {"messages": [TURN]})
        assert (status, "use /v1/completions" in error["message"]) == (400, True)
        assert raw.ask(prompt="x", max_tokens=1).status_code == 200


def test_another_model_another_place_another_method(server: Running) -> None:
    status, error = refused(server, "/v1/completions", {"prompt": "x", "model": "gpt-5"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert refused(server, "/v1/nothing", {})[0] == 404
    with server.client() as client:
        got = client.get("/v1/completions")
    assert (got.status_code, set(got.json())) == (405, {"error"})


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(chunked: bool, server: Running) -> None:
    raw = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    content: Any = (raw[i : i + 1000] for i in range(0, len(raw), 1000)) if chunked else raw
    with server.client() as client:
        response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_that_never_ends_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.serve.guard.BODY_SECONDS", 0.2)
    host, port = server.host.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
        slow.sendall(head.encode() + b'Content-Length: 50\r\n\r\n{"prompt"')
        assert b"408" in slow.recv(4096)


def test_bodies_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(None, Settings(model="m", body_bytes=100))  # type: ignore[arg-type]
    for _ in range(16):
        guard.hold(100, 100)
    with pytest.raises(Exception, match="Too much is being sent at once"):
        guard.hold(1, 1)


# -- who may ask -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tiny: Any) -> Iterator[Running]:
    with served(Answering(*tiny, draft_tokens=2), api_key=KEY, hosts=("box.lan",)) as running:
        yield running


@pytest.mark.parametrize(
    "header",
    [None, "", KEY, "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer \xff"],
)
def test_without_the_key_nothing_is_told(header: str | None, locked: Running) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with locked.client() as client:
        for method, path in (
            ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"),
            ("GET", "/openapi.json"), ("GET", "/v1/models/tiny"), ("GET", "/health/"), ("GET", "/index.html"),
        ):  # fmt: skip
            response = client.request(method, path, headers=headers, json={"prompt": "x"})
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert KEY not in response.text


def test_with_the_key_all_is_as_ever(locked: Running) -> None:
    for scheme in ("Bearer", "bearer"):
        with locked.client(headers={"Authorization": f"{scheme} {KEY}"}) as client:
            assert client.get("/v1/models").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    with locked.client() as client:
        assert client.get("/health").status_code == 200
        page = client.get("/")
    assert page.status_code == 200
    assert KEY not in page.text


def test_two_keys_are_none(locked: Running) -> None:
    headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
    with locked.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200), ("10.0.0.7", 200),
        ("box.lan", 200), ("box.lan.", 200), ("evil.example", 403), ("box.lan.evil.example", 403), ("", 403),
        ("localhost@evil.example", 403), ("evil.example/localhost", 403), ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
    ],
)  # fmt: skip
def test_a_name_must_be_the_server_s(host: str, status: int, locked: Running) -> None:
    with locked.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_no_page_of_another_origin_is_answered(server: Running) -> None:
    with server.client(headers={"Origin": "https://evil.example"}) as client:
        preflight = client.options("/v1/chat/completions", headers={"Access-Control-Request-Method": "POST"})
        told = client.get("/v1/models")
    for response in (preflight, told):
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert preflight.status_code == 405


def test_an_open_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.lan"):
        with pytest.raises(UsageError, match="no API key is set"):
            require_safe(host, Settings(model="m"))
        require_safe(host, Settings(model="m", api_key=KEY))
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        require_safe(host, Settings(model="m"))


def test_a_key_is_printed_nowhere() -> None:
    assert KEY not in repr(Settings(model="m", api_key=KEY))
    with pytest.raises(UsageError, match="fewer than 8"):
        Settings(model="m", api_key="short")
    for wrong in ({"max_running": 0}, {"max_queue": -1}, {"queue_seconds": 0.0}, {"grace_seconds": float("inf")}):
        with pytest.raises(UsageError, match="--"):
            Settings(model="m", **wrong)  # type: ignore[arg-type]
