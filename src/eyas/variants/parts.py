"""What a drafter can be built from, and one of the drafters that can be built from it.

A *reading* is a mapping of facts: those of a contract, and a few that no contract needs because there is one right
answer to them (``RIGHT``). The files, a target's end and a reading give a drafter; a variant is a reading in which one
fact differs. Weights are shared between readings, never copied.

Letters: W draft vocabulary, V target vocabulary, H drafter width, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from eyas import objective
from eyas.checkpoint import Checkpoint, expected_shapes
from eyas.contract import declared
from eyas.drafter import Drafter, DrafterConfig, switches
from eyas.target import Target
from eyas.vocab import DraftVocab
from eyas.widened import BIG, narrow, widen_on_use

Facts = Mapping[str, Any]

RIGHT: dict[str, Any] = {
    "position_step": 1,  # how far the position advances with each depth
    "cache": "all",  # keys of depth 0 that a slot sees: all up to its own, or none but its own
    "norm_gain": {},  # by norm, or "all": what is added to its weight
    "residual_kept": True,  # whether the layer adds its input back
    "rope_layout": "half-split",
}
"""Facts outside the contract, each with the one value that trainers and engines mean."""

NORMS = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
PLAYED: dict[str, Literal["target", "stale", "zeros"]] = {
    "the target's state": "target",
    "the state before": "stale",
    "zeros": "zeros",
}
"""Values of ``feedback`` that are no switch of a drafter but another way to play it."""
SHUFFLES = {"interleaved": (-1, 2), "interleaved back": (2, -1)}
UNUSED = ("d2t", "t2d")


@dataclass(frozen=True, eq=False)
class Parts:
    """``tensors`` by our names as stored; ``target`` gives its embedding, its head and its norm. ``maps`` are the
    target ids [W] under every reading of the vocabulary map that these files allow, by the words of ``vocab_map``."""

    shape: DrafterConfig
    tensors: Mapping[str, Tensor]
    target: Target
    maps: Mapping[str, Tensor]
    narrow: bool = False
    """Whether matrices stay as narrow as they are stored: where fp32 would take gigabytes (``widened``)."""
    _head: dict[str, Tensor] = field(default_factory=dict)

    def target_head(self, which: str) -> Tensor:
        """Rows of the target's head [W, D] for the ids of map ``which``; ids that do not exist take row 0."""
        if which not in self._head:
            ids = self.maps[which]
            rows = self.target.head_weight[ids.clamp(0, self.target.vocab_size - 1)]
            self._head[which] = rows if self.narrow else rows.float()
        return self._head[which]


def read_parts(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], target: Target, maps: Mapping[str, Tensor]
) -> Parts:
    """``tensors`` are all of the checkpoint's, by our names."""
    # The embedding is only looked up, a row at a time, so it may stay as narrow as it is stored.
    used = {n: t for n, t in tensors.items() if n not in UNUSED}
    asis = {n for n in used if n == "embed_tokens.weight"}
    matrices = {n: t for n, t in used.items() if t.ndim == 2 and narrow(t) and n not in asis}
    big = 4 * sum(t.numel() for t in matrices.values()) > BIG
    asis |= matrices.keys() if big else set()
    return Parts(checkpoint.shape, {n: t if n in asis else t.float() for n, t in used.items()}, target, maps, big)


class Altered(Drafter):
    """A drafter that can do what no healthy one does. Every switch as it is here, it is the plain one."""

    head_norm = True
    residual_kept = True
    rotated_share = 1.0

    def finish(self, residual: Tensor, attended: Tensor, layer: int = 0) -> Tensor:
        return super().finish(residual if self.residual_kept else torch.zeros_like(residual), attended, layer)

    def logits(self, state: Tensor) -> Tensor:
        return super().logits(state) if self.head_norm else self.lm_head(state)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        if self.rotated_share == 1.0:
            return super()._rotated(heads, positions)
        width = int(heads.shape[-1] * self.rotated_share) // 2 * 2
        return torch.cat((super()._rotated(heads[..., :width], positions), heads[..., width:]), dim=-1)


def build(parts: Parts, facts: Facts) -> Altered | None:
    """The drafter that ``facts`` make of these files; None where the files lack what they ask for.

    What a draft id means is ``parts.maps[facts["vocab_map"]]``, in any order; its ``vocab`` is those ids, sorted.
    """
    tensors = dict(parts.tensors)
    if facts.get("head") == "target":
        tensors["lm_head.weight"] = parts.target_head(facts["vocab_map"])
    if "lm_head.weight" not in tensors or len(tensors["lm_head.weight"]) != len(parts.maps[facts["vocab_map"]]):
        return None
    shape = _shape(parts.shape, facts, len(tensors["lm_head.weight"]))
    if not shape.own_embedding and shape.hidden_size != parts.target.hidden_size:
        return None
    wanted = {name: size for name, size in expected_shapes(shape).items() if name not in UNUSED}
    for name, size in wanted.items():
        if name not in tensors and len(size) == 1 and name.endswith("norm.weight"):
            tensors[name] = torch.ones(size)  # as engines do
    if any(name not in tensors or tuple(tensors[name].shape) != size for name, size in wanted.items()):
        return None
    tensors = {name: tensors[name] for name in wanted}
    _move_gains(tensors, facts.get("norm_gain") or {})
    _turn_heads(tensors, shape.head_dim, facts.get("rope_layout", "half-split"))
    return _assembled(shape, tensors, parts, facts)


def _shape(shape: DrafterConfig, facts: Facts, rows: int) -> DrafterConfig:
    known = ("fc_norm", "residual", "feedback")
    told = {fact: facts[fact] for fact in known if fact in facts and facts[fact] not in PLAYED}
    changes: dict[str, Any] = {**switches(declared(**told)), "taps": tuple(range(len(facts["taps"])))}
    if facts.get("feedback") in PLAYED:
        changes["norm_output"] = False
    changes["own_embedding"] = facts.get("embedding") == "own"
    changes["draft_vocab_size"] = rows
    if "rope" in facts:
        changes["rope_parameters"] = {k: v for k, v in facts["rope"].items() if k != "partial_rotary_factor"}
    return shape.model_copy(update=changes)


def _move_gains(tensors: dict[str, Tensor], by: Mapping[str, float]) -> None:
    """Add to norm weights: ``by`` name, without its ".weight", or "all"."""
    for name, delta in by.items():
        for weight in tensors:
            if weight == f"{name}.weight" or (name == "all" and tensors[weight].ndim == 1 and "norm" in weight):
                tensors[weight] = tensors[weight] + delta


def _turn_heads(tensors: dict[str, Tensor], head_dim: int, layout: str) -> None:
    """Rows of q and k from one layout of rotary pairs to the other: pairs side by side, or halves apart."""
    if layout == "half-split":
        return
    for name in [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))]:
        rows = tensors[name].shape[0]
        pairs = SHUFFLES[layout]
        inner = [head_dim // 2 if size == -1 else size for size in pairs]
        turned = tensors[name].reshape(rows // head_dim, *inner, -1).transpose(1, 2)
        tensors[name] = turned.reshape(tensors[name].shape)


def _assembled(shape: DrafterConfig, tensors: dict[str, Tensor], parts: Parts, facts: Facts) -> Altered:
    """Weights are assigned, not copied; buffers and rope are small and made for real."""
    V, ids = parts.target.vocab_size, parts.maps[facts["vocab_map"]]
    words = DraftVocab(torch.arange(shape.draft_vocab_size), max(V, shape.draft_vocab_size))
    with torch.device("meta"):
        made = Altered(shape, words, torch.empty(shape.vocab_size, shape.hidden_size))
    made.load_state_dict(tensors, strict=True, assign=True)
    if parts.narrow:
        widen_on_use(made)
    made.tap_scale = torch.ones(len(shape.taps) * shape.target_hidden_size)
    made.draft_to_target = ids.clone()
    made.vocab = DraftVocab(torch.unique(ids[(ids >= 0) & (ids < V)]), V)
    made.rotary = type(made.rotary)(shape.as_llama())
    if not shape.own_embedding:
        made.shared_embedding = parts.target.embedding
    made.head_norm = bool(facts.get("head_norm", True))
    made.residual_kept = bool(facts.get("residual_kept", True))
    made.rotated_share = float((facts.get("rope") or {}).get("partial_rotary_factor") or 1.0)
    if made.rotated_share != 1.0:
        narrow = shape.as_llama()
        narrow.head_dim = int(shape.head_dim * made.rotated_share) // 2 * 2
        made.rotary = type(made.rotary)(narrow)
    return made.to(parts.target.device).eval().requires_grad_(False)


def play(facts: Facts) -> objective.Play:
    """How the depths after the first are played under ``facts``."""
    return objective.Play(
        step=facts.get("position_step", 1),
        feedback=PLAYED.get(str(facts.get("feedback")), "own"),
        cache=facts.get("cache", "all"),
        window=facts.get("window"),
    )
