"""Pictures of a diagnosis: expected against observed, taps by slots, what each repair gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eyas.report import pictures, words
from eyas.report.diagnosis_words import by_depth, length
from eyas.report.pictures import COLOURS, INK, STYLE, Line, Point, as_svg

Json = Mapping[str, Any]
SHOWN = 8  # repairs drawn
_LETTERS = 26  # of a name beside a bar


def depth_picture(result: Json, which: str) -> str | None:
    """``which`` is joint or conditional: both sides' rates at each depth."""
    lines = [Line(key, _points(result.get(key), which)) for key in ("expected", "observed")]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    label = "kept, of all rounds" if which == "joint" else "kept, given all before were"
    told = "; ".join(f"{line.name}: {', '.join(f'{p.value:.2f} at {p.x:g}' for p in line.points)}" for line in lines)
    return pictures.draw(
        lines,
        x_label="depth (0 is the first drafted token)",
        y_label=label,
        alt=f"Share of drafted tokens {label}, at each depth. {told}.",
        y_range=(0, 1.02 if which == "conditional" else None),
    )


def _points(side: Json | None, which: str) -> list[Point]:
    rates = [(k, d.get(which) or {}) for k, d in sorted(by_depth(side).items())]
    return [Point(k, r["rate"], r.get("low"), r.get("high")) for k, r in rates if r.get("rate") is not None]


def slot_picture(taps: Json) -> str | None:
    """How far what each slot of fc was fed lies from each tap: the stronger the colour, the nearer."""
    columns, errors = [str(t) for t in taps.get("taps") or []], taps.get("error") or []
    if not columns or not errors:
        return None
    rows = range(len(errors))
    configured, observed = (_marks(taps.get(key), len(errors)) for key in ("configured", "observed"))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.0, 0.7 + 0.36 * len(errors)), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        for y in rows:
            for x, strength in enumerate(_strengths(errors[y][: len(columns)])):
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLOURS[0], alpha=strength, linewidth=0))
            if configured[y] in columns:
                axes.plot([columns.index(configured[y])], [y], "o", color=INK, fillstyle="none", markersize=12)
            if observed[y] in columns:
                axes.plot([columns.index(observed[y])], [y], "x", color=INK, markersize=6)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(errors) - 0.5, -0.5)
        step = max(1, -(-len(columns) // 16))  # at most 16 numbers fit
        axes.set_xticks(range(0, len(columns), step), columns[::step])
        axes.set_yticks(rows, [f"slot {y}" for y in rows])
        axes.set_xlabel("tap of the target")
        told = "; ".join(f"slot {y}: configured {configured[y]}, observed {observed[y]}" for y in rows)
        return as_svg(figure, f"Which tap of the target each slot of fc is fed. {told}.")


def _marks(taps: Sequence[Any] | None, count: int) -> list[str]:
    told = ["unknown" if t is None else words.plain(t) for t in taps or []]
    return (told + ["unknown"] * count)[:count]


def _strengths(errors: Sequence[float | None]) -> list[float]:
    """Of colour, by the logarithm of the error: neighbours in a residual stream differ little, the right one a lot."""
    logs = [None if e is None else math.log(max(e, 1e-6)) for e in errors]
    known = [v for v in logs if v is not None]
    if not known:
        return [0.04] * len(errors)
    low, high = min(known), max(known)
    return [0.04 if v is None else 0.08 + 0.87 * ((high - v) / (high - low) if high > low else 0.0) for v in logs]


def repair_picture(result: Json) -> str | None:
    """A step a repair, from what is observed to what is expected."""
    repairs = [r for r in result.get("repairs") or [] if r.get("reaches") is not None][:SHOWN]
    now, aim = length(result.get("observed")), length(result.get("expected"))
    if not repairs:
        return None
    start = now if now is not None else repairs[0]["reaches"] - (repairs[0].get("gain") or 0.0)
    names = ["as it runs now", *(words.plain(r.get("cause"))[:_LETTERS] for r in repairs)]
    ends = [start, *(r["reaches"] for r in repairs)]
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(5.0, 0.9 + 0.36 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.barh([0], [start - 1], left=1, height=0.56, color=COLOURS[1])
        for y, (before, after) in enumerate(pairwise(ends), 1):
            axes.barh([y], [before - 1], left=1, height=0.56, color="#8a939c", alpha=0.28)
            axes.barh([y], [after - before], left=before, height=0.56, color=COLOURS[2])
        for y, end in enumerate(ends):
            gained = f"{end:.2f}" if y == 0 else f"{end:.2f} ({end - ends[y - 1]:+.2f})"
            axes.text(1.02, y, gained, transform=axes.get_yaxis_transform(), va="center")
        if aim is not None:
            axes.axvline(aim, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=f"expected: {aim:.2f}")
            figure.legend(loc="outside upper left")
        axes.set_xlim(1, 1 + 1.04 * max(max(ends) - 1, (aim or 1) - 1, 0.05))
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("tokens a round (accept length)")
        told = "; ".join(f"{name}: {end:.2f}" for name, end in zip(names, ends, strict=True))
        return as_svg(figure, f"Tokens a round after each repair. {told}.")
