"""What storing states costs a drafter: the walk from the target itself, from a bf16 store and from an fp8 store.

    python runs/states.py --drafter smollm2-eagle3 --records models/smollm2-135m-eagle3/heldout.jsonl.gz

Prints for each: accept length at 4, hits by depth, how often the record's token is the first choice of the labels; the
relative error of every tap (the median over tokens of |stored - computed| / |computed|); and, of one training step,
the seconds with the target's pass, with states from the store, and with states already at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from eyas import batches, checkpoint, curve, objective, records, resolve, taps
from eyas import target as targets
from eyas.capture import CaptureConfig, capture
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.states import StoredStates
from eyas.states.manifest import stored_taps
from eyas.states.shard import quantise
from eyas.target import Target

K = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3")
    parser.add_argument("--records", required=True, type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--no-timing", action="store_true")
    options = parser.parse_args()
    target = targets.load(options.target)
    drafter = checkpoint.load(checkpoint.read(resolve.drafter(options.drafter)), target)
    chosen = records.read(options.records, vocab_size=target.vocab_size, limit=options.limit)

    exact = taps.run
    taps.run = run = Once(exact, drafter.config.taps)  # walk, captures and errors meet the same batches
    told = {"online": walked(drafter, target, chosen, run)}
    with tempfile.TemporaryDirectory() as place:
        stores = {}
        for dtype in ("bf16", "fp8"):
            asked = CaptureConfig(taps=drafter.config.taps, dtype=dtype)
            made = capture([("heldout", r) for r in chosen], target, Path(place, dtype), asked)
            stores[dtype] = StoredStates(Path(place, dtype))
            told[dtype] = {
                **walked(drafter, target, chosen, stores[dtype].run),
                "bytes": made["bytes"],
                "tokens": made["tokens"],
                "relative_error": errors(target, chosen, stores[dtype]),
            }
        told["fp8, the last tap too"] = walked(drafter, target, chosen, coarse(stores["fp8"]))
        if not options.no_timing:
            taps.run = exact
            told["step_seconds"] = timed(drafter, target, chosen, stores["bf16"])
        print(json.dumps(told, indent=2))


class Once:
    """``taps.run`` that runs the target once for a batch, whichever of these taps and tap n are asked for."""

    def __init__(self, run: taps.Run, tap_list: tuple[int, ...]) -> None:
        self.run, self.taps = run, tap_list
        self.kept: dict[bytes, taps.States] = {}

    def __call__(
        self, target: Target, input_ids: torch.Tensor, lengths: torch.Tensor, tap_list: Sequence[int]
    ) -> taps.States:
        key, stored = input_ids.numpy().tobytes(), stored_taps(self.taps, target.num_layers)
        if key not in self.kept:
            self.kept[key] = self.run(target, input_ids, lengths, stored)
        found = self.kept[key]
        parts = dict(zip(stored, found.taps.split(target.hidden_size, -1), strict=True))
        return taps.States(torch.cat([parts[t] for t in tap_list], -1), found.last)


def walked(drafter: Drafter, target: Target, chosen: list[Record], run: taps.Run) -> dict:  # type: ignore[type-arg]
    began = time.perf_counter()
    found = curve.measure(drafter, target, chosen, depths=K, run=run)
    forced = found.teacher_forced
    told = {
        "accept_length": found.lengths[K - 1].value if found.lengths else None,
        "rounds": int(found.lengths[K - 1].rounds.sum()) if found.lengths else None,
        "teacher_forced_hits": forced.joint.sum(0).tolist(),
        "slots": int(forced.slots.sum()),
        "agreement": found.agreement[0] / found.agreement[1],
        "seconds": time.perf_counter() - began,
    }
    print(told, file=sys.stderr, flush=True)
    return told


def coarse(store: StoredStates) -> taps.Run:
    """The fp8 store, had it put the last tap into fp8 as well: what a store does not do."""

    def run(target: Target, input_ids: torch.Tensor, lengths: torch.Tensor, tap_list: Sequence[int]) -> taps.States:
        found = store.run(target, input_ids, lengths, (*tap_list, target.num_layers)).taps
        kept, last = found[..., : -target.hidden_size], found[..., -target.hidden_size :]
        values, scale = quantise(last.flatten(0, 1))
        return taps.States(kept, target.norm((values.float() * scale[:, None]).view_as(last)))

    return run


def errors(target: Target, chosen: list[Record], store: StoredStates) -> dict[int, float]:
    """Median over tokens, tap by tap; the batches are those of the capture, so that only storing differs."""
    found: dict[int, list[torch.Tensor]] = {}
    for batch in batches.in_order(chosen, store.facts.batch):
        ours = taps.run(target, batch.input_ids, batch.lengths, store.facts.stored).taps
        theirs = store.run(target, batch.input_ids, batch.lengths, store.facts.stored).taps
        alive = torch.arange(ours.shape[1])[None] < batch.lengths[:, None]
        parts = zip(ours[alive].split(target.hidden_size, -1), theirs[alive].split(target.hidden_size, -1), strict=True)
        for tap, (a, b) in zip(store.facts.stored, parts, strict=True):
            found.setdefault(tap, []).append((a - b).norm(dim=-1) / a.norm(dim=-1))
    return {tap: float(torch.cat(rows).median()) for tap, rows in found.items()}


def timed(drafter: Drafter, target: Target, chosen: list[Record], store: StoredStates) -> dict[str, float]:
    """Seconds of a training step (4 records), medians of alternated repeats."""
    drafter.requires_grad_(True)
    batch = batches.collate(chosen, range(4))
    at_hand = taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps)

    def step(states_of: Callable[[], taps.States]) -> float:
        began = time.perf_counter()
        states = states_of()
        slots = objective.trained_slots(batch.loss_mask, 5)
        teacher = objective.teach(
            target, states.last, objective.label_positions(slots, batch.input_ids.shape[1]), drafter
        )
        objective.loss(drafter, teacher, states.taps, batch.input_ids, slots, [1.0] * 5).value.backward()
        return time.perf_counter() - began

    ways: dict[str, Callable[[], taps.States]] = {
        "online": lambda: taps.run(target, batch.input_ids, batch.lengths, drafter.config.taps),
        "store": lambda: store.run(target, batch.input_ids, batch.lengths, drafter.config.taps),
        "at_hand": lambda: at_hand,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(6):
        for name, states_of in ways.items():
            taken = step(states_of)
            if repeat:  # the first warms up
                seconds[name].append(taken)
    return {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}


if __name__ == "__main__":
    main()
