"""The text an engine served, beside the passes of its drafter: which slot of which text every fed row is.

With x the prompt and the answer, slot s pairs the target's states of position s with the token x[s+1]:

    first pass      slots 0 … P-1        sample row P-1, next token x[P] (the first of the answer)
    each later one  from where the last ended; the sample row is that of the last token kept

So slots need no positions to be told, and positions that are off can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.engines.live import Answer
from eyas.engines.recording import Turn
from eyas.records import Record


@dataclass(frozen=True, eq=False)
class Round:
    """One pass over one text. Row i is slot ``first`` + i; the chain starts at slot ``last``."""

    turn: Turn
    first: int

    @property
    def last(self) -> int:
        return self.first + len(self.turn.token_ids) - 1


@dataclass(frozen=True, eq=False)
class Served:
    """One request: its text ``ids`` [T], how many of them are prompt, and its rounds, the first with the prompt's last
    row. ``whole``: whether every slot was fed from the first on (else a prefix came from a cache)."""

    request: str
    ids: np.ndarray
    prompt: int
    finish_reason: str
    rounds: Sequence[Round]
    whole: bool = True

    @property
    def answer(self) -> np.ndarray:
        return self.ids[self.prompt :]

    def wanted(self, slot: int, depth: int) -> int | None:
        """The token that the text has where ``depth`` of a chain at ``slot`` drafts one."""
        at = slot + 2 + depth
        return int(self.ids[at]) if at < len(self.ids) else None


def served(answers: Sequence[Answer], turns: Mapping[str, Sequence[Turn]]) -> list[Served]:
    return [_one(answer, _turns_of(answer.request, turns)) for answer in answers]


def _turns_of(request: str, turns: Mapping[str, Sequence[Turn]]) -> Sequence[Turn]:
    """An engine may put more behind the id it was given (vLLM: -0-1a2b3c4d)."""
    if request in turns:
        return turns[request]
    longer = [name for name in turns if name.startswith(f"{request}-")]
    return turns[longer[0]] if len(longer) == 1 else ()


def _one(answer: Answer, turns: Sequence[Turn]) -> Served:
    ids = np.array([*answer.prompt_ids, *answer.token_ids], dtype=np.int64)
    P = len(answer.prompt_ids)
    # Of a prompt whose beginning came from a cache only the rest is fed: its chunks end at the prompt's last slot.
    fed = 0
    for turn in turns:
        fed += len(turn.token_ids)
        if fed >= P or turn.rejected >= 0:
            break
    at = 0 if fed >= P else max(0, int(turns[0].positions[0])) if turns else 0
    rounds: list[Round] = []
    for turn in turns:
        rounds.append(Round(turn, at))
        at += len(turn.token_ids)
    drafting = [r for r in rounds if r.last >= P - 1]
    return Served(answer.request, ids, P, answer.finish_reason, rounds if drafting else (), fed >= P)


def records(all_served: Sequence[Served], source: str = "served") -> list[Record]:
    """The served texts as records: on-policy by construction, if the engine's text is the target's own."""
    return [Record(s.ids.astype(np.int32), np.arange(len(s.ids)) >= s.prompt, source) for s in all_served]


def verified(one: Served) -> Iterator[tuple[Round, int]]:
    """Rounds whose draft was verified, and how many of its tokens the engine kept, as the next pass shows; -1 for the
    last, after which nothing is drafted."""
    following = (*one.rounds[1:], None) if one.rounds else ()
    for now, after in zip(one.rounds, following, strict=True):
        if now.last < one.prompt - 1:
            continue  # a chunk of a prompt: its draft is thrown away
        if after is not None:
            yield now, len(after.turn.token_ids) - 1
        elif len(one.ids) > now.last + 2:
            yield now, -1


def matched(one: Served, now: Round, truth: np.ndarray | None = None) -> int:
    """Leading drafted tokens that are the text's own, or ``truth``'s [T], which knows one more."""
    count = 0
    for k, token in enumerate(now.turn.draft_ids.tolist()):
        at = now.last + 1 + k
        told = one.wanted(now.last, k) if truth is None else int(truth[at]) if at < len(truth) else None
        if told is None or told != token:
            break
        count += 1
    return count
