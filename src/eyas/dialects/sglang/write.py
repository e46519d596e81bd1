"""A config.json that SGLang wires as a contract says, or the facts of it that it has no spelling for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.contract import Contract
from eyas.dialects.sglang import taps as tap_rules
from eyas.dialects.sglang.keys import IDS, LLAMA, MLA
from eyas.dialects.sglang.releases import Release, release
from eyas.dialects.wiring import CannotExpress, Inexpressible, Launch, TargetFacts

# Facts with one value here, whatever the config says.
_FIXED: dict[str, tuple[Any, str, str]] = {
    "attention_bias": (False, "its queries, keys and values have no bias", "qkv bias"),
    "qk_norm": (False, "it does not norm queries and keys", "names"),
    "residual": ("before hidden_norm", "no line of it reads norm_before_residual", "residual"),
    "head_norm": (True, "the last norm always stands before the head", "head"),
    "token_shift": (1, "ids are rotated by one", "head"),
}
_FC_NORMS = ("none", "joint", "each", "joint, then each")


def write(contract: Contract, config: Mapping[str, Any], target: TargetFacts, launch: Launch) -> dict[str, Any]:
    """``config`` with SGLang's keys written anew. Raises CannotExpress where a fact has no spelling here.

    Facts the contract does not hold are left as ``config`` has them. What a launch decides (the window, and with it
    ``--speculative-draft-window-size``) is left to the launch.
    """
    of = release(launch.version)
    if missing := list(_missing(contract, config, target, of)):
        raise CannotExpress(of.name, missing)
    made = {k: v for k, v in config.items() if k not in ("use_aux_norm", "norm_before_fc", "eagle_config")}
    inner = {k: v for k, v in (config.get("eagle_config") or {}).items() if k != "norm_before_fc"}
    if "taps" in contract:
        how = of.capture(target.architecture)
        assert how is not None
        ids = tap_rules.spell(how, target.num_layers, contract["taps"])
        made["num_aux_hidden_states"] = len(contract["taps"])
        inner = {**inner, IDS: ids, "use_aux_hidden_state": True}
    if inner:
        made["eagle_config"] = inner
    _norms(made, contract, config)
    if "feedback" in contract:
        _switch(made, "norm_output", contract["feedback"] == "after the last norm")
    if "attention" in contract:
        made["architectures"] = [MLA if contract["attention"] == "mla" else LLAMA]
    if "attention_bias" in contract:
        made["attention_bias"] = False
    _sizes(made, contract, target)
    _rope(made, contract)
    return made


def _said(contract: Contract, fact: str, otherwise: Any) -> Any:
    return contract.facts[fact].value if fact in contract else otherwise


def _norms(made: dict[str, Any], contract: Contract, config: Mapping[str, Any]) -> None:
    inner = config.get("eagle_config") or {}
    word = _said(contract, "fc_norm", None)
    joint = "joint" in word if word is not None else inner.get("norm_before_fc", config.get("norm_before_fc", False))
    each = word.endswith("each") if word is not None else config.get("fc_norm") or config.get("use_aux_norm") or False
    _switch(made, "norm_before_fc", bool(joint))
    _switch(made, "fc_norm", bool(each))


def _switch(made: dict[str, Any], key: str, on: bool) -> None:
    """Written only where on: to SpecForge ``norm_output: false`` means no norm before the head."""
    made.pop(key, None)
    if on:
        made[key] = True


def _sizes(made: dict[str, Any], contract: Contract, target: TargetFacts) -> None:
    for key, fact in (
        ("draft_vocab_size", "draft_vocab_size"),
        ("num_hidden_layers", "layers"),
        ("max_position_embeddings", "max_positions"),
    ):
        if fact in contract:
            made[key] = contract[fact]
    made["target_hidden_size"] = target.hidden_size
    if "head" in contract:
        made["tie_word_embeddings"] = False
        if contract["head"] == "target":  # the way to be given the target's
            made["draft_vocab_size"] = None


def _rope(made: dict[str, Any], contract: Contract) -> None:
    if "rope" not in contract:
        return
    rope = dict(contract["rope"])
    made["rope_parameters"] = rope
    made["rope_theta"] = rope.get("rope_theta")
    made.pop("rope_scaling", None)
    if rope.get("rope_type", "default") != "default":
        made["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}


# -- what cannot be said ---------------------------------------------------------------------------------------


def _missing(
    contract: Contract, config: Mapping[str, Any], target: TargetFacts, of: Release
) -> Iterator[Inexpressible]:
    yield from _about_taps(contract, target, of)
    mla = contract["attention"] == "mla" if "attention" in contract else config.get("architectures") == [MLA]
    for fact, (here, why, rule) in _FIXED.items():
        if fact in contract and contract[fact] != here:
            yield Inexpressible(fact, contract[fact], here, why, of.at(rule))
    if "position_offset" in contract and contract["position_offset"] not in (0, 1):
        yield Inexpressible("position_offset", contract["position_offset"], 0, "rope counts from 0", of.at("head"))
    layers = _said(contract, "layers", config.get("num_hidden_layers", 1))
    if mla and layers != 1:
        why = "its drafter with latent attention has one layer"
        yield Inexpressible("layers", layers, 1, why, of.at("mla layers"))
    if layers != 1 and "later_norm" in contract and contract["later_norm"] != "hidden_norm":
        why = "layers after the first are normed by hidden_norm; a file with the norm under both names is served right"
        yield Inexpressible("later_norm", contract["later_norm"], "hidden_norm", why, of.at("later norm"))
    yield from _about_switches(contract, mla, of)
    yield from _about_ownership(contract, config, target, mla, of)
    if "fc" in contract and "taps" in contract:
        width = len(contract["taps"]) * target.hidden_size
        here = "skipped" if width == config.get("hidden_size") else "applied"
        if contract["fc"] != here:
            why = f"fc is applied wherever {width} is not the drafter's width, and nowhere else"
            yield Inexpressible("fc", contract["fc"], here, why, of.at("fc width"))


def _about_taps(contract: Contract, target: TargetFacts, of: Release) -> Iterator[Inexpressible]:
    if "taps" not in contract:
        return
    wanted, n = list(contract["taps"]), target.num_layers
    how = of.capture(target.architecture)
    if how is None:
        why = f"{target.architecture} has no method that captures taps in {of.name}"
        yield Inexpressible("taps", wanted, None, why, of.at("setter missing", "executed"))
        return
    if tap_rules.spell(how, n, wanted) is None:
        why = _why_not(how, n, wanted)
        yield Inexpressible("taps", wanted, tap_rules.nearest(how, n, wanted), why, of.setter(target.architecture))
    state = _said(contract, "tap_state", "stream")
    here = "branch" if how.branch and any(wanted) else "stream"
    if state != here:
        why = "states are kept without the residual they are added to" if how.branch else "the stream is kept"
        yield Inexpressible("tap_state", state, here, f"of {target.architecture} {why}", of.setter(target.architecture))


def _why_not(how: tap_rules.Capture, n: int, wanted: list[int]) -> str:
    if how.unread:
        return "the layers it sets are looked at by no forward pass"
    if wanted != sorted(set(wanted)):
        return "states are concatenated once each, in the order the layers run"
    if not how.embedding and 0 in wanted:
        return "at the first layer the residual that tap 0 is added to is missing, a TypeError"
    if wanted and wanted[-1] >= n and not how.last:
        return f"states are kept at the entrance of a layer, so tap {n} is never reached"
    if how.rule == "first-id":
        return "an id 1 in front shifts the whole list by one"
    if how.rule == "last-id":
        return f"an id {n} turns the meaning of the list"
    return f"taps lie between 0 and {n}"


def _about_switches(contract: Contract, mla: bool, of: Release) -> Iterator[Inexpressible]:
    if "fc_norm" in contract:
        word = contract["fc_norm"]
        here = word
        why = rule = ""
        if "joint" in word and (mla or not of.norm_before_fc):
            here, rule = ("each" if word.endswith("each") else "none"), "norm_before_fc"
            why = "its drafter with latent attention has no joint norm" if mla else "norm_before_fc came with 0.5.17"
        if mla and not of.mla_switches and here == "each":
            here, rule, why = "none", "mla", "fc_norm of a drafter with latent attention came with 0.5.13"
        if word not in _FC_NORMS or here != word:
            yield Inexpressible("fc_norm", word, here if word in _FC_NORMS else None, why or "unknown", of.at(
                rule or "fc_norm"))  # fmt: skip
    if "feedback" in contract and mla and not of.mla_switches and contract["feedback"] != "before the last norm":
        why = "norm_output of a drafter with latent attention came with 0.5.13"
        yield Inexpressible("feedback", contract["feedback"], "before the last norm", why, of.at("mla"))


def _about_ownership(
    contract: Contract, config: Mapping[str, Any], target: TargetFacts, mla: bool, of: Release
) -> Iterator[Inexpressible]:
    head = _said(contract, "head", "own")
    own = target.hidden_size != config.get("hidden_size") and head == "own"
    here = "own" if own else "target"
    if "embedding" in contract and contract["embedding"] != here:
        why = (
            "the target's embedding takes the place of the drafter's wherever both are as wide"
            if here == "target"
            else "a drafter of another width than the target keeps an embedding of its own"
        )
        yield Inexpressible(
            "embedding", contract["embedding"], here, why, of.at("mla embedding" if mla else "embedding")
        )
    words = _said(contract, "draft_vocab_size", None)
    if head == "target" and words is not None and words != config.get("vocab_size"):
        why = "with the target's head comes its whole vocabulary"
        yield Inexpressible("draft_vocab_size", words, config.get("vocab_size"), why, of.at("head"))
    if "vocab_map" in contract and contract["vocab_map"] == "ids":
        why = "d2t is added to the draft id, so ids must be written as offsets"
        yield Inexpressible("vocab_map", "ids", "offsets", why, of.at("d2t"))
