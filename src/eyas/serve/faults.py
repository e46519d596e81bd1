"""The first thing wrong with a body, out of pydantic's list, as the official API says it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import nearest
from eyas.serve.bodies import ChatBody, CompletionBody
from eyas.serve.problem import Problem, wrong

CANNOT = {
    "tools": "no tools are called here; leave it out, or empty",
    "functions": "no functions are called here; leave it out, or empty",
    "tool_choice": "no tools are called here; 'none' and 'auto' are taken",
    "function_call": "no functions are called here; 'none' and 'auto' are taken",
    "response_format": "answers are text; only {'type': 'text'} is taken",
    "modalities": "answers are text; only ['text'] is taken",
    "best_of": "the first answer is the answer; only 1 is taken",
    "echo": "the prompt is not given back; only false is taken",
    "suffix": "nothing is written towards a suffix; leave it out",
}
KNOWN = sorted(ChatBody.model_fields.keys() | CompletionBody.model_fields.keys())
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_KINDS = {"str", "int", "float", "bool", "none"}


def problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Of a union's members the one that was meant is told: whose type fits, else that in which one gets deepest."""
    unreadable = next((e for e in errors if e["type"] in ("json_invalid", "model_attributes_type", "dict_type")), None)
    if unreadable is not None and len(unreadable["loc"]) <= 2:
        why = (unreadable.get("ctx") or {}).get("error", unreadable["msg"])
        return wrong(f"The body is no JSON object: {why}.", None)
    first = max(errors, key=lambda e: (not e["type"].endswith("_type"), len(e["loc"]), e["type"] == "literal_error"))
    loc = [part for part in first["loc"] if part not in ("body", "path", "query")]
    param = _param(loc)
    if first["type"] == "extra_forbidden":
        name = str(loc[-1])[:100]
        meant = nearest(name, [known for known in KNOWN if known != name]) if len(loc) == 1 else None
        hint = f" Did you mean {meant!r}?" if meant else ""
        return wrong(f"Unknown parameter: {name!r}.{hint}", param, "unknown_parameter")
    if loc and loc[0] in CANNOT:
        return wrong(f"{loc[0]!r} cannot be honoured: {CANNOT[str(loc[0])]}.", str(loc[0]), "unsupported_parameter")
    if first["type"] == "missing":
        return wrong(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    return wrong(f"Invalid {param!r}: {first['msg']}.", param, "invalid_value")


def _param(loc: Sequence[str | int]) -> str | None:
    """``messages[0].content`` out of a path in which the names of a union's members stand too."""
    made = ""
    for part in loc:
        if isinstance(part, int):
            made += f"[{part}]"
        elif part not in _KINDS and _NAME.fullmatch(part):
            made += f".{part}" if made else part
    return made or None
