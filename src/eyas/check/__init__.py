"""Is this drafter what it should be? One drafter, engine-free.

The order is that of the evidence's price: the files, how they fit the target, the weights, the records, the curves;
each step can stop the next, and what was not looked at is listed in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas import checkpoint, curve, provenance
from eyas.check.case import Case
from eyas.check.prompts import look_at_prompts
from eyas.checkpoint import NotFinite, TwoNorms
from eyas.errors import CheckpointError
from eyas.records import Record
from eyas.results import (
    EXPECT,
    EXPECT_DRAFT_TOKENS,
    CheckResult,
    Evidence,
    Finding,
    NotChecked,
    judge,
    too_few_records,
)
from eyas.target import Target

__all__ = ["Case", "check", "wiring_doubts"]

# Facts that the forward here has one value for: a drafter made for another one is not run as it was trained.
RUN_HERE: Mapping[str, Any] = {
    "tap_state": "stream",
    "fc": "applied",
    "attention": "gqa",
    "later_norm": "input_layernorm",
    "head_norm": True,
    "token_shift": 1,
    "window": None,
}
DEPTHS = 5  # drafted tokens when neither the user nor the contract says


def check(
    folder: Path,
    target: Target,
    records: Sequence[Record],
    *,
    name: str | None = None,
    manifest: Mapping[str, Any] | None = None,
    draft_tokens: int | None = None,
    expect: float = EXPECT,
    arguments: Mapping[str, object] | None = None,
    evidence: Sequence[Callable[[Case], None]] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> CheckResult:
    """Check the drafter in ``folder`` on its target and some records of the target's own text.

    ``evidence``: steps about what lies beside the files (an engine's log, an engine asked about); run last.
    """
    began = time.perf_counter()
    case = Case(name or folder.name)
    read_files(case, folder, target)
    if not case.stopped:
        load_weights(case, target)
    if not case.stopped:
        compare_text_rules(case, manifest or {})
        look_at_prompts(case, records, target.tokenizer, manifest)
        measure(case, target, records, draft_tokens, progress)
        judge_curves(case, expect)
    if not evidence:
        case.not_checked.append(NotChecked("engine", "no engine was asked what it feeds and drafts"))
    for step in evidence:
        step(case)
    return conclude(case, target, expect, arguments or {}, began)


def read_files(case: Case, folder: Path, target: Target) -> None:
    """Inventory, config and contract, against each other and against the target."""
    try:
        case.files = checkpoint.read(folder)
    except CheckpointError as error:
        case.findings.append(
            Finding(
                "checkpoint-unreadable",
                "fatal",
                error.message,
                [Evidence("files", str(error), "readable", case.name)],
            )
        )
        return
    case.findings += checkpoint.inspect(case.files, target)


def load_weights(case: Case, target: Target) -> None:
    assert case.files is not None
    try:
        case.drafter = checkpoint.load(case.files, target)
    except NotFinite as error:
        cause = "weights-nan"
        case.findings.append(
            Finding(cause, "fatal", error.message, [Evidence("weights", "not finite", "finite", case.name)])
        )
    except CheckpointError as error:
        cause = "vocab-map-inconsistent" if "vocabulary map" in error.message else "checkpoint-unreadable"
        if isinstance(error, TwoNorms):
            cause = "later-norm-differs"
        case.findings.append(
            Finding(
                cause,
                "fatal",
                error.message,
                [Evidence("loading", error.message, "loads", case.name)],
                fix=error.way_out,
            )
        )


def compare_text_rules(case: Case, manifest: Mapping[str, Any]) -> None:
    """Template and tokenizer of the records against those of the contract."""
    contract = case.files.contract if case.files else None
    for fact, cause in (("template_sha256", "template-differs"), ("tokenizer_sha256", "tokenizer-differs")):
        if contract is None or fact not in contract or fact not in manifest:
            case.not_checked.append(
                NotChecked(fact.removesuffix("_sha256"), "its hash is not known for both the drafter and the records")
            )
        elif contract[fact] != manifest[fact]:
            case.findings.append(
                Finding(
                    cause,
                    "note",
                    f"The records were rendered with another {fact.removesuffix('_sha256')} than the training text.",
                    [Evidence(fact, manifest[fact], contract[fact], "manifest of the records")],
                )
            )


def measure(
    case: Case,
    target: Target,
    records: Sequence[Record],
    draft_tokens: int | None,
    progress: Callable[[int], None],
) -> None:
    assert case.drafter is not None
    contract = case.files.contract if case.files else None
    trained = int(contract["depths"]) if contract is not None and "depths" in contract else DEPTHS
    depths = max(draft_tokens or trained, EXPECT_DRAFT_TOKENS)
    case.measured = curve.measure(case.drafter, target, records, depths=depths, progress=progress)


def judge_curves(case: Case, expect: float) -> None:
    """Findings that follow from the numbers alone."""
    measured = case.measured
    assert measured is not None
    case.not_checked.append(
        NotChecked("variants", "the sweep over other readings of these files is not part of this check yet")
    )
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
    length = measured.lengths[EXPECT_DRAFT_TOKENS - 1]
    if few := too_few_records(length):
        case.findings.append(few)
        return
    low, high = length.interval()
    assert high is not None
    if high < expect:
        unproven = wiring_doubts(case)
        if unproven:
            case.not_checked.append(NotChecked("wiring", unproven, needed=True))
        else:
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
    if files.contract is None:
        return "the checkpoint carries no contract, so its taps, norms and feedback are assumptions"
    if "weights-changed" in causes:
        return "the contract describes other weights"
    if "target-differs" in causes:
        return "the drafter was trained on another target or other weights of it"
    if texts := sorted({f.cause for f in case.findings if f.kind == "prompt"} - {"text-loops"}):
        return f"the records are not cut or rendered as the training text was ({', '.join(texts)})"
    contract = files.contract
    if unlike := [f"{f} {contract[f]}" for f, here in RUN_HERE.items() if f in contract and contract[f] != here]:
        return f"the drafter is run here without what its contract says: {', '.join(unlike)}"
    return None


def conclude(case: Case, target: Target, expect: float, arguments: Mapping[str, object], began: float) -> CheckResult:
    measured = case.measured
    lengths = measured.lengths if measured else []
    if case.stopped:
        case.not_checked.append(NotChecked("curves", "the files stand in the way", needed=True))
    verdict = judge(
        case.findings,
        length_at_4=lengths[EXPECT_DRAFT_TOKENS - 1] if lengths else None,
        expect=expect,
        not_checked=case.not_checked,
    )
    contract = case.files.contract if case.files else None
    return CheckResult(
        checkpoint=case.name,
        target=target.spec,
        verdict=verdict,
        teacher_forced=measured.teacher_forced if measured else None,
        walk=measured.walk if measured else None,
        accept_length=lengths,
        found={"contract": contract.to_json() if contract else None, "margin": None},
        findings=case.findings,
        not_checked=case.not_checked,
        expect=expect,
        provenance=provenance.collect(dict(arguments)),
        seconds=time.perf_counter() - began,
    )
