"""One text's way through the target, a pass at a time: ``of`` chooses the fast way where there is one.

``LibraryPasses`` runs transformers' own modules and is the oracle; ``compact.CompactPasses`` says the same with less
around it. Either feeds a long prompt in chunks, so that a pass's own tensors stay small whatever its length.

Letters: S rows of a pass, T tokens held, D target width, C taps, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas import taps as tapping
from eyas.decode import compact, sight
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.chunks import CHUNK, in_chunks
from eyas.decode.sight import Fed, Sight
from eyas.target import Target


class Passes(Protocol):
    """Tokens of one text that the target has seen, and what it says of those that follow."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    def forward(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Feed S tokens after those held -> final-normed states [S, D], taps [S, C*D] on the target's device.

        ``parents[i]`` is the row of this pass that row i follows, -1 the last token held; None is a chain (-1, 0,
        1, ...). A row sees all tokens held, its ancestors and itself; its position is ``length`` + its depth.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all tokens from ``length`` on, as if never fed."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Of the last pass only these rows stay, a path from the root in order, as if fed alone."""
        ...


def of(target: Target, taps: Sequence[int]) -> Passes:
    """Passes for a new text: the compact ones where they apply, else the library's. ``compact.unsuited`` says why.

    Raises UsageError for taps the target does not have; none at all are fine here.
    """
    return compact.CompactPasses(target, taps) if compact.unsuited(target) is None else LibraryPasses(target, taps)


class LibraryPasses:
    """transformers' own modules, any architecture whose cache is keys and values of every token."""

    def __init__(self, target: Target, taps: Sequence[int], *, chunk: int = CHUNK) -> None:
        self.taps = tapping.validate(taps, target.num_layers) if taps else ()
        self._target, self._chunk = target, chunk
        self._cache = TargetCache(target)
        self._fed: Fed | None = None

    @property
    def length(self) -> int:
        return self._cache.length

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        self._fed = Fed.of(self.length, token_ids, parents)
        return in_chunks(self._rows, token_ids, parents, self._chunk)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        self._fed = None
        self._cache.truncate(length)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        assert self._fed is not None, "keep() without a pass before it"
        began, at = self._fed.began, self._fed.kept(rows)
        if at != list(range(began, began + len(at))):
            for layer in self._cache.layers:
                kept = layer.keys[:, :, at], layer.values[:, :, at]
                layer.truncate(began)
                layer.update(*kept)
        self.truncate(began + len(at))

    def _rows(self, token_ids: Sequence[int], parents: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        target = self._target
        ids = as_row(list(token_ids), target)
        # A chain is what the model's own mask is for.
        more = self._tree(sight.tree(parents, target.device)) if parents is not None else {}
        if not self.taps:
            states = self._cache.forward(ids, **more)[0]
            return states, states.new_empty(len(token_ids), 0)
        with tapping.reading(target, self.taps) as reader:
            states = self._cache.forward(ids, **more)[0]
            return states, reader.take()[0]

    def _tree(self, tree: Sight) -> dict[str, Any]:
        """Positions and ready masks, additive, as every attention of the library takes them."""
        held, config, dtype = self.length, self._target.config, self._target.dtype

        def mask(window: int | None) -> Tensor:
            seen = tree.mask(held, window)[None, None]
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        masks = {kind: mask(window if "sliding" in kind else None) for kind in set(kinds)} if kinds else mask(window)
        return {"position_ids": (tree.depths + held)[None], "attention_mask": masks}
