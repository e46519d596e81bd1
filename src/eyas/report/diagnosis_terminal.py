"""A diagnosis in the terminal: verdict, first finding, both sides by depth, where they part, repairs, the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.report import diagnosis_words as told_as
from eyas.report import terminal, words

Json = Mapping[str, Any]
_SIGNS = {"equal": "=", "differs": "X", "unknown": "?", "not seen": "-"}
_COLOURS = {"equal": "green", "differs": "bold red", "unknown": "yellow", "not seen": "dim"}


def print_diagnosis(result: Json, console: Console) -> None:
    """``result`` is the JSON of ``eyas diagnose``; any of its keys may be missing or null."""
    _verdict(result, console)
    _lengths(result, console)
    _depths(result, console)
    _stages(result, console)
    _repairs(result, console)
    _toggles(result, console)
    terminal.print_findings([told_as.whole(f) for f in result.get("findings") or []], console)
    _ruled_out(result, console)
    _unseen(result, console)
    _closing(result, console)


def _verdict(result: Json, console: Console) -> None:
    verdict = str(result.get("verdict") or "undecided")
    colour = words.COLOURS.get(verdict, "white")
    console.print(Text.assemble((words.plain(verdict).upper(), f"bold {colour}"), "  ", words.MEANING.get(verdict, "")))
    console.print(Text(told_as.title(result), style="dim"))
    console.print(Text(told_as.headline(result), style="bold"))
    for sentence in told_as.also(result):
        console.print(Text(f"Also: {sentence}"))
    if doubt := told_as.doubt(result):
        console.print(Text(doubt, style="yellow"))


def _lengths(result: Json, console: Console) -> None:
    gap = result.get("gap") or {}
    told = [(key, told_as.spread((result.get(key) or {}).get("accept_length"))) for key in ("observed", "expected")] + [
        ("gap", told_as.spread(gap, sign="+"))
    ]
    if all(value == "–" for _, value in told):
        return
    text = "   ".join(f"{key} {value}" for key, value in told if value != "–")
    if gap.get("explained") is not None:
        text += f"   explained {gap['explained']:.2f}"
    console.print()
    console.print(Text(f"Tokens a round: {text}"))


def _depths(result: Json, console: Console) -> None:
    rows = told_as.depth_rows(result)
    if not rows:
        return
    head = ("depth", "expected, joint", "observed, joint", "gap", "conditional")
    table = _table("Expected and observed at each depth", head)
    for *cells, theirs, ours in rows:  # 80 columns hold three with their intervals
        pair = (side.split("\n")[0] for side in (theirs, ours))
        table.add_row(*cells, " / ".join(pair))
    console.print()
    console.print(table)
    if reading := (result.get("expected") or {}).get("reading"):
        console.print(Text(words.plain(f"expected: {reading}"), style="dim"))


def _stages(result: Json, console: Console) -> None:
    console.print()
    console.print(Text("Where engine and reference part", style="bold"))
    if parting := told_as.parting(result):
        _indented(console, f"first: {parting}", "bold red")
    else:
        _indented(console, told_as.unparted(result))
    stages = told_as.stages(result)
    if not stages:
        return
    table = Table(show_header=False, box=None, padding=(0, 1))
    for _ in range(4):
        table.add_column(overflow="fold")
    for stage in stages:
        status = stage["status"]
        sign = Text(_SIGNS[status], style=_COLOURS[status])
        told = Text(status + (" (first)" if stage["first"] else ""), style=_COLOURS[status])
        table.add_row(sign, stage["name"], told, Text(stage["number"]))
    console.print(table)


def _repairs(result: Json, console: Console) -> None:
    sentence = told_as.repair_sentence(result)
    if sentence is None:
        return
    console.print()
    console.print(Text("What each repair gives", style="bold"))
    _indented(console, sentence)


def _toggles(result: Json, console: Console) -> None:
    toggles = result.get("toggles") or []
    if not toggles:
        return
    table = _table("Switches of the engine that were tried", ("switch", "setting", "tokens a round", "outcome"))
    for t in toggles:
        cells = (t.get("name"), t.get("setting"), words.number(t.get("accept_length"), 2), t.get("outcome") or "")
        table.add_row(*(Text(words.plain(cell)) for cell in cells))
    console.print()
    console.print(table)


def _ruled_out(result: Json, console: Console) -> None:
    ruled_out = result.get("ruled_out") or []
    if not ruled_out:
        return
    console.print()
    console.print(Text("Ruled out", style="bold"))
    for r in ruled_out:
        _indented(console, f"{r.get('kind')}: {r.get('by')}")


def _unseen(result: Json, console: Console) -> None:
    unseen = told_as.unseen(result)
    if not unseen:
        return
    console.print()
    console.print(Text("Not checked, not seen", style="bold"))
    for what, needed in unseen:
        _indented(console, f"{what}{' (needed for a verdict)' if needed else ''}")


def _closing(result: Json, console: Console) -> None:
    console.print()
    if served := told_as.served_sentence(result):
        console.print(Text(served, style="dim"))
    seconds = result.get("seconds")
    console.print(Text(words.plain(f"eyas {result.get('eyas')}, {words.number(seconds, 1)} s"), style="dim"))


def _table(title: str, head: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in head:
        table.add_column(heading, overflow="fold")
    return table


def _indented(console: Console, text: str, style: str = "") -> None:
    terminal.indented(console, words.plain(text), style)
