"""TensorRT-LLM, PyTorch backend: _torch/models/modeling_speculative.py at commit 00679c6, _torch/speculative/eagle3.py
at 001e670 and llmapi/llm_args.py, three stored files of different days. Nothing of it was run.

Layers come from the launch (``speculative_config.eagle3_layers_to_capture``), never from the drafter's config; an id k
is captured after layer k, which is tap k+1. The drafter's class is ``Eagle3ForCausalLM`` whatever the config names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.contract import Contract, Fact
from eyas.dialects import layouts, rope
from eyas.dialects.keys import Keys
from eyas.dialects.wiring import (
    Basis,
    CannotExpress,
    Files,
    Inexpressible,
    KeyNote,
    Launch,
    Refusal,
    Source,
    TargetFacts,
    TensorNote,
    Wiring,
)
from eyas.errors import UsageError

NAME = "tensorrt-llm"
VERSIONS = ("0+00679c6",)
LAYERS_FLAG = "eagle3_layers_to_capture"
DEFAULT_TAPS = 3
_MODEL, _CAPTURE, _ARGS = "_torch/models/modeling_speculative.py", "_torch/speculative/eagle3.py", "llmapi/llm_args.py"
_IDS = "the layers are an argument of the launch, eagle3_layers_to_capture"
_IGNORED = {
    "eagle_aux_hidden_state_layer_ids": _IDS,
    "eagle_config.eagle_aux_hidden_state_layer_ids": _IDS,
    "norm_before_residual": "the residual always starts before hidden_norm",
    "norm_before_fc": "it is read inside eagle_config alone",
    "use_aux_norm": "the norms before fc are called fc_norm",
    "layer_types": "attention sees everything",
    "sliding_window": "attention sees everything",
}


def at(where: str, basis: Basis = "read") -> Source:
    return Source(f"tensorrt-llm {where}", basis)


@dataclass(frozen=True)
class _Capture:
    """``count`` is what the drafter is built for; taps are None where no target is known or the launch is refused."""

    count: int
    taps: tuple[int, ...] | None
    declared: bool
    refusal: Refusal | None = None


def wire(files: Files, target: TargetFacts | None, launch: Launch) -> Wiring:
    """What TensorRT-LLM makes of a drafter. Raises CheckpointError where a key cannot be what it is for, UsageError on
    layers of the launch that are no list of numbers."""
    keys = Keys(files.config)
    caught = _captured(target, launch)
    facts = _facts(keys, caught)
    tensors = _tensor_notes(keys, files, caught) if files.tensors is not None else ()
    if files.tensors is not None:
        names = layouts.read(files.tensors, "config.json").facts()
        facts["head"] = Fact(names["head"], "inferred")
    refusals = [caught.refusal] if caught.refusal else []
    if caught.count == 1 and not _skipped(keys, 1):
        why = "with one captured layer it makes no fc, and the widths of target and drafter differ (AttributeError)"
        refusals.append(Refusal("fc-skipped", why, "first forward", at(f"{_MODEL} Eagle3DraftModel", "inferred")))
    warnings = []
    if keys.count("draft_vocab_size") is None:
        why = "draft_vocab_size is missing and vocab_size is taken (a warning says so)"
        warnings.append(("vocab-map-inconsistent", why, at(f"{_MODEL} _ensure_draft_vocab_size")))
    return Wiring(
        name=NAME,
        version=str(launch.version),
        runner=None,
        source="table",
        taps=caught.taps,
        facts=Contract(facts),
        keys=_key_notes(keys),
        tensors=tensors,
        refusals=tuple(refusals),
        warnings=tuple(warnings),
        assumed=None
        if str(launch.version) in VERSIONS
        else f"the tables were read from commits 00679c6 and 001e670 of TensorRT-LLM, not from {launch.version}",
    )


# -- taps -------------------------------------------------------------------------------------------------------------


def _captured(target: TargetFacts | None, launch: Launch) -> _Capture:
    ids = _layers(launch.flags)
    if ids is not None:
        layers = sorted(set(ids))
        if target is not None and (beyond := [k for k in layers if not 0 <= k < target.num_layers]):
            why = (
                f"layer {beyond[0]} is none of the target's {target.num_layers}; its part of the states stays unfilled"
            )
            refusal = Refusal("taps-too-few", why, "first forward", at(f"{_CAPTURE} is_layer_capture", "inferred"))
            return _Capture(len(layers), None, True, refusal)
        return _Capture(len(layers), tuple(k + 1 for k in layers), True)
    if target is None:
        return _Capture(DEFAULT_TAPS, None, False)
    n = target.num_layers
    if n == 1:
        return _Capture(DEFAULT_TAPS, (1,), False)
    if n <= 5:
        why = f"a target of {n} layers has no default layers (ValueError); name them with {LAYERS_FLAG}"
        return _Capture(
            DEFAULT_TAPS, None, False, Refusal("taps-too-few", why, "start", at(f"{_CAPTURE} __post_init__"))
        )
    return _Capture(DEFAULT_TAPS, (2, n // 2, n - 3), False)


def _layers(flags: tuple[str, ...]) -> list[int] | None:
    """The layers of the launch: ``eagle3_layers_to_capture=[1,17,32]``, as in the yaml of extra arguments."""
    text = " ".join(flags)
    if LAYERS_FLAG not in text:
        return None
    match = re.search(LAYERS_FLAG + r"[\"']?\s*[:= ]\s*[\[{(]?([\d,\s-]*)", text)
    numbers = re.findall(r"-?\d+", match[1]) if match else []
    if not numbers:
        raise UsageError(
            f"{LAYERS_FLAG} of the launch names no layers in {text!r}.", way_out=f"Write it as {LAYERS_FLAG}=[1,17,32]."
        )
    return [int(number) for number in numbers]


# -- facts ------------------------------------------------------------------------------------------------------------


def _widths(keys: Keys) -> tuple[int | None, int | None]:
    """Of a tap and of the drafter."""
    own = keys.count("hidden_size")
    return keys.count("target_hidden_size") or own, own


def _skipped(keys: Keys, count: int) -> bool:
    """Whether fc and the norms before it are passed over: rows that are as wide as the drafter already."""
    tap, own = _widths(keys)
    return tap is not None and own is not None and count * tap == own


def _facts(keys: Keys, caught: _Capture) -> dict[str, Fact]:
    eagle = keys.inside("eagle_config")
    skipped = _skipped(keys, caught.count)
    each, joint = keys.flag("fc_norm"), eagle.flag("norm_before_fc")
    norm = each if each.value else joint  # one or the other, the first where both are asked for
    before = "none" if skipped or not norm.value else "each" if each.value else "joint"
    after = eagle.flag("return_hidden_post_norm")
    after = after if after.value else keys.flag("norm_output")
    layers, bias = keys.count("num_hidden_layers"), keys.flag("attention_bias")
    latent = keys.count("kv_lora_rank") is not None
    tap, own = _widths(keys)
    facts = {
        "tap_state": Fact("stream", "defaulted"),
        "fc": Fact("skipped" if skipped else "applied", "inferred"),
        "fc_norm": Fact(before, norm.origin),
        "attention": Fact("mla" if latent else "gqa", "declared" if latent else "defaulted"),
        "attention_bias": Fact(False, "defaulted") if latent else bias,
        "qk_norm": Fact(False, "defaulted"),
        "residual": Fact("before hidden_norm", "defaulted"),
        "head_norm": Fact(True, "defaulted"),
        "feedback": Fact("after the last norm" if after.value else "before the last norm", after.origin),
        "token_shift": Fact(1, "defaulted"),
        "position_offset": Fact(0, "defaulted"),
        "rope": rope.read(keys),
        "window": Fact(None, "defaulted"),
        "embedding": Fact("target" if tap == own else "own", "inferred"),
    }
    if caught.taps is not None:
        facts["taps"] = Fact(list(caught.taps), "declared" if caught.declared else "defaulted")
    if layers is not None:
        facts["layers"] = Fact(layers, "declared")
        if layers > 1:
            facts["later_norm"] = Fact("hidden_norm", "defaulted")
    if (positions := keys.count("max_position_embeddings")) is not None:
        facts["max_positions"] = Fact(positions, "declared")
    full, cut = keys.count("vocab_size"), keys.count("draft_vocab_size")
    if full is not None:
        facts["draft_vocab_size"] = Fact(cut or full, "declared" if cut else "defaulted")
        facts["vocab_map"] = Fact("none" if cut in (None, full) else "offsets", "inferred")
    return facts


def _key_notes(keys: Keys) -> tuple[KeyNote, ...]:
    notes = []
    for dotted, why in _IGNORED.items():
        *outer, key = dotted.split(".")
        held = (keys.inside(outer[0]) if outer else keys).config.get(key)
        if held not in (None, False):
            notes.append(KeyNote(dotted, held, "ignored", why, at(_ARGS if why == _IDS else _MODEL)))
    if keys.flag("fc_norm").value and keys.inside("eagle_config").flag("norm_before_fc").value:
        why = "fc_norm is asked for too, and one of the two is applied"
        notes.append(KeyNote("eagle_config.norm_before_fc", True, "overridden", why, at(f"{_MODEL} apply_eagle3_fc")))
    return tuple(notes)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tensor_notes(keys: Keys, files: Files, caught: _Capture) -> tuple[TensorNote, ...]:
    """``load_weights`` writes ``midlayer.`` for ``layers.0.`` (``midlayer.N.`` where there are several) and puts
    ``model.`` before everything but the head; what its modules then do not ask for is passed over."""
    assert files.tensors is not None
    layout = layouts.read(files.tensors, "config.json")
    several = (keys.count("num_hidden_layers") or 1) > 1
    facts, notes = _facts(keys, caught), []
    loaded = at(f"{_MODEL} load_weights", "inferred")
    norms = str(facts["fc_norm"].value)
    for ours, theirs in layout.names.items():
        dropped = _dropped(ours, theirs, several, norms, bool(facts["attention_bias"].value))
        if ours == "embed_tokens.weight" and facts["embedding"].value == "target":
            dropped = "the target's embedding is used, as wide as the drafter's"
        if dropped:
            notes.append(TensorNote(theirs, "dropped", dropped, "silent", loaded))
    if "lm_head.weight" not in layout.names:
        source = at(f"{_MODEL} load_weights_from_target_model")
        notes.append(TensorNote("lm_head.weight", "shared", "the target's head is used", "silent", source))
    if "vocab_map" in facts and facts["vocab_map"].value == "offsets" and "d2t" not in layout.names:
        why = "draft_vocab_size is smaller than vocab_size, and the map keeps whatever memory held"
        notes.append(TensorNote("d2t", "unfilled", why, "silent", at(f"{_MODEL} Eagle3DraftModel", "inferred")))
    return tuple(notes)


def _dropped(ours: str, theirs: str, several: bool, norms: str, bias: bool) -> str | None:
    """Why a tensor finds no place, or None."""
    if ours == "t2d":
        return "not used at run time"
    if theirs.startswith("model."):
        return "model. is put before it once more"
    if ours == "input_norm.weight":
        return None if norms == "joint" else "eagle_config.norm_before_fc is not set, or fc_norm is"
    if ours.startswith("fc_norm."):
        return None if norms == "each" and theirs == ours else "fc_norm is not set, or this is not its name"
    if several and theirs.startswith("midlayer.") and not re.match(r"midlayer\.\d", theirs):
        return "of several layers the first is called layers.0 or midlayer.0"
    if ours.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
        return "queries and keys are not normed"
    if ours.endswith("_proj.bias") and "self_attn" in ours and not bias:
        return "attention_bias is not set"
    if re.fullmatch(r"layers\.\d+\.input_layernorm\.weight", ours):
        return "later layers are normed with hidden_norm"
    return None


# -- writing ----------------------------------------------------------------------------------------------------------

_WHY = {
    "fc_norm": ("either the joint norm or one for each tap is applied", f"{_MODEL} apply_eagle3_fc"),
    "residual": ("no key is read for it", f"{_MODEL} Eagle3DecoderLayer"),
    "qk_norm": ("its attention has no such norms", f"{_MODEL} Eagle3Attention"),
    "later_norm": ("later layers have no other norm", f"{_MODEL} Eagle3DecoderLayer"),
    "embedding": ("the drafter's own is loaded only where its width is not the target's", f"{_MODEL} Eagle3DraftModel"),
    "fc": ("fc is called unless its input is as wide as its output", f"{_MODEL} apply_eagle3_fc"),
}


def write(contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch) -> dict[str, Any]:
    """A config that TensorRT-LLM wires as ``contract`` says, started as ``launch``. Raises CannotExpress otherwise,
    naming the argument of the launch where it is the layers that do not fit."""
    facts = {name: contract[name] for name in contract}
    dropped = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "use_aux_norm", "layer_types")
    written = {key: value for key, value in config.items() if key not in dropped}
    written.pop("eagle_aux_hidden_state_layer_ids", None)  # read by others; here it would only mislead
    eagle = {"use_aux_hidden_state": True}
    if facts.get("fc_norm") in ("each", "joint, then each"):
        written["fc_norm"] = True
    elif facts.get("fc_norm") == "joint":
        eagle["norm_before_fc"] = True
    if facts.get("feedback") == "after the last norm":
        written["norm_output"] = True
    written["eagle_config"] = eagle
    direct = {
        "attention_bias": "attention_bias",
        "layers": "num_hidden_layers",
        "max_positions": "max_position_embeddings",
        "draft_vocab_size": "draft_vocab_size",
    }
    written |= {key: facts[fact] for fact, key in direct.items() if fact in facts}
    if "rope" in facts:
        turns = rope.normal(facts["rope"])
        written |= {"rope_parameters": turns, "rope_theta": turns["rope_theta"]}
        written.pop("rope_scaling", None)
        if turns["rope_type"] != "default":
            written["rope_scaling"] = {k: v for k, v in turns.items() if k != "rope_theta"}
    wired = wire(Files(written), target, launch)
    lost = [_lost(*difference) for difference in contract.differences(wired.facts)]
    if "taps" in facts and "taps" not in wired.facts:
        lost.insert(0, _lost("taps", facts["taps"], None))
    if lost:
        raise CannotExpress(NAME, lost)
    return json.loads(json.dumps(written))  # type: ignore[no-any-return]


def _lost(fact: str, wanted: Any, nearest: Any) -> Inexpressible:
    why, where = _WHY.get(fact, ("its drafter has no other", _MODEL))
    if fact == "taps":
        where = f"{_ARGS} Eagle3DecodingConfig"
        ids = [t - 1 for t in wanted]
        order = sorted(set(wanted)) == list(wanted)
        why = (
            f"the launch names the layers: {LAYERS_FLAG}={ids}" if order and min(ids) >= 0 else "no list of layers does"
        )
    return Inexpressible(fact, wanted, nearest, why, at(where))
