"""How fast a target decodes here, against the library and against what this machine's memory allows.

    python runs/decode_speed.py --json speed.json                    # about three minutes on two quiet cores
    python runs/decode_speed.py --contexts 128,512,2048,4096 --rounds 20

Sides take turns and medians are told: another process hits all of them. The bound is the time it takes to read every
weight of a token once, at the best reading speed measured between the rounds; a verify pass and a draft depth are told
in plain steps after the same context. Nothing is decoded into text: what decoding says is the tests' business.

Letters: v(r) a target pass over r rows with its head and argmax, d one draft depth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from eyas import checkpoint, provenance, resolve
from eyas import target as targets
from eyas.decode import compact, kernel, passes
from eyas.decode.cost import alternated, work_of
from eyas.decode.pack import packed
from eyas.target import Target

ROWS = (1, 2, 3, 5, 8)
READ = 64 * 2**20  # floats: far more than any cache holds


def main() -> None:
    options = arguments()
    target = targets.load(options.target)
    bare = targets.load(options.target)  # the layers of the first run packed
    drafter = checkpoint.load(checkpoint.read(resolve.drafter(options.drafter)), target)
    prompt = torch.randint(0, target.vocab_size, (options.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    result: dict[str, Any] = {
        "provenance": provenance.collect(vars(options)),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg(),
        "compact": compact.unsuited(target) or "yes",
        "kernel": kernel.load()[1] or "yes",
        "weights_gb": weight_bytes(target) / 1e9,
    }
    with packed(target, drafter):
        result["plain"] = plain_against_library(target, bare, prompt, options)
        result["passes"] = {
            n: pass_costs(target, drafter, long_prompt(prompt, n), options.rounds) for n in options.contexts
        }
    result["load_after"] = os.getloadavg()
    print_result(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt that plain decoding goes on from")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5, help="answers of each side")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each number of rows")
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[128, 1024, 4096])
    parser.add_argument("--json")
    return parser.parse_args()


def weight_bytes(target: Target) -> int:
    """What one token must read: every layer and the head; of the embedding it needs one row."""
    layers = sum(p.numel() * p.element_size() for p in target.decoder.layers.parameters())  # type: ignore[union-attr]
    return layers + target.head.weight.numel() * target.head.weight.element_size()


def plain_against_library(
    target: Target, bare: Target, prompt: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds a token of the library's generate, of passes one token at a time, and of reading the weights once."""
    new = options.new_tokens
    sides = {"transformers generate": lambda: library(bare, prompt, new), "eyas": lambda: ours(target, prompt, new)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    speeds: list[float] = []
    for turn in range(options.turns + 1):
        speeds += read_speeds()
        for name, side in sides.items():
            seconds = side()
            if turn:  # the first one warms up
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    speed = statistics.median(sorted(speeds)[-len(speeds) // 4 :])
    bound = weight_bytes(target) / speed
    return {
        "read_gb_per_second": {"best quarter": speed / 1e9, "median": statistics.median(speeds) / 1e9},
        "bound_seconds": bound,
        "seconds": median,
        "all_seconds": times,
        "times_transformers": median["transformers generate"] / median["eyas"],
        "share_of_bound": bound / median["eyas"],
    }


def read_speeds(repeats: int = 4) -> list[float]:
    """Bytes a second of adding up a long tensor with all threads."""
    x = torch.ones(READ)
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        x.sum()
        found.append(x.numel() * 4 / (time.perf_counter() - began))
    return found


@torch.inference_mode()
def library(target: Target, prompt: list[int], new: int) -> float:
    """Seconds a token after the first: what prefill takes is not decoding."""
    ids = torch.tensor([prompt])

    def generate(tokens: int) -> float:
        began = time.perf_counter()
        target.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    return (generate(new) - generate(1)) / (new - 1)


@torch.inference_mode()
def ours(target: Target, prompt: list[int], new: int) -> float:
    fed = passes.of(target, ())
    states, _ = fed.forward(prompt)
    token = int(target.logits(states[-1]).argmax())
    began = time.perf_counter()
    for _ in range(new - 1):
        states, _ = fed.forward([token])
        token = int(target.logits(states[-1]).argmax())
    return (time.perf_counter() - began) / (new - 1)


def pass_costs(target: Target, drafter: Any, prompt: list[int], rounds: int) -> dict[str, Any]:
    """Median seconds of v(r) and d after a prompt, and the same in plain steps."""
    with torch.inference_mode():
        work: dict[int, Callable[[], None]] = work_of(target, drafter, prompt, ROWS)
        times = alternated(work, rounds)
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    return {
        "seconds": median,
        "least_seconds": {key: min(values[1:]) for key, values in times.items()},
        "verify": {rows: median[rows] / median[1] for rows in ROWS},
        "draft_depth": median[0] / median[1],
    }


def long_prompt(prompt: Sequence[int], tokens: int) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(tokens)]


def print_result(result: dict[str, Any]) -> None:
    plain = result["plain"]
    print(f"threads {result['threads']}, load {result['load_before'][0]:.1f} to {result['load_after'][0]:.1f}")
    print(f"compact way: {result['compact']}; compiled kernel: {result['kernel']}")
    speed = plain["read_gb_per_second"]
    read = f"memory read {speed['best quarter']:.1f} GB/s (median {speed['median']:.1f})"
    print(f"{read}, {result['weights_gb']:.3f} GB a token")
    for name, seconds in (*plain["seconds"].items(), ("bound", plain["bound_seconds"])):
        print(f"  {name:22} {seconds * 1e3:7.2f} ms a token, {1 / seconds:6.1f} tok/s")
    print(f"  {plain['times_transformers']:.2f} times transformers, {plain['share_of_bound']:.0%} of the bound")
    base = next(iter(result["passes"].values()))["seconds"]
    print("context  v(1) ms  " + "  ".join(f"v({r})" for r in ROWS[1:]) + "    d      growth of v(1), v(5), d")
    for context, cost in result["passes"].items():
        verify = "  ".join(f"{cost['verify'][rows]:4.2f}" for rows in ROWS[1:])
        growth = ", ".join(f"{cost['seconds'][key] / base[key]:.2f}" for key in (1, 5, 0))
        print(f"{context:7}  {cost['seconds'][1] * 1e3:7.2f}  {verify}  {cost['draft_depth']:.3f}  {growth}")
    print("wanted: 1.5 times transformers, 60% of the bound, v(2) 1.1, v(3) 1.2, v(5) 1.35, d 0.09", file=sys.stderr)


if __name__ == "__main__":
    main()
