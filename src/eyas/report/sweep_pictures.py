"""What a sweep found, in pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import pictures, words
from eyas.report.sweep import SHOWN, confirmed

Json = Mapping[str, Any]


def reading_picture(result: Json) -> str | None:
    """Tokens a round that each confirmed reading gains, as SVG."""
    sweep = result.get("sweep")
    trials = confirmed(sweep["passes"][0])[:SHOWN] if sweep and sweep["passes"] else []
    if not trials:
        return None
    names = [words.plain(t["name"])[:44] for t in trials]
    values = [t["confirmed"]["difference"] for t in trials]
    return pictures.bars_picture(names, [(v["value"] or 0.0, v["low"], v["high"]) for v in values], "tokens a round")


def tap_picture(result: Json) -> str | None:
    """How likely each tap in each slot makes the truth, as SVG: a row a slot of fc, a column a tap."""
    sweep = result.get("sweep")
    taps = sweep["passes"][0]["taps"] if sweep and sweep["passes"] else None
    if not taps or not taps["log_probability"]:
        return None
    configured = [str(s["configured"]) for s in taps["slots"]]
    names = [f"slot {s['slot']}" for s in taps["slots"]]
    rows: Sequence[Sequence[float | None]] = taps["log_probability"]
    return pictures.matrix_picture(names, [str(t) for t in taps["taps"]], rows, configured)
