"""What a running engine does with a drafter, against what should come of it: the same text through both.

The engine serves some prompts greedily, a probe beside its drafter records what that was fed and drafted (``collect``);
then the files are checked on the very text that was served, every stage of the drafter is compared with the reference,
the gap between what is kept and what should be is measured and, fault by fault, explained (``diagnose``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.check import Case, check
from eyas.check.losses import same
from eyas.curve import Measured
from eyas.diagnose import curves, findings, outputs, stage_findings, text
from eyas.diagnose import probes as stages
from eyas.diagnose.curves import Counted, Gap
from eyas.diagnose.probes import Probed
from eyas.diagnose.reference import NEAR, Reference
from eyas.diagnose.repairs import Repairs, repairs
from eyas.diagnose.result import Diagnosis
from eyas.diagnose.served import Served, records, served
from eyas.diagnose.tables import ask_tables
from eyas.engines import recording
from eyas.engines.live import About, Answer, Counters, Engine
from eyas.engines.recording import Turn
from eyas.errors import InputError
from eyas.results import EXPECT, EXPECT_DRAFT_TOKENS, Evidence, Finding, NotChecked, judge
from eyas.states.live import LiveStock
from eyas.target import Target

__all__ = ["Collected", "Diagnosis", "collect", "diagnose"]

MOST_BYTES = 2 << 30  # that a probe may write
HARMLESS = ("target-quantised", "positions-off-by-one")  # as notes they explain why tensors differ
LEFT = 0.1  # tokens a round; a gap that the faults leave unexplained by more is one more fault


@dataclass(frozen=True, eq=False)
class Collected:
    """What came out of an engine. ``page``: its counters over just these requests; ``probe`` what the probe says of
    itself; ``prompt`` how its own rendering of the chats compares with ours."""

    about: About
    answers: Sequence[Answer]
    turns: Mapping[str, Sequence[Turn]]
    page: Counters | None
    max_tokens: int
    temperature: float
    probe: Mapping[str, Any] = field(default_factory=dict)
    prompt: Mapping[str, Any] | None = None
    seconds: float = 0.0


def collect(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    prompt: Mapping[str, Any] | None = None,
    most_bytes: int = MOST_BYTES,
    heard: Callable[[int], None] = lambda done: None,
) -> Collected:
    """Let a ready engine answer ``prompts``, probed where it is one of ours."""
    began = time.monotonic()
    before = engine.metrics()
    turns: dict[str, list[Turn]] = {}
    told: Mapping[str, Any] = {}
    if engine.about.mode == "launched" and probeable(engine):
        with tempfile.TemporaryDirectory(prefix="eyas-probe-") as folder:  # 0700, gone afterwards
            with engine.probe(Path(folder), most_bytes) as told:
                answers = engine.generate(prompts, max_tokens, temperature=temperature, heard=heard)
            if told.get("error"):
                engine.about.unseen.append(f"passes after number {told.get('passes')}: {told['error']}")
            turns = recording.read(Path(folder))
    else:
        answers = engine.generate(prompts, max_tokens, temperature=temperature, heard=heard)
    after = engine.metrics()
    page = after.since(before) if after is not None and before is not None else None
    return Collected(
        engine.about, answers, turns, page, max_tokens, temperature, dict(told), prompt, time.monotonic() - began
    )


def probeable(engine: Engine) -> bool:
    """Whether its drafter is one that fuses taps; what is not is said."""
    drafter = engine.about.model.get("drafter")
    if drafter and "Eagle3" in drafter:
        return True
    what = f"{drafter} is no EAGLE-3 drafter" if drafter else "no drafter was found in its worker"
    engine.about.unseen.append(f"what the drafter is fed and drafts: {what}")
    return False


def diagnose(
    folder: Path,
    target: Target,
    collected: Collected,
    *,
    name: str | None = None,
    draft_tokens: int = EXPECT_DRAFT_TOKENS,
    expect: float = EXPECT,
    flags: Sequence[str] = (),
    evidence: Sequence[Callable[[Case], None]] = (),
    arguments: Mapping[str, object] | None = None,
    heard: Callable[[str], None] = lambda what: None,
) -> Diagnosis:
    """Judge what was collected of the drafter in ``folder``."""
    began = time.monotonic()
    texts = [t for t in served(collected.answers, collected.turns) if len(t.answer) > 1]
    if not texts:
        raise InputError(
            "The engine answered with no text to compare.", way_out="Give other prompts, or more --max-new-tokens."
        )
    case = Case(name or folder.name)
    stock = LiveStock(target, records(texts))
    heard("checking the files on the served text")
    checked = check(
        folder,
        target,
        stock.records,
        live=stock,
        name=name,
        draft_tokens=max(draft_tokens, EXPECT_DRAFT_TOKENS),
        expect=expect,
        sweeping="doubts",
        engine=collected.about.asked,
        arguments=arguments,
        evidence=(*evidence, lambda case: None),
        tried=heard,
        case=case,
    )
    files = list(case.findings)
    ask_tables(case, collected.about, flags, target)
    engine = [f for f in case.findings if f not in files]
    result = Diagnosis(checked, collected.about, _served(collected, draft_tokens, time.monotonic() - began))
    reference = _reference(case, target, stock, texts, collected.about)
    if reference is None:
        live = list(stage_findings.of_resolved(collected.about.resolved))
        _conclude(result, findings.merged(live, files, engine, proven=False), case, expect)
        return result
    result.facts = dict(reference.facts)
    mended = _compare(result, reference, collected, case.measured, draft_tokens, heard)
    live = [*stage_findings.of_resolved(collected.about.resolved), *_live(result, reference, case, mended)]
    proven = result.probes is not None and stages.first_apart(result.probes) in (None, "metrics")
    everything = findings.merged(live, _without_worth(files), engine, proven)
    _conclude(result, everything, case, expect)
    result.served |= text.compared(reference)
    result.conversations = text.conversations(reference)
    result.served["seconds"]["total"] = round(time.monotonic() - began + collected.seconds, 1)
    return result


# -- steps ----------------------------------------------------------------------------------------------------------


def _reference(case: Case, target: Target, stock: LiveStock, texts: Sequence[Served], about: About) -> Reference | None:
    """The drafter as it was trained: as measured, where files had to be doubted, else as its contract says."""
    if case.parts is None or case.told is None:
        return None
    facts = case.swept.best if case.swept is not None else case.told.declared
    precision = str(about.model.get("dtype") or about.resolved.get("model.dtype", "")).replace("torch.", "")
    near = max(NEAR.get(precision, NEAR["bfloat16"]), NEAR[str(target.dtype).replace("torch.", "")])
    return Reference(target, case.parts, facts, case.told.configured, stock, texts, near)


def _compare(
    result: Diagnosis,
    reference: Reference,
    collected: Collected,
    measured: Measured | None,
    draft_tokens: int,
    heard: Callable[[str], None],
) -> Repairs | None:
    """Curves, gap, probes, and what each fault is worth. ``measured`` is as the files are spelled."""
    heard("running the target over the served text")
    as_trained = all(same(reference.spelled.get(fact), value) for fact, value in reference.facts.items())

    def walk(K: int) -> Counted | None:
        if measured is not None and as_trained:
            return curves.of_walk(measured, reference.stock.records, K)
        return curves.walked(reference, reference.facts, K)

    expected = walk(draft_tokens)
    result.at_4 = expected if draft_tokens == EXPECT_DRAFT_TOKENS else walk(EXPECT_DRAFT_TOKENS)
    observed = _observed(reference, collected, draft_tokens)
    result.expected, result.observed = expected, observed
    if observed is not None and observed.source == "metrics":
        result.others = curves.others(observed, [len(t.answer) for t in reference.texts])
    if expected is not None and observed is not None and not result.others:
        result.gap = curves.gap(expected, observed)
    if not any(t.rounds for t in reference.texts) or observed is None:
        return None
    probed = stages.probe(reference, observed, collected.page, collected.prompt, collected.temperature, heard)
    result.probes = {**probed.to_json(), "bytes": collected.probe.get("bytes")}
    if not probed.faults or expected is None:
        return None
    heard("mending one fault after another in the reference")
    mended = repairs(reference, probed.faults, expected, draft_tokens)
    result.repairs = _ladder(mended, probed, reference)
    if mended.as_is is not None and mended.as_is.length.value is not None and expected.length.value is not None:
        result.explained = expected.length.value - mended.as_is.length.value
    return mended


def _observed(reference: Reference, collected: Collected, draft_tokens: int) -> Counted | None:
    if any(t.rounds for t in reference.texts):
        truths = reference.truths() if collected.temperature == 0 else None
        return Counted(*outputs.counted(reference.texts, draft_tokens, truths), "probe")
    by_request = {a.request: a for a in collected.answers}
    told = [by_request[t.request] for t in reference.texts]
    if all(a.rounds is not None and a.accepted is not None for a in told):
        rounds = np.array([a.rounds for a in told])
        hits = np.zeros((len(told), draft_tokens), dtype=np.int64)
        for i, answer in enumerate(told):
            got = (answer.accepted or ())[:draft_tokens]
            hits[i, : len(got)] = got
        return Counted(rounds, hits, "metrics")
    return None


def _ladder(mended: Repairs, probed: Probed, reference: Reference) -> list[dict[str, Any]]:
    told = []
    for step in mended.steps:
        slug = findings.slug_of(
            step.fact,
            probed.faults[step.fact],
            reference.facts.get(step.fact),
            num_layers=reference.target.num_layers,
            named=True,
        )
        told.append(
            {
                "cause": slug,
                "fact": step.fact,
                "summary": f"{step.fact}: {text.plain(probed.faults[step.fact])} -> "
                f"{text.plain(reference.facts.get(step.fact))}",
                "reaches": step.reaches,
                "gain": step.gain.value,
                "low": step.gain.low,
                "high": step.gain.high,
            }
        )
    return told


def _live(result: Diagnosis, reference: Reference, case: Case, mended: Repairs | None) -> list[Finding]:
    if result.probes is None:
        return _unprobed(result)
    assert case.told is not None
    obeyed = _obeyed(case, result.probes.get("faults") or {})
    result.by_files = {fact: finding.cause for fact, finding in obeyed.items()}
    found = findings.of_probes(
        result.probes,
        reference.facts,
        num_layers=reference.target.num_layers,
        named=case.told.named,
        repairs=mended,
        by_files=obeyed,
        short=result.gap is not None and result.gap.proven,
    )
    return findings.in_order(found, result.repairs)


def _by_files(case: Case) -> dict[str, Finding]:
    """What the sweep measured of the files, by the fact it is about."""
    facts = {loss.fact for loss in case.lost}
    return {f.evidence[0].measure: f for f in case.findings if f.evidence and f.evidence[0].measure in facts}


def _obeyed(case: Case, faults: Mapping[str, Any]) -> dict[str, Finding]:
    """Those of them that the engine runs just as the files say."""
    configured = case.told.configured if case.told is not None else {}
    return {
        fact: finding
        for fact, finding in _by_files(case).items()
        if fact in faults and same(faults[fact], configured.get(fact))
    }


def _unprobed(result: Diagnosis) -> list[Finding]:
    """An engine that was only watched: it keeps what the files give, or less, and files cannot say why."""
    if result.others:
        summary = (
            f"The counters of {result.others} of {result.served['prompts']} requests hold other rounds than their "
            "answers have tokens for: others used the engine at the same time, so nothing is compared."
        )
        shown = Evidence("requests whose counts do not add up", result.others, 0, "metrics page, request by request")
        return [Finding("others-served", "note", summary, [shown])]
    gap = result.gap
    if gap is None or not gap.proven or gap.value is None:
        return []
    return [_falls_short(gap, result, [])]


def _falls_short(gap: Gap, result: Diagnosis, faults: Sequence[Finding]) -> Finding:
    assert result.expected is not None
    assert result.observed is not None
    shown = [None if v is None else round(v, 3) for v in (gap.value, gap.low, gap.high)]
    more = " beside what was found" if faults else ""
    return Finding(
        "engine-falls-short",
        "likely",
        f"On the same prompts the engine keeps {result.observed.length.value:.2f} a round and the reference "
        f"{result.expected.length.value:.2f}{more}: something in the engine costs {gap.value:.2f}.",
        [Evidence("expected minus observed", shown, "an interval that holds 0", "the same texts, in pairs")],
    )


def _without_worth(files: Sequence[Finding]) -> list[Finding]:
    """What the files' curve as configured was held against: here the engine is measured itself."""
    return [f for f in files if f.cause not in ("quality-low", "records-too-few")]


def _conclude(result: Diagnosis, everything: list[Finding], case: Case, expect: float) -> None:
    grave = [f for f in everything if f.severity != "note"]
    left = list(case.not_checked)
    gap = result.gap
    if gap is not None and gap.proven and result.probes is not None and gap.value is not None:
        unexplained = gap.value - (result.explained or 0.0)
        if unexplained > LEFT and not any(
            f.kind in ("metric", "engine", "rope", "data", "precision", "shift") for f in grave
        ):
            everything.append(_falls_short(gap, result, grave))
    for stage in ("taps", "fused", "states", "said", "feedback", "drafted"):
        told = (result.probes or {}).get(stage)
        if told and told["status"] == "differs" and not grave and not any(f.cause in HARMLESS for f in everything):
            left.append(NotChecked(stage, "the engine differs here and nothing that is known explains it", needed=True))
            break
    if result.others:
        left.append(NotChecked("observed", "others used the engine while it was asked", needed=True))
    if result.expected is None and result.served["temperature"] == 0:
        left.append(NotChecked("expected", "the served text is not the target's own greedy text, so no walk was made"))
    counted = result.at_4
    if counted is None and result.served["temperature"] > 0 and _stages_equal(result.probes):
        # Sampled text has no walk, and every stage was seen to be right. Weak is what greedy text alone can show.
        counted, expect = result.observed, 0.0
        left = [replace(n, needed=False) if n.what == "walk" else n for n in left]
    length = counted.length if counted is not None else None
    at_4 = length if length is not None and length.draft_tokens == EXPECT_DRAFT_TOKENS else None
    verdict = judge(everything, length_at_4=at_4, expect=expect, not_checked=left)
    result.checked = replace(result.checked, findings=everything, not_checked=left, verdict=verdict)


def _stages_equal(probes: Mapping[str, Any] | None) -> bool:
    return probes is not None and stages.first_apart(probes) in (None, "metrics") and bool(probes.get("acceptance"))


def _served(collected: Collected, draft_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "prompts": len(collected.answers),
        "tokens": sum(len(a.token_ids) for a in collected.answers),
        "max_tokens": collected.max_tokens,
        "temperature": collected.temperature,
        "draft_tokens": draft_tokens,
        "seconds": {"generate": round(collected.seconds, 1), "reference": round(seconds, 1)},
    }
