"""What clients send, typed: bodies of ``/v1/chat/completions`` and ``/v1/completions``.

Strict: ``"0.5"`` is no number and ``true`` no count. A field that is in neither model is refused by its name, so that a
misspelt one is not lost; fields of the official API that do not change an answer are taken and not looked at; fields
that would change it and cannot be honoured are refused unless they ask for nothing (``asked``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr


def _encodable(text: str) -> str:
    """JSON can spell halves of a surrogate pair, which are no text: no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from error
    return text


Words = Annotated[StrictStr, AfterValidator(_encodable)]

Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=1000), AfterValidator(_encodable)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Words


class Message(BaseModel):
    """Keys besides these (``name``, ``refusal``, ``annotations``, ``audio`` …) come back with an answer of ours or of
    others when it is sent again; a template has no place for them."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: Words | list[TextPart]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"] = Field(description="Other formats cannot be honoured.")


class Common(Body):
    """What both kinds of request may hold."""

    model: str | None = Field(default=None, max_length=500)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="-1 and 0 keep every token.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(default=None, description="Token ids of prompt and answer, as vLLM does.")
    # Taken and not looked at: they do not change an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None


class ChatBody(Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # Honoured only where they ask for nothing.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    # Taken and not looked at.
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None


Prompts = (
    Words
    | Annotated[list[Words], Field(min_length=1, max_length=16)]
    | Annotated[list[Token], Field(min_length=1)]
    | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=16)]
)


class CompletionBody(Common):
    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Honoured only where they ask for nothing.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class ErrorWords(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorWords
