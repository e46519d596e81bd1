"""eyas: EAGLE-3 drafters, trained, proven, decoded with and, when they fall short, explained.

Names are loaded when first used, so that ``import eyas`` costs nothing and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Batch": "batches",
    "CheckResult": "results",
    "Contract": "contract",
    "DraftVocab": "vocab",
    "Drafter": "drafter",
    "DrafterConfig": "drafter",
    "EyasError": "errors",
    "Finding": "results",
    "Record": "records",
    "Renderer": "render",
    "StoredStates": "states",
    "Target": "target",
    "TrainConfig": "train",
    "check": "check",
    "generate": "decode.loop",
    "load_target": "target",
    "measure": "curve",
    "plain": "decode.plain",
    "read_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "read_records": "records",
    "train": "train",
}
_RENAMED = {
    "load_target": "load",
    "read_checkpoint": "read",
    "load_checkpoint": "load",
    "read_records": "read",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    module = importlib.import_module(f"eyas.{_HOMES[name]}")
    return getattr(module, _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
