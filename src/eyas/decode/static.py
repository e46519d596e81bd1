"""Passes of fixed shapes at fixed addresses: what ``torch.compile`` and CUDA graphs ask for. Never chosen by itself.

    buffers     0 1 2 … held-1 │ held … held+R-1 │ … slots-1      [1, G, slots, E] a layer, made once
                what was fed   │ rows of a pass  │ nobody sees it
    a pass      ids, depths, seen ──▶ masks from ``held`` ──▶ embed ── layer 0 ── … ── layer n-1 ── norm ──▶ states
                                                                   │         │                 taps on the way

``held`` is a number on the device, so moving it is all that truncating, keeping a chain and dropping rejected rows
take, and nothing waits for the host to know it. A pass has one of ``ROWS`` rows; what is short of that is padded with
rows that follow the last real one, so no real row sees them, and the next pass writes over them. Attention looks at
all slots, whatever is held: a fixed shape costs what a full cache does.

The layers are transformers' own modules, called one after the other: its decoder's ``forward`` would make masks from a
cache object and hands out no tap n. Its ``StaticCache`` has a length for every layer, moved by every pass, and layers
with a window that cannot take rejected rows back; here one length serves all and windows are masks.

Letters: R rows of a pass with padding, S real ones, D target width, C taps, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas import taps as tapping
from eyas.decode import sight
from eyas.decode.cache import TargetCache, as_row, cache_keyword
from eyas.decode.chunks import in_chunks
from eyas.decode.sight import Fed
from eyas.errors import UsageError
from eyas.target import Target

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # a long text goes 128 at a time
ALIGNED = 64  # slots: rows of a mask that begin anywhere are copied by CUDA's attention before it reads them
WARM_UPS = 3  # calls before a capture: lazy initialisation of libraries, and a compiler's own measuring

# Decoders whose forward is: embed, masks and rope by kind of layer, the layers in order, the norm.
DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Gemma3TextModel")

Step = Callable[[], None]
"""Work on tensors at fixed addresses: nothing goes in, nothing comes out."""


def as_it_is(step: Step) -> Step:
    return step


def graphed(step: Step) -> Step:
    """``step`` as one CUDA graph; it must be on CUDA and free of host syncs, which capturing checks.

    It runs ``WARM_UPS`` times first. Only a GPU can prove this function: ``runs/gpu_decode.py`` does.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def unsuited(target: Target) -> str | None:
    """Why the target cannot go this way, or None."""
    decoder, config = target.decoder, target.config
    name = type(decoder).__name__
    if name not in DECODERS or not type(decoder).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(DECODERS)}"
    if any(weight.device != target.device for weight in decoder.parameters()):
        return "its weights lie on several devices"
    told = decoder.rotary_emb.rope_type  # type: ignore[union-attr]
    kinds = set(told.values() if isinstance(told, dict) else [told])
    if changing := sorted(kind for kind in kinds if kind == "longrope" or "dynamic" in str(kind)):
        return f"its rope of type {changing[0]!r} changes with the length of the text"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    return None


class Buffers:
    """Keys and values of every layer, and how many of their slots are held (``held`` [1] int64, on their device).

    ``widths``: for each layer the heads and widths of its keys and of its values, ((G, E), (G, E')).
    """

    def __init__(self, widths: Sequence[tuple[tuple[int, int], tuple[int, int]]], slots: int, like: Tensor) -> None:
        # Zeros and not empty: what nobody sees is multiplied by 0, and garbage may be no number.
        self.keys = [like.new_zeros(1, G, slots, E) for (G, E), _ in widths]
        self.values = [like.new_zeros(1, G, slots, E) for _, (G, E) in widths]
        self.held = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.slots = torch.arange(slots, device=like.device)

    def next(self, rows: int) -> Tensor:
        """The slots [R] that the next rows go to."""
        return self.held + self.slots[:rows]

    def write(self, layer: int, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values [1, G, R, E] at slots [R] -> all of the layer's, [1, G, slots, E]."""
        self.keys[layer].index_copy_(2, at, keys)
        self.values[layer].index_copy_(2, at, values)
        return self.keys[layer], self.values[layer]

    def sees(self, depths: Tensor, seen: Tensor, window: int | None) -> Tensor:
        """Whether each row sees each slot [R, slots] bool; ``seen`` [R, R] is what rows see of each other.

        Read slot by slot: inductor (torch 2.13, CPU) makes a wrong mask of ``index_copy`` into an expanded tensor.
        """
        row = self.slots - self.held  # of this pass, where it is 0 … R-1
        before = (row < 0)[None]
        if window is not None:
            before = before & (depths[:, None] - row < window)
            seen = seen & (depths[:, None] - depths < window)
        last = len(depths) - 1
        return before | (seen.index_select(1, row.clamp(0, last)) & (row >= 0) & (row <= last))

    def move(self, start: int, rows: Sequence[int]) -> None:
        """Bring the rows at these slots to ``start`` and after."""
        source = torch.tensor(list(rows), dtype=torch.int64, device=self.held.device)
        for held in (*self.keys, *self.values):
            held[:, :, start : start + len(rows)] = held[:, :, source]


class Written:
    """What attention takes for a cache during one pass: the rows go to ``at``, every slot comes back."""

    def __init__(self, buffers: Buffers, at: Tensor) -> None:
        self.buffers, self.at = buffers, at

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.buffers.write(layer, keys, values, self.at)


class StaticPasses:
    """As ``passes.Passes`` says, for texts of at most ``capacity`` tokens.

    ``prepare`` is handed the work of each number of rows once, the first time it is needed, and gives what is called in
    its place: ``as_it_is``, ``torch.compile`` with its options, ``graphed``, or one after the other. Raises UsageError
    for a target that ``unsuited`` finds something against, or taps it does not have.
    """

    def __init__(
        self, target: Target, taps: Sequence[int], *, capacity: int, prepare: Callable[[Step], Step] = as_it_is
    ) -> None:
        require(unsuited(target))
        self.taps = tapping.validate(taps, target.num_layers) if taps else ()
        self.capacity, self.length = capacity, 0
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        slots = -(-(capacity + ROWS[-1]) // ALIGNED) * ALIGNED
        self.buffers = Buffers(widths_of(target), slots, like)
        self._target, self._prepare = target, prepare
        self._sizes: dict[int, _Size] = {}
        self._fed: Fed | None = None
        self._through = Through(target, self.taps)

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        assert parents is None or len(parents) <= ROWS[-1], f"a tree of {len(parents)} rows"
        if self.length + len(token_ids) > self.capacity:
            raise UsageError(
                f"{self.length + len(token_ids)} tokens do not fit a static cache of {self.capacity}.",
                way_out="Make it with a larger capacity.",
            )
        self._fed = Fed.of(self.length, token_ids, parents)
        return in_chunks(self._rows, token_ids, parents, ROWS[-1])

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        self.holds(length)
        self.buffers.held.fill_(length)

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        assert self._fed is not None, "keep() without a pass before it"
        began, at = self._fed.began, self._fed.kept(rows)
        if at != list(range(began, began + len(at))):
            self.buffers.move(began, at)
        self.truncate(began + len(at))

    def holds(self, length: int) -> None:
        """Say what the device knows already: so many tokens are held now."""
        self.length, self._fed = length, None

    def rows(self, ids: Tensor, depths: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """One pass on the device alone: ids and depths [R], seen [R, R] -> states [R, D], taps [R, C*D].

        The rows lie behind those held; whoever wants some of them kept moves ``buffers.held``.
        """
        return self._through(self.buffers, ids, depths, seen)

    def _rows(self, token_ids: Sequence[int], parents: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        S = len(token_ids)
        size = self._size(next(rows for rows in ROWS if rows >= S))
        size.feed(token_ids, parents)
        size.step()
        self.length += S
        self.buffers.held.add_(S)
        return size.states[:S].clone(), size.taps[:S].clone()

    def _size(self, rows: int) -> _Size:
        if rows not in self._sizes:
            size = self._sizes[rows] = _Size(self, rows)
            size.step = self._prepare(size.step)
        return self._sizes[rows]


class _Size:
    """Passes of R rows: where their input lies and where their output will."""

    def __init__(self, passes: StaticPasses, rows: int) -> None:
        target = passes._target
        like, device = passes.buffers.keys[0], target.device
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.depths = torch.zeros_like(self.ids)
        self.seen = torch.zeros(rows, rows, dtype=torch.bool, device=device)
        self.states = like.new_zeros(rows, target.hidden_size)
        self.taps = like.new_zeros(rows, len(passes.taps) * target.hidden_size)
        self.step: Step = self._step
        self._passes = passes

    def feed(self, token_ids: Sequence[int], parents: Sequence[int] | None) -> None:
        rows, device = len(self.ids), self.ids.device
        padding = rows - len(token_ids)
        last = len(token_ids) - 1
        padded = None if parents is None else [*parents, *range(last, last + padding)]
        sees = sight.chain(rows, device) if padded is None else sight.tree(padded, device)
        self.ids.copy_(torch.tensor([*token_ids, *[token_ids[-1]] * padding], dtype=torch.int64))
        self.depths.copy_(sees.depths)
        self.seen.copy_(sees.seen)

    def _step(self) -> None:
        states, taps = self._passes.rows(self.ids, self.depths, self.seen)
        self.states.copy_(states)
        self.taps.copy_(taps)


class Through:
    """A target's layers in order, with everything looked up beforehand that a compiler need not see."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        decoder, config = target.decoder, target.config
        self.embed, self.rope, self.norm = decoder.embed_tokens, decoder.rotary_emb, target.norm
        self.layers: list[Any] = list(decoder.layers)  # type: ignore[arg-type]
        self.taps, self.dtype = tuple(taps), target.dtype
        self.keyword = cache_keyword(self.layers[0])
        self.by_kind = hasattr(self.rope, "layer_types")  # Gemma: a rope for each kind of layer
        self.kinds: list[str] = list(getattr(config, "layer_types", None) or ["all"] * len(self.layers))
        window = getattr(config, "sliding_window", None)
        self.windows = {kind: window if kind == "all" or "sliding" in kind else None for kind in self.kinds}

    def __call__(self, buffers: Buffers, ids: Tensor, depths: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        at = buffers.next(len(ids))
        cache = Written(buffers, at)
        positions = (buffers.held + depths)[None]
        x: Any = self.embed(ids[None])  # type: ignore[operator]
        masks, turns = {}, {}
        for kind, window in self.windows.items():
            sees = buffers.sees(depths, seen, window)
            masks[kind] = torch.zeros_like(sees, dtype=self.dtype).masked_fill(~sees, torch.finfo(self.dtype).min)
            turns[kind] = self.rope(x, positions, *([kind] if self.by_kind else []))  # type: ignore[operator]
        streams = {0: x}
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            x = streams[i + 1] = layer(
                x,
                attention_mask=masks[kind][None, None],
                position_ids=positions,
                position_embeddings=turns[kind],
                **{self.keyword: cache},
            )
        tapped = torch.cat([streams[t][0] for t in self.taps], dim=-1) if self.taps else x[0, :, :0]
        return self.norm(x)[0], tapped


@torch.no_grad()
def widths_of(target: Target) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Heads and widths of each layer's keys and values, seen on a token."""
    seen = TargetCache(target)
    seen.forward(as_row([0], target))
    shapes = [(layer.keys.shape, layer.values.shape) for layer in seen.layers]
    return [((keys[1], keys[3]), (values[1], values[3])) for keys, values in shapes]


def require(trouble: str | None) -> None:
    """Raise UsageError where something is against the static way."""
    if trouble is not None:
        raise UsageError(
            f"This does not go the static way: {trouble}.", way_out="Decode it with eyas.decode.loop, which takes any."
        )
