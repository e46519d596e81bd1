"""Static decoding on a GPU: the same tokens, one host sync a round, and what CUDA graphs are worth.

    python runs/gpu_decode.py                     # on a machine with CUDA; some five minutes, most of them compiling
    python runs/gpu_decode.py --device cpu --max-new-tokens 24 --turns 1      # everything but graphs, syncs and speed

Exit code 0: every promise held. 1: one did not, and it is named. 2: no CUDA here and no ``--device cpu``.

No GPU has run this yet. What it prints should look like this; ``?`` marks a guess, the rest are the promises:

    fp32  side                 wrong  excused  accept length   tok/s  ms a round  syncs a round  in the step
          plain                    -        -            -      150?           -              -            -
          plain, graphed pass      0        0            -      500?           -              -            -
          library rounds           0        0         2.2?      150?         15?             8?            -
          static rounds            0        0   as library      150?         15?              1            0
          static, compiled         0        0   as library      300?          7?              1            0
          static, graphed          0        0   as library      900?        2.5?              1            0
          compiled and graphed     0        0   as library     1200?        1.8?              1            0
    bf16  the same; excused is not bounded (see below), accept lengths differ a little, and it is faster
    all promises held

The promises:
    tokens   every answer is plain decoding's up to the tie rule (``decode.ties``): none wrong; in fp32 at most 2 % of
             the answers excused. In bf16 long answers meet near ties that no two kernels decide alike: only counted.
             There the rule is weak: its measured tie was 1.9 on a CPU, so fp32 is the proof of the tokens.
    counts   in fp32 the accept length is the library rounds' within 0.02.
    syncs    CUDA's own sync debugging sees one host sync in a static round, its end, and none in its step.
    speed    graphed rounds are faster than the library's.

What only a GPU can tell: that the steps can be captured at all, that replays read what the host wrote before them, that
kernels chosen there agree up to ties, the syncs, the times. Everything else runs on the CPU too, where ``compiled`` is
traced by ``torch.compile`` and run as it stands.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas import checkpoint, placement, provenance, records, resolve
from eyas import target as targets
from eyas.decode import ties
from eyas.decode.loop import generate
from eyas.decode.plain import plain
from eyas.decode.static import StaticPasses, Step, as_it_is, graphed
from eyas.decode.static_round import GreedyRounds
from eyas.drafter import Drafter
from eyas.target import Target

HELDOUT = Path(__file__).parents[1] / "models" / "smollm2-135m-eagle3" / "heldout.jsonl.gz"
EXCUSED = 0.02  # of the answers, in fp32
AGREES = 0.02  # accept length


@dataclass
class Told:
    """An answer; ``rounds`` is 0 where none were played."""

    token_ids: list[int]
    seconds: float
    rounds: int = 0
    accepted: int = 0
    round_seconds: float = 0.0
    """Of all rounds, without prefill."""


@dataclass
class Side:
    """A way of decoding and what came of it."""

    name: str
    answer: Callable[[list[int], int], Told]
    """Of a prompt, and so many new tokens."""
    step: Step | None = None
    first: list[Told] = field(default_factory=list)
    """The answers of the first turn, prompt by prompt."""
    speeds: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        rounds = sum(told.rounds for told in self.first)
        return 1 + sum(told.accepted for told in self.first) / rounds if rounds else None


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here: run this on a GPU, or pass --device cpu for the dry run.", file=sys.stderr)
        return 2
    torch._dynamo.config.recompile_limit = 64  # one code, many row counts and sides
    broken: list[str] = []
    result: dict[str, Any] = {"provenance": provenance.collect(vars(options))}
    for name in options.dtypes.split(","):
        torch._dynamo.reset()
        sides = measured(options, placement.dtype(name))
        broken += [f"{name}: {promise}" for promise in judged(sides, name, options.device)]
        show(name, sides)
        result[name] = {side.name: side.row for side in sides}
    if options.json:
        Path(options.json).write_text(json.dumps({**result, "broken": broken}, indent=2) + "\n", encoding="utf-8")
    print("\n".join(f"BROKEN: {promise}" for promise in broken) if broken else kept(options.device))
    return 1 if broken else 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3")
    parser.add_argument("--records", type=Path, default=HELDOUT, help="records whose first prompts are asked")
    parser.add_argument("--prompts", type=int, default=8, help="how many of them")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3, help="answers of each side to each prompt; the first warms up")
    parser.add_argument("--json")
    return parser.parse_args(words)


def kept(device: str) -> str:
    return "all promises held" if device == "cuda" else "tokens and counts held; graphs, syncs and speed need a GPU"


# -- sides ------------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace, dtype: torch.dtype) -> list[Side]:
    """Every side's answers to every prompt, in turns, with all that is told of them in its row."""
    target = targets.load(options.target, dtype=dtype, device=options.device)
    drafter = cast(checkpoint.load(checkpoint.read(resolve.drafter(options.drafter)), target), dtype)
    chosen = records.read(options.records, vocab_size=target.vocab_size)[: options.prompts]
    asked = [record.input_ids[: record.spans()[0][0]].tolist() for record in chosen]
    sides = sides_of(target, drafter, max(map(len, asked)) + options.max_new_tokens, options)
    for turn in range(options.turns):
        for ids in asked:
            for side in sides:
                play(side, ids, options.max_new_tokens, timed=turn > 0 or options.turns == 1, judged=turn == 0)
    compare(target, asked, sides, options.max_new_tokens)
    for side in sides:
        side.row |= synced(side, asked[0], options)
    return sides


def cast(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """The drafter in the target's precision. Its rope stays as it is: rounded frequencies are other positions."""
    rotary = copy.deepcopy(drafter.rotary)
    drafter = drafter.to(dtype).requires_grad_(False)
    drafter.rotary = rotary
    return drafter


def sides_of(target: Target, drafter: Drafter, capacity: int, options: argparse.Namespace) -> list[Side]:
    K, on_gpu = options.draft_tokens, options.device == "cuda"
    compiled = partial(torch.compile, fullgraph=True, dynamic=False, backend="inductor" if on_gpu else "eager")
    ways: dict[str, Callable[[Step], Step]] = {"static rounds": as_it_is, "static, compiled": compiled}
    if on_gpu:
        ways |= {"static, graphed": graphed, "compiled and graphed": lambda step: graphed(compiled(step))}
    one = StaticPasses(target, (), capacity=capacity, prepare=graphed if on_gpu else as_it_is)
    sides = [
        Side("plain", partial(plainly, target)),
        Side("plain, graphed pass" if on_gpu else "plain, static pass", partial(plainly_static, target, one)),
        Side("library rounds", partial(library, target, drafter, K)),
    ]
    for name, prepare in ways.items():
        rounds = GreedyRounds(target, drafter, draft_tokens=K, capacity=capacity, prepare=prepare)
        sides.append(Side(name, partial(statically, rounds), rounds.step))
    return sides


def plainly(target: Target, ids: list[int], new: int) -> Told:
    began = time.perf_counter()
    tokens = list(plain(target, ids, max_new_tokens=new))
    return Told(tokens, time.perf_counter() - began)


@torch.no_grad()
def plainly_static(target: Target, passes: StaticPasses, ids: list[int], new: int) -> Told:
    """One token a pass, the pass being a graph: what rounds of graphs are to be compared with."""
    began, ends, fed, tokens = time.perf_counter(), target.eos_ids(), ids, list[int]()
    passes.truncate(0)
    while len(tokens) < new and not (tokens and tokens[-1] in ends):
        states, _ = passes.forward(fed)
        tokens.append(int(target.logits(states[-1]).argmax()))
        fed = tokens[-1:]
    return Told(tokens, time.perf_counter() - began)


def library(target: Target, drafter: Drafter, K: int, ids: list[int], new: int) -> Told:
    run = generate(target, drafter, ids, max_new_tokens=new, draft_tokens=K)
    prefill = run.seconds
    run.finish()
    return Told(run.token_ids, run.seconds, run.rounds, sum(run.accepted), run.seconds - prefill)


def statically(rounds: GreedyRounds, ids: list[int], new: int) -> Told:
    done = rounds.generate(ids, new)
    return Told(done.token_ids, done.seconds, done.rounds, sum(done.accepted), sum(done.round_seconds))


def play(side: Side, ids: list[int], new: int, *, timed: bool, judged: bool) -> None:
    told = side.answer(ids, new)
    if judged:
        side.first.append(told)
    if timed:
        side.speeds.append(len(told.token_ids) / told.seconds)
        if told.rounds:
            side.round_ms.append(1e3 * told.round_seconds / told.rounds)


# -- what came of it --------------------------------------------------------------------------------------------------


def compare(target: Target, asked: list[list[int]], sides: list[Side], new: int) -> None:
    """Wrong and excused answers of every side, against plain decoding's and its two best logits' distances."""
    found = {side.name: [0, 0] for side in sides}
    largest = 0.0
    for i, ids in enumerate(asked):
        gaps: list[float] = []
        oracle = list(plain(target, ids, max_new_tokens=new, gaps=gaps))
        tie = ties.measured_tie(target, [*ids, *oracle])
        largest = max(largest, tie)
        for side in sides:
            difference = ties.first_difference(oracle, side.first[i].token_ids, gaps, tie)
            if difference is not None:
                found[side.name][difference.excused] += 1
    for side in sides:
        wrong, excused = found[side.name]
        side.row |= {"answers": len(asked), "wrong": wrong, "excused": excused, "largest_tie": largest}
        side.row |= {"accept_length": side.accept_length, "tokens_per_second": statistics.median(side.speeds)}
        side.row["round_ms"] = statistics.median(side.round_ms) if side.round_ms else None
        side.row["answered"] = [asdict(told) for told in side.first]


def synced(side: Side, ids: list[int], options: argparse.Namespace) -> dict[str, float | None]:
    """Host syncs a round, prefill's taken off, and those of a static round's step alone; None where none are seen."""
    if options.device != "cuda" or not side.first[0].rounds:
        return {"syncs": None, "step_syncs": None}
    prefill, _ = counted(lambda: side.answer(ids, 1))
    whole, told = counted(lambda: side.answer(ids, options.max_new_tokens))
    step = None if side.step is None else counted(side.step)[0]
    return {"syncs": (whole - prefill) / told.rounds, "step_syncs": step}


def counted(work: Callable[[], Any]) -> tuple[int, Any]:
    """Host syncs that CUDA warns of while this runs, and what it returns."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen), found


def judged(sides: list[Side], dtype: str, device: str) -> list[str]:
    """The promises that were broken, in words."""
    told = {side.name: side for side in sides}
    theirs, broken = told["library rounds"], list[str]()
    for side in sides:
        row = side.row
        if row["wrong"]:
            broken.append(f"{side.name}: {row['wrong']} of {row['answers']} answers are not the target's own")
        if dtype == "fp32" and row["excused"] > EXCUSED * row["answers"]:
            broken.append(f"{side.name}: {row['excused']} of {row['answers']} answers excused by a near tie")
        if side.step is None:
            continue
        lengths = side.accept_length, theirs.accept_length
        if dtype == "fp32" and None not in lengths and abs(lengths[0] - lengths[1]) > AGREES:  # type: ignore[operator]
            broken.append(f"{side.name}: accept length {lengths[0]:.3f}, the library rounds' is {lengths[1]:.3f}")
        if device == "cuda" and (row["syncs"], row["step_syncs"]) != (1, 0):
            broken.append(
                f"{side.name}: {row['syncs']} host syncs a round and {row['step_syncs']} in its step, not 1 and 0"
            )
        if "graphed" in side.name and row["tokens_per_second"] <= theirs.row["tokens_per_second"]:
            broken.append(f"{side.name}: {row['tokens_per_second']:.0f} tok/s, no faster than the library rounds")
    return broken


def show(dtype: str, sides: list[Side]) -> None:
    print(f"{dtype:5} {'side':22} wrong  excused  accept length   tok/s  ms a round  syncs a round  in the step")
    for side in sides:
        row = side.row
        print(
            f"{'':5} {side.name:22} {row['wrong']:5}  {row['excused']:7}  {said(row['accept_length'], 3):>13}  "
            f"{said(row['tokens_per_second'], 1):>6}  {said(row['round_ms'], 2):>10}  {said(row['syncs'], 2):>13}  "
            f"{said(row['step_syncs'], 0):>11}"
        )
    row = sides[0].row
    print(f"      {row['answers']} answers; two best logits closer than {row['largest_tie']:.2g} (at most) are a tie")


def said(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
