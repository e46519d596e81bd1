"""A watched engine in the terminal: a table that is renewed in place, or a line a reading where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eyas.report import words
from eyas.report.terminal import print_findings

Json = Mapping[str, Any]
Show = Callable[[Json, Sequence[Json]], None]
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"warning": "bold red", "restart": "yellow", "down": "yellow", "up": "green", "cleared": "green"}


@contextmanager
def shown(console: Console) -> Iterator[Show]:
    """Call it with what is told and the events since the last time."""
    if not console.is_terminal:
        yield lambda told, events: _plain(told, events, console)
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(told: Json, events: Sequence[Json]) -> None:
            _events(events, console)
            live.update(picture(told), refresh=True)

        yield show


def _plain(told: Json, events: Sequence[Json], console: Console) -> None:
    _events(events, console)
    console.print(Text(line(told)), soft_wrap=True)


def _events(events: Sequence[Json], console: Console) -> None:
    for event in events:
        head = (f"{event['kind']:8}", _COLOURS.get(event["kind"], "bold"))
        told = words.plain(event["text"])
        console.print(Text.assemble(f"{clock(event['at'])}  ", head, f" {told}"), soft_wrap=True)
        if event["fix"]:
            console.print(Text(f"            →     {words.plain(event['fix'])}"), soft_wrap=True)


def line(told: Json) -> str:
    """``0:05:00  1,204 rounds  length 2.81  window 2.80  first 2.83  expected 2.31``."""
    if not told["up"]:
        return f"{clock(told['seconds'])}  away"
    interval = told["interval"]
    parts = [clock(told["seconds"])]
    if interval is None:
        life = told["life"]
        parts += [f"{_count(life['rounds'])} rounds so far", f"length {words.number(life['accept_length'], 2)}"]
    else:
        parts += [f"{_count(interval['rounds'])} rounds", f"length {words.number(interval['accept_length'], 2)}"]
        parts += [f"window {words.number(told['newest']['accept_length'], 2)}"]
        parts += [f"first {words.number(told['first']['accept_length'], 2)}"]
    if told["expected"]:
        parts.append(f"expected {words.number(told['expected']['value'], 2)}")
    if told["standing"]:
        parts.append("! " + ", ".join(told["standing"]))
    return "  ".join(parts)


def picture(told: Json) -> Group:
    head = f"{told['engine'] or 'engine'} at {told['where']}, watched for {clock(told['seconds'])}"
    if told["restarts"]:
        head += f", {clock(told['since_restart'])} since its last start"
    table = Table(box=None, pad_edge=False)
    for heading in ("", "interval", "window", "first", "expected"):
        table.add_column(heading, justify="left" if not heading else "right")
    interval, newest, first, expected = (told[key] or {} for key in ("interval", "newest", "first", "expected"))
    table.add_row("rounds", *(_count(one.get("rounds")) for one in (interval, newest, first)), "")
    lengths = [words.number(one.get("accept_length"), 3) for one in (interval, newest, first)]
    table.add_row("accept length", *lengths, words.number(expected.get("value"), 3))
    rates = [one.get("joint") or [] for one in (newest, first, expected)]
    for depth in range(len(rates[0])):
        cells = [words.number(rate[depth]) if depth < len(rate) else "–" for rate in rates]
        table.add_row(f"joint rate, depth {depth}", "", *cells)
    rows: list[Any] = [Text(words.plain(head), style="bold"), table]
    if curve := sparkline([one["accept_length"] for one in told["trend"]]):
        rows.append(Text(f"over uptime  {curve}"))
    if not told["up"]:
        rows.append(Text("away", style="bold yellow"))
    if told["standing"]:
        rows.append(Text("stands: " + ", ".join(told["standing"]), style="bold red"))
    return Group(*rows)


def sparkline(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    step = (high - low) / (len(_BARS) - 1)
    told = "".join(
        " " if value is None else _BARS[round((value - low) / step) if step else len(_BARS) // 2] for value in values
    )
    return f"{told}  {low:.2f} to {high:.2f}"


def print_watched(told: Json, console: Console) -> None:
    """What is left to say at the end."""
    console.print()
    summary = f"{told['readings']:,} readings in {clock(told['seconds'])}, {told['rounds']:,} rounds"
    for name in ("restarts", "outages"):
        if told[name]:
            summary += f", {told[name]:,} {name}"
    console.print(Text(summary, style="bold"))
    for left_out in told["not_checked"]:
        console.print(Text(f"{left_out['what']}: {words.plain(left_out['why'])}", style="dim"), soft_wrap=True)
    print_findings(told["findings"], console)


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
