"""``eyas prepare --regenerate``: what the inputs ask goes out as rows of the target's own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.answerers import Answerer
    from eyas.errors import InputError
    from eyas.regenerate import Asked
    from eyas.render import Renderer
    from eyas.sources import Row

Read = Callable[[], Iterable["Row"]]


@dataclass(frozen=True)
class Questions:
    """What the rows ask, from the top every time it is gone through; rows that ask nothing are passed over."""

    read: Read

    def __iter__(self) -> Iterator[Asked]:
        for index, row in enumerate(self.read()):
            found = question(str(index), row)
            if not isinstance(found, Exception):
                yield found


def question(id: str, row: Row) -> Asked | InputError:
    """What one row asks, or why it cannot be asked."""
    from eyas.conversations import asked
    from eyas.errors import InputError, RecordsError
    from eyas.regenerate import Asked

    if row.error is not None:
        return row.error
    try:
        said = asked(row.data, row.where)
    except InputError as error:
        return error
    system = [message["content"] for message in said if message["role"] != "user"]
    if len(system) > 1 or (system and said[0]["role"] == "user"):
        return RecordsError(
            f"{row.where}: {len(system)} system turns, at most one at the beginning was expected.",
            way_out="Join them at the beginning, or pass --skip-bad.",
        )
    turns = tuple(message["content"] for message in said if message["role"] == "user")
    return Asked(id, str(row.data.get("source", row.source)), turns, system[0] if system else None)


def answered_rows(
    read: Read, answerer: Answerer, renderer: Renderer, journal: Path, *, max_positions: int
) -> Iterator[Row]:
    """Rows that cannot be asked, as errors, before anything is answered; then one row a conversation answered."""
    from eyas.errors import InputError
    from eyas.regenerate import record_from_answer, regenerate
    from eyas.sources import Row

    for index, row in enumerate(read()):
        if isinstance(error := question(str(index), row), InputError):
            yield Row(row.where, row.source, error=error)
    with Drawn() as drawn:
        answers = regenerate(
            Questions(read),
            answerer,
            renderer,
            journal,
            max_positions=max_positions,
            say=drawn.plan,
            progress=drawn.moved,
        )
        for answer in answers:
            yield Row(f"the answer to conversation {answer.id}", answer.source, record_from_answer(answer).to_json())
    drawn.conclude(journal)


class Drawn:
    """The answering as a progress bar, on standard error."""

    def __init__(self) -> None:
        speed = TextColumn("{task.fields[tokens]:,} tokens  {task.fields[speed]:.0f} tokens/s")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
        self._bar = Progress(*columns, console=common.err, transient=True)
        self._task = self._bar.add_task("answering", total=None, tokens=0, speed=0.0)
        self._last: Any = None

    def __enter__(self) -> Drawn:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, plan: Any) -> None:
        common.note(str(plan))
        self._bar.update(self._task, total=plan.conversations)

    def moved(self, state: Any) -> None:
        self._last = state
        self._bar.update(self._task, completed=state.done, tokens=state.tokens, speed=state.tokens_per_second)

    def conclude(self, journal: Path) -> None:
        state = self._last
        if state is None:
            return
        common.note(
            f"{state.tokens:,} tokens at {state.tokens_per_second:.0f} tokens/s; answers are kept in {journal}."
        )
        if state.refused:
            common.note(f"{state.refused} conversations were not answered, the first: {state.first_refusal}")
        if state.differing:
            common.note(f"{state.differing} answers were tokenised again from a text that their ids do not give back.")
        if state.unmatched:
            common.note(f"{state.unmatched} earlier turns are not supervised: the template renders them otherwise.")
