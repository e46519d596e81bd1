"""Messages become token ids, and records with a mask of what the target said.

The mask comes from renderings of the tokenizer's own chat template, never from patterns in the text. For each
assistant turn the conversation is rendered up to the turn with the generation prompt, and again with the turn; the
tokens of the second beyond the first are the turn:

    render(messages[:i], generation prompt)   <|im_start|>user … <|im_end|> <|im_start|>assistant
    render(messages[:i+1])                    <|im_start|>user … <|im_end|> <|im_start|>assistant  Hello ! <|im_end|> ⏎
    turn                                                                                           └─ supervised ┘  glue

Of a turn, what follows the last end-of-generation token is glue that no engine ever generates and is not supervised; of
a turn whose answer was cut by a length limit (``finish_reason: "length"``) the end token is not supervised either,
since the target never said it.

A template that renders a turn otherwise once another follows (thinking stripped from earlier turns) has no one
rendering of the conversation in which every turn is what the target said. Such a conversation becomes a record a turn:
the prompt an engine would have been given at that turn, and the answer. A turn that is not beyond its own prompt even
then cannot be masked; the conversation is named and refused.

Calls of tools, their results and thinking are handed to the template. What a template does not know (found by probe
renderings) is written into the text instead, as Qwen and Hermes write it:

    tool_calls          <tool_call>⏎{"name": …, "arguments": …}⏎</tool_call>          behind the turn's content
    role tool           a user turn of <tool_response>⏎…⏎</tool_response>
    reasoning_content   <think>⏎…⏎</think>⏎⏎                                          before the turn's content
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from eyas import provenance
from eyas.errors import RecordsError, TemplateError
from eyas.records import Record

RAW_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None


class NotPrefixStable(TemplateError):
    """Rendering fewer turns is not a prefix of rendering more."""


@dataclass(frozen=True)
class Knows:
    """What a template renders of a turn besides role and content."""

    calls: bool
    results: bool
    thinking: bool


class Renderer:
    """A tokenizer and its chat template: messages to token ids, and messages to records."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.template = template or tokenizer.chat_template
        if not self.template:
            raise TemplateError(
                "The target's tokenizer has no chat template, so conversations have no text.",
                way_out="Pass --template FILE with a jinja chat template, or --raw to join the turns as plain text.",
            )

    @property
    def is_raw(self) -> bool:
        return self.template == RAW_TEMPLATE

    def hashes(self) -> dict[str, str]:
        """The two facts of a contract that fix how text becomes tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return {
            "template_sha256": provenance.sha256_text(str(self.template)),
            "tokenizer_sha256": provenance.sha256_text(rules),
        }

    def text(self, messages: Messages, *, prompt: bool, tools: Tools = None) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                self.spoken(messages),
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(
                f"The chat template refuses this conversation: {error}.",
                way_out="Mend the order of roles, or pass --skip-bad to leave such conversations out.",
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def ids(self, messages: Messages, *, prompt: bool, tools: Tools = None) -> list[int]:
        ids = self.plain_ids(self.text(messages, prompt=prompt, tools=tools))
        return [*self.start, *ids] if self.is_raw else ids

    def plain_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def start(self) -> list[int]:
        """What the tokenizer puts before plain text: nothing, or its token for the beginning."""
        return [i for i in self.tokenizer("")["input_ids"] if i == self.tokenizer.bos_token_id]

    # -- records ----------------------------------------------------------------------------------------------

    def record(self, messages: Messages, source: str, *, cut: bool, where: str, tools: Tools = None) -> Record:
        """Mask every assistant turn; ``cut`` says that the last one ended at a length limit."""
        answers = _answers(messages, where)
        return self._record(messages[: answers[-1] + 1], answers, source, cut, where, tools)

    def records(self, messages: Messages, source: str, *, cut: bool, where: str, tools: Tools = None) -> list[Record]:
        """One record, or one a turn where the template is not prefix-stable."""
        try:
            return [self.record(messages, source, cut=cut, where=where, tools=tools)]
        except NotPrefixStable:
            answers = _answers(messages, where)
            if len(answers) == 1:
                raise
        return [self._record(messages[: i + 1], [i], source, cut and i == answers[-1], where, tools) for i in answers]

    def _record(
        self, messages: Messages, answers: Sequence[int], source: str, cut: bool, where: str, tools: Tools
    ) -> Record:
        whole = self.ids(messages, prompt=False, tools=tools)
        mask = np.zeros(len(whole), dtype=bool)
        last = len(messages) - 1
        for i in answers:
            before = self.ids(messages[:i], prompt=True, tools=tools)
            after = whole if i == last else self.ids(messages[: i + 1], prompt=False, tools=tools)
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise NotPrefixStable(
                    f"{where}, turn {i + 1}: this template is not prefix-stable here (rendering fewer turns is not a "
                    "prefix of rendering more), so what the target said cannot be told from what the template adds.",
                    way_out="Pass --skip-bad to leave such conversations out, or --template FILE with a stable one.",
                )
            mask[len(before) : len(before) + self._said(after[len(before) :], cut=cut and i == last)] = True
        if not mask.any():
            raise RecordsError(f"{where}: every assistant turn is empty.", way_out="Remove it, or pass --skip-bad.")
        end = int(np.flatnonzero(mask)[-1]) + 1
        return Record(np.asarray(whole[:end], dtype=np.int32), mask[:end], source)

    def _said(self, turn: Sequence[int], *, cut: bool) -> int:
        """How many tokens of a turn the target generated itself."""
        ends = [i for i, token in enumerate(turn) if token in self.eos_ids]
        if not ends:
            return len(turn)
        return ends[-1] if cut else ends[-1] + 1

    def raw_text(self, text: str, source: str, where: str) -> Record:
        """Text that nobody was asked for: every token but the first is supervised. Off-policy by nature."""
        ids = np.asarray([*self.start, *self.plain_ids(text)], dtype=np.int32)
        if len(ids) < 2:
            raise RecordsError(f"{where}: {len(ids)} tokens of text.", way_out="Remove it, or pass --skip-bad.")
        return Record(ids, np.arange(len(ids)) > 0, source)

    def completion(self, prompt: str, answer: str, source: str, *, cut: bool, where: str) -> Record:
        """A prompt and what was written behind it, without a template: tokenised apart, as an engine would."""
        before, said = [*self.start, *self.plain_ids(prompt)], self.plain_ids(answer)
        end = self.tokenizer.eos_token_id
        if end is not None and not cut:
            said.append(int(end))
        if not said or not before:
            raise RecordsError(f"{where}: nothing is said in it.", way_out="Remove it, or pass --skip-bad.")
        ids = np.asarray(before + said, dtype=np.int32)
        return Record(ids, np.arange(len(ids)) >= len(before), source)

    # -- what the template does not know ----------------------------------------------------------------------

    def spoken(self, messages: Messages) -> list[dict[str, Any]]:
        """The turns as this template can render them whole: see the head of the module."""
        if not any(m["role"] == "tool" or m.keys() & {"tool_calls", "reasoning_content"} for m in messages):
            return [dict(m) for m in messages]
        turns: list[dict[str, Any]] = []
        for message in messages:
            turn = self._spoken(message)
            is_result = message["role"] == "tool" and turn["role"] == "user"
            if is_result and turns and turns[-1]["role"] == "user":
                turns[-1]["content"] += "\n" + turn["content"]  # many templates refuse two users in a row
            else:
                turns.append(turn)
        return turns

    def _spoken(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn, knows = dict(message), self.knows
        if thought := turn.get("reasoning_content"):
            if knows.thinking:
                turn["thinking"] = thought  # templates read one of the two names; newer transformers fill in both
            else:
                del turn["reasoning_content"]
                turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
        if "tool_calls" in turn and not knows.calls:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.pop("tool_calls")]
            text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
        if turn["role"] == "tool" and not knows.results:
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        return turn

    @cached_property
    def knows(self) -> Knows:
        """By probes: a word hidden in a call, in a result, in thinking; is it in the rendering?"""
        word = "cormorant"
        user = {"role": "user", "content": "?"}
        call = {"type": "function", "id": "call00000", "function": {"name": word, "arguments": {}}}
        calls = self._renders(word, [user, {"role": "assistant", "content": "", "tool_calls": [call]}])
        called = {"tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}]} if calls else {}
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": word}
        results = self._renders(word, [user, {"role": "assistant", "content": "", **called}, result])
        thought = {"role": "assistant", "content": "!", "reasoning_content": word, "thinking": word}
        return Knows(calls, results, self._renders(word, [user, thought]))

    def _renders(self, word: str, messages: list[dict[str, Any]]) -> bool:
        try:
            return word in str(
                self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False)
            )
        except (jinja2.TemplateError, TypeError):
            return False


def _answers(messages: Messages, where: str) -> list[int]:
    found = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not found:
        raise RecordsError(
            f"{where}: no assistant turn, nothing to learn from.",
            way_out="Pass --regenerate to let the target answer, or give conversations with answers.",
        )
    return found
