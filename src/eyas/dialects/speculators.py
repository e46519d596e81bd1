"""speculators (vllm-project), revision c05b95b: a folder whose decoder lies in ``transformer_layer_config``.

Its states are captured by vLLM, so ids are taps (scripts/launch_vllm.py:117, models/utils.py:40). What it trains itself
names ``Eagle3DraftModel`` and writes every switch (models/eagle3/config.py); ``Eagle3Speculator`` is the mark of its
converter, which copies ids and switches from wherever the drafter came (convert/eagle/eagle3_converter.py). A switch
that is missing is of a version that did not have it: off, but for ``norm_before_residual``, where the config class says
off and vLLM 0.32 on (transformers_utils/configs/speculators/algos.py).

``write`` spells a contract as that library saves its own drafters, for its loader and for vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.contract import Contract, Fact
from eyas.dialects import ids, reading, rope
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import CannotExpress, Files, Inexpressible, Source, TargetFacts
from eyas.errors import CheckpointError

NATIVE, CONVERTED = "Eagle3DraftModel", "Eagle3Speculator"
LAYER = "transformer_layer_config"
VERSION = "0.9.0"
_MAX_POSITIONS = {"llama": 2048, "qwen3": 32768}  # the config classes' own, which to_diff_dict does not write
_REVISION = "speculators c05b95b"


def recognise(files: Files) -> str | None:
    keys = Keys(files.config)
    kind = keys.text("speculators_model_type")
    algorithm = keys.inside("speculators_config").text("algorithm")
    if "eagle3" not in (kind, algorithm) or LAYER not in keys:
        return None
    by = "its trainer" if NATIVE in keys.texts("architectures") else "its converter"
    return f"{LAYER} holds the decoder and speculators_config the algorithm eagle3, as {by} writes them"


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    layer = keys.inside(LAYER)
    native = NATIVE in keys.texts("architectures")
    kind = layer.text("model_type") or "llama"
    draft = Draft(position_offset=1, later_norm="input_layernorm")
    draft.set("qk_norm", Fact(kind == "qwen3", "declared" if "model_type" in layer else "defaulted"))
    draft.set("attention_bias", layer.flag("attention_bias"))
    draft.set("fc_norm", reading.norms_before_fc(keys.flag("norm_before_fc"), keys.flag("fc_norm")))
    draft.set("feedback", reading.named(keys.flag("norm_output"), "after the last norm", "before the last norm"))
    draft.set("rope", rope.read(layer))
    _taps(draft, keys, target, native)
    _residual(draft, keys)
    _layers(draft, layer, files)
    _embedding(draft, keys, files, native)
    reading.vocabulary(draft, keys, layer, files)
    reading.max_positions(draft, layer, _MAX_POSITIONS.get(kind))
    if native and (depths := _speculative_tokens(keys)):
        draft.set("depths", Fact(depths, "inferred"))
    return draft.done()


def _taps(draft: Draft, keys: Keys, target: TargetFacts | None, native: bool) -> None:
    said = keys.ids(ids.KEY)
    n = target.num_layers if target else None
    if said is None:
        draft.set("taps", reading.default_taps(target))
    elif native or ids.default_in(said, n) == "tap":
        draft.set("taps", Fact(ids.taps(said, "tap"), "declared" if native else "inferred"))
    else:
        open_ = ids.readings(said, n)
        draft.leave_open(
            "taps",
            tuple(open_.values()),
            "which trainer the converter was handed: it copies ids as they are, vLLM and speculators count taps, "
            "ModelOpt and SpecForge layer outputs",
        )


def _residual(draft: Draft, keys: Keys) -> None:
    after, before = "after hidden_norm", "before hidden_norm"
    if "norm_before_residual" in keys:
        draft.set("residual", reading.named(keys.flag("norm_before_residual"), after, before))
    else:
        draft.leave_open(
            "residual",
            (after, before),
            "norm_before_residual is missing: vLLM takes it as true, speculators' config class as false, and its "
            "trainer's default is true; accuracy at depth 0 under either tells",
        )


def _layers(draft: Draft, layer: Keys, files: Files) -> None:
    names = reading.tensors(files)
    said = layer.count("num_hidden_layers")
    found = reading.layers_in(names) if names else 0
    draft.set("layers", Fact(said, "declared") if said else Fact(found, "inferred") if found else None)
    kinds = set(layer.texts("layer_types"))
    if not kinds:
        return
    if kinds == {"sliding_attention", "full_attention"}:
        draft.set("window", None)
        draft.notes.append("Some layers were trained with a window and some without; a contract has one word for all.")
    elif kinds == {"sliding_attention"}:
        draft.set("window", Fact(layer.count("sliding_window"), "declared"))
    else:
        draft.set("window", Fact(None, "declared"))


def _embedding(draft: Draft, keys: Keys, files: Files, native: bool) -> None:
    trained = keys.flag("embed_requires_grad")
    names = reading.tensors(files)
    if native or "embed_requires_grad" in keys:
        draft.set("embedding", reading.named(trained, "own", "target"))
    elif names is None:  # the converter keeps an embedding where the drafter brought one, trained or not
        draft.set("embedding", None)
    else:
        draft.set("embedding", Fact("own" if "embed_tokens.weight" in names else "target", "inferred"))


def _speculative_tokens(keys: Keys) -> int | None:
    methods = keys.inside("speculators_config").config.get("proposal_methods")
    if not (isinstance(methods, list) and methods and isinstance(methods[0], Mapping)):
        return None
    return Keys(methods[0], "speculators_config.proposal_methods.0.").count("speculative_tokens")


# -- writing --------------------------------------------------------------------------------------------------

# Facts with one value in this format, whatever a config says; where it cannot be told from a contract, nothing is lost.
_ONLY = {
    "tap_state": ("stream", "it captures the residual stream with vLLM", "scripts/launch_vllm.py:117"),
    "fc": ("applied", "fc is always built", "models/eagle3/core.py:76"),
    "attention": ("gqa", "its layers are llama's or qwen3's", "models/eagle3/model_definitions.py:135"),
    "later_norm": ("input_layernorm", "later layers are ordinary decoder layers", "models/eagle3/core.py:91"),
    "head_norm": (True, "the head always reads the last norm", "models/eagle3/core.py:306"),
    "token_shift": (1, "its batches pair state t with token t + 1", "models/eagle3/data.py:8"),
    "head": ("own", "its folder always holds a head", "model.py:66"),
}


def write(
    contract: Contract,
    config: Mapping[str, Any],
    target: TargetFacts,
    verifier: str | None = None,
) -> dict[str, Any]:
    """A config in speculators' layout that says ``contract``; its tensors want ``tensor_name``.

    ``config`` is the folder's present one, in this layout or in Hugging Face's: shape keys are kept, ``eyas`` as it is.
    ``verifier`` is the target's name or folder; without one vLLM has to be started with the target named. A position
    offset is not written: it turns queries and keys alike, and no reader has a key for it. Raises CannotExpress.
    """
    shape = Keys(config).inside(LAYER) if LAYER in config else Keys(config)
    _require_expressible(contract)
    _require_one_width(config, shape, target)
    word = {name: contract[name] for name in contract}
    fc_norm = word.get("fc_norm", "none")
    written: dict[str, Any] = {
        "architectures": [NATIVE],
        "draft_vocab_size": word.get("draft_vocab_size", shape.count("vocab_size")),
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        ids.KEY: list(contract["taps"]) if "taps" in contract else None,
        "embed_requires_grad": word.get("embedding") == "own",
        "fc_norm": fc_norm == "each",
        "norm_before_fc": fc_norm == "joint",
        "norm_before_residual": word.get("residual") == "after hidden_norm",
        "norm_output": word.get("feedback") == "after the last norm",
        "speculators_config": _speculators_config(word.get("depths", 3), target, verifier),
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        LAYER: _layer(word, shape),
    }
    return written | ({"eyas": config["eyas"]} if "eyas" in config else {})


def tensor_name(name: str) -> str:
    """The name of a tensor in this layout: ``layers.0.`` for ``midlayer.``, nothing before it."""
    return reading.canonical(name)


def _layer(word: Mapping[str, Any], shape: Keys) -> dict[str, Any]:
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    if missing := [key for key in (*kept, "rms_norm_eps") if key not in shape]:
        raise CheckpointError(
            f"config.json lacks {', '.join(missing)}.", way_out="Restore the config that was saved with these weights."
        )
    heads, width = shape.count("num_attention_heads"), shape.count("hidden_size")
    assert heads is not None
    assert width is not None
    layers = word.get("layers", shape.count("num_hidden_layers") or 1)
    parameters = word.get("rope", rope.read(shape).value)
    window = word.get("window")
    return {
        "attention_bias": word.get("attention_bias", False),
        "head_dim": shape.count("head_dim") or width // heads,
        "hidden_act": "silu",
        **{key: shape.config[key] for key in kept},
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
        "max_position_embeddings": word.get("max_positions", shape.count("max_position_embeddings") or 2048),
        "mlp_bias": False,
        "model_type": "qwen3" if word.get("qk_norm") else "llama",
        "num_hidden_layers": layers,
        "rms_norm_eps": shape.config["rms_norm_eps"],
        "rope_parameters": dict(parameters),
        "rope_theta": parameters.get("rope_theta", rope.THETA),  # read by stacks older than transformers 5
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_sliding_window": window is not None,
    }


def _speculators_config(depths: int, target: TargetFacts, verifier: str | None) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": depths, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"architectures": [target.architecture], "name_or_path": verifier},
    }


def _require_expressible(contract: Contract) -> None:
    wrong = [
        Inexpressible(fact, contract[fact], only, why, Source(f"{_REVISION} {where}"))
        for fact, (only, why, where) in _ONLY.items()
        if fact in contract and contract[fact] != only
    ]
    if "fc_norm" in contract and contract["fc_norm"] == "joint, then each":
        why = "its config takes one of the two norms before fc"
        source = Source(f"{_REVISION} models/eagle3/config.py:90")
        wrong.append(Inexpressible("fc_norm", contract["fc_norm"], "joint", why, source))
    if "vocab_map" in contract and contract["vocab_map"] == "ids":
        source = Source(f"{_REVISION} model.py:53")
        wrong.append(Inexpressible("vocab_map", "ids", "offsets", "its d2t holds offsets", source))
    if wrong:
        raise CannotExpress("speculators", wrong)


def _require_one_width(config: Mapping[str, Any], shape: Keys, target: TargetFacts) -> None:
    states = Keys(config).count("target_hidden_size") or target.hidden_size
    if states != shape.count("hidden_size"):
        raise CheckpointError(
            f"The drafter is {shape.count('hidden_size')} wide and reads states {states} wide; speculators' draft "
            "model has one width for both.",
            way_out="Export for vLLM or SGLang: they read target_hidden_size.",
        )
