"""Where a drafter's weights begin: at random, or at a closed-form fit to the target.

The ridge start solves, on a few batches, for the linear map from what slot t is given to what it should say:

    [taps of t ; norm(embedding of x[t+1])]  ──▶  last state of t+1, RMS-normalised, before the gain of the final norm

The taps' part of the solution is fc. The embedding's part, cut to the rank that the values of the attention can carry,
becomes v_proj and o_proj, and q_proj and k_proj are set so that most heads look at their own slot. With the target's
own head and final gain the drafter then speaks before its first gradient step. The MLP starts as a zero function.

Letters: B batch, T positions, C taps, D target width, H drafter width, M rows of the regression, N query heads,
G key/value heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas import objective, taps
from eyas.drafter import Drafter, DrafterConfig
from eyas.target import Target
from eyas.vocab import DraftVocab

SHARPNESS = 1.5  # self-attention logit in units of sqrt(E) at the ridge start: about 12 against noise of 1.5


def config_for(target: Target, tap_list: tuple[int, ...], draft_vocab_size: int) -> DrafterConfig:
    """The usual EAGLE-3 shape: one layer as wide as the target's own, with the target's rope."""
    text = target.config
    heads, key_value_heads, head_dim = _heads(target)
    return DrafterConfig(
        taps=tap_list,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=int(text.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=float(text.rms_norm_eps),
        rope_parameters=_rope(text.rope_parameters),
        max_position_embeddings=int(text.max_position_embeddings),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
    )


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
        heads = target.hidden_size // width
        return heads, math.gcd(heads, 8), width
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or target.hidden_size // heads)
    return heads, int(text.num_key_value_heads), width


def _rope(parameters: dict[str, object]) -> dict[str, object]:
    """A target's rope, flat: of one that ropes its layer types apart (Gemma-3) the full-attention entry."""
    flat = parameters.get("full_attention", parameters)
    assert isinstance(flat, dict)
    return {key: value for key, value in flat.items() if value is not None}


def random(target: Target, config: DrafterConfig, vocab: DraftVocab, seed: int) -> Drafter:
    """Normal noise of 0.02 everywhere, norms at one, the head included; fp32, on the target's device."""
    drafter = Drafter(config, vocab, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                assert "norm" in name
                parameter.fill_(1.0)
    return drafter.to(target.device)


@torch.no_grad()
def scale_taps(drafter: Drafter, sample: Tensor) -> None:
    """Let training see taps [M, C*D] at RMS one per feature; folded into fc whenever the drafter is saved."""
    rms = sample.pow(2).mean(0).sqrt()
    drafter.tap_scale.copy_(1.0 / rms.clamp(min=1e-3 * float(rms.mean())))


@torch.no_grad()
def sample_rows(
    target: Target,
    tap_list: tuple[int, ...],
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    run: taps.Run = taps.run,
) -> tuple[Tensor, Tensor, Tensor]:
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
    rows: tuple[Tensor, Tensor, Tensor],
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

    features = torch.cat((tapped * drafter.tap_scale, embedded), dim=1).double()
    gram = features.T @ features
    gram.diagonal().add_(strength * gram.diagonal().mean())
    solution = torch.linalg.solve(gram, features.T @ wanted)  # [C*D + H, H]
    from_taps, from_embedding = solution.split((tapped.shape[1], config.hidden_size))

    drafter.fc.weight.copy_(from_taps.T)
    _embedding_through_attention(drafter, from_embedding, embedded.double())
    _heads_look_at_themselves(drafter, torch.cat((embedded, _hidden(drafter, tapped)), dim=1).double(), seed)
    drafter.midlayer.mlp.down_proj.weight.zero_()
    drafter.norm.weight.copy_(gain)
    drafter.lm_head.weight.copy_(target.head_weight[vocab.ids])
    return drafter


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
