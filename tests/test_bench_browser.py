"""The pages of a bench and a prediction in a real browser, by the measures of the diagnosis's page."""

from __future__ import annotations

from pathlib import Path

import pytest

import benches
from eyas.report.bench import bench_page, prediction_page
from eyas.report.diagnosis import read_back
from test_diagnosis_browser import CHROMIUM, MEASURE, Run, edited, measured, opened, run, without_policy

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not opened in a browser")
__all__ = ["run"]  # the fixture

NAMES = ("bench", "hostile", "prediction")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    pages = (bench_page(benches.told()), bench_page(benches.hostile()), prediction_page(benches.predicted()))
    for name, html in zip(NAMES, pages, strict=True):
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_opens_silently_and_nothing_in_it_runs(name: str, run: Run, folder: Path) -> None:
    page = opened(run, folder / f"{name}.html")
    assert page.console == []
    assert "img" not in [tag for tag, _ in page.tags]
    free = opened(run, edited(folder / f"{name}.html", without_policy, f"free-{name}.html"))  # escaping alone holds it
    assert "img" not in [tag for tag, _ in free.tags]
    assert free.console == []


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_shown_are_those_of_the_json_inside(name: str, run: Run, folder: Path) -> None:
    source = folder / f"{name}.html"
    script = (
        "<script>addEventListener('load', function () { document.body.setAttribute('data-read', JSON.stringify("
        "JSON.parse(document.getElementById('eyas-result').textContent))); });</script>"
    )
    page = opened(run, edited(source, lambda html: without_policy(html) + script, f"read-{name}.html"))
    told = page.attribute("data-read")
    assert told == read_back(source.read_text(encoding="utf-8"))
    rows = told["by_draft_tokens"] if name == "prediction" else list(told["all"]["sides"].values())
    for row in rows:
        shown = f"{row['perfect']:.2f}" if name == "prediction" else f"{row['tokens_per_second']:.1f}"
        assert f"<td>{shown}</td>" in page.dom


@pytest.mark.parametrize("name", NAMES)
def test_fits_a_narrow_window(name: str, run: Run, folder: Path) -> None:
    inner = edited(folder / f"{name}.html", lambda html: without_policy(html) + MEASURE, f"m-{name}.html")
    told = measured(run, inner, 360)
    assert told["width"] == 360
    assert told["scroll"] <= 360, told["wide"][:9]


def test_dark_is_dark_and_light_is_light(run: Run, folder: Path) -> None:
    script = (
        "<script>document.body.setAttribute('data-paper', "
        "JSON.stringify(getComputedStyle(document.body).backgroundColor));</script>"
    )
    page = edited(folder / "bench.html", lambda html: without_policy(html) + script, "paper.html")
    dark, light = (opened(run, page, f"--blink-settings=preferredColorScheme={scheme}") for scheme in (0, 1))
    assert dark.attribute("data-paper") == "rgb(20, 24, 28)"
    assert light.attribute("data-paper") == "rgb(255, 255, 255)"
