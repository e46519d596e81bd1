"""Queries and keys normed for each head: vLLM's Qwen3 drafter as the judge (runs/qwen3_shape.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from eyas import checkpoint, objective
from eyas.decode.chain import Chain
from eyas.dialects import sglang
from eyas.drafter import Drafter
from eyas.target import Target
from test_checkpoint import edit_config, edit_weights, saved

torch.set_num_threads(1)

HERE = Path(__file__).parent / "fixtures" / "qwen3"
TEXT = load_file(HERE / "text.safetensors")
SAID = load_file(HERE / "vllm.safetensors")["qk_norm"]


@pytest.fixture(scope="module")
def drafter() -> Drafter:
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
    target = Target("tiny", None, model, None, config)
    return checkpoint.load(checkpoint.read(HERE / "qk_norm"), target).requires_grad_(False)


def unrolled(drafter: Drafter) -> Tensor:
    """Logits [K, W] of the training unroll at the prompt's last slot."""
    depths, slot = len(SAID), TEXT["taps"].shape[1] - 1
    taps = torch.cat((TEXT["taps"], TEXT["taps"].new_zeros(1, depths, TEXT["taps"].shape[2])), dim=1)
    slots = objective.Slots(torch.tensor([[slot]]), torch.ones(1, 1, depths, dtype=torch.bool))
    states = objective.unroll(drafter, taps, TEXT["input_ids"], slots)
    return torch.stack([drafter.logits(state[0, 0]) for state in states])


def decoded(drafter: Drafter) -> Tensor:
    """The same of the decoding chain."""
    said, prefix, ids = [], TEXT["taps"].shape[1], TEXT["input_ids"]
    chain = Chain(drafter)
    chain.extend(TEXT["taps"], ids[0, 1 : prefix + 1].tolist(), 0)
    for depth in range(len(SAID)):
        if depth:
            chain.feed(ids[:, prefix + depth : prefix + depth + 1])
        said.append(chain.logits())
    return torch.stack(said)


def apart(ours: Tensor) -> float:
    return float(((ours.detach() - SAID).abs().amax(1) / SAID.abs().amax(1)).max())


def test_vllm_says_what_the_unroll_and_the_chain_say(drafter: Drafter) -> None:
    assert SAID.shape == (4, 32)
    assert float(SAID.std()) > 0.3
    assert apart(unrolled(drafter)) < 1e-4
    assert apart(decoded(drafter)) < 1e-4


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
@pytest.mark.parametrize("layer", [0, 1])
def test_each_norm_of_each_layer_is_heard(drafter: Drafter, norm: str, layer: int) -> None:
    weight = getattr(drafter.layer(layer).self_attn, norm).weight
    kept = weight.clone()
    try:
        weight.mul_(torch.linspace(0.3, 3.0, len(kept)))
        assert apart(unrolled(drafter)) > 0.01
    finally:
        weight.copy_(kept)


def test_it_is_written_for_the_one_class_that_has_these_norms() -> None:
    config = json.loads((HERE / "qk_norm" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    assert config["eyas"]["contract"]["qk_norm"] == {"value": True, "origin": "declared"}
    shape = checkpoint.read(HERE / "qk_norm").shape
    assert sglang.refusals(shape.model_dump(), "LlamaForCausalLM", 5) == ["its queries and keys have no norm"]


@pytest.mark.parametrize("name", ["midlayer.self_attn.q_norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_norm_that_is_missing_is_fatal(tmp_path: Path, name: str) -> None:
    tensors = load_file(HERE / "qk_norm" / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((HERE / "qk_norm" / "config.json").read_bytes())
    found = checkpoint.inspect(checkpoint.read(tmp_path), None)
    assert next(f for f in found if f.cause == "norm-weight-missing").evidence[0].value == [name]


def test_without_a_contract_the_names_decide(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama", qk_norm=True)
    folder = saved(tmp_path / "d", drafter)
    edit_config(folder, lambda config: config.pop("eyas"))
    assert checkpoint.read(folder).shape.qk_norm
    back = checkpoint.load(checkpoint.read(folder), tiny.target("llama"))
    assert torch.equal(back.midlayer.self_attn.q_norm.weight, drafter.midlayer.self_attn.q_norm.weight)
    edit_weights(folder, lambda t: [t.pop(f"midlayer.self_attn.{n}_norm.weight") for n in ("q", "k")])
    assert not checkpoint.read(folder).shape.qk_norm
