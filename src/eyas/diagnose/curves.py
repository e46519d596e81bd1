"""Expected and observed on the same prompts, counted alike, and the gap between them, in pairs.

Letters: R texts, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas import curve
from eyas.curve import Measured
from eyas.diagnose.reference import Reference
from eyas.records import Record
from eyas.results import LengthCounts, paired_difference
from eyas.results.counts import Rate
from eyas.variants import Facts, build, feed
from eyas.variants.parts import play


@dataclass(frozen=True, eq=False)
class Counted:
    """Rounds [R] and tokens kept by depth [R, K] of each text; ``source`` says who counted."""

    rounds: np.ndarray
    hits: np.ndarray
    source: str

    @property
    def length(self) -> LengthCounts:
        return LengthCounts(self.hits.shape[1], self.rounds, self.hits.sum(1))

    def to_json(self) -> dict[str, Any]:
        K = self.hits.shape[1]
        before = np.concatenate((self.rounds[:, None], self.hits[:, :-1]), 1) if K else self.hits
        length = self.length.to_json() | {"method": self.source}
        return {
            "accept_length": length,
            "depths": [
                {
                    "depth": k,
                    "joint": Rate.over_records(self.hits[:, k], self.rounds).to_json(),
                    "conditional": Rate.over_records(self.hits[:, k], before[:, k]).to_json(),
                }
                for k in range(K)
            ],
            "rounds": int(self.rounds.sum()),
            "drafted": int(self.rounds.sum()) * K,
            "accepted": int(self.hits.sum()),
            "source": self.source,
            "by_text": {"rounds": self.rounds.tolist(), "hits": self.hits.tolist()},
        }


def walked(reference: Reference, facts: Facts, draft_tokens: int) -> Counted | None:
    """What the reference keeps of the served text when it is run as ``facts`` say; None where the text is not the
    target's own, or the files do not give such a drafter."""
    drafter = build(reference.parts, facts)
    if drafter is None:
        return None
    measured = curve.measure(
        drafter,
        reference.target,
        reference.stock.records,
        depths=draft_tokens,
        run=feed.from_stock(reference.stock, facts),
        play=play(facts),
    )
    return of_walk(measured, reference.stock.records, draft_tokens)


def of_walk(measured: Measured, records: Sequence[Record], draft_tokens: int) -> Counted | None:
    """Counts of the walk with ``draft_tokens``, out of chains unrolled at least as far."""
    if measured.walk is None:
        return None
    kept = []
    for table, record in zip(measured.tables, records, strict=True):
        lead = np.full(record.seq_len, -1, dtype=np.int64)
        lead[table.position] = table.lead
        kept.append(curve.walk(lead, record.spans(), draft_tokens)[::-1].cumsum()[::-1])
    at_least = np.stack(kept)
    return Counted(at_least[:, 0], at_least[:, 1:], "walk")


def others(counted: Counted, tokens: Sequence[int]) -> int:
    """Texts whose rounds do not make their ``tokens``: the first comes from prefill, each round gives what it kept and
    one more, and the last may be cut."""
    made = 1 + counted.rounds + counted.hits.sum(1)
    over = made - np.asarray(tokens)
    return int(((over < 0) | (over > counted.hits.shape[1])).sum())


@dataclass(frozen=True)
class Gap:
    """Expected minus observed: accept length, and the joint rate of each depth."""

    value: float | None
    low: float | None
    high: float | None
    depths: Sequence[tuple[float | None, float | None, float | None]]

    @property
    def proven(self) -> bool:
        return self.low is not None and self.low > 0

    def to_json(self, explained: float | None) -> dict[str, Any]:
        depths = [{"depth": k, "value": v, "low": a, "high": b} for k, (v, a, b) in enumerate(self.depths)]
        return {"value": self.value, "low": self.low, "high": self.high, "explained": explained, "depths": depths}


def gap(expected: Counted, observed: Counted) -> Gap:
    whole = paired_difference(expected.length, observed.length)
    depths = []
    for k in range(min(expected.hits.shape[1], observed.hits.shape[1])):
        one = paired_difference(
            LengthCounts(1, expected.rounds, expected.hits[:, k]), LengthCounts(1, observed.rounds, observed.hits[:, k])
        )
        depths.append((one.value, one.low, one.high))
    return Gap(whole.value, whole.low, whole.high, depths)
