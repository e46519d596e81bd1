"""What a stage by itself says is wrong, where no fact of a drafter's wiring names it. Reads only what JSON holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eyas.results import Evidence, Finding, Rival

Json = Mapping[str, Any]
PROBE = "probe of the running drafter"
APART = 4.0  # standard errors
FAKED = 0.02  # of the rounds that keep what the target would not choose: more than near ties make
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
    if positions["offset"] == 0:  # every first row is right, some later step is not
        yield Finding(
            "position-limit-short",
            "note" if same else "likely",
            "Some draft steps do not advance the rope position by one: engines clamp it at their limit, and then the "
            "last tokens before it are drafted from a wrong place.",
            [Evidence("position of a step minus that before, by rows", positions["steps"], {"1": "all"}, PROBE)],
        )
        return
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
    if abs(acceptance.get("text_z") or 0.0) > APART:
        z = acceptance["text_z"]
        yield Finding(
            "sampling-differs",
            "likely",
            "The text is no sample of the target at this temperature: its tokens are "
            f"{'less' if z > 0 else 'more'} likely than a sample's, so what is kept says nothing of the drafter.",
            [
                Evidence("surprise of the text above that of a sample, in standard errors", z, "within 4", PROBE),
                Evidence("drafted tokens kept against likely, in standard errors", acceptance["z"], "within 4", PROBE),
            ],
        )
    elif acceptance["z"] is not None:
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
