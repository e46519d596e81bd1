"""What vLLM's own resolution says to many configs: tests/fixtures/engines/vllm-ask.json, the judge of the vLLM tables.

    VENV/bin/python runs/vllm_ask.py tests/fixtures/engines/vllm-ask.json      (where vLLM is; a CPU will do, minutes)

No weights and no network. Each case is put to ``answer`` of src/eyas/engines/inside/vllm_ask.py, all in one process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

HERE = Path(__file__).parent
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "rms_norm_eps": 1e-5,
}
TARGET = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}
TARGET |= {"num_hidden_layers": 8, "max_position_embeddings": 256}
DRAFT = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **SHAPE}
DRAFT |= {"num_hidden_layers": 1, "max_position_embeddings": 256, "draft_vocab_size": 97}
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}
LAYER = {"model_type": "llama", **SHAPE, "num_hidden_layers": 1, "max_position_embeddings": 256}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": 97,
    "transformer_layer_config": LAYER,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
TOP, INNER = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def case(name: str, *flags: str, target: dict[str, Any] | None = None, **keys: Any) -> Any:
    """The usual drafter with ``keys`` changed (``None`` is null, ``...`` takes the key out)."""
    config = {k: v for k, v in {**DRAFT, **keys}.items() if v is not ...}
    return {"name": name, "config": config, "target": {**TARGET, **(target or {})}, "flags": flags}


def spec(**fields: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({k: v for k, v in {**EAGLE3, **fields}.items() if v is not ...})


def speculators(name: str, layer: dict[str, Any] | None = None, **keys: Any) -> Any:
    config = {**SPECULATORS, **keys, "transformer_layer_config": {**LAYER, **(layer or {})}}
    made = case(name, *spec())
    return {**made, "config": {k: v for k, v in config.items() if v is not ...}}


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 12}
ALWAYS = ("method", "synthetic_acceptance_rates", "draft_sample_method")
CASES = [
    case("no ids", *spec()),
    case("top level", *spec(), **{TOP: [1, 2, 5]}),
    case("inside eagle_config", *spec(), **{INNER: {TOP: [1, 2, 5]}}),
    case("both", *spec(), **{TOP: [1, 4, 6], INNER: {TOP: [0, 3, 5]}}),
    case("layer_ids, of the V2 runner", *spec(), **{INNER: {"layer_ids": [1, 2, 5]}}),
    case("empty top level", *spec(), **{TOP: [], INNER: {TOP: [1, 2, 5]}}),
    case("unsorted, twice", *spec(), **{TOP: [5, 1, 1, 3]}),
    case("target_layer_ids", *spec(), target_layer_ids=[0, 3, 5]),
    case("dflash_config", *spec(), dflash_config={"target_layer_ids": [0, 3, 5]}),
    case("dflash_config and eagle_config", *spec(), dflash_config={"target_layer_ids": [0, 3, 5]}, **{INNER: {}}),
    case("one layer more", *spec(), target={"num_hidden_layers": 9}),
    case("qwen3 target", *spec(), target=QWEN3),
    case("gemma3 target", *spec(), target={"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}),
    case("Transformers backend", *spec(), "--model-impl", "transformers", **{TOP: [5, 1, 3]}),
    case("v1 asked for by parallel drafting", *spec(parallel_drafting=True), **{TOP: [1, 2, 5]}),
    case("rope_theta alone", *spec(), rope_theta=5e5),
    case("rope_parameters", *spec(), rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    case("rope_parameters without theta", *spec(), rope_parameters={"rope_type": "default"}, rope_theta=5e5),
    case("rope_parameters without any theta", *spec(), rope_parameters={"rope_type": "default"}),
    case("two thetas", *spec(), rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=1e6),
    case("rope_scaling", *spec(), rope_theta=5e5, rope_scaling=LLAMA3),
    case("rope_scaling and rope_parameters", *spec(), rope_scaling=LLAMA3, rope_parameters={"rope_theta": 5e5}),
    case("rope_scaling, old word", *spec(), rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
    case("null draft_vocab_size", *spec(), draft_vocab_size=None),
    case("no draft_vocab_size", *spec(), draft_vocab_size=...),
    case("null target_hidden_size", *spec(), target_hidden_size=None),
    case("no num_hidden_layers", *spec(), num_hidden_layers=...),
    case("no max_position_embeddings", *spec(), max_position_embeddings=..., target={"max_position_embeddings": 4096}),
    case("short positions", *spec(), max_position_embeddings=128),
    case("long positions", *spec(), max_position_embeddings=512),
    case("served shorter", *spec(), "--max-model-len", "100", max_position_embeddings=128),
    case("switches", *spec(), fc_norm=True, norm_before_fc=True, norm_before_residual=True, norm_output=True),
    case("attention_bias", *spec(), attention_bias=True),
    case("sliding window", *spec(), sliding_window=64, layer_types=["sliding_attention"]),
    case("architecture of a target", *spec(), architectures=["LlamaForCausalLM"]),
    case("no architectures", *spec(), architectures=...),
    case("no model_type", *spec(), model_type=...),
    case("unknown architecture", *spec(), architectures=["Eagle3DraftModel"]),
    case("qwen3 drafter", *spec(), architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3"),
    case("qwen3 drafter, window", *spec(), architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3",
         sliding_window=64, use_sliding_window=True, max_window_layers=0),
    case("qwen3 keys in the Llama class", *spec(), model_type="qwen3"),
    speculators("speculators"),
    speculators("speculators, ids", **{TOP: [1, 2, 5]}),
    speculators("speculators, switches off", norm_before_residual=False, norm_before_fc=True, norm_output=True),
    speculators("speculators, null target_hidden_size", target_hidden_size=None),
    speculators("speculators, rope", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    speculators("speculators, qwen3", {"model_type": "qwen3", "head_dim": 12}),
    speculators("speculators, gemma", {"model_type": "gemma3_text"}),
    speculators("speculators, window", {"sliding_window": 64, "layer_types": ["sliding_attention"]}),
    speculators("speculators, ids inside", **{INNER: {TOP: [1, 2, 5]}}),
    case("method from the path", *spec(method=..., model="some/eagle3-draft"), **{TOP: [1, 2, 5]}),
    case("method from the path, EAGLE-1", *spec(method=..., model="some/eagle-3-llama"), **{TOP: [1, 2, 5]}),
    case("method not told", *spec(method=...), **{TOP: [1, 2, 5]}),
    case("method eagle", *spec(method="eagle"), **{TOP: [1, 2, 5]}),
    case("unknown method", *spec(method="eagle4")),
    case("no number of tokens", *spec(num_speculative_tokens=...)),
    case("no tokens", *spec(num_speculative_tokens=0)),
    case("unknown field", *spec(disable_by_batch_size=8)),
    case("field with dashes", *spec(**{"num-speculative-tokens": 4, "num_speculative_tokens": ...})),
    case("wrong tensor parallel", *spec(tensor_parallel_size=2)),
    case("wrong draft tensor parallel", *spec(draft_tensor_parallel_size=2)),
    case("draft limit", *spec(max_model_len=64)),
    case("draft limit too long", *spec(max_model_len=300)),
    case("synthetic by length", *spec(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5)),
    case("synthetic by rates", *spec(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.9, 0.5, 0.1])),
    case("synthetic without rates", *spec(rejection_sample_method="synthetic")),
    case("rates without synthetic", *spec(synthetic_acceptance_length=2.5)),
    case("probabilistic", *spec(draft_sample_method="probabilistic")),
    case("spec- flags", "--spec-method", "eagle3", "--spec-tokens", "5"),
    case("spec- flags twice", *spec(), "--spec-tokens", "5"),
    case("V1 asked for", "VLLM_USE_V2_MODEL_RUNNER=0", *spec(), **{INNER: {TOP: [1, 2, 5]}}),
    case("V2 asked for", "VLLM_USE_V2_MODEL_RUNNER=1", *spec(), **{INNER: {TOP: [1, 2, 5]}}),
    case("other vocabularies", *spec(use_heterogeneous_vocab=True)),
]  # fmt: skip


def classes() -> dict[str, bool | None]:
    """Every target's class that vLLM's registry names: has it the interface? None where it cannot be imported here."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_eagle3

    found: dict[str, bool | None] = {}
    for name in {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}:
        try:
            found[name] = bool(supports_eagle3(registry.ModelRegistry.models[name].load_model_cls()))
        except Exception as error:
            print(name, "->", type(error).__name__, str(error)[:100], flush=True)
            found[name] = None
    return found


def inside() -> Any:
    path = HERE.parent / "src" / "eyas" / "engines" / "inside" / "vllm_ask.py"
    made = importlib.util.spec_from_file_location("vllm_ask", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def main() -> None:
    out, asked, ask = Path(sys.argv[1]), [], inside()
    for one in CASES:
        request = {"config": one["config"], "target_config": one["target"], "tensors": [], "flags": list(one["flags"])}
        found = ask.answer(request)
        version = found.pop("version")
        found["flags"] = [f for f in found.get("flags", []) if f["requested"] is not None or f["flag"] in ALWAYS]
        if "error" in found:
            found["error"]["message"] = found["error"]["message"][:200]
        asked.append({"name": one["name"], **request, "answer": found})
        found["said"] = [line for line in found["said"] if "Overriding" in line["text"]]
        print(one["name"], "->", found.get("error") or found["taps"], flush=True)
    about = {"engine": "vllm", "version": version, "date": datetime.now(UTC).date().isoformat()}
    about["command"] = "python runs/vllm_ask.py"
    about["classes"] = classes()
    rows = ",\n".join(json.dumps(row) for row in asked)
    out.write_text(f'{json.dumps(about)[:-1]}, "cases": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
