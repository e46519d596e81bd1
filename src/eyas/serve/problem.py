"""What a client is told when its request cannot be answered: a status and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Problem(Exception):
    """``status`` is HTTP's; the rest is the body ``{"error": {message, type, param, code}}`` that clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def wrong(message: str, param: str | None, code: str | None = None) -> Problem:
    """A request that can never be answered as it is."""
    return Problem(400, message, param=param, code=code)


def busy(waiting: int, seconds: int) -> Problem:
    """The queue is full; ``seconds`` until it is worth another try."""
    return Problem(
        429,
        f"{waiting} answers are waiting already, which is all the queue holds. Try again in {seconds} s.",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def stopping() -> Problem:
    return Problem(503, "The server is stopping.", code="stopping", headers={"Retry-After": "5"})


def bug(error: Exception) -> Problem:
    """Something of ours went wrong. Its words may quote the request, so they stay in the log."""
    return Problem(500, f"A bug in eyas: {type(error).__name__}. The server's log has more.", code="bug")
