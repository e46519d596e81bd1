"""The name of a fault: what it is called that a fact is configured as one thing and was trained as another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.variants.scores import FINAL

Value = Any

# (fact, as configured, as trained) where a few words decide.
_PAIRS: Mapping[tuple[str, Value, Value], str] = {
    ("residual", "before hidden_norm", "after hidden_norm"): "norm-before-residual-ignored",
    ("residual", "after hidden_norm", "before hidden_norm"): "norm-before-residual-ignored",
    ("head_norm", False, True): "head-norm-skipped",
    ("head_norm", True, False): "head-norm-added",
    ("residual_kept", True, False): "residual-dropped",
    ("residual_kept", False, True): "residual-dropped",
    ("feedback", "after the last norm", "before the last norm"): "feedback-post-norm",
    ("feedback", "before the last norm", "after the last norm"): "feedback-pre-norm",
    ("token_shift", 1, 0): "token-shift-missing",
    ("token_shift", 1, 2): "training-shift-twice",
    ("position_step", 1, 0): "step-positions-frozen",
    ("embedding", "own", "target"): "embedding-random",
    ("embedding", "target", "own"): "embedding-overwritten",
    ("head", "own", "target"): "head-random",
    ("head", "target", "own"): "head-overwritten",
}
_FC_NORMS: Mapping[tuple[str, str], str] = {
    ("none", "each"): "fc-norm-skipped",
    ("none", "joint"): "input-norm-skipped",
    ("joint", "each"): "fc-norm-joint",
    ("each", "joint"): "fc-norm-joint",
    ("each", "none"): "fc-norm-added",
    ("joint", "none"): "fc-norm-added",
}


def cause_of(fact: str, configured: Value, trained: Value, *, num_layers: int, named: bool = True) -> str | None:
    """The slug, or None for a difference that has no name. ``named``: whether a key of the config names the taps."""
    if fact == "taps":
        return _taps(tuple(configured), tuple(trained), num_layers, named)
    if fact == "rope":
        return _rope(dict(configured), dict(trained))
    if fact == "norm_gain":
        return _gain(trained)
    if fact == "fc_norm":
        return _FC_NORMS.get((configured, trained), "fc-norm-skipped" if "each" in trained else "input-norm-skipped")
    if fact == "rope_layout":
        return "rope-interleaved"
    if fact == "window":
        return "window-from-target"
    if fact == "feedback":
        played = {"the target's state": "feedback-target-state", "the state before": "feedback-stale"}
        return _PAIRS.get((fact, configured, trained)) or played.get(trained) or played.get(configured)
    return _PAIRS.get((fact, configured, trained))


def _taps(configured: Sequence[Value], trained: Sequence[Value], n: int, named: bool) -> str:
    default = (2, n // 2, n - 3)
    if None in trained or len(configured) != len(trained):
        return "taps-too-few"
    if FINAL in trained or FINAL in configured:
        at = list(trained if FINAL in trained else configured).index(FINAL)
        other = (configured if FINAL in trained else trained)[at]
        return "tap-post-norm" if other == n else "taps-highest-final-state"
    if not named and tuple(configured) == default:
        return "taps-key-missing"
    if all(isinstance(t, int) for t in (*configured, *trained)):
        moved = {c - t for c, t in zip(configured, trained, strict=True)}
        if moved == {1}:
            return "taps-off-by-one"
        if moved == {-1}:
            return "taps-off-by-minus-one"
    if sorted(map(str, configured)) == sorted(map(str, trained)):
        return "taps-reversed" if tuple(reversed(configured)) == tuple(trained) else "taps-swapped"
    return "taps-engine-default" if tuple(configured) == default else "taps-differ"


def _rope(configured: Mapping[str, Value], trained: Mapping[str, Value]) -> str:
    partial = "partial_rotary_factor"
    if trained.get(partial, 1.0) != configured.get(partial, 1.0):
        return "rope-partial-ignored"
    plain = [rope.get("rope_type", "default") == "default" for rope in (configured, trained)]
    if plain == [True, False]:
        return "rope-scaling-dropped"
    if plain == [False, True]:
        return "rope-scaling-added"
    if configured.get("rope_theta") != trained.get("rope_theta"):
        return "rope-base-wrong"
    return "rope-scaling-differs"


def _gain(trained: Mapping[str, float]) -> str:
    """``trained``: what must be added to the stored weights to have the ones trained."""
    if set(trained) != {"all"}:
        return "norm-gain-one-layer"
    return "norm-gain-plus-one" if trained["all"] < 0 else "norm-gain-minus-one"
