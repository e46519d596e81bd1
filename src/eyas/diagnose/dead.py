"""An engine that never answered: what its files and its own last words say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas import provenance
from eyas.check import Case
from eyas.check.engine import judge_engine
from eyas.checkpoint import inspect
from eyas.checkpoint import read as read_checkpoint
from eyas.diagnose.result import Diagnosis
from eyas.diagnose.stage_findings import of_resolved
from eyas.dialects.wiring import Runner, TargetFacts
from eyas.engines.live import About
from eyas.errors import CheckpointError, EnvironmentFault, InputError
from eyas.results import CheckResult, Evidence, Finding, NotChecked, judge
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
    """Files and tables alone; nothing was served, so nothing is said of curves."""
    began = time.monotonic()
    case = Case(name or folder.name)
    case.findings += of_resolved(about.resolved)
    try:
        case.files = read_checkpoint(folder)
        case.findings += inspect(case.files, target)
    except CheckpointError as error:
        case.findings.append(
            Finding(
                "checkpoint-unreadable", "fatal", error.message, [Evidence("files", str(error), "readable", case.name)]
            )
        )
    host = TargetFacts(target.architecture, target.num_layers, target.hidden_size, target.vocab_size)
    asked = f"{about.name}=={about.version}" if about.version else about.name
    try:
        judge_engine(case, asked, _runner(about), about.flags or flags, host)
    except InputError as error:
        case.not_checked.append(NotChecked("engine", error.message))
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


def _runner(about: About) -> Runner | None:
    return "v1" if about.runner == "v1" else "v2" if about.runner == "v2" else None
