"""ModelOpt's dumps, ``<conversation>.pt``.

    input_ids [T]  loss_mask [T]  hidden_states [T, D]  aux_hidden_states [T, k*D], empty if there are none

``hidden_states`` is after the final norm where transformers wrote it and before it where vLLM did; nothing in the file
tells. Source: Model-Optimizer examples/speculative_decoding/collect_hidden_states/compute_hidden_states_{hf,vllm}.py,
read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eyas.states.foreign.parts import Parts, keys_of, unused
from eyas.states.foreign.sample import EITHER_LAST

NAME = "ModelOpt"
KEYS = ("input_ids", "loss_mask", "hidden_states", "aux_hidden_states", "conversation_id")


def recognises(held: Any) -> bool:
    return {"hidden_states", "aux_hidden_states"} <= keys_of(held)


def parts(held: Any) -> Parts:
    last, aux = held["hidden_states"], held["aux_hidden_states"]
    tensors: tuple[tuple[str, Tensor, str | None], ...] = (("hidden_states", last, EITHER_LAST),)
    if aux.numel():
        tensors = (("aux_hidden_states", aux, None), *tensors)
    name = held.get("conversation_id")
    return Parts(
        held.get("input_ids"),
        held.get("loss_mask"),
        tensors,
        name=None if name is None else str(name),
        width=int(last.shape[-1]),
        notes=unused(held, set(KEYS)),
    )
