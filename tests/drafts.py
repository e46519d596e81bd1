"""Drafters as files for what is told from files alone: a config.json, a contract, and weights that are all zeros."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eyas.checkpoint import expected_shapes
from eyas.contract import declared
from eyas.dialects import hf
from eyas.dialects.wiring import TargetFacts
from eyas.drafter import DrafterConfig

H, VOCAB, DRAFT_VOCAB = 8, 96, 32


def shape(taps: Iterable[int], **changes: Any) -> DrafterConfig:
    usual: dict[str, Any] = {
        "taps": tuple(taps),
        "target_hidden_size": H,
        "hidden_size": H,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    return DrafterConfig(**{**usual, **changes})


def target(architecture: str = "LlamaForCausalLM", layers: int = 30, **config: Any) -> TargetFacts:
    return TargetFacts(architecture, layers, H, VOCAB, {"max_position_embeddings": 4096, **config})


def write(
    folder: Path,
    of: DrafterConfig,
    host: TargetFacts,
    *,
    facts: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    remove: Iterable[str] = (),
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    drop: Iterable[str] = (),
) -> Path:
    """A drafter as eyas saves it, then edited: ``facts`` of the contract, keys of the ``config`` set or removed (None
    inside ``eagle_config`` too), ``tensors`` added by name and shape, others dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = {
        "taps": list(of.taps),
        "tap_state": "stream",
        "fc": "applied",
        **of.facts(),
        "attention": "gqa",
        "head_norm": True,
        "rope": of.rope_parameters,
        "window": None,
        "max_positions": of.max_position_embeddings,
        "head": "own",
        "draft_vocab_size": of.draft_vocab_size,
        "vocab_map": "offsets" if of.draft_vocab_size < of.vocab_size else "none",
        "target": {
            "fingerprint": "0" * 16,
            "architecture": host.architecture,
            "num_layers": host.num_layers,
            "hidden_size": host.hidden_size,
            "vocab_size": host.vocab_size,
        },
        **(facts or {}),
    }
    contract = declared(**{name: value for name, value in trained.items() if value != "unknown"})
    written = hf.write(of.model_dump(), contract, "", "float32")
    del written["eyas"]["weights_sha256"]
    written |= config or {}
    for key in remove:
        place, _, last = key.rpartition(".")
        (written[place] if place else written).pop(last, None)
    shapes = {**expected_shapes(of), **(tensors or {})}
    if of.draft_vocab_size == of.vocab_size:
        shapes = {name: size for name, size in shapes.items() if name not in ("d2t", "t2d")}
    zeros = {
        name: np.zeros(size, np.int64 if name == "d2t" else np.bool_ if name == "t2d" else np.float32)
        for name, size in shapes.items()
        if name not in set(drop)
    }
    save_file(zeros, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def inner(ids: Iterable[int] | None, **more: Any) -> dict[str, Any]:
    """The nested key alone: no ids at top level (which ``remove`` has to take away)."""
    return {"eagle_config": {**({} if ids is None else {"eagle_aux_hidden_state_layer_ids": list(ids)}), **more}}
