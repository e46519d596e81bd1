"""All mutations, and what of the taxonomy's lists is none of them."""

from __future__ import annotations

from runs.mutations import controls, flags, logs, norms, states, taps, texts, weights
from runs.mutations.subject import KINDS, Mutation

ALL: list[Mutation] = [
    mutation
    for part in (taps, weights, norms, states, texts, flags, logs, controls)
    for mutation in part.MUTATIONS
]  # fmt: skip
ALL.sort(key=lambda mutation: list(KINDS).index(mutation.kind))

LEFT_OUT: dict[str, str] = {
    "N3 (no norm before the head)": "no file can ask an engine for it, and a drafter trained so would have to be "
    "trained; `show` names it from a contract (trap 11)",
    "F4 (second layer without residual)": "none of the drafters has a second layer",
    "F5 (teacher tokens)": "every EAGLE-3 drafter is trained so; it is no fault",
    "R5 (limit 2,048, prompts of 8,000)": "no held-out record is as long; the limit is put below the records instead",
    "R6 (positions + 1; steps not advanced)": "a shift of all positions changes nothing under rotary embedding "
    "(tests hold that); frozen steps are an engine's fault that no file shows",
    "S2 (trained with inputs shifted twice)": "would have to be trained; states shifted against ids are the same "
    "picture from the other side",
    "S3 (last slot of a chunk)": "an engine's fault at chunk borders; nothing of it is in files or whole-run counts",
    "D6 (empty think blocks)": "done on targets with a chat template only",
    "P1 (think block dropped)": "SmolLM2's template has none to drop; the added one is there",
    "P2 (Llama 3 template on an R1 distillate)": "done on SmolLM2 instead",
    "C4 (sampling method unset at temperature 1)": "the temperature is a request's, in no file or start-up flag; the "
    "negative control on temperature covers what can be seen",
    "C5 (draft quantisation flag ignored)": "shows in an engine's start-up log only, which is not read for it",
    "E, G": "outside the kinds of this bench: engine faults need a live engine, quality another training",
}


def by_name(name: str) -> Mutation:
    return next(mutation for mutation in ALL if mutation.name == name)
