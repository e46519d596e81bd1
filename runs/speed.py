"""Rates of training and of regeneration, each with the machine's own step time beside it.

    python runs/speed.py train --records train.jsonl           # a step from states at hand: all later slots, or a share
    python runs/speed.py regenerate --prompts mt-bench          # answers in batches against transformers' generate

Sides take turns on the same batches; medians and totals are printed as JSON, with threads, versions and the time of a
plain step of the target (one row, 64 tokens of context), which is what makes two machines comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from eyas import batches, objective, prompts, records, starts, vocab
from eyas import target as targets
from eyas.answers import Ask
from eyas.decode.batch import answer
from eyas.render import Renderer
from eyas.target import Target
from eyas.train.memory import StatesInMemory

TAPS = (2, 15, 27)
DEPTHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "regenerate"))
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompts", default="mt-bench")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    target = targets.load(options.target)
    told = {"plain_step_ms": plain_step(target), "threads": torch.get_num_threads(), "torch": torch.__version__}
    told |= trained(target, options) if options.what == "train" else regenerated(target, options)
    json.dump(told, sys.stdout, indent=2)
    print()


@torch.no_grad()
def plain_step(target: Target) -> float:
    """Milliseconds of one decoding step of one row, the median of ten."""
    cache = target.model(input_ids=torch.arange(64)[None], use_cache=True).past_key_values
    return 1000 * statistics.median(
        timed(lambda: target.model(input_ids=torch.tensor([[1]]), past_key_values=cache, use_cache=True))
        for _ in range(10)
    )


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def trained(target: Target, options: argparse.Namespace) -> dict[str, object]:
    """Seconds a step: the target's pass once, then the drafter's with every later slot and with 0.4 of them."""
    if options.records is None:
        sys.exit("train needs --records")
    chosen = records.read(options.records, vocab_size=target.vocab_size, limit=40 * options.batch)
    words = vocab.by_frequency(batches.token_counts(chosen, target.vocab_size), 8192)
    drafter = starts.random(target, starts.config_for(target, TAPS, 8192), words, 0)
    drafter.lm_head.requires_grad_(False)
    order = batches.shuffled(chosen, options.batch, seed=0, epoch=0)[: options.batches]
    made = [batches.collate(chosen, index) for index in order]
    memory = StatesInMemory(torch.bfloat16)
    passes = [timed(partial(memory.run, target, b.input_ids, b.lengths, TAPS)) for b in made]
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-4)

    weights = [0.8**k for k in range(DEPTHS)]

    def step(batch: batches.Batch, share: float) -> None:
        states = memory.run(target, batch.input_ids, batch.lengths, TAPS)
        slots = objective.trained_slots(batch.loss_mask, DEPTHS)
        slots = objective.sampled(slots, share, [(0, row) for row in batch.index])
        wanted = objective.label_positions(slots, batch.input_ids.shape[1])
        teacher = objective.teach(target, states, wanted, drafter)
        loss = objective.loss(drafter, teacher, states.taps, batch.input_ids, slots)
        loss.mean(weights, loss.counts).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    step(made[0], 1.0)  # warm
    seconds: dict[float, list[float]] = {1.0: [], 0.4: []}
    for batch in made:
        for share in seconds:
            seconds[share].append(timed(partial(step, batch, share)))
    tokens = sum(int(batch.loss_mask.sum()) for batch in made)
    return {
        "response_tokens": tokens,
        "batches": len(made),
        "seconds_target_pass": sum(passes),
        **{f"seconds_share_{share}": sum(took) for share, took in seconds.items()},
        **{f"tokens_per_second_share_{share}": tokens / sum(took) for share, took in seconds.items()},
        "tokens_per_second_online": tokens / (sum(passes) + sum(seconds[1.0])),
    }


def regenerated(target: Target, options: argparse.Namespace) -> dict[str, object]:
    """Tokens a second of the batched answerer and of transformers' generate, on the same prompts."""
    assert target.tokenizer is not None
    renderer = Renderer(target.tokenizer, target.eos_ids())
    texts = [prompt.turns[0] for prompt in prompts.load(options.prompts)][: options.limit]
    asked = [
        Ask(str(i), tuple(renderer.ids([{"role": "user", "content": text}], prompt=True)))
        for i, text in enumerate(texts)
    ]
    new = options.max_new_tokens
    began = time.perf_counter(), time.process_time()
    ours = sum(len(made.token_ids) for made in answer(target, asked, max_new_tokens=new, batch=96))
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    width = max(len(ask.prompt_ids) for ask in asked)
    ids = torch.tensor([[0] * (width - len(ask.prompt_ids)) + list(ask.prompt_ids) for ask in asked])
    mask = torch.tensor([[0] * (width - len(a.prompt_ids)) + [1] * len(a.prompt_ids) for a in asked])
    ends = set(target.eos_ids())
    began = time.perf_counter(), time.process_time()
    with torch.no_grad():
        said = target.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )[:, width:]
    theirs_wall, theirs_cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    theirs = 0
    for row in said.tolist():
        theirs += next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return {
        "prompts": len(asked),
        "eyas": {"tokens": ours, "per_second": ours / wall, "per_cpu_second": ours / cpu},
        "transformers generate": {
            "tokens": theirs,
            "per_second": theirs / theirs_wall,
            "per_cpu_second": theirs / theirs_cpu,
        },
    }


if __name__ == "__main__":
    main()
