"""`eyas diagnose --url`: an engine of others over real HTTP, read and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.diagnose import outputs
from eyas.diagnose.served import served
from folders import call
from test_diagnose import CASE, TEXTS, TOKENS, Faults, K, collected, grave, healthy, target, texts

Capture = pytest.CaptureFixture[str]
PAGE = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} {rounds}
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} {drafted}
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} {accepted}
"""


class Engine:
    """Answers the prompts it was played on, and counts as vLLM does; ``visitors`` adds rounds of somebody else."""

    def __init__(self, faults: Faults, visitors: int = 0) -> None:
        found = collected(faults, count=TEXTS)
        # What the last round kept past the end of an answer is counted too, as vLLM counts it.
        truths = [np.append(record.input_ids[1:], -1) for record in texts()]
        rounds, hits = outputs.counted(served(found.answers, found.turns), K, truths)
        self.known = {
            a.prompt_ids: (a.token_ids, int(n), h.tolist()) for a, n, h in zip(found.answers, rounds, hits, strict=True)
        }
        self.rounds, self.hits, self.visitors = 0, [0] * K, visitors
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        tokens, rounds, hits = self.known[tuple(body["prompt"])]
        self.rounds += rounds + self.visitors
        self.hits = [a + b for a, b in zip(self.hits, hits, strict=True)]
        self.at_once -= 1
        choice = {"token_ids": list(tokens), "finish_reason": "length", "prompt_token_ids": body["prompt"]}
        return {"choices": [choice]}

    def page(self) -> str:
        text = PAGE.replace("{rounds}", str(self.rounds)).replace("{drafted}", str(self.rounds * K))
        text = text.replace("{accepted}", str(sum(self.hits)))
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return text + "".join(
            f'{name}{{engine="0",model_name="m",position="{k}"}} {h}\n' for k, h in enumerate(self.hits)
        )


@contextmanager
def running(engine: Engine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def give(self, body: Any) -> None:
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            engine.asked.append(f"GET {self.path}")
            models = {"data": [{"id": "m", "root": "/home/somebody/m", "max_model_len": 512}]}
            self.give({"/version": {"version": "0.32.0"}, "/v1/models": models}.get(self.path) or engine.page())

        def do_POST(self) -> None:
            engine.asked.append(f"POST {self.path}")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.give(engine.answer(body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prompts(engine: Engine, folder: Path) -> Path:
    """The texts whose tokens the target's tokenizer gives back: this target has no template."""
    tokenizer = target().tokenizer
    assert tokenizer is not None
    lines = []
    for ids in list(engine.known):
        text = tokenizer.decode(list(ids))
        again = tuple(tokenizer(text)["input_ids"])
        if again != ids:
            engine.known[again] = engine.known[ids]
        lines.append(json.dumps({"id": str(len(lines)), "turns": [text]}))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ran(engine: Engine, folder: Path, capsys: Capture) -> dict[str, Any]:
    file = prompts(engine, folder)
    with running(engine) as url:
        done = call(capsys, "diagnose", CASE / "trained", "-t", CASE / "target", "--url", url, "-p", file, "-n", TOKENS,
                    "--limit", TEXTS, "--json", "-")  # fmt: skip
    told: dict[str, Any] = json.loads(done.out)
    return told | {"code": done.code}


def test_it_is_asked_one_at_a_time_and_nothing_is_set(tmp_path: Path, capsys: Capture) -> None:
    engine = Engine(Faults(healthy()))
    told = ran(engine, tmp_path, capsys)
    assert told["code"] == 0, (told["findings"], told["not_checked"], told["gap"], told["served"])
    assert told["verdict"] == "healthy"
    assert told["probes"] is None
    assert abs(told["gap"]["value"]) < 0.02
    assert engine.most_at_once == 1
    assert set(engine.asked) <= {
        "GET /version",
        "GET /v1/models",
        "GET /metrics",
        "POST /v1/completions",
        "POST /tokenize",
    }
    assert engine.asked.count("POST /v1/completions") == TEXTS
    assert any("only an engine that eyas starts is probed" in what for what in told["engine"]["unseen"])
    assert "somebody" not in json.dumps(told["engine"])


def test_one_that_keeps_less_falls_short_and_no_file_is_blamed(tmp_path: Path, capsys: Capture) -> None:
    told = ran(Engine(Faults(healthy(taps=(2, 3, 6)))), tmp_path, capsys)
    assert grave(told) == ["engine-falls-short"]
    assert (told["verdict"], told["code"]) == ("undecided", 3)


def test_two_clients_at_once_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    told = ran(Engine(Faults(healthy()), visitors=9), tmp_path, capsys)
    assert grave(told) == []
    assert "others-served" in [f["cause"] for f in told["findings"]]
    assert told["gap"] is None
    assert (told["verdict"], told["code"]) == ("undecided", 3)
