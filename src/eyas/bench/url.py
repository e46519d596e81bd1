"""A server as a side: any OpenAI-compatible URL, asked one prompt at a time.

What is timed is what its user waits for: from the request being sent to the last byte of the answer, the network and
the server's own tokenising included. A request that had to be repeated (429, a lost connection, half an answer) is
timed by its last try alone; how often that was is counted. Tokens are counted by the server (``usage``), the end token
as it counts it; `eyas serve` tells rounds and what was drafted and accepted there as well (``usage.eyas``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyas.answers import Ask
from eyas.bench.sides import SideResult
from eyas.endpoint import Endpoint, nonsense, words
from eyas.errors import UsageError

TRIES = 4  # 7 s of waiting in all: a bench had better go on with its other sides
DONE = b"[DONE]"


class Chat(Protocol):
    """A prompt that can be said as messages."""

    @property
    def id(self) -> str: ...
    def messages(self) -> list[dict[str, str]]: ...


@dataclass
class _Said:
    """What a body says, streamed or whole; ``first_at``: bytes of it that held the first token."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    model: str | None = None
    first_at: int | None = None
    counts: tuple[int, list[int], list[int]] = (0, [], [])


class UrlSide(Endpoint):
    """Open it with ``with``; call it with prompts. ``key_variable`` names the environment variable that holds its key;
    without it the key is looked for where ``Endpoint`` does.

    ``retries`` counts tries that had to be repeated, ``models`` the names that answers came under. A call raises
    EnvironmentFault for a server that does not answer, UsageError for one that refuses or counts no tokens.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        max_new_tokens: int,
        stream: bool = True,
        key_variable: str | None = None,
        timeout: float = 600.0,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(
            url, model=model, max_new_tokens=max_new_tokens, concurrency=1, timeout=timeout, tries=TRIES, pause=pause
        )
        if key_variable is not None:
            self._client.headers["Authorization"] = f"Bearer {_key(key_variable)}"
        self.stream = stream
        self.retries = 0
        self.models: set[str] = set()
        self._tries = 0
        self._began = 0.0
        self._marks: list[tuple[int, float]] = []
        self._said = _Said()

    def __call__(self, prompt: Chat) -> SideResult:
        self._tries = 0
        ask = Ask(prompt.id, (), tuple(prompt.messages()))
        status, body = self._asked(ask, self._understood)
        if status != 200:
            hint = " Some servers do not stream with usage: try --no-stream." if self.stream else ""
            raise UsageError(
                f"{self.shown} refuses {prompt.id}: HTTP {status}: {words(body)}", way_out=f"See its words.{hint}"
            )
        said = self._said
        if said.model is not None:
            self.models.add(said.model)
        return SideResult(
            said.token_ids,
            self._marks[-1][1] - self._began,
            *said.counts,
            first_seconds=self._first_seconds(),
            text=said.text,
            count=self._count(said, prompt.id),
        )

    def _count(self, said: _Said, prompt_id: str) -> int:
        told = (said.usage or {}).get("completion_tokens")
        count = told if type(told) is int else len(said.token_ids)
        if count < 1:
            raise UsageError(
                f"{self.shown} does not say how many tokens its answer to {prompt_id} has "
                f"(usage: {json.dumps(said.usage)[:80]}).",
                way_out="Try --no-stream: some servers count only then. Without a count nothing can be timed.",
            )
        return count

    def _first_seconds(self) -> float | None:
        at = self._said.first_at
        if at is None:
            return None
        return next(seconds for size, seconds in self._marks if size >= at) - self._began

    # -- what the endpoint does, with a clock --------------------------------------------------------------------

    def _request(self, ask: Ask, extras: bool) -> dict[str, Any]:
        request = super()._request(ask, extras)
        return request | {"stream": True, "stream_options": {"include_usage": True}} if self.stream else request

    def _once(
        self, method: str, path: str, request: Mapping[str, Any] | None, check: Callable[[bytes], None]
    ) -> tuple[int, bytes]:
        self.retries += self._tries > 0 and method == "POST"
        self._tries += 1
        self._marks.clear()
        self._began = time.perf_counter()
        return super()._once(method, path, request, check)

    def _came(self, size: int) -> None:
        self._marks.append((size, time.perf_counter()))

    def _understood(self, body: bytes) -> None:
        with nonsense("an answer", body):
            self._said = _streamed(body) if self.stream else _whole(body)
            self._said.counts = _acceptance(self._said.usage or {})
            if self._said.finish_reason is None:
                raise ValueError("no finish_reason: half an answer")


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(
            f"The environment variable {variable} is empty or not set; a key was to be read from it.",
            way_out=f"Set it, e.g. export {variable}=…; the key is written nowhere.",
        )
    return key


def _whole(body: bytes) -> _Said:
    value = json.loads(body)
    choice = value["choices"][0]
    said = _Said(usage=value.get("usage"), finish_reason=choice["finish_reason"], model=_name(value))
    said.text = _text(choice["message"].get("content"))
    said.token_ids = _ids(choice)
    return said


def _streamed(body: bytes) -> _Said:
    said = _Said()
    for end, data in _events(body):
        event = json.loads(data)
        if "error" in event:
            raise ValueError(words(data))
        said.usage = event.get("usage") or said.usage
        said.model = said.model or _name(event)
        for choice in event.get("choices") or ():
            _add(said, choice, end)
    return said


def _add(said: _Said, choice: Mapping[str, Any], end: int) -> None:
    delta = choice.get("delta") or {}
    text, ids = _text(delta.get("content")), _ids(choice)
    thought = _text(delta.get("reasoning_content") or delta.get("reasoning"))
    if said.first_at is None and (text or ids or thought):
        said.first_at = end
    said.text += text
    said.token_ids += ids
    said.finish_reason = choice.get("finish_reason") or said.finish_reason


def _events(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Data of server-sent events, one line each as every engine writes them, and where each ends in the body."""
    end = 0
    for line in body.split(b"\n"):
        end += len(line) + 1
        if line.startswith(b"data:") and (data := line[len(b"data:") :].strip()) not in (b"", DONE):
            yield min(end, len(body)), data


def _acceptance(usage: Mapping[str, Any]) -> tuple[int, list[int], list[int]]:
    """Rounds, drafted and accepted by depth, as `eyas serve` tells them; other servers do not."""
    told = usage.get("eyas")
    if not isinstance(told, Mapping):
        return 0, [], []
    rounds, drafted, accepted = told["rounds"], told["drafted"], told["accepted"]
    counts = [rounds, *drafted, *accepted]
    if not all(type(count) is int for count in counts) or len(drafted) != len(accepted):
        raise TypeError(f"counts that are none: {json.dumps(told)[:80]}")
    if not all(0 <= kept <= tried <= rounds for tried, kept in zip(drafted, accepted, strict=True)):
        raise ValueError(f"more accepted than drafted: {json.dumps(told)[:80]}")
    return rounds, drafted, accepted


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"content is {type(value).__name__}")
    return value


def _name(value: Mapping[str, Any]) -> str | None:
    name = value.get("model")
    return name if isinstance(name, str) else None


def _ids(choice: Mapping[str, Any]) -> list[int]:
    found = choice.get("token_ids") or choice.get("response_token_ids") or []
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise TypeError("token ids that are no list of integers")
    return found
