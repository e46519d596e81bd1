"""SGLang: what it makes of a drafter, and how a drafter is spelled for it. Tables in ``taps``, ``keys``, ``weights``,
``flags``; which release they are from in ``releases``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.contract import Contract, Fact
from eyas.dialects.sglang import flags, keys, taps, weights
from eyas.dialects.sglang.releases import FIRST_ID_RULE, RATE_SINCE, VERSIONS, Release, release
from eyas.dialects.sglang.write import write
from eyas.dialects.wiring import Files, Launch, Refusal, Source, TargetFacts, Wiring

__all__ = ["CAPTURE_A_BRANCH", "FIRST_ID_RULE", "LAST_ID_RULE", "REACH_LAST_TAP", "VERSIONS"]
__all__ += ["captured", "refusals", "spell", "wire", "write"]

LAST_ID_RULE = tuple(name for name, how in taps.TARGETS.items() if how.rule == "last-id")
REACH_LAST_TAP = tuple(name for name, how in taps.TARGETS.items() if how.last)
CAPTURE_A_BRANCH = tuple(name for name, how in taps.TARGETS.items() if how.branch)


def wire(files: Files, target: TargetFacts | None, launch: Launch) -> Wiring:
    """What SGLang would make of these files. Raises CheckpointError on a config of wrong types, UsageError on flags."""
    of = release(launch.version)
    resolved = flags.resolve(launch.flags, target, of)
    config = {**files.config, **resolved.override}
    if stopped := keys.foreign(config, of):  # speculators' own format: nothing else of it is read
        return Wiring(
            "sglang", str(launch.version), None, "table", None, Contract({}), refusals=stopped,
            warnings=tuple(resolved.warnings), assumed=of.assumed,
        )  # fmt: skip
    read = keys.read(config, of)
    facts, stops = dict(read.facts), [*resolved.refusals, *read.refusals]
    warnings = list(resolved.warnings)
    seen = _states(read, target, of, resolved.algorithm, facts, stops, warnings)
    _ownership(read, resolved.algorithm, facts)
    facts["window"] = Fact(resolved.values.get("--speculative-draft-window-size"), "defaulted")
    if read.mla and facts["window"].value is not None:
        facts["window"] = Fact(None, "defaulted")  # such drafters pass over the flag in silence (fields/spec.py:167)
    _context(config, read, target, of, resolved, facts, stops, warnings)
    notes, misfits, told = (
        weights.load(files.tensors, read, of, resolved.algorithm)
        if files.tensors is not None
        else ([], [], {"vocab_map": Fact("none" if read.draft_vocab == read.vocab else "offsets", "defaulted")})
    )
    if of.public < RATE_SINCE:
        why = "before 0.5.11 the accept rate is accept length / draft tokens, the bonus token in both"
        warnings.append(("rate-definition-old", why, of.at("rate")))
    assumed = [of.assumed] if of.assumed else []
    if target is None:
        assumed.append("no target is named, so which taps its class captures cannot be told")
    return Wiring(
        "sglang", str(launch.version), None, "table", seen, Contract({**facts, **told}), read.notes, tuple(notes),
        tuple(resolved.notes), tuple(stops) + tuple(misfits), tuple(warnings), "; ".join(assumed) or None,
    )  # fmt: skip


def _states(
    read: keys.Keys,
    target: TargetFacts | None,
    of: Release,
    algorithm: str,
    facts: dict[str, Fact],
    stops: list[Refusal],
    warnings: list[tuple[str, str, Source]],
) -> tuple[int, ...] | None:
    """Taps, what a tap is, and whether fc is applied to them."""
    if target is None:
        return None
    if algorithm != "EAGLE3" or not read.aux:
        # one state, the target's last and normed one: no tap. fc is passed over where the widths happen to agree
        _width(1, target, read, of, facts, stops)
        why = f"{algorithm} feeds" if algorithm != "EAGLE3" else "use_aux_hidden_state is false, which feeds"
        warnings.append(("tap-post-norm", f"{why} the target's last, normed state", of.at("capture ids", "inferred")))
        return None
    how = of.capture(target.architecture)
    if how is None:
        why = f"{target.architecture} has no set_eagle3_layers_to_capture in {of.name}, so EAGLE-3 does not start"
        stops.append(Refusal("engine-cannot-express", why, "start", of.at("setter missing", "executed")))
        return None
    source = of.setter(target.architecture)
    got = taps.capture(how, target.num_layers, read.ids)
    if got.stops == "IndexError":
        why = f"layers {list(got.asked)} are marked one by one and there are {target.num_layers}: IndexError"
        stops.append(Refusal("taps-too-few", why, "start", source))
        return None
    if got.stops == "TypeError":
        why = "tap 0 is kept as hidden + residual, and before the first layer there is no residual: TypeError"
        stops.append(Refusal("engine-cannot-express", why, "first forward", source))
        return None
    facts["taps"] = Fact(list(got.taps), "defaulted" if read.ids is None else "declared")
    facts["tap_state"] = Fact("branch" if how.branch and any(got.taps) else "stream", "defaulted")
    if not got.taps:
        why = "none of the layers asked for is ever come by, so the target's last, normed state is fed"
        warnings.append(("taps-too-few", why, source))
    elif len(got.taps) < len(got.asked):
        why = f"{len(got.asked)} states are asked for (layers {list(got.asked)}), {len(got.taps)} arrive"
        stops.append(Refusal("taps-too-few", why, "first forward", source))
    _width(max(len(got.taps), 1), target, read, of, facts, stops)
    return got.taps


def _width(
    states: int, target: TargetFacts, read: keys.Keys, of: Release, facts: dict[str, Fact], stops: list[Refusal]
) -> None:
    width, expected = states * target.hidden_size, read.num_aux * read.target_hidden
    facts["fc"] = Fact("skipped" if width == read.hidden else "applied", "inferred")
    if width != expected and width != read.hidden and not any(stop.cause == "taps-too-few" for stop in stops):
        cause = "hidden-size-mismatch" if read.target_hidden != target.hidden_size else "weights-shape"
        why = f"fc is built for {expected} numbers ({read.num_aux} x {read.target_hidden}), {width} arrive"
        stops.append(Refusal(cause, why, "first forward", of.at("num_aux", "inferred")))


def _ownership(read: keys.Keys, algorithm: str, facts: dict[str, Fact]) -> None:
    given = read.head_from_target or algorithm == "EAGLE"
    own = read.keeps_embedding and not given
    facts["embedding"] = Fact("own" if own else "target", "declared" if own else "defaulted")
    head = "target" if given or (read.tied and not own) else "own"
    facts["head"] = Fact(head, "declared" if read.tied else "defaulted")


def _context(
    config: Mapping[str, Any],
    read: keys.Keys,
    target: TargetFacts | None,
    of: Release,
    resolved: flags.Resolved,
    facts: dict[str, Fact],
    stops: list[Refusal],
    warnings: list[tuple[str, str, Source]],
) -> None:
    """The drafter runs at the target's context length, and may not be asked for more than its own."""
    ours, source = keys.reach(config), of.at("context length")
    server = resolved.values.get("--context-length") or (keys.reach(target.config) if target is not None else None)
    if server is None or ours is None or server <= ours:
        return
    why = f"the server's context is {server} tokens, the drafter's {ours}"
    if resolved.environment.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "").lower() in ("1", "true", "yes", "y"):
        facts["max_positions"] = Fact(server, "defaulted")
        warnings.append(("position-limit-short", f"{why}; it is raised to the former", source))
    else:
        way = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 or a lower --context-length"
        stops.append(Refusal("position-limit-short", f"{why}: it stops, unless {way} is given", "start", source))


# -- asked without files or flags, of the newest release ------------------------------------------------------------


def _row(architecture: str) -> taps.Capture:
    """The row of a target; most others would do as LlamaForCausalLM does."""
    return taps.TARGETS.get(architecture, taps.TARGETS["LlamaForCausalLM"])


def captured(config: Mapping[str, Any], architecture: str, num_layers: int) -> list[int]:
    """Taps 0.5.23 captures for a drafter's config, in concatenation order."""
    ids = (config.get("eagle_config") or {}).get(keys.IDS)
    return list(taps.capture(_row(architecture), num_layers, ids).taps)


def spell(wanted: Sequence[int], architecture: str, num_layers: int) -> list[int] | None:
    """Ids that make 0.5.23 capture ``wanted``, or None where no list does."""
    return taps.spell(_row(architecture), num_layers, wanted)


def refusals(shape: Mapping[str, Any], architecture: str, num_layers: int) -> list[str]:
    """Why 0.5.23 cannot run a drafter of ``shape`` (DrafterConfig as a dict) on such a target; empty if it can."""
    wanted, reasons = list(shape["taps"]), []
    if spell(wanted, architecture, num_layers) is None:
        reasons.append(f"no list of layers makes it capture taps {wanted} of {architecture}")
    if architecture in CAPTURE_A_BRANCH and any(wanted):
        reasons.append(f"of {architecture} it captures the last branch of a layer, not the residual stream")
    if len(wanted) * shape["target_hidden_size"] == shape["hidden_size"]:
        reasons.append("it skips fc where what fc takes is as wide as what it gives")
    if shape["norm_before_residual"]:
        reasons.append("its residual always starts before hidden_norm (norm_before_residual is not read)")
    if shape["attention_bias"]:
        reasons.append("its queries, keys and values have no bias")
    if shape["qk_norm"]:
        reasons.append("its queries and keys have no norm")
    if shape["own_embedding"] and shape["target_hidden_size"] == shape["hidden_size"]:
        reasons.append("it puts the target's embedding in the place of the drafter's own")
    return reasons
