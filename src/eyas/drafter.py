"""The EAGLE-3 drafter and one depth of it. No loss, no cache, no files.

    taps of position t ──fc──▶ hidden ─┬─────────────────────────────(+)──┬────────────(+)──▶ state
    token t+1 ──embedding──▶ norm ─┐   ├▶ norm ─┐                     │   └▶ norm ▶ MLP ─┘
                                   └───┴──▶ [embedding ; hidden] ▶ attention

    logits = head(norm(state)) over the draft vocabulary; ``state`` (before that norm) is the hidden of the next depth.

The caller owns attention: ``objective`` masks a whole conversation, ``decode`` keeps a cache. Both call the same
methods here, so that what was trained is what is decoded. Rope, RMSNorm and MLP are transformers' Llama ones.
Shape of the layer: EAGLE-3 (arXiv 2503.01840), names as in SGLang 0.5.23 ``models/llama_eagle3.py`` and vLLM 0.32
``models/llama_eagle3.py``.

Letters: B batch, S slots, C taps, D target width, H drafter width, N query heads, G key/value heads, E head width,
W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eyas.vocab import DraftVocab


class DrafterConfig(BaseModel):
    """Shape of a drafter. ``taps`` are in our coordinate (after t layers), ascending."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taps: tuple[int, ...]
    target_hidden_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(gt=0)

    @model_validator(mode="after")
    def _fits(self) -> DrafterConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size is larger than vocab_size")
        return self

    def as_llama(self) -> LlamaConfig:
        """The same shape as transformers spells it, for the parts taken from there."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            vocab_size=self.vocab_size,
            num_hidden_layers=1,
        )


class Attention(nn.Module):
    """Projections only: queries, keys and values of [embedding ; hidden], and the way back."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, E = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * H, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(2 * H, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(2 * H, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, H, bias=False)


class MidLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        llama = config.as_llama()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(llama)


class Drafter(nn.Module):
    """Weights and the pieces of one depth. ``embedding`` [V, H] is the target's tensor, shared and never saved."""

    embedding: Tensor
    tap_scale: Tensor

    def __init__(self, config: DrafterConfig, vocab: DraftVocab, embedding: Tensor) -> None:
        super().__init__()
        assert len(vocab) == config.draft_vocab_size
        assert embedding.shape == (config.vocab_size, config.hidden_size)
        self.config = config
        self.vocab = vocab
        fused = len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config.as_llama())
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_to_target", vocab.ids.clone(), persistent=False)
        # Taps differ in size a hundredfold and an optimiser steps every weight alike, so training sees scaled taps;
        # ``fold_tap_scale`` moves the scale into fc before anything is saved, and a loaded drafter has ones here.
        self.register_buffer("tap_scale", torch.ones(fused), persistent=False)

    # -- the pieces of one depth ------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """Concatenated taps [B, S, C*D] -> hidden of depth 0 [B, S, H]."""
        return self.fc(taps * self.tap_scale)  # type: ignore[no-any-return]

    def mix(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Target ids [B, S] and hidden [B, S, H] -> the attention's input [B, S, 2H], embedding first."""
        embedded = F.embedding(token_ids, self.embedding)
        return torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)), dim=-1)

    def queries(self, mixed: Tensor, positions: Tensor) -> Tensor:
        """[B, S, 2H] at rope ``positions`` [B, S] -> [B, N, S, E]."""
        return self._rotated(self.midlayer.self_attn.q_proj(mixed), positions)

    def keys_values(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, 2H] at rope ``positions`` [B, S] -> keys and values, each [B, G, S, E]."""
        attention = self.midlayer.self_attn
        return self._rotated(attention.k_proj(mixed), positions), self._heads(attention.v_proj(mixed))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual hidden [B, S, H] and attended [B, N, S, E] -> state [B, S, H]."""
        hidden = hidden + self.midlayer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def logits(self, state: Tensor) -> Tensor:
        """State [..., H] -> draft logits [..., W]."""
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft_to_target[draft_ids]  # type: ignore[index]

    # ---------------------------------------------------------------------------------------------------------

    def _heads(self, projected: Tensor) -> Tensor:
        *rows, _ = projected.shape
        return projected.view(*rows, -1, self.config.head_dim).transpose(1, 2)

    def _rotated(self, projected: Tensor, positions: Tensor) -> Tensor:
        heads = self._heads(projected)
        cos, sin = self.rotary(heads, positions)
        return apply_rotary_pos_emb(heads, heads, cos, sin)[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def fold_tap_scale(self) -> None:
        """Move ``tap_scale`` into fc: the same function, with taps taken as the target gives them."""
        self.fc.weight.mul_(self.tap_scale)
        self.tap_scale.fill_(1.0)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Plain attention with grouped heads: q [B, N, S, E], k and v [B, G, T, E], mask [B, 1, S, T] True = may see."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
