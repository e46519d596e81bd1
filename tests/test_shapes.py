"""Engines as outside judges: drafters of every shape, said by vLLM's and SGLang's own code (runs/engine_shapes.py).

The folders under fixtures/shapes are what eyas saved; the logits beside them what each engine's class said after it
had loaded those folders, over one prompt and a chain of four drafted tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import checkpoint, objective
from eyas.decode.chain import Chain
from eyas.dialects import sglang
from eyas.drafter import Drafter
from eyas.target import Target

torch.set_num_threads(1)

HERE = Path(__file__).parent / "fixtures" / "shapes"
TEXT = load_file(HERE / "text.safetensors")
SAID = {engine: load_file(HERE / f"{engine}.safetensors") for engine in ("vllm", "sglang")}
SHAPES = sorted(path.name for path in HERE.iterdir() if path.is_dir())
CLOSE = 1e-4
APART = 0.05


@cache
def target() -> Target:
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=5,
        num_attention_heads=2,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight.data.copy_(TEXT["embedding"])
    return Target("tiny", None, model, None, config)


def load(shape: str) -> Drafter:
    return checkpoint.load(checkpoint.read(HERE / shape), target()).requires_grad_(False)


def unrolled(drafter: Drafter) -> Tensor:
    """Logits [K, W] of the training unroll at the prompt's last slot."""
    depths = len(SAID["vllm"]["usual"])
    slot = TEXT["taps"].shape[1] - 1
    taps = torch.cat((TEXT["taps"], TEXT["taps"].new_zeros(1, depths, TEXT["taps"].shape[2])), dim=1)
    slots = objective.Slots(torch.tensor([[slot]]), torch.ones(1, 1, depths, dtype=torch.bool))
    states = objective.unroll(drafter, taps, TEXT["input_ids"], slots)
    return torch.stack([drafter.logits(state[0, 0]) for state in states])


def decoded(drafter: Drafter) -> Tensor:
    """The same of the decoding chain."""
    said, prefix, ids = [], TEXT["taps"].shape[1], TEXT["input_ids"]
    chain = Chain(drafter)
    chain.extend(TEXT["taps"], ids[0, 1 : prefix + 1].tolist(), 0)
    for depth in range(len(SAID["vllm"]["usual"])):
        if depth:
            chain.feed(ids[:, prefix + depth : prefix + depth + 1])
        said.append(chain.logits())
    return torch.stack(said)


def apart(ours: Tensor, theirs: Tensor) -> list[float]:
    """By depth, the largest difference in parts of the largest logit."""
    return ((ours - theirs).abs().amax(1) / theirs.abs().amax(1)).tolist()


def test_there_is_a_word_of_both_engines_on_every_shape() -> None:
    assert len(SHAPES) == 11
    assert set(SHAPES) == set(SAID["vllm"]) == set(SAID["sglang"])
    for said in SAID.values():
        assert all(bool(torch.isfinite(logits).all()) and float(logits.std()) > 0.3 for logits in said.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_says_what_the_unroll_and_the_chain_say(shape: str) -> None:
    drafter = load(shape)
    assert max(apart(unrolled(drafter), SAID["vllm"][shape])) < CLOSE
    assert max(apart(decoded(drafter), SAID["vllm"][shape])) < CLOSE


@pytest.mark.parametrize("shape", SHAPES)
def test_sglang_says_the_same_but_where_we_say_that_it_cannot(shape: str) -> None:
    drafter = load(shape)
    refused = sglang.refusals(drafter.config.model_dump(), "LlamaForCausalLM", 5)
    away = max(apart(unrolled(drafter), SAID["sglang"][shape]))
    assert away > APART if refused else away < CLOSE


def test_what_sglang_cannot_express_are_these() -> None:
    refused = {s for s in SHAPES if sglang.refusals(load(s).config.model_dump(), "LlamaForCausalLM", 5)}
    assert refused == {"norm_before_residual", "own_embedding", "attention_bias", "everything"}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "usual"])
def test_every_shape_says_something_of_its_own(shape: str) -> None:
    """Each drafter without its switch, or without its later layers, is another one: the comparison can fail."""
    drafter = load(shape)
    off = {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False, "norm_output": False}
    config = drafter.config.model_copy(update={**off, "num_hidden_layers": 1})
    stripped, theirs = Drafter(config, drafter.vocab, TEXT["embedding"]), dict(drafter.named_parameters())
    with torch.no_grad():
        for name, parameter in stripped.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif name != "embed_tokens.weight":
                parameter.copy_(theirs[name])
        assert max(apart(unrolled(stripped), SAID["vllm"][shape])) > APART
