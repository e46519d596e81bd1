"""Record what a running vLLM answers on every route that `eyas diagnose` uses, for the stand-in of the tests.

    python runs/vllm_bodies.py ENGINE_PYTHON > tests/fixtures/engines/vllm-live.json

The shipped drafter on SmolLM2, two prompts of eight tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from eyas import resolve
from eyas import target as targets
from eyas.engines.vllm_live import Vllm
from eyas.provenance import publishable

PROMPTS = [[1, 4093, 198, 1195, 314, 451, 17], [1, 4093, 198, 28120, 905]]
KEPT = ("model_config", "speculative_config", "scheduler_config", "cache_config", "parallel_config")


def main() -> None:
    target = targets.load("smollm2")
    assert target.folder is not None
    flags = ["--dtype", "float32", "--max-model-len", "512"]
    engine = Vllm.launch(
        Path(sys.argv[1]).absolute(), target.folder, resolve.drafter("smollm2-eagle3"), draft_tokens=4, flags=flags
    )
    asked = engine.asker
    found: dict[str, Any] = {}
    try:
        engine.ready()
        found["/version"] = asked.ask("/version")
        found["/v1/models"] = asked.ask("/v1/models")
        info = asked.ask("/server_info?config_format=json")["vllm_config"]
        found["/server_info"] = {"vllm_config": {part: info[part] for part in KEPT}}
        found["/tokenize"] = asked.ask(
            "/tokenize",
            {"model": "target", "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True},
        )
        found["eyas_probe_facts"] = engine.call("eyas_probe_facts")
        found["/metrics before"] = asked.text("/metrics")
        with tempfile.TemporaryDirectory() as folder, engine.probe(Path(folder), 1 << 28) as summary:
            body = {
                "model": "target",
                "prompt": PROMPTS[0],
                "max_tokens": 8,
                "temperature": 0.0,
                "return_token_ids": True,
            }
            found["/v1/completions"] = asked.ask("/v1/completions", body)
            engine.generate(PROMPTS, 8)
        found["eyas_probe_stop"] = dict(summary)
        found["/metrics after"] = asked.text("/metrics")
    finally:
        engine.stop()
    for key in ("/metrics before", "/metrics after"):
        found[key] = "\n".join(
            line for line in found[key].splitlines() if "spec_decode" in line or "generation_tokens" in line
        )
    print(json.dumps(cleaned(found), indent=1))


def cleaned(value: Any) -> Any:
    """Texts without folders of this machine."""
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return publishable(value) if isinstance(value, str) else value


if __name__ == "__main__":
    main()
