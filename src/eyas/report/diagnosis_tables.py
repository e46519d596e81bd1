"""The tables of a diagnosis's page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas import causes
from eyas.report import diagnosis_words as told_as
from eyas.report import page, words
from eyas.report.page import Table

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Tile:
    """A number large enough to be read across a room."""

    label: str
    value: str
    below: str
    colour: str = ""


def tiles(result: Json) -> list[Tile]:
    """Observed, expected, what lies between them and how much of it is explained; what is unknown is left out."""
    theirs, ours, gap = (result.get(key) or {} for key in ("expected", "observed", "gap"))
    told = []
    if told_as.length(ours) is not None:
        source = told_as.SOURCES.get(str(ours.get("source")), str(ours.get("source") or ""))
        told.append(Tile("observed", words.number(told_as.length(ours), 2), _below(ours["accept_length"], source)))
    if told_as.length(theirs) is not None:
        below = _below(theirs["accept_length"], "what these files give")
        told.append(Tile("expected", words.number(told_as.length(theirs), 2), below))
    if gap.get("value") is not None:
        what = "lost each round" if _lost(gap) else "not told from chance"
        told.append(Tile("gap", f"{gap['value']:.2f}", _below(gap, what), "red" if _lost(gap) else ""))
        if gap.get("explained") is not None:
            told.append(Tile("explained", f"{gap['explained']:.2f}", "of the gap, by the repairs below"))
    return told


def _lost(gap: Json) -> bool:
    return gap.get("low") is not None and gap["low"] > 0


def _below(value: Json, what: str) -> str:
    interval = words.interval(value.get("low"), value.get("high"), 2)
    rounds = f"{value['rounds']:,} rounds" if value.get("rounds") is not None else ""
    return ", ".join(filter(None, [interval, rounds, what]))


def depth_table(result: Json) -> Table:
    reading = (result.get("expected") or {}).get("reading")
    caption = "Rates with 95 % intervals and counts; the gap is expected minus observed, paired by prompt."
    if reading:
        caption += f" Expected: {reading}."
    return Table(caption, told_as.DEPTH_HEAD, told_as.depth_rows(result))


def slot_table(taps: Json) -> Table:
    configured, observed = taps.get("configured") or [], taps.get("observed") or []
    margins = taps.get("margin") or []
    rows = [
        [
            str(slot),
            told_as.tap_list(configured[slot : slot + 1]),
            told_as.tap_list(observed[slot : slot + 1]),
            words.number(margins[slot], 1) if slot < len(margins) else "–",
        ]
        for slot in range(max(len(configured), len(observed)))
    ]
    return Table("Which tap each slot is fed.", ["slot", "configured", "observed", "margin"], rows)


def tap_table(taps: Json) -> Table:
    """The picture's cells as numbers, a row a tap, so that it is readable where the page is narrow."""
    errors, cosines = taps.get("error") or [], taps.get("cosine") or []
    slots = range(max(len(errors), len(cosines)))
    head = ["tap", *(f"slot {s}, {what}" for s in slots for what in ("error", "cosine"))]
    rows = [
        [str(tap), *(_cell(grid, s, column, digits) for s in slots for grid, digits in ((errors, 4), (cosines, 5)))]
        for column, tap in enumerate(taps.get("taps") or [])
    ]
    return Table("Error is the median over rows of |fed - tap| / |tap|; 0 is the same.", head, rows if slots else [])


def _cell(grid: Sequence[Sequence[float | None]], row: int, column: int, digits: int) -> str:
    known = row < len(grid) and column < len(grid[row])
    return words.number(grid[row][column], digits) if known else "–"


def stage_table(probes: Json) -> Table:
    """The numbers behind the row of stages."""
    rows = []
    for key, (name, _) in told_as.STAGES.items():
        stage = probes.get(key) or {}
        for d in stage.get("depths") or []:
            part = (
                f"{d.get('equal'):,} equal" if d.get("equal") is not None else f"error {told_as.short(d.get('error'))}"
            )
            rows.append([name, f"depth {d.get('depth')}", part, told_as.count(d.get("n"))])
        for what, error in (stage.get("errors") or {}).items():
            rows.append([name, f"against {what}", f"error {told_as.short(error)}", "–"])
        for side in ("counted", "page"):
            if told := stage.get(side):
                kept = ", ".join(map(told_as.count, told.get("accepted") or []))
                rows.append([name, "counted by eyas" if side == "counted" else "metrics page", kept, _rounds(told)])
    return Table("Errors are relative; metrics are tokens kept at depth 0, 1, ….", ["stage", "of", "value", "n"], rows)


def _rounds(told: Json) -> str:
    return f"{told_as.count(told.get('rounds'))} rounds"


def repair_table(result: Json) -> Table:
    rows = [
        [
            str(i),
            str(r.get("cause")),
            str(r.get("summary") or ""),
            told_as.spread({"value": r.get("gain"), "low": r.get("low"), "high": r.get("high")}, 2, "+"),
            words.number(r.get("reaches"), 2),
        ]
        for i, r in enumerate(result.get("repairs") or [], 1)
    ]
    return Table("In the order to make them.", ["", "cause", "repair", "gain", "tokens a round after it"], rows)


def toggle_table(result: Json) -> Table:
    rows = [
        [
            str(t.get("name")),
            str(t.get("setting")),
            words.number(t.get("accept_length"), 2),
            told_as.count(t.get("rounds")),
            words.number(t.get("predicted_minutes"), 1),
            str(t.get("outcome") or ""),
        ]
        for t in result.get("toggles") or []
    ]
    head = ["switch", "setting", "tokens a round", "rounds", "minutes (predicted)", "outcome"]
    return Table("Switches of the engine that were tried.", head, rows)


def ruled_out_table(result: Json) -> Table:
    meanings: Mapping[str, str] = dict(causes.KIND_MEANINGS.items())
    rows = [
        [str(r.get("kind")), meanings.get(str(r.get("kind")), ""), str(r.get("by"))]
        for r in result.get("ruled_out") or []
    ]
    return Table("Kinds of causes that cannot be it.", ["kind", "that is", "ruled out by"], rows)


def number_tables(result: Json) -> list[Table]:
    """Counts of both sides, then the engine-free check's own curves."""
    told = [_counts(result)]
    checked = {"curves": {}, "accept_length": [], **{k: v for k, v in result.items() if v is not None}}
    told += [page.depth_table(checked), page.length_table(checked)]
    return [table for table in told if table.rows]


def _counts(result: Json) -> Table:
    ours, theirs = result.get("observed") or {}, result.get("expected") or {}
    rows = [
        ["rounds", told_as.count((theirs.get("accept_length") or {}).get("rounds")), told_as.count(ours.get("rounds"))],
        ["drafted", "–", told_as.count(ours.get("drafted"))],
        ["accepted", "–", told_as.count(ours.get("accepted"))],
        ["accept length", *(told_as.spread(side.get("accept_length"), 3) for side in (theirs, ours))],
    ]
    return Table("The two sides.", ["", "expected", "observed"], rows if ours or theirs else [])


def setting_table(result: Json) -> Table:
    resolved = (result.get("engine") or {}).get("resolved") or {}
    rows = [[str(key), value if isinstance(value, str) else json.dumps(value)] for key, value in resolved.items()]
    return Table("As the engine itself says them.", ["setting", "value"], rows)


def command(result: Json) -> str:
    return shlex.join(map(str, (result.get("engine") or {}).get("command") or []))


def engine_facts(result: Json) -> dict[str, str]:
    engine = result.get("engine") or {}
    told = {"engine": told_as.engine_name(result), "runner": engine.get("runner"), "address": engine.get("url")}
    told["state"] = told_as.MODES.get(str(engine.get("mode")), engine.get("mode"))
    return {key: str(value) for key, value in told.items() if value}


def facts(result: Json) -> dict[str, str]:
    told = {"eyas": str(result.get("eyas") or "unknown")}
    if result.get("seconds") is not None:
        told["seconds"] = f"{result['seconds']:.1f}"
    for name, seconds in ((result.get("served") or {}).get("seconds") or {}).items():
        if seconds is not None:
            told[f"seconds, {name}"] = f"{seconds:.1f}"
    probes = result.get("probes") or {}
    for name in ("passes", "rows", "bytes"):
        if probes.get(name) is not None:
            told[f"probes, {name}"] = told_as.count(probes[name])
    return told | {str(key): str(value) for key, value in (result.get("provenance") or {}).items()}


def no_texts(result: Json) -> str:
    """Why there are no conversations."""
    if (result.get("engine") or {}).get("mode") == "bundle":
        return "A bundle carries no texts: what was asked and answered is not shown."
    return "No conversations were recorded."
