"""One row becomes its records, whatever form it is in, none longer than asked; what was done to it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from eyas.conversations import Conversation, conversation_of, form_of
from eyas.errors import RecordsError
from eyas.preformatted import Preformatted
from eyas.records import Record, fit, record_of
from eyas.render import Renderer
from eyas.sources import Row

TooLong = Literal["cut", "drop", "split"]
TOO_LONG: tuple[TooLong, ...] = ("cut", "drop", "split")


@dataclass
class Made:
    """The records of a row. ``prompt_hash`` is one for all of them, so that they land on one side of the split.

    ``events`` counts ``cut``, ``dropped``, ``split`` (at turns, for length) and ``apart`` (a record a turn, since the
    template renders earlier turns otherwise).
    """

    form: str
    prompt_hash: str
    records: list[Record] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class Converter:
    """Rows to records of at most ``max_length`` tokens."""

    def __init__(self, renderer: Renderer, *, vocab_size: int, max_length: int, too_long: TooLong = "cut") -> None:
        self.renderer, self.vocab_size = renderer, vocab_size
        self.max_length, self.too_long = max_length, too_long

    def made(self, row: Row) -> Made:
        """Raises InputError, with the row's place, where nothing can be made of it."""
        if row.error is not None:
            raise row.error
        form = form_of(row.data)
        source = str(row.data.get("source") or row.source)
        if form == "record":
            return self._fitted(form, [record_of({**row.data, "source": source}, row.where, self.vocab_size)])
        if form == "text":
            return self._of_text(row, source)
        conversation = conversation_of(row.data, row.where)
        if self.renderer.is_raw and (sides := _completion(conversation)):
            record = self.renderer.completion(*sides, source, cut=conversation.cut, where=row.where)
            return self._fitted("completion", [record])
        return self._of_turns(conversation, source, row.where)

    @cached_property
    def _preformatted(self) -> Preformatted:
        return Preformatted(self.renderer)

    def _of_text(self, row: Row, source: str) -> Made:
        text = row.data["text"]
        if not isinstance(text, str):
            raise RecordsError(
                f"{row.where}: 'text' is {type(text).__name__}, text was expected.", way_out="Mend it, or --skip-bad."
            )
        if self.renderer.is_raw:
            record = self.renderer.raw_text(text, source, row.where)
            if self.too_long == "split" and record.seq_len > self.max_length:
                return _split(Made("text", record.prompt_hash, list(_windows(record, self.max_length))))
            return self._fitted("text", [record])
        cut = (row.data.get("finish_reason") or row.data.get("finish")) == "length"
        return self._fitted("preformatted", [self._preformatted.record(text, source, cut=cut, where=row.where)])

    # -- conversations ----------------------------------------------------------------------------------------

    def _of_turns(self, conversation: Conversation, source: str, where: str) -> Made:
        records = self._rendered(conversation, conversation.messages, source, where)
        if self.too_long != "split" or self._all_fit(records):
            made = self._fitted(conversation.form, records)
        else:
            made = _split(Made(conversation.form, records[0].prompt_hash))
            for part in self._parts(conversation, source, where):
                self._fit(part, made)
        made.events["apart"] += len(records) > 1
        return made

    def _rendered(
        self, conversation: Conversation, messages: list[dict[str, Any]], source: str, where: str
    ) -> list[Record]:
        ends_it = messages[-1] is conversation.messages[-1]
        return self.renderer.records(
            messages, source, cut=conversation.cut and ends_it, where=where, tools=conversation.tools
        )

    def _parts(self, conversation: Conversation, source: str, where: str) -> Iterator[list[Record]]:
        """Runs of whole exchanges, each as long as fits, each behind the system's turn; what came before is lost."""
        system, exchanges = _exchanges(conversation.messages)
        while exchanges:
            taken, part = 1, self._rendered(conversation, system + exchanges[0], source, where)
            while taken < len(exchanges):
                messages = system + [m for exchange in exchanges[: taken + 1] for m in exchange]
                longer = self._rendered(conversation, messages, source, where)
                if not self._all_fit(longer):
                    break
                taken, part = taken + 1, longer
            yield part
            exchanges = exchanges[taken:]

    # -- length -----------------------------------------------------------------------------------------------

    def _all_fit(self, records: list[Record]) -> bool:
        return all(record.seq_len <= self.max_length for record in records)

    def _fitted(self, form: str, records: list[Record]) -> Made:
        made = Made(form, records[0].prompt_hash)
        self._fit(records, made)
        return made

    def _fit(self, records: list[Record], made: Made) -> None:
        """What is too long is dropped or cut; cut where nothing is left to learn, it is dropped too."""
        for record in records:
            if record.seq_len <= self.max_length:
                made.records.append(record)
                continue
            kept = [] if self.too_long == "drop" else list(fit([record], self.max_length))
            made.records += kept
            made.events["cut" if kept else "dropped"] += 1


def _split(made: Made) -> Made:
    made.events["split"] += 1
    return made


def _completion(conversation: Conversation) -> tuple[str, str] | None:
    """Prompt and answer of a record that is one of each, in plain text."""
    if conversation.form not in ("completion", "alpaca"):
        return None
    if [m["role"] for m in conversation.messages] != ["user", "assistant"]:
        return None
    prompt, answer = conversation.messages
    return prompt["content"], answer["content"]


def _exchanges(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The system's turns, and the rest cut before each user turn that follows an answer."""
    n = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    exchanges: list[list[dict[str, Any]]] = []
    for message in messages[n:]:
        is_new = message["role"] == "user" and exchanges and exchanges[-1][-1]["role"] == "assistant"
        if is_new or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    answered = [e for e in exchanges if any(m["role"] == "assistant" for m in e)]
    return messages[:n], answered


def _windows(record: Record, length: int) -> Iterator[Record]:
    """Stretches of plain text, one behind the other; the first token of each is only read."""
    for start in range(0, record.seq_len - 1, length):
        ids = record.input_ids[start : start + length]
        if len(ids) > 1:
            yield replace(record, input_ids=ids, loss_mask=np.arange(len(ids)) > 0)
