"""Runs in vLLM's worker: the probe with faults to put in. Each is what some engine has done to somebody (V1 runner).

    engine.call("eyas_break", json.dumps(["feedback frozen", ...]))

before the probe starts: its hooks then see what the faults made of things.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from vllm_probe import Probe  # type: ignore[import-not-found,unused-ignore]


class FaultyProbe(Probe):
    def eyas_break(self, names: str) -> dict[str, Any]:
        worker: Any = self
        try:
            for name in json.loads(names):
                FAULTS[name](worker.model_runner, worker.model_runner.drafter)
        except Exception as error:  # an error of a worker's method ends the engine
            return {"error": f"{type(error).__name__}: {error}"}
        return {"broken": json.loads(names)}


class Passes:
    """Which pass of a round a call of the drafter's model is: 0 over all rows, then one a depth."""

    def __init__(self, drafter: Any) -> None:
        self.depth = -1
        self.first: dict[str, Any] = {}
        propose = drafter.propose

        def proposed(*args: Any, **kwargs: Any) -> Any:
            self.depth = -1
            self.metadata = kwargs["common_attn_metadata"]
            sample = kwargs.get("token_indices_to_sample")
            self.sample = self.metadata.query_start_loc[1:] - 1 if sample is None else sample
            return propose(*args, **kwargs)

        drafter.propose = proposed

    def hook(self, drafter: Any, change: Any) -> None:
        """``change(self, kwargs)`` before every pass."""

        def before(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            self.depth += 1
            change(self, kwargs)
            return args, kwargs

        drafter.model.register_forward_pre_hook(before, with_kwargs=True)


def hooked(change: Any) -> Any:
    def put_in(runner: Any, drafter: Any) -> None:
        Passes(drafter).hook(drafter, change)
        # ``propose`` is the wrapped one now; the probe wraps it again and unhooks only its own.
        drafter.__class__ = _holding(drafter)

    return put_in


def _holding(drafter: Any) -> Any:
    """A class whose ``propose`` is the broken one, so that a probe that forgets its own leaves it."""
    broken = drafter.__dict__.pop("propose")
    cls = type(drafter)
    original = cls.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return broken(*args, **kwargs)

    propose.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), {"propose": propose})


# -- what depths after the first are fed ------------------------------------------------------------------------


def frozen(passes: Passes, kwargs: dict[str, Any]) -> None:
    """The target's fused state at every depth."""
    if passes.depth == 0:
        passes.first["hidden"] = kwargs["hidden_states"][passes.sample].clone()
    else:
        kwargs["hidden_states"] = passes.first["hidden"]


def stale(passes: Passes, kwargs: dict[str, Any]) -> None:
    """The state before the last: a buffer that is reused."""
    now = kwargs["hidden_states"].clone()
    if passes.depth == 0:
        passes.first["before"] = now[passes.sample].clone()
    else:
        kwargs["hidden_states"] = passes.first["before"]
        passes.first["before"] = now


def zeroed(passes: Passes, kwargs: dict[str, Any]) -> None:
    if passes.depth > 0:
        kwargs["hidden_states"] = torch.zeros_like(kwargs["hidden_states"])


# -- positions ----------------------------------------------------------------------------------------------------


def all_on(passes: Passes, kwargs: dict[str, Any]) -> None:
    kwargs["positions"] = kwargs["positions"] + 1


def decode_on(passes: Passes, kwargs: dict[str, Any]) -> None:
    """One on, in every pass but those over prompts, which have more rows than a round has."""
    if passes.depth > 0:
        kwargs["positions"] = kwargs["positions"] + 1
        return
    starts = passes.metadata.query_start_loc.tolist()
    moved = kwargs["positions"].clone()
    for a, b in pairwise(starts):
        if b - a <= 8:
            moved[a:b] += 1
    kwargs["positions"] = moved


def step_frozen(passes: Passes, kwargs: dict[str, Any]) -> None:
    if passes.depth == 0:
        passes.first["positions"] = kwargs["positions"][passes.sample].clone()
    else:
        kwargs["positions"] = passes.first["positions"]


# -- first pass: tokens and states --------------------------------------------------------------------------------


def unshifted(runner: Any, drafter: Any) -> None:
    """Token t beside state t."""
    set_inputs = drafter.set_inputs_first_pass

    def inputs(**kwargs: Any) -> Any:
        found = set_inputs(**kwargs)
        ids = kwargs["target_token_ids"]
        drafter.input_ids[: len(ids)] = ids
        return found

    drafter.set_inputs_first_pass = inputs


def fed(change: Any) -> Any:
    """``change(states)`` of what is fused, [T, C*D]."""

    def put_in(runner: Any, drafter: Any) -> None:
        # Between the runner and the probe: ``propose`` gets the changed states.
        propose = type(drafter).propose

        def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["target_hidden_states"] = change(kwargs["target_hidden_states"], kwargs)
            return propose(self, *args, **kwargs)

        proposed.__signature__ = __import__("inspect").signature(propose)  # type: ignore[attr-defined]
        drafter.__class__ = type(type(drafter).__name__, (type(drafter),), {"propose": proposed})

    return put_in


def blocks(states: Any) -> list[Any]:
    return list(states.chunk(3, dim=-1))


def swapped(states: Any, kwargs: Any) -> Any:
    a, b, c = blocks(states)
    return torch.cat((b, a, c), -1)


def reversed_(states: Any, kwargs: Any) -> Any:
    return torch.cat(blocks(states)[::-1], -1)


_turn: dict[int, Any] = {}


def rotated(states: Any, kwargs: Any) -> Any:
    found = []
    for i, block in enumerate(blocks(states)):
        if i not in _turn:
            torch.manual_seed(i)
            _turn[i] = torch.linalg.qr(torch.randn(block.shape[-1], block.shape[-1]))[0].to(block.dtype)
        found.append(block @ _turn[i])
    return torch.cat(found, -1)


def quantised(states: Any, kwargs: Any) -> Any:
    """Rows rounded to eight bits, a scale a row."""
    scale = states.abs().amax(-1, keepdim=True) / 127
    return (states / scale.clamp(min=1e-9)).round() * scale


def zero_first(states: Any, kwargs: Any) -> Any:
    a, b, c = blocks(states)
    return torch.cat((torch.zeros_like(a), b, c), -1)


def one_late(states: Any, kwargs: Any) -> Any:
    """The row before, within each request."""
    starts = kwargs["common_attn_metadata"].query_start_loc.tolist()
    found = states.clone()
    for a, b in pairwise(starts):
        found[a + 1 : b] = states[a : b - 1]
    return found


def first_request(states: Any, kwargs: Any) -> Any:
    """Every request is read from the rows of the first."""
    starts = kwargs["common_attn_metadata"].query_start_loc.tolist()
    found = states.clone()
    n = starts[1]
    for a, b in pairwise(starts[1:]):
        rows = torch.arange(b - a) % n
        found[a:b] = states[rows]
    return found


# -- cache --------------------------------------------------------------------------------------------------------


def caches(runner: Any, drafter: Any) -> list[Any]:
    names = [n for group in drafter.draft_attn_groups for n in group.layer_names]
    context = runner.compilation_config.static_forward_context
    return [context[name].kv_cache for name in names]


def empty_cache(runner: Any, drafter: Any) -> None:
    """Before every round the drafter's cache is wiped: nothing of the prompt is left in it."""
    propose = type(drafter).propose
    held = caches(runner, drafter)

    def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
        for cache in held:
            for tensor in cache if isinstance(cache, list | tuple) else (cache,):
                tensor.zero_()
        return propose(self, *args, **kwargs)

    proposed.__signature__ = __import__("inspect").signature(propose)  # type: ignore[attr-defined]
    drafter.__class__ = type(type(drafter).__name__, (type(drafter),), {"propose": proposed})


def not_refreshed(runner: Any, drafter: Any) -> None:
    """Rows of accepted tokens leave what their draft left in the cache."""
    propose = type(drafter).propose

    def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = kwargs["common_attn_metadata"]
        sample = kwargs.get("token_indices_to_sample")
        if kwargs.get("num_rejected_tokens_gpu") is not None and sample is not None:
            slots = metadata.slot_mapping.clone()
            starts = metadata.query_start_loc.tolist()
            for a, last in zip(starts, sample.tolist(), strict=False):
                if last - a < 40:  # a prompt's rows stay
                    slots[a : min(last, a + kwargs["num_speculative_tokens"] - 1)] = -1
            metadata.slot_mapping = slots
        return propose(self, *args, **kwargs)

    proposed.__signature__ = __import__("inspect").signature(propose)  # type: ignore[attr-defined]
    drafter.__class__ = type(type(drafter).__name__, (type(drafter),), {"propose": proposed})


# -- weights and head of the running drafter ----------------------------------------------------------------------


def map_zeroed(runner: Any, drafter: Any) -> None:
    drafter.model.draft_id_to_target_id.data.zero_()


def map_shuffled(runner: Any, drafter: Any) -> None:
    ids = drafter.model.draft_id_to_target_id.data
    every = torch.arange(len(ids))
    generator = torch.Generator().manual_seed(0)
    ids.copy_((ids + every)[torch.randperm(len(ids), generator=generator)] - every)


def head_norm_skipped(runner: Any, drafter: Any) -> None:
    """The head reads the state as it is before the last norm."""
    model = drafter.model
    forward = model.forward

    def passed(*args: Any, **kwargs: Any) -> Any:
        _, pre = forward(*args, **kwargs)
        return pre, pre

    model.forward = passed


def temperature_expanded(runner: Any, drafter: Any) -> None:
    """No fault but its mending: vLLM 0.32 on a CPU writes the temperatures of the rows into a copy that it drops."""
    import vllm.v1.sample.rejection_sampler as sampler  # only a running engine has it

    def expanded(
        x: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        rows = torch.repeat_interleave(x, counts.long())
        return torch.where(rows == replace_from, torch.full_like(rows, replace_to), rows)

    sampler.expand_batch_to_tokens = expanded


def nan_states(runner: Any, drafter: Any) -> None:
    model = drafter.model
    forward = model.forward
    count = [0]

    def passed(*args: Any, **kwargs: Any) -> Any:
        post, pre = forward(*args, **kwargs)
        count[0] += 1
        return (post * float("nan"), pre) if count[0] % 10 == 0 else (post, pre)

    model.forward = passed


def every_draft_kept(runner: Any, drafter: Any) -> None:
    """Drafted tokens are kept whatever the target says (what a synthetic acceptance rate of one does)."""
    sampler = runner.rejection_sampler
    forward = sampler.forward

    def kept(metadata: Any, draft_probs: Any, logits: Any, *more: Any, **named: Any) -> Any:
        found = forward(metadata, draft_probs, logits, *more, **named)
        at = 0
        for row, count in enumerate(metadata.num_draft_tokens):
            if count:
                found.sampled_token_ids[row, :count] = metadata.draft_token_ids[at : at + count]
                found.sampled_token_ids[row, count] = logits[metadata.bonus_logits_indices[row]].argmax()
            at += count
        return found

    sampler.forward = kept


FAULTS: dict[str, Any] = {
    "every draft kept": every_draft_kept,
    "feedback frozen": hooked(frozen),
    "feedback stale": hooked(stale),
    "feedback zeros": hooked(zeroed),
    "positions +1 everywhere": hooked(all_on),
    "positions +1 after the prompt": hooked(decode_on),
    "step positions frozen": hooked(step_frozen),
    "tokens not shifted": unshifted,
    "taps swapped": fed(swapped),
    "taps reversed": fed(reversed_),
    "states rotated": fed(rotated),
    "states rounded to 8 bits": fed(quantised),
    "first tap zeros": fed(zero_first),
    "states one row late": fed(one_late),
    "rows of the first request": fed(first_request),
    "draft cache empty": empty_cache,
    "draft cache not refreshed": not_refreshed,
    "map zeroed": map_zeroed,
    "map shuffled": map_shuffled,
    "head norm skipped": head_norm_skipped,
    "temperature expanded": temperature_expanded,
    "NaN in one pass of ten": nan_states,
}
