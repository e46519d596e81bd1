"""What vLLM makes of the keys of a drafter's config: the facts they settle, and the keys not taken at their word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.contract import Fact
from eyas.dialects.vllm.flags import Flags, positions
from eyas.dialects.vllm.reading import LAYER, Reading
from eyas.dialects.vllm.source import ALGOS, SPECULATIVE, at, ran
from eyas.dialects.vllm.taps import ALL_KEYS, SELECTION, TOP, Capture, is_stream
from eyas.dialects.vllm.weights import CLASS_FILE, draft_vocab_size, norm_before_fc, uses_aux
from eyas.dialects.wiring import KeyNote, Runner, Source, TargetFacts


def taps_built_for(reading: Reading) -> tuple[int, str]:
    """How many taps fc takes, and what says so. The Llama and DeepSeek classes do not count the top-level ids."""
    inside = reading.eagle.get(TOP)
    counts = {
        "num_aux_layers": reading.get("num_aux_layers") if reading.kind == "qwen3" else None,
        "num_aux_hidden_states": reading.get("num_aux_hidden_states"),
        TOP: len(reading.get(TOP) or ()) if reading.kind == "qwen3" else None,
        f"eagle_config.{TOP}": len(inside) if inside else None,
    }
    return next(((count, key) for key, count in counts.items() if count), (3, "nothing"))


# -- facts ----------------------------------------------------------------------------------------------------


def facts(reading: Reading, capture: Capture | None, target: TargetFacts | None) -> dict[str, Fact]:
    """Every fact the config settles. What only tensors settle (embedding, head, map) is in ``weights``."""
    switch = reading.origin
    made = {
        "fc": Fact("applied" if reading.kind == "deepseek" or uses_aux(reading) else "skipped", "inferred"),
        "head_norm": Fact(True, "inferred"),
        "token_shift": Fact(1, "inferred"),
        "position_offset": Fact(0, "inferred"),
        "layers": Fact(reading.get("num_hidden_layers") or 1, switch("num_hidden_layers")),
        "residual": Fact(
            "after hidden_norm" if reading.on("norm_before_residual") else "before hidden_norm",
            switch("norm_before_residual"),
        ),
        "feedback": Fact(
            "after the last norm" if reading.on("norm_output") else "before the last norm", switch("norm_output")
        ),
        "rope": Fact(reading.get("rope_parameters"), "declared" if reading.rope_key else "defaulted"),
        "window": Fact(window(reading), switch("layer_types", "sliding_window")),
        "max_positions": Fact(reading.get("max_position_embeddings") or 0, switch("max_position_embeddings")),
    }
    if (words := draft_vocab_size(reading)) is not None:
        made["draft_vocab_size"] = Fact(words, switch("draft_vocab_size"))
    if made["layers"].value > 1:
        made["later_norm"] = Fact("input_layernorm", "inferred")
    if reading.kind is not None:
        made["attention"] = Fact("mla" if reading.kind == "deepseek" else "gqa", "inferred")
        made["qk_norm"] = Fact(reading.kind == "qwen3", "inferred")
        bias = reading.kind != "deepseek" and reading.on("attention_bias")
        made["attention_bias"] = Fact(bias, switch("attention_bias"))
        joint = reading.kind != "deepseek" and norm_before_fc(reading)
        word = {(False, False): "none", (True, False): "joint", (False, True): "each"}
        said = "norm_before_fc" in reading.eagle or reading.given & {"norm_before_fc", "fc_norm"}
        norms = word.get((joint, reading.on("fc_norm")), "joint, then each")
        made["fc_norm"] = Fact(norms, "declared" if said else "defaulted")
    if capture is not None and uses_aux(reading):
        made["taps"] = Fact(list(capture.taps), "declared" if capture.key else "defaulted")
        if target is None or is_stream(target.architecture):
            made["tap_state"] = Fact("stream", "inferred")
    return made


def window(reading: Reading) -> int | None:
    """By ``layer_types`` of the drafter's own layers (models/llama.py:195, qwen3_eagle3.py:50); the first decides."""
    kinds = reading.get("layer_types") or []
    if reading.kind == "deepseek" or not kinds or kinds[0] != "sliding_attention":
        return None
    found = reading.get("sliding_window")
    return found if isinstance(found, int) else None


# -- notes ----------------------------------------------------------------------------------------------------


def notes(
    config: Mapping[str, Any], reading: Reading, capture: Capture | None, flags: Flags, target: TargetFacts | None
) -> Iterator[KeyNote]:
    """Keys that are ignored, defaulted or overridden. ``config`` as in the file, whose names are used."""
    yield from _ids(config, reading, capture, flags.runner)
    yield from _defaults(reading)
    yield from _rope(config, reading)
    yield from _ignored(config, reading)
    yield from _positions(reading, flags, target)
    dtype = next((k for k in ("dtype", "torch_dtype") if config.get(k)), None)
    if dtype:
        why = "the drafter runs in the target's precision, and its fc too"
        yield KeyNote(dtype, config[dtype], "overridden", why, at(f"{SPECULATIVE}:1294"))


def _ids(config: Mapping[str, Any], reading: Reading, capture: Capture | None, runner: Runner) -> Iterator[KeyNote]:
    """Every list of layers that is there and does not decide."""
    source = ran(SELECTION[runner])
    for key in ALL_KEYS:
        value = _at(reading.values, key)
        if value is None or (capture is not None and key == capture.key):
            continue
        read = f"{capture.key} decides" if capture and capture.key else "it looks elsewhere"
        yield KeyNote(reading.key(key), value, "ignored", f"the {runner.upper()} runner: {read}", source)
    if reading.style == "speculators":
        for key in ("eagle_config", "dflash_config"):
            if config.get(key) is not None:
                why = "of a file in speculators' format it is not taken over"
                yield KeyNote(key, config[key], "ignored", why, ran(f"{ALGOS}:16"))
    if capture is None:
        return
    if capture.key is None:
        why = f"no list of layers where the {runner.upper()} runner looks: the target's class has its own"
        yield KeyNote(reading.key(TOP), list(capture.wanted), "defaulted", why, source)
    else:
        found = _at(reading.values, capture.key)
        shown = list(capture.wanted)
        plain = [i + 1 for i in found] if capture.key.endswith("target_layer_ids") else found
        if plain != shown:
            why = f"a list is a set: {shown} in this order"
            where = ran("model_executor/models/interfaces.py:1578")
            yield KeyNote(reading.key(capture.key), found, "overridden", why, where)
        if capture.taps != capture.wanted:
            lost = [t for t in capture.wanted if t not in capture.taps]
            why = f"no layer matches {lost}: {list(capture.taps)} arrive"
            where = ran("model_executor/models/interfaces.py:1609")
            yield KeyNote(reading.key(capture.key), found, "overridden", why, where)


def _at(values: Mapping[str, Any], key: str) -> Any:
    outer, _, inner = key.partition(".")
    found = values.get(outer)
    if not inner:
        return found
    return found.get(inner) if isinstance(found, Mapping) else None


_WHEN_ABSENT = {
    "norm_before_residual": ":101",
    "norm_output": ":252",
    "fc_norm": ":231",
    "draft_vocab_size": ":316",
    "target_hidden_size": ":218",
}


def _defaults(reading: Reading) -> Iterator[KeyNote]:
    """Keys that are not there, and what stands in."""
    file = CLASS_FILE.get(str(reading.kind), CLASS_FILE["llama"])
    for key, line in _WHEN_ABSENT.items():
        if key in reading.given:
            continue
        stands_in = {
            "draft_vocab_size": draft_vocab_size(reading),
            "target_hidden_size": reading.get("hidden_size"),
            "norm_before_residual": reading.on("norm_before_residual"),
        }.get(key, False)
        if key == "norm_before_residual" and reading.style == "speculators":
            why, source = "true in speculators' format, false in any other", ran(f"{ALGOS}:33")
        else:
            why, source = "absent", ran(f"{file}{line}")
        yield KeyNote(reading.key(key), stands_in, "defaulted", why, source)
    count, said = taps_built_for(reading)
    if said == "nothing":
        why = "how many taps fc takes is in no key this class counts"
        yield KeyNote("num_aux_hidden_states", count, "defaulted", why, ran(f"{file}:210"))
    for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"):
        if key not in reading.given and reading.get(key) is not None:
            why = "absent; transformers fills in a default of its own"
            yield KeyNote(reading.key(key), reading.get(key), "defaulted", why, ran("transformers_utils/config.py:386"))


def _rope(config: Mapping[str, Any], reading: Reading) -> Iterator[KeyNote]:
    source = ran("transformers_utils/config.py:622")
    level = config.get(LAYER) or {} if reading.style == "speculators" else config
    made = reading.get("rope_parameters") or {}
    if reading.rope_key is None:
        yield KeyNote(reading.key("rope_theta"), made.get("rope_theta"), "defaulted", "no rotary base is given", source)
        return
    if reading.rope_key == "rope_scaling" and level.get("rope_parameters"):
        why = "rope_scaling takes its place, its theta included"
        yield KeyNote(reading.key("rope_parameters"), level["rope_parameters"], "ignored", why, source)
    chosen = level.get(reading.rope_key)
    theta = level.get("rope_theta")
    if theta is not None and theta != made.get("rope_theta"):
        why = f"{reading.rope_key} has a theta of its own"
        yield KeyNote(reading.key("rope_theta"), theta, "ignored", why, source)
    elif theta is None and isinstance(chosen, Mapping) and "rope_theta" not in chosen and "rope_theta" in made:
        why = f"{reading.rope_key} has no theta"
        yield KeyNote(reading.key("rope_theta"), made["rope_theta"], "defaulted", why, source)


# Keys of other engines and trainers that change the maths there and nothing here: all of them, or one class's.
_NEVER = {
    "tie_word_embeddings": "the class always builds a head; without one in the files it is the target's",
    "use_aux_norm": "fc_norm is the name here",
    "use_input_layernorm_in_first_layer": "the first layer always has it",
    "use_last_layernorm": "the last norm is always there",
    "use_mtp_layernorm": "no line of it reads the key",
    "next_layer_regular": "no line of it reads the key",
    "eh_proj_before_attn": "no line of it reads the key",
    "return_hidden_post_norm": "norm_output is the name here",
}
_NOT_DEEPSEEK = {
    "norm_before_fc": "the DeepSeek class has no norm over the joined taps",
    "attention_bias": "its projections have no bias",
    "eagle_config.use_aux_hidden_state": "the DeepSeek class always has fc",
}


def _ignored(config: Mapping[str, Any], reading: Reading) -> Iterator[KeyNote]:
    source = at(CLASS_FILE.get(str(reading.kind), CLASS_FILE["llama"]))
    rows = dict(_NEVER)
    rows |= _NOT_DEEPSEEK if reading.kind == "deepseek" else {}
    for key, why in rows.items():
        for name in (key, f"eagle_config.{key}"):
            if (value := _at(config, name)) not in (None, False):
                yield KeyNote(name, value, "ignored", why, source)
    inner, outer = reading.eagle.get("norm_before_fc"), reading.get("norm_before_fc")
    if inner is not None and outer is not None and bool(inner) != bool(outer):
        why = "eagle_config comes first"
        yield KeyNote("norm_before_fc", outer, "ignored", why, at(f"{CLASS_FILE['llama']}:184"))
    if reading.on("bias"):
        why = "it adds a bias to o_proj alone: attention_bias is what queries, keys and values look at"
        yield KeyNote(reading.key("bias"), True, "overridden", why, at("model_executor/models/llama.py:238"))
    if reading.get("sliding_window") and window(reading) is None:
        why = "layer_types names no sliding layer first, so attention is full"
        yield KeyNote(
            reading.key("sliding_window"), reading.get("sliding_window"), "ignored", why, _window_source(reading)
        )


def _window_source(reading: Reading) -> Source:
    return ran("model_executor/models/llama.py:186" if reading.kind == "llama" else f"{CLASS_FILE['qwen3']}:44")


def past_the_limit(reading: Reading, flags: Flags, target: TargetFacts | None) -> str | None:
    """What becomes of a drafter made for fewer positions than it is served with; None if it is not."""
    own, served = reading.get("max_position_embeddings") or 0, flags.max_model_len or positions(target)
    if served is None or own >= served:
        return None
    why = f"raised to the {served} positions the target is served with, said at info"
    if flags.runner == "v1":
        return f"{why}; but past {own} the V1 runner drafts no more (v1/worker/gpu_model_runner.py:4283)"
    return f"{why}; the V2 runner drafts past {own}, where the drafter was never trained"


def _positions(reading: Reading, flags: Flags, target: TargetFacts | None) -> Iterator[KeyNote]:
    if why := past_the_limit(reading, flags, target):
        own, source = reading.get("max_position_embeddings"), ran(f"{SPECULATIVE}:1677")
        yield KeyNote(reading.key("max_position_embeddings"), own, "overridden", why, source)
