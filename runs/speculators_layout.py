"""What speculators' own classes and vLLM make of a config that eyas writes in speculators' layout, recorded.

    python runs/speculators_layout.py make OUT.json                     (where eyas is)
    VENV/bin/python runs/speculators_layout.py speculators OUT.json     (where speculators is)
    VENV/bin/python runs/speculators_layout.py vllm OUT.json            (where vLLM 0.32 is; a CPU will do)

``make`` writes one case a contract: the contract, and the config written for it. The others load each config from a
folder, as they load any, and write what they made of it beside it; speculators also builds the drafter, whose tensors'
names and shapes are kept. The result is ``tests/fixtures/engines/speculators-layout.json``.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "eyas": {"schema": 1, "contract": {}, "weights_sha256": None},  # whoever loads the folder meets this too
}
TARGET = {"architecture": "Qwen3ForCausalLM", "num_layers": 36, "hidden_size": 16, "vocab_size": 48}
USUAL = {
    "taps": [2, 18, 33],
    "fc_norm": "none",
    "layers": 1,
    "attention_bias": False,
    "qk_norm": False,
    "residual": "before hidden_norm",
    "feedback": "before the last norm",
    "rope": {"rope_type": "default", "rope_theta": 1e6},
    "window": None,
    "max_positions": 4096,
    "embedding": "target",
    "draft_vocab_size": 32,
    "vocab_map": "offsets",
}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 1024}
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "released": {  # what its trainer does by default
        "fc_norm": "joint",
        "residual": "after hidden_norm",
        "feedback": "after the last norm",
        "window": 2048,
    },
    "fc_norm": {"fc_norm": "each"},
    "taps": {"taps": [0, 3, 31, 36]},
    "layers": {"layers": 3, "later_norm": "input_layernorm"},
    "window_layers": {"layers": 2, "later_norm": "input_layernorm", "window": 64},
    "own_embedding": {"embedding": "own"},
    "full_vocabulary": {"draft_vocab_size": 48, "vocab_map": "none"},
    "attention_bias": {"attention_bias": True},
    "qk_norm": {"qk_norm": True},
    "yarn": {"rope": YARN},
}
# What is kept of a decoder's config, under transformers' names.
LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "num_hidden_layers",
    "max_position_embeddings",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)
SWITCHES = (
    "eagle_aux_hidden_state_layer_ids",
    "draft_vocab_size",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
)


def make(out: Path) -> None:
    from eyas.contract import declared
    from eyas.dialects import speculators
    from eyas.dialects.wiring import TargetFacts

    cases = []
    for name, changes in CASES.items():
        contract = declared(**{**USUAL, **changes})
        written = speculators.write(contract, SHAPE, TargetFacts(**TARGET), "target")
        cases.append({"name": name, "contract": contract.to_json(), "written": written})
    save(out, {"made": datetime.date.today().isoformat(), "shape": SHAPE, "target": TARGET, "cases": cases})


def with_speculators(written: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    layer = config.transformer_layer_config
    layer._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = Eagle3DraftModel(config)
    kept = {key: getattr(config, key) for key in (*SWITCHES, "embed_requires_grad", "speculators_model_type")}
    tensors = {name: list(t.shape) for name, t in model.state_dict().items() if not name.startswith("verifier_")}
    return {**kept, "class": type(config).__name__, "layer": layer_of(layer), "tensors": tensors}


def with_vllm(written: dict[str, Any], folder: Path) -> dict[str, Any]:
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    config = SpeculatorsConfig.from_pretrained(str(folder))
    kept = {key: getattr(config, key) for key in (*SWITCHES, "architectures")}
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(written)
    return {**kept, "speculative_config": speculative, "layer": layer_of(config)}


def layer_of(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key, None) for key in LAYER_KEYS}


def record(out: Path, who: str) -> None:
    result = json.loads(out.read_text(encoding="utf-8"))
    look = {"speculators": with_speculators, "vllm": with_vllm}[who]
    for case in result["cases"]:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(case["written"]), encoding="utf-8")
            case[who] = look(json.loads(json.dumps(case["written"])), Path(folder))
    versions = {name: version(name) for name in (who, "transformers", "torch")}
    result[who] = {"date": datetime.date.today().isoformat(), "versions": versions}
    result[who]["command"] = f"python runs/speculators_layout.py {who} OUT.json"
    save(out, result)


def version(name: str) -> str:
    """A package's own word, which one run from a source tree has where it has no metadata."""
    own = getattr(importlib.import_module(name), "__version__", None)
    return own or importlib.metadata.version(name)


def save(out: Path, result: dict[str, Any]) -> None:
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    verb, path = sys.argv[1], Path(sys.argv[2])
    make(path) if verb == "make" else record(path, verb)
