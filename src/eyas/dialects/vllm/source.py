"""Where a row of vLLM's tables stands."""

from __future__ import annotations

from eyas.dialects.wiring import Basis, Source

VERSIONS = ("0.32.0",)

LLAMA = "model_executor/models/llama_eagle3.py"
QWEN3 = "model_executor/models/qwen3_eagle3.py"
DEEPSEEK = "model_executor/models/deepseek_eagle3.py"
SPECULATIVE = "config/speculative.py"
PROPOSER = "v1/spec_decode/llm_base_proposer.py"
ALGOS = "transformers_utils/configs/speculators/algos.py"


def at(where: str, basis: Basis = "read") -> Source:
    return Source(f"vllm {VERSIONS[-1]} {where}", basis)


def ran(where: str) -> Source:
    """Seen by running that code: tests/fixtures/engines, made by the scripts in runs/."""
    return at(where, "executed")
