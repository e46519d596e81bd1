"""Many clients against one `eyas serve`: nothing lost, crossed or cut, memory flat, no thread left over.

    python runs/serve_load.py                      # 32 clients, 5 minutes, SmolLM2 and the shipped drafter
    python runs/serve_load.py --in-turn 1,2,4,8    # what playing R answers in turn costs each of them

Of ten requests one hangs up in the middle of its answer and one is nonsense; the rest are read to their end. Every
whole answer is then compared with what plain decoding says to the same prompt alone, up to ties (`eyas.decode.ties`).
The server is a process of its own; its memory, threads and open files are read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from eyas import provenance
from eyas import target as targets
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.render import Renderer

QUESTIONS = [
    "Name three primary colours.", "Why is the sky blue?", "Write a haiku about rain.", "What is 17 plus 25?",
    "Explain what a hawk eats.", "Give me a recipe for pancakes.", "Who wrote Hamlet?", "Translate 'cat' into French.",
    "List five European capitals.", "What does DNA stand for?", "Tell me a joke about a crow.", "How do magnets work?",
    "Suggest a name for a pet pelican.", "What is the speed of light?", "Describe the sea in one sentence.",
    "How do I boil an egg?",
]  # fmt: skip
NONSENSE = [
    b"{", b"[]", b'{"messages": 3}', b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "x"}], "nonsense": true}',
]  # fmt: skip
TIED_AT_MOST = 0.02


@dataclass
class Told:
    """What came of all requests. ``answers``: (question, length) and the ids that came."""

    outcomes: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[str, int, list[int]]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """Of the server's process: resident megabytes, threads, open files."""

    seconds: float
    megabytes: float
    threads: int
    files: int


def held(pid: int, began: float) -> Held:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Held(time.monotonic() - began, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files)


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`eyas serve` on a free port, and its address."""
    command = [sys.executable, "-m", "eyas", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "http://" in line:
                break
        else:
            raise SystemExit("the server did not start")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield process, "http://" + line.split("http://")[1].split("/")[0]
    finally:
        process.kill()
        process.wait()
        drain.wait()


# -- clients ---------------------------------------------------------------------------------------------------------


async def client(http: httpx.AsyncClient, seed: int, until: float, told: Told) -> None:
    """One request after another; what kind each is, is drawn."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        kind = chance.choices(("read", "hang up", "nonsense"), (8, 1, 1))[0]
        try:
            if kind == "nonsense":
                await nonsense(http, chance, told)
            else:
                await stream(http, chance, told, hang_up=kind == "hang up")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            told.outcomes["lost"] += 1
            told.faults.append(f"{kind}: {type(error).__name__}: {error}")


async def nonsense(http: httpx.AsyncClient, chance: random.Random, told: Told) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await http.post("/v1/chat/completions", content=chance.choice(NONSENSE), headers=headers)
    fine = answer.status_code == 400 and "message" in answer.json()["error"]
    told.outcomes["nonsense refused" if fine else "nonsense taken"] += 1


async def stream(http: httpx.AsyncClient, chance: random.Random, told: Told, *, hang_up: bool) -> None:
    question, length = chance.choice(QUESTIONS), chance.choice((16, 32, 48))
    body = {
        "messages": [{"role": "user", "content": question}], "max_tokens": length, "temperature": 0, "stream": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    leave_after = chance.randint(1, 6) if hang_up else None
    began, ids, finish, usage, chunks = time.monotonic(), list[int](), None, None, 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            told.outcomes[f"status {answer.status_code}"] += 1
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                told.outcomes[chunk["error"]["code"]] += 1
                return
            chunks += 1
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                if choice.get("token_ids") and not ids:
                    told.first.append(time.monotonic() - began)
                ids += choice.get("token_ids", [])
                finish = choice["finish_reason"] or finish
            if leave_after is not None and chunks > leave_after:
                told.outcomes["hung up"] += 1
                return
    if finish is None or usage is None or usage["completion_tokens"] != len(ids):
        told.outcomes["cut"] += 1
        told.faults.append(f"cut: {question!r} after {len(ids)} tokens")
        return
    told.outcomes["whole"] += 1
    told.answers.append((question, length, ids))


async def load(address: str, pid: int, clients: int, seconds: float, seed: int) -> tuple[Told, list[Held]]:
    told, seen, began = Told(), [], time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=900, limits=limits, trust_env=False) as http:
        running = [asyncio.ensure_future(client(http, seed * 1000 + i, began + seconds, told)) for i in range(clients)]
        while not all(one.done() for one in running):
            seen.append(held(pid, began))
            await asyncio.sleep(1.0)
        await asyncio.gather(*running)
    return told, seen


# -- judgement -------------------------------------------------------------------------------------------------------


def compare(target: targets.Target, answers: list[tuple[str, int, list[int]]]) -> dict[str, int]:
    """Each answer against the same request alone."""
    assert target.tokenizer is not None
    renderer, oracles = Renderer(target.tokenizer, target.eos_ids()), dict[str, tuple[list[int], list[float]]]()
    counts = Counter[str](equal=0, tied=0, other=0)
    with packed(target):
        for question in sorted({q for q, _, _ in answers}):
            gaps: list[float] = []
            prompt = renderer.ids([{"role": "user", "content": question}], prompt=True)
            oracles[question] = list(plain(target, prompt, max_new_tokens=48, gaps=gaps)), gaps
    for question, length, ids in answers:
        oracle, gaps = oracles[question]
        parted = first_difference(oracle[:length], ids, gaps[:length])
        counts["equal" if parted is None else "tied" if parted.excused else "other"] += 1
    return dict(counts)


def verdict(told: Told, compared: dict[str, int], idle: Held, seen: list[Held], after: Held) -> list[str]:
    """What is not as it must be."""
    wrong = [f"{count} {what}" for what, count in told.outcomes.items() if what in ("lost", "cut", "nonsense taken")]
    if compared["other"]:
        wrong.append(f"{compared['other']} answers are not those of the same request alone")
    if compared["tied"] > TIED_AT_MOST * max(1, sum(compared.values())):
        wrong.append(f"{compared['tied']} of {sum(compared.values())} answers excused by ties")
    third = len(seen) // 3
    middle, last = (statistics.median(h.megabytes for h in part) for part in (seen[third : 2 * third], seen[-third:]))
    if last > middle * 1.02:
        wrong.append(f"memory grew from {middle:.0f} to {last:.0f} MB between the second and the last third")
    if after.threads > idle.threads:
        wrong.append(f"{after.threads} threads afterwards, {idle.threads} before")
    if after.files > idle.files + 1:
        wrong.append(f"{after.files} open files afterwards, {idle.files} before")
    return wrong


def measure(arguments: argparse.Namespace) -> int:
    with server("--max-running", str(arguments.max_running), "--queue-timeout", "600") as (process, address):
        warm(address)
        idle = held(process.pid, time.monotonic())
        told, seen = asyncio.run(load(address, process.pid, arguments.clients, arguments.seconds, arguments.seed))
        time.sleep(35)  # idle connections are closed after 30 s
        after = held(process.pid, time.monotonic())
        metrics = httpx.get(f"{address}/metrics", trust_env=False).text
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    compared = compare(targets.load("smollm2"), told.answers)
    wrong = verdict(told, compared, idle, seen, after) + ([f"exit code {code}"] if code else [])
    tokens = sum(len(ids) for _, _, ids in told.answers)
    made = {
        "clients": arguments.clients, "seconds": arguments.seconds, "max_running": arguments.max_running,
        "outcomes": dict(told.outcomes), "compared": compared, "tokens_per_second": tokens / seen[-1].seconds,
        "first_token_seconds": dict(zip(("p50", "p95", "max"), quantiles(told.first), strict=True)),
        "accept_length": float(metrics.split("\neyas_serve_accept_length ")[1].split()[0]),
        "idle": asdict(idle), "after": asdict(after), "most_megabytes": max(h.megabytes for h in seen),
        "most_threads": max(h.threads for h in seen), "faults": told.faults[:20], "wrong": wrong,
        "megabytes": [round(h.megabytes, 1) for h in seen[:: max(1, len(seen) // 30)]],
        "provenance": provenance.collect({"seed": arguments.seed}),
    }  # fmt: skip
    print(json.dumps(made, indent=2))
    return bool(wrong)


def quantiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values) or [float("nan")]
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)], ordered[-1]


def warm(address: str) -> None:
    for question in QUESTIONS[:2]:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
        httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600, trust_env=False).raise_for_status()


# -- in turn ---------------------------------------------------------------------------------------------------------


async def together(address: str, count: int, length: int) -> tuple[float, float, float]:
    """``count`` answers begun at once: tokens/s of all, of the slowest, and seconds to the last one's first token."""

    async def one(http: httpx.AsyncClient, question: str) -> tuple[float, float, int]:
        body = {"prompt": question, "max_tokens": length, "temperature": 0, "stream": True, "return_token_ids": True}
        body["logit_bias"] = {"2": -100, "0": -100}  # SmolLM2's end tokens: all answers are of one length
        began, first, tokens = time.monotonic(), 0.0, 0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic() - began
                    tokens += sum(len(c["token_ids"]) for c in json.loads(line[6:])["choices"])
        return time.monotonic() - began, first, tokens

    async with httpx.AsyncClient(base_url=address, timeout=900, trust_env=False) as http:
        began = time.monotonic()
        done = await asyncio.gather(*(one(http, QUESTIONS[i % len(QUESTIONS)]) for i in range(count)))
        seconds = time.monotonic() - began
    tokens = sum(t for _, _, t in done)
    return tokens / seconds, min(t / s for s, _, t in done), max(f for _, f, _ in done)


def in_turn(counts: list[int], length: int = 64, repeats: int = 3) -> int:
    """A table: what is lost by playing several answers in turn (nothing is gained: no pass holds two of them)."""
    with server("--max-running", str(max(counts))) as (_, address):
        warm(address)
        rows: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}
        for _ in range(repeats):  # alternating
            for count in counts:
                rows[count].append(asyncio.run(together(address, count, length)))
    print("| answers in turn | tokens/s of all | tokens/s of the slowest | last first token, s |\n|---|---|---|---|")
    for count, found in rows.items():
        print(
            f"| {count} | "
            + " | ".join(f"{statistics.median(column):.2f}" for column in zip(*found, strict=True))
            + " |"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--max-running", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-turn", metavar="R,R,...")
    arguments = parser.parse_args()
    if arguments.in_turn:
        return in_turn([int(word) for word in arguments.in_turn.split(",")])
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
