"""How often `eyas watch` warns of a healthy engine: days of made-up counters whose text wanders, none of it a fault.

python -m runs.watched_days --days 20 --deviation 0.02 --alike 0.8
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from eyas.engines.scrape.sampled import Sampled
from eyas.watch import Watcher, expected

K, RATE, ROUNDS, EVERY = 3, 0.7, 600, 15.0
LENGTH = 1 + sum(RATE ** (k + 1) for k in range(K))


def page(counts: list[int]) -> Sampled:
    """Rounds and hits by depth as a page of vLLM has them."""
    rounds, *hits = counts
    none = frozenset[tuple[str, str]]()
    counters = {("drafts", none): rounds, ("draft_tokens", none): K * rounds, ("accepted_tokens", none): sum(hits)}
    for k, hit in enumerate(hits):
        counters["accepted_tokens_per_pos", frozenset({("position", str(k))})] = hit
    return Sampled("vllm", counters, draft_tokens=K, running=1.0)


def day(seed: int, deviation: float, alike: float) -> Counter[str]:
    """What one day is told, by kind and cause."""
    rng, said, counts = random.Random(seed), Counter[str](), [0] * (K + 1)
    watcher = Watcher("made up", window=20, every=EVERY, expected=expected.asked(LENGTH))
    off = 0.0
    for i in range(int(86400 / EVERY) + 1):
        off = alike * off + (1 - alike * alike) ** 0.5 * rng.gauss(0, deviation)
        rate, left = min(1.0, max(0.0, RATE + off)), ROUNDS
        counts[0] += ROUNDS
        for k in range(K):
            left = min(left, max(0, round(rng.gauss(left * rate, (left * rate * (1 - rate)) ** 0.5))))
            counts[k + 1] += left
        for event in watcher.take(page(counts), EVERY * i):
            said[f"{event.kind} {event.text.partition(':')[0]}"] += 1
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--deviation", type=float, default=0.02, help="standard deviation of the hit rate")
    parser.add_argument("--alike", type=float, default=0.8, help="correlation of an interval with the next")
    asked = parser.parse_args()
    days = [day(seed, asked.deviation, asked.alike) for seed in range(asked.days)]
    total = sum(days, Counter[str]())
    print(f"{asked.days} days, deviation {asked.deviation}, alike {asked.alike}: {dict(total) or 'nothing said'}")


if __name__ == "__main__":
    main()
