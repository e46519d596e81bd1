"""What eyas says with a drafter over a recorded prompt and a chain of drafted tokens, for outside judges to agree with.

A text is the taps of the prompt, the fed ids and the target's embedding, as ``runs/engine_shapes.py`` writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import objective
from eyas.decode.chain import Chain
from eyas.drafter import Drafter
from eyas.target import Target

Text = dict[str, Tensor]
DEPTHS = 4
CLOSE = 1e-4
APART = 0.05


def target(text: Text, layers: int = 5) -> Target:
    """A target that is no more than its embedding and its shape."""
    rows, width = text["embedding"].shape
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens.weight = model.lm_head.weight = torch.nn.Parameter(text["embedding"].clone())
    model.model.norm.weight = torch.nn.Parameter(torch.ones(width))
    return Target("tiny", None, model, None, config)


@torch.no_grad()
def unrolled(drafter: Drafter, text: Text) -> Tensor:
    """Logits [K, W] of the training unroll at the prompt's last slot."""
    slot = text["taps"].shape[1] - 1
    taps = torch.cat((text["taps"], text["taps"].new_zeros(1, DEPTHS, text["taps"].shape[2])), dim=1)
    slots = objective.Slots(torch.tensor([[slot]]), torch.ones(1, 1, DEPTHS, dtype=torch.bool))
    states = objective.unroll(drafter, taps, text["input_ids"], slots)
    return torch.stack([drafter.logits(state[0, 0]) for state in states])


@torch.no_grad()
def decoded(drafter: Drafter, text: Text) -> Tensor:
    """The same of the decoding chain."""
    said, prefix, ids = [], text["taps"].shape[1], text["input_ids"]
    chain = Chain(drafter)
    chain.extend(text["taps"], ids[0, 1 : prefix + 1].tolist(), 0)
    for depth in range(DEPTHS):
        if depth:
            chain.feed(ids[:, prefix + depth : prefix + depth + 1])
        said.append(chain.logits())
    return torch.stack(said)


def rewired(drafter: Drafter, embedding: Tensor, **fields: object) -> Drafter:
    """The same weights under another shape, which may have fewer parts than this one, and not more."""
    config = drafter.config.model_copy(update=fields)
    other, theirs = Drafter(config, drafter.vocab, embedding), dict(drafter.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in theirs:
                parameter.copy_(theirs[name])
    return other.requires_grad_(False)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference in parts of the largest logit of its depth, over the depths."""
    return float(((ours - theirs).abs().amax(1) / theirs.abs().amax(1)).max())
