"""Whether loss masks mark the answers: something, not everything, and not one token off.

    ids        … <start> assistant \n | The  sun  is  warm <end> | \n …
    mask             0       0      0 |  1    1    1    1    1   |  0        sound
    one later        0       0      0    0    1    1    1    1      1
    one earlier      0       0      1    1    1    1    1    0      0

A span that ends one beside the end token may be a habit (to supervise the newline after it, or not to supervise the
end): only where it also starts one off is it shifted. A sound start is told by the template, whose last token before
an answer is always the same while the first of an answer is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eyas.check.case import Case
from eyas.records import Record
from eyas.results import Evidence, Finding, NotChecked, Rival

FEWEST = 8  # spans below which a start or an end is no habit
NEARLY_ALL = 0.9
VARIED = 0.6  # largest share of one token among those that begin an answer; "I" and "The" are common, but not this


def look_at_masks(case: Case, records: Sequence[Record], eos_ids: Collection[int]) -> None:
    empty = sum(not r.loss_mask.any() for r in records)
    if empty:
        severity = "fatal" if empty == len(records) else "likely"
        _found(case, "mask-empty", severity, f"{empty} of {len(records)} records supervise no token.", empty, records)
    kept = [r for r in records if r.loss_mask.any()]
    full = sum(bool(r.loss_mask.all()) for r in kept)
    if full and full >= NEARLY_ALL * len(kept):
        text = f"{full} of {len(records)} records supervise every token from the first on, the prompt included."
        _found(case, "mask-full", "likely", text, full, records)
        return
    if full:
        text = f"{full} of {len(records)} records supervise every token from the first on; the others do not."
        _found(case, "mask-full", "note", text, full, records)
    if kept:
        look_at_spans(case, kept, eos_ids)


def _found(case: Case, cause: str, severity: str, text: str, count: int, records: Sequence[Record]) -> None:
    evidence = [Evidence("records", count, 0, f"{len(records)} records")]
    case.findings.append(Finding(cause, severity, text, evidence))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Spans:
    """``tokens[d]``: how often each token stands d places after a span's first one. ``ends``: of the spans that have an
    end token within one place of their last token, how many have it there (0), before it (-1), after it (1)."""

    count: int
    tokens: dict[int, Counter[int]]
    ends: Counter[int]
    inner: Counter[int]
    """``ends`` of the spans that do not stop where the record does: one that does may have lost its last place."""

    def share(self, place: int) -> float:
        """That of the commonest token there."""
        return self.tokens[place].most_common(1)[0][1] / self.count if self.tokens[place] else 0.0

    def varied(self, place: int) -> bool:
        return self.share(place) < VARIED


def spans_of(records: Sequence[Record], eos_ids: Collection[int]) -> Spans:
    tokens: dict[int, Counter[int]] = {d: Counter() for d in (-2, -1, 0, 1)}
    ends, inner, count = Counter[int](), Counter[int](), 0
    for record in records:
        ids = record.input_ids.tolist()
        for first, last in record.spans():
            if first < 2 or last <= first:
                continue
            count += 1
            for d, seen in tokens.items():
                seen[ids[first + d]] += 1
            at = next((d for d in (0, -1, 1) if last + d < len(ids) and ids[last + d] in eos_ids), None)
            if at is not None:
                ends[at] += 1
                inner[at] += last + 1 < len(ids)
    return Spans(count, tokens, ends, inner)


def look_at_spans(case: Case, records: Sequence[Record], eos_ids: Collection[int]) -> None:
    spans = spans_of(records, eos_ids)
    ended = spans.ends.total()
    if spans.count < FEWEST or ended < FEWEST:
        why = "no end tokens are known" if not eos_ids else f"{ended} of {spans.count} answers end with an end token"
        case.not_checked.append(NotChecked("mask-shifted", f"{why}: {FEWEST} are needed to see where masks end"))
        return
    sound_start = spans.share(-1) >= NEARLY_ALL and spans.varied(0)
    if sound_start:
        return
    starts_late = spans.share(-2) >= NEARLY_ALL and spans.varied(-1)
    starts_early = spans.share(0) >= NEARLY_ALL and spans.varied(1)
    inner = spans.inner.total()
    if starts_early and spans.ends[1] >= NEARLY_ALL * ended:
        _shifted(case, spans, "earlier", "one before", [])
    elif starts_late and spans.inner[-1] >= NEARLY_ALL * inner:
        # Where records end with the answer, a mask moved on past the end lost its last place: the start alone tells.
        rivals = [] if inner >= FEWEST else [Rival("template-differs", "the first supervised tokens, decoded")]
        _shifted(case, spans, "later", "one after", rivals)
    elif starts_early or starts_late or spans.ends[0] < (1 - NEARLY_ALL) * ended:
        case.not_checked.append(
            NotChecked("mask-shifted", "answers neither begin nor end where a template does: decode one to be sure")
        )


def _shifted(case: Case, spans: Spans, way: str, beside: str, rivals: Sequence[Rival]) -> None:
    source = f"{spans.count} answers"
    case.findings.append(
        Finding(
            "mask-shifted",
            "likely",
            f"Loss masks stand one token {way} than the answers: they begin and end {beside} where they should.",
            [
                Evidence("end token before, at, after the last supervised token", _three(spans.ends), "at it", source),
                Evidence("the same, answers inside a record", _three(spans.inner), "at it", source),
                Evidence(
                    "share of the commonest token 2 before, 1 before, at, 1 after the first supervised token",
                    [round(spans.share(d), 3) for d in (-2, -1, 0, 1)],
                    f">= {NEARLY_ALL} just before it, < {VARIED} at it",
                    source,
                ),
            ],
            rivals=rivals,
        )
    )


def _three(ends: Counter[int]) -> list[int]:
    return [ends[d] for d in (-1, 0, 1)]
