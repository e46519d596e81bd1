"""BaldEagle's fused features, ``data_<i>.ckpt``.

    input_ids [T]  loss_mask [T]  hidden_state [3, T, D]: transformers' hidden_states[2], [n//2] and [n-3]

Source: BaldEagle generate_data/generate_data_fused_features.py, read.
"""

from __future__ import annotations

from typing import Any

from eyas.states.foreign.parts import Parts, keys_of, unused

NAME = "BaldEagle"
KEYS = ("input_ids", "loss_mask", "hidden_state")


def recognises(held: Any) -> bool:
    keys = keys_of(held)
    return {"input_ids", "hidden_state"} <= keys and "aux_hidden_state" not in keys and held["hidden_state"].ndim == 3


def parts(held: Any) -> Parts:
    states = held["hidden_state"]
    return Parts(
        held["input_ids"],
        held.get("loss_mask"),
        (("hidden_state", states, None),),
        width=int(states.shape[-1]),
        notes=unused(held, set(KEYS)),
    )
