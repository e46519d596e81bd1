"""Chat answers from any OpenAI-compatible server, many at a time, through whatever a night brings.

Token ids are asked for with ``return_token_ids``, which two engines know:
    vLLM 0.32    entrypoints/openai/chat_completion/protocol.py: ``prompt_token_ids`` beside ``choices``, ``token_ids``
                 in the choice
    SGLang 0.5.23  srt/entrypoints/openai/serving_chat.py: ``prompt_token_ids`` and ``response_token_ids`` in the choice
llama.cpp's server has ``return_tokens`` for /completion but not for chat; it, and others, ignore what they do not
know. vLLM fills what a request leaves open from the model's generation_config.json (Qwen's has top-k 20 and a
repetition penalty), so the neutral values are said. A server that refuses either (400) is asked again without.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from eyas.answers import Ask, Refusal, Sampling
from eyas.errors import EnvironmentFault, UsageError, did_you_mean

KEYS = ("EYAS_API_KEY", "OPENAI_API_KEY")
MAX_BODY_BYTES = 16 * 2**20
AGAIN = (408, 409, 425, 429)  # and every 5xx
ONE_ASK = (400, 413, 422)  # what is wrong with one conversation, not with the server
TRIES = 8
LAST_WORDS = 2.0  # seconds
LONGEST_WAIT = 60.0  # seconds between tries, unless the server asks for more
MOST_ASKED_WAIT = 600.0
EXTRAS: Mapping[str, Any] = {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
SHOWN = 300  # characters of a server's own words


@dataclass(frozen=True)
class Reply:
    """What the server said to one ask; ids where it gives them."""

    id: str
    text: str
    finish_reason: str
    prompt_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None


class _Again(Exception):
    """Worth another try; ``wait`` is what the server asked for."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.why, self.wait = why, wait


class Endpoint:
    """``concurrency`` threads that ask; open it with ``with``, ``submit`` asks and ``take`` what came back.

    Errors that pass (429, 5xx, a lost connection, half an answer, nonsense) are tried again, ``tries`` times in all
    with growing pauses; then, or at once for what will not pass, ``take`` raises.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
        tries: int = TRIES,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self.url = base_url(url)
        self.shown = shown(self.url)
        self.max_new_tokens, self.sampling = max_new_tokens, sampling or Sampling()
        self.concurrency, self.tries = concurrency, tries
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Reply | Refusal | BaseException] = queue.SimpleQueue()
        self._owed = 0
        self._fault: BaseException | None = None
        self._extras = True
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=30.0),
            limits=limits,
            headers=key_header(),
            verify=self.url.startswith("https"),  # certificates are slow to load, and plain http has no use for them
        )
        self.model = model
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Endpoint:
        try:
            self.model = self._chosen(self.model)
        except BaseException:
            self._client.close()
            raise
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self.concurrency)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for _thread in self._threads:
            self._asks.put(None)
        patience = time.monotonic() + LAST_WORDS  # a request under way ends by itself, or is cut off below
        for thread in self._threads:
            thread.join(max(0.0, patience - time.monotonic()))
        self._client.close()

    @property
    def owed(self) -> int:
        """Asks that have not come back."""
        return self._owed

    def submit(self, ask: Ask) -> None:
        self._owed += 1
        self._asks.put(ask)

    def take(self) -> list[Reply | Refusal]:
        """Wait for one, and take what else is there. Raises EnvironmentFault or UsageError for the server's faults."""
        good: list[Reply | Refusal] = []
        while self._owed and self._fault is None and (not good or not self._done.empty()):
            item = self._done.get()
            self._owed -= 1
            if isinstance(item, BaseException):
                self._fault = item  # raised when what came before it has been taken
            else:
                good.append(item)
        if self._fault is not None and not good:
            raise self._fault
        return good

    # -- one ask ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (ask := self._asks.get()) is not None and not self._closing.is_set():
            try:
                self._done.put(self._answer(ask))
            except BaseException as error:  # it must reach whoever waits
                self._done.put(error)

    def _answer(self, ask: Ask) -> Reply | Refusal:
        status, body = self._asked(ask, _reply_body)
        if status != 200:
            return Refusal(ask.id, f"HTTP {status}: {words(body)}")
        return _reply(ask.id, json.loads(body))

    def _asked(self, ask: Ask, check: Callable[[bytes], None]) -> tuple[int, bytes]:
        """Status and body of one ask, with the extras where the server takes them."""
        extras = self._extras
        status, body = self._persist("POST", "/chat/completions", self._request(ask, extras), check)
        if status == 400 and extras:
            status, body = self._persist("POST", "/chat/completions", self._request(ask, False), check)
            if status == 200:
                self._extras = False
        return status, body

    def _request(self, ask: Ask, extras: bool) -> dict[str, Any]:
        request: dict[str, Any] = {
            **(EXTRAS if extras else {}),
            "model": self.model,
            "messages": list(ask.messages),
            "max_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": self.sampling.draws(ask.id).getrandbits(31),
            "stream": False,
        }
        if self.sampling.top_k is not None:
            request["top_k"] = self.sampling.top_k
        return request

    def _chosen(self, wished: str | None) -> str:
        """The model to name in requests: the one wished for, else the only one there."""
        status, body = self._persist("GET", "/models", None, _models_body)
        if status != 200:
            if wished:
                return wished  # not every server lists its models
            raise UsageError(
                f"{self.shown}/models says HTTP {status}: {words(body)}",
                way_out="Check the URL, or name the model with --url-model.",
            )
        there = _models(json.loads(body))
        if wished is None and len(there) == 1:
            return there[0]
        if wished in there:
            return str(wished)
        if wished is None:
            raise UsageError(
                f"{self.shown} has {len(there)} models.",
                way_out=f"Name one with --url-model: {', '.join(there) or 'it lists none'}.",
            )
        raise UsageError(f"{self.shown} has no model {wished!r}.", way_out=did_you_mean(wished, there))

    # -- one request, until it is answered -------------------------------------------------------------------

    def _persist(
        self, method: str, path: str, request: Mapping[str, Any] | None, check: Callable[[bytes], None]
    ) -> tuple[int, bytes]:
        """Status and body: 200 with a body that passed ``check``, or what is wrong with this one request."""
        wait = 1.0
        for attempt in range(1, self.tries + 1):
            try:
                return self._once(method, path, request, check)
            except _Again as again:
                if attempt == self.tries or (again.wait or 0) > MOST_ASKED_WAIT:
                    tries = f"{attempt} tries" if attempt > 1 else "1 try"
                    raise EnvironmentFault(
                        f"{self.shown} does not answer ({tries}): {again.why}.",
                        way_out="See to the server and run the same command again: what was answered is kept.",
                    ) from again
                if self._pause(max(wait, again.wait or 0)):
                    raise EnvironmentFault("The endpoint was closed.", way_out="Run the same command again.") from again
                wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("unreachable")

    def _once(
        self, method: str, path: str, request: Mapping[str, Any] | None, check: Callable[[bytes], None]
    ) -> tuple[int, bytes]:
        try:
            with self._client.stream(method, self.url + path, json=request) as response:
                status, body = response.status_code, self._read(response)
                retry_after = response.headers.get("retry-after")
        except httpx.TimeoutException as error:
            raise _Again(f"no answer in time ({type(error).__name__})") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Again(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if status in AGAIN or status >= 500:
            raise _Again(f"HTTP {status}: {words(body)}", _seconds(retry_after))
        if status in (401, 403):
            raise UsageError(
                f"{self.shown} refuses us: HTTP {status}: {words(body)}",
                way_out=f"Put the key into {KEYS[0]} (or {KEYS[1]}); it is read from there and written nowhere.",
            )
        if status == 200:
            check(body)
        elif status not in ONE_ASK and path != "/models":
            raise UsageError(
                f"{self.shown}{path} says HTTP {status}: {words(body)}",
                way_out="Check the URL: it is the part before /chat/completions, mostly http://HOST:PORT/v1.",
            )
        return status, body

    def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        for chunk in response.iter_bytes():
            body += chunk
            self._came(len(body))
            if len(body) > MAX_BODY_BYTES:
                raise _Again(f"an answer of more than {MAX_BODY_BYTES // 2**20} MB")
        return bytes(body)

    def _came(self, size: int) -> None:
        """``size`` bytes of the body are here; for who wants to know when."""


def base_url(url: str) -> str:
    """``http://host:8000/v1`` of it, of its root, or of its chat path."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UsageError(
            f"{url!r} is not a URL ({error}).", way_out="Write it like http://localhost:8000/v1."
        ) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url!r} is not an http URL.", way_out="Write it like http://localhost:8000/v1.")
    if parsed.userinfo or parsed.query:
        raise UsageError(
            "The URL carries a password or a query, which would be written down with it.",
            way_out=f"Leave it out; a key is read from {KEYS[0]} or {KEYS[1]}.",
        )
    path = parsed.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return str(parsed.copy_with(path=path, fragment=None)).rstrip("/")


def shown(url: str) -> str:
    return url.partition("://")[2]


def key_header() -> dict[str, str]:
    """From the environment, or none."""
    key = next((value for name in KEYS if (value := os.environ.get(name, "").strip())), None)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in its two spellings, seconds or a date; anything else is no wish."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (then - datetime.now(UTC)).total_seconds()) if then.tzinfo else None


def words(body: bytes) -> str:
    """The server's own words, shortened; OpenAI's error object unwrapped."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        text = str(error.get("message", text)) if isinstance(error, dict) else str(error)
    text = " ".join(text.split())
    return text[:SHOWN] + ("…" if len(text) > SHOWN else "") if text else "(nothing said)"


# -- what a body must be --------------------------------------------------------------------------------------


@contextmanager
def nonsense(what: str, body: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _Again(f"{what} that is none: {words(body)!r} ({type(error).__name__}: {error})") from error


def _reply_body(body: bytes) -> None:
    with nonsense("an answer", body):
        _reply("", json.loads(body))


def _models_body(body: bytes) -> None:
    with nonsense("a list of models", body):
        _models(json.loads(body))


def _models(value: Any) -> list[str]:
    return [str(model["id"]) for model in value["data"]]


def _reply(id: str, value: Any) -> Reply:
    choice = value["choices"][0]
    text, reason = choice["message"]["content"], choice["finish_reason"]
    if not isinstance(reason, str):
        raise ValueError("no finish_reason: half an answer")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"content is {type(text).__name__}")
    token_ids = choice.get("token_ids") or choice.get("response_token_ids")
    prompt_ids = value.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return Reply(id, text or "", reason, _ids(prompt_ids), _ids(token_ids))


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise TypeError("token ids that are no list of integers")
    return tuple(value)
