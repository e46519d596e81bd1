"""The JSON that goes back, in the official API's shapes; what is ours in it stands under ``eyas``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from eyas.answers import Logprob
from eyas.serve.answering import Counts, Piece
from eyas.serve.text import merged, text_of

Json = dict[str, Any]
NEVER = -9999.0  # what the official API says for a probability of nothing


class Replies:
    """Bodies of one request's answer. ``spell`` gives the text of one token id, special ones included."""

    def __init__(self, id: str, created: int, model: str, *, chat: bool, spell: Callable[[int], str]) -> None:
        self._chat, self._spell = chat, spell
        self._head = {"id": id, "created": created, "model": model}

    # -- streamed ---------------------------------------------------------------------------------------------

    def opening(self, choice: int) -> Json:
        """The first chunk of a chat's choice: who speaks."""
        return self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, choice: int, piece: Piece, offset: int, *, token_ids: bool) -> Json:
        """``offset``: characters of the answer before it."""
        spans = merged(piece.spans)
        text = text_of(spans)
        said: Json = {"delta": {"content": text}} if self._chat else {"text": text}
        if token_ids:
            said["token_ids"] = list(piece.token_ids)
        made = self._chunk(choice, said, self._logprobs([piece], offset), piece.finish)
        made["eyas"] = {"spans": [[s.text, s.drafted] for s in spans], **_rounds(piece.counts)}
        return made

    def last(self, usage: Json) -> Json:
        return {**self._head, "object": self._object(streamed=True), "choices": [], "usage": usage}

    def _chunk(self, choice: int, said: Json, logprobs: Json | None, finish: str | None) -> Json:
        entry = {"index": choice, **said, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "object": self._object(streamed=True), "choices": [entry]}

    # -- whole ------------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Sequence[Piece]], usage: Json, token_ids: Sequence[Sequence[int]] | None) -> Json:
        """``answers``: the pieces of each choice; ``token_ids``: the prompts, where ids are wanted."""
        choices = [self._choice(i, pieces, token_ids is not None) for i, pieces in enumerate(answers)]
        made: Json = {**self._head, "object": self._object(streamed=False), "choices": choices, "usage": usage}
        if token_ids is not None:
            made["prompt_token_ids"] = list(token_ids[0])
            copies = len(answers) // len(token_ids)
            for i, choice in enumerate(choices):
                choice["prompt_token_ids"] = list(token_ids[i // copies])
        return made

    def _choice(self, index: int, pieces: Sequence[Piece], token_ids: bool) -> Json:
        spans = merged([span for piece in pieces for span in piece.spans])
        text = text_of(spans)
        said: Json = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        if token_ids:
            said["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        logprobs = self._logprobs(pieces, 0)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": pieces[-1].finish}

    def _object(self, *, streamed: bool) -> str:
        return ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"

    # -- logprobs ---------------------------------------------------------------------------------------------

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        """Of the tokens of ``pieces``; None where none were asked for. ``offset``: characters before them."""
        said = [(token, one) for piece in pieces for token, one in zip(piece.token_ids, piece.logprobs, strict=False)]
        if not said:
            return None
        return self._of_chat(said) if self._chat else self._of_completion(said, offset)

    def _of_chat(self, said: Sequence[tuple[int, Logprob]]) -> Json:
        def one(token: int, logprob: float) -> Json:
            text = self._spell(token)
            whole = "\ufffd" not in text
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}

        content = [{**one(token, of.logprob), "top_logprobs": [one(*best) for best in of.top]} for token, of in said]
        return {"content": content, "refusal": None}

    def _of_completion(self, said: Sequence[tuple[int, Logprob]], offset: int) -> Json:
        tokens = [self._spell(token) for token, _ in said]
        offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        tops = [{self._spell(token): _finite(value) for token, value in of.top} for _, of in said]
        values = [_finite(of.logprob) for _, of in said]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def usage(prompt_tokens: int, tokens: int, counts: Sequence[Counts]) -> Json:
    """Of all choices together."""
    total = _sum(counts)
    accepted = sum(total.accepted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(total.drafted) - accepted,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "eyas": {**_rounds(total), "drafted": list(total.drafted), "accepted": list(total.accepted)},
    }


def _rounds(counts: Counts) -> Json:
    length = counts.accept_length
    return {"rounds": counts.rounds, "accept_length": None if length is None else round(length, 4)}


def _sum(counts: Sequence[Counts]) -> Counts:
    def added(several: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(s[k] for s in several if k < len(s)) for k in range(max(map(len, several), default=0)))

    return Counts(
        sum(c.rounds for c in counts), added([c.drafted for c in counts]), added([c.accepted for c in counts])
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NEVER
