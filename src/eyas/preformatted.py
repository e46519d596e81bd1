"""Text in which a chat template is applied already becomes a record.

What opens and what closes an answer is taken from renderings of probe messages with the target's own template, as token
sequences; answers are what stands between the two in the text's tokens. So a text and the conversation it was rendered
from give the same record (``Renderer.record``).

    render([user]), with and without the generation prompt     … <|im_end|> ⏎ │ <|im_start|> assistant ⏎     opens
    render([user, A]) and render([user, B]), from the end       A │ <|im_end|> ⏎                              closes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np

from eyas.conversations import TURN_MARKERS
from eyas.errors import RecordsError, TemplateError
from eyas.records import Record
from eyas.render import Renderer

T = TypeVar("T")


class Preformatted:
    """The marks of one template, and records from text that it rendered."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        one, other = ({"role": "user", "content": text} for text in ("Is it?", "42 geese"))
        self.opening, self.opening_text = self._opening(one, other)
        ends = [renderer.ids([one, {"role": "assistant", "content": text}], prompt=False) for text in ("So!", "7 no")]
        self.closing = _common_end(*ends)
        eos = [i for i, token in enumerate(self.closing) if token in renderer.eos_ids]
        if eos:
            self.closing = self.closing[: eos[-1] + 1]  # what follows is glue, see render.py
        if not self.opening or not self.closing:
            raise TemplateError(
                "This template does not mark where an answer begins and ends, so preformatted text cannot be masked.",
                way_out='Give the turns themselves ("messages").',
            )

    def _opening(self, one: dict[str, str], other: dict[str, str]) -> tuple[list[int], str]:
        """The generation prompt; of a template without one, all that stands behind what the user said."""
        r = self.renderer
        bare, asked = r.ids([one], prompt=False), r.ids([one], prompt=True)
        if len(asked) > len(bare) and asked[: len(bare)] == bare:
            return asked[len(bare) :], r.text([one], prompt=True).removeprefix(r.text([one], prompt=False))
        texts = [r.text([m], prompt=True) for m in (one, other)]
        return _common_end(*(r.ids([m], prompt=True) for m in (one, other))), "".join(_common_end(*texts))

    def record(self, text: str, source: str, *, cut: bool, where: str) -> Record:
        """Raises RecordsError for text of another template, of none, or whose marks are not whole tokens."""
        self._refuse_foreign(text, where)
        ids = self.renderer.plain_ids(text)
        starts = [i + len(self.opening) for i in _found(ids, self.opening)]
        if len(starts) != text.count(self.opening_text):
            raise RecordsError(
                f"{where}: {text.count(self.opening_text)} answers begin in its text, {len(starts)} in its tokens: "
                "the tokenizer joins the template's text with what follows it.",
                way_out='Give the turns themselves ("messages"), or pass --skip-bad.',
            )
        if not starts:
            raise RecordsError(
                f"{where}: its 'text' holds no generation prompt of this target's template ({self.opening_text!r}), "
                "so nothing in it is known to be an answer.",
                way_out='Pass --raw to learn from plain text, or give turns ("messages").',
            )
        mask = np.zeros(len(ids), dtype=bool)
        for start, limit in zip(starts, [*starts[1:], len(ids) + 1], strict=True):
            mask[start : self._end(ids, start, limit, where)] = True
        return self._cut(np.asarray(ids, dtype=np.int32), mask, source, cut=cut, where=where)

    def _end(self, ids: Sequence[int], start: int, limit: int, where: str) -> int:
        end = next(iter(_found(ids[:limit], self.closing, start)), None)
        if end is not None:
            return end + len(self.closing)
        if limit <= len(ids):
            raise RecordsError(
                f"{where}: an answer begins at token {start} and does not end before the next one.",
                way_out="Was it rendered by another template? Mend it, or pass --skip-bad.",
            )
        return len(ids)

    def _cut(self, ids: np.ndarray, mask: np.ndarray, source: str, *, cut: bool, where: str) -> Record:
        if cut and mask.any() and int(ids[np.flatnonzero(mask)[-1]]) in self.renderer.eos_ids:
            mask[np.flatnonzero(mask)[-1]] = False  # the target never said it
        if not mask.any():
            raise RecordsError(f"{where}: every answer is empty.", way_out="Remove it, or pass --skip-bad.")
        end = int(np.flatnonzero(mask)[-1]) + 1
        return Record(ids[:end], mask[:end], source)

    def _refuse_foreign(self, text: str, where: str) -> None:
        for marker, family in TURN_MARKERS.items():
            if marker in text and marker not in str(self.renderer.template):
                raise RecordsError(
                    f"{where}: its 'text' holds {marker!r}, which opens a turn in templates of {family}; this target's "
                    "template has no such token, so it would be learnt as plain text.",
                    way_out="Leave rows of other templates out, or pass --skip-bad.",
                )


def _found(ids: Sequence[int], wanted: Sequence[int], start: int = 0) -> list[int]:
    """Where ``wanted`` begins in ``ids``, from ``start`` on."""
    n, first = len(wanted), wanted[0]
    return [i for i in range(start, len(ids) - n + 1) if ids[i] == first and list(ids[i : i + n]) == list(wanted)]


def _common_end(one: Sequence[T], other: Sequence[T]) -> list[T]:
    pairs = zip(reversed(one), reversed(other), strict=False)
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return list(one[len(one) - n :])
