"""A completion goes on the prompt's text: no space of it is lost, whatever a tokenizer does to a text's first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tokenizers import decoders

import serving
from eyas.decode.stops import Text
from eyas.serve import Answering
from eyas.serve.text import Spelling, text_of
from serving import Running
from serving import serving as served

WORDS = ["▁Once", "▁upon", "▁a", "▁time", "s", "<s>"]


def decode(ids: Sequence[int]) -> str:
    """As SentencePiece does; the last word is a special token."""
    said = "".join(WORDS[i] for i in ids if WORDS[i] != "<s>")
    return said.replace("▁", " ").removeprefix(" ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bytes as tokens, of whose text the first space goes, as Llama's and Mistral's decoders have it."""
    target, drafter = serving.load(tmp_path_factory.mktemp("tiny"))
    backend = target.tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert target.tokenizer.decode(target.tokenizer(" a b")["input_ids"]) == "a b"
    return target, drafter


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Running]:
    with served(Answering(*tiny, draft_tokens=2)) as running:
        yield running


def said(spelling: Spelling, ids: Sequence[int]) -> str:
    return text_of([span for i in ids for span in spelling.add(i, drafted=False)] + spelling.close())


def test_a_text_that_goes_on_keeps_its_first_space() -> None:
    assert said(Spelling(decode, before=(5, 0)), [1, 2, 3, 4]) == " upon a times"
    assert said(Spelling(decode, before=(0,)), [4]) == "s"
    assert said(Spelling(decode), [1, 2]) == "upon a"
    assert said(Spelling(decode, before=(5,)), [0, 1]) == "Once upon", "at the beginning of a text there is none"


def test_a_stop_string_with_that_space_is_met_by_both_readings() -> None:
    for text in (Text(decode, [" upon"], (0,)), Text(decode, ["upon"], (0,))):
        text.feed([1, 2])
        assert text.stopped is not None
    assert said(Spelling(decode, [" upon"], (0,)), [1]) == ""
    assert said(Spelling(decode, ["upon"], (0,)), [1]) == " "


def test_a_long_prompt_costs_a_text_no_more_than_a_short_one() -> None:
    longest = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    assert said(Spelling(counted, before=(0,) * 5000), [1, 2]) == " upon a"
    assert longest < 50


def spaces(tiny: Any) -> dict[str, float]:
    """A bias that lets nothing be said but a space."""
    return {str(tiny[0].tokenizer(" ")["input_ids"][0]): 100}


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_begins_with_its_space(stream: bool, server: Running, tiny: Any) -> None:
    body = {"prompt": "once", "max_tokens": 3, "temperature": 0, "logit_bias": spaces(tiny), "stream": stream}
    if stream:
        lines = [x[6:] for x in server.ask(**body).text.split("\n\n") if x.startswith("data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    else:
        text = server.ask(**body).json()["choices"][0]["text"]
    assert text == "   "


def test_a_stop_string_of_that_space_ends_the_answer_too(server: Running, tiny: Any) -> None:
    """The decoder's reading is the server's: it plays no rounds for a text that is cut."""
    body = {"prompt": "once", "max_tokens": 9, "temperature": 0, "logit_bias": spaces(tiny), "stop": " "}
    told = server.ask(**body, return_token_ids=True).json()["choices"][0]
    assert (told["text"], told["finish_reason"], len(told["token_ids"])) == ("", "stop", 1)


def test_a_chat_s_answer_is_a_text_of_its_own(server: Running, tiny: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0}
    with server.client() as client:
        told = client.post("/v1/chat/completions", json={**body, "logit_bias": spaces(tiny)}).json()
    assert told["choices"][0]["message"]["content"] == "  "
