"""What one server allows: counts, seconds and bytes. Everything a stranger can make it hold has a bound here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from eyas.errors import UsageError

MAX_CHOICES = 16
"""Answers of one request: its prompts times ``n``."""
PREFILL_TOKENS = 128
"""Tokens of a prompt that are read in one step, the longest step there is. SmolLM2, fp32, one core of a busy machine,
a prompt of 2,048: 18.8 s of processor time in parts of 64, 15.6 of 128, 15.5 of 256, 14.7 of 512 (the longest steps
0.8, 1.2, 2.6 and 4.4 s)."""
UNREAD = 256
"""Pieces of one answer that may wait for their reader; then its rounds wait too."""


@dataclass(frozen=True)
class Settings:
    """``api_key`` is kept out of every printed form. Seconds are of wall time, bytes of a request's body."""

    model: str
    max_running: int = 4
    max_queue: int = 64
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    stall_seconds: float = 30.0
    grace_seconds: float = 30.0
    body_bytes: int = 4 << 20
    hosts: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        whole = {"--max-running": (self.max_running, 1, 256), "--max-queue": (self.max_queue, 0, 100_000)}
        for option, (value, low, high) in whole.items():
            if not low <= value <= high:
                raise UsageError(f"{option} {value}: from {low} to {high}.", way_out="See `eyas serve --help`.")
        seconds = {
            "--queue-timeout": self.queue_seconds,
            "--request-timeout": self.request_seconds,
            "--stall-timeout": self.stall_seconds,
            "--grace": self.grace_seconds,
        }
        for option, time in seconds.items():
            if not (math.isfinite(time) and 0 < time <= 86400):
                raise UsageError(f"{option} {time}: seconds above 0, at most 86400.", way_out="Leave it out.")
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isprintable()):
            raise UsageError(
                "The API key has fewer than 8 characters, or some that cannot be printed.",
                way_out="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
