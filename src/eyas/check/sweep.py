"""From a sweep to what is wrong: a finding for each fact that is configured otherwise than trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from eyas import variants
from eyas.check import vocabulary
from eyas.check.case import Case
from eyas.check.classify import cause_of
from eyas.check.losses import Loss, same
from eyas.check.reading import Told
from eyas.contract import FACTS, Contract, Fact
from eyas.results import Difference, Evidence, Finding, NotChecked, Rival
from eyas.variants import Sweep, Trial
from eyas.variants.table import name_of

VOUCHED = 0.15  # of the tokens a round: less is not held against a contract of these very weights
DEADLY = 0.25  # of what the right reading keeps
HARDLY_ALIVE = 0.3  # kept a slot by what fits best: below, another fault may hide behind it
MISSED = (
    0.1  # of the tokens a round: a gain as large that cannot be excluded keeps an unvouched drafter from being sound
)
ALIVE = 0.15  # kept a slot, of four: below, nothing was proven to be wired right
# Findings about what files declare, which a measured one about the same thing makes a note.
DECLARED = frozenset({"contract-edited", "taps-key-missing", "vocab-map-inconsistent"})


def judge(case: Case, lost: Sequence[Loss], *, num_layers: int) -> None:
    """A finding for each fact that costs something as it is configured."""
    swept, told, maps, parts = case.swept, case.told, case.maps, case.parts
    assert swept is not None
    assert told is not None
    assert maps is not None
    assert parts is not None
    readers_of = told.taps_by_reader
    for loss in lost:
        slug = (
            vocabulary.cause_of_map(maps, loss.trained, parts.target.vocab_size)
            if loss.fact == "vocab_map"
            else cause_of(loss.fact, loss.configured, loss.trained, num_layers=num_layers, named=told.named)
        )
        if slug is None:
            why = f"{name_of({loss.fact: loss.trained})} fits better; it has no name here"
            case.not_checked.append(NotChecked(loss.fact, why, needed=loss.proven))
            continue
        if loss.score is None:
            case.findings.append(_unrun(slug, loss, swept))
            continue
        readers = [r for r, lists in readers_of.items() if any(same(tuple(t), loss.trained) for t in lists)]
        if loss.fact == "taps" and readers:
            case.findings.append(_by_reader(loss, readers, readers_of, swept))
        else:
            found_ = _finding(slug, loss, swept, told, num_layers)
            case.findings.append(_altered(case, loss, _vouched(case, loss, found_)))
    if not any(loss.proven for loss in lost):
        _nothing_better(case, swept)
    _suspects(case, swept)
    if not case.findings or all(f.severity == "note" for f in case.findings):
        _unseen(case, swept)


def settled(earlier: Sequence[Finding], measured: Sequence[Finding]) -> list[Finding]:
    """All findings, those made before the sweep as notes where it measured what they only declare, and left out where
    it says the same."""
    explained = [f for f in measured if f.severity != "note"]
    again = {f.cause for f in explained}
    return [_settled(f, explained) for f in earlier if f.cause not in again] + list(measured)


def _settled(finding: Finding, explained: Sequence[Finding]) -> Finding:
    measured_nothing = not explained and finding.cause in ("contract-edited", "taps-key-missing")
    if finding.cause in DECLARED and (explained or measured_nothing):
        return replace(finding, severity="note")
    return finding


def by_order_alone(finding: Finding) -> Finding:
    """A finding about taps where which layers the stored tensors are was told by their order alone."""
    if finding.kind != "taps" or finding.severity == "note":
        return finding
    tell = "whoever stored the states, or a target that runs: which layers they are was told by their order alone"
    return replace(finding, rivals=[*finding.rivals, Rival("taps-ambiguous", tell)])


def found(case: Case) -> dict[str, Any]:
    """The contract that fits best, how far it is ahead of the next, and what changes on the way to it."""
    contract = case.files.contract if case.files else None
    swept = case.swept
    if swept is None:
        return {"contract": contract.to_json() if contract else None, "margin": None, "changes": [], "next": None}
    facts = dict(contract.facts) if contract is not None else {}
    measured = {loss.fact for loss in case.lost if loss.proven}
    for fact, value in swept.best.items():
        if fact in FACTS:
            known = facts.get(fact)
            origin = "measured" if fact in measured else known.origin if known else "inferred"
            facts[fact] = Fact(value, origin)
    trials = [t for t in swept.passes[-1].trials if t.confirmed is not None and t.difference is not None]
    rival = max(trials, key=lambda t: t.difference.value or 0.0 if t.difference else 0.0, default=None)
    margin = None
    if rival is not None and rival.difference is not None:
        value, low, high = (None if v is None else -v for v in (
            rival.difference.value, rival.difference.high, rival.difference.low))  # fmt: skip
        margin = Difference(value, low, high).to_json()
    return {
        "contract": Contract(facts).to_json(),
        "margin": margin,
        "next": rival.name if rival else None,
        "changes": [{"fact": x.fact, "configured": x.configured, "found": x.trained} for x in case.lost],
        "kept_per_slot": swept.passes[-1].confirmed.kept_per_slot,
    }


def _vouched(case: Case, loss: Loss, finding: Finding) -> Finding:
    """A note where the trainer itself wrote down what is configured, of these very weights, and the gain is small: a
    drafter trained little may do better in a way it was not trained in, and that is no miswiring."""
    contract = case.files.contract if case.files else None
    if contract is None or loss.fact not in contract or any(f.cause == "weights-changed" for f in case.findings):
        return finding
    declared = contract[loss.fact]
    if not same(tuple(declared) if isinstance(declared, list) else declared, loss.configured):
        return finding
    gain = loss.difference.value or 0.0
    return replace(finding, severity="note") if gain < VOUCHED * (1 + loss.fitting.kept_per_slot) else finding


TENSORS = frozenset({"head", "embedding", "vocab_map"})  # facts that lie in the weights


def _altered(case: Case, loss: Loss, finding: Finding) -> Finding:
    """Where the contract says what is configured but was written for other weights, these may have been changed so
    that another wiring makes up for it."""
    contract = case.files.contract if case.files else None
    changed = any(f.cause == "weights-changed" for f in case.findings)
    if finding.severity == "note" or contract is None or not changed or loss.fact in TENSORS:
        return finding
    if loss.fact not in contract or not same(contract[loss.fact], loss.configured):
        return finding
    tell = "the weights of training, whose hash the contract has"
    return replace(finding, rivals=[*finding.rivals, Rival("weights-changed", tell)])


def _unrun(slug: str, loss: Loss, swept: Sweep) -> Finding:
    """As configured it could not be run, so nothing says that it would not do as well."""
    kept = loss.fitting.kept_per_slot
    return Finding(
        slug,
        "likely" if kept > ALIVE else "note",
        f"The weights fit {name_of({loss.fact: loss.trained})}: {1 + kept:.2f} tokens a round. Configured is "
        f"{name_of({loss.fact: loss.configured})}, of which the states at hand hold only a part.",
        [Evidence(loss.fact, loss.configured, loss.trained, f"the best of {swept.tried} readings that could be run")],
        rivals=[Rival("taps-differ", "states of every tap that is configured, or a target that runs")],
    )


def _finding(slug: str, loss: Loss, swept: Sweep, told: Told, num_layers: int) -> Finding:
    was, fits = name_of({loss.fact: loss.configured}), name_of({loss.fact: loss.trained})
    if not loss.proven:
        return Finding(
            slug,
            "note",
            f"Configured with {was}, trained with {fits} as it seems, but it makes no measurable difference on this "
            f"text ({_gain(loss.difference)} tokens a round).",
            _evidence(loss, swept),
        )
    assert loss.score is not None
    rivals = [r for r in _rivals(loss, swept, num_layers, told.named) if r.cause != slug]
    if loss.fact in ("taps", "residual_kept") and not _every_tap(swept, num_layers) and _makeshift(loss):
        rivals.append(Rival("taps-differ", "states of the layers that are not among those at hand"))
    if loss.fact == "taps" and (absent := _half_tried(loss.trained, told, swept)):
        rivals.append(Rival("taps-differ", f"states of layers {absent}, which one reader takes the ids for"))
    if loss.fitting.kept_per_slot < HARDLY_ALIVE:
        rivals.append(Rival("quality-low", "a drafter that is worth something once mended: more may be wrong with it"))
    kept = loss.score.kept_per_slot
    fatal = kept < DEADLY * (kept + (loss.difference.value or 0.0))
    return Finding(
        slug,
        "fatal" if fatal else "likely",
        f"Configured with {was}; the weights fit {fits}: {1 + kept:.2f} tokens a round as configured, "
        f"{1 + kept + (loss.difference.value or 0):.2f} as they fit.",
        _evidence(loss, swept),
        rivals=rivals,
    )


def _half_tried(trained: Sequence[Any], told: Told, swept: Sweep) -> str:
    """Taps not at hand of a reader's list that agrees with what fits where it could be tried."""
    stored = set(swept.confirm.stock.taps)
    lists = [taps for lists in told.taps_by_reader.values() for taps in lists if not set(taps) <= stored]
    half = [taps for taps in lists if any(a == b for a, b in zip(taps, trained, strict=False))]
    return ", ".join(str(t) for t in sorted({t for taps in half for t in taps} - stored))


def _every_tap(swept: Sweep, num_layers: int) -> bool:
    return {*range(num_layers + 1)} <= set(swept.confirm.stock.taps)


def _makeshift(loss: Loss) -> bool:
    """Whether what fits best is a drafter made do with less: a slot left empty, a residual left out."""
    return loss.fact == "residual_kept" or None in loss.trained


def _evidence(loss: Loss, swept: Sweep) -> list[Evidence]:
    source = f"{len(loss.fitting.kept)} slots of {_units(swept)} that chose nothing"
    return [
        Evidence(loss.fact, loss.configured, loss.trained, "the reading that fits best"),
        Evidence("tokens a round gained", _rounded(loss.difference), "interval above 0", source),
        Evidence("standard errors of it", round(loss.z, 1), f"> {variants.threshold(swept.tried):.1f}, or", source),
        Evidence(
            "standard errors by which the truth is likelier",
            round(loss.log_z, 1),
            f"> {variants.threshold(swept.tried):.1f} with {variants.SUSPECT} of the tokens gained",
            source,
        ),
        Evidence("readings tried", swept.tried, None, "sweep"),
    ]


def _units(swept: Sweep) -> str:
    records = len({i for chunk in swept.confirm.chunks for i in chunk.batch.index})
    return f"{records} records" if swept.by_record else f"{swept.confirm.units} stretches of {records} records"


def _rivals(loss: Loss, swept: Sweep, num_layers: int, named: bool) -> list[Rival]:
    """What the slots do not tell from the winner, of the pass in which this fact was found."""
    rivals = []
    for done in swept.passes:
        if done.winner is None or loss.fact not in done.winner.changes:
            continue
        for tie in done.ties:
            rivals += _as_rivals(tie, done.base, num_layers, named)
    return rivals


def _as_rivals(tie: Trial, base: Mapping[str, Any], num_layers: int, named: bool) -> list[Rival]:
    found = []
    for fact, value in tie.changes.items():
        slug = (
            "d2t-stale"
            if fact == "vocab_map"
            else cause_of(fact, base[fact], value, num_layers=num_layers, named=named)
        )
        if slug is not None:
            found.append(Rival(slug, f"more records: {tie.name} fits as well on these"))
    return found


def _by_reader(
    loss: Loss, readers: Sequence[str], taps: Mapping[str, Sequence[Sequence[int]]], swept: Sweep
) -> Finding:
    told = "; ".join(f"{reader} reads {', '.join(str(list(t)) for t in lists)}" for reader, lists in taps.items())
    return Finding(
        "taps-ambiguous",
        "note",
        f"The layer ids can be counted in two ways; the weights fit taps {list(loss.trained)}, as "
        f"{' and '.join(readers)} would read them ({told}).",
        _evidence(loss, swept),
    )


def _nothing_better(case: Case, swept: Sweep) -> None:
    last = swept.passes[-1] if swept.passes else None
    if last is None or last.confirmed.kept_per_slot >= ALIVE:
        return
    case.not_checked.append(
        NotChecked(
            "wiring",
            f"the drafter is all but dead as it is read ({1 + last.confirmed.kept_per_slot:.2f} tokens a round) and "
            f"none of {swept.tried} other readings wakes it: weights never trained or overwritten, states "
            "it was not trained on, or a fault outside of what is tried here",
            needed=True,
        )
    )


def _suspects(case: Case, swept: Sweep) -> None:
    """Readings that may fit better: too little text to say so, too much to call the drafter sound."""
    for trial in swept.passes[-1].trials if swept.passes else ():
        if trial.outcome == "suspect" and trial.difference is not None:
            case.not_checked.append(
                NotChecked(
                    "wiring",
                    f"{trial.name} may fit better ({_gain(trial.difference)} tokens a round, {trial.z:.1f} standard "
                    f"errors where {variants.threshold(swept.tried):.1f} prove it): more records would tell",
                    needed=True,
                )
            )


def _unseen(case: Case, swept: Sweep) -> None:
    """Where no contract of these very weights vouches for the files, too little text clears nobody."""
    contract = case.files.contract if case.files else None
    if contract is not None and not any(f.cause == "weights-changed" for f in case.findings):
        return
    last = swept.passes[-1] if swept.passes else None
    if last is None or last.winner is not None:
        return
    open_ = [
        t
        for t in last.trials
        if t.outcome == "equal" and t.difference is not None and t.difference.high is not None
        and t.difference.high > MISSED * (1 + last.confirmed.kept_per_slot)
    ]  # fmt: skip
    if not open_:
        return
    most = max(open_, key=lambda t: (t.difference.high or 0.0) if t.difference else 0.0)
    assert most.difference is not None
    case.not_checked.append(
        NotChecked(
            "wiring",
            f"on {len(last.confirmed.kept)} slots it cannot be excluded that {most.name} fits better "
            f"({_gain(most.difference)} tokens a round), and no contract vouches for these files: more text would tell",
            needed=True,
        )
    )


def _gain(difference: Difference) -> str:
    low, high = difference.low, difference.high
    interval = "" if low is None or high is None else f", {low:+.3f} to {high:+.3f}"
    return f"{difference.value or 0.0:+.3f}{interval}"


def _rounded(difference: Difference) -> list[float | None]:
    return [None if v is None else round(v, 4) for v in (difference.value, difference.low, difference.high)]


# -- as it is printed and stored ------------------------------------------------------------------------------


def to_json(swept: Sweep, num_layers: int, named: bool) -> dict[str, Any]:
    return {
        "records": len({i for pool in (swept.screen, swept.confirm) for c in pool.chunks for i in c.batch.index}),
        "slots": swept.confirm.slots,
        "draft_tokens": swept.confirm.depths,
        "tried": swept.tried,
        "seconds": round(swept.seconds, 1),
        "passes": [_pass_json(done, num_layers, named) for done in swept.passes],
    }


def _pass_json(done: variants.Pass, num_layers: int, named: bool) -> dict[str, Any]:
    order = {name: i for i, name in enumerate(get_args(variants.Outcome))}
    trials = sorted(done.trials, key=lambda t: (order[t.outcome], -t.screened.kept_per_slot, -t.screened.log_p))
    taps = done.taps
    return {
        "base": {"facts": done.base},
        "kept_per_slot": done.confirmed.kept_per_slot,
        "variants": [_trial_json(t, done.base, num_layers, named) for t in trials],
        "taps": None
        if taps is None
        else {
            "slots": [
                {"slot": i, "configured": c, "best": b}
                for i, (c, b) in enumerate(zip(taps.configured, taps.best, strict=True))
            ],
            "taps": list(taps.taps),
            "of_slots": taps.slots,
            "log_probability": taps.log_probability,
            "kept": taps.kept,
        },
    }


def _trial_json(trial: Trial, base: Mapping[str, Any], num_layers: int, named: bool) -> dict[str, Any]:
    fact, value = next(iter(trial.changes.items()))
    single = len(trial.changes) == 1 and fact != "vocab_map"
    slug = cause_of(fact, base.get(fact), value, num_layers=num_layers, named=named) if single else None
    confirmed = None
    if trial.confirmed is not None and trial.difference is not None and trial.z is not None:
        confirmed = {"slots": len(trial.confirmed.kept), "difference": trial.difference.to_json(),
                     "z": round(trial.z, 2)}  # fmt: skip
    return {
        "name": trial.name,
        "facts": trial.changes,
        "cause": slug,
        "screened": {
            "slots": len(trial.screened.kept),
            "kept": int(trial.screened.kept.sum()),
            "base_kept": int(trial.base.kept.sum()),
            "log_probability": round(trial.screened.log_p, 4),
            "base_log_probability": round(trial.base.log_p, 4),
        },
        "confirmed": confirmed,
        "outcome": trial.outcome,
    }
