"""N, F and R: norms and residual, feedback, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from runs.mutations.subject import Bed, Change, Mutation, Subject, both, chain, keys, like, tensors
from torch import Tensor

NORMS = ("norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
         "midlayer.post_attention_layernorm.weight")  # fmt: skip
QK = ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight")

# -- norms ------------------------------------------------------------------------------------------------------


def gains(by: float, *names: str) -> Change:
    """``by`` added to the gains named, or to all there are, those before fc among them."""

    def run(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
        chosen = names or tuple(n for n in held if n in NORMS or n.startswith(("fc_norm", "input_norm")))
        return {name: like(held[name].float() + by, held[name]) for name in chosen}

    return tensors(run)


def norm_before_fc(each: bool) -> Change:
    """A norm with gains of one where training had none, switched on."""

    def ones(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
        D, C = bed.target.hidden_size, len(bed.taps)
        wide = {f"fc_norm.{i}.weight": torch.ones(D) for i in range(C)}
        return wide if each else {"input_norm.weight": torch.ones(C * D)}

    return chain(tensors(ones), keys(fc_norm=True) if each else keys(norm_before_fc=True))


def joint(bed: Bed, subject: Subject) -> Subject:
    """One norm over the joined taps with the gains of all of them, where training had one a tap."""
    gain = torch.cat([subject.tensors[f"fc_norm.{i}.weight"] for i in range(len(bed.taps))])
    kept = {n: t for n, t in subject.tensors.items() if not n.startswith("fc_norm")}
    config = {k: v for k, v in subject.config.items() if k != "fc_norm"} | {"norm_before_fc": True}
    return replace(subject, tensors=kept | {"input_norm.weight": gain}, config=config)


def normed_taps(bed: Bed) -> bool:
    return bool(bed.config.get("fc_norm"))


def plain(bed: Bed) -> bool:
    return not any(bed.config.get(key) for key in ("fc_norm", "norm_before_fc", "norm_output"))


NORM: list[Mutation] = [
    *both(Mutation("all gains + 1", "N", "norm-gain-plus-one", gains(1.0))),
    *both(Mutation("all gains - 1", "N", "norm-gain-minus-one", gains(-1.0))),
    Mutation("gain of the last norm + 1", "N", "norm-gain-one-layer", gains(1.0, NORMS[0])),
    Mutation("gain of the embedding's norm + 1", "N", "norm-gain-one-layer", gains(1.0, NORMS[1])),
    Mutation("gain of hidden_norm + 1", "N", "norm-gain-one-layer", gains(1.0, NORMS[2])),
    Mutation("gain of hidden_norm - 1", "N", "norm-gain-one-layer", gains(-1.0, NORMS[2])),
    Mutation("gain of the MLP's norm - 1", "N", "norm-gain-one-layer", gains(-1.0, NORMS[3])),
    *both(Mutation("residual after the norm", "N", "norm-before-residual-ignored", keys(norm_before_residual=True)),
          "contract-edited"),
    Mutation("a norm for each tap added", "N", "fc-norm-added", norm_before_fc(each=True), applies=plain),
    Mutation("a joint norm before fc added", "N", "fc-norm-added", norm_before_fc(each=False), applies=plain),
    Mutation("norms of the taps switched off", "N", "fc-norm-skipped", keys(remove=["fc_norm"]), applies=normed_taps),
    Mutation("one norm over all taps", "N", "fc-norm-joint", joint, applies=normed_taps),
]  # fmt: skip

FEEDBACK: list[Mutation] = [
    *both(Mutation("normed state fed back", "F", "feedback-post-norm", keys(norm_output=True), applies=plain),
          "contract-edited"),
    *both(Mutation("raw state fed back", "F", "feedback-pre-norm", keys(remove=["norm_output"]),
          also=("recipe-flag-not-saved",), applies=lambda bed: bool(bed.config.get("norm_output"))),
          "contract-edited"),
]  # fmt: skip

# -- rotary embedding -------------------------------------------------------------------------------------------


def base(factor: float) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        theta = subject.config["rope_theta"] * factor
        rope = subject.config["rope_parameters"] | {"rope_theta": theta}
        return replace(subject, config=subject.config | {"rope_theta": theta, "rope_parameters": rope})

    return run


def scaling(**values: Any) -> Change:
    """Both places of the config say so."""

    def run(bed: Bed, subject: Subject) -> Subject:
        rope = subject.config["rope_parameters"] | values
        return replace(subject, config=subject.config | {"rope_scaling": dict(values), "rope_parameters": rope})

    return run


def interleaved(undo: bool = False) -> Callable[[Bed, dict[str, Tensor]], dict[str, Tensor]]:
    """Rows of q and k as for pairs that lie side by side: row 2i from half i, row 2i + 1 from its partner."""

    def run(bed: Bed, held: dict[str, Tensor]) -> dict[str, Tensor]:
        E = bed.config["head_dim"]
        order = torch.arange(E).view(2, E // 2).T.flatten()
        order = order.argsort() if undo else order
        return {name: held[name].view(-1, E, held[name].shape[1])[:, order].flatten(0, 1) for name in QK}

    return run


ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")

ROTARY: list[Mutation] = [
    *both(Mutation("base / 10", "R", "rope-base-wrong", base(0.1)), "contract-edited"),
    Mutation("base * 10", "R", "rope-base-wrong", base(10.0)),
    Mutation("base of 500,000", "R", "rope-base-wrong",
             lambda bed, s: base(500_000 / s.config["rope_theta"])(bed, s)),
    Mutation("base where nobody looks", "R", "rope-base-unread",
             lambda bed, s: chain(keys(remove=ROPE_KEYS), keys(rotary={"base": s.config["rope_theta"]}))(bed, s),
             also=("rope-base-wrong",)),
    *both(Mutation("no base at all", "R", "rope-base-wrong", keys(remove=ROPE_KEYS), also=("rope-base-unread",)),
          "contract-edited"),
    *both(Mutation("pairs interleaved", "R", "rope-interleaved", tensors(interleaved()))),
    Mutation("linear scaling of 4", "R", "rope-scaling-added", scaling(rope_type="linear", factor=4.0)),
    *both(Mutation("linear scaling of 32", "R", "rope-scaling-added", scaling(rope_type="linear", factor=32.0)),
          "contract-edited"),
    Mutation("YaRN of 4", "R", "rope-scaling-added",
             lambda bed, s: scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)(bed, s)),
    Mutation("Llama 3 scaling of 32", "R", "rope-scaling-added",
             scaling(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=8192)),
    Mutation("half of each head rotated", "R", "rope-partial-ignored", keys(partial_rotary_factor=0.5)),
    Mutation("position limit below the records", "R", "position-limit-short", keys(max_position_embeddings=48),
             inventory=True),
    Mutation("window wider than the records", "R", "window-from-target",
             keys(sliding_window=4096, use_sliding_window=True, layer_types=["sliding_attention"])),
]  # fmt: skip

MUTATIONS = NORM + FEEDBACK + ROTARY
