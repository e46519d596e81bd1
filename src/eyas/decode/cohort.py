"""Rows of a batch that were admitted together, and how they attend.

    columns    0 ───────────────────── P-1 │ P   P+1  …   capacity
    row 0      prompt of P tokens          │ answer
    row 1      ··· pad ··· shorter prompt  │ answer

Prompts end in one column, so that every row's next key goes into the same one: no scatter, no key copied to
grow, and a window of the last W columns is the same for all. Rows that end leave at once; the last row moves
into the gap. The model's own layers run over the tokens of all cohorts at once as one row [1, T]; only attention
looks at whose token is whose (``attend``, registered with transformers under ``NAME``).

Letters: n rows, T tokens of a pass, N query heads, G key/value heads, R = N / G, E head width, W window,
S tokens of a prompt, F tokens of a shared beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from eyas.answers import Ask
from eyas.errors import UsageError
from eyas.target import Target

NAME = "eyas_cohorts"


@dataclass
class Row:
    """One prompt being answered; at most ``room`` tokens."""

    ask: Ask
    room: int
    draws: Random
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Beginning:
    """Keys and values of tokens that many prompts begin with, by layer [G, F, E]."""

    token_ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def skip(self, ask: Ask) -> int:
        """How many tokens of a prompt are known from here; one at least is left to be fed."""
        F = len(self.token_ids)
        return F if len(ask.prompt_ids) > F and ask.prompt_ids[:F] == self.token_ids else 0


class Part(Protocol):
    """Tokens of a pass that attend together."""

    def token_ids(self) -> list[int]: ...
    def positions(self) -> list[int]: ...
    def last(self) -> list[int]:
        """Which of its tokens are followed by a new one."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor: ...


class Cohort:
    """Rows and their keys and values, by layer [n, G, capacity, E]."""

    def __init__(self, rows: list[Row], beginning: Beginning | None) -> None:
        self.rows = rows
        self.beginning = beginning
        self.prompt_columns = max(len(row.ask.prompt_ids) for row in rows)
        self.admitted = len(rows)
        self.length = 0
        self.capacity = self.prompt_columns + max(row.room for row in rows)
        self.pads = [self.prompt_columns - len(row.ask.prompt_ids) for row in rows]
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Of one layer; made when its first keys [1, G, T, E] show how wide they are."""
        if layer not in self._keys:
            n = len(self.rows)
            # Zeros and not whatever was there: what is masked still has to be finite, or 0 times it is not 0.
            self._keys[layer] = key.new_zeros(n, key.shape[1], self.capacity, key.shape[3])
            self._values[layer] = value.new_zeros(n, value.shape[1], self.capacity, value.shape[3])
        return self._keys[layer], self._values[layer]

    def settle(self, tokens: Sequence[int], ends: frozenset[int]) -> list[Row]:
        """Give every row its next token; rows that ended with it leave and are returned."""
        self.length = self.prompt_columns if not self.length else self.length + 1
        for row, token in zip(self.rows, tokens, strict=True):
            row.token_ids.append(token)
        ended = [row for row in self.rows if row.token_ids[-1] in ends or len(row.token_ids) == row.room]
        for row in ended:
            self._remove(self.rows.index(row))
        return ended

    def _remove(self, gap: int) -> None:
        last = len(self.rows) - 1
        if gap != last:
            first = self.pads[last]
            for held in (*self._keys.values(), *self._values.values()):
                held[gap, :, first : self.length] = held[last, :, first : self.length]
            self.rows[gap], self.pads[gap] = self.rows[last], self.pads[last]
        self.rows.pop()
        self.pads.pop()

    def take_beginning(self, tokens: int) -> Beginning:
        """A copy of what the first row holds of its first ``tokens``."""
        at = slice(self.pads[0], self.pads[0] + tokens)
        return Beginning(
            self.rows[0].ask.prompt_ids[:tokens],
            tuple(self._keys[layer][0, :, at].clone() for layer in sorted(self._keys)),
            tuple(self._values[layer][0, :, at].clone() for layer in sorted(self._values)),
        )


class Prefill:
    """The prompts of a new cohort, each by itself and without padding, after what it shares with others."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        shared = cohort.beginning
        self._skipped = [shared.skip(row.ask) if shared is not None else 0 for row in cohort.rows]
        self._fed = [row.ask.prompt_ids[skip:] for row, skip in zip(cohort.rows, self._skipped, strict=True)]

    def token_ids(self) -> list[int]:
        return [token for fed in self._fed for token in fed]

    def positions(self) -> list[int]:
        return [skip + i for fed, skip in zip(self._fed, self._skipped, strict=True) for i in range(len(fed))]

    def last(self) -> list[int]:
        ends, end = [], 0
        for fed in self._fed:
            end += len(fed)
            ends.append(end - 1)
        return ends

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self.cohort.buffers(layer, key, value)
        out, begin = [], 0
        for i, (fed, skip, pad) in enumerate(zip(self._fed, self._skipped, self.cohort.pads, strict=True)):
            end = begin + len(fed)
            held = slice(pad, self.cohort.prompt_columns)
            if skip:
                assert self.cohort.beginning is not None
                keys[i, :, pad : pad + skip] = self.cohort.beginning.keys[layer]
                values[i, :, pad : pad + skip] = self.cohort.beginning.values[layer]
            keys[i, :, pad + skip : held.stop] = key[0, :, begin:end]
            values[i, :, pad + skip : held.stop] = value[0, :, begin:end]
            seen = (query[:, :, begin:end], keys[i : i + 1, :, held], values[i : i + 1, :, held])
            out.append(_causal(*seen, skip=skip, scaling=scaling, window=window)[0].transpose(0, 1))
            begin = end
        return torch.cat(out)


def _causal(query: Tensor, keys: Tensor, values: Tensor, *, skip: int, scaling: float, window: int | None) -> Tensor:
    """Queries [1, N, S, E] of the tokens after the first ``skip``, keys and values [1, G, skip + S, E]."""
    S = query.shape[2]
    grouped = query.shape[1] != keys.shape[1]
    if not skip and (window is None or window >= S):
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
    mine, theirs = torch.arange(skip, skip + S)[:, None], torch.arange(skip + S)[None]
    seen = theirs <= mine
    if window is not None:
        seen &= theirs > mine - window
    mask = seen.to(query.device)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped)


class Step:
    """One token of every row of a cohort."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self._mask: Tensor | None = None
        if any(cohort.pads):
            columns = torch.arange(cohort.length + 1)
            pads = torch.tensor(cohort.pads)[:, None]
            self._mask = torch.where(columns < pads, -torch.inf, 0.0)[:, None, None]  # [n, 1, 1, columns]

    def token_ids(self) -> list[int]:
        return [row.token_ids[-1] for row in self.cohort.rows]

    def positions(self) -> list[int]:
        return [self.cohort.length - pad for pad in self.cohort.pads]

    def last(self) -> list[int]:
        return list(range(len(self.cohort.rows)))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        n, at = len(self.cohort.rows), self.cohort.length
        keys, values = self.cohort.buffers(layer, key, value)
        keys[:n, :, at] = key[0].transpose(0, 1)
        values[:n, :, at] = value[0].transpose(0, 1)
        seen = slice(0 if window is None else max(0, at + 1 - window), at + 1)
        mask = self._mask[..., seen].to(query) if self._mask is not None else None
        # One row needs no causal mask, so the heads of a group can stand as rows: no key is repeated.
        G, E = keys.shape[1], query.shape[3]
        grouped = query[0].transpose(0, 1).reshape(n, G, -1, E)
        out = F.scaled_dot_product_attention(
            grouped, keys[:n, :, seen], values[:n, :, seen], attn_mask=mask, scale=scaling
        )
        return out.reshape(n, query.shape[1], -1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    parts: Sequence[tuple[slice, Part]],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function over a pass of cohorts: query [1, N, T, E] -> [1, T, N, E]."""
    if softcap is not None or s_aux is not None:
        raise UsageError(
            f"{type(module).__name__} caps or sinks its attention, which batched decoding does not do.",
            way_out="Let an engine answer: pass --url with an OpenAI-compatible endpoint.",
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = [
        part.attend(layer, query[:, :, at], key[:, :, at], value[:, :, at], scale, sliding_window) for at, part in parts
    ]
    return torch.cat(out)[None], None


AttentionInterface.register(NAME, attend)


@contextmanager
def attending(target: Target) -> Iterator[None]:
    """The target's layers attend by cohorts meanwhile."""
    config: Any = target.decoder.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def forward(target: Target, parts: Sequence[Part]) -> Tensor:
    """One pass over all parts: the final-normed states [B, D] that are followed by a new token, part by part."""
    tokens: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    placed: list[tuple[slice, Part]] = []
    for part in parts:
        begin = len(tokens)
        tokens += part.token_ids()
        positions += part.positions()
        last += [begin + i for i in part.last()]
        placed.append((slice(begin, len(tokens)), part))
    device = target.embedding.device
    with attending(target):
        states: Tensor = target.decoder(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            parts=placed,
        ).last_hidden_state
    return states[0, torch.tensor(last, device=device)]
