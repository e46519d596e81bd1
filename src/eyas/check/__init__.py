"""Is this drafter what it should be? One drafter, engine-free.

The order is that of the evidence's price: the files, how they fit the target, the weights, the records, the curves;
each step can stop the next, and what was not looked at is listed in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eyas import checkpoint, curve, provenance, variants
from eyas.check import reading, sweep, vocabulary
from eyas.check.case import Case
from eyas.check.losses import losses
from eyas.checkpoint import NotFinite
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
from eyas.states.live import LiveStock, bytes_needed
from eyas.states.stock import Stock
from eyas.target import Target
from eyas.variants import feed
from eyas.variants.parts import play

__all__ = ["Case", "check", "wiring_doubts"]

# Facts that the forward here has one value for: a drafter made for another one is not run as it was trained.
RUN_HERE: Mapping[str, Any] = {
    "tap_state": "stream",
    "fc": "applied",
    "attention": "gqa",
    "later_norm": "input_layernorm",
}
DEPTHS = 5  # drafted tokens when neither the user nor the contract says
MEMORY = 1.5 * 2**30  # bytes of states that a sweep holds at most
Sweeping = Literal["auto", "always", "never"]


def check(
    folder: Path,
    target: Target,
    records: Sequence[Record],
    *,
    name: str | None = None,
    manifest: Mapping[str, Any] | None = None,
    draft_tokens: int | None = None,
    expect: float = EXPECT,
    states: Stock | None = None,
    sweeping: Sweeping = "auto",
    limits: variants.Limits = variants.Limits(),  # noqa: B008 - frozen
    arguments: Mapping[str, object] | None = None,
    progress: Callable[[int], None] = lambda done: None,
    tried: Callable[[str], None] = lambda what: None,
    case: Case | None = None,
) -> CheckResult:
    """Check the drafter in ``folder`` on its target and some records of the target's own text.

    With ``states`` the target does not run: its ends (``target.load_ends``) are enough, and ``records`` are those of
    the stock. ``sweeping``: whether other readings of the files are tried; "auto" does where anything speaks for it.
    ``progress`` hears the records walked, ``tried`` the readings. An empty ``case`` keeps what was found on the way.
    """
    began = time.perf_counter()
    case = case or Case(name or folder.name)
    read_files(case, folder, target)
    if not case.stopped:
        load_weights(case, target)
    if not case.stopped:
        compare_text_rules(case, manifest or {})
        stock = states or LiveStock(target, held(records, target, limits))
        measure(case, stock, records if states is None else stock.records, draft_tokens, progress)
        judge_curves(case)
        if wanted(case, sweeping, expect, states is not None):
            try_readings(case, stock, limits, tried)
        else:
            why = "the contract is whole and the curve is as expected" if sweeping == "auto" else "--quick"
            case.not_checked.append(NotChecked("variants", f"{why}; --sweep tries other readings of these files"))
        judge_worth(case, expect)
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
    """Every tensor, the vocabulary map in each of its readings, and how the files say that all of it is run."""
    assert case.files is not None
    try:
        tensors = checkpoint.finite_tensors(case.files)
    except NotFinite as error:
        case.findings.append(
            Finding("weights-nan", "fatal", error.message, [Evidence("weights", "not finite", "finite", case.name)])
        )
        return
    except CheckpointError as error:
        case.findings.append(
            Finding("checkpoint-unreadable", "fatal", error.message, [Evidence("loading", str(error), "", case.name)])
        )
        return
    case.maps = vocabulary.read(tensors, target)
    case.findings += vocabulary.judge(tensors, case.maps, target.vocab_size)
    case.parts = variants.read_parts(case.files, tensors, target, case.maps.ids)
    case.told = reading.told(case.files, target, case.maps)


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


def held(records: Sequence[Record], target: Target, limits: variants.Limits) -> list[Record]:
    """The records whose states a sweep asks for: so many as it looks at, or as memory allows."""
    order = np.random.default_rng(limits.seed).permutation(len(records)).tolist()
    kept: list[Record] = []
    slots = size = 0
    for i in order:
        size += bytes_needed([records[i]], target.num_layers + 1, target.hidden_size)
        if kept and (slots > limits.screen + limits.confirm or size > MEMORY):
            break
        kept.append(records[i])
        slots += records[i].n_response_tokens
    return kept


def measure(
    case: Case,
    stock: Stock,
    records: Sequence[Record],
    draft_tokens: int | None,
    progress: Callable[[int], None],
) -> None:
    """The curves as configured."""
    assert case.parts is not None
    assert case.told is not None
    contract = case.files.contract if case.files else None
    trained = int(contract["depths"]) if contract is not None and "depths" in contract else DEPTHS
    depths = max(draft_tokens or trained, EXPECT_DRAFT_TOKENS)
    drafter = variants.build(case.parts, case.told.configured)
    if drafter is None:
        case.not_checked.append(NotChecked("curves", "the files lack what their own config asks for", needed=True))
        return
    facts = case.told.configured
    live = isinstance(stock, LiveStock)
    run = feed.from_run(stock.run, facts) if isinstance(stock, LiveStock) else feed.from_stock(stock, facts)
    case.measured = curve.measure(
        drafter,
        case.parts.target,
        records,
        depths=depths,
        run=run,
        play=play(facts),
        truth="target" if live or stock.last is not None else "record",
        progress=progress,
    )


def wanted(case: Case, sweeping: Sweeping, expect: float, stored: bool) -> bool:
    """Whether other readings are tried: always where the files do not settle how the drafter is run, or it is low."""
    if case.measured is None or sweeping == "never":
        return False
    if sweeping == "always" or stored or wiring_doubts(case) is not None:
        return True
    if any(f.severity != "note" for f in case.findings):
        return True
    lengths = case.measured.lengths
    value = lengths[EXPECT_DRAFT_TOKENS - 1].value if lengths else None
    return value is None or value < expect


def try_readings(case: Case, stock: Stock, limits: variants.Limits, tried: Callable[[str], None]) -> None:
    assert case.parts is not None
    assert case.told is not None
    assert case.maps is not None
    told, layers = case.told, case.parts.target.num_layers
    swept = variants.sweep(case.parts, stock, told.declared, layers, also=told.also, limits=limits, progress=tried)
    if not swept.passes:
        case.not_checked.append(NotChecked("variants", "too little text to try other readings on", needed=True))
        return
    case.swept = swept
    case.lost = losses(swept, case.parts, told.configured)
    before = len(case.findings)
    sweep.judge(case, case.lost, num_layers=layers)
    case.findings = sweep.settled(case.findings[:before], case.findings[before:])
    if any(loss.proven for loss in case.lost) and not any(f.severity != "note" for f in case.findings[before:]):
        # The files allow the reading that fits: that is the drafter, on as much text as its states are held of.
        case.told = replace(told, configured=swept.best)
        measure(case, stock, stock.records, None, lambda done: None)


def judge_curves(case: Case) -> None:
    """What the numbers say of the text."""
    measured = case.measured
    if measured is None:
        return
    case.not_checked.append(NotChecked("engine", "no engine was asked what it feeds and drafts"))
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
    if texts := sorted(causes & {"template-differs", "tokenizer-differs"}):
        return f"the records are not cut or rendered as the training text was ({', '.join(texts)})"
    contract = files.contract
    if contract is None:
        return None
    if unlike := [f"{f} {contract[f]}" for f, here in RUN_HERE.items() if f in contract and contract[f] != here]:
        return f"the drafter is run here without what its contract says: {', '.join(unlike)}"
    return None


def conclude(case: Case, target: Target, expect: float, arguments: Mapping[str, object], began: float) -> CheckResult:
    measured = case.measured
    lengths = measured.lengths if measured else []
    if measured is None and case.stopped:
        case.not_checked.append(NotChecked("curves", "the files stand in the way", needed=True))
    verdict = judge(
        case.findings,
        length_at_4=lengths[EXPECT_DRAFT_TOKENS - 1] if lengths else None,
        expect=expect,
        not_checked=case.not_checked,
    )
    layers = target.num_layers
    return CheckResult(
        checkpoint=case.name,
        target=target.spec,
        verdict=verdict,
        teacher_forced=measured.teacher_forced if measured else None,
        walk=measured.walk if measured else None,
        accept_length=lengths,
        configured={"facts": case.told.configured, "by": case.told.by} if case.told else None,
        found=sweep.found(case),
        sweep=sweep.to_json(case.swept, layers, case.told.named) if case.swept and case.told else None,
        findings=case.findings,
        not_checked=case.not_checked,
        expect=expect,
        provenance=provenance.collect(dict(arguments)),
        seconds=time.perf_counter() - began,
    )
