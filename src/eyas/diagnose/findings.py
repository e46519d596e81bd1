"""From what a probe showed to what is wrong: one function a stage. Reads only what JSON holds, so a bundle will do.

A fault is proven by tensors, not by a rate: the engine's own tensor is another's to the last digits. It is a note
where it changes no token that was drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eyas.check.classify import cause_of
from eyas.diagnose import stage_findings as stages
from eyas.diagnose.repairs import Repairs
from eyas.diagnose.stage_findings import PROBE
from eyas.results import Difference, Evidence, Finding, Rival
from eyas.variants.table import name_of

Json = Mapping[str, Any]
DEADLY = 0.75  # of the tokens kept that a fault costs
MAPS = {"none": "d2t-missing", "ids": "d2t-read-as-ids", "offsets": "d2t-read-as-ids"}
CACHES = {"own": "draft-cache-empty", "zeros": "draft-cache-empty", "kept": "draft-cache-not-refreshed"}


def of_probes(
    probes: Json,
    facts: Json,
    *,
    num_layers: int,
    named: bool = True,
    repairs: Repairs | None = None,
    by_files: Mapping[str, Finding] | None = None,
    short: bool = False,
) -> list[Finding]:
    """What the stages say, first to last. ``facts`` is how the drafter was trained; ``by_files`` findings, by fact, of
    what the files themselves configure otherwise than they fit; ``short``: whether the engine keeps less, proven."""
    found = [
        *stages.of_prompt(probes.get("prompt")),
        *stages.of_tokens(probes.get("tokens"), probes.get("faults") or {}),
        *stages.of_positions(probes.get("positions"), probes.get("drafted")),
        *of_faults(probes, facts, num_layers, named, repairs, by_files or {}),
        *stages.of_rows(probes.get("taps"), short),
        *stages.of_fused(probes.get("fused")),
        *stages.of_said(probes.get("said")),
        *stages.of_acceptance(probes.get("acceptance")),
        *stages.of_stops(probes),
        *stages.of_metrics(probes.get("metrics"), probes.get("stopped")),
    ]
    return found


def of_faults(
    probes: Json,
    facts: Json,
    num_layers: int,
    named: bool,
    repairs: Repairs | None,
    by_files: Mapping[str, Finding],
) -> Iterator[Finding]:
    """Facts that the engine runs otherwise than they were trained."""
    faults: dict[str, Any] = dict(probes.get("faults") or {})
    for fact, value in faults.items():
        if fact in by_files:  # how it was trained was measured, with its own rivals; the engine was seen to obey
            known = by_files[fact]
            seen = _seen(fact, probes, facts.get(fact))
            yield replace(known, summary=f"{known.summary} The engine runs it so.", evidence=[*known.evidence, *seen])
            continue
        trained = facts.get(fact)
        slug = slug_of(fact, value, trained, num_layers=num_layers, named=named)
        if slug is None:
            continue
        same = _harmless(probes)
        cost = repairs.alone.get(fact) if repairs else None
        yield Finding(
            slug,
            "note" if same else _severity(cost, repairs),
            f"The engine runs {name_of({fact: value})}; the drafter was trained with {name_of({fact: trained})}"
            + (": it changes no drafted token of this text." if same else f"{_costs(cost)}."),
            [*_seen(fact, probes, trained), *_priced(cost)],
            rivals=_rivals(fact, probes),
        )


def slug_of(fact: str, value: Any, trained: Any, *, num_layers: int, named: bool) -> str | None:
    """The cause that it is that an engine runs ``fact`` as ``value`` instead of ``trained``."""
    if fact == "cache":
        return CACHES.get(value)
    if fact == "vocab_map":
        return MAPS.get(value, "d2t-stale")
    if fact == "norm_gain":  # what the engine adds must be taken away again
        back = {name: -float(by) for name, by in dict(value).items()}
        return cause_of(fact, {}, back, num_layers=num_layers, named=named) if back else None
    if fact == "token_shift":
        return {0: "token-shift-missing", 2: "token-shift-two"}.get(value)
    if fact == "position_step":
        return "step-positions-frozen"
    if fact == "feedback" and value == "zeros":
        return "feedback-stale"
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(trained, list):
        trained = tuple(trained)
    return cause_of(fact, value, trained, num_layers=num_layers, named=named)


def _harmless(probes: Json) -> bool:
    """Whether every drafted token is the reference's."""
    return (probes.get("drafted") or {}).get("status") == "equal"


def _severity(cost: Difference | None, repairs: Repairs | None) -> Any:
    whole = repairs.as_is.length.value if repairs and repairs.as_is else None
    if cost is None or cost.value is None or whole is None:
        return "likely"
    return "fatal" if cost.value > DEADLY * max(whole - 1 + cost.value, 1e-9) else "likely"


def _costs(cost: Difference | None) -> str:
    if cost is None or cost.value is None:
        return ""
    return f", which alone costs {cost.value:.2f} tokens a round"


def _priced(cost: Difference | None) -> list[Evidence]:
    if cost is None or cost.value is None:
        return []
    shown = [None if v is None else round(v, 4) for v in (cost.value, cost.low, cost.high)]
    return [Evidence("accept length lost to it alone", shown, "0", "the reference run so on the served text")]


def _seen(fact: str, probes: Json, trained: Any) -> list[Evidence]:
    """The tensors that say so."""
    if fact == "taps" and (taps := probes.get("taps")) and taps["observed"]:
        errors = [min((e for e in row if e is not None), default=None) for row in taps["error"]]
        return [
            Evidence("taps fed to fc", taps["observed"], taps["configured"], PROBE),
            Evidence(
                "relative error of each against its tap", errors, "rounding", "rows of the engine against the target's"
            ),
        ]
    if fact in ("token_shift", "position_step"):
        stage = probes["tokens" if fact == "token_shift" else "positions"] or {}
        return [Evidence(fact, stage.get("shift", stage.get("step")), 1, PROBE)]
    if fact == "feedback":
        stage = probes["feedback"] or {}
        return [Evidence("fed from depth 1 on", stage.get("fed"), trained, PROBE),
                Evidence("relative error to it", stage["errors"].get(stage.get("fed")), "rounding", PROBE)]  # fmt: skip
    if fact in ("fc_norm", "taps") and (fused := probes.get("fused")):
        return [
            Evidence(
                "what fc gave, relative error", [fused["error"], fused["matched_error"]], "as configured, as run", PROBE
            )
        ]
    if fact in ("head", "head_norm", "vocab_map") or (
        fact == "norm_gain" and not (probes.get("states") or {}).get("matched")
    ):
        said = probes["said"] or {}
        return [
            Evidence(
                "norm, head: relative error; ids equal",
                [said.get("norm"), said.get("head"), said.get("ids")],
                "rounding",
                PROBE,
            )
        ]
    states = probes.get("states") or {}
    before = max((d["error"] for d in states.get("depths", []) if d["error"] is not None), default=None)
    after = (states.get("matched") or {}).get("error")
    return [
        Evidence(
            "states, relative error as trained and as run",
            [before, after],
            "rounding",
            f"{PROBE}, {states.get('tried')} readings",
        )
    ]


def _rivals(fact: str, probes: Json) -> list[Rival]:
    """Readings of the layer that gave the same states."""
    states = probes.get("states") or {}
    if fact not in ((states.get("matched") or {}).get("facts") or {}):
        return []
    return [
        Rival("flag-overridden", f"states that tell it from: {name}")
        for name in states.get("rivals", [])
        if not name.startswith(f"{fact} ")
    ][:3]


# -- together with what the files say ---------------------------------------------------------------------------------


def in_order(found: Sequence[Finding], repairs: Sequence[Json]) -> list[Finding]:
    """In the order in which to mend them; what comes before the drafter first, what no walk can price last."""
    order = {step["cause"]: i for i, step in enumerate(repairs)}
    return sorted(found, key=lambda f: order.get(f.cause, -1 if f.kind in ("prompt", "shift") else len(order)))


def merged(live: Sequence[Finding], files: Sequence[Finding], engine: Sequence[Finding], proven: bool) -> list[Finding]:
    """``live`` first; of ``files`` and ``engine`` what it does not say already. ``proven``: the engine was seen to
    draft as the reference does, so what a table says it does wrong is a note."""
    again = {f.cause for f in live}
    grave = [f for f in live if f.severity != "note"]
    spelled = {f.cause: f.fix for f in (*files, *engine) if f.fix}
    found = [replace(f, fix=spelled.get(f.cause, f.fix)) for f in live]
    kinds = {f.kind for f in grave}
    for finding in files:
        if finding.cause in again:
            continue
        found.append(finding)
        again.add(finding.cause)
    for finding in engine:
        if finding.cause in again:
            continue
        settled = proven or finding.kind in kinds or (finding.kind == "flags" and bool(grave))
        found.append(replace(finding, severity="note") if settled and finding.severity != "note" else finding)
    return found
