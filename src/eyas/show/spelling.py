"""How to put a difference right in an engine's own spelling: what its dialect would write, against what is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eyas.contract import Contract
from eyas.dialects.engines import EngineDialect
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts

# Which keys of a config speak of a fact; a fix names those that change, else all that do.
_SPEAKS_OF = {
    "taps": ("layer_ids", "extract_layers", "layers_to_capture"),
    "rope": ("rope",),
    "fc_norm": ("fc_norm", "norm_before_fc", "aux_norm"),
    "feedback": ("norm_output", "post_norm"),
    "residual": ("norm_before_residual",),
    "head": ("draft_vocab_size", "tie_word_embeddings"),
}


def fixer(
    dialect: EngineDialect, trained: Contract, files: Files, target: TargetFacts | None, launch: Launch
) -> Callable[[str], str | None]:
    """fact -> what to change in ``config.json`` so that this engine wires it as trained; None where not known."""
    if target is None or "taps" not in trained:
        return lambda fact: None
    try:
        written = dialect.write(trained, files.config, target, launch)
    except CannotExpress as refused:
        told = f"{refused.message} {refused.way_out}"
        return lambda fact: told
    changes = list(_changes(files.config, written))

    def fix(fact: str) -> str | None:
        speaking = [c for c in changes if any(word in c[0] for word in _SPEAKS_OF.get(fact, ()))]
        if not changes:
            return None
        return _in_words(speaking or changes)

    return fix


def in_full(
    dialect: EngineDialect, contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch
) -> str:
    """All that is to be changed in ``config`` so that this engine wires ``contract``. Raises CannotExpress."""
    changes = list(_changes(config, dialect.write(contract, config, target, launch)))
    return _in_words(changes) if changes else "config.json says it already."


def _in_words(changes: Sequence[tuple[str, Any, Any]]) -> str:
    return "In config.json " + "; ".join(_sentence(*change) for change in changes) + "."


def _changes(now: Mapping[str, Any], written: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, present value or None, value to write or None) of every key that differs; ``eyas`` left out."""
    for key in dict.fromkeys((*written, *now)):
        if not prefix and key == "eyas":
            continue
        old, new = now.get(key), written.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif old != new or (key in now) != (key in written):
            yield f"{prefix}{key}", old, new


def _sentence(key: str, old: Any, new: Any) -> str:
    if new is None:
        return f"remove {key} (now {json.dumps(old)})"
    return f"set {key} to {json.dumps(new)}" + (f" (now {json.dumps(old)})" if old is not None else " (not there now)")
