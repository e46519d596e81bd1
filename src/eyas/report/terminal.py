"""A check's result in the terminal: the verdict first, then what it rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eyas.report import sweep, words

Json = Mapping[str, Any]


def as_json(value: object) -> str:
    """Strict JSON: NaN and infinity, which JSON does not have, become null; numpy numbers become numbers."""
    return json.dumps(_strict(value), indent=2, ensure_ascii=False, allow_nan=False)


def _strict(value: object) -> object:
    if hasattr(value, "tolist"):  # numpy's, which most results have none of
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_check(result: Json, console: Console) -> None:
    _verdict(result, console)
    _curves(result["curves"], console)
    _lengths(result["accept_length"], result["expect"], console)
    _sweep(result, console)
    print_findings(result["findings"], console)
    _not_checked(result["not_checked"], console)
    _closing(result, console)


def _verdict(result: Json, console: Console) -> None:
    verdict = result["verdict"]
    colour = words.COLOURS.get(verdict, "white")
    console.print(Text.assemble((verdict.upper(), f"bold {colour}"), "  ", words.MEANING.get(verdict, "")))
    names = [words.plain(result[key]) for key in ("checkpoint", "target") if result.get(key)]
    console.print(Text(" for target ".join(names), style="dim"))
    if word := sweep.first_word(result):
        console.print(Text(word, style="bold"))


def _curves(curves: Json, console: Console) -> None:
    forced, walk = curves.get("teacher_forced"), curves.get("walk")
    if not forced and not walk:
        return
    table = Table(title="How often each depth is right", title_justify="left", title_style="bold")
    table.add_column("depth", justify="right")
    for heading in ("teacher-forced, conditional", "walk, joint", "walk, conditional"):
        table.add_column(heading, overflow="fold")
    for depth in range(max(len(curve["depths"]) for curve in (forced, walk) if curve)):
        cells = [_rate(forced, depth, "conditional"), _rate(walk, depth, "joint")]
        table.add_row(str(depth), *cells, _rate(walk, depth, "conditional"))
    console.print()
    console.print(table)
    for name, curve in (("teacher-forced", forced), ("walk", walk)):
        if curve:
            truth = words.TRUTH.get(curve["truth"], curve["truth"])
            covered = f"{words.rate(curve['coverage'])}, {words.counts(curve['coverage'])}"
            console.print(Text(f"{name}: truth is {truth}; inside the draft vocabulary {covered}", style="dim"))


def _rate(curve: Json | None, depth: int, which: str) -> str:
    if not curve or depth >= len(curve["depths"]):
        return "–"
    rate = curve["depths"][depth][which]
    return f"{words.rate(rate)}\n{words.counts(rate)}"


def _lengths(lengths: Sequence[Json], expect: float, console: Console) -> None:
    if not lengths:
        return
    table = Table(title="Accept length (accepted + 1)", title_justify="left", title_style="bold")
    for heading in ("drafted tokens", "accept length", "95 % interval", "rounds"):
        table.add_column(heading, justify="right")
    for length in lengths:
        table.add_row(
            str(length["draft_tokens"]),
            words.number(length["value"]),
            words.interval(length["low"], length["high"]),
            f"{length['rounds']:,}",
        )
    console.print()
    console.print(table)
    console.print(Text(f"expected at 4 drafted tokens: {expect:g} or more", style="dim"))


def _sweep(result: Json, console: Console) -> None:
    told = sweep.told(result)
    if told is None:
        return
    console.print()
    if rows := sweep.changes(result):
        table = Table(title="Configured otherwise than it fits", title_justify="left", title_style="bold")
        for heading in ("fact", "configured", "fits"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(words.plain(cell)) for cell in row))
        console.print(table)
    if rows := sweep.readings(result):
        table = Table(title="Other readings, tokens a round gained", title_justify="left", title_style="bold")
        for heading in ("reading", "gained", "outcome"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    if more := sweep.left_out(result):
        console.print(Text(more, style="dim"))
    console.print(Text(told, style="dim"))


def print_findings(findings: Sequence[Json], console: Console) -> None:
    console.print()
    console.print(Text("Findings" if findings else "No findings.", style="bold"))
    for finding in findings:
        colour = words.SEVERITY_COLOURS.get(finding["severity"], "white")
        head = (
            (f"{finding['severity']}  ", colour),
            (words.plain(finding["cause"]), "bold"),
            f" ({words.plain(finding['kind'])})",
        )
        console.print(Text.assemble("  ", *head))
        indented(console, words.plain(finding["summary"]))
        for piece in finding["evidence"]:
            indented(console, "evidence: " + words.evidence(piece), "dim")
        indented(console, "fix: " + words.plain(finding["fix"]), "green")
        for rival in finding["rivals"]:
            told = f"not excluded: {rival['cause']}; {rival['would_separate']} would tell"
            indented(console, words.plain(told), "dim")


def _not_checked(not_checked: Sequence[Json], console: Console) -> None:
    if not not_checked:
        return
    console.print()
    console.print(Text("Not checked", style="bold"))
    for left_out in not_checked:
        needed = "needed for a verdict: " if left_out.get("needed") else ""
        indented(console, words.plain(f"{left_out['what']}: {needed}{left_out['why']}"))


def _closing(result: Json, console: Console) -> None:
    console.print()
    console.print(Text(f"eyas {result['eyas']}, {result['seconds']:.1f} s", style="dim"))


def indented(console: Console, text: str, style: str = "") -> None:
    """Wrapped lines stay under their heading; ``Text`` because outside names may look like markup."""
    console.print(Padding(Text(text, style=style), (0, 0, 0, 4), expand=False))
