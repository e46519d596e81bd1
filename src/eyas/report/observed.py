"""What an engine said of its speculation, in the terminal: one block a run, then what disagrees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.report import words
from eyas.report.terminal import print_findings

Json = Mapping[str, Any]


def print_observed(told: Json, console: Console) -> None:
    """``told`` is the result of ``eyas read``."""
    for run in told["observed"]:
        _run(run, console)
    print_findings(told["findings"], console)


def _run(run: Json, console: Console) -> None:
    name = " ".join(str(run[key]) for key in ("engine", "version", "drafter") if run[key])
    console.print(Text(words.plain(name), style="bold"))
    console.print(Text(words.plain(f"{run['kind']}, {run['where']}, {run['lines']:,} read"), style="dim"))
    if run["faked"]:
        console.print(Text(words.plain(f"acceptance is faked: {run['faked']}"), style="bold red"))
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, key in (
        ("drafted tokens a round", "draft_tokens"),
        ("top-k", "top_k"),
        ("rounds", "rounds"),
        ("drafted", "drafted"),
        ("accepted", "accepted"),
        ("tokens in the outputs", "emitted"),
    ):
        if run[key] is not None or key in ("draft_tokens", "rounds", "accepted"):
            table.add_row(label, _count(run[key]))
    table.add_row("accept length", _length(run["accept_length"]))
    if run["accept_rate"]:
        table.add_row("accept rate", f"{_rate(run['accept_rate'])}  {run['rate_definition'] or 'definition unknown'}")
    console.print(table)
    if run["depths"]:
        console.print(_curve(run["depths"]))
    for sentence in run["derived"]:
        console.print(Text(f"derived: {sentence}", style="dim"))
    console.print()


def _curve(depths: Any) -> Table:
    table = Table()
    table.add_column("depth", justify="right")
    for heading in ("joint", "hits", "conditional"):
        table.add_column(heading)
    for depth in depths:
        joint = depth["joint"]
        hits = "–" if joint["hits"] is None else f"{joint['hits']:,} of {joint['n']:,}"
        table.add_row(str(depth["depth"]), _rate(joint), hits, _rate(depth["conditional"]))
    return table


def _length(length: Json | None) -> str:
    if length is None:
        return "not in the text"
    told = words.number(length["value"])
    if length["low"] is not None:
        high = "more" if length["high"] is None else words.number(length["high"])
        told += f" ({words.number(length['low'])} to {high}, {length['interval']})"
    return f"{told}  {length['method']}"


def _rate(rate: Json) -> str:
    if rate["rate"] is None:
        return "–"
    return f"{words.rate(rate)} {rate['interval']}"


def _count(value: int | None) -> str:
    return "not in the text" if value is None else f"{value:,}"
