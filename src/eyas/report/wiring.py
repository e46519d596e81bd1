"""A drafter's contract and what engines make of it, in the terminal: facts side by side, then what is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.report import terminal, words

Json = Mapping[str, Any]


def print_show(told: Json, console: Console) -> None:
    _heading(told, console)
    _facts(told["contract"], told["engines"], console)
    for engine in told["engines"]:
        _engine(engine, console)
    terminal.print_findings(told["findings"], console)


def _heading(told: Json, console: Console) -> None:
    console.print(Text(words.plain(told["checkpoint"]), style="bold"))
    console.print(Text(f"written by {told['spelled_by']}: {words.plain(told['why'])}", style="dim"))
    if (target := told["target"]) is not None:
        shape = f"{target['num_layers']} layers, {target['hidden_size']} wide, {target['vocab_size']:,} tokens"
        console.print(Text(f"for {words.plain(target['architecture'])}, {shape}", style="dim"))


# Facts of training, which no engine decides: they are in the JSON, not in the table.
_OF_TRAINING = ("target", "mask", "depths", "vocab_sha256", "template_sha256", "tokenizer_sha256")


def _facts(contract: Json, engines: Sequence[Json], console: Console) -> None:
    """One row a fact, one column an engine; only what differs from the contract is spelled out there."""
    table = Table(title="What the drafter was made for" + (", and what engines wire" if engines else ""))
    table.title_justify, table.title_style = "left", "bold"
    table.add_column("fact", no_wrap=True)
    table.add_column("made for", overflow="fold", min_width=12)
    for engine in engines:
        table.add_column(engine_words(engine).replace(" ", "\n"), overflow="fold")
    names = [*contract, *(name for engine in engines for name in engine["facts"])]
    for name in dict.fromkeys(names):
        if name not in _OF_TRAINING:
            ours = contract.get(name)
            table.add_row(name, _made_for(ours), *(_cell(ours, engine["facts"].get(name)) for engine in engines))
    console.print()
    console.print(table)
    if engines:
        told = (
            "= as made for   · not the engine's to decide, or not to be told from these files   – the files do not say"
        )
        console.print(Text(told, style="dim"))


def _made_for(ours: Json | None) -> Text:
    if ours is None:
        return Text("–", style="dim")
    origin = "" if ours["origin"] == "declared" else f" ({ours['origin']})"
    return Text.assemble(_short(ours["value"]), (origin, "dim"))


def _cell(ours: Json | None, theirs: Json | None) -> Text:
    if theirs is None:
        return Text("·", style="dim")
    if ours is None:
        return Text(_short(theirs["value"]), style="dim")
    same = _plain(ours["value"]) == _plain(theirs["value"])
    return Text("=", style="dim") if same else Text(_short(theirs["value"]), style="bold red")


def _plain(value: Any) -> Any:
    """Rotary parameters without their default type, which some write and some leave out."""
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if (k, v) not in (("rope_type", "default"), ("type", "default"))}
    return value


def engine_words(engine: Json) -> str:
    runner = f" {engine['runner']}" if engine["runner"] else ""
    asked = " (installed)" if engine["source"] == "installed" else ""
    return f"{engine['name']} {engine['version']}{runner}{asked}"


def _engine(engine: Json, console: Console) -> None:
    rows: list[tuple[str, str]] = []
    for effect in ("ignored", "defaulted", "overridden"):
        rows += [(f"{effect} key", f"{k['key']} = {_short(k['value'])}: {k['why']}") for k in engine[f"{effect}_keys"]]
    for effect in ("shared", "overwritten", "dropped", "unfilled"):
        rows += [(f"{effect} tensor", f"{t['tensor']} ({t['loudness']}): {t['why']}") for t in engine[effect]]
    for flag in engine["flags"]:
        if flag["requested"] == flag["resolved"]:
            continue
        asked = "not given" if flag["requested"] is None else _short(flag["requested"])
        told = f"{flag['flag']}: {asked} -> {_short(flag['resolved'])} ({flag['loudness']}): {flag['rule']}"
        rows.append(("flag", told))
    if not rows and not engine["assumed"]:
        return
    console.print()
    console.print(Text(engine_words(engine), style="bold"))
    if engine["assumed"]:
        console.print(Text(f"  {words.plain(engine['assumed'])}", style="yellow"))
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for what, told in rows:
        table.add_row(what, Text(words.plain(told)))
    console.print(table)


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "rope_theta" in value:
        value = ", ".join(f"{k.removeprefix('rope_')} {v}" for k, v in _plain(value).items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return words.plain(text if len(text) <= 70 else text[:67] + "…")
