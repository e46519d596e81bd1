"""From what a probe showed to what is wrong: one function a stage. Reads only what JSON holds, so a bundle will do.

A fault is proven by tensors, not by a rate: the engine's own tensor is another's to the last digits. It is a note
where it changes no token that was drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eyas.check.classify import cause_of
from eyas.diagnose.repairs import Repairs
from eyas.results import Difference, Evidence, Finding, Rival
from eyas.variants.table import name_of

Json = Mapping[str, Any]
PROBE = "probe of the running drafter"
FAKED = 0.02  # of the rounds that keep what the target would not choose: more than near ties make
DEADLY = 0.75  # of the tokens kept that a fault costs
MAPS = {"none": "d2t-missing", "ids": "d2t-read-as-ids", "offsets": "d2t-read-as-ids"}
CACHES = {"own": "draft-cache-empty", "zeros": "draft-cache-empty", "kept": "draft-cache-not-refreshed"}
ROWS: Mapping[str, tuple[str, str]] = {
    "rotated": (
        "states-rotated",
        "as long as the target's own and at the same angles to one another, in other directions",
    ),
    "zeros": ("states-zero", "zeros"),
    "repeated": ("states-repeated", "one row over and over"),
    "permuted": ("states-rows-shuffled", "the target's own in another order"),
    "not finite": ("nan-logits", "not finite"),
}


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
        *of_prompt(probes.get("prompt")),
        *of_tokens(probes.get("tokens"), probes.get("faults") or {}),
        *of_positions(probes.get("positions"), probes.get("drafted")),
        *of_faults(probes, facts, num_layers, named, repairs, by_files or {}),
        *of_rows(probes.get("taps"), short),
        *of_fused(probes.get("fused")),
        *of_said(probes.get("said")),
        *of_acceptance(probes.get("acceptance")),
        *of_stops(probes),
        *of_metrics(probes.get("metrics"), probes.get("stopped")),
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
            rivals=_rivals(fact, probes, slug, num_layers, named, trained),
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


def _rivals(fact: str, probes: Json, slug: str, num_layers: int, named: bool, trained: Any) -> list[Rival]:
    """Readings of the layer that gave the same states."""
    states = probes.get("states") or {}
    if fact not in ((states.get("matched") or {}).get("facts") or {}):
        return []
    return [
        Rival("flag-overridden", f"states that tell it from: {name}")
        for name in states.get("rivals", [])
        if not name.startswith(f"{fact} ")
    ][:3]


# -- stages that no fact names ------------------------------------------------------------------------------------


def of_prompt(prompt: Json | None) -> Iterator[Finding]:
    if not prompt or prompt.get("status") != "differs":
        return
    first = prompt.get("first") or {}
    yield Finding(
        str(prompt.get("cause") or "template-differs"),
        "likely",
        f"The engine renders {prompt['requests'] - prompt['equal']} of {prompt['requests']} chats otherwise than the "
        f"target's own template does; the first token that differs is number {first.get('position')}.",
        [Evidence("prompts equal token for token", prompt["equal"], prompt["requests"], "the engine's own rendering")],
    )


def of_tokens(tokens: Json | None, faults: Json) -> Iterator[Finding]:
    if not tokens or tokens["status"] != "differs" or "token_shift" in faults:
        return
    right, tails = tokens["tail"]
    inside = tokens["rows"] - tails
    if tokens["equal"] - right == inside:
        cause, where = "gather-later-requests", f"the last row of {tails - right} of {tails} passes"
    else:
        cause, where = "ids-cast-wrong", f"{tokens['rows'] - tokens['equal']} of {tokens['rows']} rows"
    yield Finding(
        cause,
        "likely",
        f"The drafter is fed another token than the text has in {where}.",
        [Evidence("rows fed the token after their state's", tokens["equal"], tokens["rows"], PROBE)],
        rivals=[] if cause == "gather-later-requests" else [Rival("chunk-tail-predicted", "chunked prefill off")],
    )


def of_positions(positions: Json | None, drafted: Json | None) -> Iterator[Finding]:
    if not positions or positions["status"] != "differs" or positions["step"] == 0:
        return
    constant = positions["offset"] is not None
    same = (drafted or {}).get("status") == "equal"
    yield Finding(
        "positions-off-by-one",
        "note" if same else "likely",
        f"Rope positions are off by {positions['offset']} everywhere"
        + (", which plain rotary embedding does not feel." if same else ".")
        if constant
        else f"Rope positions are off by different amounts ({positions['offsets']}).",
        [Evidence("position minus slot, by rows", positions["offsets"], {"0": positions["rows"]}, PROBE)],
    )


def of_rows(taps: Json | None, short: bool = False) -> Iterator[Finding]:
    if not taps or taps["status"] == "equal":
        return
    kind = taps["kind"]
    worst = [min((e for e in row if e is not None), default=None) for row in taps["error"]]
    evidence = [Evidence("nearest tap of each slot, relative error", worst, "rounding", PROBE)]
    if kind in ROWS:
        cause, words = ROWS[kind]
        yield Finding(cause, "likely", f"The rows fed to fc are {words}.", evidence)
    elif kind == "rounded":
        yield Finding(
            "target-quantised",
            "likely" if short else "note",
            f"The rows fed to fc are those of the right taps, off by {max(w for w in worst if w is not None):.1%}: the "
            "engine's target runs in another precision than the reference.",
            evidence,
        )
    elif kind == "other" or kind.startswith("rows of"):
        yield Finding(
            "states-of-other-request",
            "likely",
            "The rows fed to fc are no tap of the target on this text.",
            evidence,
            rivals=[
                Rival("target-differs", "hashes of the target's weights"),
                Rival("target-quantised", "its precision"),
            ],
        )


def of_fused(fused: Json | None) -> Iterator[Finding]:
    if fused and fused["status"] == "differs" and fused["matched"] is None:
        yield Finding(
            "weights-changed",
            "likely",
            "fc of the running drafter gives something else than fc of these files, from the same rows.",
            [Evidence("what fc gave, relative error", fused["error"], "rounding", PROBE)],
        )


def of_said(said: Json | None) -> Iterator[Finding]:
    if not said or said["status"] == "equal":
        return
    if said["nan"]:
        yield Finding(
            "nan-logits", "fatal", f"{said['nan']} of the drafter's states are not finite.",
            [Evidence("states that are not finite", said["nan"], 0, PROBE)],
        )  # fmt: skip
        return
    matched = said["matched"]
    if "head" in said["odd"] and "head" not in matched:
        yield Finding(
            "head-random",
            "fatal",
            "The running head gives other logits than the head of these files or the target's, from the same state.",
            [Evidence("top logits, relative error", said["head"], "rounding", PROBE)],
        )
    if "map" in said["odd"] and "vocab_map" not in matched:
        equal, n = said["ids"]["equal"], said["ids"]["n"]
        yield Finding(
            "d2t-stale",
            "fatal" if equal < n / 2 else "likely",
            f"The head is right and the ids are not: {n - equal} of {n} first choices stand for another token.",
            [Evidence("first choices with the right target id", equal, n, PROBE)],
        )
    if "norm" in said["odd"] and not {"head_norm", "norm_gain"} & set(matched):
        yield Finding(
            "norm-weight-missing",
            "likely",
            "The last norm of the running drafter is not that of these files.",
            [Evidence("states after it, relative error", said["norm"], "rounding", PROBE)],
        )


def of_acceptance(acceptance: Json | None) -> Iterator[Finding]:
    if not acceptance or acceptance["status"] != "differs":
        return
    more, fewer, rounds = (acceptance[k] for k in ("more", "fewer", "rounds"))
    if acceptance["z"] is not None:
        kept, likely = (sum(d[k] for d in acceptance["sampled"]) for k in ("kept", "likely"))
        yield Finding(
            "acceptance-faked" if acceptance["z"] > 0 else "flag-overridden",
            "likely",
            f"{kept} drafted tokens were kept; the target's own probabilities make {likely:.0f} likely.",
            [Evidence("standard errors between the two", acceptance["z"], "within 4", PROBE)],
            rivals=[Rival("draft-sampling-unset", "the engine's draft_sample_method; measure at temperature 0")],
        )
    elif more > FAKED * rounds:
        yield Finding(
            "acceptance-faked",
            "fatal",
            f"In {more} of {rounds} rounds the engine kept drafted tokens that the target would not have chosen.",
            [Evidence("rounds that kept more than the target's own tokens", more, 0, PROBE)],
        )
    else:
        yield Finding(
            "counts-inconsistent",
            "likely",
            f"In {fewer} of {rounds} rounds the engine kept fewer drafted tokens than the target's own.",
            [Evidence("rounds that kept less than the target's own tokens", fewer, 0, PROBE)],
            rivals=[Rival("flag-overridden", "the engine's rule of acceptance (rejection_sample_method)")],
        )


def of_stops(probes: Json) -> Iterator[Finding]:
    stops = probes.get("stopped") or []
    if not stops:
        return
    yield Finding(
        "position-limit-short",
        "likely",
        f"In {len(stops)} texts the engine stopped drafting while the text went on, after position {min(stops)} to "
        f"{max(stops)}.",
        [Evidence("last position drafted from", sorted(stops)[:8], "the end of each text", PROBE)],
    )


def of_resolved(resolved: Json) -> Iterator[Finding]:
    """What the engine says its own settings are."""
    method = resolved.get("speculative.method")
    if method is not None and method not in ("eagle3", "speculators"):
        yield Finding(
            "algorithm-eagle",
            "fatal",
            f"The engine runs {method!r}, which feeds the drafter no taps.",
            [Evidence("speculative_config.method", method, "eagle3", "the engine's own configuration")],
        )
    rule = resolved.get("speculative.rejection_sample_method")
    if rule == "synthetic":
        yield Finding(
            "acceptance-faked",
            "fatal",
            "The engine keeps drafted tokens by a set rate, not because the target agrees: its lengths and its text "
            "mean nothing.",
            [Evidence("rejection_sample_method", rule, "standard", "the engine's own configuration")],
        )


def of_metrics(metrics: Json | None, stops: Sequence[int] | None = None) -> Iterator[Finding]:
    if not metrics or metrics["status"] != "differs" or stops:
        return
    counted, page = metrics["counted"], metrics["page"]
    evidence = [Evidence("rounds, accepted by depth", [page["rounds"], page["accepted"]],
                         [counted["rounds"], counted["accepted"]], "metrics page; our own requests")]  # fmt: skip
    if page["rounds"] > counted["rounds"]:
        yield Finding(
            "others-served",
            "note",
            f"The engine counted {page['rounds']} rounds, ours had {counted['rounds']}: others used it too.",
            evidence,
        )
    else:
        yield Finding(
            "counts-inconsistent",
            "likely",
            f"The metrics page counts {page['rounds']} rounds, {page['accepted']} kept by depth; {counted['rounds']} "
            f"and {counted['accepted']} were seen.",
            evidence,
        )


def in_order(found: Sequence[Finding], repairs: Sequence[Json]) -> list[Finding]:
    """In the order in which to mend them; what comes before the drafter first, what no walk can price last."""
    order = {step["cause"]: i for i, step in enumerate(repairs)}
    return sorted(found, key=lambda f: order.get(f.cause, -1 if f.kind in ("prompt", "shift") else len(order)))


# -- together with what the files say -----------------------------------------------------------------------------


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
