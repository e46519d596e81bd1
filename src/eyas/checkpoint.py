"""A drafter on disk: strict load and save.

Nothing is filled in silently: a tensor that is missing, too much, of another shape or not finite is a finding, and
loading raises on the first that is fatal. The names are the usual EAGLE-3 ones; ``layers.0.`` for ``midlayer.`` and a
leading ``model.`` are understood.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import files, inventory, provenance, vocab
from eyas.contract import Contract
from eyas.dialects import hf, sglang, vllm
from eyas.drafter import Drafter, DrafterConfig
from eyas.errors import CheckpointError
from eyas.results import Evidence, Finding
from eyas.target import Target
from eyas.vocab import DraftVocab

MAPS = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What the files say, before any weight is read. ``tensors`` maps our names to the names in the files."""

    folder: Path
    inventory: inventory.Inventory
    shape: DrafterConfig
    contract: Contract | None
    weights_sha256: str | None
    tensors: dict[str, str]

    @property
    def config(self) -> dict[str, Any]:
        return self.inventory.config


def canonical(name: str) -> str:
    """A tensor's name as we spell it."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def read(folder: Path) -> Checkpoint:
    """Config and headers of a drafter. Raises CheckpointError where they cannot be understood at all."""
    found = inventory.read(folder)
    hf.require_sane(found.config, str(folder))
    contract, digest = hf.read_contract(found.config, str(folder))
    fc = found.tensors.get("fc.weight") or found.tensors.get("model.fc.weight")
    taps = _taps(found.config, contract, fc.shape if fc else None)
    try:
        shape = DrafterConfig(**hf.read_shape(found.config, taps, str(folder)))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{folder}: config.json does not describe a drafter: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            way_out="Restore the config that was saved with these weights.",
        ) from error
    return Checkpoint(folder, found, shape, contract, digest, {canonical(n): n for n in found.tensors})


def _taps(config: dict[str, Any], contract: Contract | None, fc: tuple[int, ...] | None) -> tuple[int, ...]:
    """Taps as the contract declares them, else as vLLM's V1 runner would read the keys.

    Where neither says, only their number is known (from fc) until a target is: see ``shape_for``.
    """
    if contract is not None and "taps" in contract:
        return tuple(contract["taps"])
    if _names_taps(config):
        return tuple(vllm.captured(config, 0, "v1"))
    return tuple(range(fc[1] // fc[0] if fc and len(fc) == 2 and fc[0] else 3))


def _names_taps(config: dict[str, Any]) -> bool:
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return bool(config.get("eagle_aux_hidden_state_layer_ids") or inner)


def shape_for(checkpoint: Checkpoint, target: Target) -> DrafterConfig:
    """The shape on this target: a drafter that names no taps gets those every engine defaults to."""
    named = checkpoint.contract is not None and "taps" in checkpoint.contract
    defaults = tuple(vllm.captured({}, target.num_layers, "v1"))
    if named or _names_taps(checkpoint.config) or len(defaults) != len(checkpoint.shape.taps):
        return checkpoint.shape
    return checkpoint.shape.model_copy(update={"taps": defaults})


def expected_shapes(shape: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a drafter of this shape is made of."""
    H, E, I_ = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q, kv = shape.num_attention_heads * E, shape.num_key_value_heads * E
    return {
        "fc.weight": (H, len(shape.taps) * shape.target_hidden_size),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (I_, H),
        "midlayer.mlp.up_proj.weight": (I_, H),
        "midlayer.mlp.down_proj.weight": (H, I_),
        "norm.weight": (H,),
        "lm_head.weight": (shape.draft_vocab_size, H),
        "d2t": (shape.draft_vocab_size,),
        "t2d": (shape.vocab_size,),
    }


def inspect(checkpoint: Checkpoint, target: Target | None) -> list[Finding]:
    """Findings from names, shapes and keys alone; with a target also whether the two fit each other."""
    shape, name = checkpoint.shape, checkpoint.folder.name
    wanted = expected_shapes(shape)
    there = {ours: checkpoint.inventory.tensors[theirs] for ours, theirs in checkpoint.tensors.items()}
    findings = []
    reduced = shape.draft_vocab_size < shape.vocab_size
    missing = [n for n in wanted if n not in there and n != "t2d" and (n != "d2t" or reduced)]
    if missing:
        what = "weights-missing"
        findings.append(
            Finding(
                what,
                "fatal",
                f"{name} lacks {', '.join(missing)}; engines would run on with random or zero values in their place.",
                [Evidence("tensors missing", missing, [], "headers of the checkpoint")],
            )
        )
    wanted[EMBEDDING] = (shape.vocab_size, shape.hidden_size)  # optional: a drafter may bring its own
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
    surplus = sorted(set(there) - set(wanted))
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
    return findings + _keys(checkpoint)


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
    readers = {
        "vLLM (V1 runner)": vllm.captured(config, target["num_layers"], "v1"),
        "vLLM (V2 runner)": vllm.captured(config, target["num_layers"], "v2"),
        "SGLang": sglang.captured(config, target["architecture"], target["num_layers"]),
    }
    edited = {engine: captured for engine, captured in readers.items() if captured != taps}
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
    shape = checkpoint.shape
    stated = {"draft_vocab_size": shape.draft_vocab_size, "rope": shape.rope_parameters}
    for fact, value in stated.items():
        if fact in contract and contract[fact] != value:
            findings.append(
                Finding(
                    "contract-edited",
                    "likely",
                    f"The contract says {fact} {contract[fact]}; config.json says {value}.",
                    [Evidence(fact, value, contract[fact], "config.json")],
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


def _weights_sha256(folder: Path) -> str | None:
    single = folder / "model.safetensors"
    return provenance.sha256_file(single) if single.exists() else None


def load(checkpoint: Checkpoint, target: Target) -> Drafter:
    """The drafter on its target, fp32. Raises CheckpointError on the first thing that does not fit."""
    for finding in inspect(checkpoint, target):
        if finding.severity == "fatal":
            raise CheckpointError(finding.summary, way_out=str(finding.fix))
    tensors = _tensors(checkpoint)
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise NotFinite(
            f"NaN or infinite values in {', '.join(bad)} of {checkpoint.folder.name}.",
            way_out="These weights are broken: take an earlier checkpoint of the run that made them.",
        )
    shape = shape_for(checkpoint, target)
    if "d2t" in tensors:
        words = vocab.from_checkpoint(tensors["d2t"], tensors.get("t2d"), shape.vocab_size)
    else:
        words = DraftVocab(torch.arange(shape.vocab_size), shape.vocab_size)
    own = tensors.get(EMBEDDING)
    drafter = Drafter(shape, words, own.float() if own is not None else target.embedding)
    drafter.load_state_dict({n: t.float() for n, t in tensors.items() if n not in (*MAPS, EMBEDDING)}, strict=True)
    return drafter.to(target.device).eval()


class NotFinite(CheckpointError):
    """Weights with NaN or infinity in them."""


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    wanted = set(expected_shapes(checkpoint.shape)) | {EMBEDDING}
    by_file: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for ours, theirs in checkpoint.tensors.items():
        if ours not in wanted:
            continue
        file = checkpoint.inventory.tensors[theirs].file
        if file not in by_file:
            try:
                by_file[file] = load_file(checkpoint.folder / file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{checkpoint.folder / file} cannot be read: {error}.",
                    way_out="Fetch or copy the file again.",
                ) from error
        tensors[ours] = by_file[file][theirs]
    return tensors


def vocab_sha256(words: DraftVocab) -> str:
    return hashlib.sha256(words.ids.numpy().astype("<i8").tobytes()).hexdigest()


def save(
    drafter: Drafter,
    folder: Path,
    contract: Contract,
    extra: dict[str, object],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write ``folder`` whole or not at all: weights, config with contract, and ``extra`` JSON files by name.

    ``embed_tokens`` is left out because it is the target's.
    """
    weights = {n: p.detach().cpu() for n, p in drafter.state_dict().items()}
    weights["fc.weight"] = weights["fc.weight"] * drafter.tap_scale.cpu()
    tensors = {n: t.to(dtype).contiguous() for n, t in weights.items()}
    tensors["d2t"], tensors["t2d"] = drafter.vocab.d2t, drafter.vocab.t2d
    with files.atomic_folder(folder) as temporary:
        path = temporary / "model.safetensors"
        write_tensors(tensors, path, {"format": "pt"})
        config = hf.write(
            drafter.config.model_dump(),
            contract,
            provenance.sha256_file(path),
            str(dtype).removeprefix("torch."),
        )
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, value in extra.items():
            (temporary / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file. The library reports a full disk as an error of its own; here it is an OSError again."""
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(0o644)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
