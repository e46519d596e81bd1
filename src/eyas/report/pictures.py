"""Pictures as SVG text made to stand inside a page: text and lines take the page's own colour."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from eyas.report import words

# Readable on white and on near-black, and told apart by the colour-blind (markers differ as well).
COLOURS = ("#2f7fd1", "#d1662f", "#2f9e6e", "#a567c7", "#b08a1e", "#d0608f")
MARKERS = "osD^vP"
INK, GRID = "#010203", "#040506"  # stand-ins, replaced by the page's own colours

STYLE = {
    "svg.fonttype": "none",  # letters stay letters: small, searchable, in the page's font
    "svg.hashsalt": "eyas",  # the same picture is the same text
    "text.parse_math": False,  # names come from outside; a dollar sign is a dollar sign
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Point:
    x: float
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]


def draw(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    alt: str,
    y_range: tuple[float | None, float | None] = (None, None),
    whole_x: bool = True,
    level: tuple[float, str] | None = None,
) -> str:
    """Lines with their intervals; ``level`` is a dashed line to compare with."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        for index, line in enumerate(lines):
            _draw_line(axes, line, index, nudge=0.04 * (index - (len(lines) - 1) / 2) if whole_x else 0.0)
        if level is not None:
            axes.axhline(level[0], color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=level[1])
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(*y_range)
        if whole_x:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if lines or level:
            figure.legend(loc="outside upper left")  # never over the lines
        return as_svg(figure, alt)


def _draw_line(axes: Any, line: Line, index: int, nudge: float) -> None:
    points = [p for p in line.points if p.value is not None]
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    name = words.plain(line.name)
    axes.plot(
        [p.x + nudge for p in points],
        [p.value for p in points],
        color=colour,
        marker=marker,
        markersize=4.5,
        linewidth=1.4,
        label=f" {name}" if name.startswith("_") else name,  # matplotlib hides names that start with _
    )
    spread = [p for p in points if p.low is not None and p.high is not None]
    xs = [p.x + nudge for p in spread]
    axes.vlines(xs, [p.low for p in spread], [p.high for p in spread], color=colour, linewidth=1.2)


def as_svg(figure: Any, alt: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # else every picture names its minute of birth
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's browser has the font
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # names too wide: drawn over the edge
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(GRID, "#8a939c55")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)  # the page sets the size
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1).strip()


def with_own_ids(svg: str, prefix: str) -> str:
    """Ids are unique in a page only if each picture has its own prefix."""
    svg = re.sub(r'(<[^>]*?\bid=")', rf"\1{prefix}-", svg)
    return re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)


def curve_picture(results: Sequence[Mapping[str, Any]]) -> str:
    """Conditional rate at each depth: one drafter with both its curves, or several by one they all have."""
    if len(results) == 1:
        both = (("walk", "walk"), ("teacher-forced", "teacher_forced"))
        lines = [_curve_line(name, results[0]["curves"].get(key)) for name, key in both]
    else:
        key = shared_curve(results)
        lines = [_curve_line(result["checkpoint"], result["curves"].get(key)) for result in results]
    lines = [line for line in lines if line.points]
    return draw(
        lines,
        x_label="depth (0 is the first drafted token)",
        y_label="right, given all before were",
        alt="Share of drafted tokens that are right at each depth. " + _told(lines),
        y_range=(0, 1.02),
    )


def shared_curve(results: Sequence[Mapping[str, Any]]) -> str:
    """Drafters are compared on the walk if each has one: a walk beside a teacher-forced curve misleads."""
    return "walk" if all(result["curves"].get("walk") for result in results) else "teacher_forced"


def _curve_line(name: str, curve: Mapping[str, Any] | None) -> Line:
    depths = curve["depths"] if curve else []
    rates = [(d["depth"], d["conditional"]) for d in depths]
    return Line(name, [Point(k, r["rate"], r["low"], r["high"]) for k, r in rates if r["rate"] is not None])


def length_picture(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        Line(
            result["checkpoint"],
            [Point(p["draft_tokens"], p["value"], p["low"], p["high"]) for p in result["accept_length"]],
        )
        for result in results
        if result["accept_length"]
    ]
    expect = max(result["expect"] for result in results)
    return draw(
        lines,
        x_label="drafted tokens a round",
        y_label="accept length",
        alt="Accept length against drafted tokens. " + _told(lines),
        y_range=(1, None),
        level=(expect, f"expected at 4: {expect:g}"),
    )


def training_picture(points: Sequence[Mapping[str, Any]]) -> str:
    """Accept length as training goes on.

    A point has ``value``, perhaps ``low`` and ``high``, and ``tokens`` or ``minutes``; tokens are the axis if
    every point has them.
    """
    by_tokens = all(point.get("tokens") is not None for point in points)
    axis = "tokens" if by_tokens else "minutes"
    drawn = [Point(float(p[axis]) / (1e6 if by_tokens else 1), p["value"], p.get("low"), p.get("high")) for p in points]
    line = Line("held-out records", drawn)
    return draw(
        [line],
        x_label="million tokens trained on" if by_tokens else "minutes of training",
        y_label="accept length",
        alt="Accept length on held-out records during training. " + _told([line]),
        whole_x=False,
    )


def _told(lines: Sequence[Line]) -> str:
    """The picture in words, for those who hear the page."""
    told = []
    for line in lines:
        values = [f"{p.value:.2f} at {p.x:g}" for p in line.points if p.value is not None]
        told.append(f"{words.plain(line.name)}: {', '.join(values) or 'no points'}.")
    return " ".join(told) or "There is nothing to show."


def bars_picture(names: Sequence[str], values: Sequence[tuple[float, float | None, float | None]], label: str) -> str:
    """A dot a name with its interval, best on top, zero marked."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 0.5 + 0.32 * len(names)), layout="constrained")
        axes = figure.subplots()
        for row, (value, low, high) in enumerate(values):
            if low is not None and high is not None:
                axes.plot([low, high], [row, row], color=COLOURS[0], linewidth=1.6)
            axes.plot([value], [row], "o", color=COLOURS[0], markersize=5)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)  # best on top, no dot cut in half
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        told = ", ".join(f"{value:+.2f} by {name}" for name, (value, _, _) in zip(names, values, strict=True))
        return as_svg(figure, f"Tokens a round gained by other readings: {told}.")


def matrix_picture(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], configured: Sequence[str]
) -> str:
    """Cells darker where the value is higher, each row on its own scale; a ring where it is configured, a cross on the
    best."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 0.7 + 0.4 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        for y, row in enumerate(values):
            known = [v for v in row if v is not None]
            low, high = (min(known), max(known)) if known else (0.0, 1.0)
            for x, value in enumerate(row):
                strength = 0.0 if value is None or high == low else (value - low) / (high - low)
                alpha = 0.06 + 0.9 * strength**2
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[0], alpha=alpha, linewidth=0))
                if value is not None and value == high:
                    axes.plot([x], [y], "x", color=INK, markersize=6)
            if configured[y] in columns:
                axes.plot([columns.index(configured[y])], [y], "o", color=INK, fillstyle="none", markersize=11)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        step = max(1, -(-len(columns) // 16))  # at most 16 numbers fit
        axes.set_xticks(range(0, len(columns), step), columns[::step])
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("tap")
        told = "; ".join(map(_best_told, rows, [columns] * len(rows), values, configured))
        return as_svg(figure, f"How likely each tap in each slot makes the truth. {told}.")


def _best_told(row: str, columns: Sequence[str], values: Sequence[float | None], configured: str) -> str:
    known = [(value, column) for value, column in zip(values, columns, strict=True) if value is not None]
    best = max(known, key=lambda pair: pair[0])[1] if known else "unknown"
    return f"{row}: configured {configured}, best {best}"
