"""Linear layers whose weights stay as narrow as they are stored, for those that are too big to hold in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 1024  # rows widened at a time
BIG = 2**30  # bytes in fp32 from which a tensor, or a drafter's tensors together, stay as they are stored


class Widened(nn.Linear):
    """``nn.Linear`` with a weight [N, M] in bf16 or fp16: the same numbers as its fp32 copy would give, without the
    copy. Each block of rows is widened while it is used, which costs a pass over the weights: little where there are
    many inputs [..., M]. Gives fp32 [..., N]. (A product in bf16 itself is slower on a CPU without AVX-512, and less
    exact.)"""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.device("meta"):
            super().__init__(1, 1, bias=False)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        wide = input.float()
        out = wide.new_empty(*wide.shape[:-1], self.out_features)
        for start in range(0, self.out_features, BLOCK):
            rows = slice(start, start + BLOCK)
            bias = None if self.bias is None else self.bias[rows].float()
            out[..., rows] = F.linear(wide, self.weight[rows].float(), bias)
        return out


def narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def widen_on_use(module: nn.Module) -> None:
    """Every linear layer inside ``module`` that holds narrow weights becomes a ``Widened`` one."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and narrow(child.weight):
                setattr(parent, name, Widened(child.weight, child.bias))
