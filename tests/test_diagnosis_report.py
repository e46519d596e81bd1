"""The report of a diagnosis: drawn from its JSON alone, whole for any of it, and nothing from outside is obeyed."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import diagnoses
import test_report
from eyas.report import diagnosis_bound as bound
from eyas.report import diagnosis_pictures, words
from eyas.report import diagnosis_text as text
from eyas.report import diagnosis_words as told_as
from eyas.report.diagnosis import diagnosis_page, read_back
from eyas.report.diagnosis_terminal import print_diagnosis

LIMIT = 2_000_000
SECTIONS = ["fixes", "depths", "stages", "slots", "sweep", "repairs", "talk", "ruled-out", "findings", "unseen",
            "numbers", "settings", "made"]  # fmt: skip

Json = dict[str, Any]


class Page(test_report.Page):
    """Text by section, and the scripts apart."""

    def __init__(self, html: str) -> None:
        self.sections: dict[str, str] = {}
        self.head = ""
        self.scripts: list[str] = []
        self.now: str | None = None
        super().__init__(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "section":
            self.now = str(dict(attrs)["id"])
            self.sections[self.now] = ""
        elif tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
            return
        super().handle_data(data)
        if "section" in self.stack and self.now:
            self.sections[self.now] += data
        elif "header" in self.stack:
            self.head += data


@cache
def page_of(name: str) -> str:
    return diagnosis_page(diagnoses.VARIANTS[name]())


@cache
def parsed(name: str) -> Page:
    return Page(page_of(name))


def printed(told: Json, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_diagnosis(told, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def flat(told: str) -> str:
    return " ".join(told.split())


# The file


@pytest.mark.parametrize("name", diagnoses.VARIANTS)
def test_page_is_one_whole_file_that_asks_for_nothing(name: str) -> None:
    html, page = page_of(name), parsed(name)
    assert html.startswith("<!doctype html>")
    assert page.names().isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form", "audio", "video"})
    for tag, attributes in page.tags:
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            assert key != "src", tag
            if key.endswith("href"):
                assert (value or "").startswith("#"), value
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style is not None
    assert not re.search(r"@import|url\(", style[1])


@pytest.mark.parametrize("name", diagnoses.VARIANTS)
def test_only_the_one_script_may_run(name: str) -> None:
    page = parsed(name)
    assert len(page.scripts) == 2
    policy = next(str(a["content"]) for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    kinds = [a.get("type") for tag, a in page.tags if tag == "script"]
    assert kinds == ["application/json", None]


@pytest.mark.parametrize("name", diagnoses.VARIANTS)
def test_page_is_small(name: str) -> None:
    assert len(page_of(name).encode("utf-8")) < LIMIT  # and can be written: no half of a surrogate pair is left


def test_parts_come_in_order() -> None:
    assert list(parsed("two_faults").sections) == SECTIONS
    assert list(parsed("died").sections) == [s for s in SECTIONS if s not in ("slots", "sweep")]


def test_contents_lead_somewhere_and_ids_are_unique() -> None:
    for name in diagnoses.VARIANTS:
        page = parsed(name)
        ids = [str(a["id"]) for _, a in page.tags if a.get("id")]
        assert len(ids) == len(set(ids))
        for _, attributes in page.tags:
            for key in ("href", "xlink:href", "data-copies", "aria-describedby"):
                if value := attributes.get(key):
                    assert value.removeprefix("#") in ids, value


def test_keyboard_reaches_everything() -> None:
    page = parsed("two_faults")
    assert next(a for tag, a in page.tags if tag == "a")["class"] == "skip"
    assert len([1 for tag, _ in page.tags if tag == "button"]) == 3  # two fixes, the command
    scrolled = [a for _, a in page.tags if a.get("class") in ("wide", "box")]
    assert len(scrolled) > 8
    assert all(a.get("tabindex") == "0" for a in scrolled)
    assert ":focus-visible" in page_of("two_faults")
    hidden = [a for tag, a in page.tags if tag == "button"]
    assert all("hidden" in a for a in hidden), "without the script a button would do nothing"


def test_same_result_same_page() -> None:
    assert diagnosis_page(diagnoses.healthy()) == page_of("healthy")


def test_printing_is_light_and_dark_is_for_screens() -> None:
    html = page_of("healthy")
    assert "@media screen and (prefers-color-scheme: dark)" in html
    assert "@media print" in html
    assert "currentColor" in html
    assert "#010203" not in html


# What it says


@pytest.mark.parametrize("name", ["two_faults", "healthy", "attached", "bundle"])
def test_numbers_are_those_of_the_json_inside(name: str) -> None:
    told, page = read_back(page_of(name)), parsed(name)
    for side in ("expected", "observed"):
        value = told[side]["accept_length"]
        assert f"{value['value']:.2f}" in page.head
        assert f"{value['low']:.2f} to {value['high']:.2f}" in page.head
        for depth in told[side]["depths"]:
            for which in ("joint", "conditional"):
                rate = depth[which]
                cell = f"{rate['rate']:.3f}\n{rate['low']:.3f} to {rate['high']:.3f}\n{rate['hits']:,} of {rate['n']:,}"
                assert cell in page.sections["depths"]
    for depth in told["gap"]["depths"]:
        cell = f"{depth['value']:+.3f}\n{depth['low']:+.3f} to {depth['high']:+.3f}"
        assert cell in page.sections["depths"]
    assert f"{told['gap']['value']:.2f}" in page.head
    for setting in told["engine"]["resolved"]:
        assert setting in page.sections["settings"]


def test_json_inside_is_the_result() -> None:
    given, inside = diagnoses.two_faults(), dict(read_back(page_of("two_faults")))
    page = inside.pop("page")
    assert page["left_out"] == []
    for told in inside["conversations"]:
        assert told.pop("rounds_left_out") == 0
    given.pop("slices")
    inside.pop("slices", None)
    assert inside == given


def test_faults_are_told() -> None:
    told, page = diagnoses.two_faults(), parsed("two_faults")
    assert "miswired" in page.head
    assert told["findings"][0]["summary"] in page.head
    assert f"Also: {told['findings'][1]['summary']}" in page.head
    assert told["findings"][2]["summary"] not in page.head
    for finding in told["findings"][:2]:
        assert finding["fix"] in page.sections["fixes"]
    assert told["findings"][2]["fix"].split("`")[0] not in page.sections["fixes"]  # a note is no fix to make
    assert told["divergence"]["what"] in page.sections["stages"]
    assert "+0.90; then feedback-post-norm: +0.60; what remains is the drafter: 2.71, as expected." in flat(
        page.sections["repairs"]
    )
    for row in told["ruled_out"]:
        assert row["by"] in page.sections["ruled-out"]
    for finding in told["findings"]:
        assert finding["summary"] in page.sections["findings"]
        assert all(rival["would_separate"] in page.sections["findings"] for rival in finding["rivals"])
    assert told["engine"]["unseen"][0] in page.sections["unseen"]
    assert told["toggles"][1]["outcome"] in page.sections["repairs"]


def test_fixes_stand_in_the_order_of_the_repairs() -> None:
    told = diagnoses.two_faults()
    told["repairs"].reverse()
    assert [f["cause"] for f in told_as.fixes(told)] == ["feedback-post-norm", "taps-off-by-one"]


def test_each_stage_has_its_state_and_only_one_is_first() -> None:
    page = parsed("two_faults")
    cards = [str(a["class"]) for tag, a in page.tags if tag == "li" and "stage" in str(a.get("class"))]
    states = ["equal"] * 3 + ["differs"] * 3 + ["equal"] + ["differs"] * 2 + ["equal"] * 2
    assert [c.split()[1] for c in cards] == states
    assert [i for i, c in enumerate(cards) if "first" in c] == [3]


def test_a_stage_that_was_not_seen_says_so() -> None:
    told = diagnoses.two_faults()
    told["probes"]["fused"] = None
    told["probes"]["states"] = {"status": "not seen"}
    told["probes"]["tokens"] = {"status": "unknown", "rows": None, "equal": None, "shift": None}
    stages = {s["key"]: s for s in told_as.stages(told)}
    assert stages["fused"]["status"] == stages["states"]["status"] == "not seen"
    assert stages["tokens"]["number"] == "– of – rows"
    assert "unseen" in diagnosis_page(told)


@pytest.mark.parametrize(
    ("stage", "told", "number"),
    [
        ("prompt", {"requests": 3, "equal": 2, "first": {"request": 1, "position": 17, "fed": 198, "expected": 2}},
         "2 of 3 requests; request 1 at 17: fed 198, expected 2"),
        ("tokens", {"rows": 1000, "equal": 0, "shift": 0}, "0 of 1,000 rows, the token at +0"),
        ("positions", {"rows": 10, "offset": -1, "step": 0}, "offset -1, step 0, 10 rows"),
        ("taps", {"configured": [3, 16, 28], "observed": [3, None, "final"]},
         "3, unknown, final; configured 3, 16, 28"),
        ("acceptance", {"rounds": 9, "as_greedy": 7, "more": 2, "fewer": 0},
         "7 of 9 rounds as greedy; 2 kept more, 0 fewer"),
        ("metrics", {"counted": {"rounds": 9, "accepted": [3, 1]}, "page": {"rounds": 8, "accepted": [3, 1]}},
         "8 rounds, 4 kept; counted 9 rounds, 4 kept"),
        ("metrics", {"counted": {"rounds": 9, "accepted": [3]}, "page": None}, "–; counted 9 rounds, 3 kept"),
    ],
)  # fmt: skip
def test_numbers_of_stages(stage: str, told: Json, number: str) -> None:
    stages = told_as.stages({"probes": {stage: {"status": "differs", **told}}})
    assert next(s["number"] for s in stages if s["key"] == stage) == number


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("two_faults", "vLLM reads taps 4, 17, 29 where the drafter was trained on taps 3, 16, 28."),
        ("healthy", "vLLM 0.32.0 keeps 2.70 tokens a round; these files give 2.71. Nothing is lost on the way."),
        ("died", "vLLM stops at its command line: --speculative-config is not valid JSON."),
    ],
)
def test_verdict_in_one_sentence(name: str, told: str) -> None:
    assert told_as.headline(diagnoses.VARIANTS[name]()) == told


def test_verdict_without_findings() -> None:
    told = diagnoses.attached() | {"findings": []}
    assert told_as.headline(told).startswith("Not decided: inside the engine: it was already running")
    assert "1.21" in told_as.headline(told | {"verdict": "weak"})
    assert told_as.headline({"verdict": "healthy"}) == words.MEANING["healthy"]
    assert told_as.headline({}) == "There is no verdict."


def test_a_gap_within_chance_is_not_called_lost() -> None:
    assert "lost each round" in parsed("two_faults").head
    assert "not told from chance" in parsed("healthy").head


def test_doubt_is_told_where_there_are_rivals() -> None:
    assert "taps-off-by-one, feedback-post-norm are not excluded" in parsed("attached").head
    assert "Not certain" not in parsed("two_faults").head


def test_pictures_are_told_in_words_and_mark_the_taps() -> None:
    labels = [str(a["aria-label"]) for tag, a in parsed("two_faults").tags if tag == "svg"]
    assert len(labels) == 6
    assert "slot 1: configured 16, observed 17" in " ".join(labels)
    assert "as it runs now: 1.21; taps-off-by-one: 2.11; feedback-post-norm: 2.71" in " ".join(labels)
    assert "expected: 0.65 at 0" in " ".join(labels)


def test_cells_of_the_matrix_are_in_a_table() -> None:
    told, page = diagnoses.two_faults(), parsed("two_faults")
    for row in told["probes"]["taps"]["error"]:
        for error in row:
            assert f"{error:.4f}" in page.sections["slots"]


# Conversations


def test_each_drafted_token_is_kept_or_rejected_without_colour() -> None:
    told, page = diagnoses.two_faults(), parsed("two_faults")
    tokens = [d for c in told["conversations"] for r in c["rounds"] for d in r["drafted"]]
    kept = sum(d["kept"] for d in tokens)
    marks = [(tag, a) for tag, a in page.tags if tag in ("ins", "del") and a.get("title")]
    assert sum(tag == "ins" for tag, _ in marks) == kept
    assert sum(tag == "del" for tag, _ in marks) == len(tokens) - kept
    assert {a["title"] for tag, a in marks if tag == "ins"} == {"kept"}
    for title in (str(a["title"]) for tag, a in marks if tag == "del"):
        assert re.fullmatch(r"rejected( with it)?; wanted “.*”, (rank \d+|not among those seen)", title, re.S)
    assert "text-decoration: underline" in page_of("two_faults")
    assert "text-decoration: line-through" in page_of("two_faults")


def test_a_round_says_what_was_wanted_and_where_it_stood() -> None:
    rejected = {"text": " cat", "kept": False, "wanted": " dog", "rank": 2}
    kept = {"text": "A", "kept": True, "wanted": None, "rank": None}
    html = str(text.round_html({"drafted": [kept, rejected], "bonus": " dog"}))
    assert '<ins title="kept">A</ins>' in html
    assert '<del title="rejected; wanted “·dog”, rank 2"><i>·</i>cat</del>' in html
    assert "<i>·</i>dog<sup>rank 2</sup></b>" in html
    assert "<sup>wanted" not in html
    sampled = str(text.round_html({"drafted": [rejected], "bonus": " cow"}))
    assert "<sup>wanted <i>·</i>dog</sup>" in sampled
    unranked = str(text.round_html({"drafted": [rejected | {"rank": None}], "bonus": " dog"}))
    assert "no rank" in unranked
    assert "<sup>" not in str(text.round_html({"drafted": [kept], "bonus": "!"}))


def test_blanks_and_marks_without_shape_are_shown() -> None:
    assert str(text.visible(" a\n\t")) == "<i>·</i>a<i>↵</i><i>⇥</i>"
    for c in "\u202e\u2028\u200b\u00a0\x00\ud83d\u3000":
        assert str(text.visible(c)) == f"<i>U+{ord(c):04X}</i>"
    assert str(text.visible("模型é👩<b>")) == "模型é👩&lt;b&gt;"
    assert str(text.as_said("a b\n<")) == "a b\n&lt;"


def test_every_rejected_token_is_in_a_table() -> None:
    told = diagnoses.two_faults()["conversations"][0]
    rows = text.rejected_rows(told)
    tokens = [d for r in told["rounds"] for d in r["drafted"]]
    assert len(rows) == sum(not d["kept"] for d in tokens) > 20


def test_a_bundle_has_no_texts_and_says_why() -> None:
    assert "carries no texts" in parsed("bundle").sections["talk"]
    assert "ins" not in parsed("bundle").names()
    assert "No conversations" in parsed("attached").sections["talk"]


# Bounds


def test_what_is_left_out_is_counted() -> None:
    inside, page = read_back(page_of("huge")), parsed("huge")
    shown = inside["page"]["conversations"]
    assert shown["of"] == 64
    assert 4 <= shown["shown"] == len(inside["conversations"]) <= bound.CONVERSATIONS
    assert f"{shown['shown']} of 64 conversations are shown" in flat(page.sections["talk"])
    assert "readings of the sweep" in page.sections["made"]
    assert "long texts or entries of long lists, cut short" in page.sections["made"]
    assert "Left out" not in parsed("two_faults").sections["made"]


def test_rounds_that_do_not_fit_are_counted() -> None:
    told = diagnoses.two_faults()
    token = {"text": "<" * 200, "kept": False, "wanted": "\u202e" * 200, "rank": 1}
    one = {"drafted": [token] * 8, "bonus": "&" * 200}
    told["conversations"] = [{"id": "long", "prompt": "x" * 90_000, "first": "a", "rounds": [one] * 1000}] * 2
    html = diagnosis_page(told)
    assert len(html.encode()) < LIMIT
    inside = read_back(html)["conversations"]
    left_out = 1000 - len(inside[0]["rounds"])
    assert inside[0]["rounds_left_out"] == left_out > 0
    assert f"{left_out:,} more rounds are not shown" in Page(html).sections["talk"]
    assert inside[0]["prompt"].endswith("… (88,000 more)")


@pytest.mark.parametrize("filler", ["<&\"'>" * 600, "\u202e" * 3000, "模" * 3000])
def test_no_text_makes_the_page_large(filler: str) -> None:
    def stuffed(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: stuffed(v) if k not in ("verdict", "severity") else v for k, v in value.items()}
        if isinstance(value, list):
            return [stuffed(v) for v in value] * (1 if len(value) > 5 else 5)
        return filler if isinstance(value, str) else value

    told = stuffed(diagnoses.two_faults())
    told["provenance"] = {f"{i}{filler}": filler for i in range(100)}
    assert len(diagnosis_page(told).encode()) < LIMIT


def test_deep_json_ends() -> None:
    deep: Json = {}
    for _ in range(300):
        deep = {"deeper": deep}
    html = diagnosis_page(diagnoses.healthy() | {"provenance": {"a": deep}})
    assert "cut short" in Page(html).sections["made"]


# Nothing from outside is obeyed


def test_hostile_text_is_only_text() -> None:
    html, page = page_of("hostile"), parsed("hostile")
    assert "img" not in page.names()
    assert len(page.scripts) == 2
    assert len(re.findall("<script", html)) == 2
    assert "<!--" not in page.scripts[0]
    assert page.text.count("onerror=alert(1)") > 40
    assert page.text.count("{{7*7}}") > 40  # a template that obeyed would have written 49
    assert page.text.count("{% raw %}") == page.text.count("{{7*7}}")
    for c in "\u2028\u2029\u202e\x00\x1b":
        assert c not in html, f"U+{ord(c):04X}"
    # the text itself survives in the JSON, as it was
    assert read_back(html)["checkpoint"] == f"drafter {diagnoses.HOSTILE}"


def test_data_cannot_leave_its_element() -> None:
    data = str(bound.embedded({"a": "</script><!--&\u2028\u2029\ud83d"}))
    assert data == '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026\\u2028\\u2029\\ud83d"}'


def test_hostile_text_is_not_obeyed_by_a_terminal() -> None:
    told = printed(diagnoses.hostile())
    assert max(map(cell_len, told.splitlines())) <= 80
    assert not re.search("[\x00\x1b\u202e\u2028\ud83d]", told)
    assert "[red]x[/red]" in flat(told)


def test_numbers_json_does_not_have_become_null() -> None:
    told = diagnoses.two_faults()
    told["probes"]["fused"]["error"] = float("nan")
    told["probes"]["taps"]["error"][0][3] = float("inf")
    html = diagnosis_page(told)
    assert read_back(html)["probes"]["fused"]["error"] is None
    assert "error –" in Page(html).sections["stages"]


# Whatever is missing


def keys(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the result, but inside check's own sweep and curves, which are never cut in half."""
    found = [at] if at else []
    if isinstance(value, dict):
        for key, item in value.items():
            if at or key not in ("sweep", "curves", "accept_length", "found", "configured", "states"):
                found += keys(item, (*at, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        found += keys(value[0], (*at, 0))
    return found


def without(told: Json, at: tuple[Any, ...], *, null: bool) -> Json:
    told = copy.deepcopy(told)
    inside: Any = told
    for key in at[:-1]:
        inside = inside[key]
    if null or isinstance(at[-1], int):
        inside[at[-1]] = None if null else {}
    else:
        del inside[at[-1]]
    return told


def small() -> Json:
    told = diagnoses.two_faults() | {"sweep": None, "curves": {}, "accept_length": []}
    for key in ("repairs", "ruled_out", "toggles"):
        told[key] = told[key][:1]
    told["conversations"] = told["conversations"][3:4]
    told["probes"]["taps"] |= {key: [row[:2] for row in told["probes"]["taps"][key]] for key in ("error", "cosine")}
    return told


# A depth is counted from 0 and a list of depths has numbers; what a check always writes is not missing either.
NEVER = {
    "depth",
    "measure",
    "value",
    "expected",
    "source",
    "evidence",
    "rivals",
    "cause",
    "would_separate",
    "what",
    "why",
}


@pytest.mark.parametrize("null", [True, False])
def test_any_one_key_may_be_missing(null: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_pictures, "as_svg", lambda *_: "<svg></svg>")  # drawing takes most of the time
    monkeypatch.setattr(diagnosis_pictures.pictures, "draw", lambda *_, **__: "<svg></svg>")
    told = small()
    tried = 0
    for at in keys(told):
        if isinstance(at[-1], int) or (at[-1] in NEVER and len(at) > 1):
            continue
        cut = without(told, at, null=null)
        printed(cut)
        if not null and len(at) > 2 and at[0] != "findings":
            continue  # the tables ask for a key and its null in one way; the template itself goes no deeper
        with monkeypatch.context() as patch:
            if at[0] != "repairs" and at[:2] != ("probes", "taps"):
                patch.setattr(diagnosis_pictures, "slot_picture", lambda *_: None)
                patch.setattr(diagnosis_pictures, "repair_picture", lambda *_: None)
            diagnosis_page(cut)
        tried += 1
    assert tried > 40


@pytest.mark.parametrize("key", ["expected", "observed", "gap", "probes", "repairs", "sweep"])
def test_a_page_without_one_part(key: str) -> None:
    Page(diagnosis_page(diagnoses.two_faults() | {key: None}))


def test_an_empty_result_makes_a_page() -> None:
    page = Page(diagnosis_page({}))
    assert "undecided" in page.head
    assert "Nothing inside the engine was seen" in page.sections["stages"]
    assert "svg" not in page.names()
    assert printed({}).startswith("UNDECIDED")
    nulls = dict.fromkeys(diagnoses.two_faults())
    assert "undecided" in Page(diagnosis_page(nulls)).head
    assert printed(nulls)


# Terminal


def test_terminal_says_it_in_order() -> None:
    told = printed(diagnoses.two_faults())
    parts = ["MISWIRED", "vLLM reads taps 4, 17, 29", "Tokens a round: observed 1.21", "Expected and observed",
             "Where engine and reference part", "first: Taps", "What each repair gives", "Findings", "Ruled out",
             "Not checked"]  # fmt: skip
    places = [told.index(part) for part in parts]
    assert places == sorted(places)
    assert max(map(len, told.splitlines())) <= 80
    assert "0.646 / 0.141" in told
    assert "621 to 0.671" in told


def test_terminal_loads_no_pictures() -> None:
    code = (
        "import sys, eyas.report.diagnosis_terminal as t\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib'\n"
        "import eyas.report.diagnosis\n"
        "bad = {'torch', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
