"""Rotary parameters of a drafter's config, in one shape: rope_type, rope_theta, and what else the type needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eyas.contract import Fact
from eyas.dialects.keys import Keys
from eyas.errors import CheckpointError

THETA = 10000.0  # of transformers' LlamaConfig and Qwen3Config, and of every trainer that reads none


def read(keys: Keys) -> Fact:
    """``rope_parameters`` (transformers 5), else ``rope_scaling`` and ``rope_theta``; what is missing is the default.

    A base at top level fills the one that ``rope_parameters`` lacks, as transformers 5 does.
    """
    inner = keys.inside("rope_parameters")
    if "sliding_attention" in inner:  # one rope a kind of layer; speculators models/utils.py:60 takes this one
        inner = inner.inside("sliding_attention")
    parameters = dict(inner.config or keys.inside("rope_scaling").config)
    if parameters.get("rope_theta") is None and "rope_theta" in keys:
        parameters["rope_theta"] = keys.config["rope_theta"]
    return Fact(normal(parameters), "declared" if parameters else "defaulted")


def normal(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters under one spelling: ``type`` is the older name of ``rope_type``, and mrope a layout of the
    default one. Raises CheckpointError where the base is no number."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta")
    theta = THETA if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not (0 < theta < math.inf):
        raise CheckpointError(
            f"rope_theta of config.json is {theta!r}; a number above zero was expected.",
            way_out="Restore the config that was saved with these weights.",
        )
    rest = {k: v for k, v in parameters.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    return {"rope_type": "default" if kind == "mrope" else kind, "rope_theta": float(theta), **rest}
