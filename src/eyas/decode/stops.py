"""Text that grows by token ids, told as soon as it is certain, and cut before the first stop string.

    ids      … said for certain │ context │ pending: their text may still change
    text     … delivered        │ kept: may be the start of a stop string │ held: may be part of a character

Pure, over a tokenizer's ``decode``. Decoding is not additive (a character may be spread over tokens, a tokenizer may
drop the first space), so pending tokens are decoded behind some that are certain, and what those say is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eyas.errors import UsageError

REPLACEMENT = "\ufffd"
MOST_HELD = 3  # replacement characters: a character has at most four bytes, and some decoders replace each by itself
MOST_PENDING = 16  # tokens; longer is no character any more but bytes that never make one
COVER = 4  # tokens that hold all bytes of an unfinished character


class Text:
    """Feed it tokens, take what became certain. ``stopped`` is the stop string that was met; then no more comes.

    ``taken`` counts the tokens used, the one that completed the stop string included: it is part of the answer's ids,
    while of the text all from the stop string on is left out. Of several stop strings the one that is complete first
    counts, so that it does not matter how many tokens come at once.

    ``before`` are tokens whose text this one goes on: SentencePiece drops a text's first space, and behind them there
    is none to drop.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        if not all(stops):
            raise UsageError("A stop string is empty.", way_out="Leave it out.")
        self.stopped: str | None = None
        self.taken = 0
        self._decode, self._stops = decode, tuple(stops)
        self._context = list(before[-MOST_PENDING:])
        self._context_text = decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending tokens' text that were certain
        self._kept = ""

    def feed(self, token_ids: Iterable[int]) -> str:
        """What became certain by these tokens; the first of them that completes a stop string is the last one used."""
        said = ""
        for token in token_ids:
            if self.stopped is not None:
                break
            self.taken += 1
            said += self._before_stop(self._certain(token))
        return said

    def close(self) -> str:
        """What was held back, now that nothing follows; an unfinished character is a replacement character."""
        if self.stopped is not None:
            return ""
        said = self._before_stop(self._pending_text()[self._shown :]) + self._kept
        self._pending, self._shown, self._kept = [], 0, ""
        return said

    # -- characters -------------------------------------------------------------------------------------------

    def _certain(self, token: int) -> str:
        """Characters that no later token can change."""
        self._pending.append(token)
        text = self._pending_text()
        whole = len(text) - _unfinished(text)
        if text and whole == len(text):
            new = text[self._shown :]
            self._context, self._context_text = self._pending, self._decode(self._pending)
            self._pending, self._shown = [], 0
            return new
        if len(self._pending) > MOST_PENDING:
            return self._shorten(text)
        new = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        return new

    def _pending_text(self) -> str:
        both = self._decode(self._context + self._pending)
        if both.startswith(self._context_text):
            return both[len(self._context_text) :]
        return self._decode(self._pending)  # the decoder sees the context otherwise by what follows

    def _shorten(self, text: str) -> str:
        """Let go of pending tokens that no character can begin in."""
        if not text:
            self._pending = []  # special tokens, which say nothing
            return ""
        self._context, self._context_text = [], ""
        self._pending = self._pending[-COVER:]
        rest = self._pending_text()
        held = _unfinished(rest)
        new, self._shown = text[self._shown : len(text) - held], len(rest) - held
        return new

    # -- stop strings -----------------------------------------------------------------------------------------

    def _before_stop(self, new: str) -> str:
        """Text that is certain and no start of a stop string."""
        text = self._kept + new
        met = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            _, at, self.stopped = min(met)
            self._kept = ""
            return text[:at]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept]


def _unfinished(text: str) -> int:
    """Trailing replacement characters that a later token may turn into something else."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MOST_HELD)


def _overlap(text: str, stop: str) -> int:
    """The longest end of ``text`` that ``stop`` begins with and does not end with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
