"""llama.cpp: its converter (conversion/llama.py) and graph (src/models/eagle3.cpp) at commit 0274f0f, its loader at
0.5.0, which was run (runs/llama_cpp.py): layers have another key there, and a joint norm may stand before fc.

It is asked about two kinds of files. A Hugging Face folder goes through the converter, which writes the default layers
whatever the config says and reads ``norm_before_residual`` of all the switches. A GGUF of eyas (``gguf_export``) says
its layers itself; ``write`` makes the key-values of one. Layer ids are taps (the input of a layer), concatenated as
they are listed (common/speculative.cpp, ``process``).

The commit is of before the releases had numbers: version 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from eyas.contract import Contract, Fact
from eyas.dialects import hf, layouts, rope
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
from eyas.errors import CheckpointError

NAME = "llama.cpp"
VERSIONS = ("0+0274f0f", "0.5.0")
NUMBERED = Version(VERSIONS[-1])
ARCH = "eagle3"
TAPS = 3  # eagle3.cpp:10 throws on any other number
IS_GGUF = "general.architecture"

# Our tensor names and the loader's (eagle3.cpp, load_arch_tensors).
TENSORS = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
ROPE_FREQS = "rope_freqs.weight"
ROPES = ("default", "linear", "llama3")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel", "Eagle3LlamaForCausalLM")
# What the graph is whatever the files say.
_GRAPH: dict[str, Any] = {
    "tap_state": "stream",
    "fc": "applied",
    "fc_norm": "none",
    "layers": 1,
    "attention": "gqa",
    "attention_bias": False,
    "qk_norm": False,
    "head_norm": True,
    "feedback": "before the last norm",
    "token_shift": 1,
    "position_offset": 0,
    "window": None,
}
_IGNORED = {
    "eagle_aux_hidden_state_layer_ids": "the converter writes the default layers",
    "eagle_config.eagle_aux_hidden_state_layer_ids": "the converter writes the default layers",
    "norm_output": "the state handed on is the one before the last norm",
    "fc_norm": "no norm stands before fc",
    "use_aux_norm": "no norm stands before fc",
    "norm_before_fc": "no norm stands before fc",
    "eagle_config.norm_before_fc": "no norm stands before fc",
    "layer_types": "attention sees everything",
    "sliding_window": "attention sees everything",
    "attention_bias": "queries, keys and values have no bias",
}
_CONVERTER, _GRAPH_CPP = "conversion/llama.py", "src/models/eagle3.cpp"


def at(where: str, basis: Basis = "read") -> Source:
    return Source(f"llama.cpp {'0.5.0' if basis == 'executed' else '0274f0f'} {where}", basis)


def wire(files: Files, target: TargetFacts | None, launch: Launch) -> Wiring:
    """What llama.cpp makes of a folder that its converter is given, or of a GGUF whose key-values are the config."""
    keys = Keys(files.config)
    if IS_GGUF in files.config:
        facts, refusals = _gguf(keys, files, target, launch)
    else:
        facts, refusals = _folder(keys, files, target)
    taps = facts["taps"].value if "taps" in facts else None
    return Wiring(
        name=NAME,
        version=str(launch.version),
        runner=None,
        source="table",
        taps=tuple(taps) if taps is not None else None,
        facts=Contract(facts),
        keys=() if IS_GGUF in files.config else _key_notes(keys),
        tensors=() if IS_GGUF in files.config else _tensor_notes(files),
        refusals=tuple(refusals),
        assumed=None
        if str(launch.version) in VERSIONS
        else f"llama.cpp {launch.version} is not in the tables; what {_known(launch)} does is said",
    )


def _known(launch: Launch) -> str:
    return VERSIONS[-1] if launch.version >= NUMBERED else VERSIONS[0]


def _layers_key(launch: Launch) -> str:
    return f"{ARCH}.{'target' if launch.version >= NUMBERED else 'extract'}_layers"


def _default_taps(target: TargetFacts) -> list[int]:
    return [2, target.num_layers // 2, target.num_layers - 3]


# -- a Hugging Face folder, through the converter ---------------------------------------------------------------------


def _folder(keys: Keys, files: Files, target: TargetFacts | None) -> tuple[dict[str, Fact], list[Refusal]]:
    facts = {name: Fact(value, "defaulted") for name, value in _GRAPH.items()}
    if target is not None:
        facts["taps"] = Fact(_default_taps(target), "defaulted")
    before = keys.flag("norm_before_residual")
    facts["residual"] = Fact("after hidden_norm" if before.value else "before hidden_norm", before.origin)
    facts["rope"] = _converted_rope(keys)
    if (positions := keys.count("max_position_embeddings")) is not None:
        facts["max_positions"] = Fact(positions, "declared")
    refusals = _conversion(keys)
    words = keys.count("draft_vocab_size")
    if files.tensors is None:
        if words is not None:
            facts["draft_vocab_size"] = Fact(words, "declared")
        return facts, refusals
    layout = layouts.read(files.tensors, "config.json")
    names = layout.facts()
    facts |= {fact: Fact(names[fact], "inferred") for fact in ("embedding", "head")}
    mapped = layout.names.get("d2t")
    facts["vocab_map"] = Fact("offsets" if mapped else "none", "inferred")
    full = target.vocab_size if target is not None else keys.count("vocab_size")
    size = files.tensors[mapped].shape[0] if mapped else full  # the loader counts d2t, not the key
    if size is not None:
        facts["draft_vocab_size"] = Fact(size, "inferred")
    return facts, refusals + _loading(keys, layout, files)


def _converted_rope(keys: Keys) -> Fact:
    """Rope as the converter carries it over; llama3's original length only from top level (``generate_extra_tensors``),
    and types it does not know not at all."""
    found = rope.read(keys)
    value = dict(found.value)
    if value["rope_type"] == "llama3":
        value["original_max_position_embeddings"] = keys.count("original_max_position_embeddings") or 8192
    elif value["rope_type"] not in (*ROPES, "yarn"):
        return Fact({"rope_type": "default", "rope_theta": value["rope_theta"]}, "defaulted")
    return Fact(value, found.origin)


def _conversion(keys: Keys) -> list[Refusal]:
    """Where the converter stops, or takes the drafter for another model."""
    found = []
    layers, words = keys.count("num_hidden_layers"), keys.count("draft_vocab_size")
    if layers != 1 or words is None:
        why = f"it is EAGLE-3 to the converter only with draft_vocab_size and one layer; here {words} and {layers}"
        found.append(Refusal("engine-cannot-express", why, "start", at(f"{_CONVERTER} __init__")))
    names = keys.texts("architectures")
    if names and names[0] not in ARCHITECTURES:
        why = f"the converter knows no {names[0]} as a drafter; it knows {', '.join(ARCHITECTURES)}"
        found.append(Refusal("engine-cannot-express", why, "start", at(f"{_CONVERTER} register")))
    return found


def _loading(keys: Keys, layout: layouts.Layout, files: Files) -> list[Refusal]:
    """Where names have no place in a GGUF, or fc takes other than three taps."""
    found = []
    known, skipped = TENSORS.keys() - {"input_norm.weight"}, {"t2d"}
    placed = {ours: theirs for ours, theirs in layout.names.items() if ours in known or ours in skipped}
    strange = sorted(layout.names[n] for n in layout.names.keys() - placed.keys())
    loaded = [n for n in strange if n.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))]
    loaded += [n for n in strange if n.endswith((".q_norm.weight", ".k_norm.weight"))]
    unmapped = [n for n in strange if n not in loaded]
    unmapped += [theirs for ours, theirs in placed.items() if not _renamed(theirs)]
    if unmapped:
        why = f"the converter has no name for {', '.join(sorted(unmapped)[:6])} (ValueError: Can not map tensor)"
        found.append(Refusal("weights-unexpected", why, "start", at("conversion/base.py map_tensor_name", "inferred")))
    if loaded:
        why = f"the loader makes no tensor for {', '.join(loaded[:6])} (wrong number of tensors)"
        source = at("src/llama-model-loader.cpp done_getting_tensors", "executed")
        found.append(Refusal("engine-cannot-express", why, "start", source))
    wide = keys.count("target_hidden_size") or keys.count("hidden_size")
    fc = files.tensors[layout.names["fc.weight"]].shape if files.tensors and "fc.weight" in layout.names else None
    if fc and wide and len(fc) == 2 and fc[1] != TAPS * wide:
        why = f"fc takes rows {fc[1]} wide and three taps are {TAPS * wide} wide; it runs exactly three"
        found.append(Refusal("taps-too-few", why, "start", at(f"{_GRAPH_CPP}:10")))
    return found


def _renamed(name: str) -> bool:
    """Whether the converter finds the tensor under this name: it takes ``model.`` before layers and nowhere else that
    it treats by name."""
    bare = name.removeprefix("model.")
    if name.startswith("model.model.") or name.startswith("model.midlayer."):
        return False
    return not (name.startswith("model.") and bare in ("fc.weight", "d2t", "t2d"))


def _key_notes(keys: Keys) -> tuple[KeyNote, ...]:
    notes = []
    for dotted, why in _IGNORED.items():
        *outer, key = dotted.split(".")
        held = (keys.inside(outer[0]) if outer else keys).config.get(key)
        if held not in (None, False):
            notes.append(KeyNote(dotted, held, "ignored", why, at(_CONVERTER)))
    parameters = rope.read(keys).value
    original = parameters.get("original_max_position_embeddings")
    if parameters["rope_type"] == "llama3" and (wired := _converted_rope(keys).value) != parameters:
        why = f"the converter looks for it at top level and takes {wired['original_max_position_embeddings']}"
        source = at(f"{_CONVERTER} generate_extra_tensors")
        notes.append(KeyNote("rope_parameters.original_max_position_embeddings", original, "defaulted", why, source))
    return tuple(notes)


def _tensor_notes(files: Files) -> tuple[TensorNote, ...]:
    if files.tensors is None:
        return ()
    names, notes = layouts.read(files.tensors, "config.json").names, []
    if "t2d" in names:
        notes.append(TensorNote(names["t2d"], "dropped", "not used at run time", "silent", at(_CONVERTER)))
    for ours, whose in (("lm_head.weight", "head"), ("embed_tokens.weight", "embedding")):
        if ours not in names:
            notes.append(TensorNote(ours, "shared", f"the target's {whose} is used", "silent", at(_GRAPH_CPP)))
    return tuple(notes)


# -- a GGUF -----------------------------------------------------------------------------------------------------------


def _gguf(
    keys: Keys, files: Files, target: TargetFacts | None, launch: Launch
) -> tuple[dict[str, Fact], list[Refusal]]:
    if keys.text(IS_GGUF) != ARCH:
        raise CheckpointError(
            f"This GGUF holds a model of architecture {files.config[IS_GGUF]!r}; {ARCH!r} was expected.",
            way_out="Name the drafter's file; that of the target is another.",
        )
    facts = {name: Fact(value, "defaulted") for name, value in _GRAPH.items()}
    taps = keys.ids(_layers_key(launch)) or ()
    before = keys.flag(f"{ARCH}.norm_before_residual")
    facts["taps"] = Fact(list(taps), "declared")
    if launch.version >= NUMBERED and keys.flag(f"{ARCH}.norm_before_fc").value:
        facts["fc_norm"] = Fact("joint", "declared")
    facts["residual"] = Fact("after hidden_norm" if before.value else "before hidden_norm", before.origin)
    facts["rope"] = Fact(_rope_of_gguf(keys), "declared")
    facts["max_positions"] = Fact(keys.count(f"{ARCH}.context_length"), "declared")
    refusals = []
    if len(taps) != TAPS:
        why = f"{_layers_key(launch)} has {len(taps)} entries; exactly three are taken"
        refusals.append(Refusal("taps-too-few", why, "start", at(f"{_GRAPH_CPP} load_arch_hparams", "executed")))
    if target is not None and (beyond := [t for t in taps if not 0 <= t < target.num_layers]):
        why = f"layer {beyond[0]} of the target's {target.num_layers} has no input to hand over"
        refusals.append(Refusal("taps-too-few", why, "first forward", at("common/speculative.cpp process")))
    if (layers := keys.count(f"{ARCH}.block_count")) != 1:
        source = at(f"{_GRAPH_CPP} load_arch_tensors", "executed")
        refusals.append(Refusal("layers-dropped", f"it asserts one layer, here {layers}", "start", source))
    if keys.text("tokenizer.ggml.model") is None:
        source = at("src/llama-vocab.cpp load", "executed")
        refusals.append(Refusal("tokenizer-differs", "the file has no tokenizer (key not found)", "start", source))
    if files.tensors is not None:
        there = files.tensors
        facts["embedding"] = Fact("own" if "token_embd.weight" in there else "target", "inferred")
        facts["head"] = Fact("own" if "output.weight" in there else "target", "inferred")
        refusals += _tensors_of_gguf(files, facts["fc_norm"].value == "joint")
        if "d2t" not in there:  # else it holds ids where the folder's holds offsets: the same map in another file
            facts["vocab_map"] = Fact("none", "inferred")
        size = there["d2t"].shape[0] if "d2t" in there else keys.count(f"{ARCH}.vocab_size")
        facts["draft_vocab_size"] = Fact(size, "inferred")
    return facts, refusals


def _tensors_of_gguf(files: Files, joint: bool) -> list[Refusal]:
    """The loader wants every tensor that it makes and no other; four it can do without."""
    names, found = set(files.tensors or {}), []
    made = {theirs for ours, theirs in TENSORS.items() if joint or ours != "input_norm.weight"}
    missing = sorted(made - names - {"d2t", "token_embd.weight", "output.weight"})
    surplus = sorted(names - made - {ROPE_FREQS})
    if missing:
        why = f"{', '.join(missing)} is missing"
        found.append(Refusal("weights-missing", why, "start", at("src/llama-model-loader.cpp", "executed")))
    if surplus:
        why = f"it makes no tensor for {', '.join(surplus)} (wrong number of tensors)"
        found.append(Refusal("weights-unexpected", why, "start", at("src/llama-model-loader.cpp", "executed")))
    return found


def _rope_of_gguf(keys: Keys) -> dict[str, Any]:
    """``llama3`` lies in the tensor rope_freqs as factors; the numbers they were made of stand in ``eyas.rope``."""
    kind = keys.text(f"{ARCH}.rope.scaling.type") or "default"
    value: dict[str, Any] = {"rope_type": kind, "rope_theta": short(files_number(keys, f"{ARCH}.rope.freq_base"))}
    if kind == "linear":
        value["factor"] = short(files_number(keys, f"{ARCH}.rope.scaling.factor"))
    for key, number in keys.config.items():
        if key.startswith("eyas.rope."):
            value[key.removeprefix("eyas.rope.")] = short(number) if isinstance(number, float) else number
    return value


def files_number(keys: Keys, key: str) -> float:
    value = keys.config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(
            f"{key} of the GGUF is {value!r}; a number was expected.", way_out="Write the file again."
        )
    return float(value)


def short(number: float) -> float:
    """A number as it was before GGUF kept it in 32 bits."""
    return float(f"{number:.7g}")


# -- writing ----------------------------------------------------------------------------------------------------------

_WHY = {
    "taps": ("it takes three, each the input of a layer, so 0 to n - 1", f"{_GRAPH_CPP}:10"),
    "tap_state": ("it hands over the stream", "common/speculative.cpp process"),
    "fc_norm": ("before fc stands no norm, or since 0.5.0 one over all taps", f"{_GRAPH_CPP} graph<true>"),
    "layers": ("it asserts one layer", f"{_GRAPH_CPP} graph<false>"),
    "feedback": ("the state handed on is the one before the last norm", f"{_GRAPH_CPP} graph<false>"),
    "rope": (f"of ropes it is given {', '.join(ROPES)}", f"{_CONVERTER} generate_extra_tensors"),
}


def write(contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch) -> dict[str, Any]:
    """The key-values of a GGUF that makes llama.cpp wire ``contract``, its tokenizer apart.

    Raises CannotExpress on every fact it has no place for. The shape is that of ``config``.
    """
    if "taps" not in contract:
        raise CheckpointError(
            "This drafter's taps are not known, so no file can name them.",
            way_out="Say what trained it, or measure them with `eyas check`.",
        )
    wanted = list(contract["taps"])
    possible = len(wanted) == TAPS and all(0 <= t < target.num_layers for t in wanted)
    shape = hf.read_shape(config, tuple(wanted), "config.json")
    turns = dict(contract["rope"] if "rope" in contract else shape["rope_parameters"])
    if turns["rope_type"] not in ROPES:
        turns = {"rope_type": "default", "rope_theta": turns["rope_theta"]}
    positions = contract["max_positions"] if "max_positions" in contract else shape["max_position_embeddings"]
    after = contract["residual"] == "after hidden_norm" if "residual" in contract else shape["norm_before_residual"]
    layers = wanted if possible else _default_taps(target)
    joint = contract["fc_norm"] == "joint" if "fc_norm" in contract else bool(shape["norm_before_fc"])
    fields: dict[str, Any] = {
        IS_GGUF: ARCH,
        "general.type": "model",
        f"{ARCH}.block_count": 1,
        f"{ARCH}.context_length": positions,
        f"{ARCH}.embedding_length": shape["hidden_size"],
        f"{ARCH}.feed_forward_length": shape["intermediate_size"],
        f"{ARCH}.attention.head_count": shape["num_attention_heads"],
        f"{ARCH}.attention.head_count_kv": shape["num_key_value_heads"],
        f"{ARCH}.attention.key_length": shape["head_dim"],
        f"{ARCH}.attention.value_length": shape["head_dim"],
        f"{ARCH}.attention.layer_norm_rms_epsilon": float(shape["rms_norm_eps"]),
        f"{ARCH}.vocab_size": target.vocab_size,
        f"{ARCH}.rope.dimension_count": shape["head_dim"],
        f"{ARCH}.rope.freq_base": float(turns["rope_theta"]),
        f"{ARCH}.target_layers": layers,
        f"{ARCH}.extract_layers": layers,  # its name before 0.5.0
        f"{ARCH}.target_hidden_size": shape["target_hidden_size"],
        f"{ARCH}.norm_before_residual": bool(after),
        f"{ARCH}.norm_before_fc": joint,
        "tokenizer.ggml.model": "",
    }
    if turns["rope_type"] == "linear":
        fields[f"{ARCH}.rope.scaling.type"] = "linear"
        fields[f"{ARCH}.rope.scaling.factor"] = float(turns["factor"])
    elif turns["rope_type"] == "llama3":
        fields |= {f"eyas.rope.{key}": value for key, value in turns.items() if key != "rope_theta"}
    wired = wire(Files(fields), target, launch)
    lost = [_lost(*difference) for difference in contract.differences(wired.facts)]
    if lost:
        raise CannotExpress(NAME, lost)
    return fields


def _lost(fact: str, wanted: Any, nearest: Any) -> Inexpressible:
    why, where = _WHY.get(fact, ("its graph has no place for it", _GRAPH_CPP))
    return Inexpressible(fact, wanted, nearest, why, at(where))
