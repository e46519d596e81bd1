"""A trained drafter in the shape in which SGLang holds one: a layer and a last norm that the plugin can watch.

Letters: N rows, C taps, D target width, H drafter width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas import checkpoint, taps, variants
from eyas import target as targets
from eyas.check import reading, vocabulary
from eyas.drafter import attend
from eyas.target import Target


def drafter_of(case: Path, changes: Mapping[str, Any]) -> tuple[Target, Any, dict[str, Any]]:
    """Target, drafter and its reading, as its contract says but for ``changes``."""
    target = targets.load(str(case / "target"))
    files = checkpoint.read(case / "trained")
    tensors = checkpoint.finite_tensors(files)
    maps = vocabulary.read(tensors, target)
    parts = variants.read_parts(files, tensors, target, maps.ids)
    facts = {**reading.told(files, target, maps).declared, **changes}
    drafter = variants.build(parts, facts)
    assert drafter is not None
    return target, drafter, facts


@torch.no_grad()
def states_of(target: Target, ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Rows [T, C*D] that the target hands over."""
    held = taps.run(target, torch.tensor([list(ids)]), torch.tensor([len(ids)]), sorted(set(wanted))).taps
    by_tap = dict(zip(sorted(set(wanted)), torch.split(held[0], target.hidden_size, -1), strict=True))
    return torch.cat([by_tap[tap] for tap in wanted], -1)


class Layer(nn.Module):
    """The drafter's one layer over the rows of one request; a row's slot is its position."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.of, self.held = [drafter], {}  # in a list: its modules are not this one's

    def forward(
        self, positions: Tensor, embeds: Tensor, hidden_states: Tensor, forward_batch: Any, residual: Any
    ) -> tuple[Tensor, Tensor]:
        [drafter], [request], first = self.of, forward_batch.rids, int(positions[0])
        rest, mixed = drafter.enter(hidden_states[None], embeds[None], 0)
        new = drafter.keys_values(mixed, positions[None], 0)
        old = self.held.get(request, tuple(one[:, :, :0] for one in new))
        keys, values = (torch.cat([a[:, :, :first], b], 2) for a, b in zip(old, new, strict=True))
        self.held[request] = keys, values
        slots = torch.arange(keys.shape[2])
        seen = (slots[None] <= positions[:, None])[None, None]
        out = drafter.finish(rest, attend(drafter.queries(mixed, positions[None], 0), keys, values, seen), 0)[0]
        return out, torch.zeros_like(out)


class Norm(nn.Module):
    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.of = [drafter]

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        before = hidden + residual
        return self.of[0].norm(before), before


class Inner(nn.Module):
    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.of = [drafter]
        self.layers, self.norm = nn.ModuleList([Layer(drafter)]), Norm(drafter)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> tuple[Tensor, list[Tensor]]:
        [drafter], states = self.of, forward_batch.spec_info.hidden_states.float()
        states = states if states.shape[-1] == drafter.config.hidden_size else drafter.fuse(states[None])[0]
        self.entering = states.clone()
        hidden, residual = self.layers[0](positions, input_ids, states, forward_batch, None)
        post, pre = self.norm(hidden, residual)
        return post, [post if drafter.config.norm_output else pre]


class Shell(nn.Module):
    """What stands where ``sglang_standins.Drafter`` does."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.model, self.head = Inner(drafter), drafter.lm_head
