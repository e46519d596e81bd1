"""Clients that people use against ``eyas serve``: the official one, curl, ``llm``, and a fuzzer with its schema."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import serving
from eyas import checkpoint, resolve
from eyas import target as targets
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.endpoint import Endpoint
from eyas.render import Renderer
from eyas.serve import Answering
from serving import Hinted, Running
from serving import serving as served

KEY = "correct-horse-battery"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Running]:
    with served(Hinted(*tiny, draft_tokens=2), api_key=KEY) as running:
        yield running


# -- the official client ---------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


def test_openai_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 0
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage


def test_openai_completions_models_and_extras(client: openai.OpenAI) -> None:
    told = client.completions.create(
        model="tiny", prompt="once", max_tokens=6, temperature=0.7, seed=1, logprobs=1, stop=["zzz"],
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert told.choices[0].logprobs is not None
    assert len(told.choices[0].logprobs.token_logprobs or []) == 6
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "eyas"


def test_openai_understands_what_it_is_refused(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong-key-altogether").models.list()


# -- others ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_curl(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "stream": True}
    command = ["curl", "-sS", "-N", "--noproxy", "*", f"{server.url}/v1/chat/completions", "-H"]
    command += ["Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    refused = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-w", "%{http_code}", f"{server.url}/v1/models"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert refused.stdout.endswith("401")


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_llm(more: list[str], server: Running, tmp_path: Path) -> None:
    """Simon Willison's command line, told of the server as its documentation says."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: eyas\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: eyas\n", encoding="utf-8"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"eyas": KEY}), encoding="utf-8")
    command = [sys.executable, "-m", "llm", "-m", "eyas", *more, "-o", "temperature", "0", "-o", "max_tokens", "8"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "NO_PROXY": "*"}
    done = subprocess.run([*command, "hello"], capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
        told = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert done.stdout.decode().strip() == told.strip()


def test_eyas_own_endpoint(server: Running, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``eyas prepare --endpoint`` against ``eyas serve``: ids come from the target itself."""
    from eyas.answers import Ask

    monkeypatch.setenv("EYAS_API_KEY", KEY)
    ids = Renderer(tiny[0].tokenizer, tiny[0].eos_ids()).ids(HELLO, prompt=True)
    with Endpoint(f"{server.url}/v1", max_new_tokens=10, concurrency=2) as endpoint:
        endpoint.submit(Ask("1", tuple(ids), tuple(HELLO)))
        (reply,) = endpoint.take()
    assert list(reply.token_ids) == list(plain(tiny[0], ids, max_new_tokens=10))  # type: ignore[union-attr]


# -- made-up requests ------------------------------------------------------------------------------------------


MADE_UP = settings(
    max_examples=20, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, content_type_conformance]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_up_from_the_schema(mode: GenerationMode, server: Running) -> None:
    """Good ones and bad ones: each is answered or refused as the schema says, none ends in a 5xx."""
    headers = {"Authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=headers)
    seen: dict[str, set[int]] = {}

    def ask_of(operation: Any) -> None:
        @MADE_UP
        @given(case=operation.as_strategy(mode))
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens", 0), int):
                case.body["max_tokens"] = min(case.body.get("max_tokens", 2), 2)  # it is not the decoder that is tested
            response = case.call(headers=headers, timeout=300)
            seen.setdefault(operation.path, set()).add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        ask()

    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.method == "post" or mode == GenerationMode.POSITIVE:
            ask_of(operation)
    server.idle()
    both = {"/v1/chat/completions", "/v1/completions"}
    if mode == GenerationMode.POSITIVE:
        assert {"/v1/models", "/health", "/metrics"} <= seen.keys()
        assert all(200 in seen[path] for path in both)
    else:
        assert all(400 in seen[path] for path in both)


# -- the real thing --------------------------------------------------------------------------------------------


@pytest.mark.real
def test_smollm2_with_its_drafter() -> None:
    """Greedy, streamed by the official client: what plain decoding says up to ties, and drafts that are kept."""
    target = targets.load("smollm2")
    drafter = checkpoint.load(checkpoint.read(resolve.drafter("smollm2-eagle3")), target)
    messages: Any = [{"role": "user", "content": "Name three primary colours."}]
    with served(Answering(target, drafter, draft_tokens=2)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=24, stream=True,
                stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
            )  # fmt: skip
            chunks = [chunk.model_dump() for chunk in stream]
        server.idle()
    ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids", [])]
    gaps: list[float] = []
    prompt = Renderer(target.tokenizer, target.eos_ids()).ids(messages, prompt=True)  # type: ignore[arg-type]
    oracle = list(plain(target, prompt, max_new_tokens=24, gaps=gaps))
    parted = first_difference(oracle, ids, gaps)
    assert parted is None or parted.excused
    told = chunks[-1]["usage"]["eyas"]
    assert told["rounds"] < len(ids) - 1, "some drafts are kept"
    assert sum(told["accepted"]) > 0
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == target.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[union-attr]
