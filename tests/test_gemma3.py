"""The second real target, gemma3-270m: another architecture, a window, two ropes, a tied head, a large vocabulary.

It takes 253 MB of downloads, 1.1 GB of disk and some minutes, so it runs only where EYAS_SLOW is set.
"""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from eyas import batches, resolve, starts, taps, vocab
from eyas import target as targets
from eyas.decode.loop import generate
from eyas.decode.plain import plain
from eyas.decode.ties import first_difference
from eyas.records import Record
from eyas.target import Target

TAPS = (0, 9, 15)
STORY = (
    "The lighthouse keeper wrote down what he saw every evening: the ships, the weather, the birds, and the colour "
    "of the sea. On the {}th day of that month he wrote that {} boats had passed and that the wind came from the west. "
)


@pytest.mark.skipif(not os.environ.get("EYAS_SLOW"), reason="set EYAS_SLOW=1: 253 MB, 1.1 GB of disk, some minutes")
def test_gemma3() -> None:
    target = targets.load("gemma3-270m")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (18, 640, 262_144)
    assert target.config.sliding_window == 512
    ids = prompt(target)
    assert len(ids) > 512 + 128, "longer than a window"
    same_ends(target)
    same_as_the_gguf(target, ids[:300])
    taps_are_hidden_states(target, ids)
    speaks(target)
    greedy_past_the_window(target, ids)


def prompt(target: Target) -> list[int]:
    text = "".join(STORY.format(i, 3 * i + 1) for i in range(1, 15))
    ids = list(target.tokenizer(text)["input_ids"])  # type: ignore[misc]
    assert ids[0] == target.tokenizer.bos_token_id  # type: ignore[union-attr]
    return ids


def same_ends(target: Target) -> None:
    ends = targets.load_ends("gemma3-270m")
    assert torch.equal(ends.embedding, target.embedding)
    assert torch.equal(ends.head_weight, target.embedding), "tied"
    assert torch.equal(ends.norm_gain, target.norm_gain)
    assert ends.fingerprint() == target.fingerprint()


def same_as_the_gguf(target: Target, ids: list[int]) -> None:
    """What transformers computes from the GGUF file itself."""
    source = resolve.target("gemma3-270m")
    assert source.path is not None
    if not source.path.exists():  # only its unpacked form is needed otherwise
        pytest.skip("the GGUF file itself is gone")
    with targets.quiet():
        theirs = AutoModelForCausalLM.from_pretrained(
            source.path.parent,
            gguf_file=source.path.name,
            quantization_config=GgufConfig(gguf_file=source.path.name, dequantize=True),
            dtype=torch.float32,
        )
    with torch.inference_mode():
        wanted, found = (m(input_ids=torch.tensor([ids]), use_cache=False).logits for m in (theirs, target.model))
    assert torch.equal(found, wanted)


def taps_are_hidden_states(target: Target, ids: list[int]) -> None:
    row = torch.tensor([ids])
    states = taps.run(target, row, torch.tensor([len(ids)]), range(19))
    with torch.inference_mode():
        theirs = target.model(input_ids=row, output_hidden_states=True, use_cache=False)
    for t, found in enumerate(states.taps.split(target.hidden_size, dim=-1)[:-1]):
        assert torch.allclose(found, theirs.hidden_states[t], rtol=1e-4, atol=1e-3), t
    assert torch.allclose(states.taps[..., :640], target.embedding[row] * 640**0.5, rtol=1e-3)
    assert torch.allclose(target.logits(states.last), theirs.logits, rtol=1e-4, atol=1e-3)
    last = states.taps[..., -640:]
    unit = last * (last.pow(2).mean(-1, keepdim=True) + targets.norm_eps(target.norm)).rsqrt()
    assert torch.allclose(unit * target.norm_gain, states.last, rtol=1e-3, atol=1e-3)


def speaks(target: Target) -> None:
    ids = target.tokenizer("Once upon a time, there was a little girl named")["input_ids"]  # type: ignore[misc]
    text = target.tokenizer.decode(list(plain(target, ids, max_new_tokens=24)))  # type: ignore[union-attr]
    assert {"She", "was", "a"} <= set(text.replace(".", " ").split()), text


def greedy_past_the_window(target: Target, ids: list[int]) -> None:
    """plain, transformers' generate on its own sliding cache, and the loop with a fresh ridge drafter."""
    gaps: list[float] = []
    oracle = list(plain(target, ids, max_new_tokens=48, gaps=gaps))
    with torch.inference_mode():
        whole = target.model.generate(  # type: ignore[operator]
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=48
        )
    theirs = first_difference(oracle, whole[0, len(ids) :].tolist(), gaps)
    assert theirs is None or theirs.excused

    record = Record(torch.tensor(ids + oracle, dtype=torch.int32).numpy(), torch.arange(len(ids) + 48).numpy() > 2, "t")
    words = vocab.by_frequency(batches.token_counts([record], target.vocab_size), 4096)
    batch = batches.collate([record], [0])
    rows = starts.sample_rows(target, TAPS, [(batch.input_ids, batch.lengths, batch.loss_mask)])
    drafter = starts.ridge(target, starts.config_for(target, TAPS, len(words)), words, rows, 0)
    for draft_tokens in (1, 4):
        run = generate(target, drafter, ids, max_new_tokens=48, draft_tokens=draft_tokens).finish()
        ours = first_difference(oracle, run.token_ids, gaps)
        assert ours is None or ours.excused
        assert sum(run.accepted) > 10, "a drafter of which nothing is kept rolls nothing back"
        assert sum(run.drafted) > sum(run.accepted) > 0
