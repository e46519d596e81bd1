"""What is known so far about one drafter; every step of a check reads it and adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas import curve, variants
from eyas.check.losses import Loss
from eyas.check.placing import Placement
from eyas.check.reading import Told
from eyas.check.vocabulary import Maps
from eyas.checkpoint import Checkpoint
from eyas.records import Record
from eyas.results import Finding, NotChecked

# Fatal findings past which there is still a drafter to run.
RUNNABLE = frozenset({"d2t-missing", "vocab-map-inconsistent", "d2t-read-as-ids"})


@dataclass
class Case:
    """``told`` is what the files say, ``swept`` what fits, ``lost`` what each fact configured otherwise costs."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    files: Checkpoint | None = None
    maps: Maps | None = None
    parts: variants.Parts | None = None
    told: Told | None = None
    measured: curve.Measured | None = None
    records: Sequence[Record] = ()
    """Those measured."""
    swept: variants.Sweep | None = None
    lost: list[Loss] = field(default_factory=list)
    placement: Placement | None = None
    """Which stored tensor was taken for which tap, and why."""

    @property
    def stopped(self) -> bool:
        """Whether there is no drafter to run."""
        return any(f.severity == "fatal" and f.cause not in RUNNABLE for f in self.findings)
