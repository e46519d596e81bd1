"""speculators' files ``hs_<i>.safetensors``.

    token_ids [T]  hidden_states [T, L+1, D], the last of them tap n before the final norm

The mask lies in an Arrow dataset beside them, which is not read. Source: speculators src/speculators/train/data.py,
read.
"""

from __future__ import annotations

from typing import Any

from eyas.states.foreign.parts import Parts, keys_of, unused
from eyas.states.foreign.sample import LAST

NAME = "speculators"
KEYS = ("token_ids", "hidden_states")


def recognises(held: Any) -> bool:
    return set(KEYS) <= keys_of(held) and held["hidden_states"].ndim == 3


def parts(held: Any) -> Parts:
    states = held["hidden_states"]
    return Parts(
        held["token_ids"],
        None,
        (("hidden_states", states, None),),
        width=int(states.shape[-1]),
        last_block=LAST,
        notes=unused(held, set(KEYS)),
    )
