"""Reports of a sweep: the numbers are the result's, doubt is told, and nothing from outside is obeyed."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.report.page import check_page
from eyas.results import Finding
from test_report import Page, printed, result

HOSTILE = "</script><img src=x onerror=alert(1)> [red]\x1b[2J"


def trial(name: str, value: float, outcome: str) -> dict[str, Any]:
    difference = {"value": value, "low": value - 0.05, "high": value + 0.07}
    return {"name": name, "confirmed": {"slots": 900, "difference": difference, "z": 9.0}, "outcome": outcome}


def swept(**changes: Any) -> dict[str, Any]:
    told = result(**changes)
    taps = {
        "slots": [{"slot": s, "configured": t, "best": t + 1} for s, t in enumerate((2, 15, 27))],
        "taps": list(range(31)),
        "log_probability": [[-2.0 - abs(t - best) for t in range(31)] for best in (3, 16, 28)],
    }
    trials = [trial("taps 3, 16, 28", 0.912, "better"), trial("token one later", -0.31, "worse")]
    told["sweep"] = {"tried": 117, "records": 32, "slots": 3120, "passes": [{"variants": trials, "taps": taps}]}
    changed = [{"fact": "taps", "configured": [2, 15, 27], "found": [3, 16, 28]}]
    margin = {"value": 0.4, "low": 0.33, "high": 0.47}
    told["found"] = {"contract": None, "margin": margin, "next": "taps 3, 15, 28", "changes": changed}
    return told


def test_the_numbers_are_on_both() -> None:
    for text in (printed(swept()), Page(check_page([swept()])).text):
        text = " ".join(text.split())
        for piece in ("117 other", "32 records", "3,120 slots", "2, 15, 27", "3, 16, 28", "0.912 (0.862 to 0.982)",
                      "-0.310 (-0.360 to -0.240)", "+0.400 tokens a round (0.330 to 0.470)"):  # fmt: skip
            assert piece in text, piece


def test_names_are_text() -> None:
    told = swept()
    told["sweep"]["passes"][0]["variants"][0]["name"] = HOSTILE
    told["found"] |= {"next": HOSTILE, "changes": [{"fact": HOSTILE, "configured": HOSTILE, "found": HOSTILE}]}
    page, text = check_page([told]), printed(told)
    assert "<img" not in page
    assert Page(page).text.count("onerror=alert(1)") >= 5
    assert "[red]" in text
    assert "\x1b" not in text + page


def test_a_first_word_with_rivals_says_so() -> None:
    doubt = "Not certain: other causes"
    sure = swept(findings=[Finding("taps-off-by-one", "fatal", "Taps are off.")])
    for show in (printed, lambda told: Page(check_page([told])).text):
        assert doubt in show(swept())
        assert doubt not in show(sure)


def test_what_is_cut_is_counted() -> None:
    told = swept()
    told["sweep"]["passes"][0]["variants"] = [trial(f"reading {i}", 0.9 - i / 10, "better") for i in range(11)]
    for text in (printed(told), Page(check_page([told])).text):
        assert "and 3 more, in the JSON" in text
    assert "more, in the JSON" not in printed(swept())


def test_pictures_are_told_in_words() -> None:
    page = check_page([swept()])
    assert "slot 1: configured 15, best 16" in page
    assert "+0.91 by taps 3, 16, 28" in page


@pytest.mark.parametrize("key", ["configured", "found", "sweep", "states", "slices"])
@pytest.mark.parametrize("null", [True, False])
def test_new_keys_are_optional(key: str, null: bool) -> None:
    told = swept()
    told.pop(key, None)
    if null:
        told[key] = None
    assert printed(told).startswith("MISWIRED")
    Page(check_page([told]))


def test_nothing_confirmed_draws_no_table() -> None:
    told = swept()
    told["sweep"]["passes"] = []
    assert "Other readings, tokens" not in printed(told)
    assert "117 other" in Page(check_page([told])).text


def test_80_columns() -> None:
    told = swept()
    told["sweep"]["passes"][0]["variants"][0]["name"] = "x" * 300
    assert max(map(len, printed(told, width=80).splitlines())) <= 80
