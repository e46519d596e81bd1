"""What a pass costs here and now, in seconds: the numbers behind the bound on any speed-up.

With v(r) the cost of a target pass over r rows and d that of one draft depth, a chain of K drafted tokens at accept
length AL cannot be faster than plain decoding by more than AL / (v(K+1)/v(1) + K d/v(1)).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.decode import passes
from eyas.decode.law import argmax
from eyas.decode.swift import chain_of
from eyas.drafter import Drafter
from eyas.target import Target

REPEATS = 12


@dataclass(frozen=True)
class PassCost:
    """Median seconds of one plain step, of a verify pass by drafted tokens, and of one draft depth."""

    plain: float
    verify: dict[int, float]
    draft: float

    def relative(self, draft_tokens: int) -> tuple[float, float]:
        """Verify pass and draft depth in plain steps."""
        return self.verify[draft_tokens] / self.plain, self.draft / self.plain


@torch.inference_mode()
def measure_cost(target: Target, drafter: Drafter, prompt_ids: Sequence[int], draft_tokens: Sequence[int]) -> PassCost:
    """Time the passes that decoding after ``prompt_ids`` would make; sizes are alternated, medians taken."""
    work = work_of(target, drafter, prompt_ids, sorted({1, *(k + 1 for k in draft_tokens)}))
    median = {key: statistics.median(times) for key, times in alternated(work, REPEATS).items()}
    return PassCost(median[1], {k: median[k + 1] for k in draft_tokens}, median[0])


def work_of(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], rows: Sequence[int]
) -> dict[int, Callable[[], None]]:
    """After a prompt: a verify pass by number of rows, head and argmax included; under 0 one draft depth."""
    fed = passes.of(target, drafter.config.taps)
    states, tapped = fed.forward(list(prompt_ids))
    held = fed.length
    first = int(target.logits(states[-1]).argmax())
    chain = chain_of(drafter)
    chain.extend(tapped[None], [*list(prompt_ids)[1:], first], 0)

    def verify(rows: int) -> Callable[[], None]:
        def one() -> None:
            states, _ = fed.forward([first] * rows)
            argmax(target.logits(states))
            fed.truncate(held)

        return one

    def depth() -> None:
        chain.feed_id(chain.target_ids(argmax(chain.logits()[None]))[0])
        chain.truncate(chain.committed)

    return {n: verify(n) for n in rows} | {0: depth}


def alternated(work: dict[int, Callable[[], None]], repeats: int) -> dict[int, list[float]]:
    """Seconds of each piece of work, taken in turns: what else the machine does hits all of them."""
    times: dict[int, list[float]] = {key: [] for key in work}
    for _ in range(repeats):
        for key, one in work.items():
            began = time.perf_counter()
            one()
            times[key].append(time.perf_counter() - began)
    return times
