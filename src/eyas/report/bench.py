"""A bench, or a prediction, as one HTML page that needs nothing but itself, drawn from the JSON that it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import bench_pictures, words
from eyas.report import bench_words as said
from eyas.report.page import Picture, Section, Table, page

Json = Mapping[str, Any]

_SPEED = "Tokens per second over the baseline's, with 95 % intervals over prompts. The dashed line is the baseline."
_BOUND = (
    "Against drafted tokens: what was measured, and what passes alone would allow at the accept length that was "
    "measured, AL(K) / (v(K+1) + K d). A gap between them is spent outside the passes."
)
_CATEGORY = "The same by category of the prompts: a drafter is better at some texts than at others."
_JOINT = "Rounds that kept this depth, of those that drafted it. Bars are 95 % intervals over prompts."
_EXPECTED = (
    "Against drafted tokens: what is expected, and what a drafter of this cost would reach that is always right. Under "
    "the dashed line plain decoding is faster."
)
_NEEDED = "Accept length: what is expected, and what breaks even. Where the second is above the first, drafting loses."


def bench_page(told: Json) -> str:
    """``told`` is the JSON of ``eyas bench``."""
    drawn = [
        (bench_pictures.ratio_picture(told), _SPEED),
        (bench_pictures.bound_picture(told), _BOUND),
        (bench_pictures.category_picture(told), _CATEGORY),
        (bench_pictures.joint_picture(told), _JOINT),
    ]
    lead = said.recommended(told) or [
        "No setting is recommended: one side without speculation and one with it is wanted."
    ]
    sections = [
        Section("What to run with", paragraphs=lead, commands=_commands(told)),
        Section("Pictures", pictures=_pictures(drawn)),
        _sides("All prompts", told["all"], told["baseline"]),
        _sides("Without looping answers", told["without_loops"], told["baseline"]),
        Section("Equal texts", paragraphs=said.ties(told)),
        Section("By category", tables=_categories(told)),
        Section("What went wrong", paragraphs=[*said.faults(told), *said.servers(told)]),
        Section("How this was made", facts=_facts(told)),
    ]
    return page(f"Bench: {told['prompts_name']}", [section for section in sections if _filled(section)], told)


def prediction_page(told: Json) -> str:
    """``told`` is the JSON of ``eyas bench --predict``."""
    drawn = [
        (bench_pictures.expected_picture(told), _EXPECTED),
        (bench_pictures.needed_picture(told), _NEEDED),
    ]
    rows = said.predicted_rows(told)
    sections = [
        Section("Can speculation pay here?", paragraphs=said.predicted(told), pictures=_pictures(drawn)),
        Section("Numbers", tables=_tables("Times are in plain steps.", said.PREDICTED_HEAD, rows)),
        Section("How this was made", facts={"step times": said.step_times(told), **_provenance(told)}),
    ]
    return page("Can speculation pay here?", sections, told)


def _filled(section: Section) -> bool:
    parts = (section.paragraphs, section.pictures, section.tables, section.facts)
    return any(len(part) > 0 for part in parts)


def _sides(heading: str, part: Json, baseline: str) -> Section:
    if not part["sides"]:
        return Section(heading, paragraphs=["None is left."])
    caption = f"{part['prompts']} prompts; ratios are to {baseline}, with 95 % intervals over prompts."
    return Section(heading, tables=_tables(caption, said.SIDE_HEAD, said.side_rows(part, baseline)))


def _tables(caption: str, head: Sequence[str], rows: said.Rows) -> list[Table]:
    return [Table(caption, *said.columns_used(head, rows))] if rows else []


def _categories(told: Json) -> list[Table]:
    rows = said.category_rows(told) if len(told["categories"]) > 1 else []
    return _tables("Every side on the prompts of one category.", said.CATEGORY_HEAD, rows)


def _pictures(drawn: Sequence[tuple[str | None, str]]) -> list[Picture]:
    return [Picture(svg, caption) for svg, caption in drawn if svg]


def _commands(told: Json) -> dict[str, str]:
    return dict(said.flag_rows(told))


def _facts(told: Json) -> dict[str, str]:
    facts = {"prompts": str(told["prompts_name"]), "new tokens": f"at most {told['max_new_tokens']}"}
    if told.get("pass_cost"):
        facts["passes"] = said.pass_costs(told["pass_cost"])
    for name, server in (told.get("servers") or {}).items():
        facts[str(name)] = f"{server['model']} at {server['url']}"
    return facts | _provenance(told)


def _provenance(told: Json) -> dict[str, str]:
    facts = {str(key): words.plain(value) for key, value in (told.get("provenance") or {}).items()}
    return {"eyas": str(told["eyas"]), **facts}
