"""One round's draft: no set of proposals is worth more than the chosen, and a depth more is drafted where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.decode.adaptive import Costs
from eyas.decode.worth import GUESS, NODES, Beliefs, Weighing

BOX = Costs({1: 1, 2: 1.04, 3: 1.08, 4: 1.15, 5: 1.24, 6: 1.32, 7: 1.42, 8: 1.52}, {1: 0.06})
DEAR = Costs({1: 1, 2: 1.9, 3: 2.5, 8: 6.0}, {1: 0.15})
DEPTHS = 4


def verify_of(costs: Costs) -> list[float]:
    return [costs.verifying(rows) for rows in range(1, NODES + 2)]


def believed(
    verify: Sequence[float] = verify_of(BOX), *, draft: float = 0.06, price: float = 0.7, trust: float = 1.0,
    bearable: float = 9.0, look: bool = True, spare: Sequence[float] = (0.0,) * (NODES + 1),
) -> Beliefs:  # fmt: skip
    return Beliefs(draft, tuple(verify), price, trust, bearable, look, tuple(spare))


def falling(draws: np.random.Generator) -> list[float]:
    """Three words' shares, of a drafter that is now sure and now guesses."""
    first = float(draws.beta(0.9, 1.1))
    second = (1 - first) * float(draws.uniform(0.1, 0.6))
    return sorted([first, second, second * float(draws.uniform(0.1, 0.9))], reverse=True)


def best_by_enumeration(weighing: Weighing) -> float:
    """What the best set of proposals, each with its parent, is worth over none, tried out one by one."""
    beliefs, places = weighing.beliefs, range(len(weighing.paths))
    most = min(len(places), NODES)
    best = 0.0
    for some in chain.from_iterable(combinations(places, size) for size in range(1, most + 1)):
        if all(weighing.parents[place] in (-1, *some) for place in some):
            kept = sum(min(1.0, beliefs.trust * weighing.paths[place]) for place in some)
            best = max(best, beliefs.price * kept - (beliefs.verify[len(some)] - 1))
    return best


share = st.floats(0, 1)
rises = st.lists(st.floats(-0.05, 0.6), min_size=NODES, max_size=NODES)


@settings(max_examples=120, deadline=None)
@given(
    depths=st.lists(st.lists(share, min_size=1, max_size=3), min_size=1, max_size=4),
    rises=rises,
    price=st.floats(0.2, 1),
    trust=st.floats(0.1, 2.5),
)
def test_no_set_of_proposals_is_worth_more_than_the_chosen(
    depths: list[list[float]], rises: list[float], price: float, trust: float
) -> None:
    weighing = Weighing(believed([1.0, *np.maximum(1 + np.cumsum(rises), 1)], price=price, trust=trust), 4)
    for words in depths:
        weighing.propose(sorted(words, reverse=True))
    chosen, beliefs = weighing.chosen, weighing.beliefs
    kept = sum(min(1.0, trust * weighing.paths[place]) for place in chosen)
    assert weighing.value == pytest.approx(best_by_enumeration(weighing), abs=1e-12)
    assert price * kept - (beliefs.verify[len(chosen)] - 1) == pytest.approx(weighing.value, abs=1e-12)
    seen = {-1}
    for place in chosen:  # a parent before its children, the likeliest first
        assert weighing.parents[place] in seen
        seen.add(place)
    paths = [weighing.paths[place] for place in chosen]
    assert paths == sorted(paths, reverse=True)


def test_proposals_hang_below_the_likeliest_of_the_depth_above() -> None:
    weighing = Weighing(believed(), 3)
    for words in ([0.5, 0.25, 0.125], [0.5, 0.5], [0.25, 0.25, 0.0]):
        weighing.propose(words)
    assert weighing.parents == [-1, -1, -1, 0, 0, 3, 3, 3]
    assert weighing.paths == [0.5, 0.25, 0.125, 0.25, 0.25, 0.0625, 0.0625, 0.0]
    assert weighing.foretold == sum(sorted(weighing.paths, reverse=True)[: weighing.nodes])


@pytest.mark.parametrize(
    ("path", "draft", "goes"), [(0.9, 0.1, True), (0.9, 0.45, False), (0.15, 0.1, False), (0.3, 0.05, True)]
)
def test_a_further_depth_is_drafted_where_what_it_likely_brings_is_worth_it(
    path: float, draft: float, goes: bool
) -> None:
    """By enumeration: the same round with a further depth's guessed proposals against the round as it is."""
    weighing = Weighing(believed(draft=draft), 4)
    weighing.propose([path, 0.05, 0.01])
    with_guess = Weighing(believed(draft=draft), 4)
    with_guess.propose([path, 0.05, 0.01])
    with_guess.propose(GUESS)
    assert (best_by_enumeration(with_guess) - best_by_enumeration(weighing) > draft) == goes  # the case is what it says
    assert weighing.deeper() == goes


def test_trust_and_price_decide_too() -> None:
    def deep(**changed: float) -> bool:
        weighing = Weighing(believed(draft=0.06, **changed), 4)
        weighing.propose([0.4, 0.05, 0.01])
        return weighing.deeper()

    assert (deep(), deep(trust=0.5), deep(price=0.3)) == (True, False, False)


def test_no_deeper_than_asked_than_there_is_room_or_than_can_be_borne() -> None:
    def depths(weighing: Weighing) -> int:
        while weighing.deeper():
            weighing.propose([0.99, 0.005, 0.001])
        return weighing.depths

    assert depths(Weighing(believed(), 4)) == 4
    assert depths(Weighing(believed(), 4).within(2)) == 2
    assert depths(Weighing(believed(), 2).within(9)) == 2
    assert depths(Weighing(believed(), 4).within(0)) == 0
    assert depths(Weighing(believed(look=False), 4)) == 0
    assert depths(Weighing(believed(bearable=1.13), 4)) == 2  # three would be 1.18 with nothing verified


def test_rows_are_left_out_where_they_could_not_be_borne() -> None:
    weighing = Weighing(believed(bearable=1.15), 1)
    assert weighing.deeper()
    weighing.propose([0.9, 0.5, 0.4])
    assert weighing.nodes == 2  # 0.06 + 1.08; a third would make it 1.21
    assert weighing.cost == pytest.approx(1.14)
    free = Weighing(believed(), 1)
    free.propose([0.9, 0.5, 0.4])
    assert free.nodes == 3


def test_numbers_of_rows_that_are_due_are_played_where_they_lose_little() -> None:
    def nodes(words: Sequence[float], bearable: float = 9.0, **spare: float) -> int:
        due = [spare.get(f"m{m}", 0.0) for m in range(NODES + 1)]
        weighing = Weighing(believed(spare=due, bearable=bearable), 1)
        weighing.propose(words)
        return weighing.nodes

    words = [0.5, 0.1, 0.02]  # worth 0, 0.31, 0.34, 0.284
    assert nodes(words) == 2
    assert nodes(words, m0=0.33) == 2
    assert nodes(words, m0=0.35) == 0
    assert nodes(words, m0=0.35, m1=0.04) == 1  # the most overdue
    assert nodes(words, m3=0.06) == 3
    assert nodes(words, m3=0.06, bearable=1.2) == 2
    assert nodes(words, m4=9.0) == 2  # nobody proposed so many


def test_words_of_no_likelihood_are_not_verified() -> None:
    weighing = Weighing(believed([1.0] * (NODES + 1)), 2)
    weighing.propose([0.0, 0.0, 0.0])
    assert (weighing.chosen, weighing.value) == ([], 0.0)
    assert not weighing.deeper()
    assert weighing.cost == pytest.approx(1.06)
