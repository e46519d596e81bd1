"""NVIDIA ModelOpt, revision a2fbac7: the folder its Hugging Face exporter writes (export/plugins/hf_spec_export.py).

On the Hugging Face path, online or from a dump, id k is the output of layer k (speculative/plugins/hf_eagle.py:58,
collect_hidden_states/compute_hidden_states_hf.py:183); its vLLM dump hands the same list to vLLM, which counts taps
(compute_hidden_states_vllm.py:50). Nothing in the folder says which was used; the defaults are of the first. The next
depth is fed the state before the last norm (modeling_eagle.py:192, hf_eagle.py:777).

A drafter trained without rope scaling is exported with one on purpose (``eagle_export_rope_scaling``, by default yarn,
factor 32): such a scaling is not what it was trained with.
"""

from __future__ import annotations

from eyas.contract import Contract, Fact
from eyas.dialects import ids, reading, rope
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import Files, TargetFacts

MARKS = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
)
MLA = "Eagle3DeepseekV2ForCausalLM"
EXPORTED_SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


def recognise(files: Files) -> str | None:
    inner = Keys(files.config).inside("eagle_config")
    marks = [key for key in MARKS if key in inner.config]  # null too: the exporter writes all of them
    return f"eagle_config holds {marks[0]}, which only ModelOpt's exporter writes" if marks else None


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    inner = keys.inside("eagle_config")
    draft = Draft(later_norm="input_layernorm")
    draft.set("attention", Fact("mla" if MLA in keys.texts("architectures") else "gqa", "declared"))
    draft.set("attention_bias", keys.flag("attention_bias"))
    draft.set("fc_norm", reading.norms_before_fc(_joint(keys, inner), keys.flag("fc_norm")))
    draft.set("head_norm", inner.flag("use_last_layernorm", default=True))
    layers = keys.count("num_hidden_layers")
    draft.set("layers", Fact(layers or 1, "declared" if layers else "defaulted"))
    _taps(draft, inner, target)
    _rope(draft, keys)
    _head(draft, keys, files)
    reading.vocabulary(draft, keys, keys, files)
    reading.max_positions(draft, keys, None)
    draft.notes.append(
        "Its first layer norms the hidden half twice, input_layernorm then hidden_norm (modeling_eagle.py:71, "
        "run with transformers 5.19); engines apply hidden_norm alone, and no fact of a contract says so."
    )
    return draft.done()


def _joint(keys: Keys, inner: Keys) -> Fact:
    return inner.flag("norm_before_fc") if "norm_before_fc" in inner else keys.flag("norm_before_fc")


def _taps(draft: Draft, inner: Keys, target: TargetFacts | None) -> None:
    if not inner.flag("use_aux_hidden_state", default=True).value:
        draft.set("fc", Fact("skipped", "declared"))
        draft.notes.append("It reads the target's last state after the final norm, which is no tap.")
        return
    said, n = inner.ids(ids.KEY), target.num_layers if target else None
    if said is None:
        draft.set("taps", reading.default_taps(target))
        return
    open_ = ids.readings(said, n)
    if ids.default_in(said, n) == "layer output" or list(open_) == ["layer output"]:
        draft.set("taps", Fact(ids.taps(said, "layer output"), "inferred"))
    elif list(open_) == ["tap"]:
        draft.set("taps", Fact(ids.taps(said, "tap"), "inferred"))
    else:
        draft.leave_open(
            "taps",
            tuple(open_.values()),
            "where its states came from: Hugging Face (online, or a dump) counts layer outputs, ModelOpt's vLLM dump "
            "counts taps; accuracy at depth 0 under either tells",
        )


def _rope(draft: Draft, keys: Keys) -> None:
    served = rope.read(keys)
    if {key: served.value.get(key) for key in EXPORTED_SCALING} != EXPORTED_SCALING:
        draft.set("rope", served)
        return
    trained = {"rope_type": "default", "rope_theta": served.value["rope_theta"]}
    draft.leave_open(
        "rope",
        (trained, served.value),
        "this scaling is what ModelOpt writes on export for a drafter trained without one; its recipe's "
        "eagle_architecture_config.rope_scaling says what was trained",
    )


def _head(draft: Draft, keys: Keys, files: Files) -> None:
    """With the full vocabulary it has a head of its own only where a recipe asked for one (modeling_eagle.py:43)."""
    cut, full = keys.count("draft_vocab_size"), keys.count("vocab_size")
    names = reading.tensors(files)
    if names is not None:
        draft.set("head", Fact("own" if "lm_head.weight" in names else "target", "inferred"))
    elif cut is None or cut == full:
        draft.set("head", None)
