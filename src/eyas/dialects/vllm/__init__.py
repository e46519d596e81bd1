"""vLLM 0.32.0: what it makes of a drafter, and a config that it wires as a contract says.

Its layer ids are taps. Two runners read different keys for them (``taps``), three drafter's classes read the rest
(``keys``, ``weights``), and the command line decides which method and which runner it is (``flags``).
"""

from __future__ import annotations

from packaging.version import Version

from eyas.contract import Contract, Fact
from eyas.dialects.vllm import flags as command_line
from eyas.dialects.vllm import keys, reading, weights
from eyas.dialects.vllm.flags import Flags, Warned
from eyas.dialects.vllm.reading import Reading
from eyas.dialects.vllm.source import PROPOSER, SPECULATIVE, VERSIONS, at, ran
from eyas.dialects.vllm.taps import SELECTION, Capture, capture, captured, spell
from eyas.dialects.vllm.write import write
from eyas.dialects.wiring import Files, Launch, Refusal, Runner, TargetFacts, Wiring

__all__ = ["VERSIONS", "Runner", "captured", "spell", "wire", "write"]


def wire(files: Files, target: TargetFacts | None, launch: Launch) -> Wiring:
    """What vLLM would make of these files. Raises CheckpointError where a key cannot be what it is for, UsageError
    on flags that are no command line."""
    read, flags = reading.read(files.config), command_line.read(launch, target)
    caught = capture(read.values, target, flags.runner, flags.transformers)
    facts = keys.facts(read, caught, target)
    built_for, _ = keys.taps_built_for(read)
    refusals = [*read.refusals, *flags.refusals, *(caught.refusals if caught else ())]
    refusals += _shapes(read, caught, built_for, flags, target) + _methods(read, flags)
    warnings: list[Warned] = [*flags.warnings, *_runners_differ(read, target, flags), *_no_taps(read, flags)]
    if short := keys.past_the_limit(read, flags, target):
        warnings.append(("position-limit-short", f"max_position_embeddings is {short}", ran(f"{SPECULATIVE}:1677")))
    tensors = weights.Judged()
    if files.tensors is not None:
        tensors = weights.judge(files.tensors, read, built_for, target, flags.runner, flags.parallel_drafting)
    elif (words := weights.draft_vocab_size(read)) is not None and target is not None:
        facts["vocab_map"] = Fact("none" if words == target.vocab_size else "offsets", "inferred")
    takes = weights.uses_aux(read)
    return Wiring(
        name="vllm",
        version=str(launch.version),
        runner=flags.runner,
        source="table",
        taps=caught.taps if caught and takes else None,
        facts=Contract({**facts, **tensors.facts}),
        keys=tuple(keys.notes(files.config, read, caught, flags, target)),
        tensors=tuple(tensors.notes),
        flags=flags.notes,
        refusals=(*refusals, *tensors.refusals),
        warnings=(*warnings, *_vocabularies(read, target), *tensors.warnings),
        assumed=_assumed(launch.version),
    )


def _assumed(version: Version) -> str | None:
    if version.public in VERSIONS:
        return None
    return f"vllm {version} is not in the tables; what {VERSIONS[-1]} does is said"


def _shapes(
    read: Reading, caught: Capture | None, built_for: int, flags: Flags, target: TargetFacts | None
) -> list[Refusal]:
    """What cannot run whatever the weights are."""
    file = weights.CLASS_FILE.get(str(read.kind), weights.CLASS_FILE["llama"])
    found = []
    if caught is not None and weights.uses_aux(read) and len(caught.taps) != built_for:
        why = f"fc is built for {built_for} taps ({keys.taps_built_for(read)[1]} says so) and {len(caught.taps)} arrive"
        found.append(Refusal("taps-too-few", why, "first forward", at(f"{file}:210", "executed")))
    if read.style == "hf" and "target_hidden_size" in read.values and read.get("target_hidden_size") is None:
        why = "target_hidden_size is null and is multiplied as it is (TypeError); leave the key out"
        found.append(Refusal("hidden-size-mismatch", why, "start", ran(f"{file}:218")))
    wide = read.get("target_hidden_size") or read.get("hidden_size")
    if target is not None and wide is not None and wide != target.hidden_size and weights.uses_aux(read):
        why = f"fc is built for taps {wide} wide; the target's are {target.hidden_size} wide"
        found.append(Refusal("hidden-size-mismatch", why, "first forward", at(f"{file}:218", "inferred")))
    layers, kinds = read.get("num_hidden_layers") or 1, read.get("layer_types")
    if read.kind == "llama" and kinds and len(kinds) < layers:
        why = f"layer_types names {len(kinds)} of {layers} layers (AssertionError)"
        found.append(Refusal("weights-shape", why, "start", at("model_executor/models/llama.py:197")))
    if flags.runner == "v2" and read.kind != "deepseek" and not weights.uses_aux(read):
        why = "use_aux_hidden_state is false, but the V2 runner hands over taps all the same, and no fc narrows them"
        where = at("v1/worker/gpu/model_runner.py:300", "inferred")
        found.append(Refusal("engine-cannot-express", why, "first forward", where))
    return found


def _methods(read: Reading, flags: Flags) -> list[Refusal]:
    """Methods that are not EAGLE-3."""
    if not flags.told or flags.method == "eagle3":
        return []
    if flags.method == "eagle":
        bare = str(read.architecture)
        if read.style == "hf" and not bare.startswith("Eagle"):
            why = f"method eagle makes Eagle{bare} of its architecture, which is no class (ValueError)"
            return [Refusal("algorithm-eagle", why, "start", ran("transformers_utils/configs/eagle.py:51"))]
        why = "method eagle hands over the target's last state alone, which fc cannot take"
        return [Refusal("algorithm-eagle", why, "first forward", at(f"{PROPOSER}:1672", "inferred"))]
    why = f"method {flags.method} hands no states of the target to the drafter"
    return [Refusal("algorithm-eagle", why, "first forward", at(f"{SPECULATIVE}:1139", "inferred"))]


def _no_taps(read: Reading, flags: Flags) -> list[Warned]:
    """A drafter without fc, as of EAGLE-1, under the runner that honours it."""
    if weights.uses_aux(read) or read.kind == "deepseek" or flags.runner == "v2":
        return []
    why = "use_aux_hidden_state is false: no taps, no fc; the drafter is fed the target's final, normed state"
    return [("tap-post-norm", why, at(f"{PROPOSER}:1672", "inferred"))]


def _runners_differ(read: Reading, target: TargetFacts | None, flags: Flags) -> list[Warned]:
    """The same files, the other runner: a server with a GPU and a CPU build need not agree."""
    other: Runner = "v1" if flags.runner == "v2" else "v2"
    here, there = (capture(read.values, target, runner, flags.transformers) for runner in (flags.runner, other))
    if (here and here.taps) == (there and there.taps):
        return []
    said = [f"{list(c.taps)} ({c.key or 'defaults'})" if c else "the target's defaults" for c in (here, there)]
    why = f"the {flags.runner.upper()} runner captures {said[0]}, the {other.upper()} runner {said[1]}"
    return [("taps-engine-default", why, ran(SELECTION[other]))]


def _vocabularies(read: Reading, target: TargetFacts | None) -> list[Warned]:
    size = read.get("vocab_size")
    if target is None or size is None or size == target.vocab_size:
        return []
    why = f"vocab_size is {size}, the target's {target.vocab_size}: drafted logits are laid out over {size}"
    return [("target-vocab-mismatch", why, at(f"{weights.CLASS_FILE['llama']}:385", "inferred"))]
