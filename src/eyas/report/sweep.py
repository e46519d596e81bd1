"""What a sweep found, in rows, for the terminal and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.report import words

Json = Mapping[str, Any]
SHOWN = 8  # readings named; the JSON has all


def first_word(result: Json) -> str | None:
    """The gravest finding as the sentence to start with."""
    grave = [f for f in result["findings"] if f["severity"] != "note"]
    if not grave:
        return None
    doubt = " Not certain: other causes are not excluded." if grave[0]["rivals"] else ""
    return words.plain(grave[0]["summary"]) + doubt


def changes(result: Json) -> list[list[str]]:
    """Facts that are configured otherwise than they fit: fact, configured, fits."""
    found = (result.get("found") or {}).get("changes") or []
    return [[str(c["fact"]), shown(c["configured"]), shown(c["found"])] for c in found]


def shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join("none" if v is None else str(v) for v in value)
    if isinstance(value, Mapping):
        return json.dumps(value) if value else "as stored"
    return str(value)


def told(result: Json) -> str | None:
    """How many readings were tried and on what, and how far the one that fits is ahead."""
    sweep = result.get("sweep")
    if not sweep:
        return None
    text = (
        f"{sweep['tried']} other readings of the files were tried on {sweep['records']} records, the best of them "
        f"confirmed on {sweep['slots']:,} slots that chose nothing."
    )
    found = result.get("found") or {}
    margin, rival = found.get("margin"), found.get("next")
    if margin and rival and margin.get("value") is not None:
        reach = words.interval(margin["low"], margin["high"])
        text += (
            f" Against the next, {words.plain(rival)}, the reading that fits gains {margin['value']:+.3f} tokens "
            f"a round ({reach})."
        )
    return text


def readings(result: Json) -> list[list[str]]:
    """The first pass's confirmed readings, best first: name, tokens a round against as it was read, outcome."""
    sweep = result.get("sweep")
    if not sweep or not sweep["passes"]:
        return []
    rows = []
    for trial in confirmed(sweep["passes"][0])[:SHOWN]:
        difference = trial["confirmed"]["difference"]
        gained = f"{words.number(difference['value'])} ({words.interval(difference['low'], difference['high'])})"
        rows.append([words.plain(trial["name"]), gained, str(trial["outcome"])])
    return rows


def left_out(result: Json) -> str | None:
    """How many confirmed readings ``readings`` does not name."""
    sweep = result.get("sweep")
    more = len(confirmed(sweep["passes"][0])) - SHOWN if sweep and sweep["passes"] else 0
    return f"and {more} more, in the JSON" if more > 0 else None


def confirmed(done: Json) -> list[Json]:
    """The readings of a pass that came to the confirming slots, best first."""
    trials = [t for t in done["variants"] if t["confirmed"]]
    return sorted(trials, key=lambda t: -(t["confirmed"]["difference"]["value"] or 0.0))
