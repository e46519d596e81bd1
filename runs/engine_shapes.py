"""What vLLM's and SGLang's own drafter code says with tiny drafters of every shape: the judge in tests/test_engines.py.

    python runs/engine_shapes.py make    OUT                               (where eyas is)
    VENV/bin/python runs/engine_shapes.py vllm OUT                         (where vLLM 0.32 is; a CPU will do)
    python runs/engine_shapes.py sglang  OUT --source llama_eagle3.py      (where torch and transformers are)

``make`` saves the drafters as eyas saves any. The others load those folders, config and weights, into the engine's own
class, draft one chain of DEPTHS tokens as the engine's proposer does, and write the logits beside them.

vLLM: everything is vLLM's but the attention kernel, which is replaced by plain attention over rows kept in a list.
SGLang: ``llama_eagle3.py`` of the wheel is run as it stands (its loading, its layers, its forward) on stand-ins for
the layers below it, written here: linear, norm, rope, attention. No wheel of it installs on a machine without CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PREFIX, DEPTHS = 9, 4  # slots of the prompt; drafted tokens
LAYERS = 5  # of the target
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "both_norms": {"fc_norm": True, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "own_embedding": {"own_embedding": True},
    "attention_bias": {"attention_bias": True},
    "layers": {"num_hidden_layers": 3},
    "eagle31": {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2},
    "everything": {
        "fc_norm": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "own_embedding": True,
        "attention_bias": True,
        "num_hidden_layers": 2,
    },
}


# -- the drafters ---------------------------------------------------------------------------------------------


def make(out: Path) -> None:
    """Drafters of every shape, and one text with its taps, all from seeds."""
    torch.manual_seed(0)
    target = tiny_target()
    words = some_words()
    for name, choices in SHAPES.items():
        make_one(target, out / name, (1, 4), words, choices)
    write_text(target, out, 2)


def tiny_target(heads: int = 2, key_value_heads: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from eyas.target import Target

    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=None,
    )
    return Target("tiny", None, LlamaForCausalLM(config).eval(), None, config)


def some_words() -> Any:
    from eyas.vocab import DraftVocab

    return DraftVocab(torch.randperm(48)[:32].sort().values, 48)


def make_one(target: Any, folder: Path, taps: tuple[int, ...], words: Any, choices: dict[str, Any]) -> None:
    """A drafter with weights large enough for every part of it to be heard."""
    from eyas import checkpoint, starts
    from eyas.contract import declared

    drafter = starts.random(target, starts.config_for(target, taps, len(words), **choices), words, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    identity = {"fingerprint": "", "architecture": "LlamaForCausalLM", "num_layers": LAYERS}
    contract = declared(taps=list(taps), **drafter.config.facts(), target=identity)
    checkpoint.save(drafter, folder, contract, {}, dtype=torch.float32)


def write_text(target: Any, out: Path, taps: int) -> None:
    text = {
        "taps": torch.randn(1, PREFIX, taps * 16),
        "input_ids": torch.randint(0, 48, (1, PREFIX + DEPTHS)),
        "embedding": target.embedding.detach().clone(),
    }
    save_file(text, out / "text.safetensors")


def chain(engine: Any, text: dict[str, Tensor]) -> Tensor:
    """Logits [DEPTHS, W] of one chain: the prompt's slots, then one token a depth, each one position further."""
    ids, said = text["input_ids"][0], []
    hidden, tokens, positions = engine.fused(text["taps"][0]), ids[1 : PREFIX + 1], torch.arange(PREFIX)
    for depth in range(DEPTHS):
        normed, fed_back = engine.forward(tokens, positions, hidden)
        said.append(engine.logits(normed[-1:])[0])
        hidden, tokens = fed_back[-1:], ids[PREFIX + depth + 1 : PREFIX + depth + 2]
        positions = positions[-1:] + 1
    return torch.stack(said)


class RowsKept(nn.Module):
    """Causal attention that keeps the keys and values it has seen; rows [S, heads * E]."""

    def __init__(self, heads: int, head_dim: int, scale: float, num_kv_heads: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.shape, self.kv_heads, self.scale = (heads, head_dim), num_kv_heads, scale
        self.held: list[tuple[Tensor, Tensor]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        self.held.append((k, v))
        E = self.shape[1]
        keys, values = (
            torch.cat(part).view(-1, self.kv_heads, E).transpose(0, 1) for part in zip(*self.held, strict=True)
        )
        queries = q.view(-1, *self.shape).transpose(0, 1)
        rows = torch.arange(keys.shape[1])
        mask = rows <= rows[-queries.shape[1] :, None]
        made = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], mask, scale=self.scale, enable_gqa=True
        )
        return made[0].transpose(0, 1).reshape(len(q), -1)


def shapes_in(out: Path) -> list[str]:
    return sorted(path.parent.name for path in out.glob("*/config.json"))


def record(out: Path, engine: str, said: dict[str, Tensor]) -> None:
    save_file(said, out / f"{engine}.safetensors")
    print(json.dumps({name: [round(float(v), 4) for v in logits[:, 0]] for name, logits in said.items()}, indent=1))


# -- vLLM -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def vllm(out: Path) -> None:
    from transformers import AutoConfig
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import llama
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    llama.Attention = RowsKept
    text, said = load_file(out / "text.safetensors"), {}
    settings = VllmConfig()
    settings.compilation_config.mode = 0
    with set_current_vllm_config(settings):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29533", 0, "gloo")
        initialize_model_parallel(1, 1)
        for name in shapes_in(out):
            draft = AutoConfig.from_pretrained(out / name)
            target = types.SimpleNamespace(
                dtype=torch.float32,
                head_dtype=torch.float32,
                get_total_num_hidden_layers=lambda: LAYERS,
                get_vocab_size=lambda: 48,
            )
            spec = types.SimpleNamespace(draft_model_config=Draft(draft), parallel_drafting=False)
            object.__setattr__(settings, "model_config", target)
            object.__setattr__(settings, "speculative_config", spec)
            engine = Eagle3LlamaForCausalLM(vllm_config=settings)
            engine.load_weights(load_file(out / name / "model.safetensors").items())
            if not getattr(engine, "has_own_embed_tokens", False):
                engine.model.embed_tokens.weight.data[:48].copy_(text["embedding"])  # vLLM pads the rows
            for part in engine.modules():
                part.cpu_linear = F.linear  # instead of a packed one, which vLLM makes when it has loaded a model
            said[name] = chain(OfVllm(engine), text)
    record(out, "vllm", said)


class Draft:
    """The drafter's model config; false, so that nobody looks for its quantisation."""

    def __init__(self, hf_config: Any) -> None:
        self.hf_config = hf_config

    def __bool__(self) -> bool:
        return False


class OfVllm:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.fused = model.combine_hidden_states

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(tokens, positions, hidden)

    def logits(self, normed: Tensor) -> Tensor:
        every = self.model.compute_logits(normed)
        return every[:, torch.isfinite(every[0])]  # what is not drafted is -inf


# -- SGLang ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def sglang(out: Path, source: Path) -> None:
    from transformers import AutoConfig

    text, said = load_file(out / "text.safetensors"), {}
    module = sglang_module(source)
    for name in shapes_in(out):
        config = AutoConfig.from_pretrained(out / name)
        engine = module.LlamaForCausalLMEagle3(config)
        engine.load_weights(load_file(out / name / "model.safetensors").items())
        if config.target_hidden_size == config.hidden_size:  # set_embed of models/llama.py
            engine.model.embed_tokens.weight.data.copy_(text["embedding"])
        said[name] = chain(OfSglang(engine), text)
    record(out, "sglang", said)


class OfSglang:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.fused = lambda taps: taps  # fc is part of the forward, told by the width

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        no = types.SimpleNamespace(is_extend=lambda: False)
        batch = types.SimpleNamespace(
            mm_input_embeds=None, forward_mode=no, spec_info=types.SimpleNamespace(hidden_states=hidden)
        )
        normed, aux = self.model.model(tokens, positions, batch)
        return normed, aux[0]

    def logits(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.model.lm_head.weight)


def sglang_module(source: Path) -> Any:
    """The wheel's file as a module, on the stand-ins below."""
    parts: dict[str, dict[str, Any]] = {
        "configs.draft_parallel": {
            "DraftParallelSpec": lambda **_: None,
            "DraftTPExecution": types.SimpleNamespace(SINGLE_GROUP=None),
        },
        "runtime_context": {
            "get_spec": lambda: types.SimpleNamespace(speculative_draft_window_size=None),
            "get_parallel": lambda: types.SimpleNamespace(pp_group=None),
        },
        "utils": {"add_prefix": lambda name, prefix: f"{prefix}.{name}"},
        "layers.layer_boundary": {"layer_stack": contextlib.nullcontext},
        "layers.layernorm": {"RMSNorm": Norm},
        "layers.linear": {"QKVParallelLinear": Qkv},
        "layers.logits_processor": {"LogitsProcessor": lambda _: None},
        "layers.quantization.base_config": {"QuantizationConfig": object},
        "layers.vocab_parallel_embedding": {"ParallelLMHead": head, "VocabParallelEmbedding": embedding},
        "model_executor.forward_batch_info": {"ForwardBatch": object, "PPProxyTensors": object},
        "model_loader.weight_utils": {"default_weight_loader": lambda p, w: p.data.copy_(w)},
        "models.llama": {"LlamaDecoderLayer": Base, "LlamaForCausalLM": nn.Module, "LlamaMLP": Mlp},
    }
    for name, members in parts.items():
        for end in range(1, len(name.split(".")) + 1):
            parent = "sglang.srt." + ".".join(name.split(".")[:end])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        vars(sys.modules[f"sglang.srt.{name}"]).update(members)
    for name in ("sglang", "sglang.srt"):
        sys.modules.setdefault(name, types.ModuleType(name))
    module = types.ModuleType("llama_eagle3")
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(module))
    return module


class Norm(nn.Module):
    """RMSNorm as SGLang's forward_native has it: a residual is added first and handed back."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            x = residual = x + residual
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return normed if residual is None else (normed, residual)


class Stacked(nn.Module):
    """Several projections in one weight, filled part by part."""

    def __init__(self, width: int, parts: dict[Any, int], bias: bool) -> None:
        super().__init__()
        rows = sum(parts.values())
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.weight.weight_loader = self._place
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None
        self.parts = parts

    def _place(self, parameter: nn.Parameter, loaded: Tensor, part: Any) -> None:
        order = list(self.parts)
        start = sum(self.parts[p] for p in order[: order.index(part)])
        parameter.data[start : start + self.parts[part]].copy_(loaded)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Qkv(Stacked):
    def __init__(self, width: int, E: int, heads: int, kv_heads: int, bias: bool, **_: Any) -> None:
        super().__init__(width, {"q": heads * E, "k": kv_heads * E, "v": kv_heads * E}, bias)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, *_: Any) -> None:
        super().__init__()
        self.gate_up_proj = Stacked(width, {0: inner, 1: inner}, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class SelfAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.head_dim = config.head_dim
        self.total_num_heads, self.total_num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        # models/llama.py:339: the bias of o_proj follows the config, whatever that of q, k and v is made to be.
        self.o_proj = nn.Linear(self.total_num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.rope = LlamaRotaryEmbedding(config)
        self.attn = RowsKept(self.total_num_heads, self.head_dim, self.head_dim**-0.5, self.total_num_kv_heads)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        parts = self.qkv_proj.parts.values()
        q, k, v = self.qkv_proj(hidden_states).split(list(parts), dim=-1)
        cos, sin = self.rope(hidden_states, positions[None])
        q, k = (part.view(1, len(part), -1, self.head_dim).transpose(1, 2) for part in (q, k))
        q, k = ((rotated[0].transpose(0, 1).flatten(1)) for rotated in self._both(apply_rotary_pos_emb, q, k, cos, sin))
        return self.o_proj(self.attn(q, k, v))

    @staticmethod
    def _both(rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, q, cos, sin)[0], rotate(k, k, cos, sin)[0]


class Base(nn.Module):
    """The layer that SGLang's drafter takes over and changes."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = SelfAttention(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


def head(rows: int, width: int, **_: Any) -> nn.Module:
    return nn.Linear(width, rows, bias=False)


def embedding(rows: int, width: int, **_: Any) -> nn.Module:
    return nn.Embedding(rows, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "vllm", "sglang"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, help="sglang/srt/models/llama_eagle3.py out of the wheel")
    options = parser.parse_args()
    if options.what == "make":
        make(options.out)
    elif options.what == "vllm":
        vllm(options.out)
    else:
        sglang(options.out, options.source)


if __name__ == "__main__":
    main()
