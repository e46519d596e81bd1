"""What every engine's reader shares: settings read from a run's first lines, and complaints counted instead of kept."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from eyas.results import Evidence, Finding, Severity
from eyas.results.observed import Counts


@dataclass(frozen=True)
class Settings:
    """What configuration lines say of a run. ``faked`` quotes the setting that replaces acceptance."""

    version: str | None = None
    draft_tokens: int | None = None
    top_k: int | None = None
    verified: int | None = None  # SGLang's speculative_num_draft_tokens
    drafter: str | None = None
    faked: str | None = None

    def updated(self, later: Settings) -> Settings:
        """The later line wins where it says something."""
        said = {name: value for name, value in vars(later).items() if value is not None}
        return replace(self, **said)


@dataclass
class _Complaint:
    cause: str
    severity: Severity
    summary: str
    evidence: Evidence
    times: int = 1


@dataclass
class Complaints:
    """Of each kind the first with its evidence, and how often; a log of a million bad lines costs no more than one."""

    where: str
    _kept: dict[tuple[str, str], _Complaint] = field(default_factory=dict)

    def add(
        self, cause: str, severity: Severity, measure: str, value: Any, expected: Any, summary: str, at: str
    ) -> None:
        known = self._kept.get((cause, measure))
        if known is not None:
            known.times += 1
            return
        evidence = Evidence(measure, value, expected, f"{self.where}, {at}" if at else self.where)
        self._kept[cause, measure] = _Complaint(cause, severity, summary, evidence)

    def findings(self) -> list[Finding]:
        return [
            Finding(c.cause, c.severity, c.summary + (f" ({c.times:,} times.)" if c.times > 1 else ""), (c.evidence,))
            for c in self._kept.values()
        ]

    def __contains__(self, cause: str) -> bool:
        return any(key[0] == cause for key in self._kept)


class Tally(Protocol):
    """Numbers of one run, summed up as they come. ``seen`` counts the lines, pages or bodies they came from."""

    seen: int

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]: ...


class Garbled(Exception):
    """A line that speaks of speculation and cannot be read; never reaches a user."""


def count(value: Any) -> int:
    """A count out of JSON or a page: whole, finite, not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        raise Garbled
    if value > 2**62 or int(value) != value:
        raise Garbled
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        raise Garbled
    return float(value)


def argument(line: str, name: str) -> str | None:
    """The value of ``name`` in a printed dataclass, dict or command line: ``name=3``, ``'name': 3``, ``--name 3``."""
    flag = "--" + name.replace("_", "-")
    quoted = rf"(?<![\w-])['\"]?{re.escape(name)}['\"]?\s*[=:]\s*|{re.escape(flag)}[ =]"
    found = re.search(rf"(?:{quoted})('[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,)}}\]]+)", line)
    if found is None:
        return None
    value = found.group(1).strip("'\"")
    return None if value in ("None", "null", "") else value


def whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else None


def literal(text: str) -> Any:
    """A printed list of numbers; Garbled for anything else."""
    try:
        return ast.literal_eval(text[:4000])
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise Garbled from error


def faked_finding(settings: Settings, where: str) -> list[Finding]:
    if settings.faked is None:
        return []
    evidence = Evidence("setting", settings.faked, "not set", where)
    return [
        Finding(
            "acceptance-faked", "fatal", "The engine was told how much to accept; it did not find out.", (evidence,)
        )
    ]
