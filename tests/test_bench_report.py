"""The report of a bench and of a prediction: every number is the JSON's, nothing from outside is obeyed."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import benches
from eyas.report import bench_text
from eyas.report import bench_words as said
from eyas.report.bench import bench_page, prediction_page
from eyas.report.diagnosis import read_back
from test_report import Page


def printed(show: Callable[..., None], told: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    show(told, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def outputs(told: dict[str, Any]) -> dict[str, str]:
    page = Page(bench_page(told))
    markdown = bench_text.bench_markdown(told).replace("\\", "")
    return {"terminal": printed(bench_text.print_bench, told), "markdown": markdown, "page": page.text}


@pytest.mark.parametrize("where", ["terminal", "markdown", "page"])
def test_every_number_is_the_jsons(where: str) -> None:
    told = benches.told()
    text = outputs(told)[where]
    for side in told["all"]["sides"].values():
        assert f"{side['tokens_per_second']:.1f}" in text
        assert f"{side['median_tokens_per_second']:.1f}" in text
        assert said.ratio(side["ratio"], alone=side["ratio"]["low"] == 1.0) in text
        if side["bound"] is not None:
            assert f"{side['bound']:.2f}" in text
            assert f"{side['accept_length']['value']:.3f}" in text
    for part in told["categories"]:
        assert part["category"] in text
    assert "Recommended: chain 2" in text
    for each in told["recommendation"]["engines"]:
        assert each["flags"] in text
    assert "2 requests had to be repeated" in text
    assert "answers came from other" in text


def test_the_page_carries_the_json_it_was_drawn_from() -> None:
    for told, draw in ((benches.told(), bench_page), (benches.hostile(), bench_page),
                       (benches.predicted(), prediction_page)):  # fmt: skip
        assert read_back(draw(told)) == told


@pytest.mark.parametrize("make", [benches.told, benches.hostile, benches.predicted])
def test_pages_are_whole_and_load_nothing(make: Callable[[], dict[str, Any]]) -> None:
    told = make()
    html = (prediction_page if "conclusion" in told else bench_page)(told)
    page = Page(html)
    assert page.names().isdisjoint({"img", "link", "iframe", "object", "form"})
    assert [dict(a).get("type") for tag, a in page.tags if tag == "script"] == ["application/json"]
    assert "default-src 'none'" in html
    assert not re.search(r"""(?:src|href)=["'](?!#)""", html)
    drawings = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(drawings) == (2 if "conclusion" in told else 4)
    for svg in drawings:
        ET.fromstring(svg)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_hostile_text_is_obeyed_nowhere() -> None:
    told = benches.hostile()
    html = bench_page(told)
    assert "<img" not in html
    assert "\u202e" not in Page(html).text.replace(json.dumps(told), "")
    markdown = bench_text.bench_markdown(told)
    assert "\u202e" not in markdown
    assert not re.search(r"(?<!\\)<", re.sub(r"`[^`\n]*`", "", markdown))
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", line)) for line in rows if "chain" in line and "`" not in line}
    assert counts == {len(said.columns_used(said.SIDE_HEAD, said.side_rows(told["all"], "plain"))[0]) + 1, 7}


def test_a_markdown_table_is_one() -> None:
    lines = bench_text.bench_markdown(benches.told()).splitlines()
    table = [line for line in lines if line.startswith("| ")][7:]  # after the flags
    assert table[0].startswith("| side | tokens/s |")
    assert set(table[1]) <= set("|- ")
    assert table[1].count("|") == table[0].count("|") == table[2].count("|")


def test_no_speculation_and_no_recommendation_are_said() -> None:
    told = benches.told()
    told["recommendation"]["setting"]["draft_tokens"] = 0
    told["recommendation"]["side"] = "plain"
    assert said.recommended(told)[0].startswith("Recommended: no speculation.")
    told["recommendation"] = None
    assert said.recommended(told) == []
    assert "No setting is recommended" in Page(bench_page(told)).text
    assert "Recommended" not in bench_text.bench_markdown(told)


def test_what_is_not_sure_is_said() -> None:
    told = benches.told()
    told["recommendation"] |= {"sure": False, "fastest_share": {"plain": 0.4, "chain 2": 0.6}}
    assert "Not sure: the fastest on resampled prompts is plain 40%, chain 2 60%." in said.recommended(told)


@pytest.mark.parametrize(
    ("conclusion", "words"),
    [
        ("cannot", "Speculation cannot pay here: a drafter of this cost that is always right would reach 2.96"),
        ("can", "can pay here, if"),
        ("loses", "loses here"),
        ("may", "may pay here"),
        ("pays", "Speculation pays here. Expected at best: 1.37 times plain decoding, with 2 drafted tokens."),
    ],
)
def test_a_prediction_says_its_conclusion_first(conclusion: str, words: str) -> None:
    told = benches.predicted() | {"conclusion": conclusion}
    assert words in said.predicted(told)[0]
    assert words in Page(prediction_page(told)).text
    first = bench_text.prediction_markdown(told).splitlines()[2]
    assert words in first.replace("\\", "")


def test_a_predictions_rows_are_the_jsons() -> None:
    told = benches.predicted()
    texts = (printed(bench_text.print_prediction, told), Page(prediction_page(told)).text)
    for row in told["by_draft_tokens"]:
        for text in texts:
            assert f"{row['break_even']:.2f}" in text
            assert f"{row['perfect']:.2f}" in text
            assert not row["ratio"] or f"{row['ratio']['value']:.2f}" in text


def test_an_interrupted_bench_without_clean_prompts_prints() -> None:
    told = benches.told() | {"interrupted": True, "without_loops": {"prompts": 0, "sides": {}}, "categories": []}
    for text in outputs(told).values():
        assert "Interrupted" in text
