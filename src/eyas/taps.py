"""Capture taps of a target while it runs.

Tap t is the residual stream after t decoder layers, that is, what layer t is handed:

    embed ──tap 0──▶ layer 0 ──tap 1──▶ layer 1 ── … ──tap n-1──▶ layer n-1 ──tap n──▶ final norm ──▶ head

so every tap is read at one kind of place, the entrance of the module that follows it, and tap n is the stream
*before* the final norm (transformers' ``hidden_states[n]`` is after it).

Letters: B batch, T positions, D target width, C taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eyas.errors import UsageError
from eyas.target import Target


def validate(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Taps as a tuple, or an error that names the one that does not exist."""
    if not taps:
        raise UsageError("No taps given.", way_out=f"Pass for example --taps 2,{num_layers // 2},{num_layers - 3}.")
    for t in taps:
        if not 0 <= t <= num_layers:
            raise UsageError(
                f"Tap {t} does not exist: the target has {num_layers} layers, so taps run from 0 (embedding output) "
                f"to {num_layers} (before the final norm).",
                way_out=f"Pass for example --taps 2,{num_layers // 2},{num_layers - 3}.",
            )
    if len(set(taps)) != len(taps):
        raise UsageError(
            f"Taps {list(taps)} repeat one: engines capture a layer once, so the drafter would starve.",
            way_out="Name each tap once.",
        )
    if list(taps) != sorted(taps):
        raise UsageError(
            f"Taps {list(taps)} are not in ascending order; SGLang and vLLM concatenate them in execution order "
            "whatever the list says.",
            way_out=f"Pass {','.join(map(str, sorted(taps)))}.",
        )
    return tuple(taps)


class TapReader:
    """Hooks on a target that keep the wanted taps of the latest forward pass. Use through ``reading``."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.taps = validate(taps, target.num_layers)
        self._device = target.device
        self._kept: dict[int, Tensor] = {}
        self._handles = []
        layers: nn.ModuleList = target.decoder.layers  # type: ignore[assignment]
        for t in self.taps:
            module = layers[t] if t < target.num_layers else target.decoder.norm
            self._handles.append(
                module.register_forward_pre_hook(self._keeper(t), with_kwargs=True)  # type: ignore[union-attr]
            )

    def _keeper(self, t: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._kept[t] = args[0] if args else kwargs["hidden_states"]

        return keep

    def take(self) -> Tensor:
        """The taps of the latest pass, concatenated in ascending order: [B, T, C*D] on the target's device."""
        assert len(self._kept) == len(self.taps), "take() before a forward pass"
        taken = torch.cat([self._kept[t].to(self._device) for t in self.taps], dim=-1)  # layers may be spread out
        self._kept.clear()
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def reading(target: Target, taps: Sequence[int]) -> Iterator[TapReader]:
    reader = TapReader(target, taps)
    try:
        yield reader
    finally:
        reader.close()


@dataclass(frozen=True, eq=False)
class States:
    """What a target says of one batch, on its device: ``taps`` [B, T, C*D], final-normed ``last`` [B, T, D].

    ``truth`` [B, T], where it is already known, is the target's greedy token after each position (-1 where it is not).
    """

    taps: Tensor
    last: Tensor
    truth: Tensor | None = None


@torch.no_grad()
def run(target: Target, input_ids: Tensor, lengths: Tensor, taps: Sequence[int]) -> States:
    """One pass over right-padded ``input_ids`` [B, T]; rows past ``lengths`` [B] hold nothing meaningful."""
    input_ids, lengths = input_ids.to(target.device), lengths.to(target.device)
    mask = torch.arange(input_ids.shape[1], device=input_ids.device)[None] < lengths[:, None]
    with reading(target, taps) as reader:
        last = target.decoder(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        return States(reader.take(), last.to(target.device))


Run = Callable[[Target, Tensor, Tensor, Sequence[int]], States]
"""``run``, or whatever else knows the states of (target, input_ids, lengths, taps): a store on disk, for one."""


def answered(loss_mask: np.ndarray) -> Tensor:
    """Positions [T] whose next token the target is asked for: those of a response, and the one before."""
    asked = torch.from_numpy(loss_mask.copy())
    asked[:-1] |= asked[1:].clone()
    return asked


def truths(target: Target, states: States, wanted: Tensor, chunk: int = 512) -> Tensor:
    """The target's greedy token after each of the ``wanted`` [B, T] positions, -1 or what was known elsewhere. The head
    is the dearest part of a small target, so what is known already is not asked again."""
    known = torch.full_like(wanted, -1, dtype=torch.int64) if states.truth is None else states.truth.clone()
    missing = wanted & (known < 0)
    if bool(missing.any()):
        known[missing] = greedy(target, states.last[missing], chunk)
    return known


@torch.no_grad()
def greedy(target: Target, normed: Tensor, chunk: int = 512) -> Tensor:
    """The target's first choice [P] over its whole vocabulary, from final-normed states [P, D]."""
    return torch.cat([target.logits(part).argmax(-1) for part in torch.split(normed, chunk)])
