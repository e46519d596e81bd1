"""Taps against transformers' own hidden states, and hooks that leave no trace."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import tiny
from eyas import batches, taps
from eyas.errors import UsageError
from eyas.target import Target

torch.set_num_threads(1)


def theirs(target: Target, batch: batches.Batch) -> tuple[Tensor, ...]:
    attention = torch.arange(batch.input_ids.shape[1])[None] < batch.lengths[:, None]
    with torch.no_grad():
        return target.model(
            input_ids=batch.input_ids, attention_mask=attention.long(), output_hidden_states=True
        ).hidden_states


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_tap_is_transformers_hidden_state(kind: str) -> None:
    target = tiny.target(kind)
    n, D = target.num_layers, target.hidden_size
    batch = batches.collate(tiny.tiny_records(3), range(3))
    assert batch.lengths.unique().numel() > 1, "a padded batch was wanted"
    states = taps.run(target, batch.input_ids, batch.lengths, range(n + 1))
    found, wanted = states.taps.split(D, dim=-1), theirs(target, batch)
    assert len(found) == len(wanted) == n + 1
    for row, length in enumerate(batch.lengths.tolist()):
        for t in range(n):
            assert torch.allclose(found[t][row, :length], wanted[t][row, :length], atol=1e-5), f"tap {t}"
        with torch.no_grad():
            normed = target.decoder.norm(found[n][row, :length])
        assert torch.allclose(normed, wanted[n][row, :length], atol=1e-5)
        assert torch.allclose(states.last[row, :length], wanted[n][row, :length], atol=1e-5)
        # Neighbours differ clearly, so none of the above could pass one layer off; nor is tap n the normed state.
        for t in range(n):
            assert float((found[t + 1] - found[t])[row, :length].abs().max()) > 0.1
        assert float((found[n] - wanted[n])[row, :length].abs().max()) > 0.1


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tap_0_is_the_embedding_as_the_first_layer_gets_it(kind: str) -> None:
    target = tiny.target(kind)
    batch = batches.collate(tiny.tiny_records(1), [0])
    found = taps.run(target, batch.input_ids, batch.lengths, [0]).taps
    scale = target.hidden_size**0.5 if kind == "gemma3" else 1.0
    assert torch.allclose(found, target.embedding[batch.input_ids] * scale, rtol=1e-5, atol=1e-6)


def test_padding_does_not_change_a_record() -> None:
    target, made = tiny.target("gemma3"), tiny.tiny_records(4)
    together = batches.collate(made, range(4))
    all_of_them = taps.run(target, together.input_ids, together.lengths, (1, 5))
    for row, record in enumerate(made):
        alone = batches.collate([record], [0])
        one = taps.run(target, alone.input_ids, alone.lengths, (1, 5))
        assert torch.allclose(all_of_them.taps[row, : record.seq_len], one.taps[0], atol=1e-5)
        assert torch.allclose(all_of_them.last[row, : record.seq_len], one.last[0], atol=1e-5)


def test_taps_are_concatenated_ascending() -> None:
    target, batch = tiny.target("llama"), batches.collate(tiny.tiny_records(2), range(2))
    D = target.hidden_size
    singly = [taps.run(target, batch.input_ids, batch.lengths, [t]).taps for t in (0, 2, 5)]
    together = taps.run(target, batch.input_ids, batch.lengths, (0, 2, 5)).taps
    assert together.shape[-1] == 3 * D
    for i, tap in enumerate(singly):
        assert torch.equal(together[..., i * D : (i + 1) * D], tap)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([], "No taps given"),
        ([-1, 2], "Tap -1 does not exist: the target has 5 layers"),
        ([2, 6], "Tap 6 does not exist"),
        ([2, 2, 4], "[2, 2, 4] repeat one"),
        ([4, 2, 3], "not in ascending order"),
    ],
)
def test_what_cannot_be_taps_is_refused(wanted: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        taps.validate(wanted, 5)


def test_refusals_say_what_to_pass() -> None:
    with pytest.raises(UsageError) as caught:
        taps.validate([4, 2, 3], 5)
    assert caught.value.way_out == "Pass 2,3,4."
    with pytest.raises(UsageError) as caught:
        taps.validate([31], 30)
    assert caught.value.way_out == "Pass for example --taps 2,15,27."


def test_both_ends_are_taps() -> None:
    assert taps.validate([0, 5], 5) == (0, 5)


def hooks(target: Target) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in target.model.modules())


def test_hooks_are_removed_on_close() -> None:
    target = tiny.target("llama")
    before = hooks(target)
    with taps.reading(target, (1, 5)):
        assert hooks(target) == before + 2
    assert hooks(target) == before


def test_hooks_are_removed_after_an_exception() -> None:
    target = tiny.target("llama")
    before = hooks(target)
    with pytest.raises(RuntimeError, match="midway"), taps.reading(target, (1, 5)):
        raise RuntimeError("midway")
    assert hooks(target) == before
    with pytest.raises(IndexError):
        taps.run(target, torch.tensor([[tiny.VOCAB]]), torch.tensor([1]), (1, 5))  # an id beyond the embedding
    assert hooks(target) == before
    with pytest.raises(UsageError), taps.reading(target, (1, 6)):
        pass
    assert hooks(target) == before


def test_take_gives_the_latest_pass_and_gives_it_once() -> None:
    target = tiny.target("llama")
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[7, 8]])
    with torch.no_grad(), taps.reading(target, (0, 3)) as reader:
        with pytest.raises(AssertionError):
            reader.take()
        target.decoder(input_ids=first, use_cache=False)
        target.decoder(input_ids=second, use_cache=False)
        taken = reader.take()
        with pytest.raises(AssertionError):
            reader.take()
    assert torch.equal(taken, taps.run(target, second, torch.tensor([2]), (0, 3)).taps)
