"""What the curves say of the text and of the drafter, and why a low one may not be the drafter's fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas import curve
from eyas.check.case import Case
from eyas.results import EXPECT_DRAFT_TOKENS, Evidence, Finding, NotChecked, too_few_records

# Facts that the forward here has one value for: a drafter made for another one is not run as it was trained.
RUN_HERE: Mapping[str, Any] = {
    "tap_state": "stream",
    "fc": "applied",
    "attention": "gqa",
    "later_norm": "input_layernorm",
}


def judge_curves(case: Case) -> None:
    """What the numbers say of the text."""
    measured = case.measured
    if measured is None:
        return
    if measured.walk is None:
        agreed, slots = measured.agreement
        share = agreed / slots if slots else 0.0
        case.findings.append(
            Finding(
                "off-policy-records",
                "note",
                f"The records are not this target's own greedy text ({share:.1%} of tokens agree): no walk was made.",
                [
                    Evidence(
                        "record token equals the target's",
                        round(share, 4),
                        f">= {curve.ON_POLICY}",
                        "records",
                    )
                ],
            )
        )
        case.not_checked.append(NotChecked("walk", "needs records that the target answered greedily", needed=True))
        return
    if few := too_few_records(measured.lengths[EXPECT_DRAFT_TOKENS - 1]):
        case.findings.append(few)


def judge_worth(case: Case, expect: float) -> None:
    """What the drafter is worth, where nothing is wrong with how it is run; only then may it be blamed."""
    measured = case.measured
    if measured is None or measured.walk is None or any(f.cause == "records-too-few" for f in case.findings):
        return
    length = measured.lengths[EXPECT_DRAFT_TOKENS - 1]
    low, high = length.interval()
    assert high is not None
    grave = [f for f in case.findings if f.severity != "note"]
    if high < expect and not grave:
        unproven = wiring_doubts(case)
        if unproven:
            case.not_checked.append(NotChecked("wiring", unproven, needed=True))
        elif not any(n.needed for n in case.not_checked):
            shown = [round(value, 3) for value in (length.value or 1.0, low or 1.0, high)]
            case.findings.append(
                Finding(
                    "quality-low",
                    "note",
                    f"As trained and wired this drafter reaches {length.value:.2f}; {expect} was expected.",
                    [Evidence("accept length, 4 drafted tokens", shown, expect, "walk")],
                )
            )
    coverage = measured.teacher_forced.coverage().rate
    if coverage is not None and coverage < 0.9:
        case.findings.append(
            Finding(
                "coverage-low",
                "note",
                f"{1 - coverage:.1%} of the target's tokens are not in the draft vocabulary and can never be accepted.",
                [Evidence("coverage", round(coverage, 4), ">= 0.9", "records")],
            )
        )


def wiring_doubts(case: Case) -> str | None:
    """Why a low curve may be the reader's fault, or None: no drafter is blamed while its wiring is only assumed."""
    files = case.files
    assert files is not None
    causes = {f.cause for f in case.findings}
    if case.swept is None:  # a sweep that found nothing better has proven what a contract only declares
        if files.contract is None:
            return "the checkpoint carries no contract, so its taps, norms and feedback are assumptions"
        if "weights-changed" in causes:
            return "the contract describes other weights"
    if "target-differs" in causes:
        return "the drafter was trained on another target or other weights of it"
    if texts := sorted({f.cause for f in case.findings if f.kind == "prompt"} - {"text-loops"}):
        return f"the records are not cut or rendered as the training text was ({', '.join(texts)})"
    contract = files.contract
    if contract is None:
        return None
    if unlike := [f"{f} {contract[f]}" for f, here in RUN_HERE.items() if f in contract and contract[f] != here]:
        return f"the drafter is run here without what its contract says: {', '.join(unlike)}"
    return None
