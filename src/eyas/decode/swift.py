"""The draft side through ``kernel``: a depth, its head included, is one call. ``chain_of`` chooses it where it applies.

``Chain`` is the oracle and says the same in torch, where a depth is some thirty calls. Besides, committed slots wait
here until somebody drafts: a round that drafts nothing costs the drafter nothing, and rows that waited go together.

    extend   slots t..t+a ──▶ waiting ──▶ … ──▶ one pass over all that waits, the head for the last   (logits, draft, …)
    feed     one temporary row            ──▶ one pass, the head for it

Many slots at once, as of a prompt, go the torch way; the keys and values are the same ones.

Letters: S slots, F nodes of a tree's level, R temporary rows, C taps, D target width, H drafter width, W draft
vocabulary, N query heads, G key/value heads, E head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.decode import kernel, sight
from eyas.decode.chain import Chain
from eyas.decode.layers import ROPES
from eyas.drafter import Drafter

_PARTS: WeakKeyDictionary[Drafter, Parts] = WeakKeyDictionary()


def chain_of(drafter: Drafter) -> Chain:
    """The draft side of a new text: the swift one where it applies, else torch's."""
    compiled, _ = kernel.load()
    if compiled is None or unsuited(drafter) is not None:
        return Chain(drafter)
    return SwiftChain(drafter, compiled, parts_of(drafter))


def unsuited(drafter: Drafter) -> str | None:
    """Why this drafter cannot go through the kernel, or None."""
    config = drafter.config
    if config.num_hidden_layers > 1:
        return f"it has {config.num_hidden_layers} layers"
    if config.head_dim % kernel.LANES:
        return f"heads of {config.head_dim} are no multiple of {kernel.LANES}"
    if (rope := config.rope_parameters["rope_type"]) not in ROPES:
        return f"rope of type {rope!r} is none of {', '.join(ROPES)}"
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in drafter.parameters()):
        return "not all of its weights are float32 on cpu"
    if drafter.embedding.dtype != torch.float32:
        return "its embedding is not float32"
    if not all(weight.is_contiguous() for weight in drafter.parameters()):
        return "not all of its weights are contiguous"
    return None


class Parts:
    """What the kernel is told of a drafter, looked up once for all its texts."""

    def __init__(self, drafter: Drafter) -> None:
        config, layer = drafter.config, drafter.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        # Alive as long as a structure points at them, even if a parameter is given other memory meanwhile.
        self._weights = [weight.detach() for weight in (*drafter.parameters(), *drafter.buffers())]
        self._addresses = addresses(drafter)
        linear = kernel.Linear.of
        made = kernel.Layer(scaling=config.head_dim**-0.5, kind=0)
        if not config.norm_before_residual:  # else what comes in is normed already
            made.before_attention = kernel.address(layer.hidden_norm.weight)
        if config.qk_norm:
            made.query, made.key = kernel.address(gain(attention.q_norm)), kernel.address(gain(attention.k_norm))
        made.before_mlp = kernel.address(layer.post_attention_layernorm.weight)
        made.into = (kernel.Linear * 3)(*map(linear, (attention.q_proj, attention.k_proj, attention.v_proj)))
        made.rise = (kernel.Linear * 2)(linear(mlp.gate_proj), linear(mlp.up_proj))
        made.out, made.fall = linear(attention.o_proj), linear(mlp.down_proj)
        self.layers = (kernel.Layer * 1)(made)
        self.head = linear(drafter.lm_head)
        self.gain = gain(drafter.norm)
        self.embedded_gain = gain(layer.input_layernorm)
        self.tapped = (ctypes.c_int64 * 2)(-1, -1)
        self.shape = kernel.Shape(
            layers=1,
            D=config.hidden_size,
            H=config.num_attention_heads,
            G=config.num_key_value_heads,
            E=config.head_dim,
            I=config.intermediate_size,
            gelu=False,
            eps=config.rms_norm_eps,
        )
        self._rotary = drafter.rotary
        self._turns = (self.gain.new_empty(0, config.head_dim),) * 2

    def is_current(self, drafter: Drafter) -> bool:
        """Whether the weights still lie where they lay; new values in the same place are seen without further ado."""
        return addresses(drafter) == self._addresses

    def turn(self, position: int, rows: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rows, E] from this position on, contiguous."""
        end = position + rows
        if self._turns[0].shape[0] < end:
            at = torch.arange(max(2 * self._turns[0].shape[0], end))[None]
            cos, sin = self._rotary(torch.empty(1, 1, 1), at)
            self._turns = cos[0].contiguous(), sin[0].contiguous()
        cos, sin = self._turns
        return cos[position:end], sin[position:end]


def parts_of(drafter: Drafter) -> Parts:
    found = _PARTS.get(drafter)
    if found is None or not found.is_current(drafter):
        found = _PARTS[drafter] = Parts(drafter)
    return found


def addresses(drafter: Drafter) -> list[int]:
    return [weight.data_ptr() for weight in (*drafter.parameters(), *drafter.buffers())]


def gain(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor), "a norm has a gain"
    return weight.detach()


class SwiftChain(Chain):
    """A ``Chain`` whose drafter ``unsuited`` finds nothing against."""

    def __init__(self, drafter: Drafter, compiled: kernel.Kernel, parts: Parts) -> None:
        super().__init__(drafter)
        self._kernel, self._parts = compiled, parts
        self._waiting: list[tuple[Tensor, list[int]]] = []
        self._logits: Tensor | None = None
        self._scratch = torch.empty(0)

    @property
    def state(self) -> Tensor | None:
        self._settle()
        return self._state

    @state.setter
    def state(self, state: Tensor | None) -> None:
        self._state, self._logits = state, None

    @property
    def length(self) -> int:
        self._settle()
        return super().length

    def truncate(self, length: int) -> None:
        self._settle()
        super().truncate(length)

    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        assert first_slot == self.committed, f"slot {first_slot} after {self.committed} slots"
        assert len(next_tokens) == taps.shape[1], "one following token a slot"
        if self._rows + len(next_tokens) > kernel.FEW:
            self._settle()
        self._waiting.append((taps, list(next_tokens)))
        self.committed += len(next_tokens)
        if len(next_tokens) > kernel.FEW:
            self._settle()

    @torch.inference_mode()
    def feed(self, token: Tensor) -> None:
        state = self.state
        assert state is not None, "feed before extend"
        self._pass(self.drafter.feedback(state)[0], token[0], self.length, first_asked=0)

    @torch.inference_mode()
    def logits(self) -> Tensor:
        state = self.state
        assert state is not None, "logits before extend"
        if self._logits is None:
            self._logits = super().logits()
        return self._logits

    @torch.inference_mode()
    def level(self, states: Tensor, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        self._settle()
        hidden, position = self.drafter.feedback(states)[0], self.committed - 1 + depth
        return self._pass(hidden, tokens, position, first_asked=None, seen=ancestors.contiguous())[None]

    @property
    def _rows(self) -> int:
        return sum(len(tokens) for _, tokens in self._waiting)

    @torch.inference_mode()
    def _settle(self) -> None:
        """Let all that waits leave its keys and values, and the last of it the state from which drafting starts."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        taps = torch.cat([taps for taps, _ in waiting], dim=1)
        next_tokens = [token for _, tokens in waiting for token in tokens]
        first, rows = self.committed - len(next_tokens), len(next_tokens)
        super().truncate(first)
        if rows > kernel.FEW:
            self.committed = first
            super().extend(taps, next_tokens, first)
            self._logits = None
        else:
            tokens = torch.tensor(next_tokens, dtype=torch.int64)
            self._pass(self.drafter.fuse(taps)[0], tokens, first, first_asked=rows - 1)

    def _pass(
        self, hidden: Tensor, tokens: Tensor, position: int, *, first_asked: int | None, seen: Tensor | None = None
    ) -> Tensor:
        """Rows after those held: hidden [S, H], target ids [S] -> states [S, H].

        A chain from ``position`` on or, with ``seen`` [S, R], rows that all stand there and see so much of the last R.
        The last row's state is where drafting goes on, with its logits if rows from ``first_asked`` are asked theirs.
        """
        parts, layer, rows = self._parts, self.drafter.midlayer, hidden.shape[0]
        embedded = F.embedding(tokens, self.drafter.embedding)
        x = layer.hidden_norm(hidden) if self.drafter.config.norm_before_residual else hidden.clone()
        if seen is None:
            (cos, sin), seen = parts.turn(position, rows), sight.chain(rows, x.device).seen
        else:
            cos, sin = (turn.repeat(rows, 1) for turn in parts.turn(position, 1))
        first = torch.zeros(rows, dtype=torch.int64)
        states = torch.empty_like(x)
        logits = x.new_empty(rows - first_asked, parts.head.outputs) if first_asked is not None else None
        cache = self.caches[0]
        keys, values = cache.room_for(rows, x.new_empty(1, parts.shape.G, 0, parts.shape.E))
        self._kernel.forward(
            parts.shape,
            parts.layers,
            (kernel.Sight * 1)(kernel.Sight.of(cos, sin, first, seen)),
            x,
            kernel.Cache.of(keys, values, cache.length),
            kernel.Outlet(
                tapped=ctypes.addressof(parts.tapped),
                gain=parts.gain.data_ptr(),
                states=states.data_ptr(),
                head=ctypes.addressof(parts.head),
                logits=kernel.address(logits),
                first_asked=first_asked or 0,
            ),
            self._room(rows, keys.shape[2]),
            kernel.Beside(embedded.data_ptr(), parts.embedded_gain.data_ptr()),
        )
        cache.length += rows
        self._state, self._logits = x[None, -1:], None if logits is None else logits[-1]
        return x

    def _room(self, rows: int, capacity: int) -> Tensor:
        needed = rows * kernel.scratch_floats(self._parts.shape, capacity)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        return self._scratch
