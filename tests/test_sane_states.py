"""Planted faults of stored states and masks are named, each with what shows it; sound ones raise notes at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import stocks
from eyas.check.case import Case
from eyas.check.masks import look_at_masks
from eyas.check.placing import place
from eyas.check.states import look_at_states
from eyas.records import Record
from eyas.results import Finding
from stocks import Change, Held, case_live, case_target, stored

torch.set_num_threads(1)
END = 2


def looked(stock: Held, *, live: bool, whole: Sequence[Record] = ()) -> Case:
    case = Case("a case")
    look_at_states(case, stock, place(stock, case_target(), None, live), case_target(), live, whole)
    return case


def grave(case: Case) -> list[Finding]:
    return [f for f in case.findings if f.severity != "note"]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("change", [lambda i, rows, k: rows, stocks.fp8], ids=["bf16", "fp8"])
def test_sound_states_raise_nothing(change: Change, live: bool) -> None:
    case = looked(stored(case_live(), (0, 3, 7, 12), change), live=live, whole=case_live().records)
    assert grave(case) == []
    fewer_bits = [f.cause for f in case.findings] == ["target-quantised"]
    assert fewer_bits == (live and change is stocks.fp8)


FAULTS: list[tuple[str, Change, bool, str, bool]] = [
    ("shuffled", stocks.shuffled, False, "states-rows-shuffled", True),
    ("shuffled", stocks.shuffled, True, "states-rows-shuffled", True),
    ("rotated", stocks.turned, True, "states-rotated", True),
    ("late", stocks.rolled(-1), False, "token-shift-two", False),
    ("early", stocks.rolled(1), True, "token-shift-missing", False),
    ("some zero", stocks.zeroed(0.05), False, "states-zero", True),
    ("all zero", stocks.zeroed(1.0), True, "states-zero", True),
    ("constant", lambda i, rows, k: rows[:1].expand_as(rows), False, "states-repeated", True),
    ("not finite", lambda i, rows, k: rows.masked_fill(rows > 2, float("inf")), False, "states-not-finite", True),
]


@pytest.mark.parametrize(
    ("change", "live", "cause", "confident"), [f[1:] for f in FAULTS], ids=[f"{f[0]}-{f[2]}" for f in FAULTS]
)
def test_a_planted_fault_is_named(change: Change, live: bool, cause: str, confident: bool) -> None:
    found = grave(looked(stored(case_live(), (0, 3, 7, 12), change), live=live))
    assert [f.cause for f in found] == [cause]
    assert (not found[0].rivals) == confident
    assert found[0].evidence


@pytest.mark.parametrize("live", [False, True])
def test_states_of_another_record(live: bool) -> None:
    found = grave(looked(stocks.of_previous(stored(case_live(), (0, 3, 7, 12))), live=live))
    assert [f.cause for f in found] == ["states-of-other-request"]


def test_records_longer_than_their_states() -> None:
    whole = case_live().records
    short = [replace(r, input_ids=r.input_ids[:30], loss_mask=r.loss_mask[:30]) for r in whole]
    tensors = [[t[:30] for t in parts] for parts in stored(case_live(), (0, 12)).tensors]
    cut = Held(short, tensors, ("h[0]", "h[1]"))
    found = grave(looked(cut, live=False, whole=whole))
    assert [f.cause for f in found] == ["states-truncated"]
    assert grave(looked(cut, live=False)) == []


# -- masks ------------------------------------------------------------------------------------------------------


def chats(ended: bool = True) -> list[Record]:
    """Two turns each: a start of two tokens that never change, an answer, the end token and what always follows it."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(12):
        ids: list[int] = []
        mask: list[bool] = []
        for _ in range(2):
            question, answer = rng.integers(10, 200, 6).tolist(), rng.integers(10, 200, 9).tolist()
            end = [END] if ended else []
            ids += [*question, 3, 4, *answer, *end, 5]
            mask += [False] * 8 + [True] * (9 + len(end)) + [False]
        made.append(Record(np.array(ids, np.int32), np.array(mask), f"chat/{i}"))
    return made


def masks(records: Sequence[Record], ends: Sequence[int] = (END,)) -> Case:
    case = Case("masks")
    look_at_masks(case, records, ends)
    return case


def moved(records: Sequence[Record], by: int) -> list[Record]:
    return [replace(r, loss_mask=np.roll(r.loss_mask, by)) for r in records]


@pytest.mark.parametrize(("by", "word"), [(1, "later"), (-1, "earlier")])
def test_masks_one_token_off(by: int, word: str) -> None:
    found = masks(moved(chats(), by)).findings
    assert [(f.cause, f.severity, list(f.rivals)) for f in found] == [("mask-shifted", "likely", [])]
    assert word in found[0].summary


def test_sound_masks_and_habits_raise_nothing() -> None:
    sound = chats()
    after, without = [], []
    for r in sound:
        longer, shorter = r.loss_mask.copy(), r.loss_mask.copy()
        longer[1:] |= r.loss_mask[:-1]  # the token after the end too
        shorter[:-1] &= r.loss_mask[1:]  # the end not
        after.append(replace(r, loss_mask=longer))
        without.append(replace(r, loss_mask=shorter))
    for records in (sound, after, without):
        case = masks(records)
        assert (case.findings, case.not_checked) == ([], [])


def test_text_without_end_tokens_is_not_looked_at() -> None:
    for case in (masks(moved(chats(ended=False), 1)), masks(chats(), ()), masks(chats()[:2])):
        assert case.findings == []
        assert [n.what for n in case.not_checked] == ["mask-shifted"]


def test_empty_and_full_masks() -> None:
    nothing = [replace(r, loss_mask=np.zeros_like(r.loss_mask)) for r in chats()]
    every = [replace(r, loss_mask=np.ones_like(r.loss_mask)) for r in chats()]
    assert [(f.cause, f.severity) for f in masks(nothing).findings] == [("mask-empty", "fatal")]
    assert [(f.cause, f.severity) for f in masks(every).findings] == [("mask-full", "likely")]
    assert [(f.cause, f.severity) for f in masks([every[0], *chats()]).findings] == [("mask-full", "note")]
