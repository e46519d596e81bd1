"""What engines ask of the target a drafter sits on, from its ``config.json`` or from a contract's identity of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.dialects.wiring import TargetFacts
from eyas.errors import TargetError
from eyas.inventory.json_file import json_object

_WIDTHS = ("num_hidden_layers", "hidden_size", "vocab_size")


def read(config: Path) -> TargetFacts:
    """Facts out of a target's config.json."""
    return from_config(json_object(config), str(config))


def from_config(config: Mapping[str, Any], where: str) -> TargetFacts:
    """Facts out of a target's config; a multimodal one keeps its language model's under ``text_config``.

    The architecture is the outer one: that is the class an engine starts, and its rules decide.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise TargetError(
            f"{where}: architectures is {names!r}; a list with the name of a class was expected.",
            way_out="Name the folder of the target, or its config.json.",
        )
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    numbers = {}
    for key in _WIDTHS:
        value = text.get(key)
        if type(value) is not int or value <= 0:
            raise TargetError(
                f"{where}: {key} is {value!r}; a number above zero was expected.",
                way_out="Name the target's own config.json; a drafter's has other numbers.",
            )
        numbers[key] = value
    return TargetFacts(
        names[0], numbers["num_hidden_layers"], numbers["hidden_size"], numbers["vocab_size"], dict(config)
    )


def from_identity(identity: Mapping[str, Any]) -> TargetFacts:
    """The same out of a contract's ``target``, which knows the shape but not the rest of the config."""
    return TargetFacts(
        identity["architecture"], identity["num_layers"], identity["hidden_size"], identity["vocab_size"]
    )
