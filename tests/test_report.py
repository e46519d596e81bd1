"""Reports: what is printed follows from the result, and nothing from outside is obeyed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from eyas.report.page import Picture, Section, check_page, page, training_picture
from eyas.report.terminal import as_json, print_check
from eyas.results import (
    CheckResult,
    CurveCounts,
    Evidence,
    Finding,
    LengthCounts,
    NotChecked,
    Rival,
    Verdict,
)

ATTACK = "<script>alert(1)</script>"
VOID = {"meta", "br", "img", "link", "input", "hr", "use", "path"}


def curve(seed: int, rate: float = 0.7, depths: int = 4) -> CurveCounts:
    rng = np.random.default_rng(seed)
    rounds = rng.integers(20, 40, size=60)
    alive, columns = rounds, []
    for _ in range(depths):
        alive = rng.binomial(alive, rate)
        columns.append(alive)
    joint = np.stack(columns, axis=1)
    n = np.repeat(rounds[:, None], depths, axis=1)
    return CurveCounts(
        "target", rounds, rng.binomial(rounds, 0.9), n, np.concatenate([n[:, :1], joint[:, :-1]], 1), joint
    )


def lengths(walk: CurveCounts) -> list[LengthCounts]:
    rounds = walk.n[:, 0]
    return [LengthCounts(k, rounds, walk.joint[:, :k].sum(1)) for k in range(1, walk.depths + 1)]


def result(verdict: Verdict = "miswired", name: str = "drafter-a", **changes: Any) -> dict[str, Any]:
    walk = curve(0)
    finding = Finding(
        "taps-off-by-one",
        "fatal",
        "Lowering every tap by one restores the curve.",
        [Evidence("top-1 at depth 0", 0.1234567, 0.61, "300 held-out records")],
        rivals=[Rival("token-shift-two", "a token sweep")],
    )
    fields: dict[str, Any] = {
        "accept_length": lengths(walk),
        "findings": [finding],
        "not_checked": [NotChecked("engine", "no log was given")],
        "provenance": {"torch": "2.6"},
        "seconds": 12.34,
    }
    told = CheckResult(name, "target-b", verdict, curve(1, 0.8), walk, **(fields | changes)).to_json()
    return json.loads(as_json(told))  # what a reader of the file would have


def printed(told: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_check(told, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Page(HTMLParser):
    """Collects tags and text; fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.stack == [], f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.stack.pop() == tag, f"</{tag}> does not nest"

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] != "style":
            self.text += data

    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}


# Terminal


def test_the_verdict_comes_first_with_its_meaning() -> None:
    first = printed(result()).splitlines()[0]
    assert first.startswith("MISWIRED")
    assert "disagree" in first


@pytest.mark.parametrize("verdict", ["broken", "miswired", "undecided", "weak", "healthy"])
def test_every_verdict_is_explained(verdict: Verdict) -> None:
    assert re.match(rf"{verdict.upper()}  [A-Z].*\.", printed(result(verdict)))


def test_the_numbers_are_all_there() -> None:
    told = result()
    text = printed(told)
    for depth in told["curves"]["walk"]["depths"]:
        for which in ("joint", "conditional"):
            rate = depth[which]
            assert f"{rate['rate']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})" in text
            assert f"{rate['hits']:,} of {rate['n']:,}" in text
    for depth in told["curves"]["teacher_forced"]["depths"]:
        assert f"{depth['conditional']['rate']:.3f} (" in text
    for length in told["accept_length"]:
        assert f"{length['value']:.3f}" in text
        assert f"{length['rounds']:,}" in text
    for piece in (
        "taps-off-by-one",
        "0.1235, expected 0.61 (300 held-out records)",
        "no log was given",
        "token sweep",
    ):
        assert piece in text, piece
    assert "fix: Lower every id" in text
    assert f"{told['curves']['walk']['coverage']['rate']:.3f}" in text


def test_a_result_without_curves_prints() -> None:
    told = CheckResult("d", None, "broken", None, None, findings=[Finding("weights-nan", "fatal", "s")]).to_json()
    text = printed(told)
    assert text.startswith("BROKEN")
    assert "depth" not in text
    told = CheckResult("d", None, "undecided", curve(0), None).to_json()
    assert "No findings." in printed(told)


def test_outside_text_is_printed_not_obeyed() -> None:
    hostile = "[red]x[/red] [link=file:///etc] \x1b[2J\x07"
    found = Finding("taps-off-by-one", "fatal", hostile, [Evidence(hostile, hostile, None, hostile)])
    text = printed(result(findings=[found], not_checked=[NotChecked(hostile, hostile)]), width=400)
    assert text.count("[red]x[/red]") == 7
    assert "\x1b" not in text
    assert "\x07" not in text


def test_narrow_terminals_wrap() -> None:
    assert max(len(line) for line in printed(result(), width=60).splitlines()) <= 60


# JSON


def test_json_has_no_nan_and_no_numpy() -> None:
    text = as_json({"a": float("nan"), "b": [np.float32("inf"), np.int64(3)], "c": np.array([1.5, np.nan]), 4: True})
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": None, "b": [None, 3], "c": [1.5, None], "4": True
    }  # fmt: skip


# The page


def test_page_is_one_whole_file() -> None:
    html = check_page([result()])
    parsed = Page(html)
    assert html.startswith("<!doctype html>")
    assert parsed.names().isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "a"})
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            if name.startswith("xmlns"):
                continue
            assert not re.search(r"(https?:)?//", value or ""), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
            if name.endswith("href") or name == "src":
                assert value is not None
                assert value.startswith("#")
    assert not re.search(r"@import|url\((?!#)", html)


def test_page_is_for_phones_and_dark_rooms() -> None:
    html = check_page([result()])
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html
    svg = html[html.index("<svg") : html.index("</svg>")]
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert "#040506" not in svg
    assert "#8a939c55" in svg
    assert not re.search(r'<svg[^>]* (width|height)="', html)


def test_pictures_have_words_captions_and_unique_ids() -> None:
    parsed = Page(check_page([result(), result("healthy", "drafter-c")]))
    pictures = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(pictures) == len([1 for tag, _ in parsed.tags if tag == "figcaption"]) == 2
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert "drafter-c: " in (attributes["aria-label"] or "")
    ids = [attributes["id"] for _, attributes in parsed.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)) > 10
    for _, attributes in parsed.tags:  # what is referred to exists
        for value in attributes.values():
            for used in re.findall(r"(?:url\(#|^#)([^)]+)\)?$", value or ""):
                assert used in ids or re.fullmatch(r"[0-9a-f]{3,8}", used), used
    assert "drafter-c" in parsed.text
    assert "95 % intervals" in parsed.text


def test_pictures_are_the_same_every_time() -> None:
    assert check_page([result()]) == check_page([result()])


def test_text_from_outside_is_escaped() -> None:
    found = Finding("taps-off-by-one", "fatal", ATTACK, [Evidence(ATTACK, ATTACK, ATTACK, ATTACK)], fix=ATTACK)
    told = result(
        name=f"{ATTACK} $\\frac$ -->",
        findings=[found],
        not_checked=[NotChecked(ATTACK, ATTACK)],
        provenance={ATTACK: ATTACK},
    )
    for html in (check_page([told]), check_page([told, result()])):
        parsed = Page(html)
        assert "script" not in parsed.names()
        assert "<script" not in html
        assert parsed.text.count("alert(1)") >= 8  # shown, as text
    assert "bell" in Page(page("bell\x07", [])).text


def test_the_page_holds_the_numbers() -> None:
    told = result()
    text = Page(check_page([told])).text
    for depth in told["curves"]["walk"]["depths"]:
        assert f"{depth['joint']['rate']:.3f} (" in text
        assert f"{depth['conditional']['hits']:,} of {depth['conditional']['n']:,}" in text
    assert f"{told['accept_length'][3]['value']:.3f}" in text
    assert "Lower every id" in text
    assert "no log was given" in text
    assert "miswired" in text


def test_a_drafter_without_walk_is_compared_teacher_forced() -> None:
    other = CheckResult("no-walk", "t", "undecided", curve(3), None).to_json()
    assert "teacher-forced curve" in Page(check_page([result(), other])).text
    assert "teacher-forced curve" not in Page(check_page([result(), result()])).text


def test_a_result_without_curves_makes_a_page() -> None:
    told = CheckResult("d", None, "broken", None, None, findings=[Finding("weights-nan", "fatal", "s")]).to_json()
    parsed = Page(check_page([told]))
    assert "svg" not in parsed.names()
    assert "weights-nan" in parsed.text


def test_names_in_any_script_are_shown() -> None:
    assert "模型" in Page(check_page([result(name="模型"), result(name="_hidden")])).text
    assert "_hidden</text>" in check_page([result(name="模型"), result(name="_hidden")])


def test_training_picture() -> None:
    points = [
        {"tokens": 1_000_000 * k, "minutes": 2.0 * k, "value": 1 + 0.1 * k, "low": 1.0, "high": 2.5}
        for k in range(1, 6)
    ]
    svg = training_picture(points)
    root = ET.fromstring(svg)
    assert "million tokens" in svg
    assert "1.50 at 5" in root.attrib["aria-label"]
    minutes = training_picture([{"minutes": 3.0, "value": 1.2}, {"minutes": 6.0, "value": None}])
    assert "minutes of training" in minutes
    Page(page("t", [Section("Training", pictures=[Picture(svg, "c"), Picture(minutes, "c")])]))
    assert "no points" in training_picture([])


def test_no_module_of_facts_imports_torch() -> None:
    code = (
        "import sys, eyas.causes, eyas.results, eyas.report.words, eyas.report.terminal\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib'\n"
        "import eyas.report.page\n"
        "bad = {'torch', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
