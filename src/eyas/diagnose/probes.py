"""All that a probe shows, stage by stage, in the order in which a drafter works: the first that differs is where the
engine and the reference part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eyas.decode.chain import Chain
from eyas.diagnose import inputs, outputs
from eyas.diagnose import states as layer
from eyas.diagnose.curves import Counted
from eyas.diagnose.reference import Reference
from eyas.engines.live import Counters

STAGES = (
    "prompt", "tokens", "positions", "taps", "fused", "states", "said", "feedback", "drafted", "acceptance", "metrics",
)  # fmt: skip
CHAINS = 240  # rounds whose drafts are drafted again
TIE = 1e-3  # of the two best logits


@dataclass(frozen=True, eq=False)
class Probed:
    """Each stage as JSON holds it; None for one that was not looked at."""

    stages: dict[str, Any]
    faults: dict[str, Any]
    """Facts as the engine runs them, where that is otherwise than trained."""

    def to_json(self) -> dict[str, Any]:
        return {**self.stages, "faults": {fact: _plain(value) for fact, value in self.faults.items()}}


def probe(
    reference: Reference,
    observed: Counted,
    page: Counters | None,
    prompt: Mapping[str, Any] | None,
    temperature: float,
    heard: Callable[[str], None] = lambda what: None,
) -> Probed:
    texts = reference.texts
    heard("tokens and positions")
    tokens, positions = inputs.tokens(texts), inputs.positions(texts)
    heard("taps")
    taps, fused = inputs.taps(reference), inputs.fused(reference)
    feedback = outputs.feedback(reference)
    normed = feedback.normed if feedback else False
    heard("states")
    states = layer.states(reference, {"normed": normed}, heard)
    heard("logits and map")
    said = outputs.said(reference, normed)
    heard("drafting the same rounds")
    drafted = _drafted(reference)
    acceptance = (
        outputs.acceptance(texts, reference.truths()) if temperature == 0 else outputs.sampled(reference, temperature)
    )
    faults = _faults(reference, tokens, positions, taps, fused, states, said, feedback)
    stages = {
        "passes": sum(len(t.rounds) for t in texts),
        "rows": tokens.rows,
        "prompt": prompt,
        **{
            name: None if stage is None else stage.to_json()
            for name, stage in (
                ("tokens", tokens), ("positions", positions), ("taps", taps), ("fused", fused), ("states", states),
                ("said", said), ("feedback", feedback), ("drafted", drafted), ("acceptance", acceptance),
            )
        },
        "metrics": metrics(observed, page, len(texts)),
        "stopped": outputs.stopped(texts),
    }  # fmt: skip
    return Probed(stages, faults)


def _faults(
    reference: Reference,
    tokens: inputs.Tokens,
    positions: inputs.Positions,
    taps: inputs.Taps | None,
    fused: inputs.Fused | None,
    states: layer.States | None,
    said: outputs.Said | None,
    feedback: outputs.Feedback | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if tokens.shift is not None and tokens.shift != 1:
        found["token_shift"] = tokens.shift
    if taps is not None and taps.kind == "shifted":
        found["token_shift"] = 1 + taps.shift
    if positions.step == 0:
        found["position_step"] = 0
    if taps is not None and None not in taps.observed and taps.observed != taps.configured:
        found["taps"] = taps.observed
    elif fused is not None and fused.matched:
        found |= fused.matched
    if states is not None:
        found |= states.matched
    if said is not None:
        gains = {**said.matched.get("norm_gain", {}), **found.get("norm_gain", {})}
        if "all" in gains:  # the last norm's is among them
            gains = {"all": gains["all"]}
        found |= said.matched | ({"norm_gain": gains} if gains else {})
    if feedback is not None and feedback.fed is not None and feedback.fed != reference.facts.get("feedback"):
        found["feedback"] = feedback.fed
    return found


@torch.inference_mode()
def _drafted(reference: Reference) -> outputs.Drafted | None:
    """The reference drafts the engine's first rounds again, from the right states of the right tokens."""
    drafter = reference.drafter()
    if drafter is None:
        return None
    texts, chains, ties = [], [], []
    left = CHAINS
    for i, text in enumerate(reference.texts):
        turns = outputs.drafting(text)
        if left <= 0 or not turns or len(turns) > 2 * left:
            continue
        left -= len(turns)
        states = reference.stock.states(i, reference.facts["taps"])[None]
        chain = Chain(drafter)
        drafts, tied = [], []
        for turn, last in turns:
            following = text.ids[chain.committed + 1 : last + 2].tolist()
            chain.extend(states[:, chain.committed : last + 1], following, chain.committed)
            top = chain.logits().topk(2).values
            tied.append(bool(top[0] - top[1] < TIE))
            drafts.append(chain.draft(turn.depths))
        texts.append(text)
        chains.append(drafts)
        ties.append(tied)
    return outputs.drafted(texts, chains, ties) if texts else None


def metrics(observed: Counted, page: Counters | None, cut: int = 0) -> dict[str, Any]:
    """The engine's own counters against what was seen pass by pass."""
    counted = {"rounds": int(observed.rounds.sum()), "accepted": observed.hits.sum(0).tolist()}
    if page is None:
        return {"status": "not seen", "counted": counted, "page": None}
    K = observed.hits.shape[1]
    accepted = list(page.accepted[:K])
    told = {"rounds": page.rounds, "accepted": accepted, "generated": page.generated}
    # The page counts a request's last round whole though it was cut; what was kept of it past the text nobody saw.
    off = [t - c for t, c in zip(accepted, observed.hits.sum(0).tolist(), strict=False)]
    same = page.rounds == counted["rounds"] and len(accepted) == K and all(0 <= o <= cut for o in off)
    return {"status": "equal" if same else "differs", "counted": counted, "page": told}


def first_apart(stages: Mapping[str, Any]) -> str | None:
    return next((name for name in STAGES if (stages.get(name) or {}).get("status") == "differs"), None)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
