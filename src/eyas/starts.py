"""Where a drafter's weights begin: at random, at a layer of the target, or at a closed-form fit to the target.

The target start copies the target's last layers, lets fc pass the last tap through and leaves the embedding unread:
what the target would say had the layers between that tap and the copied ones not been there.

The ridge start solves, on a few batches, for the linear map from what slot t is given to what it should say:

    [taps of t ; norm(embedding of x[t+1])]  ──▶  last state of t+1, RMS-normalised, before the gain of the final norm

The taps' part of the solution is fc. The embedding's part, cut to the rank that the values of the attention can carry,
becomes v_proj and o_proj, and q_proj and k_proj are set so that most heads look at their own slot. With the target's
own head and final gain the drafter then speaks before its first gradient step. The MLP starts as a zero function, and
so does all of a later layer. Norms before fc are part of the features; an embedding of the drafter's own starts as the
target's.

Letters: B batch, T positions, C taps, D target width, H drafter width, M rows of the regression, N query heads,
G key/value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas import objective, taps
from eyas.drafter import Drafter, DrafterConfig, Layer
from eyas.errors import UsageError
from eyas.target import Target
from eyas.vocab import DraftVocab

Rows = tuple[Tensor, Tensor, Tensor]
"""Taps [M, C*D], fed ids [M] and last states [M, D] of sampled slots."""

SHARPNESS = 1.5  # self-attention logit in units of sqrt(E) at the ridge start: about 12 against noise of 1.5


def config_for(target: Target, tap_list: tuple[int, ...], draft_vocab_size: int, **choices: Any) -> DrafterConfig:
    """The usual EAGLE-3 shape: one layer as wide as the target's own, with the target's rope; ``choices`` are fields of
    DrafterConfig to have otherwise."""
    text = target.config
    heads, key_value_heads, head_dim = _heads(target)
    usual: dict[str, Any] = {
        "taps": tap_list,
        "target_hidden_size": target.hidden_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": int(text.intermediate_size),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(text.rms_norm_eps),
        "rope_parameters": _rope(text.rope_parameters),
        "max_position_embeddings": int(text.max_position_embeddings),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }
    return DrafterConfig(**{**usual, **choices})


def _heads(target: Target) -> tuple[int, int, int]:
    """Query heads, key/value heads and head width of the drafter's attention: the target's own.

    Latent attention (DeepSeek, Kimi) has none that the engines' Llama drafter could take: its ``head_dim`` is only the
    roped part, and its heads share one latent key. Heads as wide as its values that fill the hidden size, in at most
    8 groups, are what SpecForge gives such targets (56 heads of 128 in 8 groups: configs/deepseek-v3-671b-eagle3.json)
    and a width that attention kernels know; hidden size / heads would be 56 there, which they do not.
    """
    text = target.config
    if getattr(text, "kv_lora_rank", None):
        width = int(text.v_head_dim)
        heads = max(1, target.hidden_size // width)
        return heads, math.gcd(heads, 8), width
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or target.hidden_size // heads)
    return heads, int(text.num_key_value_heads), width


# Rope types that transformers, SGLang and vLLM turn into the same angles, and what they are made of.
PORTABLE_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """A rope for the drafter: the target's, where it can be carried over; else a plain one of the same base.

    Of a target that ropes its layer types apart (Gemma-3) it is the full-attention entry. A drafter learns with
    whatever rope it has, so what engines read differently is better left out: yarn with DeepSeek's ``mscale`` (vLLM's
    Llama layer scales attention by the factor alone), partial rotation, sections for images.
    """
    flat: dict[str, Any] = parameters.get("full_attention", parameters)
    kind = flat.get("rope_type") or "default"
    kept = PORTABLE_ROPE.get(kind)
    if kept is None:
        kind, kept = "default", ()
    return {"rope_type": kind, "rope_theta": flat["rope_theta"], **{key: flat[key] for key in kept}}


def random(target: Target, config: DrafterConfig, vocab: DraftVocab, seed: int) -> Drafter:
    """Normal noise of 0.02 everywhere, the head included; norms at one, an own embedding at the target's; fp32."""
    drafter = Drafter(config, vocab, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.startswith("embed_tokens."):
                continue
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                assert "norm" in name or name.endswith(".bias")
                parameter.fill_(1.0 if "norm" in name else 0.0)
    return drafter.to(target.device)


def random_on_scale(target: Target, config: DrafterConfig, vocab: DraftVocab, rows: Rows, seed: int) -> Drafter:
    """The random start, its taps on one scale."""
    drafter = random(target, config, vocab, seed)
    scale_taps(drafter, rows[0])
    return drafter


@torch.no_grad()
def scale_taps(drafter: Drafter, sample: Tensor) -> None:
    """Let fc see taps [M, C*D] at RMS one per feature in training; folded into fc whenever the drafter is saved."""
    rms = drafter.norm_taps(sample).pow(2).mean(0).sqrt()
    drafter.tap_scale.copy_(1.0 / rms.clamp(min=1e-3 * float(rms.mean())))


@torch.no_grad()
def sample_rows(
    target: Target,
    tap_list: tuple[int, ...],
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    run: taps.Run = taps.run,
) -> Rows:
    """Rows of the regression, from (input_ids, lengths, loss_mask) batches.

    Taps [M, C*D], fed ids [M], last states [M, D]: fp32 whatever the target's precision, on its device.
    """
    tapped, fed, after = [], [], []
    for batch in batches:
        input_ids, lengths, loss_mask = (tensor.to(target.device) for tensor in batch)
        states = run(target, input_ids, lengths, tap_list)
        slots = objective.trained_slots(loss_mask, 1)
        rows, columns = slots.valid[:, :, 0].nonzero(as_tuple=True)
        t = slots.index[rows, columns]
        tapped.append(states.taps[rows, t])
        fed.append(input_ids[rows, t + 1])
        after.append(states.last[rows, t + 1])
    return torch.cat(tapped).float(), torch.cat(fed), torch.cat(after).float()


@torch.no_grad()
def ridge(
    target: Target,
    config: DrafterConfig,
    vocab: DraftVocab,
    rows: Rows,
    seed: int,
    strength: float = 0.01,
) -> Drafter:
    """A drafter that starts at the regression's solution. ``strength`` is relative to the features' mean power."""
    drafter = random(target, config, vocab, seed)
    tapped, fed, after = rows
    gain = target.norm_gain
    scale_taps(drafter, tapped)
    embedded = drafter.midlayer.input_layernorm(F.embedding(fed, drafter.embedding))
    wanted = (after / torch.where(gain.abs() < 1e-6, torch.ones_like(gain), gain)).double()  # unit-RMS last state

    features = torch.cat((drafter.norm_taps(tapped) * drafter.tap_scale, embedded), dim=1).double()
    gram = features.T @ features
    gram.diagonal().add_(strength * gram.diagonal().mean())
    solution = torch.linalg.solve(gram, features.T @ wanted)  # [C*D + H, H]
    from_taps, from_embedding = solution.split((tapped.shape[1], config.hidden_size))

    drafter.fc.weight.copy_(from_taps.T)
    if config.norm_before_residual:  # the norm then keeps the size of the fit, though not of each row
        drafter.midlayer.hidden_norm.weight.fill_(_size(drafter.fuse(tapped)))
    _embedding_through_attention(drafter, from_embedding, embedded.double())
    _heads_look_at_themselves(drafter, torch.cat((embedded, _hidden(drafter, tapped)), dim=1).double(), seed)
    drafter.midlayer.mlp.down_proj.weight.zero_()
    for i in range(1, config.num_hidden_layers):
        later = drafter.layer(i)
        later.self_attn.o_proj.weight.zero_()
        later.mlp.down_proj.weight.zero_()
    _speak_as_target(drafter, target)
    return drafter


def _speak_as_target(drafter: Drafter, target: Target) -> None:
    drafter.norm.weight.copy_(target.norm_gain)
    drafter.lm_head.weight.copy_(target.head_weight[drafter.vocab.ids])


def _size(rows: Tensor) -> float:
    """Root mean square of rows [M, H]."""
    return float(rows.pow(2).mean().sqrt())


def _hidden(drafter: Drafter, tapped: Tensor) -> Tensor:
    return drafter.midlayer.hidden_norm(drafter.fuse(tapped))  # type: ignore[no-any-return]


def _self_heads(config: DrafterConfig) -> int:
    """Query heads of each group that look at their own slot; the rest are free to look around."""
    return max(1, (config.num_attention_heads // config.num_key_value_heads) * 2 // 3)


def _embedding_through_attention(drafter: Drafter, wanted: Tensor, embedded: Tensor) -> None:
    """The best rank-G*E stand-in for ``wanted`` [H, H] on the embeddings seen, written into v_proj and o_proj."""
    config = drafter.config
    rank = min(config.num_key_value_heads * config.head_dim, config.hidden_size)
    covariance = embedded.T @ embedded / len(embedded)
    covariance.diagonal().add_(1e-4 * covariance.diagonal().mean())
    root = torch.linalg.cholesky(covariance)  # covariance = root root^T, so |E X| = |root^T X|
    left, sizes, right = torch.linalg.svd(root.T @ wanted, full_matrices=False)
    read = torch.linalg.solve_triangular(root.T, left[:, :rank], upper=True)  # [H, rank]
    write = sizes[:rank, None] * right[:rank]  # [rank, H]

    attention, E = drafter.midlayer.self_attn, config.head_dim
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, : config.hidden_size] = read.T.to(attention.v_proj.weight.dtype)
    per_group, own = config.num_attention_heads // config.num_key_value_heads, _self_heads(config)
    attention.o_proj.weight.zero_()
    padded = F.pad(write, (0, 0, 0, config.num_key_value_heads * E - rank))
    for group in range(config.num_key_value_heads):
        for head in range(group * per_group, group * per_group + own):
            part = padded[group * E : (group + 1) * E].T / own
            attention.o_proj.weight[:, head * E : (head + 1) * E] = part.to(attention.o_proj.weight.dtype)


def _heads_look_at_themselves(drafter: Drafter, mixed: Tensor, seed: int) -> None:
    """Equal q and k projections of the whitened attention input [M, 2H]: a slot matches itself and nothing else."""
    config = drafter.config
    E, N, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    mean = mixed.mean(0)
    centred = mixed - mean
    covariance = centred.T @ centred / len(mixed)
    values, vectors = torch.linalg.eigh(covariance)
    floor = 0.05 * float(values.mean())
    whiten = vectors @ torch.diag((values + floor).rsqrt()) @ vectors.T
    along = mean / mean.norm()
    whiten = whiten - torch.outer(whiten @ along, along)  # blind to the mean, which every slot shares
    generator = torch.Generator().manual_seed(seed)
    attention = drafter.midlayer.self_attn
    for group in range(G):
        noise = torch.randn(mixed.shape[1], E, generator=generator, dtype=torch.float64)
        directions = torch.linalg.qr(noise).Q.T.to(mixed.device)  # [E, 2H], orthonormal rows
        key = (directions @ whiten).to(attention.k_proj.weight.dtype)
        attention.k_proj.weight[group * E : (group + 1) * E] = key
        for head in range(group * N // G, group * N // G + _self_heads(config)):
            attention.q_proj.weight[head * E : (head + 1) * E] = SHARPNESS * key


# -- a layer of the target ------------------------------------------------------------------------------------

_PLACED = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
_SPARED = {
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),  # a drafter has none: SGLang could not run it
    "self_attn.q_norm.weight",  # folded into the projections
    "self_attn.k_norm.weight",
}


@torch.no_grad()
def from_target(target: Target, config: DrafterConfig, vocab: DraftVocab, rows: Rows, seed: int) -> Drafter:
    """The target's last layers, final norm and head; fc passes the last tap through.

    In the first layer queries, keys and values read the hidden half with the target's weights and the embedding half
    with zeros. Biases are left behind, norms of queries and keys become their mean over the sample. Raises UsageError
    for a target whose layers are not of the Llama kind.
    """
    layers = list(target.decoder.layers)[-config.num_hidden_layers :]  # type: ignore[arg-type]
    _require_llama_like(target, layers[-1], config)
    drafter = random(target, config, vocab, seed)
    last = rows[0][:, -config.target_hidden_size :]
    _pass_last_tap_through(drafter, rows[0], last)
    hidden = last
    for i, layer in enumerate(layers):
        _copy_layer(layer, drafter.layer(i), hidden)
    if config.norm_before_residual:
        _gain_into_projections(drafter.midlayer, _size(hidden))
    _speak_as_target(drafter, target)
    return drafter


def _require_llama_like(target: Target, layer: nn.Module, config: DrafterConfig) -> None:
    usual = config_for(target, config.taps, config.draft_vocab_size)
    names = {name for name, _ in layer.named_parameters()}
    strange = sorted(names - _PLACED - _SPARED) + sorted(_PLACED - names)
    narrower = [k for k in ("intermediate_size", "head_dim") if getattr(config, k) != getattr(usual, k)]
    why = None
    if strange:
        why = f"its layers differ in {', '.join(strange[:4])}"
    elif narrower:
        why = f"its {narrower[0]} is {getattr(usual, narrower[0])}, not {getattr(config, narrower[0])}"
    elif config.num_hidden_layers > target.num_layers:
        why = f"it has {target.num_layers} layers"
    if why:
        raise UsageError(
            f"No {config.num_hidden_layers} layer(s) of {target.spec} can be copied into a drafter's: {why}.",
            way_out="Pass --init ridge, which fits any target.",
        )


def _pass_last_tap_through(drafter: Drafter, tapped: Tensor, last: Tensor) -> None:
    """fc as a selector, undoing the scales before it in the mean: hidden is about the last tap [M, D]."""
    D = drafter.config.target_hidden_size
    scale = drafter.tap_scale
    scale_taps(drafter, tapped)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -D:] = torch.diag(1.0 / scale[-D:])
    passed = drafter.fuse(tapped)
    drafter.fc.weight.mul_(float((passed * last).sum() / passed.pow(2).sum()))


def _copy_layer(source: nn.Module, layer: Layer, hidden: Tensor) -> None:
    """A target's layer into a drafter's; ``hidden`` [M, D] stands for what comes in."""
    theirs = dict(source.named_parameters())
    first = hasattr(layer, "hidden_norm")
    norm = layer.hidden_norm if first else layer.input_layernorm
    norm.weight.copy_(theirs["input_layernorm.weight"])
    normed, width = norm(hidden), hidden.shape[1]
    for name in "qkv":
        weight = theirs[f"self_attn.{name}_proj.weight"]
        gain = theirs.get(f"self_attn.{name}_norm.weight")
        if gain is not None:
            heads = (normed @ weight.T).view(len(normed), -1, len(gain))  # [M, N, E]
            rms = heads.pow(2).mean((0, 2)).sqrt()
            weight = (weight.view(-1, len(gain), width) * gain[:, None] / rms[:, None, None]).flatten(0, 1)
        projection = getattr(layer.self_attn, f"{name}_proj")
        projection.weight.zero_()
        projection.weight[:, -width:] = weight
    layer.self_attn.o_proj.weight.copy_(theirs["self_attn.o_proj.weight"])
    layer.post_attention_layernorm.weight.copy_(theirs["post_attention_layernorm.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(theirs[f"mlp.{name}.weight"])


def _gain_into_projections(layer: Layer, size: float) -> None:
    """Give hidden_norm one gain for all features, the hidden's own size, and its old ones to what reads it."""
    H = len(layer.hidden_norm.weight)
    for name in "qkv":
        getattr(layer.self_attn, f"{name}_proj").weight[:, H:] *= layer.hidden_norm.weight / size
    layer.hidden_norm.weight.fill_(size)


Start = Callable[[Target, DrafterConfig, DraftVocab, Rows, int], Drafter]
STARTS: dict[str, Start] = {"ridge": ridge, "random": random_on_scale, "target": from_target}
