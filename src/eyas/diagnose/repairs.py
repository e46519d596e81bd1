"""What each repair is worth: the faults that were seen, run in the reference, and mended one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.diagnose.curves import Counted, walked
from eyas.diagnose.reference import Reference
from eyas.results import Difference, paired_difference
from eyas.variants import RIGHT

RUNNABLE = frozenset(
    {
        "taps", "vocab_map", "embedding", "head", "fc_norm", "residual", "residual_kept", "head_norm", "norm_gain",
        "feedback", "token_shift", "position_step", "rope_layout", "rope", "window", "cache",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Mending ``fact`` next takes the accept length to ``reaches``."""

    fact: str
    reaches: float
    gain: Difference


@dataclass(frozen=True, eq=False)
class Repairs:
    """``as_is``: the reference with every fault that it can run; ``steps`` worth most first; ``alone``: what each
    fault costs if it is the only one."""

    as_is: Counted | None
    steps: list[Step]
    alone: dict[str, Difference]


def repairs(reference: Reference, faults: Mapping[str, Any], expected: Counted, draft_tokens: int) -> Repairs:
    """``faults``: facts as the engine runs them."""
    known: dict[str, Counted | None] = {"": expected}

    def run(wrong: Mapping[str, Any]) -> Counted | None:
        key = ",".join(sorted(wrong))
        if key not in known:
            known[key] = walked(reference, {**reference.facts, **wrong}, draft_tokens)
        return known[key]

    left = {fact: value for fact, value in faults.items() if runs(fact, value)}
    alone = {}
    for fact, value in left.items():
        one = run({fact: value})
        if one is not None:
            alone[fact] = paired_difference(expected.length, one.length)
    as_is = here = run(left)
    steps: list[Step] = []
    while left and here is not None:
        tries = {}
        for fact in left:
            after = run({f: v for f, v in left.items() if f != fact})
            if after is not None and after.length.value is not None:
                tries[fact] = after
        if not tries:
            break
        first = max(tries, key=lambda f: tries[f].length.value or 0.0)
        after = tries[first]
        assert after.length.value is not None
        steps.append(Step(first, after.length.value, paired_difference(after.length, here.length)))
        here = after
        del left[first]
    return Repairs(as_is, steps, alone)


def runs(fact: str, value: Any) -> bool:
    """Whether a walk can be played with this fault."""
    if fact == "cache":
        return value in ("all", "own")
    return fact in RUNNABLE and value != RIGHT.get(fact, object())
