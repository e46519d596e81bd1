"""Conversations become records: token ids with a mask of what the target said.

The mask comes from renderings of the tokenizer's own chat template, never from patterns in the text. For each
assistant turn the conversation is rendered up to the turn with the generation prompt, and again with the turn; the
tokens of the second beyond the first are the turn:

    render(messages[:i], generation prompt)   <|im_start|>user … <|im_end|> <|im_start|>assistant
    render(messages[:i+1])                    <|im_start|>user … <|im_end|> <|im_start|>assistant  Hello ! <|im_end|> ⏎
    turn                                                                                           └─ supervised ┘  glue

A template whose shorter rendering is not a token prefix of the longer one cannot be masked this way; the sample is
named and refused. Of a turn, what follows the last end-of-generation token is glue that no engine ever generates and
is not supervised; of a turn whose answer was cut by a length limit (``finish_reason: "length"``) the end token is not
supervised either, since the target never said it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from eyas import files, provenance
from eyas.errors import RecordsError, TemplateError, nearest

KEYS = ("input_ids", "loss_mask", "seq_len", "n_prompt_tokens", "n_response_tokens", "source")
CONVERSATION_KEYS = ("messages", "conversations")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
}
RAW_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
SYNONYMS = {"token_ids": "input_ids", "ids": "input_ids", "tokens": "input_ids", "mask": "loss_mask"}


@dataclass(frozen=True, eq=False)
class Record:
    """One tokenised conversation. Arrays are int32 and bool [T]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    @property
    def id(self) -> str:
        """First 16 hex digits of the sha256 of the ids as little-endian int64."""
        return hashlib.sha256(self.input_ids.astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def seq_len(self) -> int:
        return len(self.input_ids)

    @property
    def n_response_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def prompt_hash(self) -> str:
        """Hash of the tokens before the first supervised one: equal for equal prompts, whatever was answered."""
        first = int(self.loss_mask.argmax())
        return hashlib.sha256(self.input_ids[:first].astype("<i8").tobytes()).hexdigest()

    def spans(self) -> list[tuple[int, int]]:
        """Supervised stretches as (first, last) positions, last included."""
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.loss_mask.astype(np.int8), [0]))))
        return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def to_json(self) -> dict[str, Any]:
        n = self.n_response_tokens
        return {
            "input_ids": self.input_ids.tolist(),
            "loss_mask": self.loss_mask.astype(int).tolist(),
            "seq_len": self.seq_len,
            "n_prompt_tokens": self.seq_len - n,
            "n_response_tokens": n,
            "source": self.source,
        }


class Message(BaseModel):
    """One turn in OpenAI form; other keys (names, tool ids) are kept for the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str


# -- conversations in -----------------------------------------------------------------------------------------


def messages_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns of a row in OpenAI ``messages`` or ShareGPT ``conversations`` form."""
    key = next((k for k in CONVERSATION_KEYS if k in row), None)
    if key is None:
        raise RecordsError(f"{where}: no conversation in it. {_keys_present(row)}", way_out=_expected())
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise RecordsError(
            f"{where}: {key!r} is {type(turns).__name__} of length {len(turns) if isinstance(turns, list) else 0}, "
            "a non-empty list of turns was expected.",
            way_out=_expected(),
        )
    return [_message(turn, f"{where}, turn {i + 1}") for i, turn in enumerate(turns)]


def _message(turn: object, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RecordsError(f"{where}: {type(turn).__name__} where an object was expected.", way_out=_expected())
    if "role" in turn or "content" in turn:
        role, content = turn.get("role"), turn.get("content")
        extra = {k: v for k, v in turn.items() if k not in ("role", "content")}
    elif "from" in turn or "value" in turn:
        role, content, extra = SHAREGPT_ROLES.get(str(turn.get("from")).lower()), turn.get("value"), {}
        if role is None:
            raise RecordsError(
                f"{where}: speaker {turn.get('from')!r} is not one we know.",
                way_out=f"Known: {', '.join(sorted(SHAREGPT_ROLES))}.",
            )
    else:
        raise RecordsError(f"{where}: neither role/content nor from/value. {_keys_present(turn)}", way_out=_expected())
    if not isinstance(role, str) or not isinstance(content, str):
        raise RecordsError(
            f"{where}: role {role!r} and content of type {type(content).__name__}; both must be text.",
            way_out="Write tool results and parts of a message as one text.",
        )
    return Message(role=role, content=content, **extra).model_dump()


def _keys_present(row: Mapping[str, Any]) -> str:
    keys = list(row)
    for key in keys:
        close = nearest(key, (*CONVERSATION_KEYS, *KEYS))
        if close and close not in keys:
            return f"Its keys are {', '.join(keys)}; {key!r} is nearest to {close!r}."
    return f"Its keys are {', '.join(keys) or 'none'}."


def _expected() -> str:
    return (
        'Expected {"messages": [{"role": "user", "content": "…"}, …]}, ShareGPT {"conversations": [{"from": "human", '
        '"value": "…"}, …]}, or a record with input_ids and loss_mask.'
    )


class Renderer:
    """A tokenizer and its chat template: messages to token ids, and messages to a record."""

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

    def hashes(self) -> dict[str, str]:
        """The two facts of a contract that fix how text becomes tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return {
            "template_sha256": provenance.sha256_text(str(self.template)),
            "tokenizer_sha256": provenance.sha256_text(rules),
        }

    def text(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=prompt
            )
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"The chat template refuses this conversation: {error}.",
                way_out="Mend the order of roles, or pass --skip-bad to leave such conversations out.",
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def ids(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> list[int]:
        encoded = self.tokenizer(self.text(messages, prompt=prompt), add_special_tokens=False)
        return list(encoded["input_ids"])

    def record(self, messages: Sequence[Mapping[str, Any]], source: str, *, cut: bool, where: str) -> Record:
        """Mask every assistant turn; ``cut`` says that the last one ended at a length limit."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
        if last is None:
            raise RecordsError(
                f"{where}: no assistant turn, nothing to learn from.", way_out="Let the target answer first."
            )
        messages = messages[: last + 1]
        whole = self.ids(messages, prompt=False)
        mask = np.zeros(len(whole), dtype=bool)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.ids(messages[:i], prompt=True)
            after = whole if i == last else self.ids(messages[: i + 1], prompt=False)
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise TemplateError(
                    f"{where}, turn {i + 1}: this template is not prefix-stable here (rendering fewer turns is not a "
                    "prefix of rendering more), so what the target said cannot be told from what the template adds.",
                    way_out="Pass --skip-bad to leave such conversations out, or --template FILE with a stable one.",
                )
            mask[len(before) : len(before) + self._said(after[len(before) :], cut=cut and i == last)] = True
        end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else len(whole)
        if not mask.any():
            raise RecordsError(f"{where}: every assistant turn is empty.", way_out="Remove it, or pass --skip-bad.")
        return Record(np.asarray(whole[:end], dtype=np.int32), mask[:end], source)

    def _said(self, turn: Sequence[int], *, cut: bool) -> int:
        """How many tokens of a turn the target generated itself."""
        ends = [i for i, token in enumerate(turn) if token in self.eos_ids]
        if not ends:
            return len(turn)
        return ends[-1] if cut else ends[-1] + 1


# -- records already tokenised --------------------------------------------------------------------------------


def record_of(row: Mapping[str, Any], where: str, vocab_size: int | None) -> Record:
    """A record from a JSON object; the usual misspellings of its keys are understood."""
    row = {SYNONYMS.get(k, k) if SYNONYMS.get(k, k) not in row else k: v for k, v in row.items()}
    for key in ("input_ids", "loss_mask"):
        if key not in row:
            raise RecordsError(f"{where}: no {key!r}. {_keys_present(row)}", way_out=_expected())
    ids, mask = (
        _integers(row["input_ids"], f"{where}: input_ids"),
        _integers(row["loss_mask"], f"{where}: loss_mask"),
    )
    if len(ids) != len(mask):
        raise RecordsError(
            f"{where}: loss_mask has {len(mask)} entries for {len(ids)} tokens.",
            way_out="Both must be of one length; write the records again, or pass --skip-bad.",
        )
    if "seq_len" in row and row["seq_len"] != len(ids):
        raise RecordsError(
            f"{where}: seq_len says {row['seq_len']!r}, input_ids has {len(ids)} tokens: the line was cut or mixed up.",
            way_out="Write the records again, or pass --skip-bad.",
        )
    largest = (vocab_size or 2**31) - 1  # ids are kept as int32
    if ids.min() < 0 or ids.max() > largest:
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        whose = "the target's vocabulary" if vocab_size else "any vocabulary"
        raise RecordsError(
            f"{where}: token id {bad} is outside {whose} (0 to {largest}).",
            way_out="These records were made with another tokenizer; prepare them again with this target.",
        )
    if not set(np.unique(mask)) <= {0, 1}:
        raise RecordsError(
            f"{where}: loss_mask holds values other than 0 and 1.", way_out="Use 1 for supervised tokens."
        )
    if not mask.any():
        raise RecordsError(
            f"{where}: loss_mask is zero everywhere, so nothing in it can be learnt or measured.",
            way_out="Check how the mask was made (a template that did not match?), or pass --skip-bad.",
        )
    return Record(ids.astype(np.int32), mask.astype(bool), str(row.get("source", "unknown")))


def _integers(value: object, where: str) -> np.ndarray:
    if not isinstance(value, list):
        raise RecordsError(f"{where} is {type(value).__name__}, a list of integers was expected.", way_out=_expected())
    if not value:
        raise RecordsError(f"{where} is empty.", way_out="Remove the line, or pass --skip-bad.")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths inside
        array = np.empty(0, dtype=object)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise RecordsError(
            f"{where} holds more than integers.", way_out="Token ids and masks are flat lists of integers."
        )
    return array.astype(np.int64)


def stream(path: Path, *, vocab_size: int | None = None) -> Iterator[Record]:
    """Records of a JSON-lines file (``.gz`` too), one by one. Raises RecordsError naming the line."""
    for number, line in files.read_lines(path):
        if line.strip():
            yield record_of(files.parse_json_line(path, number, line), f"{path}, line {number}", vocab_size)


def read(path: Path, *, vocab_size: int | None = None, limit: int | None = None) -> list[Record]:
    """The first ``limit`` records of a file, or all. As ``stream``; an empty file is an error."""
    found = list(islice(stream(path, vocab_size=vocab_size), limit))
    if not found:
        raise RecordsError(f"{path} holds no records.", way_out="Run `eyas prepare` on conversations first.")
    return found


def fit(records: Iterable[Record], max_positions: int) -> Iterator[Record]:
    """Records cut to what the target can attend to; one left without supervision is dropped."""
    for record in records:
        cut = replace(record, input_ids=record.input_ids[:max_positions], loss_mask=record.loss_mask[:max_positions])
        if cut.loss_mask.any():
            yield cut
