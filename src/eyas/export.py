"""A drafter written so that one engine wires it as it was trained, and read back through that engine's dialect.

files -> contract -> the engine's config -> weights under the usual names -> what it would wire -> no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas import checkpoint, files, gguf_export, provenance
from eyas import contract as contracts
from eyas.contract import Contract
from eyas.dialects import engines, hf
from eyas.dialects.engines import Asked
from eyas.dialects.wiring import Files, TargetFacts
from eyas.errors import CheckpointError, UsageError
from eyas.results import Finding
from eyas.show import faults, read_files, understand
from eyas.show import show as show_drafter

GGUF_ENGINES = ("llama.cpp",)  # these read one file, not a folder


@dataclass(frozen=True)
class Exported:
    out: Path
    engine: str
    contract: Contract
    renamed: Mapping[str, str]
    """Names of tensors in the source that are written under another one."""
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...]
    """Notes of the reading back; anything graver was refused."""

    def to_json(self) -> dict[str, Any]:
        return {
            "out": self.out.name,
            "engine": self.engine,
            "contract": self.contract.to_json(),
            "renamed": dict(self.renamed),
            "left_out": list(self.left_out),
            "findings": [finding.to_json() for finding in self.findings],
        }


def export(
    source: Path,
    to: Asked,
    out: Path,
    *,
    target: TargetFacts | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    arguments: Mapping[str, object] | None = None,
) -> Exported:
    """Write the drafter in ``source`` for one engine. Raises CannotExpress, naming the facts, where it cannot.

    ``tokenizer``: the target's folder or GGUF, needed where a drafter's file holds it (llama.cpp).
    """
    require_apart(source, out)
    files.refuse_existing(out, overwrite=overwrite)
    given = read_files(source)
    meant, _ = understand(given, source, target)
    host = require_known(meant.contract, meant.ambiguous, target, source)
    if to.name in GGUF_ENGINES:
        return _as_gguf(source, to, out, meant.contract, host, tokenizer)
    config = to.dialect.write(meant.contract, given.config, host, to.launch)
    tensors, renamed, left_out = usual_tensors(source, given, meant.contract)
    with files.sole_writer(out), files.atomic_folder(out) as folder:
        _write(folder, tensors, config, meant.contract, arguments or {})
        findings = read_back(folder, to, host)
    return Exported(out, _words(to), meant.contract, renamed, left_out, findings)


def require_apart(source: Path, out: Path) -> None:
    if out.resolve() == source.resolve() or source.resolve() in out.resolve().parents:
        raise UsageError(
            f"{out} is the drafter itself; an export onto its source could lose both.",
            way_out="Name another folder with --out.",
        )


def require_known(contract: Contract, ambiguous: Any, target: TargetFacts | None, source: Path) -> TargetFacts:
    """The target to write for. What an engine must be told has to be known, not guessed."""
    if unknown := [ambiguity for ambiguity in ambiguous if ambiguity.fact not in contract]:
        facts = "; ".join(f"{a.fact} may be {' or '.join(str(list(v)) for v in a.values)}" for a in unknown)
        raise CheckpointError(
            f"{source.name} does not say how it was trained: {facts}.",
            way_out=f"{unknown[0].separate} Then write the answer into its config.json, or export with a contract.",
        )
    host = target or engines.host_of(contract)
    if host is None:
        raise UsageError(
            f"{source.name} names no target, and how layers are spelled depends on it.",
            way_out="Pass --target with the target's folder or its config.json.",
        )
    return host


def usual_tensors(
    source: Path, given: Files, contract: Contract
) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """Every tensor under the name all engines read; the maps of a draft vocabulary that is the whole one left out."""
    if given.tensors is None:
        raise CheckpointError(
            f"{source} holds a config and no weights.", way_out="Name the folder that has both: weights are copied."
        )
    tensors, names = checkpoint.every_tensor(source)
    whole = contract["vocab_map"] == "none" if "vocab_map" in contract else False
    left_out = tuple(name for name in ("d2t", "t2d") if whole and name in tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    renamed = {theirs: ours for ours, theirs in names.items() if ours != theirs and ours in kept}
    return kept, renamed, left_out


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    contract: Contract,
    arguments: Mapping[str, object],
) -> None:
    weights = folder / "model.safetensors"
    checkpoint.write_tensors(tensors, weights, {"format": "pt"})
    config[hf.KEY] = {
        "schema": contracts.SCHEMA,
        "contract": contract.to_json(),
        "weights_sha256": provenance.sha256_file(weights),
    }
    files.write_json(folder / "config.json", config)
    files.write_json(folder / "provenance.json", provenance.collect(dict(arguments)))


def read_back(folder: Path, to: Asked, target: TargetFacts) -> tuple[Finding, ...]:
    """What the engine would make of what was written. A grave finding is a fault of the writing, never let through."""
    findings = show_drafter(folder, [to], target=target).findings
    grave = [finding for finding in findings if finding.severity != "note"]
    if grave:
        told = "; ".join(finding.summary for finding in grave)
        raise CheckpointError(
            f"{_words(to)} would not wire what was written as the contract says: {told}",
            way_out=grave[0].fix or "Nothing was written.",
        )
    return findings


def _as_gguf(
    source: Path, to: Asked, out: Path, contract: Contract, target: TargetFacts, tokenizer: Path | None
) -> Exported:
    """One file with the target's tokenizer in it; ``gguf_export`` reads it back tensor by tensor."""
    if tokenizer is None:
        raise UsageError(
            f"{to.name} keeps the target's tokenizer in a drafter's file.",
            way_out="Pass --target with the target's folder (its tokenizer.json) or its GGUF.",
        )
    with files.sole_writer(out):
        gguf_export.write(source, out, contract, target, to.launch, tokenizer)
    wired = to.dialect.wire(gguf_export.read(out), target, to.launch)
    differing = faults.differences(contract, wired, target, lambda fact: None)
    assert not differing, [finding.summary for finding in differing]
    return Exported(out, _words(to), contract, {}, (), ())


def _words(to: Asked) -> str:
    return f"{to.name} {to.launch.version}"
