"""What the engine's own log says, before anything is blamed: is it sound, and does it reach what these files can do?

A length of a log is a mean over text nobody saw. Its interval is Wilson's over rounds, with all K tokens of a round
taken as one draw: the widest that independent rounds can have. It is compared with the walk at the same K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.check.case import Case
from eyas.results import Evidence, Finding, LengthCounts, NotChecked, Rival
from eyas.results.counts import wilson
from eyas.results.observed import Counts
from eyas.results.verdict import MIN_ROUNDS

# With one of these the numbers of a text are not to be compared with anything.
UNSOUND = ("counts-inconsistent", "acceptance-faked", "bonus-dropped", "tokens-after-end-counted")
OTHER_TEXT = 0.5  # text of another kind may cost up to this share of the drafted tokens kept; more is no text's doing
_RIVALS = (
    Rival("language-unseen", "serve the prompts of these records and read the log again"),
    Rival("temperature-greedy-drafts", "serve at temperature 0 and read the log again"),
)


@dataclass(frozen=True)
class Gap:
    """Expected accept length minus the log's, with the 95 % interval of the difference."""

    value: float
    low: float
    high: float


def judge_observed(case: Case, observed: Sequence[Counts], findings: Sequence[Finding]) -> None:
    """The findings of a log, and the longest sound run of each engine and K against the walk at that K."""
    case.findings += [finding for finding in findings if finding not in case.findings]
    if unsound := sorted({f.cause for f in findings if f.severity != "note" or f.cause in UNSOUND}):
        why = f"the log's numbers do not hold ({', '.join(unsound)}), so they are compared with nothing"
        case.not_checked.append(NotChecked("observed", why))
        return
    for run in _longest(observed):
        _compare(case, run)


def _longest(observed: Sequence[Counts]) -> list[Counts]:
    found: dict[tuple[str, str | None, int | None], Counts] = {}
    for run in observed:
        key = run.engine, run.drafter, run.draft_tokens
        if key not in found or (rounds_of(run) or 0) > (rounds_of(found[key]) or 0):
            found[key] = run
    return list(found.values())


def rounds_of(run: Counts) -> int | None:
    """Rounds printed, else those that K and the tokens drafted make."""
    if run.rounds is not None:
        return run.rounds
    if run.drafted is not None and run.draft_tokens and (run.top_k or 1) == 1:
        return run.drafted // run.draft_tokens
    return None


def _compare(case: Case, run: Counts) -> None:
    expected = _expected(case, run)
    if isinstance(expected, str):
        case.not_checked.append(NotChecked("observed", f"{run.where}: {expected}"))
        return
    assert run.accept_length is not None
    assert expected.value is not None
    rounds, length = rounds_of(run), run.accept_length.value
    assert rounds is not None
    gap = difference(expected, length, rounds)
    if gap is None:
        case.not_checked.append(NotChecked("observed", f"{run.where}: too few records for an interval of the walk"))
        return
    evidence = [
        Evidence(
            f"accept length at {run.draft_tokens} drafted tokens",
            round(length, 3),
            round(expected.value, 3),
            f"{run.where}, {rounds:,} rounds",
        ),
        Evidence(
            "expected minus observed",
            [round(x, 3) for x in (gap.value, gap.low, gap.high)],
            "an interval that holds 0",
            "walk: bootstrap over records; log: Wilson over rounds",
        ),
    ]
    measured = f"{run.engine} reaches {length:.2f} at {run.draft_tokens} drafted tokens"
    if gap.low > 0:
        graver = gap.low > OTHER_TEXT * (expected.value - 1)
        case.findings.append(
            Finding(
                "engine-falls-short",
                "likely" if graver else "note",
                f"{measured}; these files give {expected.value:.2f}: it falls short by {gap.value:.2f} "
                f"({gap.low:.2f} to {gap.high:.2f}). "
                + (
                    "The fault is in what the engine does with the files, unless it served other text."
                    if graver
                    else "Other text than these records can do that too."
                ),
                evidence,
                rivals=_RIVALS,
            )
        )
    elif gap.high < 0:
        summary = f"{measured}, more than the {expected.value:.2f} that these files give on these records."
        case.findings.append(Finding("observed-exceeds", "note", summary, evidence))
    else:
        summary = f"{measured}; these files give {expected.value:.2f}: they agree within what was measured."
        case.findings.append(Finding("observed-agrees", "note", summary, evidence))


def _expected(case: Case, run: Counts) -> LengthCounts | str:
    """The walk's length at the run's K, or why the two do not compare."""
    if run.faked:
        return f"acceptance is simulated ({run.faked})"
    if run.accept_length is None:
        return "the log gives no accept length"
    if run.draft_tokens is None:
        return "the log does not say how many tokens were drafted, and lengths at different K do not compare"
    if (run.top_k or 1) > 1:
        return f"a tree (top-k {run.top_k}) keeps more than a chain, and chains were measured"
    rounds = rounds_of(run)
    if rounds is None:
        return "the log gives means and no counts, so nothing says how far they can be off"
    if rounds < MIN_ROUNDS:
        return f"cannot tell: {rounds} rounds separate nothing ({MIN_ROUNDS} at least)"
    if case.measured is None or case.measured.walk is None:
        return "no walk was made, so there is no length to expect"
    lengths = case.measured.lengths
    if run.draft_tokens > len(lengths):
        return f"{run.draft_tokens} tokens were drafted, the walk has {len(lengths)}: pass --draft-tokens"
    expected = lengths[run.draft_tokens - 1]
    return expected if expected.value is not None else "the walk has no rounds"


def difference(expected: LengthCounts, length: float, rounds: int) -> Gap | None:
    """Walk minus log. The two sides' distances to their ends add in squares (MOVER: Zou and Donner 2008)."""
    low, high = expected.interval()
    if expected.value is None or low is None or high is None:
        return None
    depth = expected.draft_tokens
    ends = wilson(min(rounds, max(0, round((length - 1) / depth * rounds))), rounds)
    assert ends[0] is not None
    assert ends[1] is not None
    log_low, log_high = min(length, 1 + depth * ends[0]), max(length, 1 + depth * ends[1])
    gap = expected.value - length
    return Gap(
        gap,
        gap - math.hypot(expected.value - low, log_high - length),
        gap + math.hypot(high - expected.value, length - log_low),
    )
