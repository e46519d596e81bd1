"""A diagnosis as one HTML page that needs nothing but itself. Drawn from the JSON that it carries."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eyas.report import diagnosis_pictures, diagnosis_text, page, pictures, words
from eyas.report import diagnosis_tables as tables
from eyas.report import diagnosis_words as told_as
from eyas.report.diagnosis_bound import bounded, embedded
from eyas.report.page import Picture, Section

__all__ = ["diagnosis_page"]

Json = Mapping[str, Any]
_HERE = Path(__file__).parent

_templates = Environment(
    loader=FileSystemLoader(_HERE),
    autoescape=True,  # names, logs and what models wrote come from outside
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: words.plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
)


def diagnosis_page(result: Json) -> str:
    """``result`` is the JSON of ``eyas diagnose``; any of its keys may be missing or null."""
    shown = bounded(result)
    script = _script()
    html = _templates.get_template("diagnosis.html.jinja").render(
        **_head(shown),
        **_middle(shown),
        **_tail(shown),
        r=shown,
        text=diagnosis_text,
        evidence=words.evidence,
        severity_colours=words.SEVERITY_COLOURS,
        style=_style(),
        script=Markup(script),
        script_hash=_hash(script),
        data=embedded(shown),
    )
    return html.lstrip()  # the doctype comes first


def _script() -> str:
    return (_HERE / "diagnosis.js").read_text(encoding="utf-8")


def _style() -> Markup:
    return Markup((_HERE / "diagnosis.css").read_text(encoding="utf-8"))


def _hash(script: str) -> Markup:
    """What the page's policy names the one script by that may run: its text as it stands between the tags."""
    return Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())


def _head(result: Json) -> dict[str, Any]:
    verdict = str(result.get("verdict") or "undecided")
    return {
        "title": told_as.title(result),
        "verdict": verdict,
        "colour": words.COLOURS.get(verdict, ""),
        "headline": told_as.headline(result),
        "also": told_as.also(result),
        "doubt": told_as.doubt(result),
        "meaning": words.MEANING.get(verdict, ""),
        "tiles": tables.tiles(result),
        "fixes": told_as.fixes(result),
    }


def _middle(result: Json) -> dict[str, Any]:
    probes = result.get("probes") or {}
    taps = probes.get("taps") or {}
    return {
        "depth_pictures": _drawn(
            "depth",
            (diagnosis_pictures.depth_picture(result, "joint"), _JOINT),
            (diagnosis_pictures.depth_picture(result, "conditional"), _CONDITIONAL),
        ),
        "depth_table": tables.depth_table(result),
        "stages": told_as.stages(result),
        "parting": told_as.parting(result),
        "unparted": told_as.unparted(result),
        "stage_table": tables.stage_table(probes),
        "slot_pictures": _drawn("slots", (diagnosis_pictures.slot_picture(taps), _SLOTS)),
        "slot_table": tables.slot_table(taps),
        "tap_table": tables.tap_table(taps),
        "sweep": _sweep(result),
        "repair_pictures": _drawn("repairs", (diagnosis_pictures.repair_picture(result), _REPAIRS)),
        "repair_sentence": told_as.repair_sentence(result),
        "repair_table": tables.repair_table(result),
        "toggle_table": tables.toggle_table(result),
    }


_JOINT = "Kept this deep or deeper, of all rounds. Bars are 95 % intervals."
_CONDITIONAL = (
    "Kept, of the rounds that came this far. Low at depth 0 points to taps, vocabulary, norms or rotary; low only "
    "later, to feedback."
)
_SLOTS = (
    "Each row is a slot of fc, each column a tap: the stronger the colour, the nearer is what the engine fed to what "
    "the target has there (logarithm of the error, each row on its own scale). The ring is the configured tap, the "
    "cross the observed one; both on one cell is as it should be."
)
_REPAIRS = "Tokens a round after each repair, in the order to make them. The dashed line is what these files give."


def _tail(result: Json) -> dict[str, Any]:
    return {
        "ruled_out": tables.ruled_out_table(result),
        "findings": [told_as.whole(f) for f in result.get("findings") or []],
        "unseen": told_as.unseen(result),
        "numbers": tables.number_tables(result),
        "settings": tables.setting_table(result),
        "command": tables.command(result),
        "engine": tables.engine_facts(result),
        "facts": tables.facts(result),
        "served": told_as.served_sentence(result),
        "no_texts": tables.no_texts(result),
    }


def _sweep(result: Json) -> Section | None:
    if not told_as.has_sweep(result):
        return None
    section = page.sweep_section(result)
    drawn = _drawn("sweep", *((p.svg, p.caption) for p in section.pictures))
    return Section(section.heading, paragraphs=section.paragraphs, pictures=drawn, tables=section.tables)


def _drawn(prefix: str, *pairs: tuple[str | None, str]) -> list[Picture]:
    """Ids are unique in the page: each picture has its own prefix."""
    return [
        Picture(Markup(pictures.with_own_ids(svg, f"{prefix}{i}")), caption)
        for i, (svg, caption) in enumerate(pairs)
        if svg
    ]


def read_back(html: str) -> Json:
    """The result that a page carries."""
    start = html.index(">", html.index('id="eyas-result"')) + 1
    told: Json = json.loads(html[start : html.index("</script>", start)])
    return told
