"""A diagnosis in sentences and cells: what the page and the terminal both say. Every key may be missing or null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.report import sweep, words

Json = Mapping[str, Any]

# In the order in which data goes through an engine: the first that differs is the place to look at.
STAGES: dict[str, tuple[str, str]] = {
    "prompt": ("Prompt", "the ids the engine was given"),
    "tokens": ("Tokens", "which token stands beside which state"),
    "positions": ("Positions", "the position of each row"),
    "taps": ("Taps", "the target's states that are fed"),
    "fused": ("Fused", "what fc makes of the taps"),
    "states": ("States", "the drafter's own states"),
    "said": ("Said", "the last norm, the head and the map"),
    "feedback": ("Feedback", "the state each later step is fed"),
    "drafted": ("Drafted", "the tokens it proposes"),
    "acceptance": ("Acceptance", "which drafted tokens are kept"),
    "metrics": ("Metrics", "what the engine says it counted"),
}
STATUS: dict[str, str] = {"equal": "equal", "differs": "differs", "unknown": "unknown", "not seen": "not seen"}
SOURCES: dict[str, str] = {
    "probe": "counted inside the engine",
    "metrics": "the engine's metrics page",
    "requests": "what the engine says of each request",
}
MODES: dict[str, str] = {
    "launched": "started by eyas",
    "attached": "was already running",
    "bundle": "read from a bundle",
}
ENGINES: dict[str, str] = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM", "llama_cpp": "llama.cpp"}


def engine_name(result: Json) -> str:
    engine = result.get("engine") or {}
    name = str(engine.get("name") or "the engine")
    return words.plain(" ".join(filter(None, [ENGINES.get(name, name), str(engine.get("version") or "")])))


def title(result: Json) -> str:
    target = f" for {result['target']}" if result.get("target") else ""
    return words.plain(f"{result.get('checkpoint') or 'A drafter'}{target} on {engine_name(result)}")


def headline(result: Json) -> str:
    """The verdict in one sentence: the gravest finding if there is one, else what the numbers say."""
    if first := next(iter(grave(result)), None):
        return words.plain(first["summary"] or first["cause"])
    theirs, ours = length(result.get("expected")), length(result.get("observed"))
    engine, verdict = engine_name(result), result.get("verdict")
    if verdict == "undecided":
        needed = [n for n in result.get("not_checked") or [] if n.get("needed")]
        why = f"{needed[0]['what']}: {needed[0]['why']}" if needed else "too little was seen to judge by"
        return words.plain(f"Not decided: {why}.")
    if verdict == "healthy" and ours is not None and theirs is not None:
        return f"{engine} keeps {ours:.2f} tokens a round; these files give {theirs:.2f}. Nothing is lost on the way."
    if verdict == "weak" and ours is not None:
        return f"{engine} plays the drafter as it is; the drafter itself gives no more than {ours:.2f} tokens a round."
    return words.MEANING.get(str(verdict), "There is no verdict.")


def also(result: Json) -> list[str]:
    """What the other grave findings say, for a line each under the headline."""
    return [words.plain(f["summary"] or f["cause"]) for f in grave(result)[1:4]]


def doubt(result: Json) -> str | None:
    first = next(iter(grave(result)), None)
    if not first or not first["rivals"]:
        return None
    causes = ", ".join(str(r["cause"]) for r in first["rivals"])
    return words.plain(f"Not certain: {causes} {'is' if len(first['rivals']) == 1 else 'are'} not excluded.")


def grave(result: Json) -> list[Json]:
    return [f for f in map(whole, result.get("findings") or []) if f["severity"] != "note"]


def whole(finding: Json) -> dict[str, Any]:
    """With every key that a finding has, for a result that was cut or edited."""
    blank: dict[str, Any] = {"kind": "–", "cause": "–", "severity": "note", "summary": "", "evidence": [], "fix": "–"}
    return blank | {"rivals": []} | {key: value for key, value in finding.items() if value is not None}


def fixes(result: Json) -> list[Json]:
    """Grave findings in the order to mend them: as the repairs have them, then the others."""
    order = {r.get("cause"): i for i, r in enumerate(result.get("repairs") or [])}
    return sorted((f for f in grave(result) if f["fix"]), key=lambda f: order.get(f["cause"], len(order)))


def length(side: Json | None) -> float | None:
    value: float | None = ((side or {}).get("accept_length") or {}).get("value")
    return value


def spread(value: Json | None, digits: int = 2, sign: str = "") -> str:
    """``1.21 (1.14 to 1.29)``."""
    if not value or value.get("value") is None:
        return "–"
    told = f"{value['value']:{sign}.{digits}f}"
    if value.get("low") is None or value.get("high") is None:
        return told
    return f"{told} ({value['low']:{sign}.{digits}f} to {value['high']:{sign}.{digits}f})"


DEPTH_HEAD = ("depth", "expected, joint", "observed, joint", "gap", "expected, conditional", "observed, conditional")


def depth_rows(result: Json) -> list[list[str]]:
    """Expected beside observed at each depth, and the paired gap."""
    sides = [by_depth(result.get(key)) for key in ("expected", "observed", "gap")]
    theirs, ours, gaps = sides
    return [
        [
            str(k),
            *(rate(side.get(k), "joint") for side in (theirs, ours)),
            spread(gaps.get(k), 3, "+").replace(" (", "\n").rstrip(")"),
            *(rate(side.get(k), "conditional") for side in (theirs, ours)),
        ]
        for k in sorted({depth for side in sides for depth in side})
    ]


def by_depth(side: Json | None) -> dict[int, Json]:
    return {int(d["depth"]): d for d in (side or {}).get("depths") or []}


def rate(depth: Json | None, which: str) -> str:
    """Three short lines, for a column that is narrow: rate, interval, counts."""
    value = (depth or {}).get(which)
    if not value or value.get("rate") is None:
        return "–"
    interval = words.interval(value.get("low"), value.get("high"))
    return f"{words.number(value['rate'])}\n{interval}\n{_of(value, 'hits', 'n', '').strip()}"


def stages(result: Json) -> list[dict[str, Any]]:
    """Each stage: key, name, what it is, status, its number, and whether it is where the two first part."""
    probes, first = result.get("probes"), result.get("divergence") or {}
    if not probes:
        return []
    told = []
    for key, (name, what) in STAGES.items():
        stage = probes.get(key) or {}
        status = STATUS.get(str(stage.get("status") or "not seen"), "unknown")
        number = words.plain(_NUMBERS[key](stage)) if stage and status != "not seen" else ""
        told.append(
            {
                "key": key,
                "name": name,
                "what": what,
                "status": status,
                "number": number,
                "first": first.get("stage") == key,
            }
        )
    return told


def parting(result: Json) -> str | None:
    """The first place where engine and reference part, in a sentence."""
    first = result.get("divergence")
    if not first:
        return None
    name = STAGES.get(str(first.get("stage")), (str(first.get("stage")), ""))[0]
    return words.plain(f"{name}: {first.get('what') or 'differs'}")


def unparted(result: Json) -> str:
    """What to say where there is no first place."""
    if not result.get("probes"):
        return "Nothing inside the engine was seen, so where it parts from the reference cannot be told."
    differs = [s["name"] for s in stages(result) if s["status"] == "differs"]
    if differs:
        return f"{', '.join(differs)} differ; which of them comes first was not told."
    return "No stage that was seen differs from the reference."


def _of(stage: Json, part: str, whole: str, what: str) -> str:
    return f"{count(stage.get(part))} of {count(stage.get(whole))} {what}"


def count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _prompt(stage: Json) -> str:
    told = _of(stage, "equal", "requests", "requests")
    if first := stage.get("first"):
        told += (
            f"; request {first.get('request')} at {first.get('position')}: fed {first.get('fed')}, "
            f"expected {first.get('expected')}"
        )
    return told


def _tokens(stage: Json) -> str:
    shift = stage.get("shift")
    told = _of(stage, "equal", "rows", "rows")
    return told + (f", the token at {shift:+d}" if isinstance(shift, int) and shift != 1 else "")


def _positions(stage: Json) -> str:
    offset, step = stage.get("offset"), stage.get("step")
    seen = [
        f"offset {offset:+d}" if offset else "offset 0" if offset == 0 else "",
        "" if step is None else f"step {step}",
    ]
    return ", ".join([*filter(None, seen), f"{count(stage.get('rows'))} rows"])


def _taps(stage: Json) -> str:
    read, made = tap_list(stage.get("observed")), tap_list(stage.get("configured"))
    return read if read == made else f"{read}; configured {made}"


def tap_list(taps: Sequence[Any] | None) -> str:
    return ", ".join("unknown" if t is None else str(t) for t in taps or []) or "–"


def _fused(stage: Json) -> str:
    return f"error {short(stage.get('error'))}"


def _states(stage: Json) -> str:
    rows = stage.get("depths") or []
    told = "error " + (span([d.get("error") for d in rows]) if rows else "–")
    if matched := stage.get("matched"):
        told += f"; fits: {matched.get('name')} (error {short(matched.get('error'))})"
    return told


def _said(stage: Json) -> str:
    ids = stage.get("ids") or {}
    told = f"head error {short(stage.get('head'))}; {_of(ids, 'equal', 'n', 'ids')}"
    return told + (f"; odd: {', '.join(stage['odd'])}" if stage.get("odd") else "")


def _drafted(stage: Json) -> str:
    rows = stage.get("depths") or []
    equal, n = (sum(d.get(key) or 0 for d in rows) for key in ("equal", "n"))
    return f"{equal:,} of {n:,} tokens"


def _feedback(stage: Json) -> str:
    errors = {k: v for k, v in (stage.get("errors") or {}).items() if v is not None}
    best = min(errors, key=lambda name: errors[name]) if errors else None
    fed = str(stage.get("fed") or "unknown")
    return fed if best is None else f"{fed}; nearest {best}, error {short(errors[best])}"


def _acceptance(stage: Json) -> str:
    if stage.get("z") is not None:
        return f"{count(stage.get('rounds'))} rounds of sampled text, {stage['z']:+.1f} standard errors from the likely"
    told = _of(stage, "as_greedy", "rounds", "rounds as greedy")
    more, fewer = stage.get("more"), stage.get("fewer")
    return told + (f"; {count(more)} kept more, {count(fewer)} fewer" if more or fewer else "")


def _metrics(stage: Json) -> str:
    def told(side: Json | None) -> str:
        kept = (side or {}).get("accepted")
        return f"{count((side or {}).get('rounds'))} rounds, {sum(kept):,} kept" if side and kept is not None else "–"

    page, counted = told(stage.get("page")), told(stage.get("counted"))
    return f"{page}; counted {counted}" if page != counted else page


_NUMBERS = {
    "prompt": _prompt, "tokens": _tokens, "positions": _positions, "taps": _taps, "fused": _fused, "states": _states,
    "said": _said, "drafted": _drafted, "feedback": _feedback, "acceptance": _acceptance, "metrics": _metrics,
}  # fmt: skip


def short(value: Any) -> str:
    return "–" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)


def span(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    low, high = short(min(known)), short(max(known))
    return low if low == high else f"{low} to {high}"


def repair_sentence(result: Json) -> str | None:
    """``Fix this first: +0.90; then this: +0.60; what remains is the drafter: 2.71, as expected.``"""
    repairs = result.get("repairs") or []
    if not repairs:
        return None
    told = [
        f"{'fix' if i == 0 else 'then'} {r.get('cause')}{' first' if i == 0 and len(repairs) > 1 else ''}: "
        f"{words.number(r.get('gain'), 2) if r.get('gain') is None else format(r['gain'], '+.2f')}"
        for i, r in enumerate(repairs)
    ]
    last, aim = repairs[-1].get("reaches"), length(result.get("expected"))
    end = f"what remains is the drafter: {words.number(last, 2)}"
    if last is not None and aim is not None:
        end += ", as expected" if abs(last - aim) < 0.005 else f", where {aim:.2f} was expected"
    text = "; ".join([*told, end]) + "."
    return words.plain(text[0].upper() + text[1:])


def served_sentence(result: Json) -> str | None:
    served = result.get("served")
    if not served:
        return None
    told = (
        f"{count(served.get('prompts'))} prompts, {count(served.get('tokens'))} tokens, at most "
        f"{count(served.get('max_tokens'))} an answer, temperature {served.get('temperature')}, "
        f"{count(served.get('draft_tokens'))} drafted tokens a round."
    )
    texts = (
        f" Answers: {count(served.get('equal'))} are the target's own greedy text, {count(served.get('near_ties'))} "
        f"part from it at a near tie, {count(served.get('different'))} differ."
    )
    return words.plain(told + texts)


def unseen(result: Json) -> list[tuple[str, bool]]:
    """What was not looked at or could not be seen, and whether a verdict needs it."""
    missing = [
        (words.plain(f"{n.get('what')}: {n.get('why')}"), bool(n.get("needed")))
        for n in result.get("not_checked") or []
    ]
    hidden = [(words.plain(text), False) for text in (result.get("engine") or {}).get("unseen") or []]
    return [*missing, *hidden]


def has_sweep(result: Json) -> bool:
    return sweep.told(result) is not None
