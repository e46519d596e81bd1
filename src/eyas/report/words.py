"""The words and numbers that the terminal and the page share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MEANING: dict[str, str] = {
    "broken": "The checkpoint is not whole: weights are missing, not finite, or cannot be loaded.",
    "miswired": "The drafter and its target or engine disagree about a fact. The findings name the fix.",
    "undecided": "There is too little to judge by. What was not checked, and why, is listed below.",
    "weak": "The wiring is proven; the drafter guesses seldom right. More or better training is the remedy.",
    "healthy": "The wiring is proven and the drafter is as good as expected.",
}
COLOURS: dict[str, str] = {
    "broken": "red",
    "miswired": "red",
    "undecided": "yellow",
    "weak": "yellow",
    "healthy": "green",
}
SEVERITY_COLOURS: dict[str, str] = {"fatal": "red", "likely": "yellow", "note": "cyan"}
TRUTH: dict[str, str] = {
    "target": "the target's own greedy token",
    "record": "the record's token",
}


# Controls; halves of surrogate pairs, which no file can hold; marks that break lines or turn the direction of what
# follows.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(value: object) -> str:
    """Text from outside (names, logs) without control characters, which a terminal or a browser would obey."""
    return OBEYED.sub("\N{REPLACEMENT CHARACTER}", str(value))


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    return "no interval" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def rate(value: Mapping[str, Any] | None) -> str:
    """``0.612 (0.590 to 0.634)``."""
    if value is None or value["rate"] is None:
        return "–"
    return f"{number(value['rate'])} ({interval(value['low'], value['high'])})"


def counts(value: Mapping[str, Any] | None) -> str:
    """``1,224 of 2,000``."""
    return "–" if value is None else f"{value['hits']:,} of {value['n']:,}"


def evidence(piece: Mapping[str, Any]) -> str:
    """``top-1 = 0.012, expected 0.6 (held-out records)``."""
    told = f"{piece['measure']} = {_short(piece['value'])}"
    if piece["expected"] is not None:
        told += f", expected {_short(piece['expected'])}"
    return plain(f"{told} ({piece['source']})")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
