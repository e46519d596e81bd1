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

from eyas import taps
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.chain import Chain
from eyas.decode.plain import last_logits
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
    with taps.reading(target, drafter.config.taps) as reader:
        cache = TargetCache(target)
        states = cache.forward(as_row(list(prompt_ids), target))
        tapped = reader.take()
        held = cache.length
        first = int(last_logits(target, states).argmax())

        def verify(rows: int) -> Callable[[], None]:
            def one() -> None:
                states = cache.forward(as_row([first] * rows, target))
                target.logits(states[0]).argmax(-1).tolist()
                reader.take()
                cache.truncate(held)

            return one

        chain = Chain(drafter)
        chain.extend(tapped, [*list(prompt_ids)[1:], first], 0)

        def depth() -> None:
            token = drafter.to_target_ids(chain.logits().argmax(-1)).view(1, 1)
            chain.feed(token)
            chain.truncate(chain.committed)

        work = {rows: verify(rows) for rows in sorted({1, *(k + 1 for k in draft_tokens)})} | {0: depth}
        times: dict[int, list[float]] = {key: [] for key in work}
        for _ in range(REPEATS):
            for key, one in work.items():
                began = time.perf_counter()
                one()
                times[key].append(time.perf_counter() - began)
    median = {key: statistics.median(values) for key, values in times.items()}
    return PassCost(median[1], {k: median[k + 1] for k in draft_tokens}, median[0])
