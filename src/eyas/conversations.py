"""Rows become conversations: every form people write turns in, read into OpenAI messages.

    messages    {"messages": [{"role": …, "content": …}, …]}              content may be a list of text parts
    sharegpt    {"conversations": [{"from": …, "value": …}, …]}
    alpaca      {"instruction": …, "input": …, "output": …}
    completion  {"prompt" or "question": …, "completion", "response", "output" or "answer": …}
    prompt      {"prompt", "question", "instruction" or "turns": …}       nobody answered yet
    text        {"text": …}                                               a rendered conversation, or with --raw any
    record      {"input_ids": […], "loss_mask": […]}                      tokenised already (records.py)

The first form whose keys a row has is its form; a key whose value is null is as good as absent, since a table has every
column in every row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import RecordsError, nearest

CONVERSATION_KEYS = ("messages", "conversations")
ASK_KEYS = ("prompt", "question", "instruction")
ANSWER_KEYS = ("completion", "response", "output", "answer")
CONTEXT_KEYS = ("input", "context")  # what an instruction is about
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
RECORD_KEYS = ("input_ids", "loss_mask", "token_ids")
FORMS = ("messages", "sharegpt", "alpaca", "completion", "prompt", "text", "record")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
# What opens a turn in the templates in use: text that holds one of another template was rendered for another model.
TURN_MARKERS = {
    "<|im_start|>": "ChatML (Qwen, SmolLM, …)",
    "<|start_header_id|>": "Llama 3",
    "<|header_start|>": "Llama 4",
    "<start_of_turn>": "Gemma",
    "[INST]": "Llama 2 or Mistral",
    "<|start_of_role|>": "Granite",
    "<|start|>": "gpt-oss",
    "<｜User｜>": "DeepSeek",
    "<|user|>": "Phi, Zephyr or GLM",
    "<|USER|>": "StableLM",
}


@dataclass(frozen=True)
class Conversation:
    """Turns in OpenAI form. ``cut``: the last answer ended at a length limit. ``tools`` are passed to the template."""

    form: str
    messages: list[dict[str, Any]]
    cut: bool = False
    tools: list[Any] | None = None

    @property
    def is_answered(self) -> bool:
        return any(m["role"] == "assistant" for m in self.messages)


def form_of(row: Mapping[str, Any]) -> str | None:
    """Which form a row is in, by its keys alone; None when it is in none."""
    keys = {key for key, value in row.items() if value is not None}
    if "messages" in keys:
        return "messages"
    if "conversations" in keys:
        return "sharegpt"
    if keys & set(RECORD_KEYS):
        return "record"
    ask = next((key for key in ASK_KEYS if key in keys), None)
    if ask and keys & set(ANSWER_KEYS):
        return "alpaca" if ask == "instruction" else "completion"
    if ask or "turns" in keys:
        return "prompt"
    if "text" in keys:
        return "text"
    if any("mask" in key or "ids" in key for key in keys):  # misspelt: its reader names the nearest key
        return "record"
    return None


def conversation_of(row: Mapping[str, Any], where: str) -> Conversation:
    """The turns of a row in any form that has turns. Raises RecordsError with the keys that are there."""
    form = form_of(row)
    cut = (row.get("finish_reason") or row.get("finish")) == "length"
    tools = _tools(row.get("tools"), where)
    if form in ("alpaca", "completion", "prompt"):
        return Conversation(form, _asked_and_answered(row, where), cut, tools)
    return Conversation(form or "messages", messages_of(row, where), cut, tools)


def asked(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What the system and the user say, without the data set's own answers, calls and results of tools.

    Each user turn is to be answered before the next is asked. Raises RecordsError for a row that asks nothing.
    """
    form = form_of(row)
    if form in ("text", "record"):
        raise RecordsError(
            f"{where}: a row of form {form!r} has no turns that could be asked again.",
            way_out='Give conversations ("messages") or prompts ("prompt"), or leave --regenerate out.',
        )
    said = [m for m in conversation_of(row, where).messages if m["role"] in ("system", "developer", "user")]
    while said and said[-1]["role"] != "user":
        said.pop()
    if not said:
        raise RecordsError(f"{where}: no user turn, nothing to ask.", way_out="Leave it out, or pass --skip-bad.")
    return said


def messages_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns of a row in OpenAI ``messages`` or ShareGPT ``conversations`` form."""
    key = next((k for k in CONVERSATION_KEYS if k in row), None)
    if key is None:
        raise RecordsError(f"{where}: no conversation in it. {keys_present(row)}", way_out=expected())
    return _turns(row[key], key, where)


def _turns(turns: object, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise RecordsError(
            f"{where}: {key!r} is {type(turns).__name__} of length {len(turns) if isinstance(turns, list) else 0}, "
            "a non-empty list of turns was expected.",
            way_out=expected(),
        )
    return [_message(turn, f"{where}, turn {i + 1}") for i, turn in enumerate(turns)]


# -- one turn -------------------------------------------------------------------------------------------------


def _message(turn: object, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RecordsError(f"{where}: {type(turn).__name__} where an object was expected.", way_out=expected())
    extra: dict[str, Any] = {}
    if "role" in turn or "content" in turn:
        role, content = turn.get("role"), turn.get("content")
        extra = {k: v for k, v in turn.items() if k not in ("role", "content") and v is not None}
    elif "from" in turn or "value" in turn:
        role, content = SHAREGPT_ROLES.get(str(turn.get("from")).lower()), turn.get("value")
        if role is None:
            raise RecordsError(
                f"{where}: speaker {turn.get('from')!r} is not one we know.",
                way_out=f"Known: {', '.join(sorted(SHAREGPT_ROLES))}.",
            )
    else:
        raise RecordsError(f"{where}: neither role/content nor from/value. {keys_present(turn)}", way_out=expected())
    extra = _thinking_and_calls(extra, where)
    if content is None and (extra.keys() & {"tool_calls", *THINKING_KEYS}):
        content = ""  # a turn that is a call, or thinking, and says nothing beside
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        content = "".join(_part(part, f"{where}, part {i + 1}") for i, part in enumerate(content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise RecordsError(
            f"{where}: role {role!r} and content of type {type(content).__name__}; both must be text.",
            way_out="Write tool results and parts of a message as one text.",
        )
    _refuse_rendered(content, where)
    return {"role": role, "content": content, **extra}


def _part(part: Mapping[str, Any], where: str) -> str:
    text = part.get("text")
    if part.get("type", "text") not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise RecordsError(
            f"{where}: a part of type {part.get('type')!r}, only text can be learnt from.",
            way_out="Leave such conversations out, or pass --skip-bad.",
        )
    return text


def _thinking_and_calls(extra: dict[str, Any], where: str) -> dict[str, Any]:
    """One spelling for what came before the answer, and arguments of calls as objects: so templates expect them."""
    thought = next((extra[key] for key in THINKING_KEYS if extra.get(key)), None)
    kept = {k: v for k, v in extra.items() if k not in THINKING_KEYS}
    if thought is not None:
        if not isinstance(thought, str):
            raise RecordsError(f"{where}: thinking of type {type(thought).__name__}.", way_out="Write it as text.")
        kept[THINKING_KEYS[0]] = thought
    if calls := kept.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise RecordsError(f"{where}: tool_calls is no list.", way_out="Write it as the OpenAI API does.")
        kept["tool_calls"] = [_call(call, f"{where}, call {i + 1}") for i, call in enumerate(calls)]
    return kept


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordsError(
            f"{where}: no function with a name in it.",
            way_out='Expected {"type": "function", "function": {"name": "…", "arguments": {…}}}.',
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RecordsError(f"{where}: arguments are no JSON ({error}).", way_out="Pass --skip-bad.") from error
    rest = {k: v for k, v in call.items() if k in ("id", "type") and v is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: object, where: str) -> list[Any] | None:
    """The functions a conversation could call; tables often hold them as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecordsError(f"{where}: tools is no JSON ({error}).", way_out="Pass --skip-bad.") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RecordsError(f"{where}: tools is {type(value).__name__}, a list was expected.", way_out="Mend the row.")
    return value


def _refuse_rendered(content: str, where: str) -> None:
    start = content.lstrip()
    for marker, family in TURN_MARKERS.items():
        if start.startswith(marker):
            raise RecordsError(
                f"{where}: its content begins with {marker!r}: it was rendered already, by a template of {family}.",
                way_out='Give the turns without a template, or the whole rendered text as {"text": …}.',
            )


# -- records of a question and an answer ----------------------------------------------------------------------


def _asked_and_answered(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    key = next((k for k in ASK_KEYS if row.get(k) is not None), None)
    if key is None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise RecordsError(f"{where}: 'turns' is no list of texts.", way_out='Expected {"turns": ["…", "…"]}.')
        return messages + [{"role": "user", "content": t} for t in turns]
    question = _side(row[key], key, "user", where)
    context = next((row[k] for k in CONTEXT_KEYS if key == "instruction" and row.get(k)), None)
    if context is not None:
        if not isinstance(context, str) or len(question) != 1:
            raise RecordsError(f"{where}: what the instruction is about is no text.", way_out="Write it as text.")
        question[0]["content"] += f"\n\n{context}"
    answer_key = next((k for k in ANSWER_KEYS if row.get(k) is not None), None)
    answer = _side(row[answer_key], answer_key, "assistant", where) if answer_key else []
    return [*messages, *question, *answer]


def _side(value: object, key: str, role: str, where: str) -> list[dict[str, Any]]:
    """A text, or a list of turns, as either side of such a record may be."""
    if isinstance(value, list):
        return _turns(value, key, where)
    if not isinstance(value, str):
        raise RecordsError(f"{where}: {key!r} is {type(value).__name__}, text was expected.", way_out=expected())
    if role == "user" and not value.strip():
        raise RecordsError(f"{where}: {key!r} is empty.", way_out="Leave it out, or pass --skip-bad.")
    _refuse_rendered(value, f"{where}, {key}")
    return [{"role": role, "content": value}]


# -- words for complaints -------------------------------------------------------------------------------------


def keys_present(row: Mapping[str, Any]) -> str:
    keys = list(row)
    known = (*CONVERSATION_KEYS, *RECORD_KEYS, *ASK_KEYS, *ANSWER_KEYS, "seq_len", "source", "n_prompt_tokens")
    for key in keys:
        close = nearest(key, known)
        if close and close not in keys:
            return f"Its keys are {', '.join(keys)}; {key!r} is nearest to {close!r}."
    return f"Its keys are {', '.join(keys) or 'none'}."


def expected() -> str:
    return (
        'Expected {"messages": [{"role": "user", "content": "…"}, …]}, ShareGPT {"conversations": [{"from": "human", '
        '"value": "…"}, …]}, {"prompt": "…", "completion": "…"}, or a record with input_ids and loss_mask '
        "(docs/data.md has them all)."
    )
