"""What a row is worth, and all rows together: outcome, confusion table, summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from runs.mutations.subject import KINDS

from eyas.results import LengthCounts

LEAST_LOSS, LEAST_ERRORS = 0.04, 4.0
CLEARED = ("healthy", "weak")
# What check says of any folder whose contract is gone or whose weights were written again; it blames nothing.
STANDING = ("contract-missing", "weights-changed", "quality-low", "coverage-low", "engine-cannot-express")
KEYS = (
    "drafter", "mutation", "kind", "expected", "first", "second", "confident", "accept_before", "accept_after",
    "standard_error", "scored", "outcome", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """Accept lengths of the healthy drafter and of the mutated one on the same records, and the error of the
    difference. None where the engine would not run, or the records are not the target's own text."""

    before: float | None
    after: float | None
    error: float | None

    @property
    def proven(self) -> bool:
        if self.before is None or self.after is None or self.error is None:
            return False
        lost = self.before - self.after
        return lost > LEAST_LOSS * self.before and lost > LEAST_ERRORS * self.error


def loss(before: LengthCounts | None, after: LengthCounts | None) -> Loss:
    """Paired over records where both walked the same ones: a ratio's influence of each record, to first order."""
    told = [None if one is None else one.value for one in (before, after)]
    if before is None or after is None or before.value is None or after.value is None:
        return Loss(told[0], told[1], None)
    if len(before.rounds) != len(after.rounds):
        return Loss(told[0], told[1], None)
    difference = _influence(before) - _influence(after)
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else None
    return Loss(told[0], told[1], error)


def _influence(length: LengthCounts) -> np.ndarray:
    """What each record moves accept length by, times the number of records: [R]."""
    assert length.value is not None
    rounds, accepted = length.rounds.astype(float), length.accepted.astype(float)
    found: np.ndarray = (accepted - (length.value - 1) * rounds) / rounds.mean()
    return found


def told(verdict: str, findings: Sequence[Mapping[str, Any]], names: Iterable[str]) -> tuple[str | None, str | None]:
    """The first two causes, graver first. Standing notes are none unless they are what was asked for; with no other
    finding a cleared drafter is "healthy", and None is an undecided one."""
    asked = set(names)
    causes = [
        f["cause"] for f in findings if f["severity"] != "note" or f["cause"] not in STANDING or f["cause"] in asked
    ]
    grave = any(f["severity"] != "note" for f in findings)
    if verdict in CLEARED and not grave:  # notes do not say that something is broken, but one may name it
        named = [cause for cause in causes if cause in asked]
        causes = [*named, "healthy", *(c for c in causes if c not in asked)]
    causes = list(dict.fromkeys(causes))
    return tuple([*causes, None, None][:2])


def outcome(
    expected: str | None, also: Sequence[str], first: str | None, confident: bool, verdict: str, scored: bool
) -> str:
    """right: the cause first. wrong: confident in another, or a proven fault called healthy. cleared: of the healthy.
    equivalent: called healthy where no loss is proven. undecided: the rest."""
    names = {expected, *also} - {None, "healthy"}
    if expected == "healthy":
        if verdict in CLEARED or (first in names and not confident):
            return "cleared"
        return "wrong" if confident and first not in names else "undecided"
    if first in names:
        return "right"
    if confident:
        return "wrong"
    if expected is None:
        return "undecided"
    if verdict in CLEARED:
        return "wrong" if scored else "equivalent"
    return "undecided"


# -- all rows ---------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["scored"]]
    healthy = [row for row in rows if row["expected"] == "healthy"]
    return {
        "rows": len(rows),
        "drafters": len({row["drafter"] for row in rows}),
        "mutations": len({row["mutation"] for row in rows}),
        "scored": len(scored),
        "right": sum(row["outcome"] == "right" for row in scored),
        "confident": sum(bool(row["confident"]) for row in rows),
        "confident_wrong": sum(bool(row["confident"]) and row["outcome"] == "wrong" for row in rows),
        "healthy": len(healthy),
        "cleared": sum(row["outcome"] == "cleared" for row in healthy),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "seconds": sum(row.get("seconds") or 0.0 for row in rows),
    }


def bound(wrong: int, n: int) -> str:
    """The upper 95 % end of a rate: 3/n where nothing was seen."""
    if n == 0:
        return "no confident row"
    if wrong == 0:
        return f"at most {3 / n:.2%} of confident answers (3/n, n = {n})"
    return f"{wrong / n:.2%} of {n} confident answers"


def markdown(rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str], how: str, missing: int = 0) -> str:
    """docs/mutations.md."""
    s = summary(rows)
    share = s["right"] / s["scored"] if s["scored"] else 0.0
    lines = [
        "# Mutations",
        "",
        "Good drafters, broken on purpose, and what `eyas check` says of each. Made by `make mutations`; the rows are "
        "in [mutations.jsonl](mutations.jsonl). Edit neither.",
        "",
        f"    {how}",
        "",
        f"{s['rows']} rows: {s['mutations']} mutations on {s['drafters']} drafters, {s['seconds'] / 60:.0f} minutes."
        + (f" {missing} more rows have not been run yet." if missing else ""),
        "",
        "| what | rows | of them |",
        "|---|---:|---|",
        f"| scored: a paired loss above {LEAST_LOSS:.0%} and above {LEAST_ERRORS:.0f} standard errors, or shown by "
        f"inventory alone | {s['scored']} | {s['right']} with the right cause first ({share:.1%}) |",
        f"| confident | {s['confident']} | {s['confident_wrong']} wrong: "
        f"{bound(s['confident_wrong'], s['confident'])} |",
        f"| nothing wrong | {s['healthy']} | {s['cleared']} cleared |",
        "",
        "An outcome is *right* (that cause is first), *wrong* (confident in another, or a scored fault called "
        "healthy), *undecided*, *equivalent* (called healthy, and no loss is proven) or *cleared* (nothing was "
        "wrong, and it says so). A row whose expected cause is none can only be undecided, unless it is wrong.",
        "",
        "## By kind",
        "",
        "| kind | rows | scored | right of them | right | undecided | equivalent | cleared | wrong | confidently |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_kind(kind, [row for row in rows if row["kind"] == kind]) for kind in KINDS if _any(rows, kind)),
        "",
        "## Confusion",
        "",
        "Rows by the cause that was put in, columns what came first, most frequent first; scored rows and controls.",
        "",
        "| put in | rows | came first |",
        "|---|---:|---|",
        *_confusion([row for row in rows if row["scored"] or row["expected"] == "healthy"]),
        "",
        "## Not right",
        "",
        *_not_right(rows),
        "",
        "## Left out",
        "",
        *(f"- {what}: {why}." for what, why in left_out.items()),
    ]
    return "\n".join(lines) + "\n"


def _any(rows: Sequence[Mapping[str, Any]], kind: str) -> bool:
    return any(row["kind"] == kind for row in rows)


def _kind(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows)
    scored = [row for row in rows if row["scored"]]
    right = sum(row["outcome"] == "right" for row in scored)
    wrong = sum(bool(row["confident"]) and row["outcome"] == "wrong" for row in rows)
    told = [counts[name] for name in ("right", "undecided", "equivalent", "cleared", "wrong")]
    return f"| {kind} {KINDS[kind]} | {len(rows)} | {len(scored)} | {right} | {' | '.join(map(str, told))} | {wrong} |"


def _confusion(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for cause in sorted({str(row["expected"]) for row in rows}):
        of = [row for row in rows if str(row["expected"]) == cause]
        came = Counter(str(row["first"]) for row in of)
        told = ", ".join(f"{name} {count}" for name, count in came.most_common())
        lines.append(f"| {cause} | {len(of)} | {told} |")
    return lines


def _not_right(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Scored rows whose cause did not come first, and controls that were not cleared."""
    missed = [
        row
        for row in rows
        if (row["scored"] and row["outcome"] != "right")
        or (row["expected"] == "healthy" and row["outcome"] != "cleared")
    ]
    if not missed:
        return ["Every scored row has its cause first, and every healthy drafter is cleared."]
    lines = [
        "| drafter | mutation | put in | first | second | confident | before | after |",
        "|---|---|---|---|---|---|---:|---:|",
    ]
    for row in missed:
        before, after = (f"{row[key]:.2f}" if row[key] is not None else "" for key in ("accept_before", "accept_after"))
        said = "yes" if row["confident"] else "no"
        lines.append(
            f"| {row['drafter']} | {row['mutation']} | {row['expected']} | {row['first']} | {row['second']} | {said} "
            f"| {before} | {after} |"
        )
    return lines
