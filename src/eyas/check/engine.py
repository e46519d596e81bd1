"""What the engine asked about would do with these files, and how a contract is spelled for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from eyas.check.case import Case
from eyas.check.sweep import found
from eyas.checkpoint import Checkpoint
from eyas.contract import Contract, from_json
from eyas.dialects import engines
from eyas.dialects.wiring import CannotExpress, Files, Runner, TargetFacts
from eyas.errors import CheckpointError
from eyas.results import NotChecked
from eyas.show import judge, keys, read_files, spelling, understand
from eyas.target import Target

# Spelled for when no engine was asked about: the newest of both, and SGLang builds that count layers otherwise.
USUAL = ("vllm", "sglang", "sglang==0.5.12.post1", "sglang==0.5.12.post1+minus-one")


def judge_engine(
    case: Case,
    engine: str,
    runner: Runner | None = None,
    flags: Sequence[str] = (),
    target: TargetFacts | None = None,
) -> None:
    """The contract as ``engine`` (NAME[==VERSION]) wires it against the drafter's own, and what became of its flags.

    What was only inferred of the drafter proves nothing against an engine: such a finding is a note. Raises UsageError
    for an unknown engine and for flags that are none.
    """
    asked = engines.asked(engine, runner, tuple(flags))
    if case.files is None:
        case.not_checked.append(NotChecked("engine", "the files cannot be read"))
        return
    folder = case.files.folder
    try:
        files = read_files(folder)
        meant, _ = understand(files, folder, target)
        host = target or engines.host_of(meant.contract)
        all_found = keys.findings(files, meant, host)
        for one in engines.each_runner([asked]):
            all_found += judge(meant, one.dialect.wire(files, host, one.launch), files, host, one)
    except CheckpointError as error:
        case.not_checked.append(NotChecked("engine", error.message))
        return
    told = {finding.cause for finding in case.findings if finding.cause in ("contract-missing", "ids-odd")}
    for finding in all_found:
        if finding.cause in told and finding.severity == "note":
            continue
        if finding.rivals and finding.severity == "likely":
            finding = replace(finding, severity="note")
        if finding not in case.findings:
            case.findings.append(finding)


def spelled_for(engine: str | None, contract: Contract, config: Mapping[str, Any], target: TargetFacts | None) -> str:
    """The keys to write so that ``engine`` wires ``contract``, a line an engine; of the usual ones where it is None.

    An engine that cannot express it is named with the nearest that it has.
    """
    host = target or engines.host_of(contract)
    if host is None:
        return "How layers are spelled depends on the target: pass --target with its folder or config.json."
    lines: dict[str, list[str]] = {}
    for name in USUAL if engine is None else (engine,):
        asked = engines.asked(name)
        try:
            words = spelling.in_full(asked.dialect, contract, config, host, asked.launch)
        except CannotExpress as refused:
            missing = "; ".join(f"{f.fact} {f.wanted}, nearest {f.nearest} ({f.why})" for f in refused.facts)
            words = f"cannot be written for it: {missing}."
        lines.setdefault(words, []).append(f"{asked.name} {asked.launch.version}")
    return "\n".join(f"{', '.join(names)}: {words}" for words, names in lines.items())


def layers_meant(files: Checkpoint, engine: str, target: Target) -> tuple[int, ...] | None:
    """The taps that the ids of the config are to ``engine``; None where it cannot say."""
    asked = engines.asked(engine)
    host = target.facts
    with suppress(CheckpointError):
        return asked.dialect.wire(Files(files.config, files.inventory.tensors), host, asked.launch).taps
    return None


# Facts that a config spells; the others are in the weights or in the engine.
SPELLED = frozenset({"taps", "rope", "feedback", "fc_norm", "residual", "window"})


def spell_fixes(case: Case, engine: str | None, target: Target) -> None:
    """Give the measured findings about what a config spells the exact keys to write, as the drafter fits."""
    assert case.files is not None
    facts = {loss.fact for loss in case.lost if loss.proven} & SPELLED
    contract = fitting(case)
    if not facts or contract is None:
        return
    host = target.facts
    try:
        words = spelled_for(engine, contract, case.files.config, host)
    except CheckpointError as error:
        words = f"It cannot be spelled here: {error.message}"
    case.findings = [
        replace(f, fix=f"{f.fix}\n{words}")
        if f.severity != "note" and f.evidence and f.evidence[0].measure in facts
        else f
        for f in case.findings
    ]


def fitting(case: Case) -> Contract | None:
    """The contract of the reading that fits, as far as a contract can say it."""
    told = found(case)["contract"]
    if told is None:
        return None
    contract = from_json(told, case.name)
    kept = {
        name: fact
        for name, fact in contract.facts.items()
        if not (name == "vocab_map" and fact.value not in ("offsets", "ids", "none"))
        and not (name == "taps" and any(not isinstance(t, int) for t in fact.value))
    }
    return Contract(kept) if "taps" in kept else None
