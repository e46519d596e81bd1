"""What the keys of a config leave to be said before any engine is asked: two places that differ, odd ids."""

from __future__ import annotations

from eyas.dialects import ids
from eyas.dialects.contradictions import contradictions
from eyas.dialects.keys import Keys
from eyas.dialects.meaning import Meaning
from eyas.dialects.wiring import Files, TargetFacts
from eyas.results import Evidence, Finding


def findings(files: Files, meant: Meaning, target: TargetFacts | None) -> list[Finding]:
    return [*two_places(files, target), *_odd_ids(files, target), *_notes(meant)]


def two_places(files: Files, target: TargetFacts | None) -> list[Finding]:
    return [
        Finding(
            "keys-contradict",
            "note",
            f"{row.key} says {row.inner} inside its block and {row.outer} at top level; "
            + ", ".join(
                f"{reader} reads {place if place == 'neither' else 'the ' + place}"
                for reader, place in row.readers.items()
            )
            + ".",
            [Evidence(row.key, row.inner, row.outer, f"{row.source.where} ({row.source.basis})")],
        )
        for row in contradictions(files.config, target)
    ]


def _odd_ids(files: Files, target: TargetFacts | None) -> list[Finding]:
    keys = Keys(files.config)
    places = ((ids.INNER, keys.inside("eagle_config").ids(ids.KEY)), (ids.KEY, keys.ids(ids.KEY)))
    layers = target.num_layers if target else None
    return [
        Finding(
            "ids-odd",
            "note",
            f"{key}: {trouble.what} ids {list(given)}: {trouble.why}.",
            [
                Evidence(
                    key,
                    list(given),
                    f"distinct, ascending, 0 to {layers if layers is not None else 'n'}",
                    f"{trouble.source.where} ({trouble.source.basis})",
                )
            ],
        )
        for key, given in places
        if given is not None
        for trouble in ids.troubles(key, given, layers)
    ]


def _notes(meant: Meaning) -> list[Finding]:
    return [
        Finding("contract-missing", "note", note, [Evidence("files", note, None, meant.why)]) for note in meant.notes
    ]
