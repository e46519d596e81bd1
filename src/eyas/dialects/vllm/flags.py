"""vLLM's command line where it speaks of drafting: ``--speculative-config`` and what decides the runner.

The rules are those of ``SpeculativeConfig`` (config/speculative.py), which forbids fields it does not know, and of
``VllmConfig.use_v2_model_runner`` (config/vllm.py:703). Flags may be preceded by ``VLLM_USE_V2_MODEL_RUNNER=0``, as
on a shell's line.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.dialects.vllm.source import SPECULATIVE, at, ran
from eyas.dialects.wiring import FlagNote, Launch, Loudness, Refusal, Runner, Source, TargetFacts
from eyas.errors import UsageError, did_you_mean

_FIELDS = """
    attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch draft_load_config
    draft_model_config draft_parallel_config draft_sample_method draft_tensor_parallel_size dspark_draft_topk
    enable_adaptive_verification enforce_eager index_share_for_mtp_iteration kv_cache_dtype max_model_len method
    model moe_backend num_speculative_tokens num_speculative_tokens_per_batch_size parallel_drafting
    prompt_lookup_max prompt_lookup_min quantization rejection_sample_method revision
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
    suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates target_model_config
    target_parallel_config tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction
"""
FIELDS = frozenset(_FIELDS.split())
_METHODS = """
    eagle3 eagle mtp draft_model ngram ngram_gpu medusa mlp_speculator suffix dflash dspark custom_class
    extract_hidden_states
"""
METHODS = frozenset(_METHODS.split())  # and the old names of mtp, which end in _mtp
WHOLE = ("--speculative-config", "--speculative_config", "-sc")
SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
Warned = tuple[str, str, Source]


@dataclass(frozen=True)
class Flags:
    """``told``: whether anything of a speculative config was given; without it nothing is said to be missing."""

    told: bool
    method: str
    runner: Runner
    why_runner: str
    transformers: bool
    parallel_drafting: bool
    max_model_len: int | None
    notes: tuple[FlagNote, ...]
    refusals: tuple[Refusal, ...]
    warnings: tuple[Warned, ...]


def read(launch: Launch, target: TargetFacts | None) -> Flags:
    """Raises UsageError on a line that is no command line; what vLLM itself would refuse is a Refusal."""
    given = _split(launch.flags)
    spec, clash = _speculative(given)
    told = bool(spec)
    method, how = _method(spec)
    parallel = spec.get("parallel_drafting") is True
    runner, why = _runner(launch, given, parallel)
    limit = _whole(given.get("--max-model-len"), "--max-model-len")
    notes = [FlagNote("runner", launch.runner, runner, why, "silent", at("config/vllm.py:703"))]
    refusals = [Refusal("flag-refused", clash, "start", ran("engine/arg_utils.py:2078"))] if clash else []
    warnings: list[Warned] = []
    if told:
        notes.append(FlagNote("method", spec.get("method"), method, how, "silent", ran(f"{SPECULATIVE}:1334")))
        refusals += _refused(spec, given, target)
        notes += _resolved(spec)
        warnings += _warned(spec)
    return Flags(
        told,
        method,
        runner,
        why,
        given.get("--model-impl") == "transformers",
        parallel,
        limit,
        tuple(notes),
        tuple(refusals),
        tuple(warnings),
    )


# -- the line -------------------------------------------------------------------------------------------------


def _split(flags: Sequence[str]) -> dict[str, str]:
    """Options with their values; a later one wins, as with argparse. A bare object is a speculative config."""
    found: dict[str, str] = {}
    name: str | None = None
    for token in flags:
        if name is None and token.lstrip().startswith("{"):
            found[WHOLE[0]] = token
        elif token.startswith("-") and not _is_negative(token):
            option, equals, value = token.partition("=")
            name = None if equals else option
            found[option] = value if equals else "true"
        elif name is not None:
            found[name], name = token, None
        elif token.startswith(f"{RUNNER}="):
            found[RUNNER] = token.partition("=")[2]
    return found


def _is_negative(token: str) -> bool:
    return token[1:2].isdigit()


def _speculative(given: Mapping[str, str]) -> tuple[dict[str, Any], str | None]:
    """The fields asked for, and what is said twice."""
    spec: dict[str, Any] = {}
    for option, text in given.items():
        if option in WHOLE:
            spec.update(_object(option, text))
    for option, text in given.items():
        whole, dot, key = option.partition(".")
        if dot and whole in WHOLE:
            spec[key] = _loose(text)
    clash = None
    for option, key in SHORT.items():
        if option in given:
            if key in spec:
                clash = f"{option} and {key} of --speculative-config are mutually exclusive (ValueError)"
            spec[key] = _loose(given[option])
    return {key.replace("-", "_"): value for key, value in spec.items()}, clash


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{option} is {text!r}, which is no JSON ({error}).",
            way_out=f"""Write it as in {option} '{{"method": "eagle3", "num_speculative_tokens": 3}}'.""",
        ) from error
    if not isinstance(value, dict):
        raise UsageError(
            f"{option} holds a JSON {type(value).__name__}, an object was expected.",
            way_out=f"""Write it as in {option} '{{"method": "eagle3", "num_speculative_tokens": 3}}'.""",
        )
    return value


def _loose(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _whole(text: str | None, option: str) -> int | None:
    """A length as vLLM takes it; ``auto`` and the like leave it to the target."""
    if text is None or text in ("auto", "-1"):
        return None
    scale = {"k": 1000, "m": 10**6, "K": 1024, "M": 1024**2}.get(text[-1:], 1)
    number = text[:-1] if scale > 1 else text
    if not number.isdigit():
        raise UsageError(f"{option} is {text!r}, a number of tokens was expected.", way_out=f"Write {option} 4096.")
    return int(number) * scale


# -- the rules ------------------------------------------------------------------------------------------------


def _method(spec: Mapping[str, Any]) -> tuple[str, str]:
    """The method and what decided it; ``eagle-`` in the path is looked for first, also in eagle-3-llama."""
    if not spec:
        return "eagle3", "nothing was told"
    if spec.get("method") is not None:
        return str(spec["method"]), "as asked"
    model = str(spec.get("model") or "")
    if "/" not in model and len(model.split(".")) > 1 and all(part.isidentifier() for part in model.split(".")):
        return "custom_class", "the model's name is a dotted path"
    for word, method in (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark")):
        if word in model.lower():
            return method, f"{word!r} is in the path of the model"
    return "draft_model", "nothing in the path of the model names a method"


def _runner(launch: Launch, given: Mapping[str, str], parallel: bool) -> tuple[Runner, str]:
    if launch.runner is not None:
        return launch.runner, "as asked"
    if RUNNER in given:
        return ("v1" if given[RUNNER] in ("0", "false") else "v2"), f"{RUNNER} is set"
    if parallel:
        return "v1", "the V2 runner cannot draft in parallel (a warning says so)"
    return "v2", "the default where Triton is, as on a GPU; without it, as on a CPU, vLLM takes V1"


def _refused(spec: Mapping[str, Any], given: Mapping[str, str], target: TargetFacts | None) -> list[Refusal]:
    tokens, found = spec.get("num_speculative_tokens"), []

    def stop(why: str, line: int) -> None:
        found.append(Refusal("flag-refused", why, "start", ran(f"{SPECULATIVE}:{line}")))

    for name in sorted(set(spec) - FIELDS):
        stop(f"it knows no field {name!r}. {did_you_mean(name, FIELDS)}", 390)
    method = spec.get("method")
    if method is not None and method not in METHODS and not str(method).endswith("_mtp"):
        stop(f"method is {method!r}. {did_you_mean(str(method), METHODS)}", 76)
    if tokens is None:
        stop("num_speculative_tokens is not given", 1506)
    elif type(tokens) is not int or tokens <= 0:
        stop(f"num_speculative_tokens is {tokens!r}, a number above zero is wanted", 396)
    if spec.get("tensor_parallel_size") is not None:
        stop("tensor_parallel_size is no field of its own: draft_tensor_parallel_size is", 1813)
    parallel = given.get("--tensor-parallel-size") or given.get("-tp") or "1"
    wide = spec.get("draft_tensor_parallel_size")
    if wide is not None and str(wide) not in ("1", parallel):
        stop(f"draft_tensor_parallel_size is {wide!r}; 1 or the target's {parallel} is wanted", 1712)
    if spec.get("use_heterogeneous_vocab") and spec.get("method") != "draft_model":
        stop("use_heterogeneous_vocab is for method draft_model alone", 1850)
    for name, words in (
        ("rejection_sample_method", ("standard", "block", "synthetic")),
        ("draft_sample_method", ("greedy", "probabilistic")),
    ):
        if name in spec and spec[name] not in words:
            stop(f"{name} is {spec[name]!r}; {' or '.join(words)} is wanted", 98)
    if why := _synthetic(spec):
        stop(why, 566)
    limit, longest = spec.get("max_model_len"), _longest(given, target)
    if type(limit) is int and longest is not None and limit > longest:
        stop(f"max_model_len is {limit}, more than the target's {longest}", 1633)
    return found


def _synthetic(spec: Mapping[str, Any]) -> str | None:
    rates, length = spec.get("synthetic_acceptance_rates"), spec.get("synthetic_acceptance_length")
    tokens = spec.get("num_speculative_tokens")
    if spec.get("rejection_sample_method") != "synthetic":
        only = "synthetic_acceptance_rates and _length go with rejection_sample_method synthetic alone"
        return only if rates is not None or length is not None else None
    if (rates is None) == (length is None):
        return "synthetic acceptance wants synthetic_acceptance_rates or synthetic_acceptance_length, one of them"
    if isinstance(rates, list) and type(tokens) is int:
        falls = all(b <= a for a, b in itertools.pairwise(rates))
        if len(rates) != tokens or not falls or not all(0 <= r <= 1 for r in rates):
            return f"synthetic_acceptance_rates is {rates}; {tokens} rates from 1 down to 0 are wanted"
    if isinstance(length, int | float) and type(tokens) is int and not 1 <= length <= tokens + 1:
        return f"synthetic_acceptance_length is {length}; 1 to {tokens + 1} is wanted"
    return None


def _longest(given: Mapping[str, str], target: TargetFacts | None) -> int | None:
    asked = _whole(given.get("--max-model-len"), "--max-model-len")
    return asked or positions(target)


def positions(target: TargetFacts | None) -> int | None:
    """The target's own limit, where its config is known."""
    config = target.config if target else {}
    inner = config.get("text_config")
    value = {**config, **inner} if isinstance(inner, Mapping) else config
    found = value.get("max_position_embeddings")
    return found if type(found) is int else None


def _resolved(spec: Mapping[str, Any]) -> list[FlagNote]:
    """Fields whose value is not the one asked for, or that decide how acceptance is to be read."""

    def note(flag: str, resolved: Any, rule: str, line: int, loudness: Loudness = "silent") -> FlagNote:
        return FlagNote(flag, spec.get(flag), resolved, rule, loudness, ran(f"{SPECULATIVE}:{line}"))

    notes = []
    if "draft_sample_method" not in spec:
        rule = "drafts are the drafter's first choice, whatever the temperature; probabilistic samples them"
        notes.append(note("draft_sample_method", "greedy", rule, 600))
    if "draft_tensor_parallel_size" not in spec:
        notes.append(note("draft_tensor_parallel_size", "the target's", "as the target's where not given", 1712))
    if spec.get("rejection_sample_method") == "synthetic" and not _synthetic(spec):
        rates = spec.get("synthetic_acceptance_rates") or _rates(spec)
        rule = "drafts are accepted by these numbers, not by the target"
        notes.append(note("synthetic_acceptance_rates", rates, rule, 1834))
    if spec.get("max_model_len") is not None:
        rule = "no draft past this position (V1 runner; the V2 runner does not look at it)"
        notes.append(note("max_model_len", spec["max_model_len"], rule, 1633))
    if spec.get("num_speculative_tokens_per_batch_size"):
        rule = "the number of drafted tokens changes with the batch: accept lengths of two loads do not compare"
        notes.append(note("num_speculative_tokens_per_batch_size", "by batch size", rule, 496))
    return notes


def _rates(spec: Mapping[str, Any]) -> list[float]:
    """The rates by depth that a mean length is turned into."""
    length, tokens = spec["synthetic_acceptance_length"], spec["num_speculative_tokens"]
    full = int(length - 1)
    return ([1.0] * full + [length - 1 - full] + [0.0] * (tokens - full - 1))[:tokens]


def _warned(spec: Mapping[str, Any]) -> list[Warned]:
    if spec.get("rejection_sample_method") == "synthetic":
        said = "rejection_sample_method is synthetic: every acceptance it reports is made up"
        return [("acceptance-faked", said, ran(f"{SPECULATIVE}:1834"))]
    return []
