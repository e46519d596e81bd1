"""Faster linear layers for the few rows a decoding pass has, on the CPU in fp32.

For a handful of rows ``F.linear`` reads its weights the way a large matrix product wants them; oneDNN reads
weights laid out beforehand up to three times faster. Microseconds, F.linear / packed, 2 threads of an AVX2 EPYC
that had other work too: medians with cold weights, the first row best of three with warm ones. With 1 thread the
order is the same and the gains are smaller: none at 1 row, twofold at 5 rows of a head.

    weight        1 row        2 rows       5 rows       8 rows       16 rows      64 rows      256 rows
    192 x 576     21 / 92      75 / 96      70 / 97      84 / 98      85 / 108
    576 x 576     164 / 204    461 / 365    259 / 218    255 / 221    297 / 273    530 / 557    1502 / 1543
    1536 x 576    498 / 413    922 / 405    706 / 422    720 / 488    761 / 568    1411 / 1192  4153 / 4855
    8192 x 576    2763 / 2009  6870 / 1944  6838 / 2361  6090 / 3082  9640 / 5588  17053 / 8473 28001 / 18488
    49152 x 576   15 / 9.5 ms  32 / 9.5 ms  34 / 12 ms   36 / 13 ms   39 / 16 ms   75 / 36 ms   245 / 138 ms

Hence: small weights stay as they are, wide ones are packed from 1 row on, the rest from 2 rows on. Elsewhere
(many rows, other devices, other types) the module's own forward runs.

Where ``kernel`` could be compiled it is the better way for the few rows of a round: it needs no second copy, and five
rows cost it little more than one. Layouts remain for batches of many rows, and for machines without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.decode import kernel, pages
from eyas.drafter import Drafter
from eyas.target import Target

SMALLEST = 200_000  # weights; below, the call costs more than the layout saves
WIDE = 4096  # output features from which one row gains too
LAID_OUT_FOR = 8  # rows oneDNN is told to expect; layouts for 4 and 8 measured alike, for 1 slower at 2 rows and more


@dataclass(frozen=True)
class Packing:
    """How many modules run the fast way, and what second copies of weights take; or why none does.

    ``told`` is why the compiled kernel is not used, where it is not.
    """

    modules: int
    bytes: int
    reason: str | None
    told: str | None = None


@contextmanager
def packed(target: Target, drafter: Drafter | None = None, *, rows: int = LAID_OUT_FOR) -> Iterator[Packing]:
    """Run the linear layers of target and drafter, heads included, packed while the context is open.

    ``rows``: what a pass mostly has; up to four times as many run packed.

    Without the compiled kernel, or for more than LAID_OUT_FOR rows, each packed weight exists twice meanwhile (a tied
    head is copied too) and weights changed inside the context are not seen.

    Modules are themselves again afterwards, though weights may lie elsewhere (``pages``). Does nothing, and says why,
    where packing does not apply.
    """
    reason = unsuited(target)
    compiled, told = few_rows_kernel(rows)
    swapped: list[nn.Linear] = []
    if reason is None and compiled is not None:
        pages.settle(target.model, drafter)
    try:
        if reason is None:
            for module in candidates(target.model, drafter):
                module.forward = fast_forward(module, rows)  # type: ignore[method-assign,assignment]
                swapped.append(module)
            if not swapped:
                reason = "no linear layer is large enough to gain"
        copied = 0 if compiled is not None else sum(m.weight.numel() * 4 for m in swapped)
        yield Packing(len(swapped), copied, reason, told)
    finally:
        for module in swapped:
            del module.forward


def unsuited(target: Target) -> str | None:
    """Why this target cannot run packed here, or None."""
    weight = target.head.weight
    if target.device.type != "cpu":
        return f"the target is on {target.device.type}, packing is for the CPU"
    if weight.dtype != torch.float32:
        return f"the target is {str(weight.dtype).removeprefix('torch.')}, packing is for float32"
    built_in = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built_in or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this torch was built without oneDNN"
    return None


def candidates(*models: nn.Module | None) -> list[nn.Linear]:
    """Plain fp32 CPU linear layers worth packing; a forward somebody else replaced is left alone."""
    found: dict[int, nn.Linear] = {}
    for model in models:
        for module in model.modules() if model is not None else ():
            if type(module) is nn.Linear and "forward" not in vars(module) and gains(module):
                found[id(module)] = module
    return list(found.values())


def gains(module: nn.Linear) -> bool:
    """Whether a layer is of a kind and size that a faster way is worth its call."""
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST


def few_rows_kernel(rows: int) -> tuple[kernel.Kernel | None, str | None]:
    """The compiled kernel for passes of so many rows, or None and why."""
    return kernel.load() if rows <= LAID_OUT_FOR else (None, f"{rows} rows are many: a packed layout is faster")


def fast_forward(module: nn.Linear, rows: int = LAID_OUT_FOR) -> Callable[[Tensor], Tensor]:
    """``module``'s forward for passes of about ``rows`` rows, in the fastest way there is here."""
    compiled, _ = few_rows_kernel(rows)
    return kernel_forward(compiled, module) if compiled is not None else packed_forward(module, rows)


def kernel_forward(compiled: kernel.Kernel, module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """``module``'s forward, few rows of it through the compiled kernel; its weight is read where it lies."""
    narrow, wide = module.in_features, module.out_features
    weight = kernel.Linear.of(module)

    def forward(input: Tensor) -> Tensor:
        found = input.numel() // narrow
        if not 1 <= found <= kernel.FEW or input.dtype != torch.float32 or torch.is_grad_enabled():
            return nn.Linear.forward(module, input)
        if kernel.weight_of(module).data_ptr() != weight.weight:  # put elsewhere meanwhile
            return nn.Linear.forward(module, input)
        return compiled.linear(weight, input.reshape(found, narrow).contiguous()).view(*input.shape[:-1], wide)

    return forward


def packed_forward(module: nn.Linear, rows: int = LAID_OUT_FOR) -> Callable[[Tensor], Tensor]:
    """``module``'s forward, by way of a packed copy of its weight where that is faster."""
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
    bias = module.bias.detach() if module.bias is not None else None
    linear = torch.ops.mkldnn._linear_pointwise.default
    narrow, wide = module.in_features, module.out_features
    fewest, most = 1 if wide >= WIDE else 2, 4 * rows

    def forward(input: Tensor) -> Tensor:
        found = input.numel() // narrow
        if not fewest <= found <= most or input.dtype != torch.float32 or torch.is_grad_enabled():
            return nn.Linear.forward(module, input)
        out: Tensor = linear(input.reshape(found, narrow), weight, bias, "none", [], "")
        return out.view(*input.shape[:-1], wide)

    return forward
