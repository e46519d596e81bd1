"""Text of an answer in stretches, each known to have been drafted or not.

``decode.stops`` says what of a text is certain, which may be behind the tokens (a character spread over several, what
may be the beginning of a stop string). Whose text it is, is told by a second reading without stop strings:

    stops ["\\n\\nUser"]     tokens   Yes | . | \\n | \\n | B | ye
                           given    Yes | . |    |    | \\n\\nB | ye        each character in its own token's stretch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyas.decode.stops import Text


@dataclass(frozen=True)
class Span:
    text: str
    drafted: bool


class Spelling:
    """``decode`` gives the text of ids, special tokens left out; ``before`` are those whose text this one goes on."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._certain = Text(decode, stops, before)
        self._own = Text(decode, before=before) if stops else None
        self._waiting: deque[Span] = deque()

    def add(self, token: int, *, drafted: bool) -> list[Span]:
        """What is certain now that ``token`` has come."""
        said = self._certain.feed([token])
        return self._given(said, said if self._own is None else self._own.feed([token]), drafted)

    def close(self) -> list[Span]:
        """What was held back, now that no token follows."""
        said = self._certain.close()
        return self._given(said, said if self._own is None else self._own.close(), False)

    def _given(self, said: str, own: str, drafted: bool) -> list[Span]:
        if own:
            self._waiting.append(Span(own, drafted))
        given, left = list[Span](), len(said)
        while left:
            span = self._waiting.popleft()
            given.append(Span(span.text[:left], span.drafted))
            if left < len(span.text):
                self._waiting.appendleft(Span(span.text[left:], span.drafted))
            left -= len(given[-1].text)
        return given


def merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one kind as one."""
    made: list[Span] = []
    for span in spans:
        if made and made[-1].drafted == span.drafted:
            made[-1] = Span(made[-1].text + span.text, span.drafted)
        elif span.text:
            made.append(span)
    return made


def text_of(spans: Sequence[Span]) -> str:
    return "".join(span.text for span in spans)
