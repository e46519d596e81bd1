"""Whether the intervals are honest: how often the 95 % interval of a difference that is zero holds zero.

    eyas capture --records train.jsonl --taps 2,15,27 --out STATES
    python runs/intervals.py --records train.jsonl --states STATES --out COVER

Two disjoint sets of records of one pool have the same accept length but for chance, so the interval of their difference
should hold zero in 95 of 100 draws. Rounds and kept tokens of every record are computed once and journalled in COVER;
started again, it goes on where it was. Prints one JSON object: per size of a set, the share of draws that hold zero
with its binomial standard error, and the mean width of the interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from eyas import checkpoint, curve, records, resolve
from eyas import target as targets
from eyas.journal import Journal
from eyas.results import EXPECT_DRAFT_TOKENS, LengthCounts
from eyas.results.counts import unpaired_difference
from eyas.states import StoredStates

SIZES = (32, 64, 128)
AT_ONCE = 64  # records a journal entry: few may lie below the bar of agreement where the pool does not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3")
    parser.add_argument("--records", required=True, type=Path)
    parser.add_argument("--states", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--draws", type=int, default=400)
    options = parser.parse_args()
    pool = counted(options.target, options.drafter, options.records, options.states, options.out, options.limit)
    told = {
        "records": len(pool.rounds),
        "draws": options.draws,
        "accept_length": pool.value,
        "sizes": [covered(pool, size, options.draws) for size in SIZES],
    }
    json.dump(told, sys.stdout, indent=2)
    sys.stdout.write("\n")


def counted(spec: str, name: str, file: Path, states: Path, out: Path, limit: int) -> LengthCounts:
    """The walk of every record of the pool, from the journal where it is there."""
    target = targets.load_ends(spec)
    drafter = checkpoint.load(checkpoint.read(resolve.drafter(name)), target)
    store = StoredStates(states)
    # Records come in an order that has to do with their source: a pool is drawn from all of them.
    chosen = [r for r in records.read(file, vocab_size=target.vocab_size) if r in store]
    order = np.random.default_rng(0).permutation(len(chosen))[:limit].tolist()
    chosen = [chosen[i] for i in order]
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out, {"drafter": name, "target": spec, "draft_tokens": EXPECT_DRAFT_TOKENS}) as done:
        for i in range(0, len(chosen), AT_ONCE):
            wanted = chosen[i : i + AT_ONCE]
            if all(r.id in done for r in wanted):
                continue
            found = curve.measure(drafter, target, wanted, depths=EXPECT_DRAFT_TOKENS, run=store.run)
            if not found.lengths:
                sys.stderr.write(f"{len(wanted)} records left out: {found.agreement} tokens are the target's own\n")
                continue
            for j, record in enumerate(wanted):
                if record.id in done:
                    continue
                rounds, kept = int(found.lengths[-1].rounds[j]), int(found.lengths[-1].accepted[j])
                done.append({"id": record.id, "rounds": rounds, "accepted": kept})
        entries = [done.entry(r.id) for r in chosen if r.id in done]
    rounds, accepted = (np.array([e[key] for e in entries]) for key in ("rounds", "accepted"))
    return LengthCounts(EXPECT_DRAFT_TOKENS, rounds, accepted)


def covered(pool: LengthCounts, size: int, draws: int) -> dict[str, Any]:
    """How often the interval of two disjoint sets of ``size`` records holds zero, all sets from one seed."""
    rng = np.random.default_rng(size)
    held, wide = 0, []
    for _ in range(draws):
        drawn = rng.permutation(len(pool.rounds))[: 2 * size]
        sides = [LengthCounts(pool.draft_tokens, pool.rounds[i], pool.accepted[i]) for i in np.split(drawn, 2)]
        difference = unpaired_difference(*sides)
        assert difference.low is not None
        assert difference.high is not None
        held += difference.low <= 0 <= difference.high
        wide.append(difference.high - difference.low)
    share = held / draws
    return {
        "size": size,
        "held_zero": held,
        "share": share,
        "standard_error": math.sqrt(share * (1 - share) / draws),
        "mean_width": float(np.mean(wide)),
    }


if __name__ == "__main__":
    main()
