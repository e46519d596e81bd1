"""Names of a drafter's tensors: every trainer's and engine's spelling, and ours.

Ours are those of EAGLE's ``cnets.py`` with later layers as ``layers.1`` …::

    fc  input_norm  fc_norm.0 …   midlayer.*   layers.1.* …   norm  lm_head  embed_tokens  d2t  t2d

Others write ``layers.0.`` for ``midlayer.`` (speculators, ModelOpt, vLLM's own), ``midlayer.0.`` where there are
several (TensorRT-LLM, modeling_speculative.py ``load_weights``), ``model.`` before everything, once or twice, and
``aux_norm_low`` / ``_mid`` / ``_high`` for the norms of the taps (SGLang 0.5.23 llama_eagle3.py:325).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eyas.errors import CheckpointError

PREFIX = "model."
AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
# Found under any prefix: engines look for the word anywhere in a name.
_ANYWHERE = {
    "d2t": "d2t",
    "t2d": "t2d",
    "draft_id_to_target_id": "d2t",
    "embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = re.compile(r"(?:layers|midlayer)\.(\d+)\.(.+)")
_MLA = "kv_a_proj_with_mqa"


@dataclass(frozen=True)
class Layout:
    """``names`` maps our name to the name in the files; what is no part of any drafter keeps its own.

    ``name`` says how the files spell a layer: midlayer, layers, midlayer.N, with ``model.`` before it as often as it
    stands there, or mixed.
    """

    names: dict[str, str]
    name: str

    def facts(self) -> dict[str, Any]:
        """The facts of a contract that names alone decide, in its words. ``layers`` ends at the first gap."""
        there = self.names.keys()
        layers = 0
        while any(name.startswith(layer_prefix(layers)) for name in there):
            layers += 1
        each, joint = any(n.startswith("fc_norm.") for n in there), "input_norm.weight" in there
        return {
            "fc_norm": {(0, 0): "none", (0, 1): "joint", (1, 0): "each", (1, 1): "joint, then each"}[each, joint],
            "layers": layers,
            "attention": "mla" if any(_MLA in name for name in there) else "gqa",
            "attention_bias": any(name.endswith("q_proj.bias") for name in there),
            "qk_norm": any(name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")) for name in there),
            "embedding": "own" if "embed_tokens.weight" in there else "target",
            "head": "own" if "lm_head.weight" in there else "target",
        }


def read(names: Iterable[str], where: str) -> Layout:
    """Raises CheckpointError where two names mean one tensor."""
    found: dict[str, str] = {}
    spellings = set()
    for name in sorted(names):
        ours = canonical(name)
        if ours in found:
            raise CheckpointError(
                f"{where}: {found[ours]} and {name} are two names of one tensor, {ours}; an engine takes whichever it "
                "reads last.",
                way_out="Remove the one that was not trained.",
            )
        found[ours] = name
        if match := re.match(r"((?:model\.)*)(midlayer\.\d+|midlayer|layers\.\d+)\.", name):
            numbered = re.sub(r"midlayer\.\d+", "midlayer.N", match[2])
            spellings.add(match[1] + ("layers" if numbered.startswith("layers") else numbered))
    return Layout(found, _spelling(spellings))


def _spelling(spellings: set[str]) -> str:
    """One word; EAGLE's own names are midlayer for the first layer and layers.1 for what follows."""
    first = {s for s in spellings if "midlayer" in s}
    later = {s.replace("midlayer.N", "midlayer").replace("midlayer", "layers") for s in first}
    if len(first) == 1 and spellings - first <= later:
        return first.pop()
    return spellings.pop() if len(spellings) == 1 else "mixed" if spellings else "none"


def canonical(name: str) -> str:
    """A tensor's name as we spell it."""
    parts = name.split(".")
    for length in (1, 2):
        if (ours := _ANYWHERE.get(".".join(parts[-length:]))) is not None:
            return ours
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    if match := _LAYER.fullmatch(name):
        return layer_prefix(int(match[1])) + match[2]
    first, dot, rest = name.partition(".")
    return AUX_NORMS.get(first, first) + dot + rest


def layer_prefix(index: int) -> str:
    """How our names of one layer begin."""
    return f"layers.{index}." if index else "midlayer."
