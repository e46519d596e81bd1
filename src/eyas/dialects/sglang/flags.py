"""What SGLang makes of its command line where it bears on an EAGLE-3 drafter.

Rules of ``handle_speculative_decoding`` and ``_handle_eagle_family`` (arg_groups/speculative_hook.py; in 0.5.12.post1
``ServerArgs._handle_speculative_decoding``), in their order. runs/sglang_arguments.py runs those functions; what they
said is in tests/fixtures/engines/sglang-arguments.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.dialects.sglang.releases import OLD, Release
from eyas.dialects.wiring import FlagNote, Loudness, Refusal, Source, TargetFacts
from eyas.errors import UsageError

# Flag -> the type of its value; bool is a switch.
KNOWN: dict[str, type] = {
    "--speculative-algorithm": str,
    "--speculative-draft-model-path": str,
    "--speculative-draft-model-revision": str,
    "--speculative-num-steps": int,
    "--speculative-eagle-topk": int,
    "--speculative-num-draft-tokens": int,
    "--speculative-draft-window-size": int,
    "--speculative-draft-model-quantization": str,
    "--speculative-token-map": str,
    "--speculative-accept-threshold-single": float,
    "--speculative-accept-threshold-acc": float,
    "--speculative-use-rejection-sampling": bool,
    "--speculative-use-block-verification": bool,
    "--quantization": str,
    "--context-length": int,
    "--max-running-requests": int,
    "--attention-backend": str,
    "--page-size": int,
    "--device": str,
    "--json-model-override-args": str,
    "--dtype": str,
    "--pp-size": int,
    "--enable-two-batch-overlap": bool,
}
_SHORT = {
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--pipeline-parallel-size": "--pp-size",
}
_SINCE_NEW = ("--speculative-use-rejection-sampling", "--speculative-use-block-verification")
STEPS, TOPK, TOKENS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
ALGORITHM, DRAFT, QUANTISED = (
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-model-quantization"
)  # fmt: skip

# Targets whose own checkpoint is taken for the drafter where no path is given.
OWN_DRAFT = (
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "BailingMoeV2_5ForCausalLM", "MistralLarge3ForCausalLM", "PixtralForConditionalGeneration", "HYV3ForCausalLM",
    "HYV4ForCausalLM", "Qwen4ExpForConditionalGeneration",
)  # fmt: skip
_OWN_DRAFT_SINCE_NEW = ("HYV4ForCausalLM", "Qwen4ExpForConditionalGeneration")
_OWN_DRAFT_QUIET = ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration")
WIDE = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
"""Targets for which (5 steps, top-k 4, 8 draft tokens) are chosen; (3, 1, 4) for every other."""


@dataclass
class Given:
    """A command line, split: flags known here with typed values, the others as they stand, and the environment."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Resolved:
    values: dict[str, Any]
    environment: dict[str, str]
    override: Mapping[str, Any]
    """``--json-model-override-args``, which is laid over the drafter's config too."""
    notes: list[FlagNote] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    warnings: list[tuple[str, str, Source]] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        return str(self.values[ALGORITHM])


def parse(flags: Sequence[str]) -> Given:
    """Raises UsageError where a value is missing or of another type."""
    given, words = Given(), list(flags)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if (found := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word, re.DOTALL)) is None:
                raise UsageError(
                    f"{word!r} among the flags belongs to no flag.",
                    way_out="Write flags as the engine takes them: --name VALUE, variables as NAME=VALUE before them.",
                )
            given.environment[found[1]] = found[2]
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        kind = KNOWN.get(name)
        if kind is bool:
            given.values[name] = True
        elif equals:
            given.values[name] = value
        elif words and not words[0].startswith("--"):
            given.values[name] = words.pop(0)
        elif kind is None:
            given.values[name] = None
        else:
            raise UsageError(f"{name} has no value.", way_out=f"Write {name} VALUE.")
        if kind is None:
            given.unknown[name] = given.values.pop(name)
            while words and not words[0].startswith("-"):  # a flag with several values
                given.unknown[name] = f"{given.unknown[name]} {words.pop(0)}"
        elif kind is not bool:
            given.values[name] = _typed(name, given.values[name], kind)
    return given


def _typed(name: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(
            f"{name} is {value!r}; {'a whole number' if kind is int else 'a number'} was expected.",
            way_out=f"Write {name} as the engine takes it.",
        ) from error


def resolve(flags: Sequence[str], target: TargetFacts | None, release: Release) -> Resolved:
    """The flags as the engine runs with them; without any, the ones it chooses itself."""
    given = parse(flags)
    override = _override(given.values.get("--json-model-override-args"))
    resolved = Resolved(dict(given.values), given.environment, override)
    _algorithm(resolved, given, release)
    if not resolved.refusals and resolved.algorithm in ("EAGLE", "EAGLE3"):
        for step in (_draft, _running, _numbers, _chain, _sampling, _window, _pages):
            step(resolved, given, target, release)
            if resolved.refusals:
                break
    _quantisation(resolved, given, release)
    _precision(resolved, given, release)
    _layers_elsewhere(resolved, given, release)
    _rest(resolved, given, release)
    return resolved


def _note(
    resolved: Resolved, given: Given, flag: str, value: Any, rule: str, loudness: Loudness, source: Source
) -> None:
    resolved.values[flag] = value
    resolved.notes.append(FlagNote(flag, given.values.get(flag), value, rule, loudness, source))


def _refuse(resolved: Resolved, why: str, source: Source) -> None:
    resolved.refusals.append(Refusal("flag-refused", why, "start", source))


def _algorithm(resolved: Resolved, given: Given, release: Release) -> None:
    source = release.at("speculation", "executed")
    asked = given.values.get(ALGORITHM)
    if asked is None:
        rule = "taken for granted here: without it the engine does not draft at all"
        _note(resolved, given, ALGORITHM, "EAGLE3", rule, "silent", source)
        return
    name = asked.upper()
    value = "EAGLE" if name == "NEXTN" else name
    if value != asked:
        rule = "NEXTN is another name of EAGLE" if name == "NEXTN" else "read in upper case"
        _note(resolved, given, ALGORITHM, value, rule, "silent", source)
    resolved.values[ALGORITHM] = value
    if value != "EAGLE3":
        fed = "feeds the target's last state and takes the target's head and embedding" if value == "EAGLE" else (
            "is another way to draft"
        )  # fmt: skip
        resolved.warnings.append(("algorithm-eagle", f"{ALGORITHM} {value} {fed}", source))


def _draft(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    source = release.at("draft path", "executed")
    own = target is not None and target.architecture in OWN_DRAFT
    if target is not None and release.read == OLD and target.architecture in _OWN_DRAFT_SINCE_NEW:
        own = False
    if not own or target is None:
        return
    if DRAFT in given.values:
        if target.architecture not in _OWN_DRAFT_QUIET:
            rule = "kept; the engine says that DeepSeek's own heads need no path, which does not concern EAGLE-3"
            _note(resolved, given, DRAFT, given.values[DRAFT], rule, "warning", source)
    elif given.values:
        rule = f"not given, so the target's own checkpoint is loaded as the drafter of a {target.architecture}"
        _note(resolved, given, DRAFT, "the target's path", rule, "silent", source)
        resolved.warnings.append(
            ("draft-path-defaulted", f"{DRAFT} is not given, so the drafter is not loaded: {rule}", source)
        )


def _running(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    if "--max-running-requests" not in given.values:
        rule = "48 with speculation unless given"
        source = release.at("eagle family", "executed")
        _note(resolved, given, "--max-running-requests", 48, rule, "warning", source)


def _numbers(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    steps, topk, tokens = (given.values.get(flag) for flag in (STEPS, TOPK, TOKENS))
    source = release.at("auto", "executed")
    if steps is None:
        if topk is not None or tokens is not None:
            _refuse(
                resolved,
                f"{TOPK} or {TOKENS} without {STEPS}: an assertion fails",
                release.at("eagle family", "executed"),
            )
            return
        wide = target is not None and target.architecture in WIDE
        chosen = (5, 4, 8) if wide else (3, 1, 4)
        rule = "chosen by the target's architecture" + ("" if target is not None else ", which is not known here")
        for flag, value in zip((STEPS, TOPK, TOKENS), chosen, strict=True):
            _note(resolved, given, flag, value, rule, "silent", source)
    elif topk is None:
        why = f"{STEPS} without {TOPK}: None is compared with 1, a TypeError"
        _refuse(resolved, why, release.at("pages", "executed"))


def _chain(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    steps, topk, tokens = (resolved.values.get(flag) for flag in (STEPS, TOPK, TOKENS))
    source = release.at("topk one", "executed")
    if steps is None or topk is None:
        return
    backend = given.values.get("--attention-backend")
    if topk > 1 and backend == "trtllm_mha":
        _refuse(resolved, f"the backend trtllm_mha takes {TOPK} 1 only", release.at("eagle family", "executed"))
        return
    if topk == 1 and tokens != steps + 1:
        rule = f"with top-k 1 a chain of {steps} step{'s' * (steps != 1)} holds {steps + 1} tokens, the last accepted "
        rule += f"one and {steps} drafted"
        _note(resolved, given, TOKENS, steps + 1, rule, "warning", source)
        if tokens is not None:
            slug = "draft-tokens-lowered" if tokens > steps + 1 else "draft-tokens-below-steps"
            resolved.warnings.append((slug, f"{TOKENS} {tokens} becomes {steps + 1}: {rule}", source))
    for flag in (STEPS, TOPK, TOKENS):
        if flag in given.values and not any(note.flag == flag for note in resolved.notes):
            _note(resolved, given, flag, given.values[flag], "as given", "silent", source)


def _sampling(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    values, source = given.values, release.at("rejection", "executed")
    if given.values.get("--device") in ("cpu", "xpu"):
        why = f"on {values['--device']} drafts are verified greedily whatever the temperature"
        resolved.warnings.append(("verify-greedy", why, release.at("greedy", "read")))
    block = values.get("--speculative-use-block-verification", False)
    rejection = values.get("--speculative-use-rejection-sampling", False)
    if (block or rejection) and release.read == OLD:
        _refuse(resolved, f"{release.name} does not know {', '.join(f for f in _SINCE_NEW if f in values)}", source)
        return
    if block:
        if values.get("--device", "cuda") != "cuda":
            _refuse(resolved, "block verification runs on CUDA or ROCm only", release.at("speculation", "executed"))
            return
        if not rejection:
            _note(
                resolved, given, _SINCE_NEW[0], True, "block verification turns it on", "silent",
                release.at("speculation", "executed"),
            )  # fmt: skip
    if block or rejection:
        if resolved.values.get(TOPK) != 1:
            _refuse(resolved, f"rejection sampling takes {TOPK} 1 only", source)
        elif any(values.get(f"--speculative-accept-threshold-{t}", 1.0) != 1.0 for t in ("single", "acc")):
            _refuse(resolved, "rejection sampling takes no accept thresholds", source)


def _window(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    size = given.values.get("--speculative-draft-window-size")
    if size is not None and release.read != OLD and size <= 0:
        why = f"--speculative-draft-window-size must be above zero, {size} was given"
        _refuse(resolved, why, release.at("speculation", "executed"))


def _pages(resolved: Resolved, given: Given, target: TargetFacts | None, release: Release) -> None:
    topk, page = resolved.values.get(TOPK), given.values.get("--page-size", 1)
    backend = given.values.get("--attention-backend")
    paged = ("flashinfer", "fa3") if release.read == OLD else ("flashinfer", "fa3", "triton")
    if topk is not None and topk > 1 and page > 1 and backend not in paged:
        why = f"{TOPK} above 1 with --page-size above 1 takes --attention-backend {', '.join(paged)}"
        _refuse(resolved, why, release.at("pages", "executed"))


def _precision(resolved: Resolved, given: Given, release: Release) -> None:
    dtype = given.values.get("--dtype")
    if dtype not in (None, "auto"):
        why = f"the drafter runs in {dtype} too, whatever it was saved in"
        resolved.warnings.append(("drafter-dtype-forced", why, release.at("draft dtype")))


def _layers_elsewhere(resolved: Resolved, given: Given, release: Release) -> None:
    """Layers that do not run where taps are captured."""
    reasons = []
    if given.values.get("--enable-two-batch-overlap"):
        reasons.append("layers that two-batch overlap runs are not captured")
    if (stages := given.values.get("--pp-size", 1)) > 1:
        reasons.append(f"of {stages} pipeline stages only the last captures, so taps of earlier layers do not arrive")
    for why in reasons:
        resolved.warnings.append(("taps-too-few", why, release.at("capture elsewhere", "inferred")))


def _quantisation(resolved: Resolved, given: Given, release: Release) -> None:
    target, draft = given.values.get("--quantization"), given.values.get(QUANTISED)
    source = release.at("quantisation")
    if draft is None and target not in (None, "unquant"):
        rule = "the target's, unless the drafter's own is given; unquant stops it"
        _note(resolved, given, QUANTISED, target, rule, "silent", source)
        why = f"the drafter is quantised as the target is ({target}) unless {QUANTISED} unquant is passed"
        resolved.warnings.append(("drafter-target-quantisation", why, source))
    elif draft == "unquant":
        _note(resolved, given, QUANTISED, None, "no quantisation", "silent", source)


def _rest(resolved: Resolved, given: Given, release: Release) -> None:
    here = release.at("eagle family")
    if "--speculative-token-map" in given.values and resolved.algorithm == "EAGLE3":
        rule = "an EAGLE-3 drafter brings its own map"
        _note(resolved, given, "--speculative-token-map", None, rule, "warning", release.at("token map"))
    said = {note.flag for note in resolved.notes}
    for flag, value in given.values.items():
        if flag not in said:
            rule = "laid over the drafter's config too" if flag == "--json-model-override-args" else "as given"
            source = release.at("override args") if flag == "--json-model-override-args" else here
            resolved.notes.append(FlagNote(flag, value, value, rule, "silent", source))
    for flag, unknown in given.unknown.items():
        rule = "not looked at here: it bears on no fact of a drafter that is known"
        resolved.notes.append(FlagNote(flag, unknown, unknown, rule, "silent", Source("eyas", "inferred")))
    length = given.environment.get("SGLANG_SIMULATE_ACC_LEN")
    if length is not None and _above_zero(length):
        rule = f"acceptance is made up: about {length} tokens a round are kept whatever is drafted"
        source = release.at("simulated")
        resolved.notes.append(FlagNote("SGLANG_SIMULATE_ACC_LEN", length, length, rule, "silent", source))
        resolved.warnings.append(("acceptance-faked", f"SGLANG_SIMULATE_ACC_LEN={length}: {rule}", source))


def _above_zero(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _override(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--json-model-override-args is no JSON ({error}).", way_out="Quote it for the shell: '{\"key\": 1}'."
        ) from error
    if not isinstance(value, dict):
        raise UsageError(
            f"--json-model-override-args is {value!r}; an object was expected.", way_out="Write '{\"key\": 1}'."
        )
    return value
