"""The ``config.json`` that SGLang and vLLM both load: one file, each engine's key in that engine's own spelling.

The same key name means different layers to different readers, so it is written twice: at top level as vLLM counts
(SGLang does not read it there), inside ``eagle_config`` as SGLang counts (vLLM prefers the top level).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas import contract as contracts
from eyas.contract import Contract
from eyas.dialects import sglang, vllm
from eyas.errors import CheckpointError

ARCHITECTURE = "LlamaForCausalLMEagle3"
QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"  # vLLM 0.32 registry.py:665; no other engine's drafter has those norms
KEY = "eyas"


def write(shape: Mapping[str, Any], contract: Contract, weights_sha256: str, dtype: str) -> dict[str, Any]:
    """Config for a drafter of ``shape`` (DrafterConfig as a dict) under ``contract``."""
    target, taps = contract["target"], list(contract["taps"])
    rope = dict(shape["rope_parameters"])
    # Written only where on: to SpecForge ``norm_output: false`` means no norm before the head.
    switched_on = {key: True for key in ("norm_before_fc", "fc_norm", "norm_output") if shape[key]}
    config: dict[str, Any] = {
        "architectures": [QK_NORM_ARCHITECTURE if shape["qk_norm"] else ARCHITECTURE],
        "model_type": "qwen3" if shape["qk_norm"] else "llama",
        "attention_bias": shape["attention_bias"],
        "dtype": dtype,
        "draft_vocab_size": shape["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": vllm.spell(taps),
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "max_position_embeddings": shape["max_position_embeddings"],
        "mlp_bias": False,
        **switched_on,
        "norm_before_residual": shape["norm_before_residual"],
        "num_attention_heads": shape["num_attention_heads"],
        "num_aux_hidden_states": len(taps),  # without it vLLM takes three where it finds no eagle_config
        "num_hidden_layers": shape["num_hidden_layers"],
        "num_key_value_heads": shape["num_key_value_heads"],
        "rms_norm_eps": shape["rms_norm_eps"],
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),  # read by stacks older than transformers 5
        "target_hidden_size": shape["target_hidden_size"],
        "tie_word_embeddings": False,
        "vocab_size": shape["vocab_size"],
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    ids = sglang.spell(taps, target["architecture"], target["num_layers"])
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    config[KEY] = {
        "schema": contracts.SCHEMA,
        "contract": contract.to_json(),
        "weights_sha256": weights_sha256,
    }
    return config


def read_contract(config: Mapping[str, Any], where: str) -> tuple[Contract | None, str | None]:
    """The contract in a config and the hash of the weights it describes; (None, None) where there is none."""
    block = config.get(KEY)
    if block is None:
        return None, None
    if not isinstance(block, dict):
        raise CheckpointError(
            f"{where}: the 'eyas' key holds a {type(block).__name__}, an object was expected.",
            way_out="Remove the key to have every fact inferred, or restore the file.",
        )
    return contracts.from_json(block.get("contract"), where), block.get("weights_sha256")


def require_sane(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError where a hand-edited value could not be what its key is for."""
    inner, block = config.get("eagle_config"), config.get(KEY)
    lists = {"eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids")}
    objects = {"eagle_config": inner, "rope_scaling": config.get("rope_scaling")}
    if isinstance(inner, Mapping):
        lists["eagle_config.eagle_aux_hidden_state_layer_ids"] = inner.get("eagle_aux_hidden_state_layer_ids")
    contract, _ = read_contract(config, where) if block is not None else (None, None)
    if contract is not None and "taps" in contract:
        lists["eyas.contract.taps"] = contract["taps"] if contract["taps"] is not None else "null"
    if contract is not None and "target" in contract:
        objects["eyas.contract.target"] = contract["target"]
    for key, value in lists.items():
        if value is not None and not (isinstance(value, list) and value and all(type(v) is int for v in value)):
            raise _wrong(where, key, value, "a list of layer numbers")
    for key, value in objects.items():
        if value is not None and not isinstance(value, Mapping):
            raise _wrong(where, key, value, "an object")
    for key in ("num_attention_heads", "hidden_size"):
        if config.get(key) is not None and not (type(config[key]) is int and config[key] > 0):
            raise _wrong(where, key, config[key], "a number above zero")
    of = objects.get("eyas.contract.target")
    missing = [k for k in ("architecture", "num_layers", "fingerprint") if isinstance(of, Mapping) and k not in of]
    if missing:
        raise _wrong(where, "eyas.contract.target", of, f"an object with {', '.join(missing)}")


def _wrong(where: str, key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {key} of config.json is {value!r}; {expected} was expected.",
        way_out="Restore the config that was saved with these weights.",
    )


def read_shape(config: Mapping[str, Any], taps: tuple[int, ...], where: str) -> dict[str, Any]:
    """DrafterConfig's fields out of a config; a missing one is an error that names it."""
    rope = config.get("rope_parameters")
    if not rope:
        rope = {
            "rope_type": "default",
            **(config.get("rope_scaling") or {}),
            "rope_theta": config.get("rope_theta", 10000.0),
        }
    needed = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
    )
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{where}: config.json lacks {', '.join(missing)}.",
            way_out="Restore the config that was saved with these weights.",
        )
    for key, built in (("hidden_act", "silu"), ("mlp_bias", False)):
        if config.get(key) not in (None, built):
            raise _wrong(where, key, config[key], f"{built!r}, which is what a drafter's MLP is here and in engines,")
    inner = config.get("eagle_config") or {}
    shape = {key: config[key] for key in needed}
    shape["num_hidden_layers"] = config.get("num_hidden_layers") or 1
    shape["norm_before_fc"] = inner.get("norm_before_fc", config.get("norm_before_fc")) or False
    for key in ("attention_bias", "fc_norm", "norm_before_residual", "norm_output"):
        shape[key] = config.get(key) or False
    shape["taps"] = taps
    shape["rope_parameters"] = rope
    shape["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    shape["target_hidden_size"] = config.get("target_hidden_size") or config["hidden_size"]
    shape["draft_vocab_size"] = config.get("draft_vocab_size") or config["vocab_size"]
    return shape
