"""What the engines' own code prints for rounds we know: the fixtures of tests/test_scrape.py.

    VENV/bin/python runs/engine_metrics.py vllm OUT.json                                   (where vLLM is)
    python runs/engine_metrics.py sglang OUT.json --wheel sglang-0.5.23-….whl              (any Python; from 0.4.9 on)

Rounds are drawn from a seed. vLLM: its SpecDecodingLogging, SpecDecodingProm and RequestSpecDecodeMetrics are called
as they are. SGLang: the statements of the wheel that make the decode line, and the method that makes the per-request
fields, are run on a stand-in that holds only their counters; nothing of it is imported. Nothing of eyas is needed.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
import types
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

CASES: list[dict[str, Any]] = [
    {"name": "usual", "draft_tokens": 3, "rates": [0.8, 0.75, 0.7], "lines": [40, 97, 211, 388, 160], "seed": 1},
    {"name": "one token", "draft_tokens": 1, "rates": [0.6], "lines": [30, 75, 120], "seed": 2},
    {"name": "never right", "draft_tokens": 2, "rates": [0.0, 0.0], "lines": [50, 60], "seed": 3},
    {"name": "always right", "draft_tokens": 2, "rates": [1.0, 1.0], "lines": [50, 61], "seed": 4},
    {
        "name": "busy server",
        "draft_tokens": 5,
        "rates": [0.78, 0.76, 0.75, 0.72, 0.7],
        "lines": [5200, 18000],
        "seed": 5,
    },
    {"name": "seldom right", "draft_tokens": 4, "rates": [0.2, 0.1, 0.1, 0.1], "lines": [333, 512, 99], "seed": 6},
]


def rounds(case: dict[str, Any]) -> list[list[int]]:
    """Tokens kept in every round, a list a line."""
    rng = random.Random(case["seed"])

    def kept() -> int:
        for depth, rate in enumerate(case["rates"]):
            if rng.random() >= rate:
                return depth
        return len(case["rates"])

    return [[kept() for _ in range(count)] for count in case["lines"]]


def truth(case: dict[str, Any]) -> dict[str, Any]:
    kept = [one for line in rounds(case) for one in line]
    k = case["draft_tokens"]
    hits = [sum(one > depth for one in kept) for depth in range(k)]
    return {"draft_tokens": k, "rounds": len(kept), "drafted": k * len(kept), "accepted": sum(kept), "hits": hits}


def made(engine: str, version: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    command = "runs/engine_metrics.py " + engine
    return {"engine": engine, "version": version, "made": date.today().isoformat(), "by": command, "cases": cases}


# -- vLLM -------------------------------------------------------------------------------------------------------


def vllm() -> dict[str, Any]:
    import vllm as installed
    from prometheus_client import REGISTRY, generate_latest
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

    cases = []
    for case in CASES:
        k, lines, bodies = case["draft_tokens"], [], []
        logging = SpecDecodingLogging()
        before = list(REGISTRY._collector_to_names)
        configured: Any = types.SimpleNamespace(num_speculative_tokens=k)
        page = SpecDecodingProm(configured, ["model_name", "engine"], {0: ["tiny", "0"]})
        for line in rounds(case):
            stats, request = SpecDecodingStats.new(k), RequestSpecDecodeMetrics.new(k)
            for kept in line:
                stats.observe_draft(k, kept)
                request.observe(k, kept)
            logging.observe(stats)
            page.observe(stats)
            logging.last_log_time = time.monotonic() - 10
            logging.log(log_fn=lambda text, *values, lines=lines: lines.append(text % values))
            emitted = sum(line) + len(line) + 1
            bodies.append(
                {"metrics": {"speculative_decoding": request.to_dict()}, "usage": {"completion_tokens": emitted}}
            )
        text = generate_latest(REGISTRY).decode()
        for collector in [one for one in REGISTRY._collector_to_names if one not in before]:
            REGISTRY.unregister(collector)
        wanted = [row for row in text.splitlines() if "spec_decode" in row]
        cases.append({"name": case["name"], "truth": truth(case), "lines": lines, "page": wanted, "bodies": bodies})
    return made("vllm", installed.__version__, cases)


# -- SGLang -----------------------------------------------------------------------------------------------------


def sglang(wheel: Path) -> dict[str, Any]:
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("sglang/srt/") and n.endswith(".py")]
        sources = {n: archive.read(n).decode() for n in names if "managers/" in n or "observability/" in n}
    line = _decode_line(sources)
    fields = _request_fields(sources)
    cases = []
    for case in CASES:
        lines, bodies = [], []
        for kept in rounds(case):
            lines.append(line(case["draft_tokens"] + 1, kept))
            if fields is not None:
                bodies.append({"text": "…", "meta_info": fields(case["draft_tokens"] + 1, kept)})
        cases.append({"name": case["name"], "truth": truth(case), "lines": lines, "bodies": bodies})
    return made("sglang", version, cases)


def _functions(sources: dict[str, str], word: str) -> list[ast.FunctionDef]:
    """Functions whose source has ``word``."""
    found = []
    for source in sources.values():
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)) if word in source else ():
            if isinstance(node, ast.FunctionDef) and word in "\n".join(lines[node.lineno - 1 : node.end_lineno]):
                found.append(node)
    return found


def _decode_line(sources: dict[str, str]) -> Any:
    """The statements of the scheduler that make ``msg``, run on a stand-in."""
    (function,) = [one for one in _functions(sources, "accept len: {") if "decode_stats" in one.name]

    def makes_msg(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            return isinstance(target, ast.Name) and target.id in ("msg", "iter_msg")
        return isinstance(node, ast.If) and "accept len" in ast.unparse(node)

    body = [node for node in function.body if makes_msg(node)]
    for node in body:  # the wheel's classes are not here
        for inner in ast.walk(node):
            if isinstance(inner, ast.If) and "is_dspark" in ast.unparse(inner.test):
                inner.test = ast.Constant(False)
    code = compile(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])), "decode line", "exec")
    ragged = types.ModuleType("sglang.srt.speculative.ragged_verify")
    ragged.RaggedVerifyMode = types.SimpleNamespace(CAP_ACCEPT="cap")  # type: ignore[attr-defined]
    ragged.read_ragged_verify_mode = lambda: None  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[ragged.__name__] = ragged

    def line(verified: int, kept: list[int]) -> str:
        no = types.SimpleNamespace(is_none=lambda: False)
        spec = types.SimpleNamespace(speculative_num_draft_tokens=verified, speculative_num_steps=verified - 1)
        stand_in = types.SimpleNamespace(
            spec_algorithm=no,
            scheduler=types.SimpleNamespace(spec_algorithm=no, waiting_queue=[]),
            server_args=spec,
            waiting_queue=[],
            last_gen_throughput=123.456,
            device="cuda",
            _graph_backend_label="cuda graph",
            current_scheduler_metrics_enabled=False,
            forward_ct=1,
            spec_num_forward_ct=len(kept),
            spec_num_total_forward_ct=len(kept),
            spec_num_correct_drafts=sum(kept),
            spec_num_cap_tokens=0,
            spec_num_block_accept_tokens=0,
        )
        for name in ("spec_num_accept_tokens", "spec_num_accepted_tokens", "spec_num_total_accepted_tokens"):
            setattr(stand_in, name, sum(kept) + len(kept))
        for name in (
            "spec_total_num_accept_tokens",
            "spec_total_num_accepted_tokens",
            "spec_total_num_forward_ct",
            "cum_spec_accept_length",
            "cum_spec_accept_count",
        ):
            setattr(stand_in, name, 0)
        known: dict[str, Any] = {
            "self": stand_in,
            "get_spec": lambda: spec,
            "LOG_FORWARD_ITERS": False,
            "num_running_reqs": 1 + len(kept) // 40,
            "token_usage_msg": "#token: 412, token usage: 0.01, ",
            "usage_msg": "#token: 412, token usage: 0.01, ",
            "can_run_cuda_graph": True,
            "batch_iter": 1,
            "graph_backend": {"cuda": "cuda graph"},
        }
        exec(code, known)
        return str(known["msg"])

    return line


def _request_fields(sources: dict[str, str]) -> Any:
    """The method that fills ``meta_info``; None where there is none yet."""
    methods = [f for f in _functions(sources, "spec_accept_length") if f.name == "_calculate_spec_decoding_metrics"]
    if not methods:
        return None
    method = methods[0]
    method.decorator_list, method.returns = [], None
    for argument in method.args.args:
        argument.annotation = None
    code = compile(ast.fix_missing_locations(ast.Module(body=[method], type_ignores=[])), "request fields", "exec")

    def fields(verified: int, kept: list[int]) -> dict[str, Any]:
        spec = types.SimpleNamespace(speculative_num_draft_tokens=verified)
        known: dict[str, Any] = {"get_spec": lambda: spec, "_ragged_verify_cap_accept": lambda: False}
        known["BatchEmbeddingOutput"] = type(None)
        exec(code, known)
        histogram = [sum(one == j for one in kept) for j in range(max(kept) + 1)]  # it grows as needed
        emitted = sum(kept) + len(kept) + 1
        batch = types.SimpleNamespace(
            spec_verify_ct=[len(kept)],
            spec_num_correct_drafts=[sum(kept)],
            spec_accepted_tokens=[sum(kept)],
            completion_tokens=[emitted],
            spec_correct_drafts_histogram=[histogram],
            spec_acceptance_histogram=[histogram],
            spec_cap_lens_histogram=[[]],
        )
        meta: dict[str, Any] = {"completion_tokens": emitted}
        known[method.name](types.SimpleNamespace(server_args=spec), meta, batch, 0)
        return meta

    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    told = vllm() if options.engine == "vllm" else sglang(options.wheel)
    options.out.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{options.out}: {told['engine']} {told['version']}, {len(told['cases'])} cases")


if __name__ == "__main__":
    main()
