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

from eyas import checkpoint, curve, provenance, slices, variants
from eyas.check import reading, sweep, vocabulary
from eyas.check.case import Case
from eyas.check.declared import look_at_config, look_at_ids
from eyas.check.engine import layers_meant, spell_fixes
from eyas.check.losses import losses
from eyas.check.masks import look_at_masks
from eyas.check.placing import Placement, place
from eyas.check.prompts import look_at_prompts
from eyas.check.states import look_at_states
from eyas.check.worth import judge_curves, judge_worth, wiring_doubts
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
)
from eyas.states.embedded import with_embedding
from eyas.states.foreign import ForeignStock
from eyas.states.given import Held
from eyas.states.live import LiveStock, bytes_needed
from eyas.states.stock import Stock
from eyas.target import Target
from eyas.variants import feed
from eyas.variants.parts import play
from eyas.variants.scores import needed
from eyas.variants.table import same_rows

__all__ = ["Case", "check", "wiring_doubts"]

IDS = "eagle_aux_hidden_state_layer_ids"
DEPTHS = 5  # drafted tokens when neither the user nor the contract says
MEMORY = 1.5 * 2**30  # bytes of states that a sweep holds at most
NOT_SWEPT = {
    "auto": "the contract is whole and the curve is as expected; --sweep tries other readings of these files",
    "never": "--quick; --sweep tries other readings of these files",
    "doubts": "a contract of these very weights says how they were trained; `eyas check --sweep` tries other readings",
}
Sweeping = Literal["auto", "doubts", "always", "never"]


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
    live: LiveStock | None = None,
    form: str = "eyas",
    notes: Sequence[str] = (),
    sweeping: Sweeping = "auto",
    engine: str | None = None,
    limits: variants.Limits = variants.Limits(),  # noqa: B008 - frozen
    arguments: Mapping[str, object] | None = None,
    evidence: Sequence[Callable[[Case], None]] = (),
    progress: Callable[[int], None] = lambda done: None,
    tried: Callable[[str], None] = lambda what: None,
    case: Case | None = None,
) -> CheckResult:
    """Check the drafter in ``folder`` on its target and some records of the target's own text.

    With ``states`` the target does not run: its ends (``target.load_ends``) are enough, and ``records`` are those of
    the stock; ``form`` and ``notes`` say whose states they are and what is odd about them. ``live`` is a stock to fill
    that the caller goes on to use. ``sweeping``: whether other readings of the files are tried; "auto" does where
    anything speaks for it, "doubts" where no contract of these very weights says how they were trained. ``engine``
    (NAME[==VERSION]) is the one that fixes are spelled for, else the usual ones are. ``progress`` hears the records
    walked, ``tried`` the readings. ``evidence``: steps about what lies beside the files (an engine's log, an engine
    asked about); run last.
    An empty ``case`` keeps what was found on the way.
    """
    began = time.perf_counter()
    case = case or Case(name or folder.name)
    read_files(case, folder, target)
    look_at_ids(case, records)
    if not case.stopped:
        look_at_config(case, target, records)
        load_weights(case, target)
    if not case.stopped:
        compare_text_rules(case, manifest or {})
        look_at_prompts(case, records, target.tokenizer, manifest)
        look_at_masks(case, records, target.eos_ids())
        forgive_raw_text(case, target)
        if states is None:
            stock: Stock = live or LiveStock(target, held(records, target, limits))
        else:
            stock = placed(case, states, records, target, engine)
        settle_taps(case, stock)
        measure(case, stock, records if states is None else stock.records, draft_tokens, progress)
        judge_curves(case)
        if wanted(case, sweeping, expect, states is not None):
            try_readings(case, stock, limits, tried)
            spell_fixes(case, engine, target)
        else:
            case.not_checked.append(NotChecked("variants", NOT_SWEPT[sweeping]))
        judge_worth(case, expect)
    if not evidence:
        case.not_checked.append(NotChecked("engine", "no engine was asked what it feeds and drafts"))
    for step in evidence:
        step(case)
    return conclude(case, target, expect, arguments or {}, began, form, notes)


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
        cause = "later-norm-differs" if isinstance(error, TwoNorms) else "checkpoint-unreadable"
        case.findings.append(
            Finding(
                cause, "fatal", error.message, [Evidence("loading", str(error), "loads", case.name)], fix=error.way_out
            )
        )
        return
    case.maps = vocabulary.read(tensors, target)
    case.findings += vocabulary.judge(tensors, case.maps, target.vocab_size)
    case.parts = variants.read_parts(case.files, tensors, target, case.maps.ids)
    case.told = reading.told(case.files, target, case.maps)
    head = tensors.get("lm_head.weight")
    if case.files.contract is None and head is not None:
        theirs = case.parts.target_head(vocabulary.proven(case.maps, target.vocab_size))
        case.findings += targets_own_head() if same_rows(head, theirs) else []
    own = tensors.get("embed_tokens.weight")
    if own is not None and same_rows(own, target.embedding):  # a copy of the target's is as good as sharing it
        same = {"embedding": "target"}
        case.told = replace(case.told, declared=case.told.declared | same, configured=case.told.configured | same)


def targets_own_head() -> list[Finding]:
    """A note: nothing in the files tells a head that was trained frozen from one that was lost."""
    return [
        Finding(
            "head-overwritten",
            "note",
            "The head's rows are the target's own. Right where it was trained frozen; if it was trained, whoever "
            "wrote these files put the target's in its place.",
            [Evidence("rows of the head", "the target's", "the target's only if trained frozen", "every 97th row")],
        )
    ]


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


def forgive_raw_text(case: Case, target: Target) -> None:
    """Text of a target without a template has no prompt to leave out."""
    if getattr(target.tokenizer, "chat_template", None) is None:
        case.findings = [replace(f, severity="note") if f.cause == "mask-full" else f for f in case.findings]


def placed(case: Case, states: Stock, records: Sequence[Record], target: Target, engine: str | None) -> Stock:
    """Stored states, sound or not, their tensors named by the taps they are, and with tap 0, always at hand."""
    assert case.files is not None
    config, live = case.files.config, not target.ends_only
    ids = (config.get("eagle_config") or {}).get(IDS) or config.get(IDS)
    meant = layers_meant(case.files, engine, target) if engine else None
    placement = place(Held(states), target, ids, live, meant)
    case.placement = placement
    before = len(case.findings)
    look_at_states(case, Held(states), placement, target, live, records)
    if placement.post_norm:
        case.findings.append(stored_after_norm(placement, target.num_layers))
    if not live and placement.last is None:  # whose rows they are was told by a layer's likeness to the end alone
        case.findings[before:] = [replace(f, severity="note") if f.rivals else f for f in case.findings[before:]]
    if isinstance(states, ForeignStock):
        mapping = placement.mapping("guess")
        last = mapping.get(str(placement.last)) if placement.last is not None else None
        states = states.placed(mapping, last).shifted(placement.shift)
    return with_embedding(Held(states), target)


def stored_after_norm(placement: Placement, num_layers: int) -> Finding:
    """Beside tap n it stands where a tap was meant. Alone it is a note: it is undone here, but a trainer that takes it
    for tap n teaches from the wrong tensor."""
    assert placement.last is not None
    end = placement.placed[placement.last]
    streams = [name for name, p in placement.placed.items() if p.tap == num_layers and name != placement.last]
    if streams:
        return Finding(
            "taps-highest-final-state",
            "likely",
            f"{placement.last} is the target's last state after its final norm, beside tap {num_layers} itself "
            f"({streams[0]}): it stands where the highest tap was meant.",
            [Evidence(str(placement.last), "after the final norm", "a tap of the stream", end.how)],
        )
    return Finding(
        "tap-post-norm",
        "note",
        f"{placement.last} is the target's end after its final norm. Whoever norms it again before the head, as "
        "trainers do that expect tap n, learns from a teacher that is not the target.",
        [Evidence(str(placement.last), "after the final norm", "tap n, before it", end.how)],
    )


def settle_taps(case: Case, stock: Stock) -> None:
    """Of the readings that the ids allow, one whose states are at hand: nobody stores states for another."""
    assert case.told is not None
    told = case.told
    lists = [told.declared["taps"], *(tuple(t) for all_ in told.taps_by_reader.values() for t in all_)]
    stored = [taps for taps in lists if set(taps) <= set(stock.taps)]
    if stored and told.declared["taps"] not in stored:
        taps = {"taps": stored[0]}
        case.told = replace(told, declared=told.declared | taps, configured=told.configured | taps)


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
    absent = [t for t in needed(case.told.configured, stock.last) if t not in stock.taps]
    if absent:
        case.not_checked.append(
            NotChecked(
                "curves",
                f"tap {', '.join(map(str, absent))}, which is configured, is not among the states "
                f"({', '.join(map(str, stock.taps))})",
                needed=True,
            )
        )
        return
    if drafter is None:
        case.not_checked.append(NotChecked("curves", "the files lack what their own config asks for", needed=True))
        return
    facts = case.told.configured
    live = isinstance(stock, LiveStock)
    run = feed.from_run(stock.run, facts) if isinstance(stock, LiveStock) else feed.from_stock(stock, facts)
    case.records = records
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
    if sweeping == "never":
        return False
    if sweeping == "always" or stored or wiring_doubts(case) is not None:
        return True
    if sweeping == "doubts":
        return False
    if any(f.severity != "note" for f in case.findings):
        return True
    lengths = case.measured.lengths if case.measured else []
    value = lengths[EXPECT_DRAFT_TOKENS - 1].value if lengths else None
    return value is None or value < expect


def try_readings(case: Case, stock: Stock, limits: variants.Limits, tried: Callable[[str], None]) -> None:
    assert case.parts is not None
    assert case.told is not None
    assert case.maps is not None
    told, layers = case.told, case.parts.target.num_layers
    base = {**told.declared, "vocab_map": vocabulary.proven(case.maps, case.parts.target.vocab_size)}
    if any(t not in stock.taps for t in needed(base, stock.last)):  # start from what there is; every choice is tried
        base["taps"] = tuple(stock.taps[: len(base["taps"])])
    swept = variants.sweep(case.parts, stock, base, layers, also=told.also, limits=limits, progress=tried)
    if not swept.passes:
        case.not_checked.append(NotChecked("variants", "too little text to try other readings on", needed=True))
        return
    case.swept = swept
    case.lost = losses(swept, told.configured)
    before = len(case.findings)
    sweep.judge(case, case.lost, num_layers=layers)
    if case.placement is not None and case.placement.guessed:
        case.findings[before:] = [sweep.by_order_alone(f) for f in case.findings[before:]]
    case.findings = sweep.settled(case.findings[:before], case.findings[before:])
    if any(loss.proven for loss in case.lost) and not any(f.severity != "note" for f in case.findings[before:]):
        # The files allow the reading that fits: that is the drafter, on as much text as its states are held of.
        case.told = replace(told, configured=swept.best)
        measure(case, stock, stock.records, None, lambda done: None)


def conclude(
    case: Case,
    target: Target,
    expect: float,
    arguments: Mapping[str, object],
    began: float,
    form: str,
    notes: Sequence[str],
) -> CheckResult:
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
        states=case.placement.to_json(form, notes) if case.placement else None,
        slices=slices.to_json(measured.tables, case.records) if measured and measured.tables else [],
        sweep=sweep.to_json(case.swept, layers, case.told.named) if case.swept and case.told else None,
        findings=case.findings,
        not_checked=case.not_checked,
        expect=expect,
        provenance=provenance.collect(dict(arguments)),
        seconds=time.perf_counter() - began,
    )
