"""What was measured (``counts``) and what follows from it (``verdict``).

Counts need numpy and are loaded when first asked for: a verb that only tells of files has none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.results.counts import (
        CurveCounts,
        Difference,
        Interval,
        LengthCounts,
        Rate,
        bootstrap_ratio,
        paired_difference,
        wilson,
    )
from eyas.results.verdict import (
    BROKEN_CAUSES,
    EXPECT,
    EXPECT_DRAFT_TOKENS,
    MIN_ROUNDS,
    SCHEMA,
    CheckResult,
    Evidence,
    Finding,
    NotChecked,
    Rival,
    Severity,
    Verdict,
    exit_code,
    eyas_version,
    graver_first,
    judge,
    too_few_records,
)

__all__ = [
    "BROKEN_CAUSES",
    "EXPECT",
    "EXPECT_DRAFT_TOKENS",
    "MIN_ROUNDS",
    "SCHEMA",
    "CheckResult",
    "CurveCounts",
    "Difference",
    "Evidence",
    "Finding",
    "Interval",
    "LengthCounts",
    "NotChecked",
    "Rate",
    "Rival",
    "Severity",
    "Verdict",
    "bootstrap_ratio",
    "exit_code",
    "eyas_version",
    "graver_first",
    "judge",
    "paired_difference",
    "too_few_records",
    "wilson",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'eyas.results' has no attribute {name!r}")
    return getattr(importlib.import_module("eyas.results.counts"), name)
