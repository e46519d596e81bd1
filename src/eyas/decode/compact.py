"""The target's layers without what stands around them in a library: the fast ``passes.Passes`` on the CPU, in fp32.

    embed ── layer 0 ── layer 1 ── … ── layer n-1 ── norm ──▶ states       x [S, D] is the residual stream, tap i is
       │        │                                                          what layer i is handed
       keys and values [layers, G, capacity, E], one buffer for all, grown by doubling and cut by moving ``length``

Few rows go through ``kernel`` in one call; many rows, or all of them where it could not be made, through torch. Weights
are the model's own tensors, read where they lie: nothing is copied but the norms' gains, and without the kernel what
``pack`` lays out. Rope's cosines come from the model's own module, so that every scaling of it is its own.

Letters: S rows of a pass, T tokens held, D target width, C taps, H query heads, G key/value heads, n = H / G, E head
width, I inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas import taps as tapping
from eyas.decode import kernel, sight
from eyas.decode.chunks import CHUNK, in_chunks
from eyas.decode.layers import Stack, unsuited
from eyas.decode.sight import Fed, Sight
from eyas.target import Target

__all__ = ["CompactPasses", "unsuited"]

FIRST_CAPACITY = 256

_STACKS: WeakKeyDictionary[torch.nn.Module, Stack] = WeakKeyDictionary()


def stack_of(target: Target) -> Stack:
    """The target's layers, looked up once for all its texts."""
    found = _STACKS.get(target.model)
    if found is None or not found.is_current(target):
        found = _STACKS[target.model] = Stack(target)
    return found


class CompactPasses:
    """As ``passes.Passes`` says; ``target`` is one that ``unsuited`` finds nothing against."""

    def __init__(self, target: Target, taps: Sequence[int], *, chunk: int = CHUNK) -> None:
        self.taps = tapping.validate(taps, target.num_layers) if taps else ()
        self.length = 0
        self._stack, self._chunk = stack_of(target), chunk
        self._tapped = (ctypes.c_int64 * (target.num_layers + 1))(*[-1] * (target.num_layers + 1))
        for i, t in enumerate(self.taps):
            self._tapped[t] = i * target.hidden_size
        self._cache = self._stack.empty_cache(0)
        self._scratch = torch.empty(0)
        self._fed: Fed | None = None

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        self._fed = Fed.of(self.length, token_ids, parents)
        return in_chunks(self._rows, token_ids, parents, self._chunk)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        self.length, self._fed = length, None

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        assert self._fed is not None, "keep() without a pass before it"
        began, at = self._fed.began, self._fed.kept(rows)
        if at != list(range(began, began + len(at))):
            for held in self._cache:
                held[:, :, began : began + len(at)] = held[:, :, at]
        self.truncate(began + len(at))

    def _rows(self, token_ids: Sequence[int], parents: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        stack, S = self._stack, len(token_ids)
        self._make_room(self.length + S)
        sees = sight.chain(S, stack.device) if parents is None else sight.tree(parents, stack.device)
        x = stack.embed(torch.tensor(token_ids, dtype=torch.int64, device=stack.device))
        taps = x.new_empty(S, len(self.taps) * x.shape[1])
        if stack.kernel is not None and S <= kernel.FEW:
            states = self._through_kernel(stack.kernel, x, taps, sees)
        else:
            states = self._through_torch(x, taps, sees)
        self.length += S
        return states, taps

    # -- few rows -------------------------------------------------------------------------------------------------

    def _through_kernel(self, compiled: kernel.Kernel, x: Tensor, taps: Tensor, sees: Sight) -> Tensor:
        stack = self._stack
        needed = len(sees) * kernel.scratch_floats(stack.shape, self._cache[0].shape[2])
        if self._scratch.numel() < needed:
            self._scratch = x.new_empty(needed)
        views = [
            (*stack.turn(kind, self.length, sees), sees.first(self.length, kind.window), sees.rows(kind.window))
            for kind in stack.kinds
        ]
        sights = (kernel.Sight * len(views))(*(kernel.Sight.of(*view) for view in views))
        states = torch.empty_like(x)
        outlet = kernel.Outlet(
            tapped=ctypes.addressof(self._tapped),
            taps=taps.data_ptr(),
            tap_width=taps.shape[1],
            gain=stack.last_gain.data_ptr(),
            states=states.data_ptr(),
        )
        cache = kernel.Cache.of(*self._cache, self.length)
        compiled.forward(stack.shape, stack.structures, sights, x, cache, outlet, self._scratch)
        return states

    # -- many rows, or no kernel ----------------------------------------------------------------------------------

    def _through_torch(self, x: Tensor, taps: Tensor, sees: Sight) -> Tensor:
        stack, D = self._stack, x.shape[1]
        turns = {kind: stack.turn(kind, self.length, sees) for kind in stack.kinds}
        masks = {kind: sees.mask(self.length, kind.window) for kind in stack.kinds}
        for i in range(len(stack.layers) + 1):
            if self._tapped[i] >= 0:
                taps[:, self._tapped[i] : self._tapped[i] + D] = x
            if i == len(stack.layers):
                break
            layer = stack.layers[i]
            fused = layer.into(stack.normed(x, layer.before_attention))
            attended = layer.out(self._attend(i, fused, turns[layer.kind], masks[layer.kind]))
            x = x + stack.normed(attended, layer.after_attention)
            gate, up = layer.rise(stack.normed(x, layer.before_mlp)).chunk(2, dim=1)
            x = x + stack.normed(layer.fall(stack.activate(gate) * up), layer.after_mlp)
        return stack.normed(x, stack.last_gain)

    def _attend(self, index: int, fused: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attended [S, H * E] of ``fused`` [S, (H + 2G) * E]; keys and values join the cache."""
        stack, layer, S, T = self._stack, self._stack.layers[index], fused.shape[0], self.length
        H, G, E = stack.shape.H, stack.shape.G, stack.shape.E
        queries, keys, values = torch.split(fused.view(S, -1, E).transpose(0, 1), [H, G, G])
        if layer.query is not None:
            queries, keys = stack.normed(queries, layer.query), stack.normed(keys, layer.key)
        for held, new in zip(self._cache, (turned(keys, turn), values), strict=True):
            held[index, :, T : T + S] = new
        attended = F.scaled_dot_product_attention(
            turned(queries, turn)[None],
            self._cache[0][index, None, :, : T + S],
            self._cache[1][index, None, :, : T + S],
            attn_mask=mask if not (S == 1 and layer.kind.window is None) else None,
            scale=layer.scaling,
            enable_gqa=H != G,
        )
        return attended[0].transpose(0, 1).reshape(S, H * E)

    def _make_room(self, needed: int) -> None:
        capacity = self._cache[0].shape[2]
        if needed <= capacity:
            return
        larger = max(FIRST_CAPACITY, 2 * capacity, -(-needed // kernel.LANES) * kernel.LANES)
        grown = self._stack.empty_cache(larger)
        for held, new in zip(self._cache, grown, strict=True):
            new[:, :, : self.length] = held[:, :, : self.length]
        self._cache = grown


def turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [H, S, E] at their rope positions, whose cosines and sines are [S, E]."""
    left, right = heads.chunk(2, dim=-1)
    return heads * turn[0] + torch.cat((-right, left), dim=-1) * turn[1]
