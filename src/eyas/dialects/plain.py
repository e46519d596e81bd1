"""A drafter whose trainer nobody recognised: what its keys mean wherever all readers agree, and what stays open.

Ids that spell the default taps in one counting are of that counting; but the default taps' own numbers inside
``eagle_config``, where SGLang looks and trainers that count layer outputs write, may be either. Two lists that SGLang
and vLLM read as the same taps settle it. Of the switches, ``norm_output`` is the one with two meanings.
"""

from __future__ import annotations

from eyas.contract import Contract, Fact
from eyas.dialects import ids, reading, rope
from eyas.dialects.keys import Keys
from eyas.dialects.reading import Draft, Reading
from eyas.dialects.wiring import Files, TargetFacts

MLA = "Eagle3DeepseekV2ForCausalLM"


def read(files: Files, target: TargetFacts | None) -> Contract:
    return read_all(files, target).contract


def read_all(files: Files, target: TargetFacts | None) -> Reading:
    keys = Keys(files.config)
    inner = keys.inside("eagle_config")
    draft = Draft()
    draft.set("attention_bias", keys.flag("attention_bias"))
    draft.set("rope", rope.read(keys))
    joint = inner.flag("norm_before_fc") if "norm_before_fc" in inner else keys.flag("norm_before_fc")
    each = keys.flag("fc_norm" if "fc_norm" in keys else "use_aux_norm")  # the older name, which SGLang still reads
    draft.set("fc_norm", reading.norms_before_fc(joint, each))
    draft.set("residual", reading.named(keys.flag("norm_before_residual"), "after hidden_norm", "before hidden_norm"))
    layers = keys.count("num_hidden_layers")
    draft.set("layers", Fact(layers or 1, "declared" if layers else "defaulted"))
    if MLA in keys.texts("architectures"):
        draft.set("attention", Fact("mla", "declared"))
    _taps(draft, keys, inner, files, target)
    _last_norm(draft, keys)
    reading.vocabulary(draft, keys, keys, files)
    reading.max_positions(draft, keys, 2048)
    _by_tensors(draft, files)
    if not keys.texts("architectures"):
        draft.notes.append("config.json names no architecture; engines choose a drafter's class by it.")
    return draft.done()


def _taps(draft: Draft, keys: Keys, inner: Keys, files: Files, target: TargetFacts | None) -> None:
    if not inner.flag("use_aux_hidden_state", default=True).value:
        draft.set("fc", Fact("skipped", "declared"))
        draft.notes.append("It reads the target's last state after the final norm, which is no tap.")
        return
    n = target.num_layers if target else None
    deep, top = inner.ids(ids.KEY), keys.ids(ids.KEY)
    said = deep or top
    if said is None:
        _unnamed(draft, files, target)
        return
    open_ = ids.readings(said, n)
    default = ids.default_in(said, n)
    if deep and top and ids.captured(deep, target) == ids.taps(top, "tap"):
        draft.set("taps", Fact(ids.taps(top, "tap"), "inferred"))
    elif default == "layer output" or (default == "tap" and deep is None):
        draft.set("taps", Fact(ids.taps(said, default), "inferred"))
    elif len(open_) == 1:
        draft.set("taps", Fact(next(iter(open_.values())), "inferred"))
    else:
        draft.leave_open("taps", tuple(open_.values()), _SEPARATE)


_SEPARATE = (
    "who wrote the ids: SpecForge, ModelOpt and most of SGLang add one to an id, speculators and vLLM do not; ask, or "
    "measure depth 0 under either (`eyas check`)"
)


def _unnamed(draft: Draft, files: Files, target: TargetFacts | None) -> None:
    if reading.taps_in(files) in (None, 3):
        draft.set("taps", reading.default_taps(target))
        draft.notes.append("config.json names no layers; these are what every trainer and engine takes by default.")
    else:
        draft.notes.append(f"config.json names no layers, and fc takes {reading.taps_in(files)} states.")


def _last_norm(draft: Draft, keys: Keys) -> None:
    """``norm_output``: to engines and speculators what the next depth is fed, to SpecForge what the head reads."""
    if "norm_output" not in keys:
        return
    before, after = "before the last norm", "after the last norm"
    if keys.flag("norm_output").value:
        draft.leave_open(
            "feedback",
            (after, before),
            "engines feed back the normed state where norm_output is true, SpecForge's trainer never did; accuracy at "
            "depth 1 under either tells",
        )
    else:
        draft.leave_open(
            "head_norm",
            (True, False),
            "to engines norm_output false changes nothing before the head, to SpecForge's trainer it took the norm "
            "away; accuracy at depth 0 under either tells",
        )


def _by_tensors(draft: Draft, files: Files) -> None:
    """What the names in the files decide, where no key says otherwise."""
    names = reading.tensors(files)
    if names is None:
        return
    attention = "layers.0.self_attn."
    draft.set("attention", Fact("mla" if f"{attention}kv_b_proj.weight" in names else "gqa", "inferred"))
    draft.set("qk_norm", Fact(f"{attention}q_norm.weight" in names, "inferred"))
    draft.set("embedding", Fact("own" if "embed_tokens.weight" in names else "target", "inferred"))
    draft.set("head", Fact("own" if "lm_head.weight" in names else "target", "inferred"))
    if found := reading.layers_in(names):
        draft.set("layers", Fact(found, "inferred"))
    later = [norm for norm in ("input_layernorm", "hidden_norm") if f"layers.1.{norm}.weight" in names]
    if len(later) == 1:  # both where one layer is written under two names
        draft.set("later_norm", Fact(later[0], "inferred"))
    if draft.facts["attention_bias"].origin == "defaulted":
        draft.set("attention_bias", Fact(f"{attention}q_proj.bias" in names, "inferred"))
    if draft.facts["fc_norm"].origin == "defaulted":
        joint, each = (Fact(name in names, "inferred") for name in ("input_norm.weight", "fc_norm.0.weight"))
        draft.set("fc_norm", Fact(reading.norms_before_fc(joint, each).value, "inferred"))
