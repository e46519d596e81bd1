"""The run: sides take turns, a side that fails is told and left out, what was measured stays.

    repeat 0   prompt 0: a b    prompt 1: b a    prompt 2: a b   …
    repeat 1   prompt 0: b a    prompt 1: a b    …

The order flips from turn to turn, and for every prompt from repeat to repeat, so that a machine that warms up or slows
down does so for all sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from eyas.bench.sides import Fault, Named, P, Side, SideResult, Turn
from eyas.bench.summary import Bench, Cost
from eyas.errors import EnvironmentFault, EyasError, Interrupted, UsageError
from eyas.journal import Journal

FAULTS_IN_A_ROW = 3  # then a side is given up


class Listener(Protocol):
    """Told what happens while it does."""

    def warmed_up(self, results: Mapping[str, SideResult], turns_left: int) -> None:
        """Every side has answered the prompt that does not count: what is to come can be estimated."""

    def turn_done(self, done: int) -> None:
        """So many turns are measured, those of the journal among them."""

    def failed(self, fault: Fault) -> None:
        """A side did not answer."""


def run(
    sides: Mapping[str, Side[P]],
    prompts: Sequence[P],
    *,
    seed: int = 0,
    costs: Mapping[str, Cost] | None = None,
    category: Callable[[P], str | None] = lambda _: None,
    repeats: int = 1,
    warm_up: P | None = None,
    journal: Journal | None = None,
    listener: Listener | None = None,
) -> Bench:
    """Let every side answer every prompt ``repeats`` times, in turns. ``seed`` is the bootstrap's; ``costs`` make a
    bound. ``warm_up`` is answered by every side first and counted nowhere. Turns in an open ``journal`` are not made
    again; one in which a side failed is not written there.

    A side's EyasError costs its answer, three in a row the side. Ctrl-C ends the run with the turns that are whole.
    Raises UsageError without prompts, EnvironmentFault or Interrupted where nothing at all was measured.
    """
    assert sides, "nothing to time"
    if not prompts:
        raise UsageError("There are no prompts to time.", way_out="Name a prompt set or a file of prompts.")
    work = _Run(dict(sides), category, journal, listener)
    interrupted = False
    try:
        work.warm_up(warm_up, repeats * len(prompts))
        work.all_turns(prompts, repeats)
    except KeyboardInterrupt:
        interrupted = True
    if not work.turns:
        raise _nothing(work.faults, interrupted)
    return Bench(tuple(sides), tuple(work.turns), dict(costs or {}), seed, tuple(work.faults), interrupted)


def _nothing(faults: Sequence[Fault], interrupted: bool) -> EyasError:
    if interrupted or not faults:
        return Interrupted("Interrupted before one turn was whole.", way_out="Ask for fewer tokens, or wait.")
    first = faults[0]
    return EnvironmentFault(f"Nothing was measured. {first.side}: {first.why}", way_out="See to it and run again.")


@dataclass
class _Run(Generic[P]):
    sides: dict[str, Side[P]]
    category: Callable[[P], str | None]
    journal: Journal | None
    listener: Listener | None
    turns: list[Turn] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    in_a_row: Counter[str] = field(default_factory=Counter)
    given_up: set[str] = field(default_factory=set)

    def warm_up(self, prompt: P | None, turns: int) -> None:
        left = turns - (len(self.journal) if self.journal is not None else 0)
        if prompt is None or not left:
            return
        results = {name: result for name in self.sides if (result := self._asked(name, prompt)) is not None}
        if self.listener is not None:
            self.listener.warmed_up(results, left)

    def all_turns(self, prompts: Sequence[P], repeats: int) -> None:
        forth = tuple(self.sides)
        for repeat, number in _each(repeats, len(prompts)):
            if self._pointless():
                return
            order = forth if (repeat + number) % 2 == 0 else forth[::-1]
            turn = self._kept(repeat, number, prompts[number]) or self._turn(repeat, number, prompts[number], order)
            if turn.results:
                self.turns.append(turn)
            if self.listener is not None:
                self.listener.turn_done(len(self.turns))

    def _pointless(self) -> bool:
        """Is there nothing left to compare?"""
        alive = len(self.sides) - len(self.given_up)
        return next(iter(self.sides)) in self.given_up or alive == 0 or (alive == 1 and len(self.sides) > 1)

    def _turn(self, repeat: int, number: int, prompt: P, order: tuple[str, ...]) -> Turn:
        answers = {name: result for name in order if (result := self._asked(name, prompt)) is not None}
        results = {name: answers[name] for name in self.sides if name in answers}
        turn = Turn(prompt.id, order, results, number, self.category(prompt))
        if self.journal is not None and len(results) == len(self.sides):
            kept = {name: result.kept() for name, result in results.items()}
            self.journal.append({"id": _key(repeat, number), "order": list(order), "sides": kept})
        return turn

    def _kept(self, repeat: int, number: int, prompt: P) -> Turn | None:
        if self.journal is None or _key(repeat, number) not in self.journal:
            return None
        entry = self.journal.entry(_key(repeat, number))
        results = {name: _result(entry, name, self.journal) for name in self.sides}
        return Turn(prompt.id, tuple(entry["order"]), results, number, self.category(prompt))

    def _asked(self, name: str, prompt: P) -> SideResult | None:
        if name in self.given_up:
            return None
        try:
            result = self.sides[name](prompt)
        except EyasError as error:
            self._failed(name, prompt, error)
            return None
        self.in_a_row[name] = 0
        return result

    def _failed(self, name: str, prompt: Named, error: EyasError) -> None:
        self.in_a_row[name] += 1
        given_up = self.in_a_row[name] >= FAULTS_IN_A_ROW
        if given_up:
            self.given_up.add(name)
        fault = Fault(name, prompt.id, str(error), given_up)
        self.faults.append(fault)
        if self.listener is not None:
            self.listener.failed(fault)


def _each(repeats: int, prompts: int) -> Iterator[tuple[int, int]]:
    for repeat in range(repeats):
        for number in range(prompts):
            yield repeat, number


def _key(repeat: int, number: int) -> str:
    return f"{repeat}/{number}"


def _result(entry: Mapping[str, Any], name: str, journal: Journal) -> SideResult:
    try:
        return SideResult(**entry["sides"][name])
    except (KeyError, TypeError, AssertionError) as error:
        raise UsageError(
            f"{journal.path}, entry {entry['id']}: not an answer of {name} ({type(error).__name__}: {error}).",
            way_out="Remove the line, or name another folder.",
        ) from error
