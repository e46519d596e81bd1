"""Forty-one ways in which a drafter that trained well is served wrong in silence, each with the verb that names it.

A row builds the drafter as files, asks ``show`` about one engine, and expects a cause; the same drafter put right must
not have it. ``basis`` is how the rule is known: executed and read rules may be grave, an inferred one is a note. What
needs weights, states, text or a running engine is a strict expected failure that names what will turn it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import drafts
from eyas.dialects import engines
from eyas.dialects.wiring import TargetFacts
from eyas.results import Finding
from eyas.show import show

LLAMA = drafts.target()
DEEPSEEK = drafts.target("DeepseekV3ForCausalLM", 61)
GPT_OSS = drafts.target("GptOssForCausalLM", 36)
KEY = "eagle_aux_hidden_state_layer_ids"
NESTED, OUTER = f"eagle_config.{KEY}", KEY


@dataclass(frozen=True)
class Trap:
    """``wrong`` and ``right`` are what ``drafts.write`` changes; a trap of flags has them instead."""

    number: int
    engine: str
    cause: str
    grave: bool = True
    taps: tuple[int, ...] = (0, 2, 15)
    host: TargetFacts = LLAMA
    shape: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] | None = None
    runner: Any = None
    flags: str = ""
    right_flags: str | None = None
    right_engine: str | None = None


TRAPS = [
    # 1 the same ids, counted in two ways
    Trap(1, "vllm", "taps-off-by-minus-one", taps=(2, 15, 27), runner="v1",
         wrong={"config": drafts.inner([1, 14, 26]), "remove": [OUTER]}, right={}),
    Trap(1, "sglang", "taps-off-by-one", taps=(2, 15, 27), wrong={"config": drafts.inner([2, 15, 27])}, right={}),
    # 2 vLLM's V2 runner does not look inside eagle_config
    Trap(2, "vllm", "taps-engine-default", runner="v2", wrong={"remove": [OUTER]}, right={}),
    # 3 SGLang does not look at top level
    Trap(3, "sglang", "taps-engine-default", wrong={"remove": ["eagle_config"]}, right={}),
    # 4 DeepSeek: the first id decides how all are counted
    Trap(4, "sglang", "taps-off-by-minus-one", taps=(1, 30, 59), host=DEEPSEEK,
         wrong={"config": drafts.inner([0, 29, 58])}, right={}),
    # 5 gpt-oss: the largest id decides
    Trap(5, "sglang", "taps-differ", taps=(2, 18, 36), host=GPT_OSS,
         wrong={"config": drafts.inner([1, 17, 36])}, right={}),
    # 6 MiniMax-M3-VL shifts its default too
    Trap(6, "sglang", "taps-engine-default", taps=(2, 15, 27),
         host=drafts.target("MiniMaxM3SparseForConditionalGeneration"), wrong={"remove": ["eagle_config"]}, right={}),
    # 7 Gemma-3 in SGLang hands over a branch
    Trap(7, "sglang", "taps-branch", host=drafts.target("Gemma3ForCausalLM"), right_engine="vllm"),
    # 9 llama.cpp's converter never reads the ids
    Trap(9, "llama.cpp", "taps-engine-default", right={}, wrong={}, right_engine="vllm"),
    # 11 norm_output means two things
    Trap(11, "sglang", "feedback-post-norm", wrong={"config": {"norm_output": True}}, right={}),
    Trap(11, "sglang", "head-norm-added", wrong={"facts": {"head_norm": False}}, right={}),
    # 12 norm_before_residual
    Trap(12, "sglang", "norm-before-residual-ignored", shape={"norm_before_residual": True}, right_engine="vllm"),
    Trap(12, "tensorrt-llm", "norm-before-residual-ignored", shape={"norm_before_residual": True},
         right_engine="vllm"),
    # 13 a tied head
    Trap(13, "sglang", "head-overwritten", wrong={"config": {"tie_word_embeddings": True}}, right={}),
    # 14 an embedding of its own
    Trap(14, "sglang", "embedding-overwritten", shape={"own_embedding": True}, right_engine="vllm"),
    # 15 draft_vocab_size: null
    Trap(15, "sglang", "head-overwritten", wrong={"config": {"draft_vocab_size": None}}, right={}),
    # 16 no head in the file
    Trap(16, "sglang", "head-missing", wrong={"drop": ["lm_head.weight"]}, right={}),
    # 17 no map in the file
    Trap(17, "sglang", "d2t-missing", wrong={"drop": ["d2t"]}, right={}),
    Trap(17, "vllm", "d2t-missing", runner="v1", wrong={"drop": ["d2t"]}, right={}),
    # 20 weights this engine drops without a word
    Trap(20, "sglang", "qk-norm-dropped",
         wrong={"facts": {"qk_norm": True},
                "tensors": {"midlayer.self_attn.q_norm.weight": (4,), "midlayer.self_attn.k_norm.weight": (4,)}},
         right={}),
    Trap(20, "sglang", "attention-bias-dropped", shape={"attention_bias": True}, right_engine="vllm"),
    # 21 weights that are not there stay random
    Trap(21, "sglang", "weights-missing", wrong={"drop": ["fc.weight"]}, right={}),
    Trap(21, "vllm", "weights-missing", runner="v1", wrong={"drop": ["midlayer.mlp.up_proj.weight"]}, right={}),
    # 22 fc is skipped where widths coincide
    Trap(22, "sglang", "fc-skipped", taps=(2,), right_engine="vllm"),
    # 23 later layers are normed by another weight
    Trap(23, "sglang", "later-norm-differs", shape={"num_hidden_layers": 2}, right={
        "tensors": {"layers.1.hidden_norm.weight": (drafts.H,)}}),
    # 24 norm_before_fc where this engine does not look
    Trap(24, "tensorrt-llm", "input-norm-skipped", taps=(2, 15, 27), shape={"norm_before_fc": True},
         wrong={}, right={"config": {"eagle_config": {KEY: [1, 14, 26], "norm_before_fc": True}}}),
    # 25 the rotary base lost
    Trap(25, "sglang", "rope-base-wrong", wrong={"remove": ["rope_parameters", "rope_theta"]}, right={}),
    # 26 the rotary scaling lost
    Trap(26, "vllm", "rope-scaling-dropped", runner="v1",
         wrong={"facts": {"rope": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0}}}, right={}),
    # 27 a window that this engine does not read
    Trap(27, "sglang", "window-from-target", wrong={"facts": {"window": 2048}}, right={}),
    # 28 the target's quantisation inherited
    Trap(28, "sglang", "drafter-target-quantisation", grave=False, flags="--quantization fp8",
         right_flags="--quantization fp8 --speculative-draft-model-quantization unquant"),
    # 30 a path that names another method
    Trap(30, "vllm", "algorithm-eagle", runner="v1",
         flags="""--speculative-config '{"model": "some/eagle-3-llama", "num_speculative_tokens": 3}'""",
         right_flags="""--speculative-config '{"model": "a/b", "method": "eagle3", "num_speculative_tokens": 3}'"""),
    # 31 no draft path: the target's own MTP head is drafted with
    Trap(31, "sglang", "draft-path-defaulted", host=DEEPSEEK, flags="--speculative-algorithm EAGLE3",
         right_flags="--speculative-algorithm EAGLE3 --speculative-draft-model-path here"),
    # 32 a tree cut to a chain
    Trap(32, "sglang", "draft-tokens-lowered",
         flags="--speculative-num-steps 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1",
         right_flags="--speculative-num-steps 15 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1"),
    # 34 acceptance that is made up
    Trap(34, "sglang", "acceptance-faked", grave=False, flags="SGLANG_SIMULATE_ACC_LEN=3 --speculative-num-steps 3 "
         "--speculative-num-draft-tokens 4 --speculative-eagle-topk 1",
         right_flags="--speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1"),
    # 40 use_aux_hidden_state: false
    Trap(40, "vllm", "engine-cannot-express", grave=False, runner="v2",
         wrong={"config": drafts.inner([1, 1, 14], use_aux_hidden_state=False)}, right={}),
    # 41 ids out of order
    Trap(41, "sglang", "taps-swapped", taps=(15, 2, 27),
         wrong={"config": drafts.inner([14, 1, 26])}, right_engine=None),
]  # fmt: skip


def found(trap: Trap, folder: Path, changes: dict[str, Any], *, flags: str, engine: str) -> list[Finding]:
    import shlex

    drafts.write(folder, drafts.shape(trap.taps, **trap.shape), trap.host, **changes)
    asked = engines.asked(engine, trap.runner if engine == trap.engine else "v1", tuple(shlex.split(flags)))
    return list(show(folder, [asked], target=trap.host).findings)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.number}-{trap.engine}-{trap.cause}")
def test_show_names_the_trap_and_not_its_cure(trap: Trap, tmp_path: Path) -> None:
    wrong = found(trap, tmp_path / "wrong", trap.wrong, flags=trap.flags, engine=trap.engine)
    named = [finding for finding in wrong if finding.cause == trap.cause]
    assert named, [(f.cause, f.summary) for f in wrong]
    assert any(finding.severity != "note" for finding in named) == trap.grave, named
    assert all(finding.fix for finding in named)
    if trap.right_flags is not None:
        right = found(trap, tmp_path / "right", trap.wrong, flags=trap.right_flags, engine=trap.engine)
    elif trap.right_engine is not None:
        right = found(trap, tmp_path / "right", trap.wrong, flags="", engine=trap.right_engine)
    elif trap.right is not None:
        right = found(trap, tmp_path / "right", trap.right, flags=trap.flags, engine=trap.engine)
    else:
        return
    assert trap.cause not in [finding.cause for finding in right], [(f.cause, f.summary) for f in right]
