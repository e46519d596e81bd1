"""Asking an engine over HTTP: JSON in and out, every answer bounded in size and time, no proxies, no redirects."""

from __future__ import annotations

import json
from typing import Any

import httpx

from eyas.endpoint import key_header
from eyas.errors import EnvironmentFault, InputError

MOST = 64 << 20  # bytes of one answer
SHOWN = 300  # characters of an engine's own words


class Asker:
    """One engine's address. ``ask`` gives the parsed JSON, ``text`` the body as it is."""

    def __init__(self, url: str, what: str, *, seconds: float = 600.0) -> None:
        self.url, self.what = url.rstrip("/"), what
        self._client = httpx.Client(
            timeout=httpx.Timeout(seconds, connect=10.0),
            headers=key_header(),
            trust_env=False,
            verify=self.url.startswith("https"),
        )

    def close(self) -> None:
        self._client.close()

    def ask(self, path: str, body: Any = None, *, seconds: float | None = None) -> Any:
        """GET without ``body``, else POST. EnvironmentFault where nobody answers, InputError for an answer that is
        none; both in the engine's words."""
        status, raw = self.body(path, body, seconds=seconds)
        if status >= 500:
            raise EnvironmentFault(
                f"{self.url}{path} says HTTP {status}: {_words(raw)}",
                way_out=f"Look at the log of {self.what}: the fault is inside it.",
            )
        if status != 200:
            raise InputError(
                f"{self.url}{path} says HTTP {status}: {_words(raw)}",
                way_out=f"Check that this is {self.what}, and that its version has this route.",
            )
        try:
            return json.loads(raw) if raw else None
        except ValueError as error:
            raise InputError(
                f"{self.url}{path} answers with what is no JSON: {_words(raw)}",
                way_out=f"Check that this is {self.what} itself and no page or proxy before it.",
            ) from error

    def text(self, path: str, *, seconds: float | None = 20.0) -> str | None:
        """The body of a GET; None where there is no such route."""
        status, raw = self.body(path, seconds=seconds)
        return raw.decode("utf-8", errors="replace") if status == 200 else None

    def body(self, path: str, body: Any = None, *, seconds: float | None = None, most: int = MOST) -> tuple[int, bytes]:
        """Status and body as they are. EnvironmentFault where nobody answers, InputError for more than ``most``
        bytes."""
        raw = bytearray()
        timeout = httpx.Timeout(seconds, connect=10.0) if seconds is not None else httpx.USE_CLIENT_DEFAULT
        method = "GET" if body is None else "POST"
        try:
            with self._client.stream(method, self.url + path, json=body, timeout=timeout) as response:
                for block in response.iter_bytes():
                    raw += block
                    if len(raw) > most:
                        raise InputError(
                            f"{self.url}{path} answers with more than {most >> 20} MB.",
                            way_out=f"Check that this is {self.what}; ask for fewer tokens at a time.",
                        )
                return response.status_code, bytes(raw)
        except httpx.TimeoutException as error:
            raise EnvironmentFault(
                f"{self.url}{path} has not answered in time.",
                way_out="Look at the engine's log: it hangs, or others keep it busy.",
            ) from error
        except httpx.HTTPError as error:
            how = "cannot be reached" if isinstance(error, httpx.ConnectError) else "does not answer"
            raise EnvironmentFault(
                f"{self.url}{path} {how}: {str(error) or type(error).__name__}.",
                way_out="Check that the engine is up, and the port.",
            ) from error


def _words(raw: bytes) -> str:
    text = " ".join(raw[: 4 * SHOWN].decode("utf-8", errors="replace").split())
    return text[:SHOWN] + ("…" if len(text) > SHOWN else "") if text else "nothing"
