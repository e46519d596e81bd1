"""What each fact that is configured otherwise than it fits costs, measured one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas import variants
from eyas.results import Difference, paired_difference
from eyas.variants import Sweep
from eyas.variants.scores import Score, log_z_of, z_of

FEW_UNITS_BAR = 1.5  # times the bar, where stretches of few records are what varies: they are not independent
FEW_UNITS_LEAST = 0.1


@dataclass(frozen=True, eq=False)
class Loss:
    """What one fact, set as configured in the reading that fits, costs against that reading. ``score`` is None where
    the states at hand do not let it be run as configured."""

    fact: str
    configured: Any
    trained: Any
    score: Score | None
    fitting: Score
    difference: Difference
    z: float
    log_z: float
    proven: bool


def losses(swept: Sweep, configured: Mapping[str, Any]) -> list[Loss]:
    """Every fact that is configured otherwise than it fits, dearest first. Faults stack, so each is taken alone."""
    best = swept.best
    fitting = swept.scores.of(swept.confirm, best)
    assert fitting is not None
    bar = variants.threshold(swept.tried) * (1 if swept.by_record else FEW_UNITS_BAR)
    least = 0.02 if swept.by_record else FEW_UNITS_LEAST
    found = []
    for fact, trained in best.items():
        was = {**variants.RIGHT, **configured}.get(fact)
        if same(was, trained):
            continue
        got = swept.scores.of(swept.confirm, {**best, fact: was})
        if got is None:
            unknown = Difference(None, None, None)
            found.append(Loss(fact, was, trained, None, fitting, unknown, 0.0, 0.0, False))
            continue
        z = z_of(fitting, got)
        worth = fitting.kept_per_slot - got.kept_per_slot > least * (1 + fitting.kept_per_slot)
        difference = paired_difference(fitting.lengths(), got.lengths())
        log_z = log_z_of(fitting, got)
        surely = z > bar or (z > variants.SUSPECT and log_z > bar)
        found.append(Loss(fact, was, trained, got, fitting, difference, z, log_z, surely and worth))
    return sorted(found, key=lambda loss: -(loss.difference.value or 0.0))


def same(a: Any, b: Any) -> bool:
    return (list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b)
