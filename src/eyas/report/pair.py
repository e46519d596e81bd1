"""Two drafters in the terminal: each one's verdict, then which is better, by how much and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.report import words

Json = Mapping[str, Any]


def print_pair(result: Json, console: Console) -> None:
    for side in ("first", "second"):
        told = result[side]
        colour = words.COLOURS.get(told["verdict"], "white")
        name = words.plain(told["checkpoint"])
        console.print(Text.assemble((f"{side}: {name}  ", ""), (told["verdict"].upper(), f"bold {colour}")))
        for finding in told["findings"]:
            if finding["severity"] != "note":
                console.print(Text(f"    {finding['cause']}: {words.plain(finding['summary'])}"))
    console.print()
    pair = result["pair"]
    if pair is None:
        console.print(Text(f"Not compared: {words.plain(result['why_not'])}.", style="yellow"))
        return
    console.print(Text(sentence(result), style="bold"))
    console.print(Text(f"{pair['records']} records, {pair['slots']:,} slots, the same for both.", style="dim"))
    _slices(pair["slices"], console)


def sentence(result: Json) -> str:
    """``smollm2-eagle3 is better: …`` or ``No difference shown: …``."""
    pair = result["pair"]
    d, K = pair["difference"], pair["draft_tokens"]
    lengths = (
        f"{words.number(pair['first'], 2)} against {words.number(pair['second'], 2)} tokens a round at {K} drafted"
    )
    if d["low"] is None:
        return f"Too few records to compare: {lengths}."
    told = f"{d['value']:+.3f}, {d['low']:+.3f} to {d['high']:+.3f}"
    if pair["better"] is None:
        seen = f"{pair['smallest_seen']:.3f}"
        return (
            f"No difference shown: {lengths} ({told}). A difference of {seen} would have been seen in "
            f"{pair['power']:.0%} of such comparisons."
        )
    return f"{words.plain(result[pair['better']]['checkpoint'])} is better: {lengths} ({told})."


def _slices(slices: list[Json], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("by", "", "first", "second", "difference", "slots", ""):
        table.add_column(name)
    for s in slices:
        d = s["difference"]
        gap = "–" if d["value"] is None else f"{d['value']:+.3f} ({words.interval(d['low'], d['high'])})"
        rates = [words.number(s[side]["rate"]) for side in ("first", "second")]
        proven = "differs" if s["proven"] else ""
        table.add_row(s["by"], Text(words.plain(s["name"])), *rates, gap, f"{s['first']['n']:,}", proven)
    console.print(table)
    console.print(Text(f"differs: by more than chance, corrected for {len(slices)} slices", style="dim"))
