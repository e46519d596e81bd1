"""Settings turned one at a time: engines in small, whose counts depend on what is turned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.diagnose import toggles
from eyas.diagnose.curves import Counted
from eyas.diagnose.toggles import Asking, Kept, Tried
from eyas.engines.live import About, Answer, Counters
from eyas.engines.toggles import SERVED, Toggle, of_vllm
from eyas.errors import EnvironmentFault

PROMPTS = [[1, 2, 3]] * 16
SOUND = (240, 96, 40, 24)  # of 600 rounds: 1.67
SPOILT = (120, 30, 10, 2)  # 1.27
EXPECTED = Counted(np.full(16, 37), np.tile(np.array([15, 6, 2, 1]), (16, 1)), "walk")
FLAGS = ["--max-model-len", "1024"]
RESOLVED = {"scheduler.max_num_batched_tokens": 16}
Says = Callable[[Toggle, int], Sequence[int] | None]


class Small:
    """An engine whose counts a pass are what ``says`` of the toggle and the number of the pass; None: it dies."""

    def __init__(self, toggle: Toggle, says: Says, log: list[str]) -> None:
        self.about = About("vllm", "launched")
        self.toggle, self.says, self.log = toggle, says, log
        self.passes, self.total, self.rounds = 0, np.zeros(4, dtype=np.int64), 0

    def ready(self, heard: Callable[[str], None] = lambda what: None) -> None:
        self.log.append(f"start {self.toggle.name}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        heard: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        kept = self.says(self.toggle, self.passes)
        if kept is None:
            raise EnvironmentFault("vLLM died.", way_out="Look at its log.")
        self.passes += 1
        self.total += np.array(kept)
        self.rounds += 600
        return [Answer(f"r{i}", tuple(p), (5, 6), "length", 1.0) for i, p in enumerate(prompts)]

    def rendered(self, messages: Sequence[Mapping[str, str]]) -> None:
        return None

    def probe(self, folder: Path, most_bytes: int) -> AbstractContextManager[Mapping[str, Any]]:
        raise AssertionError("an engine that is turned is not probed")

    def metrics(self) -> Counters:
        return Counters(self.rounds, self.rounds * 4, tuple(int(n) for n in self.total))

    def stop(self) -> None:
        self.log.append(f"stop {self.toggle.name}")


def asking() -> Asking:
    answers = [Answer(f"r{i}", tuple(p), (5, 6), "length", 1.0) for i, p in enumerate(PROMPTS)]
    return Asking(PROMPTS, 64, answers, 50.0, 30.0)


def turned(says: Says, flags: Sequence[str] = FLAGS) -> tuple[list[Tried], list[str]]:
    log: list[str] = []
    choice = of_vllm(flags, RESOLVED, [3] * 16, 8)
    return toggles.turned(lambda toggle: Small(toggle, says, log), choice, asking(), EXPECTED), log


def causes(tried: Sequence[Tried]) -> list[tuple[str, str]]:
    return [(f.cause, f.fix or "") for f in toggles.findings(tried)]


def spoilt_unless(name: str) -> Says:
    return lambda toggle, number: SOUND if toggle.name == name else SPOILT


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("graphs", "--enforce-eager"),
        ("prefix cache", "--no-enable-prefix-caching"),
        ("batch", "one request at a time"),
        ("chunk size", "--max-num-batched-tokens 24"),
    ],
)
def test_the_setting_that_brings_the_tokens_back_is_named_alone(name: str, setting: str) -> None:
    tried, log = turned(spoilt_unless(name))
    (finding,) = toggles.findings(tried)
    assert finding.cause == "setting-costs"
    assert finding.severity == "likely"
    assert not finding.rivals
    assert finding.fix is not None
    assert setting in finding.fix
    helps = [t.toggle.name for t in tried if t.helps]
    assert helps == [name]
    assert tried[0].kept is not None
    assert tried[0].kept.length == pytest.approx(1 + sum(SPOILT) / 600)
    assert log == [f"{what} {t.toggle.name}" for t in tried for what in ("start", "stop")]


def test_a_sound_engine_is_turned_no_further_than_a_second_time() -> None:
    tried, log = turned(lambda toggle, number: SOUND)
    assert [t.toggle.name for t in tried] == ["as served", "restart"]
    assert toggles.findings(tried) == []
    assert tried[0].outcome.startswith("keeps what it should")
    assert log == ["start as served", "stop as served", "start restart", "stop restart"]


def test_an_engine_that_sinks_with_uptime_is_told_from_one_that_starts_low() -> None:
    tried, _ = turned(lambda toggle, number: SPOILT if number else SOUND)
    assert [c for c, _ in causes(tried)] == ["cache-drift"]
    assert "Restart" in causes(tried)[0][1]


def test_what_no_setting_changes_stays_undecided() -> None:
    tried, _ = turned(lambda toggle, number: SPOILT)
    (finding,) = toggles.findings(tried)
    assert finding.cause == "engine-falls-short"
    assert "restart, batch, graphs, prefix cache, chunk size" in finding.summary


def test_two_settings_that_help_are_rivals() -> None:
    tried, _ = turned(lambda toggle, number: SOUND if toggle.name in ("graphs", "batch") else SPOILT)
    found = toggles.findings(tried)
    assert [f.cause for f in found] == ["setting-costs"] * 2
    assert all(f.rivals for f in found)


def test_a_little_more_is_not_it() -> None:
    """Half of what is lost at least must come back."""
    some = tuple((3 * a + b) // 4 for a, b in zip(SPOILT, SOUND, strict=True))
    tried, _ = turned(lambda toggle, number: some if toggle.name == "graphs" else SPOILT)
    assert [c for c, _ in causes(tried)] == ["engine-falls-short"]


def test_other_texts_are_compared_beyond_chance() -> None:
    """0.07 a round is nothing among 600 rounds of other texts, and a fault among those of the same."""
    a, b = Kept(600, SOUND), Kept(600, (220, 90, 36, 12))
    assert a.above(b, same=True)
    assert not a.above(b, same=False)
    assert a.above(Kept(600, SPOILT), same=False)


def test_a_run_that_dies_is_told_and_the_others_go_on() -> None:
    def says(toggle: Toggle, number: int) -> Sequence[int] | None:
        return None if toggle.name == "graphs" else spoilt_unless("prefix cache")(toggle, number)

    tried, log = turned(says)
    outcomes = {t.toggle.name: t.outcome for t in tried}
    assert outcomes["graphs"] == "not tried: vLLM died."
    assert [t.toggle.name for t in tried if t.helps] == ["prefix cache"]
    assert "stop graphs" in log


def test_what_is_off_already_is_not_turned() -> None:
    tried, log = turned(lambda toggle, number: SPOILT, [*FLAGS, "--enforce-eager", "--no-enable-prefix-caching"])
    told = {t.toggle.name: t.outcome for t in tried}
    assert told["graphs"] == "not tried: it runs eager already"
    assert told["prefix cache"] == "not tried: it is off already"
    assert not any("graphs" in line or "prefix" in line for line in log)


def test_prompts_that_fit_a_pass_are_not_cut() -> None:
    sizes = of_vllm([], {"scheduler.max_num_batched_tokens": 2048}, [100, 300, 20], 2)[-1]
    assert sizes.why_not is not None
    assert "400" in sizes.why_not
    assert of_vllm([], {"scheduler.max_num_batched_tokens": 399}, [100, 300, 20], 2)[-1].why_not is None


def test_minutes_are_predicted_before() -> None:
    ask = asking()
    assert ask.minutes(Toggle("graphs", "--enforce-eager")) == pytest.approx(80 / 60)
    assert ask.minutes(Toggle("batch", "one", concurrency=1, starts=3.0)) == pytest.approx((150 + 90) / 60)
    assert ask.minutes(Toggle("restart", "again", again=True)) == pytest.approx(110 / 60)
    off = Toggle("prefix cache", "x", why_not="it is off already")
    assert toggles.minutes(ask, [off]) == pytest.approx(ask.minutes(SERVED))


def test_the_error_of_a_length_is_that_of_its_rounds() -> None:
    rng = np.random.default_rng(0)
    kept = rng.choice(5, size=4000, p=[0.6, 0.2, 0.1, 0.06, 0.04])
    counts = Kept(4000, [int((kept > k).sum()) for k in range(4)])
    assert counts.length == pytest.approx(1 + kept.mean())
    assert counts.squared_error == pytest.approx(kept.var() / 4000)
