"""Where the tensors of a drafter's files go in SGLang: loaded, dropped, overwritten, shared or never filled.

``LlamaForCausalLMEagle3.load_weights`` looks every name up among its parameters, with and without ``model.`` before it,
and passes over what it does not find without a line. ``Eagle3DeepseekV2ForCausalLM`` warns. Neither looks for
parameters that got nothing: norms stay at one, fc is random, the rest is whatever the memory held.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from eyas.contract import Fact
from eyas.dialects.sglang.keys import Keys
from eyas.dialects.sglang.releases import Release
from eyas.dialects.wiring import Refusal, TensorNote
from eyas.inventory import TensorInfo

_LEGACY = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
_MLA_PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def parameters(keys: Keys) -> set[str]:
    """What the built class has, by names without ``model.``; fused projections by their parts."""
    names = {EMBEDDING, "fc.weight", "norm.weight"}
    if keys.fc_bias:
        names.add("fc.bias")
    if keys.joint:
        names.add("input_norm.weight")
    if keys.each:
        names |= {f"fc_norm.{i}.weight" for i in range(keys.num_aux)}
    if not keys.tied:
        names.add(HEAD)
    for i in range(1 if keys.mla else keys.layers):
        layer = f"layers.{i}."
        attention = (*_MLA_PROJECTIONS, "q_a_layernorm", "kv_a_layernorm") if keys.mla else (
            "q_proj", "k_proj", "v_proj", "o_proj"
        )  # fmt: skip
        names |= {f"{layer}self_attn.{part}.weight" for part in attention}
        names |= {f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"{layer}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm")}
        if keys.o_bias and not keys.mla:
            names.add(f"{layer}self_attn.o_proj.bias")
    return names


def arrives_as(name: str, keys: Keys) -> str:
    """The parameter that a tensor's name is looked up as, without ``model.``; "d2t" and "t2d" for the maps."""
    if keys.mla:
        for special in ("d2t", "t2d"):
            if name == special or name.endswith(f".{special}"):
                return special
        mapped = re.sub(r"^midlayer\.", "layers.0.", name)
        return mapped if not mapped.startswith("model.") else f"model.{mapped}"
    for legacy, new in _LEGACY.items():
        name = name.replace(legacy, new)
    for special in ("d2t", "t2d"):
        if special in name:
            return special
    return name.removeprefix("model.") if not name.startswith("model.lm_head") else name


def load(
    tensors: Mapping[str, TensorInfo], keys: Keys, release: Release, algorithm: str
) -> tuple[list[TensorNote], list[Refusal], dict[str, Fact]]:
    """Notes on every tensor that is not simply loaded, what stops the load, and the facts the files decide."""
    wanted, arrived = parameters(keys), dict[str, str]()
    for name in tensors:
        arrived.setdefault(arrives_as(name, keys), name)
    notes = [*_dropped(tensors, keys, wanted, release), *_shared(arrived, keys, release, algorithm)]
    silent = {EMBEDDING} if not keys.keeps_embedding else set()
    if keys.head_from_target or algorithm == "EAGLE":
        silent.add(HEAD)
    for missing in sorted(wanted - set(arrived) - silent):
        what = "stays at one" if "norm" in missing else "is random" if missing.startswith("fc.") else "is never filled"
        if missing.endswith("input_layernorm.weight") and not missing.startswith("layers.0."):
            continue  # built, and used by no layer after the first
        notes.append(
            TensorNote(missing, "unfilled", f"it {what}", "silent", release.at("mla names" if keys.mla else "names"))
        )
    # a map of the whole vocabulary onto itself can only be all zeros, whether or not it is in the file
    mapped = "d2t" in arrived and keys.draft_vocab < keys.vocab
    facts = {"vocab_map": Fact("offsets" if mapped else "none", "inferred")}
    if "d2t" not in arrived and keys.draft_vocab < keys.vocab:
        notes.append(
            TensorNote("d2t", "unfilled", "draft ids are used as the target's ids", "silent", release.at("d2t"))
        )
    return notes, list(_misfits(tensors, arrived, keys, release)), facts


def _dropped(tensors: Mapping[str, TensorInfo], keys: Keys, wanted: set[str], release: Release) -> Iterator[TensorNote]:
    where = release.at("mla names" if keys.mla else "names")
    for name in sorted(tensors):
        mapped = arrives_as(name, keys)
        if mapped == "t2d":
            yield TensorNote(name, "dropped", "trainers use it, the engine does not", "silent", where)
        elif mapped != "d2t" and mapped not in wanted:
            why = "no parameter has the name"
            if re.search(r"self_attn\.[qkv]_proj\.bias$", mapped):
                why = "its queries, keys and values have no bias"
            elif re.search(r"self_attn\.[qk]_norm\.", mapped):
                why = "it does not norm queries and keys"
            elif mapped.startswith(("input_norm.", "fc_norm.")):
                why = "the switch that builds this norm is off, or not read"
            elif re.match(r"layers\.\d+\.", mapped):
                why = f"it builds {keys.layers} decoder layer{'s' * (keys.layers > 1)}, or the layer has no such part"
            yield TensorNote(name, "dropped", why, "warning" if keys.mla else "silent", where)
        elif not keys.mla and re.fullmatch(r"layers\.[1-9]\d*\.input_layernorm\.weight", mapped):
            why = "layers after the first are normed by hidden_norm"
            yield TensorNote(name, "dropped", why, "silent", release.at("later norm"))


def _shared(arrived: Mapping[str, str], keys: Keys, release: Release, algorithm: str) -> Iterator[TensorNote]:
    both = keys.head_from_target or algorithm == "EAGLE"
    where = release.at("head from target") if both else release.at("mla embedding" if keys.mla else "embedding")
    if both or not keys.keeps_embedding:
        name = arrived.get(EMBEDDING)
        why = "the target's embedding is put in its place" if name else "the target's is used"
        yield TensorNote(name or EMBEDDING, "overwritten" if name else "shared", why, "silent", where)
    if both and not keys.tied:
        name = arrived.get(HEAD)
        why = "draft_vocab_size is no number" if keys.head_from_target else "EAGLE takes the target's"
        yield TensorNote(name or HEAD, "overwritten" if name else "shared", why, "silent", where)


def _misfits(
    tensors: Mapping[str, TensorInfo], arrived: Mapping[str, str], keys: Keys, release: Release
) -> Iterator[Refusal]:
    """Shapes that the loader asserts on."""
    shapes = {
        "fc.weight": (keys.hidden, keys.num_aux * keys.target_hidden),
        "norm.weight": (keys.hidden,),
        **({HEAD: (keys.draft_vocab, keys.hidden)} if not keys.tied else {}),
    }
    for name, shape in shapes.items():
        there = tensors[arrived[name]].shape if name in arrived else shape
        if there != shape:
            yield Refusal(
                "weights-shape",
                f"{arrived[name]} is {list(there)}, the config asks for {list(shape)}",
                "start",
                release.at("num_aux" if name == "fc.weight" else "head", "inferred"),
            )
