"""Results as one HTML page that needs nothing but itself: no network, no script, no second file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eyas.report import pictures, sweep, sweep_pictures, words
from eyas.report.diagnosis_bound import embedded
from eyas.report.pictures import training_picture

__all__ = ["Picture", "Section", "Table", "check_page", "page", "training_picture"]

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """``svg`` goes into the page as it is: only what ``pictures`` drew belongs here."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    heading: str
    verdict: str = ""
    paragraphs: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    findings: Sequence[Json] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    """What to type, by whose command line it is for."""

    @property
    def meaning(self) -> str:
        return words.MEANING.get(self.verdict, "")

    @property
    def colour(self) -> str:
        return words.COLOURS.get(self.verdict, "")


_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # names, logs and records come from outside
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: words.plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
)


def page(title: str, sections: Sequence[Section], data: Json | None = None) -> str:
    """``data`` is the JSON that the page was drawn from, carried inside it."""
    drawn = [
        replace(section, pictures=[_own_ids(p, f"s{i}p{j}") for j, p in enumerate(section.pictures)])
        for i, section in enumerate(sections)
    ]
    template = _templates.get_template("page.html.jinja")
    return template.render(
        title=title,
        sections=drawn,
        evidence=words.evidence,
        severity_colours=words.SEVERITY_COLOURS,
        data=None if data is None else embedded(data),
    )


def _own_ids(picture: Picture, prefix: str) -> Picture:
    return replace(picture, svg=Markup(pictures.with_own_ids(picture.svg, prefix)))


def check_page(results: Sequence[Json], lead: Sequence[Section] = (), title: str | None = None) -> str:
    """One drafter, or several side by side; ``lead`` sections come first."""
    names = [str(result["checkpoint"]) for result in results]
    compared = [_pictures(results)] if len(results) > 1 else []
    sections = [section for result in results for section in _one_drafter(result, alone=len(results) == 1)]
    return page(title or "Check of " + ", ".join(names), [*lead, *compared, *sections])


def _pictures(results: Sequence[Json]) -> Section:
    shown = []
    if any(curve for result in results for curve in result["curves"].values()):
        shown.append(Picture(pictures.curve_picture(results), _curve_caption(results)))
    if any(result["accept_length"] for result in results):
        shown.append(Picture(pictures.length_picture(results), _LENGTH_CAPTION))
    return Section("Pictures" if len(results) == 1 else "Side by side", pictures=shown)


def _curve_caption(results: Sequence[Json]) -> str:
    told = (
        "How often the drafted token at each depth is right, given that all before it were. Bars are 95 % "
        "intervals. Low at depth 0 points to taps, vocabulary, norms or rotary; low only later, to feedback."
    )
    if len(results) > 1:
        curve = "walk, as an engine plays it" if pictures.shared_curve(results) == "walk" else "teacher-forced curve"
        told += f" All drafters are shown by their {curve}."
    return told


_LENGTH_CAPTION = (
    "Tokens gained a round, the target's own included, against drafted tokens. Where the line flattens, more "
    "drafted tokens cost time and gain nothing. The dashed line is what is expected at 4 drafted tokens."
)


def _one_drafter(result: Json, *, alone: bool) -> list[Section]:
    name = str(result["checkpoint"])
    target = f" for {result['target']}" if result.get("target") else ""
    missing = [_missing(left_out) for left_out in result["not_checked"]]
    word = sweep.first_word(result)
    sections = [Section(f"{name}{target}", verdict=result["verdict"], paragraphs=[word] if word else [])]
    if alone:
        sections.append(_pictures([result]))
    sections += [
        sweep_section(result),
        Section("Findings", paragraphs=() if result["findings"] else ("None.",), findings=result["findings"]),
        Section("Not checked", paragraphs=missing or ("Nothing was left out.",)),
        Section("Numbers", tables=[table for table in (depth_table(result), length_table(result)) if table.rows]),
        Section("How this was made", facts=_facts(result)),
    ]
    return [s for s in sections if s.verdict or s.paragraphs or s.pictures or s.tables or s.findings or s.facts]


def sweep_section(result: Json) -> Section:
    told = sweep.told(result)
    if told is None:
        return Section("Other readings")
    drawn = (
        (
            sweep_pictures.reading_picture(result),
            "Tokens a round that other readings of the files gain, with 95 % intervals.",
        ),
        (sweep_pictures.tap_picture(result), _TAP_CAPTION),
    )
    tables = (
        Table("Configured otherwise than it fits.", ["fact", "configured", "fits"], sweep.changes(result)),
        Table("Readings that were confirmed.", ["reading", "tokens a round gained", "outcome"], sweep.readings(result)),
    )
    return Section(
        "Other readings",
        paragraphs=[told, *filter(None, [sweep.left_out(result)])],
        pictures=[Picture(svg, caption) for svg, caption in drawn if svg],
        tables=[table for table in tables if table.rows],
    )


_TAP_CAPTION = (
    "Every tap tried in every slot of fc, the others as configured: the stronger the colour, the likelier it makes "
    "what the target says, each row on its own scale. A ring marks what is configured, a cross the best; both on one "
    "cell is as it should be."
)


def _missing(left_out: Json) -> str:
    return f"{left_out['what']}{' (needed for a verdict)' if left_out.get('needed') else ''}: {left_out['why']}"


def depth_table(result: Json) -> Table:
    rows = []
    for name, key in (("teacher-forced", "teacher_forced"), ("walk", "walk")):
        for depth in (result["curves"].get(key) or {"depths": []})["depths"]:
            joint, conditional = depth["joint"], depth["conditional"]
            cells = [
                words.rate(joint),
                words.counts(joint),
                words.rate(conditional),
                words.counts(conditional),
            ]
            rows.append([name, str(depth["depth"]), *cells])
    head = ["curve", "depth", "joint", "counts", "conditional", "counts"]
    return Table("Rates with 95 % intervals over records.", head, rows)


def length_table(result: Json) -> Table:
    rows = [
        [
            str(length["draft_tokens"]),
            words.number(length["value"]),
            words.interval(length["low"], length["high"]),
            f"{length['rounds']:,}",
        ]
        for length in result["accept_length"]
    ]
    return Table("Accept length.", ["drafted tokens", "accept length", "95 % interval", "rounds"], rows)


def _facts(result: Json) -> dict[str, str]:
    facts = {"eyas": str(result["eyas"]), "seconds": f"{result['seconds']:.1f}"}
    for name, key in (("teacher-forced", "teacher_forced"), ("walk", "walk")):
        if curve := result["curves"].get(key):
            covered = f"{words.rate(curve['coverage'])}, {words.counts(curve['coverage'])}"
            truth = words.TRUTH.get(curve["truth"], curve["truth"])
            facts[f"{name}: truth"] = truth
            facts[f"{name}: inside the draft vocabulary"] = covered
    facts |= {str(key): str(value) for key, value in result["provenance"].items()}
    return facts
