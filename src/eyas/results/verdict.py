"""Findings, the verdict that follows from them, and the result of a check as it is printed and stored."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eyas import causes, errors

if TYPE_CHECKING:
    from eyas.results.counts import CurveCounts, LengthCounts

SCHEMA = 1
EXPECT = 1.6
EXPECT_DRAFT_TOKENS = 4  # accept length is judged at this many drafted tokens
MIN_ROUNDS = 200  # at 200 the interval of accept length is still about 0.35 wide

Verdict = Literal["broken", "miswired", "undecided", "weak", "healthy"]
Severity = Literal["fatal", "likely", "note"]
_ORDER: dict[Severity, int] = {"fatal": 0, "likely": 1, "note": 2}

# A finding with one of these, if more than a note, means there is no whole drafter to judge.
BROKEN_CAUSES = frozenset(
    {
        "checkpoint-unreadable",
        "weights-missing",
        "weights-nan",
        "weights-shape",
        "head-missing",
        "norm-weight-missing",
    }
)


@dataclass(frozen=True)
class Evidence:
    measure: str
    value: Any  # anything JSON can hold
    expected: Any
    source: str

    def to_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "value": self.value,
            "expected": self.expected,
            "source": self.source,
        }


@dataclass(frozen=True)
class Rival:
    """A cause that is not excluded, and what would tell it from the one named."""

    cause: str
    would_separate: str

    def __post_init__(self) -> None:
        causes.cause(self.cause)


@dataclass(frozen=True)
class Finding:
    """A named fault. ``fix`` is the cause's own unless the finding knows the exact spelling."""

    cause: str
    severity: Severity
    summary: str
    evidence: Sequence[Evidence] = ()
    fix: str | None = None
    rivals: Sequence[Rival] = ()

    def __post_init__(self) -> None:
        assert self.severity in _ORDER, self.severity
        known = causes.cause(self.cause)
        object.__setattr__(self, "fix", self.fix or known.fix)

    @property
    def kind(self) -> causes.Kind:
        return causes.cause(self.cause).kind

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "cause": self.cause,
            "severity": self.severity,
            "summary": self.summary,
            "evidence": [e.to_json() for e in self.evidence],
            "fix": self.fix,
            "rivals": [{"cause": r.cause, "would_separate": r.would_separate} for r in self.rivals],
        }


@dataclass(frozen=True)
class NotChecked:
    """A check that was left out, and whether a verdict may stand without it."""

    what: str
    why: str
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "why": self.why, "needed": self.needed}


def too_few_records(length: LengthCounts | None) -> Finding | None:
    """The note that goes with an undecided verdict when there is a walk but too little of it; else None."""
    if length is None or _decides(length):
        return None
    records = int((length.rounds > 0).sum())
    return Finding(
        "records-too-few",
        "note",
        f"Too few to judge accept length: {length.total_rounds} rounds, {records} records.",
        (
            Evidence("rounds", length.total_rounds, f">= {MIN_ROUNDS}", "walk"),
            Evidence("records", records, ">= 2", "walk"),
        ),
    )


def _decides(length: LengthCounts) -> bool:
    return length.total_rounds >= MIN_ROUNDS and length.interval()[1] is not None


FALLS_SHORT = "engine-falls-short"


def judge(
    findings: Iterable[Finding],
    *,
    length_at_4: LengthCounts | None,
    expect: float = EXPECT,
    not_checked: Sequence[NotChecked] = (),
) -> Verdict:
    """The first that applies:

    broken     a fatal or likely finding says that weights are missing, not finite or cannot be loaded
    miswired   a fatal or likely finding of any kind but quality and metric: what a log counts wrong is no fault of
               the drafter
    undecided  an engine was seen to keep less than these files give, for which no file is blamed; or a needed check
               was left out; or there is no walk; or its interval cannot separate, which means:
               fewer than MIN_ROUNDS rounds, or no interval at all (fewer than two records with rounds)
    weak       the upper end of the walk's accept length at 4 drafted tokens is below ``expect``
    healthy    the rest. An interval that holds ``expect`` is healthy, not undecided: "weak" is an accusation
               and needs proof, and the printed interval shows how close it is
    """
    assert length_at_4 is None or length_at_4.draft_tokens == EXPECT_DRAFT_TOKENS
    grave = [f for f in findings if f.severity != "note"]
    if any(f.cause in BROKEN_CAUSES for f in grave):
        return "broken"
    if any(f.kind not in ("quality", "metric") and f.cause != FALLS_SHORT for f in grave):
        return "miswired"
    if any(f.cause == FALLS_SHORT for f in grave):
        return "undecided"
    if any(n.needed for n in not_checked) or length_at_4 is None or not _decides(length_at_4):
        return "undecided"
    high = length_at_4.interval()[1]
    assert high is not None
    return "weak" if high < expect else "healthy"


def exit_code(verdict: Verdict, fail_on_weak: bool = False) -> int:
    if verdict in ("broken", "miswired") or (verdict == "weak" and fail_on_weak):
        return errors.EXIT_FAULT
    return errors.EXIT_UNDECIDED if verdict == "undecided" else errors.EXIT_OK


def eyas_version() -> str:
    try:
        return importlib.metadata.version("eyas")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


def graver_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: _ORDER[f.severity])


@dataclass
class CheckResult:
    """All that a check found out; ``to_json`` is the machine-readable result."""

    checkpoint: str
    target: str | None
    verdict: Verdict
    teacher_forced: CurveCounts | None
    walk: CurveCounts | None
    accept_length: list[LengthCounts] = field(default_factory=list)
    configured: dict[str, Any] | None = None
    found: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] | None = None
    states: dict[str, Any] | None = None
    slices: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    expect: float = EXPECT
    provenance: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def confident(self) -> bool:
        """The gravest finding is fatal or likely and nothing rivals it."""
        first = next(iter(graver_first(self.findings)), None)
        return first is not None and first.severity != "note" and not first.rivals

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "checkpoint": self.checkpoint,
            "target": self.target,
            "verdict": self.verdict,
            "confident": self.confident,
            "curves": {
                "teacher_forced": self.teacher_forced.to_json() if self.teacher_forced else None,
                "walk": self.walk.to_json() if self.walk else None,
            },
            "accept_length": [length.to_json() for length in self.accept_length],
            "configured": self.configured,
            "found": self.found,
            "sweep": self.sweep,
            "states": self.states,
            "slices": self.slices,
            "findings": [f.to_json() for f in graver_first(self.findings)],
            "not_checked": [n.to_json() for n in self.not_checked],
            "expect": self.expect,
            "provenance": self.provenance,
            "seconds": round(self.seconds, 3),
        }
