"""A wiring as JSON. Keys are stable; more may be added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eyas.dialects.wiring import Source, TensorNote, Wiring


def wiring_json(wiring: Wiring) -> dict[str, Any]:
    by_effect = {effect: [n for n in wiring.tensors if n.effect == effect] for effect in _EFFECTS}
    return {
        "name": wiring.name,
        "version": wiring.version,
        "runner": wiring.runner,
        "source": wiring.source,
        "assumed": wiring.assumed,
        "taps": None if wiring.taps is None else list(wiring.taps),
        "facts": wiring.facts.to_json(),
        "ignored_keys": [_key(n) for n in wiring.keys if n.effect == "ignored"],
        "defaulted_keys": [_key(n) for n in wiring.keys if n.effect == "defaulted"],
        "overridden_keys": [_key(n) for n in wiring.keys if n.effect == "overridden"],
        **{effect: _tensors(notes) for effect, notes in by_effect.items()},
        "flags": [
            {
                "flag": n.flag,
                "requested": n.requested,
                "resolved": n.resolved,
                "rule": n.rule,
                "loudness": n.loudness,
                **_source(n.source),
            }
            for n in wiring.flags
        ],
        "refusals": [{"cause": r.cause, "why": r.why, "when": r.when, **_source(r.source)} for r in wiring.refusals],
        "warnings": [{"cause": cause, "text": text, **_source(source)} for cause, text, source in wiring.warnings],
    }


_EFFECTS = ("shared", "unfilled", "dropped", "overwritten")


def _key(note: Any) -> dict[str, Any]:
    return {"key": note.key, "value": note.value, "why": note.why, **_source(note.source)}


def _tensors(notes: Iterable[TensorNote]) -> list[dict[str, Any]]:
    return [{"tensor": n.tensor, "why": n.why, "loudness": n.loudness, **_source(n.source)} for n in notes]


def _source(source: Source) -> dict[str, str]:
    return {"source": source.where, "basis": source.basis}
