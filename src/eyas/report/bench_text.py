"""A bench and a prediction in the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.report import bench_words as said
from eyas.report import words

Json = Mapping[str, Any]
LEFT_OUT = ("middle half", "repeated 8-grams")
PARTS = (("all", "all prompts"), ("without_loops", "without looping answers"))


def print_bench(told: Json, console: Console) -> None:
    for key, title in PARTS:
        part = told[key]
        if not part["sides"]:
            console.print(Text(f"{title}: none left", style="dim"))
        elif key == "all" or part["prompts"] < told["all"]["prompts"]:
            rows = said.side_rows(part, told["baseline"])
            _table(f"{title} ({part['prompts']})", *_narrow(said.SIDE_HEAD, rows), console)
        else:
            console.print(Text("no answer loops", style="dim"))
    if len(told["categories"]) > 1:
        _table("by category", said.CATEGORY_HEAD, said.category_rows(told), console)
    if told.get("pass_cost"):
        console.print(Text(said.pass_costs(told["pass_cost"]), style="dim"))
    for line in [*said.ties(told), *said.faults(told), *said.servers(told)]:
        console.print(Text(line, style="yellow"))
    for i, line in enumerate(said.recommended(told)):
        console.print(Text(line, style="bold" if i == 0 else ""))
    for name, flags in said.flag_rows(told):
        console.print(Text.assemble(f"  {name:20} ", (words.plain(flags), "bold")), soft_wrap=True)


def _narrow(head: Sequence[str], rows: said.Rows) -> tuple[list[str], said.Rows]:
    """What fits a terminal; files have it all."""
    kept = [i for i, name in enumerate(head) if name not in LEFT_OUT]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def print_prediction(told: Json, console: Console) -> None:
    for i, line in enumerate(said.predicted(told)):
        console.print(Text(line, style="bold" if i == 0 else ""))
    _table("times are in plain steps", said.PREDICTED_HEAD, said.predicted_rows(told), console)
    console.print(Text(said.step_times(told), style="dim"))


def _table(title: str, head: Sequence[str], rows: said.Rows, console: Console) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    used, cells = said.columns_used(head, rows)
    for heading in used:
        table.add_column(heading, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


# -- Markdown -------------------------------------------------------------------------------------------------


def bench_markdown(told: Json) -> str:
    lines = [f"# Bench: {cell(told['prompts_name'])}, {told['max_new_tokens']} new tokens", ""]
    lines += [cell(line) for line in said.recommended(told)]
    if rows := said.flag_rows(told):
        lines += ["", *_rows(said.FLAG_HEAD, [[name, code(flags)] for name, flags in rows])]
    for key, title in PARTS:
        part = told[key]
        lines += ["", f"## {title[0].upper()}{title[1:]}: {part['prompts']}", ""]
        lines += _rows(said.SIDE_HEAD, _cells(said.side_rows(part, told["baseline"]))) if part["sides"] else ["None."]
    if len(told["categories"]) > 1:
        lines += ["", "## By category", "", *_rows(said.CATEGORY_HEAD, _cells(said.category_rows(told)))]
    lines += ["", f"Ratios are to {cell(told['baseline'])}, with 95 % intervals over prompts."]
    if told.get("pass_cost"):
        lines += ["", f"{cell(said.pass_costs(told['pass_cost']))}. The bound is AL(K) / (v(K+1) + K d)."]
    lines += [
        line for fault in [*said.ties(told), *said.faults(told), *said.servers(told)] for line in ("", cell(fault))
    ]
    return "\n".join([*lines, ""])


def prediction_markdown(told: Json) -> str:
    lines = ["# Can speculation pay here?", "", *(cell(line) for line in said.predicted(told)), ""]
    lines += [*_rows(said.PREDICTED_HEAD, _cells(said.predicted_rows(told))), "", cell(said.step_times(told)) + "."]
    return "\n".join([*lines, ""])


def _cells(rows: said.Rows) -> said.Rows:
    return [[cell(text) for text in row] for row in rows]


def _rows(head: Sequence[str], rows: said.Rows) -> list[str]:
    """``rows`` are Markdown already."""
    used, kept = said.columns_used(head, rows)
    return [_row(used), _row(["---"] * len(used)), *map(_row, kept)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(text: object) -> str:
    """Text from outside in a cell: no pipe, no line break, no tag, no mark-up of its own."""
    plain = words.plain(text).replace("\n", " ").replace("\t", " ")
    for mark in "\\`*_[]|<>":
        plain = plain.replace(mark, f"\\{mark}")
    return plain


def code(text: str) -> str:
    plain = words.plain(text).replace("\n", " ").replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"
