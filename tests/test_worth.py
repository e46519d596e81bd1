"""Drafts chosen by what they are worth: as good as any by enumeration, and the promise holds whatever is kept.

Everything is played against a simulated drafter and machine; seeds are fixed. One round alone is in
``test_weighing``, the draft side in ``test_siblings``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.decode.adaptive import ALLOWANCE, TRYING, Adaptive, Costs, Pace
from eyas.decode.worth import NODES, ByWorth, Weighing
from eyas.errors import UsageError
from test_weighing import BOX, DEAR, DEPTHS, falling, share, verify_of

RIGHT, WRONG = 1.0, 0.0


# -- many rounds, simulated --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """Rounds as they went, each [rounds]."""

    depths: np.ndarray
    nodes: np.ndarray
    accepted: np.ndarray
    cost: np.ndarray

    def after(self, first: int) -> Played:
        return Played(*(getattr(self, name)[first:] for name in ("depths", "nodes", "accepted", "cost")))

    @property
    def speed(self) -> float:
        return float((self.accepted + 1).sum() / self.cost.sum())

    @property
    def most_lost(self) -> float:
        """Plain passes above what is promised, over the worst stretch."""
        worst = running = 0.0
        for one in self.cost - (1 + TRYING) * (self.accepted + 1):
            running = max(running + float(one), 0.0)
            worst = max(worst, running)
        return worst


def draw(weighing: Weighing, draws: np.random.Generator, honest: float) -> int:
    """Draft as it says, words right with ``honest`` times their shares; how many of the chosen are kept."""
    right, on_path = list[int](), True
    while weighing.deeper():
        shares, first = falling(draws), len(weighing.paths)
        weighing.propose(shares)
        rank = int(np.searchsorted(np.cumsum(shares) * honest, draws.random(), side="right"))
        if on_path and rank < len(shares):
            right.append(first + rank)
        on_path &= rank == 0
    return len(set(right) & set(weighing.chosen))


def play(
    rounds: int, *, honest: Callable[[int], float] = lambda _: RIGHT, costs: Costs = BOX, true: Costs | None = None,
    unit: Callable[[int], float] | None = None, seed: int = 0,
) -> tuple[Played, ByWorth]:  # fmt: skip
    """``unit``: seconds of a plain pass by round; then it is told those of each round by ``true`` costs, noisy by 8 %.
    ``cost`` is of the true ones."""
    draws, chooser, seen = np.random.default_rng(seed), ByWorth(costs, DEPTHS), []
    real = true or costs
    for i in range(rounds):
        weighing = chooser.choose()
        accepted = draw(weighing, draws, honest(i))
        drafting = weighing.depths * real.drafting()
        verifying = real.verifying(1 + weighing.nodes)
        seconds = None
        if unit is not None:
            noise = np.exp(draws.normal(0, 0.08, 2))
            seconds = unit(i) * drafting * float(noise[0]), unit(i) * verifying * float(noise[1])
        chooser.saw(weighing, accepted, seconds)
        seen.append((weighing.depths, weighing.nodes, accepted, drafting + verifying))
    return Played(*(np.array(column) for column in zip(*seen, strict=True))), chooser


def chain_speed(k: int, costs: Costs = BOX) -> float:
    """Tokens a pass of a chain of ``k`` of the same drafter."""
    draws, tokens = np.random.default_rng(9), 0
    for _ in range(4000):
        kept = True
        tokens += 1
        for _ in range(k):
            kept = kept and draws.random() < falling(draws)[0]
            tokens += kept
    return tokens / 4000 / (costs.verifying(1 + k) + k * costs.drafting())


@pytest.mark.parametrize("seed", [0, 1])
def test_it_beats_every_fixed_chain(seed: int) -> None:
    played, _ = play(3000, seed=seed)
    assert played.after(100).speed > 1.03 * max(chain_speed(k) for k in range(1, 6))
    assert played.most_lost <= ALLOWANCE + 1e-9


def test_what_cannot_pay_is_let_be() -> None:
    played, _ = play(1500, costs=DEAR)
    assert played.after(100).speed > 0.975
    assert played.most_lost <= ALLOWANCE + 1e-9


def test_a_drafter_never_right_costs_what_is_promised_and_no_more() -> None:
    played, chooser = play(2000, honest=lambda _: WRONG)
    assert (played.cost - (1 + TRYING) * (played.accepted + 1)).sum() <= ALLOWANCE
    assert 0 < (played.depths > 0).mean() < 0.9
    assert chooser.trust < 0.2
    assert chooser.price == 1.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_drafter_that_turns_right_is_taken_up(seed: int) -> None:
    always, _ = play(1500, seed=seed)
    turned, _ = play(2500, honest=lambda i: RIGHT if i >= 400 else WRONG, seed=seed)
    assert turned.after(1500).speed > 0.97 * always.after(500).speed


def test_a_drafter_that_says_too_much_is_believed_less() -> None:
    _, honest = play(2000)
    _, half = play(2000, honest=lambda _: 0.5)
    assert honest.trust == pytest.approx(1.0, abs=0.06)
    assert half.trust == pytest.approx(0.5, abs=0.06)
    assert honest.price < half.price <= 1.0


def test_the_price_of_a_token_is_passes_over_tokens_lately() -> None:
    played, chooser = play(3000)
    recent = played.after(2400)
    assert chooser.price == pytest.approx(recent.cost.sum() / (recent.accepted + 1).sum(), rel=0.05)
    assert ByWorth(BOX, 2).price == 1.0


def test_what_is_not_worth_a_look_is_looked_at_when_one_percent_pays_for_it() -> None:
    """First depths that turned out worthless: the next is due after d / 1 % passes, here 0.06 / 0.01."""
    chooser, looked = ByWorth(BOX, DEPTHS), list[bool]()
    for _ in range(600):
        weighing = chooser.choose()
        looked.append(weighing.deeper())
        if looked[-1]:
            weighing.propose([0.0, 0.0, 0.0])
        chooser.saw(weighing, 0)
    places = np.flatnonzero(looked[300:])
    assert set(np.diff(places)) == {6}


# -- the promise -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    rounds=st.lists(st.tuples(share, share, share, share), min_size=30, max_size=120),
    rises=st.lists(st.floats(0, 2), min_size=3, max_size=3),
    draft=st.floats(0, 0.8),
    spite=st.integers(0, NODES),
    timed=st.booleans(),
)
def test_no_acceptance_whatever_breaks_the_promise(
    rounds: list[tuple[float, float, float, float]], rises: list[float], draft: float, spite: int, timed: bool
) -> None:
    """``spite``: drafts of more nodes are refused altogether. What a round costs is by the costs believed before it."""
    v2, v3, v8 = np.cumsum([1, *rises])[1:].tolist()
    chooser = ByWorth(Costs({1: 1, 2: v2, 3: v3, 8: v8}, {1: draft}), DEPTHS)
    lost = 0.0
    for first, second, kept, slow in rounds:
        depth, verify = chooser.costs
        weighing = chooser.choose()
        while weighing.deeper():
            weighing.propose(sorted([first, (1 - first) * second, 0.01], reverse=True))
        nodes = weighing.nodes
        accepted = int(kept * min(nodes, weighing.depths) + 0.5) if nodes <= spite else 0
        chooser.saw(weighing, accepted, (0.01 * slow + 1e-4, 0.05 * second + 1e-3) if timed else None)
        cost = weighing.depths * depth + verify[nodes]
        lost = max(lost + cost - (1 + TRYING) * (accepted + 1), 0.0)
        assert lost <= ALLOWANCE + 1e-9


def test_good_rounds_save_up_no_more_than_the_allowance() -> None:
    """A drafter that is sure and long was right, and then is never: what is lost from there on is what is promised."""
    chooser, lost, worst = ByWorth(Costs({1: 1, 8: 4}, {1: 0.3}), DEPTHS), 0.0, 0.0
    for i in range(300):
        weighing = chooser.choose()
        while weighing.deeper():
            weighing.propose([0.97, 0.02, 0.01])
        accepted = min(weighing.depths, weighing.nodes) if i < 200 else 0
        chooser.saw(weighing, accepted)
        lost = max(lost + weighing.cost - (1 + TRYING) * (accepted + 1), 0.0)
        worst = max(worst, lost)
    assert 0.8 * ALLOWANCE < worst <= ALLOWANCE + 1e-9


# -- seconds -----------------------------------------------------------------------------------------------


def test_costs_begin_as_measured_and_lie_on_lines_between() -> None:
    draft, verify = ByWorth(Costs({1: 2.0, 3: 3.0, 8: 8.0}, {1: 0.5}), 2).costs
    assert draft == pytest.approx(0.25)
    assert verify == pytest.approx([1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4])


def told(chooser: ByWorth, words: Sequence[float], seconds: Callable[[int, int], tuple[float, float]]) -> Weighing:
    weighing = chooser.choose()
    while weighing.deeper():
        weighing.propose(words)
    chooser.saw(weighing, min(1, weighing.nodes), seconds(weighing.depths, weighing.nodes))
    return weighing


def test_drafting_is_told_from_verifying() -> None:
    """Depths take half as long again, passes what was thought; then the other way round."""
    usual = verify_of(BOX)
    slow_draft, slow_verify = ByWorth(BOX, DEPTHS), ByWorth(BOX, DEPTHS)
    draws, played = np.random.default_rng(0), set[tuple[int, int]]()
    for i in range(600):
        words = [[0.0] * 3, falling(draws)][i % 2]
        for chooser, d, v in ((slow_draft, 1.5, 1.0), (slow_verify, 1.0, 1.5)):
            weighing = told(
                chooser,
                words,
                lambda depths, nodes, d=d, v=v: (  # type: ignore[misc]
                    0.01 * 0.06 * d * depths,
                    0.01 * (usual[nodes] * v if nodes else 1.0),
                ),
            )
            played.add((weighing.depths, weighing.nodes))
    assert {nodes for _, nodes in played} >= {0, 1, 2, 3}
    assert slow_draft.costs[0] == pytest.approx(0.09, rel=0.05)
    assert slow_draft.costs[1][1:4] == pytest.approx(usual[1:4], rel=0.05)
    assert slow_verify.costs[0] == pytest.approx(0.06, rel=0.05)
    assert slow_verify.costs[1][1:3] == pytest.approx([1.5 * cost for cost in usual[1:3]], rel=0.08)


def test_seconds_reach_the_entry_of_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A depth's seconds entry 1, those of a pass over r rows entry r, of a plain one entry 0."""
    entries = list[tuple[int, float]]()
    monkeypatch.setattr(Pace, "saw", lambda _, entry, seconds: entries.append((entry, seconds)))
    chooser = ByWorth(BOX, DEPTHS)
    weighing = told(chooser, [0.97, 0.02, 0.01], lambda *_: (0.6, 5.0))
    assert entries == [(1, 0.6 / weighing.depths), (weighing.nodes + 1, 5.0)]
    assert weighing.nodes >= 2
    entries.clear()
    told(chooser, [0.0] * 3, lambda *_: (0.2, 5.0))
    assert entries == [(1, 0.2), (0, 5.0)]
    entries.clear()
    chooser.saw(chooser.choose(), 0, (1e-9, 3.0))  # nothing was drafted
    assert entries == [(0, 3.0)]
    chooser.saw(chooser.choose(), 0)
    assert len(entries) == 1


@pytest.mark.parametrize(
    ("costs", "true", "unit"),
    [
        (BOX, BOX, lambda i: 0.01),
        (BOX, BOX, lambda i: 0.03 if i > 700 else 0.01),
        (BOX, BOX, lambda i: 0.01 * (1 + 0.5 * math.sin(i / 100))),
        (DEAR, BOX, lambda i: 0.01),
        (BOX, DEAR, lambda i: 0.01),
    ],
    ids=["right", "slows", "wobbles", "thought-dear", "thought-cheap"],
)
def test_costs_are_learned_from_seconds(costs: Costs, true: Costs, unit: Callable[[int], float]) -> None:
    knowing, _ = play(2500, costs=true)
    learning, _ = play(2500, costs=costs, true=true, unit=unit)
    assert learning.after(1500).speed > 0.97 * knowing.after(1500).speed


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_says_nothing(seconds: float) -> None:
    chooser = ByWorth(BOX, DEPTHS)
    for _ in range(20):
        told(chooser, [0.6, 0.2, 0.1], lambda *_: (seconds, seconds))
    draft, verify = chooser.costs
    assert draft == pytest.approx(0.06)
    assert verify == pytest.approx(verify_of(BOX))


# -- choices -----------------------------------------------------------------------------------------------


def test_the_same_rounds_give_the_same_choices_and_asking_changes_nothing() -> None:
    first, _ = play(300, unit=lambda _: 0.02)
    second, chooser = play(300, unit=lambda _: 0.02)
    assert all((getattr(first, name) == getattr(second, name)).all() for name in ("depths", "nodes", "accepted"))
    assert len({*first.depths.tolist()}) > 2
    assert chooser.choose().beliefs == chooser.choose().beliefs
    chooser.saw(chooser.choose(), 0)
    assert chooser.choose().beliefs != play(300, unit=lambda _: 0.02)[1].choose().beliefs


def test_more_kept_than_was_chosen_is_a_mistake() -> None:
    chooser = ByWorth(BOX, 1)
    weighing = chooser.choose()
    assert weighing.deeper()
    weighing.propose([0.9, 0.5, 0.4])
    with pytest.raises(AssertionError, match="2 accepted of 3 in 1"):
        chooser.saw(weighing, 2)


@pytest.mark.parametrize("made", [ByWorth, Adaptive])
def test_nothing_to_choose_from_is_refused(made: Callable[[Costs, int], object]) -> None:
    with pytest.raises(UsageError, match="nothing to choose from"):
        made(BOX, 0)
