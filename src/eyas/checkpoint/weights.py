"""A drafter's weights: strict load and save."""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import files, inventory, provenance, vocab
from eyas.checkpoint.findings import inspect
from eyas.checkpoint.folder import HEAD, Checkpoint, expected_shapes, shape_for, shares_head, twins
from eyas.contract import Contract
from eyas.dialects import hf, layouts
from eyas.drafter import Drafter
from eyas.errors import CheckpointError
from eyas.inventory.folder import PICKLED
from eyas.target import Target
from eyas.vocab import DraftVocab
from eyas.widened import BIG

MAPS = ("d2t", "t2d")


def load(checkpoint: Checkpoint, target: Target) -> Drafter:
    """The drafter on its target, fp32. Raises CheckpointError on the first thing that does not fit."""
    for finding in inspect(checkpoint, target):
        if finding.severity == "fatal":
            raise CheckpointError(finding.summary, way_out=str(finding.fix))
    tensors = read_tensors(checkpoint)
    _require_finite(tensors, checkpoint.folder.name)
    shape = shape_for(checkpoint, target)
    _ascending(tensors)
    if "d2t" in tensors:
        words = vocab.from_checkpoint(tensors["d2t"], tensors.get("t2d"), shape.vocab_size)
    else:
        words = DraftVocab(torch.arange(shape.vocab_size), shape.vocab_size)
    _one_norm_under_two_names(checkpoint, tensors)
    drafter = Drafter(shape, words, None if shape.own_embedding else target.embedding)
    weights = {n: t.float() for n, t in tensors.items() if n not in MAPS and n not in twins(shape)}
    if shares_head(checkpoint):
        weights[HEAD] = target.head_weight.detach().cpu().float()
    drafter.load_state_dict(weights, strict=True)
    return drafter.to(target.device).eval()


def finite_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of the files by our names, used or not. Raises NotFinite, TwoNorms, and CheckpointError where
    they cannot be read."""
    tensors, _ = every_tensor(checkpoint.folder)
    _require_finite(tensors, checkpoint.folder.name)
    if any(t.nbytes > BIG for t in tensors.values()):  # mapped anew, so that what was looked through is not held
        tensors, _ = every_tensor(checkpoint.folder)
    for theirs, ours in twins(checkpoint.shape).items():
        if ours not in tensors and theirs in tensors:
            tensors[ours] = tensors[theirs]
    _one_norm_under_two_names(checkpoint, tensors)
    return tensors


def _require_finite(tensors: dict[str, Tensor], name: str) -> None:
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not _finite(t)]
    if bad:
        raise NotFinite(
            f"NaN or infinite values in {', '.join(bad)} of {name}.",
            way_out="These weights are broken: take an earlier checkpoint of the run that made them.",
        )


def _finite(tensor: Tensor) -> bool:
    """In blocks of rows: a mask of the whole would be a copy of it."""
    blocks = torch.split(tensor, 8192) if tensor.ndim else (tensor,)
    return all(bool(torch.isfinite(block).all()) for block in blocks)


def _ascending(tensors: dict[str, Tensor]) -> None:
    """Draft ids in the order of their target ids, rows of the head with them. Any order is a legal map to an engine;
    ours is ascending. A map that is none is left for ``vocab.from_checkpoint`` to say so."""
    if "d2t" not in tensors or "lm_head.weight" not in tensors:
        return
    ids = tensors["d2t"].to(torch.int64) + torch.arange(len(tensors["d2t"]))
    if len(ids) == len(tensors["lm_head.weight"]) and len(set(ids.tolist())) == len(ids):
        order = ids.argsort()
        tensors["d2t"] = ids[order] - torch.arange(len(ids))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def _one_norm_under_two_names(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    for theirs, ours in twins(checkpoint.shape).items():
        if theirs in tensors and not torch.equal(tensors[theirs], tensors[ours]):
            raise TwoNorms(
                f"{checkpoint.folder.name}: {theirs} and {ours} differ. vLLM norms this layer with the second and "
                "SGLang with the first, so each would run another drafter.",
                way_out="Keep the one that was trained and write it under both names.",
            )


class TwoNorms(CheckpointError):
    """A later layer's norm stands under two names with two values."""


class NotFinite(CheckpointError):
    """Weights with NaN or infinity in them."""


def read_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors that a drafter of this shape is made of, by our names, as they are in the files."""
    wanted = expected_shapes(checkpoint.shape).keys() | twins(checkpoint.shape).keys()
    by_file: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for ours, theirs in checkpoint.tensors.items():
        if ours not in wanted:
            continue
        file = checkpoint.inventory.tensors[theirs].file
        if file not in by_file:
            by_file[file] = _file(checkpoint.folder / file)
        tensors[ours] = by_file[file][theirs]
    return tensors


def every_tensor(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a drafter by our names, as they are, and our names -> theirs; also where it is not built here."""
    found = inventory.read(folder)
    names = layouts.read(found.tensors, str(folder)).names
    by_file = {info.file: _file(folder / info.file) for info in found.tensors.values()}
    return {ours: by_file[found.tensors[theirs].file][theirs] for ours, theirs in names.items()}, names


def _file(path: Path) -> dict[str, Tensor]:
    """One file of weights. Of a pickled one the inventory has seen that it holds tensors alone; torch looks again."""
    try:
        if path.name.endswith(PICKLED):
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return {name: tensor.detach() for name, tensor in held.items()}
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}.",
            way_out="Fetch or copy the file again.",
        ) from error


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

    ``tap_scale`` becomes part of fc. An embedding that is the target's is left out, and so is the map of a draft
    vocabulary that is the whole one: vLLM has no place for it then (llama_eagle3.py, ``draft_id_to_target_id``).
    """
    shape = drafter.config
    weights = {n: p.detach().cpu() for n, p in drafter.state_dict().items()}
    weights["fc.weight"] = weights["fc.weight"] * drafter.tap_scale.cpu()
    tensors = {n: t.to(dtype).contiguous() for n, t in weights.items()}
    tensors.update({theirs: tensors[ours].clone() for theirs, ours in twins(shape).items()})
    if shape.draft_vocab_size < shape.vocab_size:
        tensors["d2t"], tensors["t2d"] = drafter.vocab.d2t, drafter.vocab.t2d
    with files.atomic_folder(folder) as temporary:
        path = temporary / "model.safetensors"
        write_tensors(tensors, path, {"format": "pt"})
        config = hf.write(
            shape.model_dump(),
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
