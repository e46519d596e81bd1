"""What SGLang reads in a drafter's config.json, at which level, and what it takes where nothing stands.

Two classes load an EAGLE-3 drafter: ``LlamaForCausalLMEagle3`` (models/llama_eagle3.py) and, with latent attention,
``Eagle3DeepseekV2ForCausalLM`` (models/kimi_k25_eagle3.py). Rope goes through transformers 5 first, whose config class
merges ``rope_scaling``, ``rope_parameters`` and ``rope_theta`` into one (seen with transformers 5.24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.contract import Fact, Origin
from eyas.dialects.sglang.releases import Release
from eyas.dialects.wiring import KeyNote, Refusal, Source
from eyas.errors import CheckpointError

LLAMA, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
IDS = "eagle_aux_hidden_state_layer_ids"
# LlamaConfig's own where a key is missing.
_LAYERS, _POSITIONS, _THETA = 32, 2048, 10000.0
# Keys that decide something in a trainer or another engine and are read nowhere here.
_UNREAD = (
    "logit_scale", "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
    "next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers", "layer_types",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """A config as these classes understand it; ``facts`` without those that target, tensors or flags decide."""

    mla: bool
    ids: tuple[int, ...] | None
    aux: bool
    """``eagle_config.use_aux_hidden_state``: whether states of several layers are captured at all."""
    hidden: int
    target_hidden: int
    num_aux: int
    joint: bool
    each: bool
    fc_bias: bool
    o_bias: bool
    tied: bool
    vocab: int
    draft_vocab: int
    head_from_target: bool
    keeps_embedding: bool
    layers: int
    heads: int
    kv_heads: int
    positions: int
    facts: dict[str, Fact]
    notes: tuple[KeyNote, ...]
    refusals: tuple[Refusal, ...]


def foreign(config: Mapping[str, Any], release: Release) -> tuple[Refusal, ...]:
    """Why a config in another format altogether stops SGLang at once; empty where it is one of its own drafters'."""
    architecture = _architecture(config)
    if architecture in (LLAMA, MLA) or "hidden_size" in config:
        return ()
    return tuple(_refusals({**config, "draft_vocab_size": 0}, architecture, False, release))


def read(config: Mapping[str, Any], release: Release) -> Keys:
    """Raises CheckpointError on a value that cannot be what its key is for, or without the sizes of the drafter."""
    architecture = _architecture(config)
    mla = architecture == MLA
    inner = _object(config, "eagle_config")
    notes: list[KeyNote] = []
    refusals = list(_refusals(config, architecture, mla, release))
    hidden, vocab = (_number(config, key, None) for key in ("hidden_size", "vocab_size"))
    target_hidden = _number(config, "target_hidden_size", hidden)
    layers = _number(config, "num_hidden_layers", _LAYERS)
    heads = _number(config, "num_attention_heads", 32)
    ids = layer_ids(inner.get(IDS), f"eagle_config.{IDS}")
    top_ids = layer_ids(config.get(IDS), IDS)
    facts: dict[str, Fact] = {}

    def fact(name: str, value: Any, origin: Origin = "defaulted") -> None:
        facts[name] = Fact(value, origin)

    if mla:
        counted = ids if ids is not None else top_ids
        num_aux = len(counted) if counted is not None else 3
    else:
        num_aux = _number(config, "num_aux_hidden_states", len(ids) if ids else 3)
    notes += _about_ids(config, inner, ids, top_ids, mla, release)
    joint, each, feedback = _switches(config, inner, mla, release, notes)
    fact(
        "fc_norm",
        {(False, False): "none", (True, False): "joint", (False, True): "each"}.get((joint, each), "joint, then each"),
        "declared" if joint or each else "defaulted",
    )
    fact("feedback", f"{'after' if feedback else 'before'} the last norm", "declared" if feedback else "defaulted")
    fact("layers", layers, "declared" if config.get("num_hidden_layers") is not None else "defaulted")
    fact("attention", "mla" if mla else "gqa", "declared")
    for name, value in (
        ("attention_bias", False), ("qk_norm", False), ("residual", "before hidden_norm"), ("head_norm", True),
        ("token_shift", 1), ("position_offset", 0),
    ):  # fmt: skip
        fact(name, value)
    if layers > 1:
        fact("later_norm", "hidden_norm")
    rope, rope_notes = _rope(config, release)
    notes += rope_notes
    fact("rope", rope, "declared" if not rope_notes or rope_notes[-1].effect != "defaulted" else "defaulted")
    positions = _number(config, "max_position_embeddings", _POSITIONS)
    fact("max_positions", positions, "declared" if "max_position_embeddings" in config else "defaulted")
    tied = _flag(config, "tie_word_embeddings", False)
    null_vocab = config.get("draft_vocab_size") is None
    draft_vocab = _number(config, "draft_vocab_size", vocab)
    fact("draft_vocab_size", draft_vocab, "defaulted" if null_vocab else "declared")
    if null_vocab and not tied and (mla or "draft_vocab_size" in config):
        notes.append(
            KeyNote(
                "draft_vocab_size", None, "defaulted",
                "without a number the whole vocabulary is taken and the target's head and embedding replace the "
                "drafter's own", release.at("mla head" if mla else "head"),
            )
        )  # fmt: skip
    if tied:
        notes.append(
            KeyNote(
                "tie_word_embeddings", True, "overridden",
                "the head is the drafter's embedding, and the target's is then put in its place",
                release.at("mla head" if mla else "head"),
            )
        )  # fmt: skip
    # llama.py compares as soon as the key is there, and null is not the drafter's width
    keeps = "target_hidden_size" in config and target_hidden != hidden
    notes += _unread(config, inner, mla, release)
    bias = _flag(config, "bias", False)
    return Keys(
        mla, ids, _flag(inner, "use_aux_hidden_state", True), hidden, target_hidden, num_aux, joint, each,
        bias, bias or _flag(config, "attention_bias", False), tied, vocab, draft_vocab,
        null_vocab and not tied, keeps, layers, heads,
        _number(config, "num_key_value_heads", heads), positions, facts, tuple(notes), tuple(refusals),
    )  # fmt: skip


def _switches(
    config: Mapping[str, Any], inner: Mapping[str, Any], mla: bool, release: Release, notes: list[KeyNote]
) -> tuple[bool, bool, bool]:
    """(norm_before_fc, fc_norm, norm_output) as they take effect."""
    nested, top = inner.get("norm_before_fc"), _flag(config, "norm_before_fc", False)
    joint = bool(nested) if "norm_before_fc" in inner else top
    if "norm_before_fc" in inner and "norm_before_fc" in config and bool(nested) != top:
        notes.append(
            KeyNote("norm_before_fc", top, "ignored", "eagle_config has its own, which is read first",
                    release.at("norm_before_fc"))
        )  # fmt: skip
    if joint and (mla or not release.norm_before_fc):
        key = "eagle_config.norm_before_fc" if "norm_before_fc" in inner else "norm_before_fc"
        why = "its drafter with latent attention has no such norm" if mla else "releases before 0.5.17 do not read it"
        notes.append(KeyNote(key, True, "ignored", why, release.at("mla" if mla else "norm_before_fc")))
        joint = False
    each = _flag(config, "fc_norm", False) or _flag(config, "use_aux_norm", False)
    feedback = _flag(config, "norm_output", False)
    if mla and not release.mla_switches:
        for key in ("fc_norm", "use_aux_norm", "norm_output"):
            if config.get(key):
                why = "releases before 0.5.13 do not read it in a drafter with latent attention"
                notes.append(KeyNote(key, config[key], "ignored", why, release.at("mla")))
        each = feedback = False
    return joint, each, feedback


def _about_ids(
    config: Mapping[str, Any],
    inner: Mapping[str, Any],
    ids: tuple[int, ...] | None,
    top: tuple[int, ...] | None,
    mla: bool,
    release: Release,
) -> Iterator[KeyNote]:
    if top is not None:
        why = "the ids in eagle_config are read" if ids is not None else "ids are read in eagle_config only"
        yield KeyNote(IDS, list(top), "ignored", f"for capture {why}", release.at("capture ids"))
    if ids is None:
        yield KeyNote(
            f"eagle_config.{IDS}", None, "defaulted", "without ids the target's default taps are captured, and no "
            "line is logged", release.at("capture ids"),
        )  # fmt: skip
    if not _flag(inner, "use_aux_hidden_state", True):
        yield KeyNote(
            "eagle_config.use_aux_hidden_state", False, "overridden",
            "no taps: the drafter is fed the target's last hidden state", release.at("capture ids"),
        )  # fmt: skip
    if mla and config.get("num_aux_hidden_states") is not None:
        yield KeyNote(
            "num_aux_hidden_states", config["num_aux_hidden_states"], "ignored", "ids are counted instead",
            release.at("mla num_aux"),
        )  # fmt: skip


def _unread(config: Mapping[str, Any], inner: Mapping[str, Any], mla: bool, release: Release) -> Iterator[KeyNote]:
    where = release.at("mla" if mla else "residual")
    for name, group in (("", config), ("eagle_config.", inner)):
        if group.get("norm_before_residual"):
            yield KeyNote(
                f"{name}norm_before_residual", group["norm_before_residual"], "ignored",
                "no line of it reads the key: the residual starts before hidden_norm", where,
            )  # fmt: skip
        for key in _UNREAD:
            if group.get(key):
                yield KeyNote(f"{name}{key}", group[key], "ignored", "no line of its drafters reads the key", where)
    if config.get("attention_bias"):
        yield KeyNote(
            "attention_bias", True, "overridden", "queries, keys and values have no bias here; the output "
            "projection has one", release.at("qkv bias"),
        )  # fmt: skip
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield KeyNote(
            "sliding_window", config["sliding_window"], "ignored",
            "the drafter sees everything unless --speculative-draft-window-size is given", release.at("window"),
        )  # fmt: skip


def _refusals(config: Mapping[str, Any], architecture: str, mla: bool, release: Release) -> Iterator[Refusal]:
    if architecture not in (LLAMA, MLA):
        yield Refusal(
            "engine-cannot-express",
            f"architecture {architecture} is none of its EAGLE-3 drafters ({LLAMA}, {MLA})",
            "start",
            release.at("head"),
        )
    if mla and config.get("num_hidden_layers", 1) != 1:
        yield Refusal(
            "layers-dropped", f"its drafter with latent attention has one layer, not {config['num_hidden_layers']}",
            "start", release.at("mla layers"),
        )  # fmt: skip
    if not mla and "draft_vocab_size" not in config:
        yield Refusal(
            "weights-shape", "draft_vocab_size is not in config.json, and the attribute is read without a default",
            "start", release.at("head", "inferred"),
        )  # fmt: skip
    if not mla and "target_hidden_size" in config and config["target_hidden_size"] is None:
        yield Refusal(
            "weights-shape", "target_hidden_size is null, and null is multiplied where fc is built", "start",
            release.at("target_hidden_size", "inferred"),
        )  # fmt: skip


# -- rope ------------------------------------------------------------------------------------------------------


def _rope(config: Mapping[str, Any], release: Release) -> tuple[dict[str, Any], list[KeyNote]]:
    """The parameters after transformers' config class and the drafter's constructor; the last note is of a default."""
    scaling, parameters = (_object(config, key) for key in ("rope_scaling", "rope_parameters"))
    where = Source(f"transformers 5.24 modeling_rope_utils.py, then {release.at('rope').where}", "inferred")
    rope = dict(scaling or parameters)
    notes = []
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    top = config.get("rope_theta")
    for name, theta in (("rope_theta", top), ("rope_parameters.rope_theta", rope.get("rope_theta"))):
        if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float)):
            raise wrong(name, theta, "a number")
    if scaling and parameters and {**parameters, "rope_theta": 0} != {**scaling, "rope_theta": 0}:
        kept = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
        if kept != {k: v for k, v in scaling.items() if k not in ("rope_theta", "rope_type", "type")}:
            why = "rope_scaling is there too, and is taken whole"
            notes.append(KeyNote("rope_parameters", parameters, "ignored", why, where))
    if rope.get("rope_theta") is not None:
        if top is not None and top != rope["rope_theta"]:
            why = f"{'rope_scaling' if scaling else 'rope_parameters'} has {rope['rope_theta']}"
            notes.append(KeyNote("rope_theta", top, "ignored", why, where))
    elif top is not None:
        rope["rope_theta"] = top
    else:
        rope["rope_theta"] = _THETA
        notes.append(KeyNote("rope_theta", None, "defaulted", "10000 is taken, and no line is logged", where))
    if "mrope_section" in rope and rope["rope_type"] != "default":
        why = "with mrope_section the type is set to default"
        notes.insert(0, KeyNote("rope_parameters.rope_type", rope["rope_type"], "overridden", why, where))
        rope["rope_type"] = "default"
    return rope, notes


def reach(config: Mapping[str, Any]) -> int | None:
    """The context length SGLang derives from a model's config (utils/hf_transformers/common.py get_context_length)."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    factor: float = 1.0
    if isinstance(rope, Mapping) and "original_max_position_embeddings" not in rope:
        stated = rope.get("factor", 1)
        plain = rope.get("rope_type") != "llama3" and isinstance(stated, int | float)
        factor = float(stated) if plain else 1.0
    for key in ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings"):
        if type(text.get(key)) is int:
            return int(factor * text[key])
    return None


# -- values ----------------------------------------------------------------------------------------------------


def wrong(key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{key} of the drafter's config.json is {value!r}; {expected} was expected.",
        way_out="Correct the key, or restore the config that was saved with these weights.",
    )


def layer_ids(value: object, key: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not (isinstance(value, list | tuple) and all(type(v) is int for v in value)):
        raise wrong(key, value, "a list of layer numbers")
    return tuple(value)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise wrong("architectures", names, "a list with the name of a class")
    return names[0]


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise wrong(key, value, "an object")
    return value or {}


def _number(config: Mapping[str, Any], key: str, default: int | None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise wrong(key, value, "a number above zero")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(key, value, "true or false")
    return default if value is None else value
