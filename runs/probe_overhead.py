"""What the probe costs the engine: the same prompts with and without it, in turns, on one engine that stays up.

    python runs/probe_overhead.py ENGINE_PYTHON [--pairs 5]

Prints seconds of every pair, their ratio with a bootstrap interval over pairs, and what the probe itself says it took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from eyas import prompts, provenance, resolve
from eyas import target as targets
from eyas.engines.vllm_live import Vllm
from eyas.render import Renderer

PROMPTS, TOKENS, K, DRAWS = 16, 64, 4, 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    target = targets.load("smollm2")
    assert target.folder is not None
    renderer = Renderer(target.tokenizer, target.eos_ids())  # type: ignore[arg-type]
    ids = [renderer.ids(p.messages(), prompt=True) for p in prompts.load("mt-bench", PROMPTS)]
    flags = ["--dtype", "float32", "--max-model-len", "1024"]
    drafter = resolve.drafter("smollm2-eagle3")
    engine = Vllm.launch(options.python.absolute(), target.folder, drafter, draft_tokens=K, flags=flags)
    rows: list[dict[str, Any]] = []
    try:
        engine.ready()
        engine.generate(ids, TOKENS)  # warm
        for pair in range(options.pairs):
            row: dict[str, Any] = {}
            for side in ("with", "without") if pair % 2 else ("without", "with"):
                row[side], row["probe"] = timed(engine, ids, side == "with", row.get("probe"))
            rows.append(row)
            print(json.dumps(row), flush=True)
    finally:
        engine.stop()
    ratios = np.array([row["with"] / row["without"] for row in rows])
    draws = np.random.default_rng(0).choice(ratios, (DRAWS, len(ratios))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    told = {
        "ratio": round(float(ratios.mean()), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "pairs": len(rows),
        "probe_seconds": [row["probe"]["seconds"] for row in rows],
        "provenance": provenance.collect({"prompts": PROMPTS, "tokens": TOKENS}),
    }
    print(json.dumps(told, indent=1))


def timed(engine: Vllm, ids: list[list[int]], probed: bool, known: Any) -> tuple[float, Any]:
    """Seconds of one pass over the prompts; and what the probe said of itself."""
    if not probed:
        began = time.perf_counter()
        engine.generate(ids, TOKENS)
        return round(time.perf_counter() - began, 3), known
    with tempfile.TemporaryDirectory() as folder, engine.probe(Path(folder), 1 << 31) as summary:
        began = time.perf_counter()
        engine.generate(ids, TOKENS)
        seconds = time.perf_counter() - began
    return round(seconds, 3), dict(summary)


if __name__ == "__main__":
    main()
