"""The drafting chain is the training unroll, depth by depth and by tensors; and the comparison can fail."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from eyas import objective, taps
from eyas.decode.chain import Chain
from eyas.drafter import Drafter

TAPS = (1, 2, 4)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def farthest(kind: str, drafter: Drafter, chain: Chain, shift: int = 0, order: Sequence[int] = (0, 1, 2)) -> float:
    """Largest relative difference of states and logits, chain against unroll, over slots and depths.

    ``shift`` and ``order`` spoil what the chain is fed: the token of another place, taps in another order.
    """
    target, depths, worst, compared = tiny.target(kind), 5, 0.0, 0
    for record in tiny.tiny_records(2, seed=3):
        ids = torch.from_numpy(record.input_ids).long()[None]
        T = ids.shape[1]
        seen = taps.run(target, ids, torch.tensor([T]), TAPS).taps
        spoilt = torch.cat([seen.chunk(3, dim=-1)[i] for i in order], dim=-1)
        slots = objective.trained_slots(torch.from_numpy(record.loss_mask)[None], depths)
        with torch.no_grad():
            states = list(objective.unroll(drafter, seen, ids, slots))
        chain.truncate(0)
        chain.committed = 0
        for s, t in enumerate(slots.index[0].tolist()):
            if not slots.valid[0, s, -1]:
                continue
            start = chain.committed
            chain.extend(spoilt[:, start : t + 1], ids[0, start + 1 + shift : t + 2 + shift].tolist(), start)
            compared += 1
            for k in range(depths):
                if k:
                    chain.feed(ids[:, t + 1 + k + shift : t + 2 + k + shift])
                assert chain.state is not None
                expected = states[k][0, s]
                worst = max(worst, relative(chain.state[0, 0], expected))
                worst = max(worst, relative(chain.logits(), drafter.logits(expected)))
    assert compared > 20
    return worst


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, "usual") for kind in tiny.KINDS), *(("llama", shape) for shape in tiny.SHAPES)]
)
def test_chain_and_unroll_agree_by_tensors(kind: str, shape: str) -> None:
    drafter = tiny.drafter(kind, **tiny.SHAPES[shape])
    assert farthest(kind, drafter, Chain(drafter)) < 1e-5


@pytest.mark.parametrize("shape", ["usual", "everything"])
def test_a_draft_is_the_argmax_at_every_depth_fed_back(shape: str) -> None:
    target, drafter = tiny.target("llama"), tiny.drafter("llama", **tiny.SHAPES[shape])
    ids = torch.tensor([tiny.prompt(12)])
    seen = taps.run(target, ids, torch.tensor([12]), TAPS).taps
    chain = Chain(drafter)
    chain.extend(seen[:, :-1], ids[0, 1:].tolist(), 0)
    drafted = chain.draft(4)
    assert [c.length for c in chain.caches] == [chain.committed] * len(chain.caches) == [11] * len(chain.caches)
    assert set(drafted) <= set(drafter.vocab.ids.tolist())

    text = torch.cat((ids, torch.tensor([drafted])), dim=1)  # the unroll is fed what was drafted
    padded = torch.cat((seen, seen.new_zeros(1, 4, seen.shape[2])), dim=1)
    slots = objective.Slots(torch.tensor([[10]]), torch.ones(1, 1, 4, dtype=torch.bool))
    with torch.no_grad():
        states = objective.unroll(drafter, padded, text, slots)
        expected = [int(drafter.to_target_ids(drafter.logits(s[0, 0]).argmax())) for s in states]
    assert drafted == expected


def swap_halves(drafter: Drafter) -> Drafter:
    spoilt = copy.deepcopy(drafter)
    mix = spoilt.mix

    def swapped(token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded, normed = mix(token_ids, hidden).chunk(2, dim=-1)
        return torch.cat((normed, embedded), dim=-1)

    spoilt.mix = swapped  # type: ignore[method-assign]
    return spoilt


def normed_feedback(drafter: Drafter) -> Drafter:
    spoilt = copy.deepcopy(drafter)
    spoilt.feedback = lambda state: spoilt.norm(state)  # type: ignore[method-assign]
    return spoilt


class LateRope(Chain):
    def _through_layer(self, layer: int, residual: Tensor, mixed: Tensor, positions: Tensor) -> Tensor:
        return super()._through_layer(layer, residual, mixed, positions + 1)


class KeepsDrafts(Chain):
    """Commits its own state's rows instead of dropping them: what a loop does that never looks at taps."""

    @torch.inference_mode()
    def extend(self, taps: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        super().extend(taps, next_tokens, first_slot)
        cache = self.caches[0]
        cache.append(cache.keys[:, :, -1:], cache.values[:, :, -1:])


class LooksAhead(Chain):
    """Lets the rows of a first layer see all that is held, later slots included."""

    def _through_layer(self, layer: int, residual: Tensor, mixed: Tensor, positions: Tensor) -> Tensor:
        rows = range(residual.shape[1])
        parts = [super(LooksAhead, self)._through_layer(layer, *self._row(i, residual, mixed, positions)) for i in rows]
        return torch.cat(parts, dim=1)

    @staticmethod
    def _row(i: int, *tensors: Tensor) -> list[Tensor]:
        return [t[:, i : i + 1] for t in tensors]


def test_a_first_layer_that_looks_ahead_is_noticed() -> None:
    drafter = tiny.drafter("llama", **tiny.SHAPES["layers"])
    assert farthest("llama", drafter, LooksAhead(drafter)) > 0.1


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (Chain, {"order": (2, 1, 0)}),
        (Chain, {"order": (0, 2, 1)}),
        (Chain, {"shift": -1}),
        (lambda drafter: Chain(swap_halves(drafter)), {}),
        (lambda drafter: Chain(normed_feedback(drafter)), {}),
        (LateRope, {}),
        (KeepsDrafts, {}),
    ],
    ids=["taps-reversed", "taps-swapped", "token-shift", "halves-swapped", "normed", "rope", "stale-key"],
)
def test_the_comparison_notices_every_usual_miswiring(make: Any, spoil: dict[str, Any]) -> None:
    drafter = tiny.drafter("llama")
    assert farthest("llama", drafter, make(drafter), **spoil) > 0.1
