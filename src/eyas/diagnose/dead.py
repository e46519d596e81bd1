"""An engine that never answered: what its files and its own last words say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas import provenance
from eyas.check import Case, load_weights, read_files
from eyas.diagnose.result import Diagnosis
from eyas.diagnose.stage_findings import of_resolved
from eyas.diagnose.tables import ask_tables
from eyas.engines.live import About
from eyas.errors import EnvironmentFault
from eyas.results import CheckResult, NotChecked, judge
from eyas.target import Target


def died(
    folder: Path,
    target: Target,
    about: About,
    fault: EnvironmentFault,
    flags: Sequence[str] = (),
    *,
    name: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Diagnosis:
    """Files, weights and tables alone; nothing was served, so nothing is said of curves."""
    began = time.monotonic()
    case = Case(name or folder.name)
    case.findings += of_resolved(about.resolved)
    read_files(case, folder, target)
    if case.files is not None and not any(f.severity == "fatal" for f in case.findings):
        load_weights(case, target)  # NaN, or a map that leaves the vocabulary, ends an engine while it answers
    ask_tables(case, about, flags, target)
    case.not_checked.append(NotChecked("engine", fault.message, needed=True))
    verdict = judge(case.findings, length_at_4=None, not_checked=case.not_checked)
    checked = CheckResult(
        checkpoint=case.name,
        target=target.spec,
        verdict=verdict,
        teacher_forced=None,
        walk=None,
        findings=case.findings,
        not_checked=case.not_checked,
        provenance=provenance.collect(dict(arguments or {})),
        seconds=time.monotonic() - began,
    )
    served = {"prompts": 0, "tokens": 0, "seconds": {}}
    return Diagnosis(checked, about, served)
