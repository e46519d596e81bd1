"""What is known so far about one drafter; every step of a check reads it and adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas import curve
from eyas.checkpoint import Checkpoint
from eyas.drafter import Drafter
from eyas.results import Finding, NotChecked


@dataclass
class Case:
    """What is known so far about one drafter."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    files: Checkpoint | None = None
    drafter: Drafter | None = None
    measured: curve.Measured | None = None

    @property
    def stopped(self) -> bool:
        return any(f.severity == "fatal" for f in self.findings)
