"""Pictures of a bench: sides against the baseline, measured against the bound, categories; of a prediction: by K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from eyas.report import pictures, words
from eyas.report.pictures import COLOURS, INK, MARKERS, STYLE, Line, Point, as_svg

Json = Mapping[str, Any]
_LETTERS = 34  # of a name beside its dot
SHOWN = 24  # rows of dots


def ratio_picture(told: Json) -> str | None:
    """A dot a side with its interval, the baseline marked."""
    ratios = _ratios(told["all"])
    return _dots([(words.plain(told["baseline"]), ratios)]) if len(ratios) > 1 else None


def category_picture(told: Json) -> str | None:
    """A row a category, a dot a side."""
    groups = [(words.plain(part["category"]), _others(part, told["baseline"])) for part in told["categories"]]
    groups = [(name, ratios) for name, ratios in groups if ratios]
    return _dots(groups[:SHOWN]) if len(groups) > 1 else None


def _ratios(part: Json) -> dict[str, Json]:
    return {words.plain(n): s["ratio"] for n, s in part["sides"].items() if s["ratio"]["value"] is not None}


def _others(part: Json, baseline: str) -> dict[str, Json]:
    return {name: ratio for name, ratio in _ratios(part).items() if name != words.plain(baseline)}


def _dots(groups: Sequence[tuple[str, Mapping[str, Json]]]) -> str:
    """One group: a row a side. Several: a row a group, a colour a side."""
    alone = len(groups) == 1
    sides = list(dict.fromkeys(side for _, ratios in groups for side in ratios))
    rows = [(side, {side: groups[0][1][side]}) for side in sides] if alone else list(groups)
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(5.4, 0.9 + 0.34 * len(rows) + 0.2 * (not alone)), layout="constrained")
        axes = figure.subplots()
        for y, (_, ratios) in enumerate(rows):
            for side, ratio in ratios.items():
                index = 0 if alone else sides.index(side)
                height = y if alone else y + 0.14 * (index - (len(sides) - 1) / 2)
                colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
                label = side if not alone and y == 0 else None
                axes.plot([ratio["value"]], [height], marker, color=colour, markersize=5, label=label)
                if ratio["low"] is not None and ratio["high"] is not None:
                    axes.plot([ratio["low"], ratio["high"]], [height, height], color=colour, linewidth=1.5)
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [name[:_LETTERS] for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("times as fast as the baseline")
        if not alone:
            figure.legend(loc="outside upper left", ncols=min(4, len(sides)))
        said = "; ".join(f"{n}: " + ", ".join(f"{s} {r['value']:.2f}" for s, r in ratios.items()) for n, ratios in rows)
        return as_svg(figure, f"Speed over the baseline's. {said}.")


def bound_picture(told: Json) -> str | None:
    """Measured ratio and bound against drafted tokens, of chains that were swept."""
    swept = [
        (setting["draft_tokens"], told["all"]["sides"][side])
        for side, setting in (told.get("settings") or {}).items()
        if setting["draft_tokens"] and setting["nodes"] is None and side in told["all"]["sides"]
    ]
    swept.sort(key=lambda pair: pair[0])
    if len(swept) < 2:
        return None
    measured = [Point(k, side["ratio"]["value"], side["ratio"]["low"], side["ratio"]["high"]) for k, side in swept]
    bounds = [Point(k, side["bound"], None, None) for k, side in swept]
    lines = [Line("measured", measured), Line("passes alone (bound)", bounds)]
    lines = [line for line in lines if any(p.value is not None for p in line.points)]
    return pictures.draw(
        lines,
        x_label="drafted tokens a round",
        y_label="times as fast as the baseline",
        alt="Speed against drafted tokens. " + _said(lines),
        level=(1.0, words.plain(told["baseline"])),
    )


def joint_picture(told: Json) -> str | None:
    """How often each depth is kept, a line a side."""
    lines = []
    for name, side in told["all"]["sides"].items():
        rates = [(depth["depth"], depth["joint"]) for depth in side["depths"]]
        points = [Point(k, r["rate"], r["low"], r["high"]) for k, r in rates if r["rate"] is not None]
        if points:
            lines.append(Line(name, points))
    if not lines:
        return None
    return pictures.draw(
        lines[: len(COLOURS)],
        x_label="depth (0 is the first drafted token)",
        y_label="kept, of rounds that drafted it",
        alt="Share of drafted tokens kept at each depth. " + _said(lines),
        y_range=(0, None),
    )


def expected_picture(told: Json) -> str:
    rows = told["by_draft_tokens"]
    expected = [_point(row["draft_tokens"], row["ratio"]) for row in rows if row["ratio"]]
    perfect = [Point(row["draft_tokens"], row["perfect"], None, None) for row in rows]
    lines = [Line("expected", expected)] if expected else []
    lines.append(Line("perfect drafter", perfect))
    return pictures.draw(
        lines,
        x_label="drafted tokens a round",
        y_label="times as fast as plain decoding",
        alt="Predicted speed against drafted tokens. " + _said(lines),
        level=(1.0, "no speculation"),
    )


def needed_picture(told: Json) -> str:
    rows = told["by_draft_tokens"]
    expected = [_point(row["draft_tokens"], row["accept_length"]) for row in rows if row["accept_length"]]
    needed = [Point(row["draft_tokens"], row["break_even"], None, None) for row in rows]
    lines = [Line("expected", expected)] if expected else []
    lines.append(Line("breaks even", needed))
    return pictures.draw(
        lines,
        x_label="drafted tokens a round",
        y_label="accept length",
        alt="Accept length against drafted tokens. " + _said(lines),
        y_range=(1, None),
    )


def _point(x: int, value: Json) -> Point:
    return Point(x, value["value"], value["low"], value["high"])


def _said(lines: Sequence[Line]) -> str:
    said = []
    for line in lines:
        values = [f"{p.value:.2f} at {p.x:g}" for p in line.points if p.value is not None]
        said.append(f"{words.plain(line.name)}: {', '.join(values)}.")
    return " ".join(said)
