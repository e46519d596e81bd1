"""A drafter fed exactly what an engine fed its own: what it should have computed from that, pass by pass.

Every pass is given the engine's own fused rows, tokens, positions and feedback, so a pass that comes out otherwise is
wrong by itself, not because of what went wrong before it. Keys and values stand where the engine keeps them, at the
slot of their row; the rope position is the one that was fed.

    first pass   rows first … last     keys written at their slots; the sample row sees slots 0 … last
    depth k      one row, slot last+k  written there, seen by the depths after it; the next first pass writes over it

Letters: S rows, T slots, H drafter width, G key/value heads, E head width, K depths, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.diagnose.served import Served
from eyas.drafter import Drafter, attend
from eyas.engines.recording import Turn
from eyas.variants import Facts

MARGIN = 16  # slots past the text that drafts may take


@dataclass(frozen=True, eq=False)
class Played:
    """One turn replayed: states [K, H] of the sample row and of the depths after it."""

    turn: Turn
    pre: Tensor


class Replay:
    """One text. ``facts`` may hold what is no part of a drafter: ``window``, and ``cache``: "all", "own" (a slot sees
    no earlier pass), "zeros" (it sees zeros in place of them) or "kept" (what a draft left is not written over)."""

    def __init__(self, drafter: Drafter, facts: Facts, slots: int) -> None:
        self.drafter = drafter
        self.cache, self.window = facts.get("cache", "all"), facts.get("window")
        self._held = torch.zeros(slots + MARGIN, dtype=torch.bool)
        self._drafted = torch.zeros(slots + MARGIN, dtype=torch.bool)
        layers = drafter.config.num_hidden_layers
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    @torch.no_grad()
    def turn(self, turn: Turn, first: int, fused: Tensor) -> Played:
        """``fused`` [S, H]: hidden of the first pass, the engine's own or another."""
        last = first + len(turn.token_ids) - 1
        states = [self._pass(fused, turn.token_ids, turn.positions, torch.arange(first, last + 1), depth=0)]
        for k in range(1, turn.depths):
            row = slice(k, k + 1)
            hidden = torch.from_numpy(turn.fed[row])
            states.append(self._pass(hidden, turn.fed_ids[row], turn.fed_positions[row], torch.tensor([last + k]), k))
        return Played(turn, torch.stack(states))

    def _pass(self, hidden: Tensor, ids: np.ndarray, positions: np.ndarray, slots: Tensor, depth: int) -> Tensor:
        """Hidden [S, H] at ``slots`` [S] -> state [H] of the last row."""
        inside = slots < len(self._held)
        assert bool(inside.all()), "a chain runs past every text"
        tokens = torch.from_numpy(ids).clamp(0, len(self.drafter.embedding) - 1)[None]
        at = torch.from_numpy(positions)[None]
        written = slots
        if self.cache == "kept" and depth == 0 and len(slots) > 1:
            written = slots[~self._drafted[slots] | (slots == slots[-1])]
        fresh = torch.isin(slots, written)
        if self.cache == "own" and depth == 0:
            self._held[:] = False
        if self.cache == "zeros" and depth == 0:
            for kept in (*self._keys, *self._values):
                if kept is not None:
                    kept.zero_()
            self._held[: int(slots[0])] = True
        hidden = hidden[None]
        for layer in range(self.drafter.config.num_hidden_layers):
            residual, mixed = self.drafter.enter(hidden, tokens, layer)
            keys, values = self.drafter.keys_values(mixed, at, layer)
            self._write(layer, written, keys[:, :, fresh], values[:, :, fresh])
            self._held[written] = True
            seen = self._sees(slots)
            attended = attend(self.drafter.queries(mixed, at, layer), *self._kept(layer, slots), seen)
            hidden = self.drafter.finish(residual, attended, layer)
        self._drafted[slots] = depth > 0
        return hidden[0, -1]

    def _sees(self, slots: Tensor) -> Tensor:
        """Held slots up to each row's own: [1, 1, S, T]."""
        end = int(slots[-1]) + 1
        there = torch.arange(end)
        back = slots[:, None] - there[None]
        seen = (back >= 0) & self._held[:end]
        if self.window is not None:
            seen &= back < self.window
        return seen[None, None]

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for kept, new in ((self._keys, keys), (self._values, values)):
            if kept[layer] is None:
                kept[layer] = new.new_zeros(1, new.shape[1], len(self._held), new.shape[3])
            kept[layer][:, :, slots] = new  # type: ignore[index]

    def _kept(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        end = int(slots[-1]) + 1
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, :end], values[:, :, :end]


def replayed(drafter: Drafter, facts: Facts, one: Served, *, rounds: int | None = None) -> Iterator[Played]:
    """The rounds of a text from the engine's own fused rows; the first ``rounds`` that draft, or all."""
    replay = Replay(drafter, facts, len(one.ids))
    drafting = 0
    for now in one.rounds:
        if now.turn.fused is None:
            return
        yield replay.turn(now.turn, now.first, torch.from_numpy(now.turn.fused))
        drafting += now.last >= one.prompt - 1
        if drafting == rounds:
            return
