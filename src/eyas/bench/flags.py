"""A setting in each engine's own words.

Flags of SGLang and vLLM are those their dialects read (``dialects.sglang.flags``, ``dialects.vllm.flags``); a test
reads what is written here back through them. llama.cpp: ``--spec-type`` knows draft-eagle3 (common/speculative.cpp,
common_speculative_type_from_name_map) and ``--spec-draft-n-max`` is what its server logs (``engines.scrape.llamacpp``).
TensorRT-LLM: fields of Eagle3DecodingConfig (llmapi reference of 1.4.0rc), as the yaml of extra options; read, not run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.dialects import llama_cpp, sglang, tensorrt_llm, vllm
from eyas.dialects.sglang.flags import ALGORITHM, DRAFT, STEPS, TOKENS, TOPK
from eyas.dialects.vllm.flags import WHOLE

NO_SPECULATION = "none of its flags about drafting"


@dataclass(frozen=True)
class Spelled:
    """``flags`` for the engine's command line or options, or None and ``why`` it has none for this setting."""

    engine: str
    version: str
    flags: str | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"engine": self.engine, "version": self.version, "flags": self.flags, "why": self.why or None}


def spelled(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> list[Spelled]:
    """Every engine's flags for so many drafted tokens, 0 being no speculation; ``nodes`` makes it a tree."""
    return [
        _one("eyas", "", _eyas, draft_tokens, top_k, nodes, drafter),
        _one("llama.cpp", llama_cpp.VERSIONS[-1], _llama_cpp, draft_tokens, top_k, nodes, drafter),
        _one("sglang", sglang.VERSIONS[-1], _sglang, draft_tokens, top_k, nodes, drafter),
        _one("tensorrt-llm", tensorrt_llm.VERSIONS[-1], _tensorrt_llm, draft_tokens, top_k, nodes, drafter),
        _one("vllm", vllm.VERSIONS[-1], _vllm, draft_tokens, top_k, nodes, drafter),
    ]


Spelling = Callable[[int, int, "int | None", str], "str | None"]


def _one(
    engine: str, version: str, spell: Spelling, draft_tokens: int, top_k: int, nodes: int | None, drafter: str
) -> Spelled:
    if draft_tokens == 0:
        return Spelled(engine, version, "", NO_SPECULATION)
    flags = spell(draft_tokens, top_k, nodes, drafter)
    return Spelled(engine, version, flags, "" if flags is not None else "it drafts chains only")


def _eyas(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> str | None:
    return shlex.join(["--drafter", drafter, "--draft-tokens", str(draft_tokens)]) if nodes is None else None


def _sglang(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> str:
    # Its count of draft tokens holds the last accepted one, the root, too.
    held = (draft_tokens if nodes is None else nodes) + 1
    words = [ALGORITHM, "EAGLE3", DRAFT, drafter, STEPS, draft_tokens, TOPK, top_k, TOKENS, held]
    return shlex.join(str(word) for word in words)


def _vllm(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> str | None:
    if nodes is not None:
        return None
    config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": draft_tokens}
    return shlex.join([WHOLE[0], json.dumps(config)])


def _llama_cpp(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> str | None:
    if nodes is not None:
        return None
    words = ["--model-draft", f"{drafter}.gguf", "--spec-type", "draft-eagle3", "--spec-draft-n-max", draft_tokens]
    return shlex.join(str(word) for word in words)


def _tensorrt_llm(draft_tokens: int, top_k: int, nodes: int | None, drafter: str) -> str:
    config: dict[str, Any] = {"decoding_type": "Eagle3", "max_draft_len": draft_tokens, "speculative_model": drafter}
    if nodes is not None:
        config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": top_k, "max_total_draft_tokens": nodes}
    return "speculative_config: " + json.dumps(config)  # JSON is yaml
