"""The EAGLE-3 drafter and one depth of it. No loss, no cache, no files.

    taps of position t ──fc──▶ hidden ─┬─────────────────────────────(+)──┬────────────(+)──▶ state
    token t+1 ──embedding──▶ norm ─┐   ├▶ norm ─┐                     │   └▶ norm ▶ MLP ─┘
                                   └───┴──▶ [embedding ; hidden] ▶ attention

    logits = head(norm(state)) over the draft vocabulary; ``feedback(state)`` is the hidden of the next depth.

That is one layer. Further ones are plain Llama layers between it and the state: hidden only, no embedding, and one
norm before attention. Four switches change the picture (EAGLE-3.1); all are off in EAGLE-3:

    norm_before_fc         one norm over the taps joined, before fc                        tensor ``input_norm``
    fc_norm                a norm for each tap, before fc (after the joint one)            tensors ``fc_norm.0`` …
    norm_before_residual   the first layer's residual starts at the normed hidden, not the hidden itself
    norm_output            the next depth is handed norm(state), not the state

A fifth is Qwen3's: with ``qk_norm`` queries and keys are normed for each head before rope, one weight for all heads
(vLLM 0.32 ``models/qwen3_eagle3.py``).

The caller owns attention: ``objective`` masks a whole conversation, ``decode`` keeps a cache. Both call the same
methods here, so that what was trained is what is decoded. Rope, RMSNorm and MLP are transformers' Llama ones.
Shape of the layer: EAGLE-3 (arXiv 2503.01840), names and switches as in SGLang 0.5.23 ``models/llama_eagle3.py`` and
vLLM 0.32 ``models/llama_eagle3.py``.

Letters: B batch, S slots, C taps, D target width, H drafter width, N query heads, G key/value heads, E head width,
W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

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

from eyas.contract import Contract
from eyas.errors import CheckpointError
from eyas.vocab import DraftVocab

# What the contract says of the switches, value by value.
_FC_NORM = {
    "none": {"norm_before_fc": False, "fc_norm": False},
    "joint": {"norm_before_fc": True, "fc_norm": False},
    "each": {"norm_before_fc": False, "fc_norm": True},
    "joint, then each": {"norm_before_fc": True, "fc_norm": True},
}
_RESIDUAL = {
    "before hidden_norm": {"norm_before_residual": False},
    "after hidden_norm": {"norm_before_residual": True},
}
_FEEDBACK = {
    "before the last norm": {"norm_output": False},
    "after the last norm": {"norm_output": True},
}
_SWITCHES = {"fc_norm": _FC_NORM, "residual": _RESIDUAL, "feedback": _FEEDBACK}
SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


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
    num_hidden_layers: int = Field(1, ge=1, le=64)
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    """Whether the drafter has an embedding of its own, trained and saved, or shares the target's."""

    @model_validator(mode="after")
    def _fits(self) -> DrafterConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size is larger than vocab_size")
        return self

    def facts(self) -> dict[str, Any]:
        """The contract's facts that are switches, ownership or layers of this shape."""
        ours = self.model_dump(include=set(SWITCHES))
        facts = {
            fact: next(word for word, on in values.items() if on.items() <= ours.items())
            for fact, values in _SWITCHES.items()
        }
        layers: dict[str, Any] = {
            "layers": self.num_hidden_layers,
            "attention_bias": self.attention_bias,
            "qk_norm": self.qk_norm,
        }
        if self.num_hidden_layers > 1:
            layers["later_norm"] = "input_layernorm"
        return {**facts, **layers, "embedding": "own" if self.own_embedding else "target"}

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
            num_hidden_layers=self.num_hidden_layers,
        )


def switches(contract: Contract) -> dict[str, bool]:
    """The switches a contract settles, by DrafterConfig's names. Raises CheckpointError on a word it cannot mean."""
    found: dict[str, bool] = {}
    for fact, values in _SWITCHES.items():
        if fact not in contract:
            continue
        if contract[fact] not in list(values):
            raise CheckpointError(
                f"Fact {fact!r} of the contract is {contract[fact]!r}; one of {', '.join(values)} was expected.",
                way_out="Restore the config that was saved with these weights, or a newer eyas that wrote it.",
            )
        found.update(values[contract[fact]])
    return found


class Attention(nn.Module):
    """Queries, keys and values of rows ``width`` wide, the norms of the first two, and the way back."""

    def __init__(self, config: DrafterConfig, width: int) -> None:
        super().__init__()
        E, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * E, config.hidden_size, bias=bias)
        self.q_norm = LlamaRMSNorm(E, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(E, config.rms_norm_eps) if config.qk_norm else nn.Identity()


class Layer(nn.Module):
    """A decoder layer. The first takes [embedding ; hidden], with a norm for each half; later ones take hidden alone,
    as plain Llama layers do."""

    def __init__(self, config: DrafterConfig, *, first: bool) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(H, eps)
        if first:
            self.hidden_norm = LlamaRMSNorm(H, eps)
        self.self_attn = Attention(config, 2 * H if first else H)
        self.post_attention_layernorm = LlamaRMSNorm(H, eps)
        self.mlp = LlamaMLP(config.as_llama())


class Drafter(nn.Module):
    """Weights and the pieces of one depth.

    ``embedding`` [V, H]: the target's tensor, shared and never saved; with ``own_embedding`` where the drafter's own
    starts, and None if its values come later.
    """

    tap_scale: Tensor

    def __init__(self, config: DrafterConfig, vocab: DraftVocab, embedding: Tensor | None) -> None:
        super().__init__()
        assert len(vocab) == config.draft_vocab_size
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.vocab = vocab
        fused = len(config.taps) * config.target_hidden_size
        self.input_norm = LlamaRMSNorm(fused, eps) if config.norm_before_fc else None
        each = (LlamaRMSNorm(config.target_hidden_size, eps) for _ in config.taps)
        self.fc_norm = nn.ModuleList(each) if config.fc_norm else None
        self.fc = nn.Linear(fused, H, bias=False)
        self.midlayer = Layer(config, first=True)
        # Named by their number, as engines name them: the first is ``midlayer`` to both.
        self.layers = nn.ModuleDict({str(i): Layer(config, first=False) for i in range(1, config.num_hidden_layers)})
        self.norm = LlamaRMSNorm(H, eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config.as_llama())
        self._hold(embedding)
        self.register_buffer("draft_to_target", vocab.ids.clone(), persistent=False)
        # Taps differ in size a hundredfold and an optimiser steps every weight alike, so training sees scaled taps;
        # the scale is part of fc's weight in whatever is saved, and a loaded drafter has ones here.
        self.register_buffer("tap_scale", torch.ones(fused), persistent=False)

    def _hold(self, embedding: Tensor | None) -> None:
        shape = (self.config.vocab_size, self.config.hidden_size)
        assert embedding is None or embedding.shape == shape
        if self.config.own_embedding:
            self.embed_tokens = nn.Embedding(*shape)
            if embedding is not None:
                with torch.no_grad():
                    self.embed_tokens.weight.copy_(embedding)
        else:
            assert embedding is not None
            self.register_buffer("shared_embedding", embedding, persistent=False)

    @property
    def embedding(self) -> Tensor:
        """[V, H], the target's or the drafter's own."""
        return self.embed_tokens.weight if self.config.own_embedding else cast(Tensor, self.shared_embedding)

    # -- the pieces of one depth ------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """Concatenated taps [B, S, C*D] -> hidden of depth 0 [B, S, H]."""
        return self.fc(self.norm_taps(taps) * self.tap_scale)  # type: ignore[no-any-return]

    def norm_taps(self, taps: Tensor) -> Tensor:
        """Taps [..., C*D] after whatever norms stand before fc."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return taps

    def enter(self, hidden: Tensor, token_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Hidden [B, S, H] at the door of ``layer`` -> its residual [B, S, H] and its attention's input.

        The first layer's input is ``mix``; a later layer knows no tokens.
        """
        if layer:
            return hidden, self.layer(layer).input_layernorm(hidden)
        residual = self.midlayer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        return residual, self.mix(token_ids, hidden)

    def mix(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Target ids [B, S] and hidden [B, S, H] -> the first attention's input [B, S, 2H], embedding first."""
        embedded = F.embedding(token_ids, self.embedding).to(hidden.dtype)
        return torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)), dim=-1)

    def queries(self, mixed: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
        """The attention's input [B, S, 2H or H] at rope ``positions`` [B, S] -> [B, N, S, E]."""
        attention = self.layer(layer).self_attn
        return self._rotated(attention.q_norm(self._heads(attention.q_proj(mixed))), positions)

    def keys_values(self, mixed: Tensor, positions: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The attention's input [B, S, 2H or H] at rope ``positions`` [B, S] -> keys and values, each [B, G, S, E]."""
        attention = self.layer(layer).self_attn
        keys = attention.k_norm(self._heads(attention.k_proj(mixed)))
        return self._rotated(keys, positions), self._heads(attention.v_proj(mixed))

    def finish(self, residual: Tensor, attended: Tensor, layer: int = 0) -> Tensor:
        """Residual [B, S, H] and attended [B, N, S, E] -> the layer's output [B, S, H]; the last one's is the state."""
        this = self.layer(layer)
        hidden = residual + this.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + this.mlp(this.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def feedback(self, state: Tensor) -> Tensor:
        """State of one depth [B, S, H] -> hidden of the next."""
        return self.norm(state) if self.config.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """State [..., H] -> draft logits [..., W]."""
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft_to_target[draft_ids]  # type: ignore[index]

    # ---------------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> Layer:
        return cast(Layer, self.layers[str(index)]) if index else self.midlayer

    def _heads(self, projected: Tensor) -> Tensor:
        *rows, _ = projected.shape
        return projected.view(*rows, -1, self.config.head_dim).transpose(1, 2)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, positions)
        return apply_rotary_pos_emb(heads, heads, cos, sin)[0]  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Plain attention with grouped heads: q [B, N, S, E], k and v [B, G, T, E], mask [B, 1, S, T] True = may see."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
