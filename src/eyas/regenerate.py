"""The target answers: what users asked goes in, conversations with the target's own tokens come out.

    asked ── first turn ──> answerer ── answer ──> next turn, if there is one ──> answerer …
                                             └──> journal, a line a conversation ──> in the order asked

A conversation is journalled when its last turn is answered; whatever ends the process, the same call goes on with
those that are missing. An answer depends on the seed and its conversation's id, not on what else was asked, so the
result is the undisturbed one (in process up to ties: see ``decode.batch``).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eyas.answerers import Answerer
from eyas.answers import Answer, Ask, Refusal
from eyas.errors import EnvironmentFault, InputError, TemplateError, UsageError
from eyas.journal import Journal
from eyas.records import Record
from eyas.render import Renderer

SCHEMA = 1
MANY_REFUSED = 8  # and more than were answered: not single conversations are at fault


@dataclass(frozen=True)
class Asked:
    """What the user of one conversation says, turn by turn."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True)
class Answered:
    """A conversation the target answered. ``prompt_ids`` and ``token_ids`` are the last turn's, and together the
    whole text; ``spans`` (first, after the last) say where in it the target's own tokens are.

    ``unmatched`` counts earlier answers whose tokens the template does not render again as they were said; they are
    in no span. ``ids``: where token ids come from (``answers.Answer``), the worst of the turns.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    token_ids: list[int]
    spans: list[tuple[int, int]]
    finish_reason: str
    model: str
    ids: str
    unmatched: int


@dataclass(frozen=True)
class Plan:
    """What is left to do, before it is begun. ``most_tokens`` is a bound: answers end earlier."""

    conversations: int
    done: int
    turns: int
    most_tokens: int
    tokens_per_second: float | None

    @property
    def most_seconds(self) -> float | None:
        return self.most_tokens / self.tokens_per_second if self.tokens_per_second else None

    def __str__(self) -> str:
        kept = f" ({self.done} of {self.conversations} are answered already)" if self.done else ""
        said = f"{self.turns} turns to answer{kept}, at most {self.most_tokens:,} tokens"
        if self.most_seconds is None or self.tokens_per_second is None:
            return f"{said}; how fast is the endpoint's affair."
        return f"{said}: up to {math.ceil(self.most_seconds / 60)} min at {self.tokens_per_second:.0f} tokens/s."


@dataclass
class Progress:
    """Where a run stands; tokens and seconds are this run's alone."""

    conversations: int
    done: int = 0
    refused: int = 0
    first_refusal: str | None = None
    tokens: int = 0
    differing: int = 0
    """Answers re-tokenised from a text that their ids do not give back."""
    unmatched: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self.began, 1e-9)


def regenerate(
    asked: Iterable[Asked],
    answerer: Answerer,
    renderer: Renderer,
    folder: Path,
    *,
    max_positions: int,
    say: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[Answered]:
    """Answer what ``folder``'s journal does not hold yet; then give back all, in the order asked.

    ``asked`` is read several times (a list, or anything whose ``__iter__`` starts afresh) and never held. What
    cannot be answered (a prompt longer than ``max_positions``, a template that refuses it, an endpoint that does)
    is journalled with its reason, counted in ``progress`` and left out. Raises UsageError for a journal of other
    questions, another target or other sampling, EnvironmentFault when an endpoint gives up.
    """
    with answerer, Journal(folder, _header(asked, answerer, renderer)) as journal:
        run = _Run(asked, answerer, renderer, journal, max_positions)
        say(run.plan())
        run.answer_all(progress)
        yield from _answered(asked, journal)


def record_from_answer(answered: Answered) -> Record:
    """The record of an answered conversation: its own ids, the answers' spans supervised."""
    ids = np.asarray([*answered.prompt_ids, *answered.token_ids], dtype=np.int32)
    mask = np.zeros(len(ids), dtype=bool)
    for first, end in answered.spans:
        mask[first:end] = True
    return Record(ids, mask, answered.source)


# -- one conversation -----------------------------------------------------------------------------------------


class Talk:
    """A conversation on its way: turns asked one after the other, as long as the target ends its answers itself."""

    def __init__(self, asked: Asked, renderer: Renderer, max_positions: int) -> None:
        self.asked = asked
        self.messages: list[dict[str, str]] = []
        if asked.system is not None:
            self.messages.append({"role": "system", "content": asked.system})
        self._renderer, self._max_positions = renderer, max_positions
        self._heard: list[tuple[Ask, Answer]] = []

    def next(self) -> Ask | None:
        """The next turn; None when the conversation is at its end or its text at the target's."""
        turn = len(self._heard)
        if turn == len(self.asked.turns) or (self._heard and self._heard[-1][1].finish_reason == "length"):
            return None
        said = {"role": "user", "content": self.asked.turns[turn]}
        prompt_ids = self._renderer.ids([*self.messages, said], prompt=True)
        if len(prompt_ids) >= self._max_positions:
            if self._heard:
                return None
            raise InputError(
                f"Its prompt has {len(prompt_ids)} tokens, the target {self._max_positions} positions.",
                way_out="Leave it out.",
            )
        self.messages.append(said)
        return Ask(f"{self.asked.id}#{turn}", tuple(prompt_ids), tuple(self.messages))

    def hear(self, ask: Ask, answer: Answer) -> None:
        text = answer.text
        if text is None:
            text = self._renderer.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if answer.finish_reason == "length":
                text = text.rstrip("\ufffd")  # the limit may cut a character of several tokens in two
        self.messages.append({"role": "assistant", "content": text})
        self._heard.append((ask, answer))

    def answered(self, model: str) -> Answered:
        (ask, answer), earlier = self._heard[-1], self._heard[:-1]
        whole = [*ask.prompt_ids, *answer.token_ids]
        spans, unmatched = [], 0
        for before, said in earlier:
            first, end = len(before.prompt_ids), len(before.prompt_ids) + len(said.token_ids)
            if whole[:end] == [*before.prompt_ids, *said.token_ids]:
                spans.append((first, end))
            else:
                unmatched += 1
        spans.append((len(ask.prompt_ids), len(whole)))
        return Answered(
            id=self.asked.id,
            source=self.asked.source,
            messages=self.messages,
            prompt_ids=list(ask.prompt_ids),
            token_ids=list(answer.token_ids),
            spans=spans,
            finish_reason=answer.finish_reason,
            model=model,
            ids=max((said.ids for _, said in self._heard), key=("target", "text", "text-differs").index),
            unmatched=unmatched,
        )


# -- the run --------------------------------------------------------------------------------------------------


class _Run:
    def __init__(
        self, asked: Iterable[Asked], answerer: Answerer, renderer: Renderer, journal: Journal, max_positions: int
    ) -> None:
        self.asked, self.answerer, self.renderer, self.journal = asked, answerer, renderer, journal
        self.max_positions = max_positions
        self._talks: dict[str, tuple[Talk, Ask]] = {}

    def plan(self) -> Plan:
        conversations = turns = 0
        sample: Ask | None = None
        for one in self.asked:
            conversations += 1
            if one.id not in self.journal:
                turns += len(one.turns)
                sample = sample or self._sample(one)
        most = turns * int(self.answerer.pins()["max_new_tokens"])
        return Plan(conversations, len(self.journal), turns, most, self.answerer.rate(sample) if sample else None)

    def _sample(self, one: Asked) -> Ask | None:
        try:
            return Talk(one, self.renderer, self.max_positions).next()
        except InputError:
            return None

    def answer_all(self, progress: Callable[[Progress], None]) -> None:
        """Ask, listen and journal until every conversation is in the journal."""
        state = Progress(sum(1 for _ in self.asked), len(self.journal))
        waiting = (one for one in self.asked if one.id not in self.journal)
        try:
            while True:
                begun = list(islice(waiting, self.answerer.wants))
                for one in begun:
                    self._ask(Talk(one, self.renderer, self.max_positions), state)
                if not begun and not self._talks:
                    break
                for reply in self.answerer.take() if self._talks else ():
                    self._go_on(reply, state)
                progress(state)
        except EnvironmentFault as fault:
            raise EnvironmentFault(
                f"{fault.message} {state.done} of {state.conversations} conversations are in {self.journal.path}.",
                way_out="Run the same command again: it goes on from there.",
            ) from fault
        progress(state)

    def _ask(self, talk: Talk, state: Progress) -> None:
        """Submit a conversation's next turn, or end it."""
        try:
            ask = talk.next()
        except (InputError, TemplateError) as error:
            self._refuse(talk, error.message, state)
            return
        if ask is None:
            done = talk.answered(self.answerer.model)
            self.journal.append(asdict(done))
            state.done += 1
            state.differing += done.ids == "text-differs"
            state.unmatched += done.unmatched
        else:
            self._talks[ask.id] = (talk, ask)
            self.answerer.submit(ask)

    def _go_on(self, reply: Answer | Refusal, state: Progress) -> None:
        talk, ask = self._talks.pop(reply.id)
        if isinstance(reply, Refusal):
            self._refuse(talk, reply.reason, state)
            if state.refused >= MANY_REFUSED and state.refused > state.done - state.refused:
                raise UsageError(
                    f"{state.refused} of {state.done} conversations were refused: {reply.reason}.",
                    way_out=f"Mend that, remove {self.journal.path} and run the same command again.",
                )
            return
        state.tokens += len(reply.token_ids)
        talk.hear(ask, reply)
        self._ask(talk, state)

    def _refuse(self, talk: Talk, reason: str, state: Progress) -> None:
        self.journal.append({"id": talk.asked.id, "source": talk.asked.source, "refused": reason})
        state.done += 1
        state.refused += 1
        state.first_refusal = state.first_refusal or reason


def _answered(asked: Iterable[Asked], journal: Journal) -> Iterator[Answered]:
    """What was answered, in the order asked. Raises InputError where nothing was."""
    reason, given = "", 0
    for one in asked:
        row = journal.entry(one.id)
        if "refused" in row:
            reason = reason or row["refused"]
        else:
            given += 1
            yield Answered(**{**row, "spans": [tuple(span) for span in row["spans"]]})
    if not given:
        raise InputError(f"None of {len(journal)} conversations could be answered.", way_out=f"The first: {reason}")


def _header(asked: Iterable[Asked], answerer: Answerer, renderer: Renderer) -> dict[str, Any]:
    """What everything in a journal shares. Raises InputError where two conversations have one id, or none is there."""
    digest, ids = hashlib.sha256(), set[str]()
    for one in asked:
        if one.id in ids:
            raise InputError(f"Two conversations have the id {one.id!r}.", way_out="Give every conversation its own.")
        if not one.turns:
            raise InputError(f"Conversation {one.id!r} asks nothing.", way_out="Give it a turn of the user's.")
        ids.add(one.id)
        digest.update(json.dumps(asdict(one), sort_keys=True).encode() + b"\n")
    if not ids:
        raise InputError("There is nothing to answer.", way_out="Name an input with conversations or prompts in it.")
    return {"schema": SCHEMA, **answerer.pins(), **renderer.hashes(), "input_sha256": digest.hexdigest()}
