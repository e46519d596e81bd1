"""What vLLM does with the tensors of a drafter's files, told by their names and shapes.

The drafter's class goes over the names (load_weights of models/llama_eagle3.py:420, qwen3_eagle3.py:398,
deepseek_eagle3.py:370), then ``AutoWeightsLoader`` (models/utils.py:451) fills what fits and raises on what it does not
know. ``load_weights`` returns nothing, so nobody notices a tensor that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.contract import Fact
from eyas.dialects.vllm.reading import Reading
from eyas.dialects.vllm.source import DEEPSEEK, LLAMA, PROPOSER, QWEN3, at, ran
from eyas.dialects.wiring import Refusal, Runner, TargetFacts, TensorNote
from eyas.inventory import TensorInfo

CLASS_FILE = {"llama": LLAMA, "qwen3": QWEN3, "deepseek": DEEPSEEK}
LOADER = "model_executor/models/utils.py"
D2T, MASK = "draft_id_to_target_id", "mask_hidden"
Shape = tuple[int, ...] | None


@dataclass
class Judged:
    """``arrived``: vLLM's parameters that the files fill, with the name in the files."""

    facts: dict[str, Fact] = field(default_factory=dict)
    notes: list[TensorNote] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[tuple[str, str, Any]] = field(default_factory=list)
    arrived: dict[str, str] = field(default_factory=dict)


def judge(
    tensors: Mapping[str, TensorInfo], reading: Reading, taps: int, target: TargetFacts | None, runner: Runner,
    parallel: bool,
) -> Judged:  # fmt: skip
    """``taps``: how many fc is built for. Nothing is said where the drafter's class is not known."""
    judged = Judged()
    if reading.kind is None:
        return judged
    wanted = expected(reading, taps, target)
    for name in tensors:
        _place(name, reading, wanted, parallel, judged)
    for name, shape in wanted.items():
        there = judged.arrived.get(name)
        if there is not None and shape is not None and tensors[there].shape != shape:
            why = f"{there} is {list(tensors[there].shape)} and its place is {list(shape)}"
            judged.refusals.append(Refusal("weights-shape", why, "start", ran(f"{LOADER}:340")))
    _unfilled(wanted, reading, judged)
    _embedding(reading, target, runner, judged)
    _head(reading, target, runner, judged)
    _map(reading, target, judged)
    _mask(reading, parallel, judged)
    return judged


# -- what the class has ---------------------------------------------------------------------------------------


def draft_vocab_size(reading: Reading) -> int | None:
    """Absent or null it is the whole vocabulary (llama_eagle3.py:316)."""
    size = reading.get("draft_vocab_size") or reading.get("vocab_size")
    return size if isinstance(size, int) else None


def expected(reading: Reading, taps: int, target: TargetFacts | None) -> dict[str, Shape]:
    """Every parameter of the drafter's class, by vLLM's name with its parts unmerged, and its shape where known."""
    H, V, I = (reading.get(k) for k in ("hidden_size", "vocab_size", "intermediate_size"))  # noqa: E741
    D, W = reading.get("target_hidden_size") or H, draft_vocab_size(reading)
    made: dict[str, Shape] = {"model.embed_tokens.weight": _known(V, H), "model.norm.weight": _known(H)}
    if _uses_fc(reading):
        made["model.fc.weight"] = _known(H, taps * D if D else None)
        if reading.kind != "deepseek" and norm_before_fc(reading):
            made["model.input_norm.weight"] = _known(taps * D if D else None)
        if reading.on("fc_norm"):
            made |= {f"model.fc_norm.{i}.weight": _known(D) for i in range(taps)}
    for i in range(reading.get("num_hidden_layers") or 1):
        layer = f"model.layers.{i}"
        made |= {f"{layer}.{n}.weight": _known(H) for n in _NORMS}
        made |= {f"{layer}.mlp.{n}_proj.weight": _known(I, H) for n in ("gate", "up")}
        made[f"{layer}.mlp.down_proj.weight"] = _known(H, I)
        made |= _attention(reading, layer, i)
    made["lm_head.weight"] = _known(W, H)
    if target is None or target.vocab_size != W:
        made[D2T] = _known(W)
    return made


_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_MLA = ("kv_a_layernorm", "kv_b_proj", "o_proj")


def _attention(reading: Reading, layer: str, index: int) -> dict[str, Shape]:
    if reading.kind == "deepseek":
        # Without low-rank queries the loader still looks for kv_a_proj_with_mqa in a merged fused_qkv_a_proj, and the
        # class has none (deepseek_eagle3.py:264): such a drafter does not load at all.
        low = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")
        names = (*(low if reading.get("q_lora_rank") is not None else ("q_proj",)), *_MLA)
        return {f"{layer}.self_attn.{n}.weight": None for n in names}
    H, N = reading.get("hidden_size"), reading.get("num_attention_heads")
    G = reading.get("num_key_value_heads") or N
    E = reading.get("head_dim") or (H // N if H and N else None)
    wide = 2 * H if H and index == 0 else H
    rows = {"q": N * E if N and E else None, "k": G * E if G and E else None}
    rows["v"] = rows["k"]
    made: dict[str, Shape] = {f"{layer}.self_attn.{n}_proj.weight": _known(rows[n], wide) for n in "qkv"}
    made[f"{layer}.self_attn.o_proj.weight"] = _known(H, rows["q"])
    if reading.on("attention_bias"):
        made |= {f"{layer}.self_attn.{n}_proj.bias": _known(rows[n]) for n in "qkv"}
    if reading.kind == "llama" and (reading.on("attention_bias") or reading.on("bias")):
        made[f"{layer}.self_attn.o_proj.bias"] = _known(H)
    if reading.kind == "llama" and reading.on("mlp_bias"):
        made |= {f"{layer}.mlp.{n}_proj.bias": None for n in ("gate", "up", "down")}
    if reading.kind == "qwen3":
        made |= {f"{layer}.self_attn.{n}_norm.weight": _known(E) for n in "qk"}
    return made


def _known(*sizes: int | None) -> Shape:
    return tuple(s for s in sizes if s is not None) if None not in sizes else None


def norm_before_fc(reading: Reading) -> bool:
    """Inside ``eagle_config`` first (llama_eagle3.py:184)."""
    return bool(reading.eagle.get("norm_before_fc", reading.get("norm_before_fc", False)))


def uses_aux(reading: Reading) -> bool:
    """Whether the drafter's class takes taps at all; the DeepSeek one always does."""
    return bool(reading.eagle.get("use_aux_hidden_state", True))


def _uses_fc(reading: Reading) -> bool:
    return reading.kind == "deepseek" or uses_aux(reading)


# -- where a name goes ----------------------------------------------------------------------------------------

_CACHES = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def _place(name: str, reading: Reading, wanted: Mapping[str, Shape], parallel: bool, judged: Judged) -> None:
    """Follow one name of the files through the class and the loader."""
    where = CLASS_FILE[str(reading.kind)]

    def drop(why: str, loudness: Any = "silent", line: str = f"{where}:420") -> None:
        judged.notes.append(TensorNote(name, "dropped", why, loudness, ran(line)))

    if "t2d" in name:
        return  # a mask of the trainer; no engine needs it
    moved = name
    if "d2t" in name:
        moved = name.replace("d2t", D2T)
    elif MASK in name and reading.kind != "deepseek":
        if not parallel:
            drop("it belongs to parallel drafting, which is off", "warning", f"{where}:435")
        else:
            judged.arrived[MASK] = name
        return
    elif "lm_head" not in name:
        moved = f"model.{name}"
    if not uses_aux(reading) and reading.kind != "deepseek" and "fc." in moved:
        return drop("use_aux_hidden_state is false", line=f"{where}:463")
    if reading.kind != "deepseek" and not norm_before_fc(reading) and "input_norm." in moved:
        return drop("norm_before_fc is not on", line=f"{where}:465")
    if any(word in moved for word in _CACHES):
        return drop("a cache of the rotary embedding, made anew", line=f"{LOADER}:232")
    moved = moved.replace("midlayer.", "layers.0.")
    if moved in wanted:
        judged.arrived[moved] = name
    elif moved.endswith(".bias"):
        why = "the class has no such bias, and the loader takes every unexpected bias for a leftover"
        drop(why, line=f"{LOADER}:458")
    elif reading.get("quantization_config"):
        judged.arrived[moved] = name  # scales and packed weights: their names are the quantiser's
    else:
        judged.refusals.append(
            Refusal("weights-unexpected", f"{name}: its class has no parameter {moved} (ValueError)", "start",
                    ran(f"{LOADER}:442"))
        )  # fmt: skip


def _unfilled(wanted: Mapping[str, Shape], reading: Reading, judged: Judged) -> None:
    """What no file fills, apart from embedding, head and map, which have rules of their own."""
    for name in wanted:
        inside = name.removeprefix("model.")
        if name in judged.arrived or name in (D2T, "lm_head.weight", "model.embed_tokens.weight"):
            continue
        number = int(inside.split(".")[1]) if inside.startswith("layers.") else 0
        if number and inside.endswith("hidden_norm.weight"):
            continue  # built, and never called: later layers have input_layernorm alone
        left = "ones" if "norm" in inside else "whatever the memory held"
        why = f"nobody fills it, it keeps {left}; load_weights returns nothing, so nothing is checked"
        source = ran("model_executor/model_loader/default_loader.py:505")
        judged.notes.append(TensorNote(inside, "unfilled", why, "silent", source))
    for name, there in judged.arrived.items():
        inside = name.removeprefix("model.")
        if inside.startswith("layers.") and not inside.startswith("layers.0.") and "hidden_norm" in inside:
            why = "loaded and never called: layers after the first have input_layernorm"
            source = ran(f"{CLASS_FILE[str(reading.kind)]}:138")
            judged.notes.append(TensorNote(there, "dropped", why, "silent", source))


# -- embedding, head, map -------------------------------------------------------------------------------------


def _embedding(reading: Reading, target: TargetFacts | None, runner: Runner, judged: Judged) -> None:
    name, H = "model.embed_tokens.weight", reading.get("hidden_size")
    if name in judged.arrived:
        judged.facts["embedding"] = Fact("own", "inferred")
        return
    judged.facts["embedding"] = Fact("target", "inferred")
    source = ran(f"{PROPOSER}:1440") if runner == "v1" else at("v1/worker/gpu/spec_decode/eagle/utils.py:44")
    if target is None or target.hidden_size == H:
        why = "the files have none: the target's serves both"
        loudness: Any = "info" if runner == "v1" else "silent"
        judged.notes.append(TensorNote("embed_tokens.weight", "shared", why, loudness, source))
    elif runner == "v1":
        why = f"the files have none and the target's is {target.hidden_size} wide, not {H}: its own stays unfilled"
        judged.notes.append(TensorNote("embed_tokens.weight", "unfilled", why, "info", source))
    else:
        why = f"the files have no embedding and the target's is {target.hidden_size} wide, the drafter {H}"
        judged.refusals.append(Refusal("hidden-size-mismatch", why, "first forward", source))


def _head(reading: Reading, target: TargetFacts | None, runner: Runner, judged: Judged) -> None:
    if "lm_head.weight" in judged.arrived:
        judged.facts["head"] = Fact("own", "inferred")
        return
    judged.facts["head"] = Fact("target", "inferred")
    source = ran(f"{PROPOSER}:1512") if runner == "v1" else at("v1/worker/gpu/spec_decode/eagle/utils.py:131")
    words, all_words = draft_vocab_size(reading), target.vocab_size if target else reading.get("vocab_size")
    cut = words is not None and all_words is not None and words < all_words
    why = "the files have none: the target's speaks"
    if cut:
        why += f", cut to its first {words} rows, whatever tokens the draft vocabulary has"
        judged.warnings.append(("head-missing", why, at("model_executor/layers/logits_processor.py:198")))
    loudness: Any = "info" if runner == "v1" else "silent"
    judged.notes.append(TensorNote("lm_head.weight", "shared", why, loudness, source))
    if target is not None and reading.get("hidden_size") not in (None, target.hidden_size):
        said = f"the target's head reads {target.hidden_size} numbers, the drafter gives {reading.get('hidden_size')}"
        judged.refusals.append(Refusal("hidden-size-mismatch", said, "first forward", source))


def _map(reading: Reading, target: TargetFacts | None, judged: Judged) -> None:
    words, all_words = draft_vocab_size(reading), target.vocab_size if target else reading.get("vocab_size")
    source = ran(f"{CLASS_FILE[str(reading.kind)]}:338")
    if words is None or all_words is None:
        return
    if words == all_words:
        judged.facts["vocab_map"] = Fact("none", "inferred")
        return
    if D2T in judged.arrived:
        judged.facts["vocab_map"] = Fact("offsets", "inferred")
        return
    judged.facts["vocab_map"] = Fact("none", "inferred")
    why = "nobody fills it, it keeps zeros: draft ids are taken for target ids"
    judged.notes.append(TensorNote("d2t", "unfilled", why, "silent", source))
    judged.warnings.append(("d2t-missing", why, source))


def _mask(reading: Reading, parallel: bool, judged: Judged) -> None:
    if parallel and reading.kind != "deepseek" and MASK not in judged.arrived:
        why = "parallel drafting wants a tensor mask_hidden, which the files do not have (ValueError)"
        judged.refusals.append(Refusal("weights-missing", why, "start", ran(f"{CLASS_FILE[str(reading.kind)]}:450")))
