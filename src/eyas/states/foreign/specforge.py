"""SpecForge's offline features: ``data_<i>.ckpt`` or ``.ckpt.gz`` in folders ``rows_<a>-<b>``.

    input_ids [T]  loss_mask [T]  aux_hidden_state [1, T, 3D]  hidden_state [1, T, D] after the final norm

Source: SpecForge scripts/prepare_hidden_states.py, read.
"""

from __future__ import annotations

from typing import Any

from eyas.states.foreign.parts import Parts, keys_of, unused
from eyas.states.foreign.sample import NORMED_LAST

NAME = "SpecForge"
KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")


def recognises(held: Any) -> bool:
    return {"aux_hidden_state", "hidden_state"} <= keys_of(held)


def parts(held: Any) -> Parts:
    tensors = (
        ("aux_hidden_state", held["aux_hidden_state"], None),
        ("hidden_state", held["hidden_state"], NORMED_LAST),
    )
    width = int(held["hidden_state"].shape[-1])
    return Parts(held.get("input_ids"), held.get("loss_mask"), tensors, width=width, notes=unused(held, set(KEYS)))
