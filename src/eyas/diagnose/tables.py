"""What the tables say that this engine does with these files."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.check import Case
from eyas.check.engine import judge_engine
from eyas.dialects.wiring import Runner
from eyas.engines.live import About
from eyas.errors import UsageError
from eyas.results import NotChecked
from eyas.target import Target


def ask_tables(case: Case, about: About, flags: Sequence[str], target: Target) -> None:
    """Into the case. A version or flags that the tables do not know are said there: what was measured stands."""
    runner: Runner | None = "v1" if about.runner == "v1" else "v2" if about.runner == "v2" else None
    try:
        judge_engine(case, about.asked, runner, tuple(about.flags or flags), target.facts)
    except UsageError as error:
        case.not_checked.append(NotChecked("engine", error.message))
