"""The draft vocabulary against plain Python, and maps that contradict themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import CheckpointError, UsageError
from eyas.vocab import DraftVocab, by_frequency, from_checkpoint

torch.set_num_threads(1)

V = 40


@st.composite
def vocabs(draw: st.DrawFn) -> DraftVocab:
    size = draw(st.integers(1, 60))
    ids = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return DraftVocab(torch.tensor(sorted(ids)), size)


def test_ties_go_to_the_lower_id() -> None:
    counts = torch.tensor([3, 9, 3, 0, 3, 9, 0])
    assert by_frequency(counts, 2).ids.tolist() == [1, 5]
    assert by_frequency(counts, 3).ids.tolist() == [0, 1, 5]
    assert by_frequency(counts, 4).ids.tolist() == [0, 1, 2, 5]
    assert by_frequency(counts, 6).ids.tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data())
def test_by_frequency_is_a_sort_by_count_and_id(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    wanted = sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    found = by_frequency(torch.tensor(counts), size)
    assert found.ids.tolist() == wanted
    assert found.vocab_size == len(counts)
    total = sum(counts)
    covered = sum(counts[i] for i in wanted)
    assert found.coverage(torch.tensor(counts)) == (covered / total if total else 0.0)


@pytest.mark.parametrize("size", [0, -1, 8])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"draft vocabulary of {size} does not fit a target vocabulary of 7"):
        by_frequency(torch.ones(7, dtype=torch.int64), size)


@settings(max_examples=150, deadline=None)
@given(vocabs())
def test_the_checkpoints_spelling_makes_a_round_trip(words: DraftVocab) -> None:
    d2t, t2d = words.d2t, words.t2d
    ids = words.ids.tolist()
    assert [i + int(offset) for i, offset in enumerate(d2t)] == ids
    assert [i for i in range(words.vocab_size) if t2d[i]] == ids
    assert t2d.dtype == torch.bool
    assert t2d.shape == (words.vocab_size,)
    inverse = words.draft_ids()
    for draft, target in enumerate(ids):
        assert inverse[target] == draft
    assert int((inverse == -1).sum()) == words.vocab_size - len(words)
    for mask in (t2d, t2d.to(torch.uint8), None):
        back = from_checkpoint(d2t.to(torch.int32), mask, words.vocab_size)
        assert torch.equal(back.ids, words.ids)
        assert back.ids.dtype == torch.int64
        assert back.vocab_size == words.vocab_size


def some() -> DraftVocab:
    return DraftVocab(torch.tensor([2, 3, 7, 11, 20, 39]), V)


def test_direct_ids_are_refused() -> None:
    """The commonest slip: d2t holds the ids themselves."""
    words = some()
    with pytest.raises(CheckpointError, match="points at ids 2 to 44, outside 0 to 39"):
        from_checkpoint(words.ids, None, V)
    low = DraftVocab(torch.tensor([2, 3, 7, 11]), V)  # in range when doubled up: only the mask can tell
    with pytest.raises(CheckpointError, match="they are not the 4 that d2t points at") as caught:
        from_checkpoint(low.ids, low.t2d, V)
    assert "d2t holds offsets, not ids" in caught.value.way_out


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        ([-1, 1, 1], "points at ids -1 to 3, outside 0 to 39"),
        ([0, 1, 38], "points at ids 0 to 40, outside 0 to 39"),
        ([0, 4, 3], "not strictly increasing"),  # 0, 5, 5
        ([9, 0, 1], "not strictly increasing"),  # 9, 1, 3
    ],
)
def test_a_map_out_of_range_or_out_of_order_is_refused(d2t: list[int], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        from_checkpoint(torch.tensor(d2t), None, V)


def test_a_shuffled_map_is_refused() -> None:
    words = some()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    with pytest.raises(CheckpointError, match="two draft ids may mean one token"):
        from_checkpoint(words.ids[order] - torch.arange(6), words.t2d, V)


def test_the_mask_of_another_run_is_refused() -> None:
    words = some()
    other = DraftVocab(torch.tensor([2, 3, 7, 11, 21, 39]), V)  # as many ids, one of them another
    with pytest.raises(CheckpointError, match="t2d marks 6 ids and they are not the 6"):
        from_checkpoint(words.d2t, other.t2d, V)
    with pytest.raises(CheckpointError, match="t2d marks 5 ids"):
        from_checkpoint(words.d2t, DraftVocab(words.ids[:-1], V).t2d, V)
    with pytest.raises(CheckpointError, match="t2d has 41 entries for a vocabulary of 40"):
        from_checkpoint(words.d2t, DraftVocab(words.ids, V + 1).t2d, V)


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 2], [0, V]])
def test_a_vocabulary_is_sorted_distinct_and_within(ids: list[int]) -> None:
    with pytest.raises(AssertionError):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), V)
