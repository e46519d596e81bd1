"""Every form of a row is the conversation it means, and what is none says so with its place."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.conversations import FORMS, asked, conversation_of, form_of, messages_of
from eyas.errors import RecordsError


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation_of(row, "f, row 1").messages]


QA = [("user", "Q"), ("assistant", "A")]


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, "messages", QA),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "sharegpt", QA),
        ({"instruction": "Q", "output": "A"}, "alpaca", QA),
        ({"instruction": "Q", "input": "", "output": "A"}, "alpaca", QA),
        ({"instruction": "Q", "input": "C", "output": "A"}, "alpaca", [("user", "Q\n\nC"), ("assistant", "A")]),
        ({"instruction": "Q", "context": "C", "response": "A"}, "alpaca", [("user", "Q\n\nC"), ("assistant", "A")]),
        ({"prompt": "Q", "completion": "A"}, "completion", QA),
        ({"prompt": "Q", "response": "A", "messages": None}, "completion", QA),
        ({"question": "Q", "answer": "A"}, "completion", QA),
        ({"system": "S", "prompt": "Q", "completion": "A"}, "completion", [("system", "S"), *QA]),
        ({"prompt": "Q", "input": "no instruction, so no context", "completion": "A"}, "completion", QA),
        (
            {"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": "A"}]},
            "completion",
            QA,
        ),
        ({"prompt": "Q", "completion": None}, "prompt", QA[:1]),
        ({"question": "Q"}, "prompt", QA[:1]),
        ({"instruction": "Q", "input": "C"}, "prompt", [("user", "Q\n\nC")]),
        ({"turns": ["Q", "R"]}, "prompt", [("user", "Q"), ("user", "R")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}]}]},
            "messages",
            [("user", "Q!")],
        ),
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "observation", "value": "T"}]},
            "sharegpt",
            [("user", "Q"), ("tool", "T")],
        ),
    ],
)
def test_a_row_is_the_conversation_it_means(row: dict[str, Any], form: str, expected: list[tuple[str, str]]) -> None:
    assert form_of(row) == form
    assert form in FORMS
    assert turns(row) == expected
    assert conversation_of(row, "").is_answered == (expected[-1][0] == "assistant")


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"text": "x"}, "text"),
        ({"input_ids": [1], "loss_mask": [1], "prompt": "x", "completion": "y"}, "record"),
        ({"input_ids": [1], "messages": []}, "messages"),
        ({"tokens": [1], "mask": [1]}, "record"),
        ({"prompt": "x", "ids": 3}, "prompt"),
        ({"story": "x"}, None),
        ({"prompt": None, "messages": None}, None),
    ],
)
def test_forms_without_turns(row: dict[str, Any], form: str | None) -> None:
    assert form_of(row) == form


def test_finish_reason_and_tools_are_kept() -> None:
    row = {"prompt": "Q", "completion": "A", "finish_reason": "length", "tools": '[{"name": "f"}]'}
    found = conversation_of(row, "")
    assert found.cut
    assert found.tools == [{"name": "f"}]
    assert not conversation_of({"prompt": "Q"}, "").cut
    assert conversation_of({"prompt": "Q", "tools": []}, "").tools is None


def test_calls_and_thinking_get_one_spelling() -> None:
    """Arguments as text or object, null columns of a table, any of the names of thinking."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}, "index": None}
    row = {
        "messages": [
            {"role": "user", "content": "Q", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "content": "7", "tool_call_id": "c1", "tool_calls": None},
            {"role": "assistant", "content": "A", "thinking": "so", "reasoning_content": ""},
        ]
    }
    assert messages_of(row, "") == [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
        {"role": "assistant", "content": "A", "reasoning_content": "so"},
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 3, "completion": "A"}, "'prompt' is int, text was expected"),
        ({"prompt": "Q", "completion": {"text": "A"}}, "'completion' is dict, text was expected"),
        ({"prompt": " ", "completion": "A"}, "'prompt' is empty"),
        ({"instruction": "Q", "input": ["C"], "output": "A"}, "what the instruction is about is no text"),
        ({"turns": ["Q", 3]}, "'turns' is no list of texts"),
        ({"turns": []}, "'turns' is no list of texts"),
        ({"story": "x"}, "no conversation in it. Its keys are story"),
        ({"promt": "x"}, "'promt' is nearest to 'prompt'"),
        ({"prompt": "Q", "tools": "{"}, "tools is no JSON"),
        ({"prompt": "Q", "tools": {"a": 1}}, "tools is dict, a list was expected"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "part 1: a part of"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "turn 1, part 1"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "call 1: no function with a name"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "call 1: arguments are no JSON",
        ),
        ({"messages": [{"role": "assistant", "content": "A", "thinking": ["x"]}]}, "thinking of type list"),
        ({"messages": [{"role": "user", "content": "[INST] Q [/INST]"}]}, "a template of Llama 2 or Mistral"),
        ({"prompt": "<|im_start|>user\nQ<|im_end|>", "completion": "A"}, "a template of ChatML"),
        ({"prompt": "Q", "completion": "<start_of_turn>model\nA"}, "f, row 1, completion: its content begins"),
    ],
)
def test_what_is_no_conversation_says_why(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordsError, match=re.escape("f, row 1")) as caught:
        conversation_of(row, "f, row 1")
    assert said in caught.value.message
    assert caught.value.way_out


def test_a_marker_further_in_is_talk_about_templates() -> None:
    assert turns({"prompt": "What is <|im_start|>?", "completion": "A"})[0] == ("user", "What is <|im_start|>?")


# -- what is asked again --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"instruction": "Q", "output": "A"},
        {"prompt": "Q", "completion": "A"},
        {"question": "Q"},
        {"turns": ["Q"]},
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
                {"role": "tool", "content": "T"},
                {"role": "assistant", "content": "A"},
                {"role": "system", "content": "a last word to nobody"},
            ]
        },
    ],
)
def test_asked_is_the_users_side_of_every_form(row: dict[str, Any]) -> None:
    assert asked(row, "") == [{"role": "user", "content": "Q"}]


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(st.tuples(ROLES, st.text(max_size=5)), min_size=1, max_size=8))
def test_asked_keeps_order_and_ends_with_the_user(said: list[tuple[str, str]]) -> None:
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    users = [text for role, text in said if role == "user"]
    if not users:
        with pytest.raises(RecordsError, match="no user turn"):
            asked(row, "")
        return
    found = asked(row, "")
    assert [m["content"] for m in found if m["role"] == "user"] == users
    assert found[-1]["role"] == "user"
    kept = iter(said)
    assert all((m["role"], m["content"]) in kept for m in found), "in the order they were said"
    assert {m["role"] for m in found} <= {"system", "user"}


@pytest.mark.parametrize("row", [{"text": "x"}, {"input_ids": [1], "loss_mask": [1]}])
def test_rows_without_turns_cannot_be_asked(row: dict[str, Any]) -> None:
    with pytest.raises(RecordsError, match="has no turns that could be asked"):
        asked(row, "")
