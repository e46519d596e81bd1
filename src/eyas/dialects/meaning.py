"""What a drafter's files mean, as whoever trained it wrote them.

The ``eyas`` block comes first, whatever the engines' keys beside it say: the two are compared elsewhere. Else the
trainer that wrote the folder, recognised by what only it writes; else a plain reading, in which what readers disagree
about stays open. A file that is no EAGLE-3 drafter's is refused by what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eyas.contract import Contract
from eyas.dialects import angelslim, eagle, hf, ids, modelopt, plain, specforge, speculators
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Ambiguity, Reading, tensors
from eyas.dialects.wiring import Files, TargetFacts
from eyas.errors import CheckpointError


@dataclass(frozen=True)
class Meaning:
    """``spelled_by``: eyas, the trainer's name, or plain; ``why`` says what shows it. ``ambiguous`` holds the facts
    that are not in ``contract`` because the files leave them open; ``notes`` what no fact can say."""

    contract: Contract
    spelled_by: str
    why: str
    ambiguous: tuple[Ambiguity, ...] = ()
    notes: tuple[str, ...] = ()


Recognise = Callable[[Files], str | None]
ReadAll = Callable[[Files, TargetFacts | None], Reading]
# In this order: the first two write what nobody else does; EAGLE's and SpecForge's configs are told by less.
TRAINERS: tuple[tuple[str, Recognise, ReadAll], ...] = (
    ("speculators", speculators.recognise, speculators.read_all),
    ("modelopt", modelopt.recognise, modelopt.read_all),
    ("angelslim", angelslim.recognise, angelslim.read_all),
    ("eagle", eagle.recognise, eagle.read_all),
    ("specforge", specforge.recognise, specforge.read_all),
)


def meaning(files: Files, target: TargetFacts | None, where: str) -> Meaning:
    """The contract that ``files`` were trained under. Raises CheckpointError where they are not an EAGLE-3 drafter's,
    or a value is not of the type its key is for."""
    contract, _ = hf.read_contract(files.config, where)
    if contract is not None:
        return Meaning(contract, "eyas", "its config.json carries a contract")
    try:
        _require_drafter(files)
        return _without_contract(files, target)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error.message}", way_out=error.way_out) from error


def _without_contract(files: Files, target: TargetFacts | None) -> Meaning:
    for name, recognise, read_all in TRAINERS:
        if why := recognise(files):
            found = read_all(files, target)
            return Meaning(found.contract, name, why, found.ambiguous, found.notes)
    found = plain.read_all(files, target)
    return Meaning(found.contract, "plain", "nothing in it names its trainer", found.ambiguous, found.notes)


# -- what is no EAGLE-3 drafter -------------------------------------------------------------------------------

_DRAFTER_KEYS = ("draft_vocab_size", "eagle_config", ids.KEY, "truncated_vocab_size", "num_aux_hidden_states")
_OTHERS = {
    "dflash": "DFlash",
    "domino": "Domino",
    "dspark": "DSpark",
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "mtp": "multi-token-prediction",
    "nextn": "multi-token-prediction",
}
_EAGLE_1 = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "Qwen2ForCausalLMEagle", "MistralForCausalLMEagle")


def _require_drafter(files: Files) -> None:
    keys = Keys(files.config)
    names = keys.texts("architectures")
    spelled = [*names, keys.text("speculators_model_type") or "", *(k for k in ("dflash_config",) if k in keys)]
    for mark, kind in _OTHERS.items():
        if any(mark in name.lower() for name in spelled):
            raise _no_drafter(f"this is a {kind} drafter ({', '.join(filter(None, spelled))})")
    if set(names) & set(_EAGLE_1):
        raise _no_drafter(f"this is a drafter of EAGLE's first generation ({names[0]})")
    kind_named = keys.text("speculators_model_type")
    algorithm = keys.inside("speculators_config").text("algorithm")
    if kind_named is not None and "eagle3" not in (kind_named, algorithm):
        raise _no_drafter(f"this is speculators' format, of kind {kind_named!r}")
    says_so = any("eagle3" in name.lower() for name in names) or any(key in keys for key in _DRAFTER_KEYS)
    if says_so or kind_named or "fc.weight" in (tensors(files) or {}):
        return
    layers = keys.count("num_hidden_layers") or keys.inside("text_config").count("num_hidden_layers")
    if names and layers:
        raise _no_drafter(f"this is the config of a model of {layers} layers ({names[0]}), a target's it seems")
    raise _no_drafter("nothing in it speaks of a drafter")


def _no_drafter(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}; the config.json of an EAGLE-3 drafter was expected.",
        way_out="Name the drafter's folder or its config.json; the target goes after --target.",
    )
