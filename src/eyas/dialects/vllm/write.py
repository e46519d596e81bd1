"""A config that vLLM wires as a contract says.

The top-level list of layers is the first choice of both runners, so it alone makes both right. A list inside
``eagle_config`` is left as it is: here nobody reads it, and another engine may.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.contract import Contract
from eyas.dialects.vllm import flags as command_line
from eyas.dialects.vllm import reading
from eyas.dialects.vllm.reading import LAYER, OVER_THE_LAYER
from eyas.dialects.vllm.source import DEEPSEEK, LLAMA, VERSIONS, at
from eyas.dialects.vllm.taps import TOP, backend, capture, spell
from eyas.dialects.wiring import CannotExpress, Inexpressible, Launch, TargetFacts

_MISLEADING = ("dflash_config", "dspark_target_layer_ids", "target_layer_ids", "num_aux_layers", "use_aux_norm", "bias")
_SPECULATORS = ("speculators_config", "speculators_model_type", "speculators_version", "auto_map", LAYER)
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
_PLAIN = {
    "layers": "num_hidden_layers",
    "attention_bias": "attention_bias",
    "draft_vocab_size": "draft_vocab_size",
    "max_positions": "max_position_embeddings",
}
_FC_NORM = {"none": (False, False), "joint": (True, False), "each": (False, True), "joint, then each": (True, True)}


def write(contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch) -> dict[str, Any]:
    """The folder's ``config`` with vLLM's keys as ``contract`` wants them. Raises CannotExpress."""
    flags = command_line.read(launch, target)
    kind = "deepseek" if _get(contract, "attention") == "mla" else "qwen3" if _get(contract, "qk_norm") else "llama"
    if wrong := [*_taps(contract, target, flags.transformers), *_rest(contract, target, kind)]:
        raise CannotExpress(f"vLLM {VERSIONS[-1]}", wrong)
    made = _flat(config)
    for key in _MISLEADING:
        made.pop(key, None)
    made |= _architecture(made, kind)
    if "taps" in contract:
        made[TOP] = spell(contract["taps"])
        made["num_aux_hidden_states"] = len(contract["taps"])
    made |= _switches(contract, made)
    made |= {key: contract[fact] for fact, key in _PLAIN.items() if fact in contract}
    if "rope" in contract:
        made |= _rope(made, dict(contract["rope"]))
    if "window" in contract:
        made |= _window(contract["window"], made)
    return {key: value for key, value in made.items() if value is not ...}


def _get(contract: Contract, fact: str) -> Any:
    return contract.facts[fact].value if fact in contract.facts else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in speculators' format as a plain one: the layer's keys at top level."""
    if reading.read(config).style == "hf":
        return dict(config)
    layer = {k: v for k, v in config[LAYER].items() if k not in ("architectures", *OVER_THE_LAYER)}
    top = {k: v for k, v in config.items() if k not in (*_SPECULATORS, "architectures")}
    return {"model_type": "llama", **layer, **{k: v for k, v in top.items() if v is not None or k == "eyas"}}


def _architecture(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Kept where it already means that class; ``model_type`` goes with it, for the defaults it brings."""
    found = reading.read(config)
    if found.kind == kind and not found.refusals:
        return {}
    if kind == "deepseek":
        return {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    return {"architectures": [_ARCHITECTURES[kind]], "model_type": kind}


def _switches(contract: Contract, config: Mapping[str, Any]) -> dict[str, Any]:
    """The four switches, at top level and, where it is already inside ``eagle_config``, there too."""
    made: dict[str, Any] = {}
    if "fc_norm" in contract:
        made["norm_before_fc"], made["fc_norm"] = _FC_NORM[contract["fc_norm"]]
    if "residual" in contract:
        made["norm_before_residual"] = contract["residual"] == "after hidden_norm"
    if "feedback" in contract:
        made["norm_output"] = contract["feedback"] == "after the last norm"
    # False is what an absent key means here; to SpecForge ``norm_output: false`` means no norm before the head.
    absent = [k for k in ("norm_output", "norm_before_fc", "fc_norm") if made.get(k) is False]
    made |= dict.fromkeys(absent, ...)
    if isinstance(config.get("eagle_config"), Mapping):
        inner = {k: v for k, v in config["eagle_config"].items() if k not in ("norm_before_fc", "layer_ids")}
        made["eagle_config"] = inner | {"use_aux_hidden_state": True}
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        made["target_hidden_size"] = ...
    return made


def _rope(config: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """In every spelling: ``rope_scaling`` would overrule ``rope_parameters``, so it says the same or is not there."""
    scaled = rope.get("rope_type", "default") != "default"
    made: dict[str, Any] = {"rope_parameters": rope, "rope_scaling": ...}
    if "rope_theta" in rope:
        made["rope_theta"] = rope["rope_theta"]
    if scaled:
        made["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return made


def _window(window: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    if window is None:
        return {"sliding_window": ..., "layer_types": ..., "use_sliding_window": ...}
    layers = config.get("num_hidden_layers") or 1
    # Qwen3's config forgets a window that is not switched on.
    switch = {"use_sliding_window": True} if config.get("model_type") == "qwen3" else {}
    return {"sliding_window": window, "layer_types": ["sliding_attention"] * layers, **switch}


# -- what has no spelling -------------------------------------------------------------------------------------


def _taps(contract: Contract, target: TargetFacts, transformers: bool) -> Iterator[Inexpressible]:
    if "taps" not in contract:
        return
    taps = list(contract["taps"])
    where = at("model_executor/models/interfaces.py:1578", "executed")
    caught = capture({TOP: taps}, target, "v2", transformers) if taps else None
    nearest = list(caught.taps) if caught else None
    if backend(target.architecture, transformers) == "none":
        why = f"its class of {target.architecture} hands over no layers; --model-impl transformers has one that does"
        yield Inexpressible("taps", taps, None, why, at("v1/worker/gpu_model_runner.py:5236", "executed"))
    elif caught is None:
        yield Inexpressible("taps", taps, None, "an empty list is no list, and the defaults come in", where)
    elif caught.refusals:
        yield Inexpressible("taps", taps, None, caught.refusals[0].why, caught.refusals[0].source)
    elif nearest != taps:
        why = (
            "layers come in ascending order, each once" if sorted(set(taps)) == nearest else "no such layer is reached"
        )
        yield Inexpressible("taps", taps, nearest, why, where)


# Facts with one value here, whatever the config says.
_FIXED: dict[str, tuple[Any, str]] = {
    "tap_state": ("stream", "model_executor/models/interfaces.py:1610"),
    "fc": ("applied", f"{LLAMA}:397"),
    "later_norm": ("input_layernorm", f"{LLAMA}:138"),
    "head_norm": (True, f"{LLAMA}:281"),
    "token_shift": (1, "v1/spec_decode/llm_base_proposer.py:796"),
    "position_offset": (0, "v1/spec_decode/llm_base_proposer.py:796"),
}


def _rest(contract: Contract, target: TargetFacts, kind: str) -> Iterator[Inexpressible]:
    for fact, (value, where) in _FIXED.items():
        wanted = _get(contract, fact)
        if wanted is not None and wanted != value:
            yield Inexpressible(fact, wanted, value, "it is always so there", at(where))
    if kind == "deepseek":
        for fact, value in (("attention_bias", False), ("qk_norm", False), ("window", None)):
            wanted = _get(contract, fact)
            if wanted not in (None, value):
                yield Inexpressible(fact, wanted, value, "its MLA class has none", at(DEEPSEEK))
        if "joint" in str(_get(contract, "fc_norm")):
            near = "each" if contract["fc_norm"] != "joint" else "none"
            yield Inexpressible("fc_norm", contract["fc_norm"], near, "its MLA class norms no joint", at(DEEPSEEK))
    words, head, mapped = (_get(contract, fact) for fact in ("draft_vocab_size", "head", "vocab_map"))
    if words is not None:
        full = words == target.vocab_size
        if not full and head == "target":
            why = f"the target's head would be cut to its first {words} rows; write the rows as lm_head.weight"
            yield Inexpressible("head", head, "own", why, at("model_executor/layers/logits_processor.py:198"))
        if mapped == "ids":
            yield Inexpressible("vocab_map", mapped, "none" if full else "offsets", "it adds i", at(f"{LLAMA}:385"))
        elif full and mapped == "offsets":
            why = "with the whole vocabulary there is no place for d2t; leave the tensor out"
            yield Inexpressible("vocab_map", mapped, "none", why, at(f"{LLAMA}:338", "executed"))
