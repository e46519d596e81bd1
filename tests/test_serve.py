"""``eyas serve`` answers as the decoder alone does, in the official API's shapes, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import serving
from eyas.answers import Sampling
from eyas.decode.loop import Generation, generate
from eyas.decode.plain import plain
from eyas.serve import Answering
from eyas.serve.answering import Request
from eyas.serve.text import Span, Spelling, merged
from serving import Hinted, Running, Scripted
from serving import serving as served

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serving.load(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Running]:
    with served(Hinted(*tiny, draft_tokens=3)) as running:
        yield running


def ids_of(tiny: Any, text: str) -> list[int]:
    return list(tiny[0].tokenizer(text)["input_ids"])


def alone(tiny: Any, prompt_ids: list[int], length: int) -> Generation:
    """What the decoder says without a server."""
    hinted = Hinted(*tiny, draft_tokens=3)
    side = hinted.side(Request(tuple(prompt_ids), length))
    return Generation(tiny[0], side, prompt_ids, max_new_tokens=length, draft_tokens=3).finish()


def ask(server: Running, path: str, **body: Any) -> Any:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Running, **body: Any) -> Any:
    return ask(server, "/v1/chat/completions", **{"messages": HELLO, "max_tokens": 24, "temperature": 0, **body})


def complete(server: Running, **body: Any) -> Any:
    return ask(server, "/v1/completions", **{"prompt": "once", "max_tokens": 24, "temperature": 0, **body})


def events(server: Running, path: str, **body: Any) -> list[Any]:
    """What a stream says, its end looked at."""
    with server.client() as client, client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# -- the answer is the target's --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 48])
def test_a_greedy_answer_is_plain_decoding_s(length: int, server: Running, tiny: Any) -> None:
    told = complete(server, max_tokens=length, return_token_ids=True)
    oracle = list(plain(tiny[0], told["prompt_token_ids"], max_new_tokens=length))
    assert told["choices"][0]["token_ids"] == oracle
    text = tiny[0].tokenizer.decode(oracle, skip_special_tokens=True)
    assert told["choices"][0]["text"] == text
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == length


def test_a_sampled_answer_is_the_decoder_s_for_its_seed(server: Running, tiny: Any) -> None:
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7}
    law = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    told = complete(server, **settings, **law, logit_bias={"65": 2.5}, return_token_ids=True)
    sampling = Sampling(**settings, **law, logit_bias={65: 2.5})
    run = generate(
        *tiny, told["prompt_token_ids"], max_new_tokens=24, draft_tokens=3, sampling=sampling, name="0"
    ).finish()
    assert told["choices"][0]["token_ids"] == run.token_ids
    other = complete(server, **{**settings, "seed": 8}, return_token_ids=True)
    assert other["choices"][0]["token_ids"] != run.token_ids


def test_without_a_seed_two_answers_differ(server: Running) -> None:
    one, two = (complete(server, temperature=1.5, return_token_ids=True) for _ in range(2))
    assert one["choices"][0]["token_ids"] != two["choices"][0]["token_ids"]


def test_a_server_without_drafter_says_the_same(server: Running, tiny: Any) -> None:
    with served(Answering(tiny[0], None, draft_tokens=0)) as bare:
        told = chat(bare)
    assert told["choices"] == chat(server)["choices"]
    assert told["usage"]["eyas"]["drafted"] == []


def test_the_prompt_is_the_template_s(server: Running, tiny: Any) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    told = chat(server, messages=[{"role": "developer", "content": "Be."}, {"role": "user", "content": parts}],
                return_token_ids=True)  # fmt: skip
    text = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tiny[0].tokenizer.decode(told["prompt_token_ids"]) == text


def test_counts_are_the_decoder_s(server: Running, tiny: Any) -> None:
    told = complete(server, return_token_ids=True)
    run = alone(tiny, told["prompt_token_ids"], 24)
    usage = told["usage"]
    assert usage["eyas"] == {
        "rounds": run.rounds,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "accept_length": round(1 + sum(run.accepted) / run.rounds, 4),
    }
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sum(run.accepted) > 0
    assert details["rejected_prediction_tokens"] == sum(run.drafted) - sum(run.accepted)
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


# -- streams ---------------------------------------------------------------------------------------------------


def test_a_chat_streamed_is_the_chat_whole(server: Running) -> None:
    whole = chat(server, max_tokens=40)
    chunks = events(server, "/v1/chat/completions", messages=HELLO, max_tokens=40, temperature=0,
                    stream_options={"include_usage": True})  # fmt: skip
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["model"], c["created"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    body = [c for c in chunks if c["choices"]]
    assert "".join(c["choices"][0]["delta"]["content"] for c in body) == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in body[:-1]] == [None] * (len(body) - 1)
    assert body[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in body)


def test_spans_are_the_text_and_tell_what_was_drafted(server: Running, tiny: Any) -> None:
    chunks = events(server, "/v1/completions", prompt="once", max_tokens=60, temperature=0, return_token_ids=True)
    run = alone(tiny, ids_of(tiny, "once"), 60)
    assert any(run.was_drafted)
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == run.token_ids
    for chunk in chunks:
        assert "".join(text for text, _ in chunk["eyas"]["spans"]) == chunk["choices"][0]["text"]
    spelling = Spelling(lambda ids: str(tiny[0].tokenizer.decode(ids, skip_special_tokens=True)))
    spans = [s for i, d in zip(run.token_ids, run.was_drafted, strict=True) for s in spelling.add(i, drafted=d)]
    told = [Span(text, kept) for c in chunks for text, kept in c["eyas"]["spans"]]
    assert merged(told) == merged([*spans, *spelling.close()])
    assert chunks[-1]["eyas"]["rounds"] == run.rounds
    assert "usage" not in chunks[-1]


def test_a_chunk_comes_before_the_answer_is_whole(tiny: Any) -> None:
    """Not gathered and sent at the end."""
    slow = Scripted(tiny[0], lambda _: [("a", False)] * 10, pause=0.1)
    with served(slow) as server, server.client() as client:
        body = {"prompt": "x", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            assert server.service.player.running == 1


# -- stop strings, characters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_splits_tokens(stream: bool, server: Running, tiny: Any) -> None:
    """Every token is a byte here, so any stop string of two characters does; the text ends before it."""
    text = complete(server, max_tokens=50)["choices"][0]["text"]
    clean = [i for i in range(5, len(text) - 3) if "\ufffd" not in text[i : i + 3]]
    stop = text[clean[0] : clean[0] + 3]
    expected = text[: text.index(stop)]
    body = {"prompt": "once", "max_tokens": 50, "temperature": 0, "stop": ["never said", stop]}
    if stream:
        chunks = events(server, "/v1/completions", **body)
        said = "".join(c["choices"][0]["text"] for c in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = complete(server, **body)["choices"][0]
        said, reason = choice["text"], choice["finish_reason"]
    assert (said, reason) == (expected, "stop")


def test_the_end_token_ends_an_answer_and_is_no_text(server: Running, tiny: Any) -> None:
    bias = {str(next(iter(tiny[0].eos_ids()))): 100}
    choice = complete(server, logit_bias=bias, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == list(tiny[0].eos_ids())
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def spelled(tokens: list[bytes], stops: tuple[str, ...] = ()) -> list[list[Span]]:
    """Each token drafted if its place is odd; what each gives, and the close."""

    def decode(ids: Any) -> str:
        return b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")

    spelling = Spelling(decode, stops)
    return [*(spelling.add(i, drafted=i % 2 == 1) for i in range(len(tokens))), spelling.close()]


def test_a_character_over_several_tokens_comes_whole() -> None:
    crow = "🐦".encode()
    given = spelled([b"a", crow[:1], crow[1:2], crow[2:3], crow[3:], b"b"])
    assert [g for g in given if g] == [[Span("a", False)], [Span("🐦", False)], [Span("b", True)]]


def test_what_is_no_character_is_said_at_the_end() -> None:
    assert "".join(s.text for g in spelled([b"a", b"\xf0", b"\x9f"]) for s in g) == "a\ufffd"


def test_what_may_begin_a_stop_string_waits_and_keeps_its_own_kind() -> None:
    given = spelled([b"x", b"<", b"/", b"y", b"</", b"s>", b"z"], ("</s>",))
    assert given[:4] == [[Span("x", False)], [], [], [Span("<", True), Span("/", False), Span("y", True)]]
    assert given[4:] == [[], [], [], []]


def test_neighbours_of_a_kind_are_one() -> None:
    assert merged([Span("a", True), Span("b", True), Span("", False), Span("c", False)]) == [
        Span("ab", True),
        Span("c", False),
    ]


# -- choices, logprobs -----------------------------------------------------------------------------------------


def test_several_prompts_and_several_answers(server: Running) -> None:
    told = complete(server, prompt=["once", "twice"], n=2, temperature=0.9, seed=3, max_tokens=8, return_token_ids=True)
    assert [c["index"] for c in told["choices"]] == [0, 1, 2, 3]
    ids = [c["token_ids"] for c in told["choices"]]
    assert ids[0] != ids[1], "two answers to one prompt are two draws"
    alone = complete(server, prompt="twice", n=2, temperature=0.9, seed=3, max_tokens=8, return_token_ids=True)
    assert [c["token_ids"] for c in alone["choices"]] == ids[2:]
    assert told["usage"]["prompt_tokens"] == len("once") + len("twice")
    assert told["usage"]["completion_tokens"] == sum(map(len, ids))
    chunks = events(server, "/v1/completions", prompt=["once", "twice"], n=2, temperature=0.9, seed=3, max_tokens=8)
    for i, choice in enumerate(told["choices"]):
        said = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert "".join(c["text"] for c in said) == choice["text"]
        assert said[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_prompt_of_token_ids(nested: bool, server: Running, tiny: Any) -> None:
    ids = ids_of(tiny, "hi")
    assert complete(server, prompt=[ids] if nested else ids)["choices"] == complete(server, prompt="hi")["choices"]


def test_logprobs_are_the_target_s(server: Running, tiny: Any) -> None:
    bare = generate(*tiny, ids_of(tiny, "hi"), max_new_tokens=8, draft_tokens=3, logprobs=2).finish()
    content = chat(server, logprobs=True, top_logprobs=2, max_tokens=8)["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0 for one in content), "greedy takes the best"
    told = complete(server, prompt="hi", logprobs=2, max_tokens=8)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([one.logprob for one in bare.logprobs], abs=1e-4)
    assert len(told["tokens"]) == len(told["text_offset"]) == len(told["top_logprobs"]) == 8
    assert told["text_offset"][0] == 0
    assert chat(server)["choices"][0]["logprobs"] is None


def test_logprobs_in_a_stream_are_those_of_the_whole(server: Running) -> None:
    whole = chat(server, logprobs=True, top_logprobs=1, max_tokens=12)["choices"][0]["logprobs"]["content"]
    chunks = events(server, "/v1/chat/completions", messages=HELLO, max_tokens=12, temperature=0, logprobs=True,
                    top_logprobs=1)  # fmt: skip
    streamed = [one for c in chunks for one in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole


# -- facts -----------------------------------------------------------------------------------------------------


def test_models_and_health(server: Running) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [m["id"] for m in listed] == ["tiny"]
        assert listed[0]["max_model_len"] == 256
        assert client.get("/v1/models/tiny").json() == listed[0]
        assert client.get("/v1/models/other").status_code == 404
        assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_metrics_count_what_was_played(tiny: Any) -> None:
    with served(Hinted(*tiny, draft_tokens=3)) as server:
        usages = [complete(server)["usage"], chat(server)["usage"]]
        server.idle()
        with server.client() as client:
            page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {k: float(v) for k, _, v in (line.rpartition(" ") for line in page.text.splitlines() if line[0] != "#")}
    rounds = sum(u["eyas"]["rounds"] for u in usages)
    assert values["eyas_serve_rounds_total"] == rounds
    accepted = [sum(u["eyas"]["accepted"][k] for u in usages) for k in range(3)]
    drafted = [sum(u["eyas"]["drafted"][k] for u in usages) for k in range(3)]
    for k in range(3):
        assert values[f'eyas_serve_drafted_at_depth_total{{depth="{k}"}}'] == drafted[k]
        assert values[f'eyas_serve_accepted_at_depth_total{{depth="{k}"}}'] == accepted[k]
    assert values["eyas_serve_accept_length"] == pytest.approx(1 + sum(accepted) / rounds)
    assert values["eyas_serve_generated_tokens_total"] == sum(u["completion_tokens"] for u in usages)
    assert values["eyas_serve_prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
    assert values['eyas_serve_requests_total{outcome="length"}'] == 2
    assert values["eyas_serve_first_token_seconds_count"] == 2
    assert values["eyas_serve_between_tokens_seconds_count"] == sum(u["completion_tokens"] - 1 for u in usages)
    assert values["eyas_serve_running"] == values["eyas_serve_waiting"] == 0


def test_the_log_has_a_line_a_request_and_no_word_of_it(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="eyas.serve"):
        told = chat(server, messages=[{"role": "user", "content": "a secret"}], user="somebody")
        server.idle()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "eyas.serve"]
    facts = dict(word.split("=", 1) for word in line.split(" "))
    assert facts["id"] == told["id"]
    assert facts["outcome"] == "length"
    assert int(facts["tokens"]) == told["usage"]["completion_tokens"]
    assert float(facts["accept_len"]) == pytest.approx(told["usage"]["eyas"]["accept_length"], abs=0.006)
    assert {"accept_rate", "tokens_per_s", "first_token_s"} <= facts.keys()
    assert "secret" not in line
    assert "somebody" not in line
