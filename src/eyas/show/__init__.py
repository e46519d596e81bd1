"""What will an engine do with this drafter? Told from its files, before anything is launched; no torch.

files -> what they mean (the contract) -> what each engine would wire -> the differences, each with its fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas import inventory, promised, provenance
from eyas.contract import Contract, Fact
from eyas.dialects import engines, hf, layouts, meaning
from eyas.dialects.engines import Asked
from eyas.dialects.meaning import Meaning
from eyas.dialects.wiring import Files, TargetFacts, Wiring
from eyas.engines.ask import Answer
from eyas.results import SCHEMA, Evidence, Finding, eyas_version, graver_first
from eyas.show import faults, keys, spelling
from eyas.show.asked import over
from eyas.show.record import wiring_json


@dataclass(frozen=True)
class Shown:
    """``engines`` holds a table's wiring and, where the engine was asked itself, its own beside it."""

    checkpoint: str
    meaning: Meaning
    target: TargetFacts | None
    engines: tuple[Wiring, ...]
    findings: tuple[Finding, ...]
    arguments: Mapping[str, object]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "eyas": eyas_version(),
            "checkpoint": self.checkpoint,
            "contract": self.meaning.contract.to_json(),
            "spelled_by": self.meaning.spelled_by,
            "why": self.meaning.why,
            "target": None if self.target is None else _target_json(self.target),
            "engines": [wiring_json(wiring) for wiring in self.engines],
            "findings": [finding.to_json() for finding in self.findings],
            "provenance": provenance.collect(dict(self.arguments)),
        }

    @property
    def miswired(self) -> bool:
        return any(finding.severity != "note" for finding in self.findings)


def show(
    checkpoint: Path,
    asked: Sequence[Asked] = (),
    *,
    name: str | None = None,
    target: TargetFacts | None = None,
    answers: Mapping[str, Answer] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Shown:
    """The contract of a drafter's files, and what each engine asked about makes of them.

    ``checkpoint`` is a folder or a lone config.json. ``answers``: what installed engines said, by engine.
    """
    files = read_files(checkpoint)
    meant, findings = understand(files, checkpoint, target)
    host = target or engines.host_of(meant.contract)
    findings += keys.findings(files, meant, host)
    wirings: list[Wiring] = []
    for one in engines.each_runner(asked):
        table = one.dialect.wire(files, host, one.launch)
        installed = (answers or {}).get(one.name)
        told = table if installed is None else over(installed, table)
        wirings += [table] if told is table else [table, told]
        findings += _disagreement(table, told) + judge(meant, told, files, host, one)
    return Shown(name or checkpoint.name, meant, host, tuple(wirings), tuple(graver_first(findings)), arguments or {})


def read_files(checkpoint: Path) -> Files:
    found = inventory.glance(checkpoint)
    return Files(found.config, found.tensors)


def understand(files: Files, checkpoint: Path, target: TargetFacts | None) -> tuple[Meaning, list[Finding]]:
    """The contract the files declare or imply. Declared of other weights than these, it is only inferred."""
    meant = doubted(meaning.meaning(files, target, checkpoint.name))
    _, digest = hf.read_contract(files.config, checkpoint.name)
    changed = promised.weights_changed(checkpoint, digest)
    if changed is None:
        return meant, []
    return replace(meant, contract=meant.contract.with_origin("inferred")), [changed]


# Facts spelled by keys that trainers and engines read in different ways: who wrote them decides what they say.
READ_IN_SEVERAL_WAYS = ("taps", "feedback", "head_norm")
SIGNED = ("eyas", "speculators")  # formats that name themselves; of others the trainer is recognised by its habits


def doubted(meant: Meaning) -> Meaning:
    """Where the trainer was only recognised, what hangs on who it was is inferred, however plainly a key is written."""
    if meant.spelled_by in SIGNED:
        return meant
    facts = dict(meant.contract.facts)
    for name in READ_IN_SEVERAL_WAYS:
        if name in facts and facts[name].origin == "declared":
            facts[name] = Fact(facts[name].value, "inferred")
    return replace(meant, contract=Contract(facts))


def judge(meant: Meaning, wiring: Wiring, files: Files, target: TargetFacts | None, asked: Asked) -> list[Finding]:
    """Findings about one engine, gravest first within each kind."""
    fix = spelling.fixer(asked.dialect, meant.contract, files, target, asked.launch)
    found = faults.refusals(wiring)
    trained = without_twins(meant.contract, files)
    differing = faults.differences(trained, wiring, target, fix)
    found += differing + faults.lost_tensors(wiring, differing) + faults.flags(wiring)
    found += faults.warnings(wiring, found)
    if differing and meant.spelled_by == "eyas":
        found.append(_edited(meant.contract, wiring, differing))
    return found + faults.ambiguities(meant, wiring)


def without_twins(contract: Contract, files: Files) -> Contract:
    """Without ``later_norm`` where the files hold that norm under both names: then every engine finds the same one."""
    if "later_norm" not in contract or files.tensors is None:
        return contract
    names = layouts.read(files.tensors, "checkpoint").names
    later = [f"layers.{i}." for i in range(1, contract["layers"])] if "layers" in contract else []
    norms = [f"{layer}{norm}.weight" for layer in later for norm in ("input_layernorm", "hidden_norm")]
    if not later or any(norm not in names for norm in norms):
        return contract
    return Contract({name: fact for name, fact in contract.facts.items() if name != "later_norm"})


def _edited(contract: Contract, wiring: Wiring, differing: Sequence[Finding]) -> Finding:
    facts = [piece.measure.split(" in ")[0] for finding in differing for piece in finding.evidence[:1]]
    return Finding(
        "contract-edited",
        "note",
        f"The eyas contract and the keys that {faults.engine_words(wiring)} reads disagree about {', '.join(facts)}: "
        "one of them was edited, or this engine has no spelling for it.",
        [Evidence("facts that differ", facts, [], "config.json")],
    )


def _disagreement(table: Wiring, told: Wiring) -> list[Finding]:
    if told.taps == table.taps:
        return []
    return [
        Finding(
            "table-outdated",
            "note",
            f"The installed {faults.engine_words(told)} captures taps {faults.shown(told.taps)}; the table of eyas, "
            f"read from {table.version}, says {faults.shown(table.taps)}. The engine's word is taken.",
            [Evidence("taps", faults.shown(told.taps), faults.shown(table.taps), "asked of the installed engine")],
        )
    ]


def _target_json(target: TargetFacts) -> dict[str, Any]:
    return {
        "architecture": target.architecture,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
