"""Tiny random targets and drafters, made by transformers' real classes: tensors without a download."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)

from eyas import starts
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.target import Target
from eyas.vocab import DraftVocab

KINDS = ("llama", "qwen2", "qwen3", "gemma3", "mistral", "deepseek")
VOCAB = 211
DRAFT_VOCAB = 97
# What a drafter can be besides the usual, by DrafterConfig's names.
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "both_norms": {"fc_norm": True, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "own_embedding": {"own_embedding": True},
    "attention_bias": {"attention_bias": True},
    "layers": {"num_hidden_layers": 2},
    "eagle31": {"fc_norm": True, "norm_output": True, "own_embedding": True},
    "everything": {
        "fc_norm": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "own_embedding": True,
        "attention_bias": True,
        "num_hidden_layers": 3,
    },
}
WINDOW = 9  # Gemma's and Mistral's sliding window: shorter than any text the tests decode
MAX_POSITIONS = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,  # ten times the usual: at 0.02 the logits of a tiny model are all but equal
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(kind: str) -> PreTrainedConfig:
    if kind == "llama":
        return LlamaConfig(**_SHAPE, num_hidden_layers=5)
    if kind == "qwen2":
        return Qwen2Config(**_SHAPE, num_hidden_layers=4)
    if kind == "qwen3":
        return Qwen3Config(**_SHAPE, num_hidden_layers=6, head_dim=16, tie_word_embeddings=True)
    if kind == "mistral":
        return MistralConfig(**_SHAPE, num_hidden_layers=4, sliding_window=WINDOW)
    if kind == "deepseek":
        return DeepseekV3Config(
            **_SHAPE | {"num_key_value_heads": 4},
            num_hidden_layers=5,
            first_k_dense_replace=2,
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            q_lora_rank=24,
            kv_lora_rank=20,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=16,
        )
    assert kind == "gemma3", kind
    layers = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    return Gemma3TextConfig(
        **_SHAPE,
        num_hidden_layers=len(layers),
        layer_types=layers,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        tie_word_embeddings=False,  # tied and random, with Gemma's large embeddings, it would echo
        final_logit_softcapping=30.0,
    )


def model(kind: str, *, tied: bool | None = None) -> PreTrainedModel:
    """A seeded random model of one of ``KINDS``, its head tied or not as its config says or as asked."""
    config = _config(kind)
    if tied is not None:
        config.tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(KINDS.index(kind))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@cache
def target(kind: str = "llama") -> Target:
    """A seeded random target of one of ``KINDS``: fp32, on the CPU, without tokenizer or end token."""
    made = model(kind)
    return Target(f"tiny-{kind}", None, made, None, made.config.get_text_config())


def wrapped(inner: Target) -> PreTrainedModel:
    """The weights of ``target("gemma3")`` as the language model of a model that also sees pictures."""
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = Gemma3Config(text_config=inner.config, vision_config=vision, mm_tokens_per_image=1)
    config.tie_word_embeddings = False
    made = Gemma3ForConditionalGeneration(config).eval()
    made.model.language_model.load_state_dict(inner.decoder.state_dict())
    made.lm_head.load_state_dict(inner.head.state_dict())
    return made.requires_grad_(False)


def ending_at(target: Target, *token_ids: int) -> Target:
    """The same target with these end tokens."""
    return replace(target, tokenizer=SimpleNamespace(eos_token_id=list(token_ids)))


def vocab(seed: int = 0, size: int = DRAFT_VOCAB) -> DraftVocab:
    """A sorted random subset of the target's vocabulary."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    return DraftVocab(order[:size].sort().values, VOCAB)


def drafter(kind: str = "llama", seed: int = 0, taps: Sequence[int] = (1, 2, 4), **choices: Any) -> Drafter:
    """A random drafter for ``target(kind)``, its weights so large that its tokens depend on all it is fed.

    ``choices`` are further fields of its shape, as in ``SHAPES``.
    """
    of = target(kind)
    words = vocab(seed)
    made = starts.random(of, starts.config_for(of, tuple(taps), len(words), **choices), words, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return made.requires_grad_(False)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng([seed, length]).integers(0, VOCAB, length)]


def tiny_records(n: int, seed: int = 0) -> list[Record]:
    """Random records of 20 to 40 tokens; a prompt of 4 to 10, then all response, some with a second turn."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        length = int(rng.integers(20, 41))
        mask = np.arange(length) >= rng.integers(4, 11)
        if i % 2:
            mask[15:18] = False
        made.append(Record(rng.integers(0, VOCAB, length).astype(np.int32), mask, f"tiny/{i}"))
    return made


@cache
def nearly_linear() -> Target:
    """A target whose layers hardly add to the embedding, so that a linear map can foretell it."""
    usual = target("llama")
    model = copy.deepcopy(usual.model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.01)
        layer.mlp.down_proj.weight.mul_(0.01)
    return Target("linear", None, model, None, usual.config)
