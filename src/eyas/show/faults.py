"""What an engine would do with a drafter against what the drafter was made for: the differences, named.

One fact, one function from the two values to a cause. A difference is a finding only where the contract's fact is
declared or measured; where it was only concluded from the files the finding has a rival and cannot be confident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.contract import FACTS, Contract
from eyas.dialects import rope
from eyas.dialects.meaning import Meaning
from eyas.dialects.wiring import FlagNote, Refusal, TargetFacts, TensorNote, Wiring
from eyas.results import Evidence, Finding, Rival, Severity

_PROVEN = ("declared", "measured")


def differences(
    trained: Contract, wiring: Wiring, target: TargetFacts | None, fix: Callable[[str], str | None]
) -> list[Finding]:
    """A finding for each fact that this engine wires otherwise. ``fix``: fact -> what to write, in its spelling."""
    found = []
    for fact, ours, theirs in trained.differences(wiring.facts):
        cause = _cause(fact, ours, theirs, wiring, target)
        if cause is None:
            continue
        origin = trained.facts[fact].origin
        found.append(
            Finding(
                cause,
                "likely",
                f"{engine_words(wiring)} wires {fact} {shown(theirs)}; the drafter was made for {shown(ours)}.",
                [
                    Evidence(f"{fact} in {engine_words(wiring)}", shown(theirs), shown(ours), f"contract ({origin})"),
                    *_why(fact, wiring),
                ],
                fix=fix(fact),
                rivals=()
                if origin in _PROVEN
                else (
                    Rival(
                        "contract-missing",
                        f"`eyas check CHECKPOINT --target T`: it measures {fact}, which is {origin} here",
                    ),
                ),
            )
        )
    return found


def refusals(wiring: Wiring) -> list[Finding]:
    """What makes this engine stop, at its start or at its first forward pass."""
    return [
        Finding(
            refusal.cause,
            _at_most_a_note("fatal", refusal),
            f"{engine_words(wiring)} stops at its {refusal.when}: {refusal.why}",
            [Evidence("raised by", engine_words(wiring), "nothing", _source(refusal))],
        )
        for refusal in wiring.refusals
    ]


def lost_tensors(wiring: Wiring, told: Sequence[Finding]) -> list[Finding]:
    """Tensors dropped or left unfilled that no difference of a fact has told already."""
    causes = {finding.cause for finding in told}
    found = []
    for cause, notes in _by_cause(wiring.tensors).items():
        if cause in causes:
            continue
        names = [note.tensor for note in notes]
        first = notes[0]
        what = "leaves unfilled" if first.effect == "unfilled" else "drops"
        severity: Severity = "fatal" if first.effect == "unfilled" else "note"
        found.append(
            Finding(
                cause,
                _at_most_a_note(severity, *notes),
                f"{engine_words(wiring)} {what} {', '.join(names[:6])}"
                + (f" and {len(names) - 6} more" if len(names) > 6 else "")
                + f" ({first.loudness}): {first.why}",
                [Evidence("tensors", names, [], _source(first))],
            )
        )
    return found


def flags(wiring: Wiring) -> list[Finding]:
    """Flags that this engine resolves to something else than was asked for."""
    return [
        Finding(
            _flag_cause(note),
            _at_most_a_note("likely", note),
            f"{engine_words(wiring)} was asked for {note.flag} {shown(note.requested)} and takes "
            f"{shown(note.resolved)} ({note.loudness}): {note.rule}",
            [Evidence(note.flag, note.resolved, note.requested, _source(note))],
        )
        for note in wiring.flags
        if note.requested is not None and not _same(note) and note.loudness != "error"
    ]


def _same(note: FlagNote) -> bool:
    return str(note.requested).lower() == str(note.resolved).lower()


# Warnings that leave another drafter, or no EAGLE-3 at all, in the place of this one.
_GRAVE_WARNINGS = ("algorithm-eagle", "draft-path-defaulted")


def warnings(wiring: Wiring, told: Sequence[Finding]) -> list[Finding]:
    """What is worth a line beside the findings already ``told``."""
    causes = {finding.cause for finding in told}
    return [
        Finding(
            cause,
            "likely" if cause in _GRAVE_WARNINGS and source.basis != "inferred" else "note",
            f"{engine_words(wiring)}: {text}",
            [Evidence("rule", text, None, f"{source.where} ({source.basis})")],
        )
        for cause, text, source in wiring.warnings
        if cause not in causes
    ]


def engine_words(wiring: Wiring) -> str:
    """``vllm 0.32.0 (v1 runner)``."""
    return f"{wiring.name} {wiring.version}" + (f" ({wiring.runner} runner)" if wiring.runner else "")


def shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def tap_cause(trained: Sequence[int], served: Sequence[int], *, defaulted: bool, num_layers: int | None) -> str | None:
    """The cause that turns ``trained`` into ``served``; None where they are the same."""
    ours, theirs = list(trained), list(served)
    if ours == theirs:
        return None
    if sorted(ours) == sorted(theirs):
        return "taps-reversed" if ours[::-1] == theirs and len(ours) > 2 else "taps-swapped"
    if defaulted:
        return "taps-engine-default"
    if len(theirs) < len(ours):
        return "taps-too-few"
    for shift, cause in ((1, "taps-off-by-one"), (-1, "taps-off-by-minus-one")):
        if [tap + shift for tap in ours] == theirs:
            return cause
    if num_layers is not None and theirs == [2, num_layers // 2, num_layers - 3]:
        return "taps-engine-default"
    return "taps-differ"


_PAIRS: dict[str, dict[tuple[Any, Any], str]] = {
    "fc_norm": {
        ("joint, then each", "joint"): "fc-norm-skipped",
        ("each", "joint"): "fc-norm-joint",
        ("joint", "each"): "fc-norm-added",
        ("each", "none"): "fc-norm-skipped",
    },
    "feedback": {
        ("before the last norm", "after the last norm"): "feedback-post-norm",
        ("after the last norm", "before the last norm"): "feedback-pre-norm",
    },
    "head_norm": {(False, True): "head-norm-added", (True, False): "head-norm-skipped"},
    "embedding": {("own", "target"): "embedding-overwritten", ("target", "own"): "embedding-random"},
    "head": {("own", "target"): "head-overwritten", ("target", "own"): "head-missing"},
    "vocab_map": {("offsets", "none"): "d2t-missing"},
    "fc": {("skipped", "applied"): "engine-cannot-express"},
    "qk_norm": {(True, False): "qk-norm-dropped"},
    "attention_bias": {(True, False): "attention-bias-dropped"},
}
_ALWAYS: dict[str, str] = {
    "residual": "norm-before-residual-ignored",
    "vocab_map": "d2t-read-as-ids",
    "layers": "layers-dropped",
    "fc": "fc-skipped",
    "tap_state": "taps-branch",
    "later_norm": "later-norm-differs",
    "window": "window-from-target",
    "attention": "engine-cannot-express",
    "qk_norm": "engine-cannot-express",
    "attention_bias": "engine-cannot-express",
    "draft_vocab_size": "weights-shape",
    "token_shift": "token-shift-missing",  # a constant offset of positions is nothing to rotary embedding: never told
}


def _cause(fact: str, ours: Any, theirs: Any, wiring: Wiring, target: TargetFacts | None) -> str | None:
    if fact == "taps":
        defaulted = wiring.facts.facts["taps"].origin == "defaulted"
        return tap_cause(ours, theirs, defaulted=defaulted, num_layers=target.num_layers if target else None)
    if fact == "rope":
        return rope_cause(
            ours, theirs, unread=any(n.key.startswith("rope") and n.effect == "ignored" for n in wiring.keys)
        )
    if fact == "max_positions":
        return "position-limit-short" if isinstance(theirs, int) and theirs < ours else None
    if (ours, theirs) in _PAIRS.get(fact, {}):
        return _PAIRS[fact][(ours, theirs)]
    if fact == "fc_norm":
        return "fc-norm-added" if ours == "none" else "input-norm-skipped"
    return _ALWAYS.get(fact)  # a fact no engine decides (mask, template, …) is never told


def rope_cause(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, unread: bool) -> str | None:
    """Which part of two sets of rotary parameters differs; None where only their spelling does."""
    base, served = rope.normal(ours), rope.normal(theirs)
    if base.pop("rope_theta") != served.pop("rope_theta"):
        return "rope-base-unread" if unread else "rope-base-wrong"
    if base == served:
        return None
    plain = [parameters["rope_type"] == "default" for parameters in (base, served)]
    if plain == [True, False]:
        return "rope-scaling-added"
    return "rope-scaling-dropped" if plain == [False, True] else "rope-scaling-differs"


def _why(fact: str, wiring: Wiring) -> list[Evidence]:
    """The rows of the engine's table that stand behind a fact."""
    words = _TELLS.get(fact, (fact,))
    keys = [note for note in wiring.keys if any(word in note.key for word in words)]
    tensors = [note for note in wiring.tensors if note.effect != "shared" and any(w in note.tensor for w in words)]
    return [Evidence(f"{n.key} {n.effect}", shown(n.value), n.why, _source(n)) for n in keys[:3]] + [
        Evidence(f"{n.tensor} {n.effect} ({n.loudness})", n.why, None, _source(n)) for n in tensors[:3]
    ]


_TELLS: dict[str, tuple[str, ...]] = {
    "taps": ("layer_ids", "aux_hidden_state"),
    "fc_norm": ("fc_norm", "norm_before_fc", "use_aux_norm", "input_norm", "aux_norm"),
    "residual": ("norm_before_residual",),
    "feedback": ("norm_output", "return_hidden_post_norm"),
    "head_norm": ("norm_output",),
    "embedding": ("embed_tokens",),
    "head": ("lm_head", "draft_vocab_size", "tie_word"),
    "qk_norm": ("q_norm", "k_norm"),
    "attention_bias": ("bias",),
    "window": ("window", "layer_types"),
    "layers": ("num_hidden_layers",),
    "vocab_map": ("d2t",),
    "max_positions": ("max_position",),
}
assert set(_TELLS) | set(_ALWAYS) | set(_PAIRS) <= set(FACTS)


def _by_cause(notes: Sequence[TensorNote]) -> dict[str, list[TensorNote]]:
    grouped: dict[str, list[TensorNote]] = {}
    for note in notes:
        if (cause := _tensor_cause(note)) is not None:
            grouped.setdefault(cause, []).append(note)
    return grouped


def _tensor_cause(note: TensorNote) -> str | None:
    name = note.tensor
    if note.effect == "unfilled":
        if name.endswith("lm_head.weight"):
            return "head-missing"
        if "d2t" in name:
            return "d2t-missing"
        return "norm-weight-missing" if "norm" in name else "weights-missing"
    if note.effect != "dropped" or "t2d" in name:  # t2d is training's: every engine drops it
        return None
    by_part = {
        "q_norm": "qk-norm-dropped",
        "k_norm": "qk-norm-dropped",
        "_proj.bias": "attention-bias-dropped",
        "fc_norm": "fc-norm-skipped",
        "aux_norm": "fc-norm-skipped",
        "input_norm": "input-norm-skipped",
    }
    return next((cause for part, cause in by_part.items() if part in name), "weights-unexpected")


def _flag_cause(note: FlagNote) -> str:
    if "algorithm" in note.flag or note.flag == "method":
        return "algorithm-eagle"
    numbers = all(isinstance(value, int) for value in (note.requested, note.resolved))
    if "draft-tokens" in note.flag and numbers:
        return "draft-tokens-lowered" if note.resolved < note.requested else "draft-tokens-below-steps"
    return "draft-quantisation-ignored" if "quantization" in note.flag else "flag-overridden"


def _at_most_a_note(severity: Severity, *rows: Refusal | TensorNote | FlagNote) -> Severity:
    """What was only inferred from source is never more than a note."""
    return "note" if any(row.source.basis == "inferred" for row in rows) else severity


def _source(row: Any) -> str:
    return f"{row.source.where} ({row.source.basis})"


def ambiguities(meant: Meaning, wiring: Wiring) -> list[Finding]:
    """Facts whose spelling has two readings: what each would mean here."""
    found = []
    for ambiguity in meant.ambiguous:
        served = shown(wiring.facts[ambiguity.fact]) if ambiguity.fact in wiring.facts else None
        readings = [shown(value) for value in ambiguity.values]
        right = [value for value in readings if value == served]
        found.append(
            Finding(
                "taps-ambiguous" if ambiguity.fact == "taps" else "contract-missing",
                "note",
                f"{ambiguity.fact} can be read as {' or as '.join(map(str, readings))}; {engine_words(wiring)} wires "
                f"{served}" + (", which is right under one of them only." if right else ", which is neither."),
                [Evidence(ambiguity.fact, served, readings, "config.json")],
                fix=ambiguity.separate,
            )
        )
    return found
