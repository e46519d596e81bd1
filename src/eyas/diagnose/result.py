"""The result of a diagnosis: a check's, and what the engine showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.diagnose.curves import Counted, Gap
from eyas.diagnose.probes import STAGES, first_apart
from eyas.engines.live import About
from eyas.results import CheckResult

WHERE = {
    "prompt": "the prompt's tokens",
    "tokens": "the tokens fed beside the states",
    "positions": "the rope positions",
    "taps": "the target's states fed to fc",
    "fused": "what fc makes of them",
    "states": "what the drafter's layer makes of that",
    "said": "the last norm, the head or the vocabulary map",
    "feedback": "what is fed back from one depth to the next",
    "drafted": "the drafted tokens",
    "acceptance": "which drafted tokens are kept",
    "metrics": "the counts on the metrics page",
}
KINDS: Mapping[str, Sequence[str]] = {
    "prompt": ("prompt",), "tokens": ("shift",), "positions": ("rope",), "taps": ("taps", "precision"),
    "fused": ("norm", "weights"), "states": ("weights", "norm", "rope"), "said": ("vocab", "weights"),
    "feedback": ("feedback",), "acceptance": ("metric",), "drafted": ("engine",),
}  # fmt: skip


@dataclass
class Diagnosis:
    """``checked`` holds findings and verdict; ``probes`` is None where nothing was probed."""

    checked: CheckResult
    engine: About | None
    served: dict[str, Any]
    expected: Counted | None = None
    observed: Counted | None = None
    at_4: Counted | None = None
    """Expected at the drafted tokens that a verdict is given at, whatever is served."""
    gap: Gap | None = None
    explained: float | None = None
    probes: dict[str, Any] | None = None
    repairs: list[dict[str, Any]] = field(default_factory=list)
    conversations: list[dict[str, Any]] = field(default_factory=list)
    others: int = 0
    """Requests whose counts hold somebody else's."""
    facts: dict[str, Any] = field(default_factory=dict)
    by_files: dict[str, str] = field(default_factory=dict)
    """Facts that the files themselves configure wrongly, and the cause they are named by."""
    toggles: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return self.checked.verdict

    def to_json(self) -> dict[str, Any]:
        return {
            **self.checked.to_json(),
            "engine": self.engine.to_json() if self.engine else None,
            "served": self.served,
            "trained": {fact: list(v) if isinstance(v, tuple) else v for fact, v in self.facts.items()},
            "by_files": self.by_files,
            "expected": self.expected.to_json() if self.expected else None,
            "observed": self.observed.to_json() if self.observed else None,
            "gap": self.gap.to_json(self.explained) if self.gap else None,
            "probes": self.probes,
            "divergence": divergence(self.probes),
            "repairs": self.repairs,
            "ruled_out": ruled_out(self.probes),
            "toggles": self.toggles,
            "conversations": self.conversations,
        }


def divergence(probes: Mapping[str, Any] | None) -> dict[str, str] | None:
    stage = first_apart(probes) if probes else None
    return None if stage is None else {"stage": stage, "what": f"The engine and the reference part at {WHERE[stage]}."}


def ruled_out(probes: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Kinds of fault that a stage, equal to the last digits, leaves no room for."""
    found: dict[str, str] = {}
    for stage in STAGES:
        told = (probes or {}).get(stage) or {}
        if told.get("status") == "equal":
            for kind in KINDS.get(stage, ()):
                found[kind] = f"{found[kind]}; {WHERE[stage]}" if kind in found else WHERE[stage]
    bad = {
        kind
        for stage in STAGES
        if ((probes or {}).get(stage) or {}).get("status") == "differs"
        for kind in KINDS.get(stage, ())
    }
    return [{"kind": kind, "by": f"{where}: equal"} for kind, where in found.items() if kind not in bad]
