"""An installed engine's own answer laid over what the table says of it."""

from __future__ import annotations

from dataclasses import replace

from eyas.contract import Contract, Fact
from eyas.dialects.wiring import FlagNote, Refusal, Source, Wiring
from eyas.engines.ask import Answer


def over(answer: Answer, table: Wiring) -> Wiring:
    """The wiring with the engine's word in the place of the table's, for all that the engine was able to say."""
    source = Source(f"{answer.engine} {answer.version}, asked where it is installed", "executed")
    facts, taps = dict(table.facts.facts), table.taps
    key = next((name for name in (table.runner, answer.engine) if name in answer.taps), None)
    if key is not None:
        said = answer.taps[key]
        as_listed = table.taps is not None and list(table.taps) != sorted(table.taps)  # an engine that keeps the order
        taps = None if said is None else tuple(dict.fromkeys(said) if as_listed else sorted(set(said)))
        facts.pop("taps", None)
        if taps is not None:
            origin = table.facts.facts["taps"].origin if "taps" in table.facts else "inferred"
            facts["taps"] = Fact(list(taps), origin)
    refusals = table.refusals
    if answer.error:
        refusals = (Refusal("flag-refused", answer.error, "start", source), *refusals)
    return replace(
        table,
        version=answer.version,
        source="installed",
        taps=taps,
        facts=Contract(facts),
        flags=tuple(
            FlagNote(
                str(row.get("flag")),
                row.get("requested"),
                row.get("resolved"),
                str(row.get("rule") or "the engine resolved it so"),
                row.get("loudness") or "silent",
                source,
            )
            for row in answer.flags
        )
        or table.flags,
        refusals=refusals,
        assumed=None,
    )
