"""Tiny targets for the ways through a target: every shape the compact way knows, and all of ``tiny``'s kinds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

import tiny
from eyas import taps as tapping
from eyas.target import Target

TAPS = (0, 1, 3)
WINDOW = 11
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Head widths are multiples of eight, so that the compiled kernel takes them: it mixes values by 8 lanes or by 32.
COMPILED: dict[str, PreTrainedConfig] = {}


def _shape(**changes: Any) -> dict[str, Any]:
    usual = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return usual | changes


COMPILED["plain"] = LlamaConfig(**_shape())
COMPILED["biases, odd widths"] = LlamaConfig(
    **_shape(hidden_size=52, intermediate_size=83, head_dim=16), attention_bias=True, mlp_bias=True
)
COMPILED["wide heads in threes"] = LlamaConfig(
    **_shape(hidden_size=60, num_attention_heads=6, num_key_value_heads=2, head_dim=32), tie_word_embeddings=True
)
COMPILED["every head its own"] = LlamaConfig(**_shape(num_key_value_heads=4, head_dim=8))
COMPILED["linear rope"] = LlamaConfig(
    **_shape(), rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
)
COMPILED["llama3 rope"] = LlamaConfig(**_shape(), rope_parameters=LLAMA3)
COMPILED["yarn rope"] = LlamaConfig(**_shape(), rope_parameters=YARN)
COMPILED["qwen2, some windows"] = Qwen2Config(
    **_shape(), use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
)
COMPILED["mistral"] = MistralConfig(**_shape(), sliding_window=WINDOW)
COMPILED["qwen3"] = tiny._config("qwen3")
COMPILED["gemma3"] = tiny._config("gemma3")


@cache
def target(name: str) -> Target:
    """One of COMPILED or of ``tiny.KINDS``, its biases and norms random too."""
    if name not in COMPILED:
        return tiny.target(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        made = AutoModelForCausalLM.from_config(COMPILED[name], dtype=torch.float32).eval().requires_grad_(False)
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return Target(name, None, made, None, made.config.get_text_config())


def dense(of: Target, token_ids: Sequence[int], taps: Sequence[int] = TAPS) -> tuple[Tensor, Tensor]:
    """States [T, D] and taps [T, C*D] of a text in one pass without any cache."""
    ids = torch.tensor([list(token_ids)])
    told = tapping.run(of, ids, torch.tensor([len(token_ids)]), taps)
    return told.last[0], told.taps[0]


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal as sums in fp32 are in another order: a hundred roundings of 6e-8 and what layers make of them.

    Seen: 2e-6 of the largest value at most. A wrong mask, position or row is wrong by 1e-2 of it and more.
    """
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
