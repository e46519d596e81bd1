"""Results of `eyas diagnose` as its JSON has them, made up: faulty, healthy, half seen, hostile."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from eyas.results import Evidence, Finding, NotChecked, Rival
from test_report import result as checked
from test_report_sweep import swept

Json = dict[str, Any]
K = 4

HOSTILE = (
    "</script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)> {{7*7}} {% raw %} "
    "\u2028\u2029 \u202egnp.exe \U0001f469\u200d\U0001f680 \ud83d & \"'`${1}` ]]> \x00\x1b[2J $\\frac{1}{2}$ "
    "[red]x[/red]"
)

TALK = (
    (
        "Why does the sky look blue?",
        "Sunlight holds every colour. Air scatters short waves far more than long ones, so blue light reaches your "
        "eyes from all sides of the sky.\n\nAt sunset the light crosses more air. Most of the blue is gone by then, "
        "and what is left looks orange or red.",
    ),
    (
        "Write a Python function that returns the n-th Fibonacci number.",
        "```python\ndef fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
        "    return a\n```\n\nIt runs in linear time and keeps only two numbers.",
    ),
    (
        "Give me three tips for a better night's sleep.",
        "1. Go to bed at the same hour each day.\n2. Keep the room cool and dark.\n3. Put screens away an hour before.",
    ),
    (
        "Translate to French: The train leaves at noon.",
        "Le train part à midi.",
    ),
    (
        "A farmer has 17 sheep. All but 9 run away. How many are left?",
        "Nine sheep are left. “All but nine” means that nine did not run away.",
    ),
)


def rate(hits: int, n: int) -> Json:
    if n == 0:
        return {"hits": hits, "n": n, "rate": None, "low": None, "high": None}
    p = hits / n
    half = 1.96 * math.sqrt(p * (1 - p) / n + 1e-6)
    return {"hits": hits, "n": n, "rate": p, "low": max(0.0, p - half), "high": min(1.0, p + half)}


def depths(rounds: int, hits: Sequence[int]) -> list[Json]:
    before = [rounds, *hits[:-1]]
    return [
        {"depth": k, "joint": rate(hit, rounds), "conditional": rate(hit, came)}
        for k, (hit, came) in enumerate(zip(hits, before, strict=True))
    ]


def length(rounds: int, hits: Sequence[int]) -> Json:
    value = 1 + sum(hits) / rounds
    return {"value": value, "low": value - 0.07, "high": value + 0.08, "rounds": rounds}


EXPECTED = (1411, (912, 634, 488, 379))
FAULTY = (2846, (401, 131, 46, 19))


def expected(rounds: int = EXPECTED[0], hits: Sequence[int] = EXPECTED[1]) -> Json:
    reading = "taps 3, 16, 28 and the raw state fed back, as the files say; played on the same prompts"
    return {"accept_length": length(rounds, hits), "depths": depths(rounds, hits), "reading": reading}


def observed(rounds: int = FAULTY[0], hits: Sequence[int] = FAULTY[1], source: str = "probe") -> Json:
    told = {"accept_length": length(rounds, hits), "depths": depths(rounds, hits), "rounds": rounds}
    return told | {"drafted": rounds * K, "accepted": sum(hits), "source": source}


def gap(theirs: Json, ours: Json, explained: float | None = None) -> Json:
    def apart(a: Json, b: Json, half: float) -> Json:
        value = a["value"] - b["value"]
        return {"value": value, "low": value - half, "high": value + half}

    rows = [
        {"depth": a["depth"], **apart({"value": a["joint"]["rate"]}, {"value": b["joint"]["rate"]}, 0.03)}
        for a, b in zip(theirs["depths"], ours["depths"], strict=True)
    ]
    whole = apart(theirs["accept_length"], ours["accept_length"], 0.09)
    return whole | {"explained": explained, "depths": rows}


def pieces(text: str) -> list[str]:
    return re.findall(r" ?\w+|\n+ *|[^\w\s]| +", text)


def conversation(name: str, prompt: str, answer: str, skill: float, seed: int = 0) -> Json:
    """A draft-and-verify play of ``answer``: each drafted token is right with chance ``skill``, less so when deeper."""
    rng = random.Random(seed)
    tokens = pieces(answer)
    at, rounds = 1, []
    while at < len(tokens):
        drafted: list[Json] = []
        right = 0
        for k in range(K):
            truth = tokens[at + k] if at + k < len(tokens) else "<|im_end|>"
            kept = right == k and rng.random() < skill * 0.93**k
            right += kept
            told: Json = {"text": truth if kept else rng.choice(tokens), "kept": kept, "wanted": None, "rank": None}
            if not kept:
                rank = rng.choice([1, 1, 1, 2, 3, 7, None])
                told |= {"wanted": truth if right == k else rng.choice(tokens), "rank": rank}
            drafted.append(told)
        bonus = tokens[at + right] if at + right < len(tokens) else "<|im_end|>"
        rounds.append({"drafted": drafted, "bonus": bonus})
        at += right + 1
    wrapped = (
        "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    return {"id": name, "prompt": wrapped, "first": tokens[0], "rounds": rounds}


def talk(skill: float, count: int = len(TALK)) -> list[Json]:
    return [conversation(f"talk-{i:02}", *TALK[i % len(TALK)], skill, seed=i) for i in range(count)]


ENGINE: Json = {
    "name": "vllm",
    "version": "0.32.0",
    "runner": "v1",
    "mode": "launched",
    "url": "http://127.0.0.1:8123",
    "command": ["vllm", "serve", "targets/smollm2", "--speculative-config", '{"method": "eagle3", "model": "drafter", '
                '"num_speculative_tokens": 4}', "--api-key", "***", "--max-model-len", "2048", "--seed", "0"],
    "resolved": {
        "dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "speculative.method": "eagle3",
        "speculative.num_speculative_tokens": 4, "enable_prefix_caching": True, "max_num_seqs": 8,
        "chunked_prefill": {"enabled": True, "tokens": 2048}, "attention_backend": None,
    },
    "unseen": ["the drafter's key-value cache: this runner shows no hook there"],
}  # fmt: skip

SERVED: Json = {
    "prompts": 24, "tokens": 3072, "max_tokens": 128, "temperature": 0.0, "draft_tokens": K,
    "equal": 23, "near_ties": 1, "different": 0,
    "seconds": {"start": 48.2, "generate": 31.9, "reference": 22.7, "total": 131.4},
}  # fmt: skip

TAPS, LAYERS = (3, 16, 28), 31


def tap_stage(configured: Sequence[int], read: Sequence[int]) -> Json:
    """Errors as a residual stream gives them: neighbours are near, only the tap that is read is exact."""
    error = [[0.0007 if t == r else 0.08 + 0.055 * abs(t - r) for t in range(LAYERS)] for r in read]
    cosine = [[1 - e * e / 2 for e in row] for row in error]
    return {
        "status": "equal" if list(configured) == list(read) else "differs",
        "configured": list(configured), "observed": list(read), "taps": list(range(LAYERS)),
        "cosine": [[max(c, -1.0) for c in row] for row in cosine], "error": error,
        "margin": [112.0, 131.5, 127.2],
        "kind": "as configured" if list(configured) == list(read) else "taps-off-by-one",
    }  # fmt: skip


def probes(read: Sequence[int] = (4, 17, 29), *, healthy: bool = False) -> Json:
    off = "equal" if healthy else "differs"
    errors = (0.0011, 0.0012, 0.0012, 0.0013) if healthy else (0.612, 0.684, 0.731, 0.755)
    hits = (2846, 2844, 2840, 2839) if healthy else (1307, 988, 811, 702)
    told: Json = {"passes": 2910, "rows": 14_230, "bytes": 402_653_184}
    told["prompt"] = {"status": "equal", "requests": 24, "equal": 24, "first": None}
    told["tokens"] = {"status": "equal", "rows": 14_230, "equal": 14_230, "shift": 0}
    told["positions"] = {"status": "equal", "rows": 14_230, "offset": 0, "step": 1}
    told["taps"] = tap_stage(TAPS, TAPS if healthy else read)
    told["said"] = {"status": "equal", "norm": 0.0, "head": 4e-7, "ids": {"equal": 512, "n": 512}, "odd": [], "nan": 0}
    told["fused"] = {"status": off, "error": 0.0009 if healthy else 0.417}
    fits = {
        "facts": {"taps": list(read), "feedback": "normed"},
        "name": "taps 4, 17, 29, normed feedback",
        "error": 0.0013,
    }
    rows = [{"depth": k, "error": e, "n": 2846 - 7 * k} for k, e in enumerate(errors)]
    told["states"] = {"status": off, "depths": rows, "matched": None if healthy else fits}
    told["drafted"] = {"status": off, "depths": [{"depth": k, "equal": h, "n": 2846} for k, h in enumerate(hits)]}
    told["feedback"] = {
        "status": off, "fed": "the raw state" if healthy else "the normalised state",
        "errors": {"raw": 0.001 if healthy else 0.391, "normed": 0.402 if healthy else 0.0011, "target": 0.93},
    }  # fmt: skip
    rounds, kept = (1411, [912, 634, 488, 379]) if healthy else (2846, [401, 131, 46, 19])
    told["acceptance"] = {"status": "equal", "rounds": rounds, "as_greedy": rounds, "more": 0, "fewer": 0}
    counted = {"rounds": rounds, "accepted": kept}
    told["metrics"] = {"status": "equal", "counted": counted, "page": dict(counted)}
    return told


def base(checked_result: Json, **changes: Any) -> Json:
    told = {
        **checked_result,
        "checkpoint": "smollm2-eagle3", "target": "smollm2",
        "engine": json.loads(json.dumps(ENGINE)), "served": json.loads(json.dumps(SERVED)),
        "expected": None, "observed": None, "gap": None, "probes": None, "divergence": None,
        "repairs": [], "ruled_out": [], "conversations": [], "toggles": [],
        "provenance": {"torch": "2.13.0", "transformers": "5.2.1", "python": "3.12.9", "git": "5e1d5cb", "seed": "0",
                       "verb": "diagnose", "machine": "2 cores, x86_64"},
    }  # fmt: skip
    return told | changes


def two_faults() -> Json:
    taps = Finding(
        "taps-off-by-one", "fatal", "vLLM reads taps 4, 17, 29 where the drafter was trained on taps 3, 16, 28.",
        [
            Evidence("error of slot 0 against tap 4", 0.0007, 0.0, "14,230 rows fed to fc"),
            Evidence("error of slot 0 against tap 3", 0.135, 0.0, "14,230 rows fed to fc"),
            Evidence("tokens a round gained with taps 3, 16, 28", 0.9012, None, "24 prompts replayed"),
        ],
        fix="In drafter/config.json, for vLLM, set eagle_config.eagle_aux_hidden_state_layer_ids to [3, 16, 28] "
        "(now [4, 17, 29]).",
    )  # fmt: skip
    feedback = Finding(
        "feedback-post-norm", "likely", "From the second step on the drafter is fed its normalised state.",
        [Evidence("error of the state fed at depth 1 against the normed one", 0.0011, 0.391, "8,538 later steps")],
        rivals=[Rival("norm-gain-plus-one", "a reading with norm gains lowered by 1")],
    )  # fmt: skip
    note = Finding("contract-missing", "note", "The checkpoint carries no contract.")
    ours, theirs = observed(), expected()
    told = base(swept(findings=[taps, feedback, note]), expected=theirs, observed=ours)
    whole = gap(theirs, ours)["value"]
    told["gap"] = gap(theirs, ours, explained=whole - 0.012)
    told["probes"] = probes()
    what = "slots 0, 1 and 2 of fc are fed taps 4, 17, 29; configured are 3, 16, 28"
    told["divergence"] = {"stage": "taps", "what": what}
    now, aim = ours["accept_length"]["value"], theirs["accept_length"]["value"]
    told["repairs"] = [
        {"cause": "taps-off-by-one", "summary": "Read taps 3, 16, 28.", "reaches": now + 0.9012, "gain": 0.9012,
         "low": 0.82, "high": 0.98},
        {"cause": "feedback-post-norm", "summary": "Feed the raw state back.", "reaches": aim,
         "gain": aim - now - 0.9012, "low": 0.52, "high": 0.66},
    ]  # fmt: skip
    told["ruled_out"] = [
        {"kind": "prompt", "by": "24 of 24 prompts reached the engine as the template gives them"},
        {"kind": "shift", "by": "14,230 of 14,230 tokens stand beside the right state"},
        {"kind": "rope", "by": "positions are equal at every row, offset 0, one more a step"},
        {"kind": "weights", "by": "the drafter's tensors inside the engine have the hashes of the file"},
        {"kind": "metric", "by": "the metrics page counts what the probes counted"},
        {"kind": "vocab", "by": "every drafted id maps to the token the file's map gives"},
    ]
    told["toggles"] = [
        {"name": "eager", "setting": "--enforce-eager", "accept_length": 1.21, "rounds": 940, "predicted_minutes": 1.5,
         "outcome": "no difference"},
        {"name": "prefix cache", "setting": "--no-enable-prefix-caching", "accept_length": None, "rounds": 0,
         "predicted_minutes": 2.0, "outcome": "not tried: out of time"},
    ]  # fmt: skip
    told["conversations"] = talk(0.22)
    return told


def healthy() -> Json:
    theirs, ours = expected(), observed(1418, (909, 633, 485, 377))
    told = base(checked("healthy", findings=[], not_checked=[]), expected=theirs, observed=ours)
    told["gap"] = gap(theirs, ours, explained=None)
    told["probes"] = probes(healthy=True)
    told["engine"]["unseen"] = []
    told["ruled_out"] = [{"kind": kind, "by": "probes equal at every row"} for kind in ("taps", "feedback", "shift")]
    told["conversations"] = talk(0.72)
    return told


def attached() -> Json:
    """An engine that eyas did not start: counts from its metrics page, nothing from inside."""
    theirs, ours = expected(), observed(source="metrics")
    falls = Finding(
        "engine-falls-short", "likely", "vLLM keeps 1.21 tokens a round where these files give 2.71.",
        [Evidence("accept length", 1.2098, 2.71, "24 prompts")],
        rivals=[Rival("taps-off-by-one", "`eyas diagnose` with an engine it starts"),
                Rival("feedback-post-norm", "`eyas diagnose` with an engine it starts")],
    )  # fmt: skip
    missing = [NotChecked("inside the engine", "it was already running, so nothing could be put into it", needed=True)]
    told = base(checked("undecided", findings=[falls], not_checked=missing), expected=theirs, observed=ours)
    told["engine"] |= {"mode": "attached", "runner": None, "command": [], "unseen": ["everything before the counts"]}
    told["gap"] = gap(theirs, ours)
    told["conversations"] = []
    return told


def bundle() -> Json:
    """What a colleague sent: no texts, no address."""
    told = two_faults()
    told["engine"] |= {"mode": "bundle", "url": None}
    told["conversations"] = []
    return told


def died() -> Json:
    """The engine stopped before it served anything."""
    refused = Finding(
        "flag-refused", "fatal", "vLLM stops at its command line: --speculative-config is not valid JSON.",
        [Evidence("exit status", 2, 0, "vllm serve")],
    )  # fmt: skip
    missing = [NotChecked("what the engine keeps", "it died after 3.1 seconds", needed=True)]
    told = base(checked("miswired", findings=[refused], not_checked=missing))
    told["curves"], told["accept_length"] = {"teacher_forced": None, "walk": None}, []
    told["served"] = None
    told["engine"] |= {"resolved": {}, "unseen": ["everything: the engine died at its start"]}
    return told


def hostile() -> Json:
    """Two faults, and every text of ours replaced by one that wants out."""
    told = two_faults()
    told = _everywhere(told)
    told["checkpoint"] = f"drafter {HOSTILE}"
    told["conversations"][0]["rounds"][0]["drafted"][0] |= {
        "text": "x" * 30_000,
        "kept": False,
        "wanted": "\u202e" * 900,
    }
    told["engine"]["resolved"][HOSTILE] = HOSTILE
    told["provenance"][HOSTILE] = HOSTILE
    return told


_OURS = {"status", "verdict", "severity", "stage"}  # words of the program itself, which choose a colour


def _everywhere(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _everywhere(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_everywhere(item, key) for item in value]
    return value + HOSTILE if isinstance(value, str) and key not in _OURS else value


def huge() -> Json:
    """64 conversations of 128 tokens, and more of everything else than a page should hold."""
    told = two_faults()
    answer = " ".join(f"word{i}" for i in range(128))
    told["conversations"] = [conversation(f"talk-{i:02}", "Say 128 words.", answer, 0.2, seed=i) for i in range(64)]
    told["engine"]["resolved"] = {f"setting_{i}": "value " * 400 for i in range(3000)}
    told["engine"]["command"] = ["--flag"] * 5000
    told["sweep"]["passes"][0]["variants"] *= 400
    return told


VARIANTS = {
    "two_faults": two_faults, "healthy": healthy, "attached": attached, "bundle": bundle, "died": died,
    "hostile": hostile, "huge": huge,
}  # fmt: skip
