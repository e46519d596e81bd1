"""What the files of a drafter leave to be said, without a weight read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas import provenance
from eyas.checkpoint.folder import EMBEDDING, Checkpoint, expected_shapes, twins
from eyas.dialects import layouts, rope, sglang, vllm
from eyas.drafter import SWITCHES
from eyas.results import Evidence, Finding
from eyas.target import Target

_IDS = "eagle_aux_hidden_state_layer_ids"


def inspect(checkpoint: Checkpoint, target: Target | None) -> list[Finding]:
    """Findings from names, shapes and keys alone; with a target also whether the two fit each other."""
    shape, name = checkpoint.shape, checkpoint.folder.name
    wanted = expected_shapes(shape)
    there = {ours: checkpoint.inventory.tensors[theirs] for ours, theirs in checkpoint.tensors.items()}
    findings = []
    reduced = shape.draft_vocab_size < shape.vocab_size
    missing = [n for n in wanted if n not in there and n != "t2d" and (n != "d2t" or reduced)]
    findings += [_missing(cause, names, name) for cause, names in _by_cause(missing).items()]
    wrong = [n for n in wanted if n in there and there[n].shape != wanted[n]]
    if wrong:
        findings.append(
            Finding(
                "weights-shape",
                "fatal",
                "; ".join(f"{n} is {list(there[n].shape)}, config.json asks for {list(wanted[n])}" for n in wrong),
                [
                    Evidence(f"shape of {n}", list(there[n].shape), list(wanted[n]), "headers of the checkpoint")
                    for n in wrong
                ],
            )
        )
    surplus = sorted(set(there) - set(wanted) - set(twins(shape)))
    if surplus:
        findings.append(
            Finding(
                "weights-unexpected",
                "note",
                f"{name} holds tensors nothing here uses: {', '.join(surplus[:6])}"
                + (f" and {len(surplus) - 6} more" if len(surplus) > 6 else ""),
                [Evidence("tensors not used", surplus, [], "headers of the checkpoint")],
            )
        )
    if target is not None:
        findings += _fits(checkpoint, target)
    return findings + _engines(checkpoint, target) + _keys(checkpoint)


def _by_cause(missing: list[str]) -> dict[str, list[str]]:
    """The head, the map and norms have faults of their own; the rest is simply not there."""
    found: dict[str, list[str]] = {}
    for name in missing:
        norm = name.endswith(("norm.weight", "layernorm.weight")) or name.startswith("fc_norm.")
        alone = {"lm_head.weight": "head-missing", "d2t": "d2t-missing"}.get(name)
        found.setdefault(alone or ("norm-weight-missing" if norm else "weights-missing"), []).append(name)
    return dict(sorted(found.items(), key=lambda item: item[0] != "weights-missing"))


def _missing(cause: str, names: list[str], checkpoint: str) -> Finding:
    return Finding(
        cause,
        "fatal",
        f"{checkpoint} lacks {', '.join(names)}; engines would run on with random or default values in their place.",
        [Evidence("tensors missing", names, [], "headers of the checkpoint")],
    )


def _engines(checkpoint: Checkpoint, target: Target | None) -> list[Finding]:
    """What an engine cannot do with this drafter, however its config is written."""
    shape, contract = checkpoint.shape, checkpoint.contract
    findings = []
    architecture, layers = None, 0
    if contract is not None and "target" in contract:
        architecture, layers = contract["target"]["architecture"], contract["target"]["num_layers"]
    elif target is not None:
        architecture, layers = target.architecture, target.num_layers
    if architecture is not None and (reasons := sglang.refusals(shape.model_dump(), architecture, layers)):
        findings.append(
            Finding(
                "engine-cannot-express",
                "note",
                f"SGLang cannot serve this drafter as it was trained: {'; '.join(reasons)}.",
                [Evidence("what SGLang cannot express", reasons, [], "config.json")],
            )
        )
    names = {layouts.canonical(n) for n in checkpoint.inventory.tensors}
    single = {pair - names: pair & names for pair in map(frozenset, twins(shape).items()) if len(pair & names) == 1}
    if single:
        absent, present = ([n for group in side for n in group] for side in (single.keys(), single.values()))
        findings.append(
            Finding(
                "norm-weight-missing",
                "note",
                f"{', '.join(absent)} is not in the file beside {', '.join(present)}: vLLM reads input_layernorm "
                "there and SGLang hidden_norm, and the engine that misses its own runs with ones.",
                [Evidence("names of a later layer's norm", present, sorted(absent + present), "headers")],
            )
        )
    return findings


def _fits(checkpoint: Checkpoint, target: Target) -> list[Finding]:
    """Does this drafter belong to this target at all?"""
    shape = checkpoint.shape
    findings = []
    if shape.target_hidden_size != target.hidden_size:
        findings.append(
            Finding(
                "hidden-size-mismatch",
                "fatal",
                f"The drafter reads states {shape.target_hidden_size} wide; {target.spec} has {target.hidden_size}.",
                [Evidence("target hidden size", target.hidden_size, shape.target_hidden_size, "config.json")],
            )
        )
    elif shape.hidden_size != target.hidden_size and EMBEDDING not in checkpoint.tensors:
        findings.append(
            Finding(
                "hidden-size-mismatch",
                "fatal",
                f"The drafter is {shape.hidden_size} wide and brings no embedding; that of {target.spec} is "
                f"{target.hidden_size} wide.",
                [Evidence("embedding width", target.hidden_size, shape.hidden_size, "config.json")],
            )
        )
    if shape.vocab_size != target.vocab_size:
        findings.append(
            Finding(
                "target-vocab-mismatch",
                "fatal",
                f"The drafter's map counts {shape.vocab_size} target tokens; {target.spec} has {target.vocab_size}.",
                [Evidence("target vocabulary", target.vocab_size, shape.vocab_size, "config.json")],
            )
        )
    if max(shape.taps) > target.num_layers:
        findings.append(
            Finding(
                "taps-too-few",
                "fatal",
                f"Tap {max(shape.taps)} lies beyond the {target.num_layers} layers of {target.spec}.",
                [Evidence("taps", list(shape.taps), f"0 to {target.num_layers}", "config.json")],
            )
        )
    contract = checkpoint.contract
    if contract is not None and "target" in contract and contract["target"].get("fingerprint") != target.fingerprint():
        findings.append(
            Finding(
                "target-differs",
                "note",
                f"The drafter was trained on another target than {target.spec}, or on other weights of it.",
                [
                    Evidence(
                        "fingerprint of the target",
                        target.fingerprint(),
                        contract["target"].get("fingerprint"),
                        "contract",
                    )
                ],
            )
        )
    return findings


def _keys(checkpoint: Checkpoint) -> list[Finding]:
    """The engines' keys against the contract, two declarations that must agree, and the weights against its hash."""
    contract, config = checkpoint.contract, checkpoint.config
    if contract is None or "taps" not in contract or "target" not in contract:
        return [
            Finding(
                "contract-missing",
                "note",
                "config.json carries no contract, so what this drafter was trained on is read from the engines' keys.",
                [Evidence("key 'eyas' of config.json", None, "a contract", "config.json")],
            )
        ]
    findings = []
    taps, target = list(contract["taps"]), contract["target"]
    edited = {engine: readings[0] for engine, readings in readings(config, target).items() if taps not in readings}
    if edited:
        vllm_ids, sglang_ids = (
            vllm.spell(taps),
            sglang.spell(taps, target["architecture"], target["num_layers"]),
        )
        findings.append(
            Finding(
                "contract-edited",
                "likely",
                f"The contract says taps {taps}; the engines' keys make "
                + ", ".join(f"{engine} capture {captured}" for engine, captured in edited.items())
                + ".",
                [
                    Evidence(f"taps captured by {engine}", captured, taps, "config.json")
                    for engine, captured in edited.items()
                ],
                fix=f'For taps {taps}: "eagle_aux_hidden_state_layer_ids": {vllm_ids} at top level (vLLM)'
                + (
                    f' and inside "eagle_config": {sglang_ids} (SGLang).'
                    if sglang_ids
                    else "; SGLang cannot express them."
                ),
            )
        )
    defaults = vllm.captured({}, target["num_layers"], "v1")
    if not readings(config, target) and taps != defaults:
        findings.append(
            Finding(
                "taps-key-missing",
                "likely",
                f"The contract says taps {taps}; no key names them, so engines read their default {defaults}.",
                [Evidence("taps that engines default to", defaults, taps, "config.json")],
            )
        )
    shape, spelled = checkpoint.shape, checkpoint.spelled
    stated: dict[str, Any] = {"draft_vocab_size": shape.draft_vocab_size, "rope": shape.rope_parameters}
    trained = {fact: contract[fact] for fact in stated if fact in contract}
    for switch in SWITCHES:  # the contract's are those loaded
        stated[switch], trained[switch] = getattr(spelled, switch), getattr(shape, switch)
    for fact, value in trained.items():
        same = rope.normal(stated[fact]) == rope.normal(value) if fact == "rope" else stated[fact] == value
        if not same:
            findings.append(
                Finding(
                    "contract-edited",
                    "likely",
                    f"The contract says {fact} {value}; config.json says {stated[fact]}.",
                    [Evidence(fact, stated[fact], value, "config.json")],
                )
            )
    if checkpoint.weights_sha256 and checkpoint.weights_sha256 != _weights_sha256(checkpoint.folder):
        findings.append(
            Finding(
                "weights-changed",
                "note",
                "The weights are not those the contract was written for; every fact in it is only inferred.",
                [
                    Evidence(
                        "sha256 of model.safetensors",
                        _weights_sha256(checkpoint.folder),
                        checkpoint.weights_sha256,
                        "contract",
                    )
                ],
            )
        )
    return findings


def readings(config: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Taps by whoever reads the ids that are there, the newest reader's first. A key that is not there was not edited:
    a folder may be spelled for one engine alone, or for an older build of it. What each would make of a folder
    without its key, `eyas show` says."""
    inner = (config.get("eagle_config") or {}).get(_IDS)
    readings = {}
    if config.get(_IDS) is not None:
        readings["vLLM"] = [vllm.captured(config, target["num_layers"], "v1")]
    if inner is not None:
        readings["SGLang"] = [
            sglang.captured(config, target["architecture"], target["num_layers"]),
            [k + 1 for k in inner],
        ]
        if config.get(_IDS) is None:  # vLLM's V1 runner takes them as they stand then
            readings["SGLang"].append(list(inner))
    return readings


def _weights_sha256(folder: Path) -> str | None:
    single = folder / "model.safetensors"
    return provenance.sha256_file(single) if single.exists() else None
