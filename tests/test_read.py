"""`eyas read`: files, standard input and real servers; runs kept apart; text that is cut, coloured, foreign or none."""

from __future__ import annotations

import gzip
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas.engines import scrape
from eyas.engines.scrape import page
from eyas.errors import EnvironmentFault, InputError, UsageError
from folders import Ran, call

RECORDED = Path(__file__).parent / "fixtures" / "engines"
Capture = pytest.CaptureFixture[str]


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"metrics-{name}.json").read_text(encoding="utf-8"))["cases"][0]


VLLM, SGLANG = recorded("vllm-0.32.0"), recorded("sglang-0.5.23")
START = (
    "(EngineCore pid=7) INFO 11-29 23:03:43 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='m', "
    "speculative_config=SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3), tokenizer='m'"
)
PREFIX = "(APIServer pid=8091) INFO 11-29 23:04:0{} [metrics.py:101] "


def log(*lines: str, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode()


def served(case: Any = VLLM) -> list[str]:
    """A run as vLLM logs it, with lines of other matters between."""
    rows = [START]
    for i, line in enumerate(case["lines"]):
        rows += [
            '(APIServer pid=8091) INFO: 127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200',
            PREFIX.format(i) + line,
        ]
    return rows


def observed(ran: Ran) -> list[Any]:
    told = json.loads(ran.out)
    assert told["schema"] == 1
    return list(told["observed"])


# -- what comes out -------------------------------------------------------------------------------------------


def test_json_and_table(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(log(*served()))
    ran = call(capsys, "read", path, "--json", "-")
    (run,) = observed(ran)
    truth = VLLM["truth"]
    assert ran.code == 0
    assert (run["engine"], run["version"], run["draft_tokens"]) == ("vllm", "0.32.0", 3)
    assert (run["rounds"], run["drafted"], run["accepted"]) == (truth["rounds"], truth["drafted"], truth["accepted"])
    assert run["where"] == "engine.log, line 3"
    for depth, hit in zip(run["depths"], truth["hits"], strict=True):
        assert (depth["joint"]["hits"], depth["joint"]["n"]) == (hit, truth["rounds"])
        assert depth["joint"]["interval"] == "wilson"
        assert depth["joint"]["low"] < hit / truth["rounds"] < depth["joint"]["high"]
    shown = call(capsys, "read", path).out
    for word in ("vllm 0.32.0", "896", "1,626", "2.815", "711 of 896", "No findings"):
        assert word in shown, word


def test_exit_code_follows_the_findings(tmp_path: Path, capsys: Capture) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_bytes(log(*VLLM["lines"]))
    bad.write_bytes(log(*[line.replace("length: 2", "length: 1") for line in VLLM["lines"]]))
    ran = call(capsys, "read", good, bad, "--json", "-")
    assert ran.code == 1
    assert len(observed(ran)) == 2
    (finding,) = json.loads(ran.out)["findings"]
    assert (finding["cause"], finding["kind"], finding["severity"]) == ("bonus-dropped", "metric", "likely")
    assert finding["evidence"] == [{"measure": "length", "value": 1.7, "expected": 2.7, "source": "bad.log, line 1"}]
    assert finding["summary"].endswith("(5 times.)")


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Stdin:
        buffer = io.BytesIO(log(*VLLM["page"]))

    monkeypatch.setattr(sys, "stdin", Stdin())
    (run,) = observed(call(capsys, "read", "-", "--json", "-"))
    assert (run["kind"], run["rounds"]) == ("metrics page", VLLM["truth"]["rounds"])


# -- runs -----------------------------------------------------------------------------------------------------


def read(text: bytes, *, block: int = 1 << 20) -> scrape.Reading:
    return scrape.read([text[i : i + block] for i in range(0, len(text), block)] or [b""], "engine.log")


def causes(reading: scrape.Reading) -> list[str]:
    return sorted(finding.cause for finding in reading.findings)


@pytest.mark.parametrize("block", [1, 7, 4096, 1 << 20])
def test_blocks_of_any_size_read_the_same(block: int) -> None:
    text = log(*served())
    assert read(text, block=block) == read(text)
    assert read(text[:-1], block=block) == read(text)


def test_runs_of_one_text_are_kept_apart() -> None:
    second = {"lines": VLLM["lines"][:2]}
    reading = read(log(*served(), *served(second)))
    assert [run.rounds for run in reading.observed] == [896, 137]
    assert causes(reading) == ["runs-mixed"]
    other = [line.replace(", 0.", ", 0.", 1) for line in recorded_lines("one token")]
    reading = read(log(*served(), *other))
    assert [run.draft_tokens for run in reading.observed] == [3, 1]
    assert causes(reading) == ["rates-at-different-k", "rates-at-different-k", "runs-mixed"]


def recorded_lines(name: str) -> list[str]:
    told = json.loads((RECORDED / "metrics-vllm-0.32.0.json").read_text(encoding="utf-8"))
    return next(list(case["lines"]) for case in told["cases"] if case["name"] == name)


def test_several_engines_in_one_text() -> None:
    mixed = [line for pair in zip(VLLM["lines"], SGLANG["lines"], strict=True) for line in pair]
    reading = read(log(*mixed))
    assert [(run.engine, run.lines) for run in reading.observed] == [("vllm", 5), ("sglang", 5)]


def test_pages_one_after_the_other_show_the_newest_and_a_restart() -> None:
    def page_of(scale: int) -> list[str]:
        rows = []
        for row in VLLM["page"]:
            name, _, value = row.rpartition(" ")
            rows.append(row if row.startswith("#") or "_created" in row else f"{name} {float(value) * scale}")
        return rows

    growing = read(log(*page_of(1), *page_of(2)))
    assert [run.rounds for run in growing.observed] == [2 * 896]
    restarted = read(log(*page_of(2), *page_of(1)))
    assert [run.rounds for run in restarted.observed] == [2 * 896, 896]


# -- bad input ------------------------------------------------------------------------------------------------


def test_colours_windows_line_ends_and_a_decimal_comma() -> None:
    plain = read(log(*served())).observed
    coloured = [row.replace("INFO", "\x1b[32mINFO\x1b[0m").replace("2.70", "\x1b[1m2.70\x1b[0m") for row in served()]
    assert read(log(*coloured)).observed == plain
    assert read(log(*served(), end="\r\n")).observed == plain
    rows = [line.replace("0.", "0,").replace("2.", "2,").replace("56.", "56,") for line in VLLM["lines"]]
    assert read(log(*rows)).observed[0].accept_length == plain[0].accept_length
    sglang = [line.replace("2.", "2,").replace("0.", "0,") for line in SGLANG["lines"]]
    assert read(log(*sglang)).observed == read(log(*SGLANG["lines"])).observed


def test_cut_lines_are_left_out_and_said() -> None:
    line = VLLM["lines"][0]
    whole = read(log(*VLLM["lines"])).observed[0]
    for end in (40, line.index("Accepted: 68") + 5, line.index("0.550") + 3, line.index("Per-pos") + 12):
        reading = read(log(line[:end], *VLLM["lines"]))
        assert causes(reading) == ["log-damaged"], line[:end]
        assert (reading.observed[0].rounds, reading.observed[0].lines) == (whole.rounds, 5)
        assert "line 1" in reading.findings[0].summary
    half = SGLANG["lines"][0]
    half = half[: half.index("accept len: 2.") + len("accept len: 2.")]
    assert causes(read(log(half, *SGLANG["lines"]))) == ["log-damaged"]


@pytest.mark.parametrize(
    "body",
    [
        '{"spec_verify_ct": "many", "completion_tokens": 3}',
        '{"spec_verify_ct": -4}',
        '{"spec_verify_ct": 4, "spec_num_correct_drafts": 2.5}',
        '{"spec_verify_ct": 1e400}',
        '{"spec_verify_ct": 3, "completion_tokens": true}',
        '{"acceptance_histogram": [1, 2], "num_spec_steps": 3}',
        '{"acceptance_histogram": 3}',
        '{"draft_n_accepted": 3}',
        '{"timings": {"draft_n": null, "draft_n_accepted": 3}}',
        '{"numRequestsWithDraftTokens": 3}',
        "vllm:spec_decode_num_drafts_total{engine= 896.0",
        "vllm:spec_decode_num_drafts_total NaN",
        "vllm:spec_decode_num_secrets_total 5",
        "statistics draft-eagle3: #acc tokens = many",
        "slot 0 | draft acceptance = lots",
    ],
)
def test_nonsense_is_left_out(body: str) -> None:
    with pytest.raises(InputError, match="nothing of speculation"):
        read(log(body))
    reading = read(log(body, *VLLM["lines"]))
    assert reading.observed[0].rounds == 896
    assert causes(reading) == ["log-damaged"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b"\x7fELF\x00\x01", "zero bytes"),
        ("accept len: 2.0".encode("utf-16"), "UTF-16-LE"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"INFO hello\n" * 3, r"nothing of speculation \(3 lines read\)"),
    ],
)
def test_no_text_of_an_engine(text: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text)


def test_a_line_without_end_costs_no_memory() -> None:
    junk = b"SpecDecoding metrics: " + b"x" * (5 << 20)
    reading = read(junk + b"\n" + log(*VLLM["lines"]))
    assert causes(reading) == ["log-damaged"]
    assert reading.observed[0].rounds == 896


def test_a_document_too_large_and_a_log_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    dated = [f"[2026-11-30 01:00:0{i}] {line}" for i, line in enumerate(SGLANG["lines"])]
    assert read(log(*dated)).observed[0].lines == 5
    monkeypatch.setattr(scrape, "MOST_JSON", 1000)
    with pytest.raises(InputError, match="JSON document"):
        read(json.dumps(VLLM["bodies"], indent=2).encode(), block=500)


def test_files_packed_missing_and_cut(tmp_path: Path, capsys: Capture) -> None:
    packed = tmp_path / "engine.log.gz"
    packed.write_bytes(gzip.compress(log(*served())))
    assert observed(call(capsys, "read", packed, "--json", "-"))[0]["rounds"] == 896
    cut = tmp_path / "cut.log.gz"
    cut.write_bytes(gzip.compress(log(*served()))[:-40])
    for source, words in (
        (cut, "not a whole gzip file"),
        (tmp_path / "none.log", "does not exist"),
        (tmp_path, "is a folder"),
    ):
        ran = call(capsys, "read", source)
        assert (ran.code, words in ran.err) == (2, True), ran.err


def test_a_gzip_bomb_is_refused(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.cli import read as verb

    monkeypatch.setattr(verb, "MOST_UNPACKED", 1 << 20)
    bomb = tmp_path / "engine.log.gz"
    bomb.write_bytes(gzip.compress(b"a line of the log\n" * (1 << 18)))
    ran = call(capsys, "read", bomb)
    assert (ran.code, "unpacks to more than" in ran.err) == (2, True), ran.err


# -- addresses ------------------------------------------------------------------------------------------------


@contextmanager
def serving(status: int, body: bytes, kind: str = "text/plain", slow: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/moved":
                self.send_response(307)
                self.send_header("Location", "/metrics/")
                self.end_headers()
                return
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            try:
                for i in range(0, len(body), 1 << 16):
                    self.wfile.write(body[i : i + (1 << 16)])
                    self.wfile.flush()
                    time.sleep(slow)
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_bare_host_is_asked_for_its_metrics(capsys: Capture) -> None:
    with serving(200, log(*VLLM["page"])) as (url, asked):
        ran = call(capsys, "read", url, "--json", "-")
        assert call(capsys, "read", f"{url}/moved", "--json", "-").code == 0
    assert asked == ["/metrics", "/moved", "/metrics/"]
    assert (ran.code, observed(ran)[0]["accepted"]) == (0, VLLM["truth"]["accepted"])
    assert observed(ran)[0]["where"] == f"{url}/metrics, line 3"


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "words"),
    [
        (404, b"no", "text/plain", 2, "HTTP 404"),
        (500, b"no", "text/plain", 2, "HTTP 500"),
        (200, b"<html></html>", "text/html; charset=utf-8", 2, "HTML page"),
        (200, b"# HELP up\nup 1\n", "text/plain", 2, "nothing of speculation"),
    ],
)
def test_an_answer_that_is_no_page(status: int, body: bytes, kind: str, code: int, words: str, capsys: Capture) -> None:
    with serving(status, body, kind) as (url, _):
        ran = call(capsys, "read", url)
    assert (ran.code, words in ran.err) == (code, True), ran.err


def test_a_server_that_is_down_huge_or_slow(capsys: Capture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ran = call(capsys, "read", f"http://127.0.0.1:{port}")
    assert (ran.code, "cannot be reached" in ran.err) == (4, True), ran.err
    with serving(200, b"x" * (3 << 20)) as (url, _), pytest.raises(InputError, match="more than 1 MB"):
        page.fetch(url, most=1 << 20)
    with (
        serving(200, b"x" * (1 << 20), slow=0.1) as (url, _),
        pytest.raises(EnvironmentFault, match="has not finished"),
    ):
        page.fetch(url, seconds=0.3)


@pytest.mark.parametrize(
    "url", ["ftp://host/metrics", "http://", "file:///etc/passwd", "http://me:secret@host/metrics"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as error:
        page.address(url)
    assert "secret" not in str(error.value)
