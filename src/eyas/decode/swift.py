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
from torch import Tensor

from eyas.decode import kernel
from eyas.decode.chain import Chain
from eyas.decode.law import argmax
from eyas.decode.layers import ROPES, gain, weights
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
        self._weights = [weight.detach() for weight in weights(drafter)]
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
        self.embedding = drafter.embedding.detach()
        self.target_ids: list[int] = drafter.to_target_ids(torch.arange(drafter.lm_head.out_features)).tolist()
        self.normed_residual = layer.hidden_norm if config.norm_before_residual else None
        self.feeds_normed = config.norm_output
        self.tapped = (ctypes.c_int64 * 2)(-1, -1)
        self.first = torch.zeros(kernel.FEW, dtype=torch.int64)
        self.triangles = [torch.ones(rows, rows, dtype=torch.bool).tril() for rows in range(kernel.FEW + 1)]
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
        """Cosines and sines of all positions [T, E], so many rows from this one on among them."""
        end = position + rows
        if self._turns[0].shape[0] < end:
            at = torch.arange(max(2 * self._turns[0].shape[0], end))[None]
            cos, sin = self._rotary(torch.empty(1, 1, 1), at)
            self._turns = cos[0].contiguous(), sin[0].contiguous()
        return self._turns


def parts_of(drafter: Drafter) -> Parts:
    found = _PARTS.get(drafter)
    if found is None or not found.is_current(drafter):
        found = _PARTS[drafter] = Parts(drafter)
    return found


def addresses(drafter: Drafter) -> list[int]:
    return [weight.data_ptr() for weight in weights(drafter)]


class SwiftChain(Chain):
    """A ``Chain`` whose drafter ``unsuited`` finds nothing against.

    A pass of the target leaves nothing of Python in the processor's caches, so here every call counts: what is told the
    kernel stands ready, and only what differs from one pass to the next is written.
    """

    def __init__(self, drafter: Drafter, compiled: kernel.Kernel, parts: Parts) -> None:
        super().__init__(drafter)
        self._kernel, self._parts = compiled, parts
        self._waiting: list[tuple[Tensor, list[int]]] = []
        self._logits: Tensor | None = None
        self._scratch = torch.empty(0)
        self._states = torch.empty(kernel.FEW, parts.shape.D)
        self._heads = torch.empty(1, parts.shape.G, 0, parts.shape.E)
        self._sight = (kernel.Sight * 1)()
        self._cache = kernel.Cache()
        self._beside = kernel.Beside(gain=parts.embedded_gain.data_ptr())
        self._outlet = kernel.Outlet(
            tapped=ctypes.addressof(parts.tapped),
            gain=parts.gain.data_ptr(),
            states=self._states.data_ptr(),
            head=ctypes.addressof(parts.head),
        )

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

    def feed(self, token: Tensor) -> None:
        self.feed_id(int(token))

    @torch.inference_mode()
    def feed_id(self, token: int) -> None:
        state = self.state
        assert state is not None, "feed before extend"
        embedding = self._parts.embedding
        assert 0 <= token < len(embedding), f"token {token} of {len(embedding)}"
        at = embedding.data_ptr() + token * embedding.shape[1] * embedding.itemsize
        self._pass(self._fed_back(state), at, self.caches[0].length, first_asked=0)

    def logits(self) -> Tensor:
        self._settle()
        if self._logits is None:
            self._logits = super().logits()
        return self._logits

    def draft(self, draft_tokens: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(draft_tokens):
            if tokens:
                self.feed_id(tokens[-1])
            tokens += self.target_ids(argmax(self.logits()[None]))
        self.drop_draft()
        return tokens

    def target_ids(self, draft_ids: Sequence[int]) -> list[int]:
        return [self._parts.target_ids[word] for word in draft_ids]

    @torch.inference_mode()
    def level(self, states: Tensor, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        self._settle()
        seen, embedded = ancestors.contiguous(), self._embedded(tokens)
        hidden, position = self._fed_back(states), self.committed - 1 + depth
        return self._pass(hidden, embedded.data_ptr(), position, first_asked=None, seen=seen)[None]

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Target ids [S] -> [S, H], contiguous."""
        return torch.embedding(self._parts.embedding, tokens)

    def _fed_back(self, states: Tensor) -> Tensor:
        """States [1, F, H] of one depth -> hidden of the next [F, H]."""
        return self.drafter.feedback(states)[0] if self._parts.feeds_normed else states[0]

    @property
    def _rows(self) -> int:
        return sum(len(tokens) for _, tokens in self._waiting)

    def _settle(self) -> None:
        if self._waiting:
            self._settle_all()

    @torch.inference_mode()
    def _settle_all(self) -> None:
        """Let all that waits leave its keys and values, and the last of it the state from which drafting starts."""
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
            embedded = self._embedded(torch.tensor(next_tokens, dtype=torch.int64))
            self._pass(self.drafter.fuse(taps)[0], embedded.data_ptr(), first, first_asked=rows - 1)

    def _pass(
        self, hidden: Tensor, embedded: int, position: int, *, first_asked: int | None, seen: Tensor | None = None
    ) -> Tensor:
        """Rows after those held: hidden [S, H], where their embedded tokens [S, H] lie -> states [S, H].

        A chain from ``position`` on or, with ``seen`` [S, R], rows that all stand there and see so much of the last R.
        The last row's state is where drafting goes on, with its logits if rows from ``first_asked`` are asked theirs.
        """
        parts, rows, cache, E = self._parts, hidden.shape[0], self.caches[0], self._parts.shape.E
        x = hidden.clone() if parts.normed_residual is None else parts.normed_residual(hidden)
        sight, (cos, sin) = self._sight[0], parts.turn(position, 1 if seen is not None else rows)
        if seen is None:
            seen = parts.triangles[rows]
            offset = position * E * cos.itemsize
        else:  # all stand at one position
            cos, sin, offset = cos[position].repeat(rows, 1), sin[position].repeat(rows, 1), 0
        sight.cos, sight.sin = cos.data_ptr() + offset, sin.data_ptr() + offset
        sight.first, sight.seen, sight.tail = parts.first.data_ptr(), seen.data_ptr(), seen.shape[1]
        keys, values = cache.room_for(rows, self._heads)
        told = self._cache
        told.keys, told.values, told.held, told.capacity = (
            keys.data_ptr(),
            values.data_ptr(),
            cache.length,
            keys.shape[2],
        )
        outlet, logits = self._outlet, None
        if first_asked is not None:
            logits = x.new_empty(rows - first_asked, parts.head.outputs)
            outlet.logits, outlet.first_asked = logits.data_ptr(), first_asked
        else:
            outlet.logits = None
        self._beside.rows = embedded
        self._kernel.forward(
            parts.shape, parts.layers, self._sight, x, told, outlet, self._room(rows, told.capacity), self._beside
        )
        cache.length += rows
        self._state, self._logits = x[None, -1:], None if logits is None else logits[-1]
        return x

    def _room(self, rows: int, capacity: int) -> Tensor:
        needed = rows * kernel.scratch_floats(self._parts.shape, capacity)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        return self._scratch
