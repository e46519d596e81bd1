"""`eyas watch`: an engine behind real HTTP whose pages drift, restart, fall silent or lie; a state that never grows."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eyas.engines.scrape import sampled
from eyas.errors import CheckpointError, InputError, UsageError
from eyas.results import Finding
from eyas.watch import Event, Watcher, expected, loop, reasons
from eyas.watch.sums import BINS, Interval, Newest, Sums, Trend
from folders import call
from watching import VLLM, Answer, Vllm, engine, sglang, text

Capture = pytest.CaptureFixture[str]
FAST = ("--every", "0.05")


def page(text: str) -> sampled.Sampled:
    return sampled.page(text.encode(), "page")


def reading(vllm: Vllm) -> sampled.Sampled:
    """The same as of its page, without the cost of text."""
    values = {"drafts": vllm.rounds, "draft_tokens": vllm.drafted, "accepted_tokens": vllm.accepted}
    counters = {(name, frozenset[tuple[str, str]]()): value for name, value in values.items()}
    for k, hit in enumerate(vllm.hits):
        counters["accepted_tokens_per_pos", frozenset({("position", str(k))})] = hit
    return sampled.Sampled("vllm", counters, draft_tokens=len(vllm.hits), running=float(vllm.running))


def watcher(*, window: int = 5, expect: float | None = None) -> Watcher:
    return Watcher("page", window=window, every=15.0, expected=None if expect is None else expected.asked(expect))


def played(one: Watcher, vllm: Vllm, rates: list[float], rounds: int = 3000) -> list[Event]:
    """A reading every 15 s; the first is only a base."""
    said: list[Event] = [] if one.readings else one.take(page(vllm.page()), 0.0)
    for rate in rates:
        said += one.take(page(vllm.play(rounds, rate).page()), one.at + 15.0)
    return said


def kinds(events: list[Event], *wanted: str) -> list[str]:
    return [event.kind for event in events if not wanted or event.kind in wanted]


def causes(findings: list[Finding]) -> dict[str, str]:
    return {finding.cause: finding.severity for finding in findings}


# -- counters -------------------------------------------------------------------------------------------------


def test_intervals_are_differences_of_the_recorded_counters() -> None:
    first = page("\n".join(VLLM["page"]))
    truth = VLLM["truth"]
    assert sampled.grown(None, first) == sampled.Grown(
        truth["rounds"], truth["drafted"], truth["accepted"], tuple(truth["hits"])
    )
    assert (first.engine, first.draft_tokens) == ("vllm", truth["draft_tokens"])
    vllm = Vllm()
    one = watcher()
    one.take(page(vllm.play(500, 0.7).page()), 0.0)
    before = (vllm.rounds, vllm.drafted, vllm.accepted, list(vllm.hits))
    one.take(page(vllm.play(300, 0.5).page()), 15.0)
    told = one.told()
    sums = told["newest"]
    assert (sums["rounds"], sums["drafted"], sums["accepted"]) == (300, 900, vllm.accepted - before[2])
    assert sums["hits"] == [now - then for now, then in zip(vllm.hits, before[3], strict=True)]
    assert sums["accept_length"] == 1 + (vllm.accepted - before[2]) / 300
    assert told["life"]["rounds"] == 800
    assert told["rounds"] == 300


def test_engines_of_one_page_are_summed_and_one_that_restarts_is_seen() -> None:
    a, b = Vllm(1, "0").play(900, 0.7), Vllm(2, "1").play(400, 0.6)
    one = watcher()
    one.take(page(a.page() + b.page()), 0.0)
    one.take(page(a.play(100, 0.7).page() + b.play(50, 0.6).page()), 15.0)
    assert one.told()["newest"]["rounds"] == 150
    fresh = Vllm(3, "1").play(10, 0.6)  # the sum still rises: only its own counter fell
    said = one.take(page(a.play(1000, 0.7).page() + fresh.page()), 30.0)
    assert kinds(said) == ["restart"]
    assert one.told()["newest"]["rounds"] == 0


def test_padded_positions_are_no_drafted_tokens() -> None:
    body = "\n".join(VLLM["page"]).replace("2688.0", "1792.0").replace("382.0", "0.0").replace("1626.0", "1244.0")
    assert page(body).draft_tokens == 2
    assert sampled.grown(None, page(body)).hits == (711, 533)


# -- drift ----------------------------------------------------------------------------------------------------


def test_drift_is_warned_of_once_and_again_only_after_it_recovered() -> None:
    one, vllm = watcher(), Vllm()
    assert kinds(played(one, vllm, [0.7] * 30)) == []
    said = played(one, vllm, [0.5] * 30)
    assert kinds(said) == ["warning"]
    assert "cache-drift" in said[0].text
    assert said[0].fix is not None
    assert one.told()["standing"] == ["cache-drift"]
    finding = one.told()["findings"][0]
    assert (finding["cause"], finding["severity"]) == ("cache-drift", "likely")
    assert [rival["cause"] for rival in finding["rivals"]] == ["language-unseen", "temperature-greedy-drafts"]
    low, high = finding["evidence"][1]["value"][1:]
    assert low < 2.533 - 1.875 < high
    assert kinds(played(one, vllm, [0.56] * 30)) == []  # better, but not half of the way: it stands
    assert one.told()["standing"] == ["cache-drift"]
    assert kinds(played(one, vllm, [0.7] * 30)) == ["cleared"]
    assert one.told()["standing"] == []
    assert kinds(played(one, vllm, [0.5] * 30)) == ["warning"]


def test_a_slow_sinking_is_seen_with_its_slope() -> None:
    one, vllm = watcher(window=20), Vllm()
    said = played(one, vllm, [0.7 - 0.2 * i / 400 for i in range(400)])
    assert kinds(said) == ["warning"]
    told = one.told()
    hours = 400 * 15 / 3600
    assert told["per_hour"] == pytest.approx((1.875 - 2.533) / hours, rel=0.15)
    lengths = [bin["accept_length"] for bin in told["trend"]]
    assert lengths[0] > lengths[len(lengths) // 2] > lengths[-1]


def test_a_healthy_day_is_quiet() -> None:
    """5,760 looks at text whose difficulty wanders from interval to interval."""
    for seed in range(3):
        one, vllm = watcher(window=20, expect=2.53), Vllm(seed)
        for i in range(5761):
            vllm.play(600, 0.7 + vllm.random.gauss(0, 0.02))
            assert kinds(one.take(reading(vllm), 15.0 * i)) == [], (seed, i)
        assert causes(one.findings()) == {"observed-agrees": "note"}


def test_few_rounds_never_warn() -> None:
    one, vllm = watcher(expect=2.5), Vllm()
    said = played(one, vllm, [0.9] * 60 + [0.1] * 60, rounds=5)
    assert kinds(said) == []
    told = one.told()
    assert told["first"]["rounds"] >= 200  # the first window waits for enough
    assert {"what": "cache-drift", "why": "too few to tell: 25 rounds, 200 at least", "needed": False} in told[
        "not_checked"
    ]


def test_a_small_loss_is_no_warning_however_sure() -> None:
    one, vllm = watcher(expect=2.53), Vllm()
    assert kinds(played(one, vllm, [0.7] * 20 + [0.68] * 20, rounds=1_000_000)) == []
    assert one.told()["drift"]["low"] > 0


def test_intervals_that_differ_widen_the_interval() -> None:
    """Rounds by the thousand, but of two kinds of text in turn: independent rounds would be sure, intervals are not."""
    alike, mixed = Sums(), Sums()
    for i in range(20):
        alike.add(Interval(0.0, 1.0, 1000, 3000, 1500, (700, 500, 300)))
        mixed.add(Interval(0.0, 1.0, 1000, 3000, 2400 if i % 2 else 600, (0, 0, 0)))
    narrow, wide = reasons.ends(alike, 3), reasons.ends(mixed, 3)
    assert narrow is not None
    assert wide is not None
    assert alike.length == mixed.length == 2.5
    half = 3 * 3.8906 * (0.25 / 20_000) ** 0.5  # 99.99 %, all three tokens of a round as one draw
    assert narrow == pytest.approx((2.5 - half, 2.5 + half), abs=1e-3)
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])
    by_hand = (sum((x - 1500) ** 2 for x in [600, 2400] * 10) / 19 / 20) ** 0.5 / 1000
    assert mixed.error() == pytest.approx(by_hand)


# -- restarts and outages -------------------------------------------------------------------------------------


def test_a_restart_is_a_new_first_window_and_withdraws_the_drift() -> None:
    one, vllm = watcher(), Vllm()
    played(one, vllm, [0.7] * 15 + [0.5] * 15)
    assert one.told()["standing"] == ["cache-drift"]
    said = played(one, Vllm(9), [0.7] * 30)
    assert kinds(said) == ["restart"]
    assert "a counter fell" in said[0].text
    assert "before: 1.8" in said[0].text
    told = one.told()
    assert (told["restarts"], told["standing"]) == (1, [])
    assert told["runs"][0]["first"] == pytest.approx(2.53, abs=0.03)
    assert told["first"]["accept_length"] == pytest.approx(2.53, abs=0.03)
    assert told["rounds"] == 30 * 3000 + 29 * 3000  # the interval of the restart counts for nothing


def test_a_restart_is_seen_by_its_time_where_counters_have_overtaken() -> None:
    one = watcher()
    one.take(page(Vllm(1, created=1000.0).play(100, 0.7).page()), 0.0)
    said = one.take(page(Vllm(2, created=2000.0).play(5000, 0.7).page()), 15.0)
    assert kinds(said) == ["restart"]


def test_engines_that_take_turns_are_named_once() -> None:
    a, b, one = Vllm(1).play(100, 0.7), Vllm(2).play(5000, 0.7), watcher()
    said: list[Event] = []
    for i in range(40):
        said += one.take(page((b if i % 2 else a).play(10, 0.7).page()), 15.0 * i)
    assert len(said) <= 4
    assert "take turns" in said[-1].text


def scripted(*answers: Answer) -> Iterator[Answer]:
    yield from answers
    while True:
        yield answers[-1]


def test_an_engine_that_goes_away_is_said_once_and_comes_back(capsys: Capture, tmp_path: Path) -> None:
    vllm = Vllm()

    def answer(n: int) -> Answer:
        vllm.play(1000, 0.7)
        if n in (3, 4):
            return None
        if n == 5:
            return 500, "text/plain", b"no"
        if n == 6:
            return 200, "text/plain", vllm.page()[:1700].encode()  # cut in the middle of a sample
        return text(vllm.page())

    out = tmp_path / "told.json"
    with engine(answer) as server:
        ran = call(capsys, "watch", server.url, *FAST, "--for", "2", "--json", out)
    told = json.loads(out.read_text())
    assert [event["kind"] for event in told["events"]] == ["down", "up"]
    assert ran.code == 0
    assert (told["outages"], told["restarts"], told["up"]) == (1, 0, True)
    assert told["rounds"] >= 5000  # what was counted while it was away is not lost
    assert "Traceback" not in ran.out + ran.err


def test_waiting_grows_while_nobody_answers() -> None:
    waits = [loop._next(0.0, 0.0, 15.0, tries) for tries in range(1, 9)]
    assert waits == [15, 30, 60, 60, 60, 60, 60, 60]
    assert loop._next(0.0, 0.0, 300.0, 5) == 300
    assert loop._next(30.0, 31.0, 15.0, 0) == 45  # on the beat
    assert loop._next(30.0, 80.0, 15.0, 0) == 90  # missed beats are left out


# -- expected -------------------------------------------------------------------------------------------------


def test_what_was_asked_for_is_a_warning_and_the_records_of_a_drafter_are_not() -> None:
    one = watcher(expect=3.2)
    assert kinds(played(one, Vllm(), [0.7] * 8)) == []  # not before a whole window of looks says so
    assert kinds(played(one, Vllm(), [0.7] * 20)) == ["restart", "warning"]
    assert causes(one.findings()) == {"engine-falls-short": "likely"}
    curve = expected.Expected("curve", tuple(expected.Length(v, v - 0.05, v + 0.05) for v in (1.6, 2.2, 2.9)))
    other = Watcher("page", window=5, every=15.0, expected=curve)
    assert kinds(played(other, Vllm(), [0.7] * 40)) == ["note"]
    assert causes(other.findings()) == {"engine-falls-short": "note"}
    assert not other.standing
    grave = Watcher("page", window=5, every=15.0, expected=curve)
    assert kinds(played(grave, Vllm(), [0.2] * 40)) == ["warning"]


@pytest.mark.parametrize(
    ("expect", "cause"), [(2.53, "observed-agrees"), (2.6, "observed-agrees"), (2.0, "observed-exceeds")]
)
def test_no_warning_where_it_reaches_what_is_expected(expect: float, cause: str) -> None:
    one = watcher(expect=expect)
    assert kinds(played(one, Vllm(), [0.7] * 20)) == []
    assert causes(one.findings()) == {cause: "note"}


def test_the_curve_of_the_shipped_drafter() -> None:
    from eyas import resolve

    folder = resolve.drafter("smollm2-eagle3")
    stored = json.loads((folder / "curves.json").read_text())
    curve = expected.of_drafter(folder)
    for row in stored["accept_length"]:
        found = curve.at(row["draft_tokens"])
        assert isinstance(found, expected.Length)
        assert (found.value, found.low, found.high) == (row["value"], row["low"], row["high"])
    assert curve.joint_at(5) == [depth["joint"]["rate"] for depth in stored["walk"]["depths"]]
    assert curve.joint_at(3) is None
    assert "9 tokens are drafted" in str(curve.at(9))
    assert "does not tell" in str(curve.at(None))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (None, "has no curves.json"),
        ("{", "cannot be read"),
        ("[]", "no walk"),
        ('{"accept_length": [{"draft_tokens": 3, "value": 2.0, "low": null, "high": null}]}', "no walk"),
        ('{"accept_length": [{"draft_tokens": 3, "value": 2.0, "low": 2.5, "high": NaN}]}', "no walk"),
    ],
)
def test_a_drafter_without_a_curve(written: str | None, words: str, tmp_path: Path, capsys: Capture) -> None:
    if written is not None:
        (tmp_path / "curves.json").write_text(written)
    with pytest.raises(CheckpointError, match=words):
        expected.of_drafter(tmp_path)
    ran = call(capsys, "watch", "localhost:1", "--drafter", tmp_path)
    assert (ran.code, words in ran.err, "--expect" in ran.err) == (2, True, True), ran.err


# -- other warnings -------------------------------------------------------------------------------------------


def test_requests_without_rounds() -> None:
    one, vllm = watcher(), Vllm()
    played(one, vllm, [0.7] * 6)
    said = played(one, vllm, [0.7] * 12, rounds=0)
    assert kinds(said) == ["warning"]
    assert "speculation-idle" in said[0].text
    assert kinds(played(one, vllm, [0.7])) == ["cleared"]
    vllm.running = 0
    assert kinds(played(one, vllm, [0.7] * 12, rounds=0)) == []


def test_counters_that_contradict_are_compared_with_nothing() -> None:
    one, vllm = watcher(expect=3.9), Vllm()
    one.take(page(vllm.page()), 0.0)
    said: list[Event] = []
    for i in range(1, 20):
        vllm.play(1000, 0.7)
        vllm.accepted += 60  # more than the hits by position
        said += one.take(page(vllm.page()), 15.0 * i)
    assert kinds(said) == ["warning"]
    assert one.told()["standing"] == ["counts-inconsistent"]
    assert {"cache-drift", "engine-falls-short"} == {left["what"] for left in one.told()["not_checked"]}


def test_counters_read_a_step_apart_are_no_contradiction() -> None:
    one, vllm = watcher(), Vllm()
    for i in range(20):
        torn = page(vllm.play(1000, 0.7).page())
        counters = {key: value - (key[0] == "accepted_tokens") * (i % 2) * 3 for key, value in torn.counters.items()}
        one.take(sampled.Sampled("vllm", counters, draft_tokens=3), 15.0 * i)
    assert one.told()["standing"] == []


def test_every_token_kept_is_a_note_with_a_rival() -> None:
    one = watcher()
    assert kinds(played(one, Vllm(), [1.0] * 20)) == []
    (finding,) = one.findings()
    assert (finding.cause, finding.severity) == ("acceptance-faked", "note")
    assert [rival.cause for rival in finding.rivals] == ["text-loops"]


# -- SGLang ---------------------------------------------------------------------------------------------------


def gauged(one: Watcher, lengths: list[float], calls: int | None = 500, running: int = 1) -> list[Event]:
    said: list[Event] = []
    for length in lengths:
        counted = None if calls is None else calls * (one.readings + 1)
        said += one.take(page(sglang(length, counted, running)), 15.0 * one.readings)
    return said


def wobbling(middle: float, n: int) -> list[float]:
    return [middle + 0.03 * ((i * 7) % 5 - 2) for i in range(n)]


def test_gauges_are_means_of_readings_and_calls_are_rounds() -> None:
    one = watcher(expect=2.8)
    assert kinds(gauged(one, wobbling(2.8, 30))) == []
    told = one.told()
    assert (told["engine"], told["draft_tokens"]) == ("sglang", 3)
    assert (told["newest"]["rounds"], told["newest"]["accepted"], told["newest"]["hits"]) == (2500, None, None)
    assert told["newest"]["accept_length"] == pytest.approx(2.8)
    assert causes(one.findings()) == {"observed-agrees": "note"}
    said = gauged(one, wobbling(2.0, 30))
    assert kinds(said) == ["warning", "warning"]
    assert one.told()["standing"] == ["cache-drift", "engine-falls-short"]


def test_gauges_that_stand_still_are_no_readings() -> None:
    one = watcher()
    same = sglang(2.8, 1000)
    for i in range(20):
        one.take(page(same), 15.0 * i)
    assert one.told()["newest"]["intervals"] == 0
    assert one.told()["standing"] == []


def test_means_without_counts_are_shown_and_never_warned_of() -> None:
    one = watcher(expect=2.8)
    said = gauged(one, wobbling(2.8, 30) + wobbling(1.5, 30), calls=None)
    assert kinds(said) == ["note"]
    told = one.told()
    assert told["newest"]["accept_length"] == pytest.approx(1.5)
    assert all("no count of rounds" in left["why"] for left in told["not_checked"])


def test_sglang_restarts_and_never_drafts() -> None:
    one = watcher()
    gauged(one, wobbling(2.8, 10))
    assert kinds(one.take(page(sglang(2.8, 3)), 900.0)) == ["restart"]
    other = watcher()
    assert kinds(gauged(other, [0.0] * 20, calls=None)) == ["warning"]
    assert other.told()["standing"] == ["speculation-idle"]


def test_a_page_of_sglang_that_contradicts_itself_three_times(capsys: Capture) -> None:
    body = sglang(2.8, 1000).replace("0.6", "0.9").replace("0.5999999999999999", "0.9")
    calls = iter(range(1, 10_000))
    with engine(lambda n: text(body.replace("1000.0", f"{1000.0 * next(calls)}"))) as server:
        ran = call(capsys, "watch", server.url, *FAST, "--for", "0.5", "--window", "2")
    assert (ran.code, "counts-inconsistent" in ran.out) == (1, True), ran.out


# -- memory ---------------------------------------------------------------------------------------------------


def held(root: object) -> int:
    """Bytes of everything that hangs on an object, code and modules left out."""
    seen: dict[int, object] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen[id(one)] = one
        left += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))


def test_a_hundred_thousand_intervals_take_no_more_than_a_thousand() -> None:
    """27 hours at a second, with outages and restarts."""
    one, vllm = watcher(window=20, expect=2.5), Vllm()
    sizes: list[int] = []
    for i in range(100_001):
        if i % 5000 == 4999:
            vllm.rounds = vllm.drafted = vllm.accepted = 0
            vllm.hits = [0] * len(vllm.hits)
        if i % 1000 == 17:
            one.down(float(i), "away")
        one.take(reading(vllm.play(1000, 0.7)), float(i))
        if i in (4000, 100_000):
            assert one.told()["rounds"] > 1000 * (i - 25)
            sizes.append(held(one))
    assert sizes[1] < sizes[0] + 60_000, sizes  # the events and runs that are kept
    told = one.told()
    assert (told["restarts"], told["outages"]) == (20, 100)
    assert len(told["events"]) == 100
    assert len(told["trend"]) <= BINS
    assert told["standing"] == []


def test_bins_are_merged_and_lose_nothing() -> None:
    trend = Trend(1.0)
    for i in range(1000):
        trend.add(float(i), Interval(float(i), 1.0, 10, 30, i % 7, ()))
    assert len(trend.bins) <= BINS
    assert trend.width == 16.0
    assert sum(one.rounds for one in trend.bins) == 10_000
    assert [one.intervals for one in trend.bins[:-1]] == [16] * (len(trend.bins) - 1)


def test_the_newest_window_is_the_sum_of_its_intervals() -> None:
    newest, kept = Newest(7), []
    for i in range(50):
        one = Interval(float(i), 1.0, 10 + i, 30 + 3 * i, 5 + i, (4 + i, 1))
        newest.add(one)
        kept = [*kept, one][-7:]
    by_hand = Sums()
    for one in kept:
        by_hand.add(one)
    assert newest.sums == by_hand


# -- the verb -------------------------------------------------------------------------------------------------


def drifting(after: int) -> Any:
    vllm = Vllm()

    def answer(n: int) -> Answer:
        return text(vllm.play(3000, 0.7 if n < after else 0.4).page())

    return answer


def samples(exposition: str) -> dict[str, float]:
    return {
        one.name + "".join(f"{{{label}}}" for label in one.labels.values()): one.value
        for family in text_string_to_metric_families(exposition)
        for one in family.samples
    }


def test_a_drifting_engine_on_the_command_line(capsys: Capture, tmp_path: Path) -> None:
    out, exposed = tmp_path / "told.json", tmp_path / "eyas.prom"
    arguments = ("--window", "4", "--for", "2.5", "-d", "smollm2-eagle3", "--json", out, "--prometheus", exposed)
    with engine(drifting(15)) as server:
        ran = call(capsys, "watch", server.url, *FAST, *arguments)
        assert set(server.paths) == {"/metrics"}
    assert ran.code == 1
    assert ran.out.count("warning   cache-drift") + ran.out.count("warning  cache-drift") == 1
    told = json.loads(out.read_text())
    assert (told["schema"], told["standing"]) == (1, ["cache-drift"])
    assert {"first", "newest", "expected", "intervals", "findings"} <= set(told)
    assert told["expected"]["source"] == "curves.json of smollm2-135m-eagle3"
    found = samples(exposed.read_text())
    assert found["eyas_watch_accept_length{first}"] == told["first"]["accept_length"]
    assert found["eyas_watch_accept_length{window}"] == told["newest"]["accept_length"]
    assert found["eyas_watch_accept_length{interval}"] == told["interval"]["accept_length"]
    assert found["eyas_watch_expected_accept_length"] == told["expected"]["value"]
    assert [found[f"eyas_watch_joint_rate{{{k}}}"] for k in range(3)] == told["newest"]["joint"]
    assert found["eyas_watch_rounds_total"] == told["rounds"]
    assert found["eyas_watch_warning{cache-drift}"] == 1
    assert found["eyas_watch_warning{engine-falls-short}"] == 0
    assert found["eyas_watch_up"] == 1
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".json", ".prom")] == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_once(capsys: Capture, tmp_path: Path) -> None:
    vllm = Vllm().play(3000, 0.7)
    with engine(lambda n: text(vllm.page())) as server:
        good = call(capsys, "watch", server.url, "--once", "--expect", "2.5", "--json", "-")
        bad = call(capsys, "watch", f"http://{server.url}/metrics", "--once", "--expect", "3.5")
        assert server.asked == 2
    told = json.loads(good.out)
    assert (good.code, told["newest"]["rounds"]) == (0, 3000)
    assert [finding["cause"] for finding in told["findings"]] == ["observed-agrees"]
    assert (bad.code, "engine-falls-short" in bad.out) == (1, True)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((404, "text/plain", b"no"), 2, "HTTP 404"),
        ((200, "text/html", b"<html></html>"), 2, "HTML"),
        ((200, "text/plain", b"vllm:num_requests_running 1.0\n"), 2, "nothing of speculation"),
        ((200, "text/plain", b""), 2, "is empty"),
        ((200, "text/plain", b"vllm:spec_decode_num_drafts_total{engine= 8.0\n"), 2, "nothing of speculation"),
        ((200, "text/plain", "\n".join(VLLM["lines"]).encode()), 2, "no metrics page"),
        ((200, "text/plain", b"# TYPE\nllamacpp:requests_processing 1\n"), 2, "llama.cpp"),
        (None, 4, "cannot be reached"),
    ],
)
def test_what_is_no_page(answer: Answer, code: int, words: str, capsys: Capture) -> None:
    with engine(lambda n: answer) as server:
        ran = call(capsys, "watch", server.url)
    assert (ran.code, words in ran.err, "→" in ran.err) == (code, True, True), ran.err


def test_nobody_there_and_a_port_that_is_taken(capsys: Capture) -> None:
    port = free_port()
    ran = call(capsys, "watch", f"127.0.0.1:{port}")
    assert (ran.code, "cannot be reached" in ran.err) == (4, True), ran.err
    with engine(drifting(99)) as server:
        taken = server.url.partition(":")[2]
        ran = call(capsys, "watch", server.url, "--prometheus", f":{taken}")
    assert (ran.code, f"Port {taken}" in ran.err) == (4, True), ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--every", "0"), "--every"),
        (("--every", "nan"), "--every"),
        (("--for", "-1"), "--for"),
        (("--for", "inf"), "--for"),
        (("--expect", "0.5"), "no accept length"),
        (("--expect", "nan"), "no accept length"),
        (("--expect", "2", "--drafter", "smollm2-eagle3"), "both"),
        (("--drafter", "nowhere"), "There is no drafter"),
        (("--prometheus", ":http"), "no port"),
        (("--prometheus", ":99999"), "no port"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    with engine(drifting(99)) as server:
        ran = call(capsys, "watch", server.url, *arguments)
    assert (ran.code, words in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("url", ["ftp://host", "http://me:secret@host/", "http://"])
def test_addresses(url: str) -> None:
    with pytest.raises(UsageError):
        loop.address(url)
    assert loop.address("host:8000") == "http://host:8000/metrics"
    assert loop.address("https://host/a/metrics") == "https://host/a/metrics"


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(InputError, match="samples of speculation"):
        page("vllm:spec_decode_num_drafts_total 1.0\n" * (sampled.MOST + 1))


def test_a_slow_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, one = Vllm(), watcher()

    def answer(n: int) -> Answer:
        time.sleep(1.0)
        return text(vllm.page())

    monkeypatch.setattr(loop, "patience", lambda every: 0.2)
    one.every = 0.05
    with engine(answer) as server:
        first = (page(vllm.page()), [])
        said = [
            event for events in loop.watch(loop.address(server.url), one, seconds=0.4, first=first) for event in events
        ]
    assert kinds(said) == ["down"]
    assert "does not answer" in said[0].text or "has not finished" in said[0].text


def test_ctrl_c_ends_it_cleanly_and_the_port_served_until_then(tmp_path: Path) -> None:
    out, port = tmp_path / "told.json", free_port()
    environment = {**os.environ, "COLUMNS": "200"}
    with engine(drifting(10_000)) as server:
        command = [sys.executable, "-m", "eyas", "watch", server.url, *FAST, "--json", str(out)]
        child = subprocess.Popen(
            [*command, "--prometheus", f":{port}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        try:
            until = time.monotonic() + 60
            while server.asked < 5 and time.monotonic() < until:
                time.sleep(0.05)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                found = samples(answer.read().decode())
            child.send_signal(signal.SIGINT)
            printed, complained = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130, complained
    assert found["eyas_watch_up"] == 1
    assert found["eyas_watch_rounds_total"] >= 3000
    assert "Traceback" not in printed + complained
    assert json.loads(out.read_text())["rounds"] >= 3000
    assert "readings in" in printed


def test_the_table_of_a_terminal() -> None:
    from rich.console import Console

    from eyas.report import watched

    one, vllm = watcher(expect=2.5), Vllm()
    played(one, vllm, [0.7] * 10 + [0.4] * 10)
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with watched.shown(console) as show:
        show(one.told(), [event.to_json() for event in one.events])
    shown = console.export_text()
    for word in ("accept length", "joint rate, depth 2", "over uptime", "stands: cache-drift", "→"):
        assert word in shown, word
    assert watched.sparkline([1.0, None, 2.0]) == "▁ █  1.00 to 2.00"
    assert watched.sparkline([]) == ""
