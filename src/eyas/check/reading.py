"""What the files say: the reading in which the drafter is run, and the other readings that they speak for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.check.vocabulary import Maps
from eyas.checkpoint import Checkpoint, shape_for
from eyas.checkpoint.findings import readings
from eyas.contract import Contract
from eyas.dialects.meaning import Meaning, meaning
from eyas.dialects.wiring import Files
from eyas.drafter import DrafterConfig
from eyas.errors import CheckpointError
from eyas.target import Target

# Facts of a contract that the sweep can run one way or another.
RUN = ("taps", "fc_norm", "residual", "head_norm", "feedback", "token_shift", "rope", "window", "embedding", "head")


PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, eq=False)
class Told:
    """``configured`` is what an engine would do by these files, ``declared`` how they say they were trained; ``by``
    names who said so. ``also`` are single changes that they speak for too. ``named``: a key names the taps.
    ``taps_by_reader``: where no contract settles it, what each reader makes of the ids."""

    configured: dict[str, Any]
    declared: dict[str, Any]
    by: str
    also: list[dict[str, Any]]
    named: bool
    taps_by_reader: dict[str, list[list[int]]]


def told(files: Checkpoint, target: Target, maps: Maps) -> Told:
    config, contract = files.config, files.contract
    ids = "eagle_aux_hidden_state_layer_ids"
    named = bool(config.get(ids) or (config.get("eagle_config") or {}).get(ids))
    spelled = _of_shape(files, shape_for(files, target), maps)
    if contract is not None:
        declared = {**spelled, **_of_contract(contract)}
        configured = {**declared, **_spelled_otherwise(files, target, contract)}
        configured["rope"] = configured["rope"] | _partial(config)
        return Told(configured, declared, "contract", [], named, {})
    meant = _meaning(files, target)
    if meant is None:
        spelled["rope"] |= _partial(config)
        return Told(spelled, spelled, "config.json", [], named, {})
    declared = {**spelled, **_of_contract(meant.contract)}
    declared["rope"] = declared["rope"] | _partial(config)
    read = readings(config, {"num_layers": target.num_layers, "architecture": target.architecture})
    also = []
    for open_ in meant.ambiguous:
        if open_.fact in RUN:
            values = [_plain(value) for value in open_.values]
            # Ids that may be counted in two ways stand where one engine looks first: at top level vLLM, inside SGLang.
            first = next((tuple(lists[0]) for lists in read.values()), values[0]) if open_.fact == "taps" else values[0]
            declared[open_.fact] = first
            also += [{open_.fact: value} for value in values if value != first]
    return Told(declared, declared, f"config.json, {meant.spelled_by}", also, named, read)


def _of_shape(files: Checkpoint, shape: DrafterConfig, maps: Maps) -> dict[str, Any]:
    """Facts of a drafter of this shape, and what every EAGLE-3 drafter is where nothing else is said."""
    facts = {fact: value for fact, value in shape.facts().items() if fact in RUN}
    return {
        "taps": tuple(shape.taps),
        "vocab_map": maps.written,
        "head": "own" if "lm_head.weight" in files.tensors else "target",
        "head_norm": True,
        "token_shift": 1,
        "rope": dict(shape.rope_parameters),
        "window": None,
        **facts,
    }


def _partial(config: Mapping[str, Any]) -> dict[str, Any]:
    """The share of each head that is rotated, where a config says so: no shape that is trained here has it."""
    share = (config.get("rope_parameters") or {}).get(PARTIAL, config.get(PARTIAL))
    return {PARTIAL: share} if isinstance(share, int | float) and share != 1.0 else {}


def _of_contract(contract: Contract) -> dict[str, Any]:
    return {fact: _plain(contract[fact]) for fact in RUN if fact in contract}


def _spelled_otherwise(files: Checkpoint, target: Target, contract: Contract) -> dict[str, Any]:
    """Facts that the engines' keys spell otherwise than the contract: what they would do."""
    found: dict[str, Any] = {}
    if "taps" in contract and "target" in contract:
        taps = list(contract["taps"])
        read = readings(files.config, contract["target"])
        edited = [lists[0] for lists in read.values() if taps not in lists]
        default = [2, target.num_layers // 2, target.num_layers - 3]
        if edited:
            found["taps"] = tuple(edited[0])
        elif not read and taps != default and len(default) == len(taps):
            found["taps"] = tuple(default)
    ours, theirs = files.shape.facts(), files.spelled.facts()
    found.update({fact: theirs[fact] for fact in ("fc_norm", "residual", "feedback") if theirs[fact] != ours[fact]})
    if "embedding" in contract and contract["embedding"] == "target" and "embed_tokens.weight" in files.tensors:
        found["embedding"] = "own"  # what lies in the files is loaded
    if "rope" in contract and dict(files.spelled.rope_parameters) != dict(contract["rope"]):
        found["rope"] = dict(files.spelled.rope_parameters)
    return found


def _meaning(files: Checkpoint, target: Target) -> Meaning | None:
    facts = target.facts
    try:
        return meaning(Files(files.config, files.inventory.tensors), facts, files.folder.name)
    except CheckpointError:  # its words are those of `eyas show`; the shape was read, so it can be run
        return None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else dict(value) if isinstance(value, Mapping) else value
