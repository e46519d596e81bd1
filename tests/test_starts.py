"""Starts: what a copied layer says is what the target says, and a closed-form fit beats chance in every shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config

import tiny
from eyas import batches, objective, starts, taps
from eyas.drafter import Drafter
from eyas.errors import UsageError
from eyas.starts import Rows
from eyas.target import Target

torch.set_num_threads(1)


def rows_of(target: Target, tap_list: tuple[int, ...]) -> Rows:
    batch = batches.collate(tiny.tiny_records(20), range(20))
    return starts.sample_rows(target, tap_list, [(batch.input_ids, batch.lengths, batch.loss_mask)])


def begun(init: str, target: Target, tap_list: tuple[int, ...], **choices: Any) -> Drafter:
    words = tiny.vocab(size=150)
    shape = starts.config_for(target, tap_list, len(words), **choices)
    return starts.STARTS[init](target, shape, words, rows_of(target, tap_list), 0).requires_grad_(False)


def first_depth(drafter: Drafter, target: Target) -> tuple[Tensor, Tensor, batches.Batch]:
    """What the drafter says at depth 0 of all positions [B, T, W], the target's states [B, T, D], and the batch."""
    made = tiny.tiny_records(4, seed=9)
    batch = batches.collate(made, range(len(made)))
    states = taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps)
    (state,) = objective.dense_unroll(drafter, states.taps, batch.input_ids, 1)
    return drafter.logits(state), states.last, batch


def apart(drafter: Drafter, target: Target) -> float:
    """How far the drafter's first depth is from the target's word at the same position, in parts of its spread."""
    said, last, batch = first_depth(drafter, target)
    there = torch.arange(batch.input_ids.shape[1])[None] < batch.lengths[:, None]
    wanted = target.logits(last)[..., drafter.vocab.ids]
    return float((said - wanted)[there].norm() / wanted[there].norm())


# -- a layer of the target ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tap_list", "layers"), [((1, 2, 4), 1), ((0, 3), 2), ((0, 1, 2), 3)])
def test_copied_layers_fed_their_own_tap_are_the_target(tap_list: tuple[int, ...], layers: int) -> None:
    """Of five layers the last one is handed tap 4, the last two tap 3: nothing is left out."""
    target = tiny.target("llama")
    drafter = begun("target", target, tap_list, num_hidden_layers=layers)
    assert apart(drafter, target) < 1e-4
    assert not torch.allclose(drafter.tap_scale, torch.ones(()))


def test_a_layer_left_out_is_seen() -> None:
    target = tiny.target("llama")
    assert apart(begun("target", target, (1, 2, 3)), target) > 0.1


@pytest.mark.parametrize("shape", ["fc_norm", "norm_before_fc", "norm_before_residual"])
def test_norms_blur_the_copy_but_little(shape: str) -> None:
    """A norm loses the size of each single row; in the mean it is kept."""
    target = tiny.target("llama")
    drafter = begun("target", target, (1, 2, 4), **tiny.SHAPES[shape])
    strangers = begun("random", target, (1, 2, 4), **tiny.SHAPES[shape])
    assert apart(drafter, target) < 0.5 < 0.9 < apart(strangers, target)


@pytest.mark.parametrize(("kind", "last"), [("qwen2", 3), ("qwen3", 5)])
def test_biases_and_norms_of_queries_are_left_behind(kind: str, last: int) -> None:
    target = tiny.target(kind)
    drafter = begun("target", target, (1, 2, last))
    assert not [name for name, _ in drafter.named_parameters() if "bias" in name or "q_norm" in name]
    assert apart(drafter, target) < 0.35


@pytest.mark.parametrize("kind", ["gemma3"])
def test_layers_of_another_kind_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="post_feedforward_layernorm") as caught:
        begun("target", tiny.target(kind), (1, 2, 4))
    assert "--init ridge" in caught.value.way_out


def test_more_layers_than_the_target_has_are_refused() -> None:
    with pytest.raises(UsageError, match="it has 5 layers"):
        begun("target", tiny.target("llama"), (1, 2, 4), num_hidden_layers=6)


def test_a_layer_does_not_fit_into_a_smaller_one() -> None:
    with pytest.raises(UsageError, match="its intermediate_size is 96, not 32"):
        begun("target", tiny.target("llama"), (1, 2, 4), intermediate_size=32)


# -- the closed form ------------------------------------------------------------------------------------------


def judged(drafter: Drafter, target: Target) -> tuple[float, int]:
    """Cross entropy and hits of the first depth on records that no start has seen."""
    made = tiny.tiny_records(6, seed=99)
    batch = batches.collate(made, range(len(made)))
    states = taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps)
    slots = objective.trained_slots(batch.loss_mask, 1)
    wanted = objective.label_positions(slots, batch.input_ids.shape[1])
    teacher = objective.teach(target, states, wanted, drafter)
    found = objective.loss(drafter, teacher, states.taps, batch.input_ids, slots)
    return float(found.sums[0] / found.counts[0]), int(found.hits[0])


@pytest.mark.parametrize("shape", [s for s in tiny.SHAPES if s not in ("attention_bias", "eagle31")])
def test_the_ridge_start_beats_a_random_one_in_every_shape(shape: str) -> None:
    target = tiny.nearly_linear()
    (ridge, right), (chance, lucky) = (
        judged(begun(init, target, (1, 2, 4), **tiny.SHAPES[shape]), target) for init in ("ridge", "random")
    )
    assert ridge < chance - 0.3
    assert right > lucky + 10


def test_later_layers_of_the_ridge_start_add_nothing() -> None:
    target = tiny.nearly_linear()
    one, three = (begun("ridge", target, (1, 2, 4), num_hidden_layers=n) for n in (1, 3))
    assert torch.equal(first_depth(one, target)[0], first_depth(three, target)[0])
    assert three.layer(2).mlp.up_proj.weight.any(), "a layer of zeros would learn nothing"


def test_an_embedding_of_its_own_starts_as_the_targets() -> None:
    target = tiny.target("llama")
    for init in starts.STARTS:
        drafter = begun(init, target, (1, 2, 4), own_embedding=True)
        assert torch.equal(drafter.embed_tokens.weight, target.embedding)
        assert drafter.embed_tokens.weight.data_ptr() != target.embedding.data_ptr()


@pytest.mark.parametrize("shape", ["usual", "fc_norm", "norm_before_fc", "both_norms"])
def test_fc_is_given_features_of_one_size(shape: str) -> None:
    """The scale is that of what fc sees, after the norms: before them taps differ tenfold and more."""
    target = tiny.target("llama")
    tapped = rows_of(target, (0, 2, 4))[0]
    drafter = begun("random", target, (0, 2, 4), **tiny.SHAPES[shape])
    seen = drafter.norm_taps(tapped) * drafter.tap_scale
    assert torch.allclose(seen.pow(2).mean(0).sqrt(), torch.ones(()), atol=1e-3)
    sizes = tapped.pow(2).mean(0).sqrt()
    assert float(sizes.max() / sizes.min()) > 10


# -- the shape ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e5}, {"rope_type": "default", "rope_theta": 1e5}),
        ({"rope_theta": 1e5, "partial_rotary_factor": None}, {"rope_type": "default", "rope_theta": 1e5}),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
    ids=["default", "untyped", "linear", "yarn", "by-layer-type"],
)
def test_the_rope_of_a_drafter_is_one_every_engine_has(rope: dict[str, Any], expected: dict[str, Any]) -> None:
    assert starts._rope(rope) == expected


def test_llama3_scaling_is_kept() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert starts._rope(rope) == rope


def test_a_target_with_latent_attention_gets_a_llama_shaped_drafter() -> None:
    text = DeepseekV3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96, v_head_dim=16
    )
    target: Any = SimpleNamespace(config=text, hidden_size=64, vocab_size=tiny.VOCAB)
    shape = starts.config_for(target, (2, 4), 50)
    assert shape.num_attention_heads == 4
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    drafter = Drafter(shape, tiny.vocab(size=50), torch.zeros(tiny.VOCAB, 64))
    assert drafter.midlayer.self_attn.o_proj.weight.shape == (64, 4 * shape.head_dim)
