"""Weights rounded to whole numbers of eight bits: a quarter to read in every pass, at the price of another's answers.

    weight [N, K] fp32  ≈  whole [N, K] int8 * scale [N]       scale[n] = largest |weight[n]| / 127

Everything stays on one set of weights: the module's own weight becomes what the rounded one stands for, so a prompt
fed through torch, a row through ``kernel``, the library's way and the oracle all compute the same function, and answers
with a drafter are the rounded target's own. Inputs and sums stay fp32. Without the kernel nothing is faster.

Letters: K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

MOST = 127


class Rounded(NamedTuple):
    """``bytes``: what a pass reads of these weights now."""

    modules: int
    bytes: int


@torch.no_grad()
def rounded(*models: nn.Module | None) -> Rounded:
    """Round the fp32 linear layers of these models that lie on the CPU, heads included, for good.

    A weight shared with an embedding changes there too. One that holds what is not finite stays as it is.
    """
    shared: dict[int, tuple[Tensor, Tensor]] = {}
    modules = 0
    for model in models:
        for module in model.modules() if model is not None else ():
            if type(module) is not nn.Linear or not roundable(module):
                continue
            at = module.weight.data_ptr()
            if at not in shared:
                shared[at] = split(module.weight)
                whole, scale = shared[at]
                module.weight.copy_(whole * scale[:, None])
            module.register_buffer("whole", shared[at][0], persistent=False)
            module.register_buffer("scale", shared[at][1], persistent=False)
            modules += 1
    return Rounded(modules, sum(whole.nbytes + scale.nbytes for whole, scale in shared.values()))


def roundable(module: nn.Linear) -> bool:
    weight = module.weight
    return (
        not hasattr(module, "whole")
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and bool(weight.isfinite().all())
    )


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> whole numbers [N, K] int8 and their scale [N] fp32."""
    scale = weight.abs().amax(1) / MOST
    whole = (weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-MOST, MOST)
    return whole.to(torch.int8), scale
