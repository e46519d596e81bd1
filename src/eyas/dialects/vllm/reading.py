"""A drafter's config as vLLM's config classes hand it to the drafter's class, and its values checked on the way.

Two spellings are read. A plain config goes through transformers' class of its ``model_type``, which fills what is
missing, and through ``EAGLEConfig``, which renames the architecture. One with ``speculators_config`` and no
``model_type`` goes through ``SpeculatorsConfig``: its layer's keys as they stand, some top-level keys over them, and
nothing filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.contract import Origin
from eyas.dialects.vllm.source import ALGOS, ran
from eyas.dialects.wiring import Refusal
from eyas.errors import CheckpointError

Kind = Literal["llama", "qwen3", "deepseek"]
LAYER = "transformer_layer_config"

# model_executor/models/registry.py:658 and following.
CLASSES: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
        ),
        "llama",
    ),
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "deepseek",
    "Eagle3DeepseekV3ForCausalLM": "deepseek",
}
SPECULATORS: dict[str, Kind] = {"llama": "llama", "qwen3": "qwen3"}  # algos.py:39

# What transformers 5.19 fills in, by model_type.
_COMMON = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
}
FILLED: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen3": {
        **_COMMON,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}
_GETATTR = {"max_position_embeddings": 8192}  # what the classes take where an attribute is not there (llama.py:236)
OVER_THE_LAYER = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_NUMBERS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "num_aux_layers",
    "max_position_embeddings",
    "sliding_window",
]
_SWITCHES = (*OVER_THE_LAYER, "attention_bias", "bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_LISTS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "dspark_target_layer_ids", "layer_ids")
_OBJECTS = ("eagle_config", "dflash_config", "rope_parameters", "rope_scaling", LAYER, "speculators_config")


@dataclass(frozen=True)
class Reading:
    """``values``: what the class finds under each name. ``given``: the names that the file itself decides."""

    style: Literal["hf", "speculators"]
    architecture: str | None
    kind: Kind | None
    values: Mapping[str, Any]
    given: frozenset[str]
    rope_key: str | None
    refusals: tuple[Refusal, ...] = field(default=())

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def on(self, switch: str) -> bool:
        return bool(self.values.get(switch))

    def origin(self, *keys: str) -> Origin:
        return "declared" if self.given & set(keys) else "defaulted"

    def key(self, name: str) -> str:
        """Where the file says it."""
        inside = self.style == "speculators" and name not in (*OVER_THE_LAYER, "draft_vocab_size", "target_hidden_size")
        return f"{LAYER}.{name}" if inside else name

    @property
    def eagle(self) -> Mapping[str, Any]:
        found = self.values.get("eagle_config")
        return found if isinstance(found, Mapping) else {}


def read(config: Mapping[str, Any]) -> Reading:
    """Raises CheckpointError where a value cannot be what its key is for."""
    require_sane(config)
    if config.get("model_type") is None and config.get("speculators_config") is not None:
        return _speculators(config)
    return _plain(config)


def _plain(config: Mapping[str, Any]) -> Reading:
    model_type = config.get("model_type")
    given = {key: value for key, value in config.items() if value is not None or key == "target_hidden_size"}
    values = {**FILLED.get(str(model_type), {}), **config}
    for key, value in FILLED.get(str(model_type), {}).items():
        if values.get(key) is None:
            values[key] = value
    if model_type == "qwen3":
        _qwen3_windows(values)
    refusals = []
    if model_type is None:
        why = "it has no model_type, from which transformers would know the class of the config (ValueError)"
        refusals.append(Refusal("checkpoint-unreadable", why, "start", ran("transformers_utils/config.py:336")))
    names = config.get("architectures")
    architecture = names[0] if names else "LlamaModel" if model_type == "llama" else None
    if architecture and not (architecture.startswith("Eagle3") or architecture.endswith("Eagle3")):
        architecture = f"Eagle3{architecture}"  # configs/eagle.py:62
    kind = CLASSES.get(str(architecture))
    if kind is None:
        said = f"architectures is {names!r}" if names else "it has no architectures"
        why = f"{said}, which makes {architecture}: no drafter's class of that name (ValueError)"
        refusals.append(Refusal("engine-cannot-express", why, "start", ran("model_executor/models/registry.py:658")))
    rope_key = _rope(values, config)
    return Reading("hf", architecture, kind, values, frozenset(given), rope_key, tuple(refusals))


def _speculators(config: Mapping[str, Any]) -> Reading:
    """``SpeculatorsConfig`` (configs/speculators/base.py:53) with ``update_eagle3`` (algos.py:16)."""
    layer = config.get(LAYER) or {}
    values = {k: v for k, v in layer.items() if k not in ("model_type", "architectures")}
    values["norm_before_residual"] = config.get("norm_before_residual", True)
    for switch in OVER_THE_LAYER[1:]:
        values[switch] = config.get(switch, False)
    values["draft_vocab_size"] = config.get("draft_vocab_size")
    given = {k for k, v in layer.items() if v is not None}
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if config.get(key):
            values[key] = config[key]
    given -= {*OVER_THE_LAYER, "draft_vocab_size"}
    given |= {k for k in (*OVER_THE_LAYER, "draft_vocab_size", "target_hidden_size") if config.get(k) is not None}
    given |= {"eagle_aux_hidden_state_layer_ids"} if values.get("eagle_aux_hidden_state_layer_ids") else set()
    for key, value in _GETATTR.items():
        values.setdefault(key, value)
    algorithm, model_type = config.get("speculators_model_type"), str(layer.get("model_type", "llama"))
    kind = SPECULATORS.get(model_type) if algorithm == "eagle3" else None
    refusals = []
    if kind is None:
        why = f"of speculators' format it takes eagle3 over llama or qwen3 here, not {algorithm} over {model_type}"
        refusals.append(Refusal("engine-cannot-express", f"{why} (ValueError)", "start", ran(f"{ALGOS}:39")))
    name = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}.get(kind or "")
    rope_key = _rope(values, layer)
    return Reading("speculators", name, kind, values, frozenset(given), rope_key, tuple(refusals))


def _qwen3_windows(values: dict[str, Any]) -> None:
    """As transformers' Qwen3Config derives them."""
    if not values.get("use_sliding_window"):
        values["sliding_window"] = None
    elif values.get("sliding_window") is None:
        values["sliding_window"] = 4096
    if values.get("layer_types") is None:
        first, window = values.get("max_window_layers", 28), values["sliding_window"]
        values["layer_types"] = [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(values["num_hidden_layers"])
        ]


def _rope(values: dict[str, Any], config: Mapping[str, Any]) -> str | None:
    """Put the rotary parameters in force under ``rope_parameters``; the key that gave them.

    ``rope_scaling`` where it is there takes the place of all ``rope_parameters``, theta included; a theta that is not
    in the one chosen is the top level's, then 10000.
    """
    key = next((k for k in ("rope_scaling", "rope_parameters") if config.get(k)), None)
    made = {k: v for k, v in (config.get(key) or {} if key else {}).items() if k != "type"}
    kind = (config.get(key) or {}).get("type", "default") if key else "default"
    made = {"rope_type": made.pop("rope_type", kind), **made}
    nested = any(isinstance(v, Mapping) for v in made.values())  # a set for each kind of layer
    if not nested:
        made.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
        values["rope_parameters"] = made
    else:
        values["rope_parameters"] = dict(config[str(key)])
    return key or ("rope_theta" if config.get("rope_theta") else None)


# -- sanity ---------------------------------------------------------------------------------------------------


def require_sane(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the key, where a value is not of its kind."""
    _check(config, "")
    for name in _OBJECTS:
        if isinstance(config.get(name), Mapping):
            _check(config[name], f"{name}.")


def _check(level: Mapping[str, Any], prefix: str) -> None:
    for names, fits, expected in _KINDS:
        for name in names:
            value = level.get(name)
            if value is not None and not fits(value):
                raise CheckpointError(
                    f"{prefix}{name} of config.json is {value!r}; {expected} was expected.",
                    way_out="Correct the key, or restore the config that was saved with these weights.",
                )


def _is_number(value: object) -> bool:
    return type(value) is int and value > 0


def _is_list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


_KINDS: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (tuple(_NUMBERS), _is_number, "a number above zero"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (_LISTS, _is_list_of(int), "a list of layer numbers"),
    (("architectures", "layer_types"), _is_list_of(str), "a list of names"),
    (_OBJECTS, lambda value: isinstance(value, Mapping), "an object"),
    (("model_type", "speculators_model_type"), lambda value: isinstance(value, str), "a name"),
    (("rope_theta",), lambda value: type(value) in (int, float) and value > 0, "a number above zero"),  # type: ignore[operator]
)
