"""Pairing and slices against naive loops over every slot."""

from __future__ import annotations

import numpy as np

from eyas import slices
from eyas.check import pair
from eyas.curve import SlotTable
from eyas.records import Record
from eyas.results import LengthCounts


def table(rng: np.random.Generator, truth: np.ndarray, skill: float) -> SlotTable:
    S = len(truth)
    return SlotTable(
        np.arange(3, 3 + S, dtype=np.int32), truth, truth < 5, np.zeros(S, np.int8), np.ones((S, 4), bool),
        rng.random((S, 4)) < skill)  # fmt: skip


def made(n: int) -> tuple[list[Record], list[SlotTable], list[SlotTable]]:
    rng = np.random.default_rng(0)
    records = [Record(np.arange(40, dtype=np.int32) + i, np.arange(40) >= 5, f"s{i % 2}/{i}") for i in range(n)]
    truths = [rng.integers(0, 9, 30).astype(np.int32) for _ in range(n)]
    return records, [table(rng, t, 0.8) for t in truths], [table(rng, t, 0.5) for t in truths]


def test_slices_count_what_a_loop_over_slots_counts() -> None:
    records, tables, _ = made(6)
    for s in slices.slices(tables, records):
        hits, n = [0] * 6, [0] * 6
        for r, t in enumerate(tables):
            for i in range(30):
                into = int(t.position[i]) + 2 - 5
                named = {"depth": True, "source": s.name == f"s{r % 2}"}
                if s.by == "position":
                    named["position"] = s.name == f"token {'0 to 8' if into <= 8 else '9 to 32'}"
                if s.by == "frequency":
                    seen = sum(int((u.truth == t.truth[i]).sum()) for u in tables)
                    named["frequency"] = s.name == f"seen {'11 to 100' if seen > 10 else '4 to 10'} times"
                if named[s.by] and all(t.hits[i, : s.depth]):
                    n[r] += 1
                    hits[r] += int(t.hits[i, s.depth])
        got = s.counts(tables)
        assert (got[0].tolist(), got[1].tolist()) == (hits, n), (s.by, s.name)


def test_the_better_one_is_named_and_one_is_never_better_than_itself() -> None:
    records, good, poor = made(20)
    strong, weak = (LengthCounts(4, np.full(20, 10), np.arange(20) % 3 + k) for k in (20, 10))
    a, b = pair.Side(strong, good), pair.Side(weak, poor)
    assert (pair.pair(a, b, records).better, pair.pair(b, a, records).better) == ("first", "second")
    assert all(s.proven for s in pair.pair(a, b, records).slices if s.by == "source")
    same = pair.pair(a, a, records)
    assert same.better is None
    assert not any(s.proven for s in same.slices)
