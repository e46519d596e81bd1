"""The contract: every fact a drafter needs true of its target and its engine, each with where it was learnt.

It is written when a drafter is trained and travels in the ``eyas`` key of its ``config.json`` beside the sha256 of the
weights it describes. Nothing in it is engine-specific; ``dialects`` spell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import CheckpointError

Origin = Literal["declared", "inferred", "measured", "defaulted"]

SCHEMA = 1
FACTS: dict[str, str] = {
    "taps": "states fed to fc, counted in layers done, in concatenation order",
    "tap_state": "what a tap is: stream, the residual stream after a layer; branch, only what its MLP adds",
    "fc": "whether fc stands between taps and hidden: applied or skipped",
    "fc_norm": "norms on the taps before fc: none, joint (one over all), each (one a tap), joint, then each",
    "layers": "decoder layers of the drafter",
    "attention": "kind of attention: gqa (also multi-head) or mla",
    "attention_bias": "whether queries, keys and values have a bias",
    "qk_norm": "whether queries and keys are normed for each head",
    "later_norm": "which norm stands before attention in layers after the first: input_layernorm or hidden_norm",
    "residual": "what the residual stream of the layer starts from: hidden before or after its norm",
    "head_norm": "whether the last norm stands before the head",
    "feedback": "state handed to the next depth: before or after the last norm",
    "token_shift": "slot t pairs the states of position t with the token of position t + shift",
    "position_offset": "rope position of slot t minus t, at depth 0; every depth adds one",
    "rope": "rotary parameters, half-split layout",
    "window": "attention window in tokens; null is full attention",
    "max_positions": "positions the drafter was made for",
    "embedding": "whose embedding the drafter reads: target or own",
    "head": "whose head speaks: own, or the target's",
    "draft_vocab_size": "entries of the draft vocabulary",
    "vocab_map": "how draft ids become target ids: offsets (id + d2t[id]), ids (d2t[id]) or none (the same ids)",
    "vocab_sha256": "hash of the sorted target ids of the draft vocabulary, as little-endian int64",
    "mask": "which slots were trained",
    "depths": "draft depths unrolled in training",
    "template_sha256": "hash of the chat template that rendered the training text",
    "tokenizer_sha256": "hash of the tokenizer that cut it",
    "target": "identity of the target: fingerprint and shape",
}


@dataclass(frozen=True)
class Fact:
    value: Any
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "origin": self.origin}


@dataclass(frozen=True)
class Contract:
    """Facts by name; a fact that is not there is not known. Equality is equality of values, not of origins."""

    facts: Mapping[str, Fact]

    def __post_init__(self) -> None:
        assert set(self.facts) <= set(FACTS), set(self.facts) - set(FACTS)

    def __getitem__(self, name: str) -> Any:
        return self.facts[name].value

    def __contains__(self, name: str) -> bool:
        return name in self.facts

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Contract) and not list(self.differences(other)) and set(self) == set(other)

    def __hash__(self) -> int:
        return hash(frozenset(self.facts))

    def differences(self, other: Contract) -> Iterator[tuple[str, Any, Any]]:
        """Facts known to both that differ: (name, ours, theirs)."""
        for name in FACTS:
            if name in self and name in other and _plain(self[name]) != _plain(other[name]):
                yield name, self[name], other[name]

    def diff(self, other: Contract) -> list[str]:
        """The same in words."""
        return [
            f"{name}: {ours!r} here, {theirs!r} there ({FACTS[name]})" for name, ours, theirs in self.differences(other)
        ]

    def with_origin(self, origin: Origin) -> Contract:
        return Contract({name: Fact(fact.value, origin) for name, fact in self.facts.items()})

    def to_json(self) -> dict[str, Any]:
        return {name: self.facts[name].to_json() for name in FACTS if name in self.facts}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def from_json(value: object, where: str) -> Contract:
    """A contract out of a config file. Facts of a later version are left alone; a malformed one is an error."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: the contract is a {type(value).__name__}, an object of facts was expected.",
            way_out="Remove the 'eyas' key to have every fact inferred, or restore the file.",
        )
    facts = {}
    for name, fact in value.items():
        if name not in FACTS:
            continue
        if (
            not isinstance(fact, dict)
            or "value" not in fact
            or fact.get("origin") not in ("declared", "inferred", "measured", "defaulted")
        ):
            raise CheckpointError(
                f"{where}: fact {name!r} of the contract is {fact!r}; {{'value': …, 'origin': …}} was expected.",
                way_out="Remove the 'eyas' key to have every fact inferred, or restore the file.",
            )
        facts[name] = Fact(fact["value"], fact["origin"])
    return Contract(facts)


def declared(**facts: Any) -> Contract:
    return Contract({name: Fact(value, "declared") for name, value in facts.items()})
