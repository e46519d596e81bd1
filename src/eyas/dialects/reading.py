"""What a drafter's files say of how it was trained: facts, what they leave open, and what no fact can say.

The table ``EAGLE_3`` holds what every trainer builds where no switch says otherwise; each trainer's dialect starts from
it. Read in SpecForge a6b6b02 modeling/draft/llama3_eagle.py, speculators c05b95b models/eagle3/core.py, ModelOpt
a2fbac7 speculative/plugins/modeling_eagle.py, EAGLE cb7e084 traineagle3/cnets.py, AngelSlim 67394ce
train/models/draft/llama_eagle3.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.contract import Contract, Fact
from eyas.dialects.keys import Keys
from eyas.dialects.wiring import Files, TargetFacts
from eyas.inventory import TensorInfo


@dataclass(frozen=True)
class Ambiguity:
    """A fact that the files leave open: the values it may have, likeliest first, and what would separate them."""

    fact: str
    values: tuple[Any, ...]
    separate: str


@dataclass(frozen=True)
class Reading:
    """``notes`` are sentences on what was trained that no fact of a contract can say."""

    contract: Contract
    ambiguous: tuple[Ambiguity, ...] = ()
    notes: tuple[str, ...] = ()


EAGLE_3: Mapping[str, Any] = {
    "tap_state": "stream",
    "fc": "applied",
    "fc_norm": "none",
    "layers": 1,
    "attention": "gqa",
    "attention_bias": False,
    "qk_norm": False,
    "residual": "before hidden_norm",
    "head_norm": True,
    "feedback": "before the last norm",
    "token_shift": 1,
    "position_offset": 0,
    "window": None,
    "embedding": "target",
    "head": "own",
}


class Draft:
    """A reading being put together: what the trainer builds by default, then what the files say, fact by fact."""

    def __init__(self, **defaults: Any) -> None:
        self.facts = {name: Fact(value, "defaulted") for name, value in {**EAGLE_3, **defaults}.items()}
        self.ambiguous: list[Ambiguity] = []
        self.notes: list[str] = []

    def set(self, name: str, fact: Fact | None) -> None:
        """Give a fact; None leaves it out."""
        self.facts.pop(name, None)
        if fact is not None:
            self.facts[name] = fact

    def leave_open(self, name: str, values: tuple[Any, ...], separate: str) -> None:
        self.facts.pop(name, None)
        self.ambiguous.append(Ambiguity(name, values, separate))

    def done(self) -> Reading:
        layers = self.facts.get("layers")
        if layers is None or layers.value == 1:  # the fact is about layers after the first
            self.facts.pop("later_norm", None)
        return Reading(Contract(self.facts), tuple(self.ambiguous), tuple(self.notes))


# -- parts that trainers share --------------------------------------------------------------------------------


def named(fact: Fact, yes: str, no: str) -> Fact:
    """A switch in a contract's words."""
    return Fact(yes if fact.value else no, fact.origin)


def norms_before_fc(joint: Fact, each: Fact) -> Fact:
    """The fact ``fc_norm`` out of two switches."""
    words = [word for word, fact in (("joint", joint), ("each", each)) if fact.value]
    declared = "declared" in (joint.origin, each.origin)
    return Fact(", then ".join(words) or "none", "declared" if declared else "defaulted")


def vocabulary(draft: Draft, keys: Keys, shape: Keys, files: Files) -> None:
    """``draft_vocab_size`` and ``vocab_map``. Every trainer that cuts the vocabulary stores d2t as offsets."""
    full, cut = shape.count("vocab_size"), keys.count("draft_vocab_size")
    size = cut or full
    if size is not None:
        draft.set("draft_vocab_size", Fact(size, "declared" if cut else "defaulted"))
        draft.set("vocab_map", Fact("none" if size == full else "offsets", "defaulted"))


def max_positions(draft: Draft, keys: Keys, default: int | None) -> None:
    """``max_positions``; ``default`` is the config class's own, which it does not write down."""
    said = keys.count("max_position_embeddings")
    if said or default:
        draft.set("max_positions", Fact(said or default, "declared" if said else "defaulted"))


def default_taps(target: TargetFacts | None) -> Fact | None:
    """Taps of a drafter whose trainer was told no layers: all of them take these three."""
    if target is None:
        return None
    n = target.num_layers
    return Fact((2, n // 2, n - 3), "defaulted")


# -- tensors --------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"layers\.(\d+)\.")
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def canonical(name: str) -> str:
    """A tensor's name as speculators and vLLM spell it, whoever wrote the file."""
    name = name.removeprefix("model.")
    name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
    first, dot, rest = name.partition(".")
    return _AUX_NORMS.get(first, first) + dot + rest


def tensors(files: Files) -> dict[str, TensorInfo] | None:
    """The tensors by canonical name; None where only the config is here."""
    return None if files.tensors is None else {canonical(name): info for name, info in files.tensors.items()}


def layers_in(names: Mapping[str, TensorInfo]) -> int:
    """How many decoder layers the names speak of."""
    return len({match[1] for name in names if (match := _LAYER.match(name))})


def taps_in(files: Files) -> int | None:
    """How many taps fc takes, by its width; None where that cannot be told."""
    fc = (tensors(files) or {}).get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        return None
    width = Keys(files.config).count("target_hidden_size") or fc.shape[0]
    return fc.shape[1] // width if fc.shape[1] % width == 0 else None
