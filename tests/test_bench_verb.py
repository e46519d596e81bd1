"""`eyas bench` as it is typed: servers side by side, files written, a journal, a prediction, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.cli import bench as verb
from eyas.errors import EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_USAGE
from eyas.report.diagnosis import read_back
from servers import Exchange, serving
from test_bench_url import events
from test_verbs import Capture, call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"say {i}", "category": "ab"[i % 2]} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def answers(exchange: Exchange) -> None:
    exchange.send(200, events())


def drops_after(count: int) -> Callable[[Exchange], None]:
    def answer(exchange: Exchange) -> None:
        if exchange.count > count:
            exchange.send(401, {"error": {"message": "no more"}})
        else:
            answers(exchange)

    return answer


def test_two_servers_side_by_side(capsys: Capture, prompts: Path, tmp_path: Path) -> None:
    md, html, out = tmp_path / "b.md", tmp_path / "b.html", tmp_path / "b.json"
    files = ("--markdown", md, "--html", html, "--json", out)
    with serving(answers, ["m"]) as one, serving(answers, ["m"]) as two:
        urls = ("--url", f"plain={one.url}", "--url", f"chain 2={two.url}")
        ran = call(capsys, "bench", "-p", prompts, "-n", "8", "--repeat", "2", *urls, *files)
        assert (len(one.requests), len(two.requests)) == (9, 9)  # 4 prompts twice, and the warm-up
    assert ran.code == 0, ran.err
    assert "8 turns × 2 sides, 8 new tokens at most: about" in ran.err
    told = json.loads(out.read_text(encoding="utf-8"))
    assert list(told["all"]["sides"]) == ["plain", "chain 2"]
    assert told["all"]["sides"]["chain 2"]["equal"] == told["all"]["sides"]["plain"]["equal"]
    assert told["all"]["sides"]["plain"]["equal"]["n"] == 8
    assert [part["category"] for part in told["categories"]] == ["a", "b"]
    assert told["recommendation"]["side"] in ("plain", "chain 2")
    assert told["servers"]["plain"]["retries"] == 0
    assert read_back(html.read_text(encoding="utf-8")) == told
    assert "## By category" in md.read_text(encoding="utf-8")
    assert "Recommended" in ran.out


def test_a_side_that_is_given_up_ends_with_its_exit_code(capsys: Capture, prompts: Path) -> None:
    with serving(answers, ["m"]) as good, serving(answers, ["m"]) as other, serving(drops_after(2), ["m"]) as bad:
        urls = [f"--url={name}={server.url}" for name, server in (("a", good), ("b", other), ("bad", bad))]
        ran = call(capsys, "bench", "-p", prompts, "-n", "8", *urls, "--json", "-")
    assert ran.code == EXIT_ENVIRONMENT
    told = json.loads(ran.out)
    assert [side["prompts"] for side in told["all"]["sides"].values()] == [4, 4, 1]
    assert told["faults"][-1]["given_up"] is True
    assert "bad did not answer" in ran.err
    assert "It is not asked again." in ran.err


def test_ctrl_c_writes_what_there_is_and_the_journal_goes_on(
    capsys: Capture, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.bench import url as urls

    calls: list[str] = []
    asked = urls.UrlSide.__call__

    def interrupted(self: Any, prompt: Any) -> Any:
        calls.append(prompt.id)
        if calls.count("p2") == 1 and prompt.id == "p2":
            raise KeyboardInterrupt
        return asked(self, prompt)

    monkeypatch.setattr(urls.UrlSide, "__call__", interrupted)
    with serving(answers, ["m"]) as server:
        command = ("bench", "-p", prompts, "-n", "8", "--url", f"a={server.url}", "--journal", tmp_path / "j")
        ran = call(capsys, *command, "--json", tmp_path / "b.json")
        assert ran.code == EXIT_INTERRUPTED
        told = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
        assert (told["interrupted"], told["all"]["prompts"]) == (True, 2)
        assert "Interrupted after 2 turns" in ran.err
        calls.clear()
        calls.append("p2")
        again = call(capsys, *command, "--json", tmp_path / "b.json")
        assert again.code == 0, again.err
        assert calls == ["p2", "warm-up", "p2", "p3"]
        told = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
        assert (told["interrupted"], told["all"]["prompts"]) == (False, 4)
        other = call(capsys, *command[:4], "9", *command[5:])
        assert other.code == EXIT_USAGE
        assert "another max_new_tokens" in other.err


def test_no_key_is_written_anywhere(
    capsys: Capture, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "sk-verysecretindeed")
    with serving(answers, ["m"]) as server:
        urls = ("--url", f"a={server.url}", "--url-key", "a=MY_SECRET")
        files = ("--json", tmp_path / "b.json", "--html", tmp_path / "b.html", "--journal", tmp_path / "j")
        ran = call(capsys, "bench", "-p", prompts, "-n", "8", *urls, *files)
        assert ran.code == 0, ran.err
        assert any("sk-verysecretindeed" in str(headers) for headers in server.headers)
    written = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 4
    assert not any("verysecret" in text for text in [*written, ran.out, ran.err])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "http://localhost:1/v1"), "not NAME=VALUE"),
        (("--url", "a=http://h:1", "--url", "a=http://h:2"), "twice"),
        (("--url", "a=http://h:1", "--url-model", "b=m"), "No --url is named 'b'"),
        (("--url", "a=http://h:1", "--url-key", "a=NOT_SET_AT_ALL"), "NOT_SET_AT_ALL is empty"),
        (("--no-local",), "nothing to time"),
        (("--accept", "0.5"), "--accept is for --predict"),
        (("--json", "no/such/folder/b.json"), "no folder"),
        (("-k", "0"), "not a list of numbers"),
        (("--predict", "--verify-ms", "1=45"), "go together"),
        (("--predict", "--verify-ms", "1=45,x", "--draft-ms", "4"), "not ROWS=MILLISECONDS"),
        (("--predict", "--verify-ms", "1=45,999=4", "--draft-ms", "4"), "pass of 999 rows"),
        (("--predict", "--verify-ms", "2=45", "--draft-ms", "4"), "one row"),
        (("--predict", "--accept", "0.5", "--accept-length", "2"), "each say it all"),
        (("--predict", "--accept", "half"), "--accept 'half'"),
        (("--predict", "--curve", "no-such.json"), "not the JSON of a check"),
    ],
)
def test_wrong_use_is_said_before_anything_is_timed(
    arguments: tuple[str, ...], said: str, capsys: Capture, prompts: Path
) -> None:
    ran = call(capsys, "bench", "-p", prompts, *arguments)
    assert ran.code == EXIT_USAGE
    assert said in ran.err


def test_a_prediction_needs_no_model_at_all(capsys: Capture, tmp_path: Path) -> None:
    curve = tmp_path / "check.json"
    point = {"draft_tokens": 2, "value": 1.84, "low": 1.7, "high": 2.0}
    curve.write_text(json.dumps({"accept_length": [point]}), encoding="utf-8")
    times = ("--predict", "--verify-ms", "1=45,5=60", "--draft-ms", "4")
    html = tmp_path / "p.html"
    ran = call(capsys, "bench", *times, "--curve", curve, "--json", "-", "--html", html)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    wanted = 1.84 / (52.5 / 45 + 2 * 4 / 45)
    assert told["conclusion"] == "pays"
    assert told["best"]["ratio"]["value"] == pytest.approx(wanted)
    assert told["accept_length_from"] == "walk"
    assert read_back(html.read_text(encoding="utf-8")) == told
    assert "Speculation pays here." in ran.err
    bare = call(capsys, "bench", *times)
    assert "can pay here, if the drafter is good enough" in bare.out


@pytest.mark.real
def test_a_prediction_times_the_target_itself(capsys: Capture) -> None:
    """On the real target; no drafter is read."""
    arguments = ("--predict", "-k", "1,2", "--accept-length", "1.8", "--drafter", "no-such-drafter")
    ran = call(capsys, "bench", *arguments, "--json", "-")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert [row["rows"] for row in told["step_times"]["verify"]] == [1, 2, 3]
    assert all(row["seconds"] > 0 for row in told["step_times"]["verify"])
    assert 0 < told["step_times"]["draft_depth_seconds"] < told["step_times"]["verify"][0]["seconds"]
    assert [row["timed"] for row in told["by_draft_tokens"]] == [True, True]
    assert told["conclusion"] in ("pays", "loses", "cannot")


def test_counts_are_parsed() -> None:
    assert verb.parse_counts("1,2,4") == [1, 2, 4]
