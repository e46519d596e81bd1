"""Engines as outside judges: drafters of every shape, said by vLLM's and SGLang's own code (runs/engine_shapes.py).

The folders under fixtures/shapes are what eyas saved; the logits beside them what each engine's class said after it
had loaded those folders, over one prompt and a chain of four drafted tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas import checkpoint
from eyas.dialects import sglang
from eyas.drafter import SWITCHES, Drafter
from shapes import APART, CLOSE, apart, decoded, rewired, target, unrolled

torch.set_num_threads(1)

HERE = Path(__file__).parent / "fixtures" / "shapes"
TEXT = load_file(HERE / "text.safetensors")
SAID = {engine: load_file(HERE / f"{engine}.safetensors") for engine in ("vllm", "sglang")}
SHAPES = sorted(path.name for path in HERE.iterdir() if path.is_dir())


def load(shape: str) -> Drafter:
    return checkpoint.load(checkpoint.read(HERE / shape), target(TEXT)).requires_grad_(False)


def test_there_is_a_word_of_both_engines_on_every_shape() -> None:
    assert len(SHAPES) == 11
    assert set(SHAPES) == set(SAID["vllm"]) == set(SAID["sglang"])
    for said in SAID.values():
        assert all(bool(torch.isfinite(logits).all()) and float(logits.std()) > 0.3 for logits in said.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_says_what_the_unroll_and_the_chain_say(shape: str) -> None:
    drafter = load(shape)
    assert apart(unrolled(drafter, TEXT), SAID["vllm"][shape]) < CLOSE
    assert apart(decoded(drafter, TEXT), SAID["vllm"][shape]) < CLOSE


@pytest.mark.parametrize("shape", SHAPES)
def test_sglang_says_the_same_but_where_we_say_that_it_cannot(shape: str) -> None:
    drafter = load(shape)
    refused = sglang.refusals(drafter.config.model_dump(), "LlamaForCausalLM", 5)
    away = apart(unrolled(drafter, TEXT), SAID["sglang"][shape])
    assert away > APART if refused else away < CLOSE


def test_what_sglang_cannot_express_are_these() -> None:
    refused = {s for s in SHAPES if sglang.refusals(load(s).config.model_dump(), "LlamaForCausalLM", 5)}
    assert refused == {"norm_before_residual", "own_embedding", "attention_bias", "everything"}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "usual"])
def test_every_shape_says_something_of_its_own(shape: str) -> None:
    """Each drafter without its switch, or without its later layers, is another one: the comparison can fail."""
    off = dict.fromkeys((*SWITCHES, "own_embedding", "attention_bias"), False)
    stripped = rewired(load(shape), TEXT["embedding"], **off, num_hidden_layers=1)
    assert apart(unrolled(stripped, TEXT), SAID["vllm"][shape]) > APART
