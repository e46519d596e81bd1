"""The page of a diagnosis in a real browser: it opens, says nothing wrong, obeys no text, fits a phone, prints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import diagnoses
from eyas.report.diagnosis import diagnosis_page, read_back

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not opened in a browser")

# No sandbox, for tests run as root in containers; nothing that talks to a network.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--hide-scrollbars",
)  # fmt: skip
MEASURE = """<script>addEventListener("load", function () {
  var told = {width: innerWidth, scroll: document.documentElement.scrollWidth, wide: []};
  document.querySelectorAll("body *").forEach(function (e) {
    if (e.closest(".wide, svg, .skip, pre")) { return; }
    if (e.getBoundingClientRect().right > innerWidth + 1) { told.wide.push(e.tagName + "." + e.className); }
  });
  document.body.setAttribute("data-measured", JSON.stringify(told));
});</script>"""


@dataclass
class Opened:
    """What the browser made of a page, and what its console said."""

    dom: str
    console: list[str]

    def __post_init__(self) -> None:
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attrs: self.tags.append((tag, dict(attrs)))  # type: ignore[method-assign]
        parser.feed(self.dom)

    def attribute(self, name: str) -> Any:
        return json.loads(next(str(a[name]) for _, a in self.tags if name in a))


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def run(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        profile = tmp_path_factory.mktemp("profile")
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, errors="replace")
        shutil.rmtree(profile, ignore_errors=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, made in diagnoses.VARIANTS.items():
        (folder / f"{name}.html").write_text(diagnosis_page(made()), encoding="utf-8")
    return folder


def opened(run: Run, page: Path, *flags: str) -> Opened:
    done = run(page, "--dump-dom", *flags)
    return Opened(done.stdout, re.findall(r"CONSOLE[^\n]*", done.stderr))


def edited(page: Path, edit: Callable[[str], str], name: str) -> Path:
    copy = page.with_name(name)
    copy.write_text(edit(page.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


def without_policy(html: str) -> str:
    free, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    assert count == 1
    return free


@pytest.mark.parametrize("name", diagnoses.VARIANTS)
def test_opens_and_its_console_is_silent(name: str, run: Run, folder: Path) -> None:
    page = opened(run, folder / f"{name}.html")
    assert page.console == []
    assert "Skip to the report" in page.dom


def test_the_console_is_heard(run: Run, folder: Path) -> None:
    """Else a silent console would prove nothing."""
    healthy = folder / "healthy.html"
    thrown = edited(healthy, lambda html: without_policy(html) + "<script>throw new Error('heard')</script>", "t.html")
    assert any("heard" in line for line in opened(run, thrown).console)
    barred = edited(healthy, lambda html: html + "<script>document.title = 'owned'</script>", "barred.html")
    page = opened(run, barred)
    assert any("Content Security Policy" in line for line in page.console)
    assert "<title>owned" not in page.dom


def test_the_one_script_runs_under_the_policy(run: Run, folder: Path) -> None:
    page = opened(run, folder / "two_faults.html")
    buttons = [a for tag, a in page.tags if tag == "button"]
    assert len(buttons) == 3
    assert all("hidden" not in a for a in buttons)
    changed = edited(folder / "two_faults.html", lambda html: html.replace('"use strict";', '"use strict" ;'), "c.html")
    page = opened(run, changed)
    assert page.console, "a script that is not the one the policy names must not run"
    assert all("hidden" in a for tag, a in page.tags if tag == "button")


def test_hostile_text_is_obeyed_nowhere(run: Run, folder: Path) -> None:
    page = opened(run, folder / "hostile.html")
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    title = re.search(r"<title>(.*?)</title>", page.dom, re.S)
    assert title is not None
    assert title[1].startswith("miswired: drafter &lt;/script&gt;")
    free = opened(run, edited(folder / "hostile.html", without_policy, "free.html"))  # escaping alone holds it
    assert "img" not in [tag for tag, _ in free.tags]
    assert free.console == []
    assert "<title>owned" not in free.dom


def test_a_page_that_does_not_escape_would_be_caught(run: Run, folder: Path) -> None:
    text = "&lt;img src=x onerror=alert(1)&gt;"
    loose = edited(folder / "hostile.html", lambda html: html.replace(text, "<img src=x onerror=alert(1)>"), "l.html")
    assert "img" in [tag for tag, _ in opened(run, loose).tags]


@pytest.mark.parametrize("name", ["two_faults", "hostile"])
def test_the_json_inside_is_read_by_the_browser_as_it_was_written(name: str, run: Run, folder: Path) -> None:
    source = folder / f"{name}.html"
    script = (
        "<script>addEventListener('load', function () { document.body.setAttribute('data-read', JSON.stringify("
        "JSON.parse(document.getElementById('eyas-result').textContent))); });</script>"
    )
    page = opened(run, edited(source, lambda html: without_policy(html) + script, f"read-{name}.html"))
    told = page.attribute("data-read")
    wanted = read_back(source.read_text(encoding="utf-8"))
    assert told == wanted
    for side in ("expected", "observed"):
        assert f"{told[side]['accept_length']['value']:.2f}</dd>" in page.dom


@pytest.mark.parametrize("allowed", [True, False])
def test_a_fix_is_copied_or_at_least_selected(allowed: bool, run: Run, folder: Path) -> None:
    """Where the clipboard is not allowed the text is selected, for the keyboard to copy."""
    clipboard = (
        "{writeText: function (text) { document.body.setAttribute('data-copied', JSON.stringify(text)); "
        "return Promise.resolve(); }}"
    )
    script = (
        f"<script>Object.defineProperty(navigator, 'clipboard', {{value: {clipboard if allowed else 'undefined'}}});"
        "document.execCommand = function () { return false; };"
        "var button = document.querySelector('button'); button.click(); setTimeout(function () {"
        " document.body.setAttribute('data-chosen', "
        "JSON.stringify([button.textContent, String(getSelection())])); }, 50);</script>"
    )
    page = edited(folder / "two_faults.html", lambda html: without_policy(html) + script, f"copy-{allowed}.html")
    done = opened(run, page, "--virtual-time-budget=1000")
    fix = diagnoses.two_faults()["findings"][0]["fix"]
    if allowed:
        assert done.attribute("data-copied") == fix
        assert done.attribute("data-chosen") == ["Copied", ""]
    else:
        assert done.attribute("data-chosen") == ["Selected: press Ctrl+C", fix]


@pytest.mark.parametrize(("name", "width"), [*((name, 360) for name in diagnoses.VARIANTS), ("two_faults", 768)])
def test_fits_a_narrow_window(name: str, width: int, run: Run, folder: Path) -> None:
    """A frame, since a window of the browser has a least width of its own."""
    inner = edited(folder / f"{name}.html", lambda html: without_policy(html) + MEASURE, f"m-{name}.html")
    told = measured(run, inner, width)
    assert told["width"] == width
    assert told["scroll"] <= width, told["wide"][:9]
    assert told["wide"] == []


def test_what_does_not_fit_would_be_seen(run: Run, folder: Path) -> None:
    bar = '<div style="width: 500px">wide</div>'
    inner = edited(folder / "died.html", lambda html: without_policy(html) + bar + MEASURE, "wide.html")
    assert measured(run, inner, 360)["scroll"] >= 500


def measured(run: Run, inner: Path, width: int) -> Any:
    frame = inner.with_name(f"frame-{width}-{inner.name}")
    frame.write_text(
        f'<!doctype html><body><iframe src="{inner.name}" width="{width}" height="900" style="border:0"></iframe>'
        "<script>addEventListener('load', function () { document.body.setAttribute('data-told', "
        "frames[0].document.body.getAttribute('data-measured')); });</script>",
        encoding="utf-8",
    )
    return opened(run, frame, "--allow-file-access-from-files", "--window-size=1200,1000").attribute("data-told")


def test_dark_is_dark_and_light_is_light(run: Run, folder: Path) -> None:
    script = (
        "<script>document.body.setAttribute('data-paper', "
        "JSON.stringify(getComputedStyle(document.body).backgroundColor));</script>"
    )
    page = edited(folder / "healthy.html", lambda html: without_policy(html) + script, "paper.html")
    dark, light = (opened(run, page, f"--blink-settings=preferredColorScheme={scheme}") for scheme in (0, 1))
    assert dark.attribute("data-paper") == "rgb(18, 22, 26)"
    assert light.attribute("data-paper") == "rgb(255, 255, 255)"


def test_prints(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.pdf"
    run(folder / "two_faults.html", f"--print-to-pdf={file}", "--no-pdf-header-footer")
    pdf = file.read_bytes()
    assert pdf.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 5 <= pages <= 14
