"""Keys and values of tokens seen so far, for a target and for a drafter.

Letters: G key/value heads, T rows held, S rows added, E head width, C taps, D target width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from eyas.target import Target

FIRST_CAPACITY = 256
EVEN = 8  # of which every capacity is a multiple, for those that go over rows by eights


class KeyValues:
    """Rows of one layer in buffers [1, G, capacity, E] that double when full; seen through views of them."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        assert self._keys is not None, "nothing appended yet"
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        assert self._values is not None, "nothing appended yet"
        return self._values[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add rows, keys and values each [1, G, S, E] (their head widths may differ)."""
        end = self.length + keys.shape[2]
        self._keys = self._with_room(self._keys, keys, end)
        self._values = self._with_room(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    def room_for(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Whole buffers [1, G, capacity, E] with room for so many rows more, for who writes them and moves ``length``.

        ``like`` [1, G, any, E] is for heads, width and kind of numbers.
        """
        self._keys = self._with_room(self._keys, like, self.length + rows)
        self._values = self._with_room(self._values, like, self.length + rows)
        return self._keys, self._values

    def truncate(self, length: int) -> None:
        """Forget all rows from ``length`` on."""
        assert 0 <= length <= self.length, f"{length} of {self.length} rows"
        self.length = length

    def _with_room(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= needed:
            return buffer
        capacity = max(FIRST_CAPACITY, 2 * (buffer.shape[2] if buffer is not None else 0), -(-needed // EVEN) * EVEN)
        larger = like.new_empty(1, like.shape[1], capacity, like.shape[3])
        if buffer is not None:
            larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' full-attention cache layer without its copy of everything at every step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = KeyValues()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.rows.append(key_states, value_states)
        self.keys, self.values = self.rows.keys, self.rows.values
        return self.keys, self.values

    def truncate(self, length: int) -> None:
        self.rows.truncate(length)
        self.keys, self.values = self.rows.keys, self.rows.values


class TargetCache:
    """A target's cache, every layer of it full.

    Made without the target's config on purpose: a sliding-window layer that has dropped old rows cannot take
    back a rejected run. The model's own mask applies the window, so nothing it should not see is seen.
    """

    def __init__(self, target: Target) -> None:
        self._decoder = target.decoder
        self._device = target.device
        self._cache = DynamicCache()
        self._cache.layer_class_to_replicate = GrowingLayer
        self._keyword = cache_keyword(target.decoder)

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def layers(self) -> list[GrowingLayer]:
        """Those that hold anything: a layer that shares another's keys holds none."""
        return [layer for layer in self._cache.layers if layer.is_initialized]

    def forward(self, input_ids: Tensor, **more: Any) -> Tensor:
        """Feed the tokens [1, S] that follow those held -> final-normed states [1, S, D] on the target's device.

        ``more`` is for the decoder: positions and masks where its own will not do.
        """
        fed: dict[str, Any] = {"input_ids": input_ids, "use_cache": True, self._keyword: self._cache, **more}
        return self._decoder(**fed).last_hidden_state.to(self._device)  # type: ignore[no-any-return]

    def truncate(self, length: int) -> None:
        for layer in self.layers:
            layer.truncate(length)


def cache_keyword(decoder: nn.Module) -> str:
    """What this transformers calls the cache: ``cache`` since 5.24, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def as_row(token_ids: list[int], target: Target) -> Tensor:
    """Ids as a batch of one [1, S] where the target lives."""
    return torch.tensor([token_ids], dtype=torch.int64, device=target.device)
