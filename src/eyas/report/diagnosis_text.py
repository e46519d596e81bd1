"""What a model wrote, as text that hides nothing: blanks, breaks and invisible marks are shown, nothing is obeyed."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from eyas.report import words

Json = Mapping[str, Any]
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> Markup:
    """A token: each blank and break a soft sign, each mark that has no shape its number."""
    return Markup("").join(_shown(c) for c in text)


def _shown(c: str) -> Markup:
    if c in _SIGNS:
        return Markup("<i>{}</i>").format(_SIGNS[c])
    return Markup("<i>U+{}</i>").format(f"{ord(c):04X}") if _shapeless(c) else escape(c)


def _shapeless(c: str) -> bool:
    """Controls, direction marks, joiners, line separators, blanks that are no plain blank, halves of pairs."""
    return c != " " and unicodedata.category(c) in _SHAPELESS


_SHAPELESS = ("Cc", "Cf", "Zl", "Zp", "Zs", "Cs", "Co")


def as_said(text: str) -> Markup:
    """A prompt: its own breaks and blanks, for a ``<pre>``; only marks without shape are written out."""
    return Markup("").join(escape(c) if c in " \n\t" else _shown(c) for c in text)


def said(text: object) -> str:
    """For a title: ``“ the”`` with the signs of ``visible``, no marks of its own."""
    signs = (_SIGNS.get(c) or (f"[U+{ord(c):04X}]" if _shapeless(c) else c) for c in str(text))
    return f"“{''.join(signs)}”"


def rank(value: Any) -> str:
    return "not among those seen" if value is None else f"rank {value}"


def round_html(told: Json) -> Markup:
    """One round: kept tokens, rejected ones, the target's own token with its rank among the drafter's."""
    drafted = told.get("drafted") or []
    missed = next((d for d in drafted if not d.get("kept")), None)
    html = Markup("").join(_drafted(d, first=d is missed) for d in drafted)
    bonus = str(told.get("bonus") or "")
    if missed is None:
        return html + _own(bonus, "")
    wanted = missed.get("wanted")
    if wanted is not None and wanted != bonus:  # sampled, or the text was cut: what was wanted is not what came
        html += Markup("<sup>wanted {}</sup>").format(visible(str(wanted)))
    place = "" if wanted is None else f"rank {missed['rank']}" if missed.get("rank") is not None else "no rank"
    return html + _own(bonus, place)


def _drafted(token: Json, *, first: bool) -> Markup:
    text = str(token.get("text") or "")
    if token.get("kept"):
        return _broken(Markup('<ins title="kept">{}</ins>').format(visible(text)), text)
    title = "rejected" if first else "rejected with it"
    if token.get("wanted") is not None:
        title += f"; wanted {said(token['wanted'])}, {rank(token.get('rank'))}"
    return Markup('<del{} title="{}">{}</del>').format(Markup("" if first else " class=l"), title, visible(text))


def _own(text: str, place: str) -> Markup:
    if not text:
        return Markup("")
    note = Markup("<sup>{}</sup>").format(place) if place else ""
    return _broken(Markup('<b title="the target\'s own">{}{}</b>').format(visible(text), note), text)


def _broken(html: Markup, text: str) -> Markup:
    return html + Markup("<br>") if text.endswith("\n") else html


def opening_html(conversation: Json) -> Markup:
    return _own(str(conversation.get("first") or ""), "")


def rejected_rows(conversation: Json) -> list[tuple[str, str, Markup, Markup, str]]:
    """Every rejected token: round, depth, drafted, wanted there, rank."""
    return [
        (
            str(number),
            str(depth),
            visible(str(token.get("text") or "")),
            Markup("–") if token.get("wanted") is None else visible(str(token["wanted"])),
            "" if token.get("wanted") is None else "not seen" if token.get("rank") is None else str(token["rank"]),
        )
        for number, told in enumerate(conversation.get("rounds") or [], 1)
        for depth, token in enumerate(told.get("drafted") or [])
        if not token.get("kept")
    ]


def row_html(row: tuple[str, str, Markup, Markup, str]) -> Markup:
    return Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row))


def kept_of(conversation: Json) -> str:
    """``39 rounds, 15 of 156 drafted tokens kept, 1.38 tokens a round``."""
    rounds = conversation.get("rounds") or []
    tokens = [d for told in rounds for d in told.get("drafted") or []]
    kept = sum(bool(d.get("kept")) for d in tokens)
    told = f"{len(rounds):,} rounds, {kept:,} of {len(tokens):,} drafted tokens kept"
    if rounds:
        told += f", {1 + kept / len(rounds):.2f} tokens a round"
    left_out = conversation.get("rounds_left_out")
    return told + (f"; {left_out:,} more rounds are not shown" if left_out else "")


def coded(text: object) -> Markup:
    """A sentence whose `names` are set as code."""
    parts = words.plain(text).split("`")
    if len(parts) % 2 == 0:  # one is left open: no code then
        return escape("`".join(parts))
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))
