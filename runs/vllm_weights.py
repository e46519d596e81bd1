"""What vLLM's own drafter classes do with the tensors of a file: tests/fixtures/engines/vllm-weights.json.

    VENV/bin/python runs/vllm_weights.py tests/fixtures/engines/vllm-weights.json      (where vLLM is; a CPU will do)

Each case is a config and names with shapes. The class is built, all it holds is set to NaN, the tensors are loaded as
vLLM loads them, and it is told whether it raised and which parameters are NaN still. No target, no engine.
"""

from __future__ import annotations

import json
import os
import sys
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

H, D, V, W, I, LAYERS = 16, 16, 48, 32, 24, 5  # noqa: E741
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": I,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": V,
    "draft_vocab_size": W, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_aux_hidden_states": 2,
}  # fmt: skip
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
MLA: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip


def names(**more: Any) -> dict[str, list[int]]:
    """The tensors of the usual drafter; ``None`` takes one out. A name's dots are written ``__``."""
    a, m = "midlayer.self_attn.", "midlayer.mlp."
    made: dict[str, Any] = {
        f"{a}q_proj.weight": [16, 2 * H], f"{a}k_proj.weight": [8, 2 * H], f"{a}v_proj.weight": [8, 2 * H],
        f"{a}o_proj.weight": [H, 16], f"{m}gate_proj.weight": [I, H], f"{m}up_proj.weight": [I, H],
        f"{m}down_proj.weight": [H, I], "midlayer.input_layernorm.weight": [H], "midlayer.hidden_norm.weight": [H],
        "midlayer.post_attention_layernorm.weight": [H], "fc.weight": [H, 2 * D], "norm.weight": [H],
        "lm_head.weight": [W, H], "d2t": [W], "t2d": [V],
    }  # fmt: skip
    made |= {name.replace("__", "."): shape for name, shape in more.items()}
    return {name: shape for name, shape in made.items() if shape is not None}


def renamed(old: str, new: str) -> dict[str, list[int]]:
    return {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in names().items()}


def case(name: str, tensors: dict[str, list[int]], **keys: Any) -> dict[str, Any]:
    return {"name": name, "config": {k: v for k, v in {**BASE, **keys}.items() if v is not ...}, "tensors": tensors}


def mla() -> dict[str, list[int]]:
    a = "midlayer.self_attn."
    kept = {k: v for k, v in names().items() if not k.startswith(a)}
    return kept | {
        f"{a}q_a_proj.weight": [8, 2 * H], f"{a}q_a_layernorm.weight": [8], f"{a}q_b_proj.weight": [32, 8],
        f"{a}kv_a_proj_with_mqa.weight": [16, 2 * H],
        f"{a}kv_a_layernorm.weight": [8], f"{a}kv_b_proj.weight": [32, 8], f"{a}o_proj.weight": [H, 16],
    }  # fmt: skip


def second_layer(norm: str) -> dict[str, list[int]]:
    first = {k: v for k, v in names().items() if k.startswith("midlayer.")}
    later = {k.replace("midlayer.", "layers.1."): v for k, v in first.items() if "norm" not in k}
    later = {k: [v[0], H] if "attn" in k and "o_proj" not in k else v for k, v in later.items()}
    return names() | later | {f"layers.1.{norm}.weight": [H], "layers.1.post_attention_layernorm.weight": [H]}


QKV_BIAS = {f"midlayer__self_attn__{n}_proj__bias": [16 if n == "q" else 8] for n in "qkv"}
O_BIAS = {"midlayer__self_attn__o_proj__bias": [H]}
NORMS = {f"midlayer__self_attn__{n}_norm__weight": [8] for n in "qk"}
EACH = {f"fc_norm__{i}__weight": [D] for i in range(2)}
CASES = [
    case("usual", names()),
    case("layers.0", renamed("midlayer.", "layers.0.")),
    case("model. before every name", {f"model.{k}": v for k, v in names().items()}),
    case("model. before what is inside", {k if k in ("d2t", "t2d", "lm_head.weight") else f"model.{k}": v
                                          for k, v in names().items()}),
    case("model. before d2t", {("model.d2t" if k == "d2t" else k): v for k, v in names().items()}),
    case("own embedding", names(embed_tokens__weight=[V, H])),
    case("embedding of another height", names(embed_tokens__weight=[V - 2, H])),
    case("no fc", names(fc__weight=None)),
    case("no norm", names(norm__weight=None)),
    case("no hidden_norm", names(midlayer__hidden_norm__weight=None)),
    case("no q_proj", names(midlayer__self_attn__q_proj__weight=None)),
    case("no head", names(lm_head__weight=None)),
    case("no map", names(d2t=None)),
    case("misspelt", renamed("midlayer.self_attn.q_proj", "midlayer.self_attn.query")),
    case("fc too narrow", names(fc__weight=[H, D])),
    case("fc for three", names(fc__weight=[H, 3 * D]), num_aux_hidden_states=...),
    case("ids at top level are not counted", names(), num_aux_hidden_states=...,
         eagle_aux_hidden_state_layer_ids=[1, 4]),
    case("ids inside are counted", names(), num_aux_hidden_states=...,
         eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4]}),
    case("input_norm on", names(input_norm__weight=[2 * D]), norm_before_fc=True),
    case("input_norm off", names(input_norm__weight=[2 * D])),
    case("input_norm on, not there", names(), norm_before_fc=True),
    case("norm_before_fc inside first", names(input_norm__weight=[2 * D]), norm_before_fc=True,
         eagle_config={"norm_before_fc": False}),
    case("fc_norm on", names(**EACH), fc_norm=True),
    case("fc_norm off", names(**EACH)),
    case("fc_norm on, not there", names(), fc_norm=True),
    case("aux_norm, SGLang's old name", names(aux_norm_low__weight=[D]), use_aux_norm=True),
    case("qkv bias on", names(**QKV_BIAS, **O_BIAS), attention_bias=True),
    case("qkv bias off", names(**QKV_BIAS)),
    case("qkv bias on, not there", names(), attention_bias=True),
    case("bias", names(**O_BIAS), bias=True),
    case("fc bias", names(fc__bias=[H])),
    case("q and k norms", names(**NORMS)),
    case("full vocabulary", names(d2t=None, t2d=None, lm_head__weight=[V, H]), draft_vocab_size=V),
    case("full vocabulary with a map", names(d2t=[V], lm_head__weight=[V, H]), draft_vocab_size=V),
    case("full vocabulary by null", names(d2t=None, lm_head__weight=[V, H]), draft_vocab_size=None),
    case("head of another height", names(lm_head__weight=[W - 1, H])),
    case("mask_hidden", names(mask_hidden=[1, 2 * D])),
    case("cached rotary", names(midlayer__self_attn__rotary_emb__inv_freq=[4])),
    case("two layers", second_layer("input_layernorm"), num_hidden_layers=2),
    case("two layers, SGLang's norm", second_layer("hidden_norm"), num_hidden_layers=2),
    case("a layer too many", second_layer("input_layernorm")),
    case("a layer too few", names(), num_hidden_layers=2),
    case("no aux", names(), eagle_config={"use_aux_hidden_state": False}),
    case("null target_hidden_size", names(), target_hidden_size=None),
    case("wider target", names(fc__weight=[H, 48]), target_hidden_size=24),
    case("qwen3", names(**NORMS), **QWEN3),
    case("qwen3 without its norms", names(), **QWEN3),
    case("qwen3, ids at top level are counted", names(**NORMS), num_aux_hidden_states=...,
         eagle_aux_hidden_state_layer_ids=[1, 4], **QWEN3),
    case("qwen3, input_norm off", names(**NORMS, input_norm__weight=[2 * D]), **QWEN3),
    case("mla", mla(), **MLA),
    case("mla, whole queries", mla() | {"midlayer.self_attn.q_proj.weight": [32, 2 * H]},
         **MLA | {"q_lora_rank": None}),
    case("mla, input_norm", mla() | {"input_norm.weight": [2 * D]}, norm_before_fc=True, **MLA),
    case("mla, fc_norm", mla() | {f"fc_norm.{i}.weight": [D] for i in range(2)}, fc_norm=True, **MLA),
    case("mla, mask_hidden", mla() | {"mask_hidden": [1, 2 * D]}, **MLA),
]  # fmt: skip


@torch.no_grad()
def tried(one: dict[str, Any], settings: Any, folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig
    from vllm.model_executor.models import deepseek_eagle3, deepseek_v2, llama, llama_eagle3, qwen3, qwen3_eagle3
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    for module, part in ((llama, "Attention"), (qwen3, "Attention"), (deepseek_v2, "MultiHeadLatentAttentionWrapper")):
        setattr(module, part, Nothing)
    classes = {
        "llama": llama_eagle3.Eagle3LlamaForCausalLM,
        "qwen3": qwen3_eagle3.Eagle3Qwen3ForCausalLM,
        "deepseek_v3": deepseek_eagle3.Eagle3DeepseekV2ForCausalLM,
    }
    (folder / "config.json").write_text(json.dumps(one["config"]), encoding="utf-8")
    config = EAGLEConfig(AutoConfig.from_pretrained(folder), method="eagle3", model_type="eagle")
    target = types.SimpleNamespace(
        dtype=torch.float32, head_dtype=torch.float32, get_total_num_hidden_layers=lambda: LAYERS,
        get_vocab_size=lambda: V, hf_config=config, max_model_len=64, use_mla=one["config"]["model_type"][0] == "d",
        get_head_size=lambda: 16, is_deepseek_mla=False, quantization=None, use_fp64_gumbel=False,
    )  # fmt: skip
    spec = types.SimpleNamespace(
        draft_model_config=Draft(config), parallel_drafting=False, enable_adaptive_verification=False
    )
    object.__setattr__(settings, "model_config", target)
    object.__setattr__(settings, "speculative_config", spec)
    settings.compilation_config.static_forward_context.clear()
    try:
        model = classes[one["config"]["model_type"]](vllm_config=settings)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))
            else:
                parameter.fill_(-1)
        model.load_weights((name, made(name, shape)) for name, shape in one["tensors"].items())
    except Exception as error:
        return {"raised": type(error).__name__, "message": " ".join(str(error).split())[:160]}
    left = [n for n, p in model.named_parameters() if unfilled(p)]
    flags = {f: bool(getattr(model, f, False)) for f in ("has_own_embed_tokens", "has_own_lm_head")}
    return {"left": sorted(left), **flags}


def made(name: str, shape: list[int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.long) if name.endswith(("d2t", "t2d")) else torch.zeros(shape)


def unfilled(parameter: Tensor) -> bool:
    """Rows that vLLM adds to round up a vocabulary stay as they are: one filled row is enough."""
    bad = parameter.isnan() if parameter.is_floating_point() else parameter < 0
    return bool(bad.reshape(len(bad), -1).any(1).all() if "embed" in str(type(parameter)) else bad.reshape(-1)[0])


class Nothing(nn.Module):
    """In the place of attention, which has no weights of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Draft:
    """The drafter's model config; false, so that nobody looks for its quantisation."""

    def __init__(self, hf_config: Any) -> None:
        self.hf_config = hf_config

    def __bool__(self) -> bool:
        return False


def main() -> None:
    import tempfile

    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    settings, told = VllmConfig(), []
    settings.compilation_config.mode = 0
    with set_current_vllm_config(settings), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29534", 0, "gloo")
        initialize_model_parallel(1, 1)
        for one in CASES:
            answer = tried(one, settings, Path(folder))
            print(one["name"], "->", answer, flush=True)
            told.append({**one, "answer": answer})
    about = {"engine": "vllm", "version": vllm.__version__, "date": datetime.now(UTC).date().isoformat()}
    about["command"] = "python runs/vllm_weights.py"
    rows = ",\n".join(json.dumps(row) for row in told)
    head = json.dumps(about)[:-1]
    target = json.dumps({"num_layers": LAYERS, "hidden_size": D, "vocab_size": V})
    Path(sys.argv[1]).write_text(f'{head}, "target": {target}, "cases": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
