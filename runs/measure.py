"""Accept length of a drafter in our own loop, every answer proven to be the target's greedy one.

    python runs/measure.py --drafter smollm2-eagle3 --prompts mt-bench
    python runs/measure.py --drafter smollm2-eagle3 --records models/smollm2-135m-eagle3/heldout.jsonl.gz

The proof is one pass of the target over prompt and answer: every token must be the best after what stands before it, or
within 1e-3 of the best (a near tie, counted; the comparison of that answer ends there). By induction that is plain
decoding, at a tenth of its price; `eyas bench` makes the comparison the long way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from rich.progress import track

from eyas import checkpoint, files, prompts, provenance, records, resolve
from eyas import target as targets
from eyas.bench import repeats
from eyas.decode.loop import generate
from eyas.decode.pack import packed
from eyas.decode.ties import TIE
from eyas.render import Renderer
from eyas.results import LengthCounts, Rate
from eyas.target import Target


def main() -> None:
    options = arguments()
    target = targets.load(options.target)
    drafter = checkpoint.load(checkpoint.read(resolve.drafter(options.drafter)), target)
    asked = list(questions(options, target))
    print(
        f"{len(asked)} prompts, {options.draft_tokens} drafted tokens, {options.max_new_tokens} new tokens",
        file=sys.stderr,
    )
    rows = []
    with packed(target, drafter):
        for name, ids in track(asked, "decoding", transient=True):
            began = time.perf_counter()
            run = generate(
                target, drafter, ids, max_new_tokens=options.max_new_tokens, draft_tokens=options.draft_tokens
            ).finish()
            seconds = time.perf_counter() - began
            loop = repeats(run.token_ids)
            rows.append(
                {
                    "id": name,
                    "prompt_ids": ids,
                    "token_ids": run.token_ids,
                    "tokens": len(run.token_ids),
                    "rounds": run.rounds,
                    "drafted": run.drafted,
                    "accepted": run.accepted,
                    "seconds": seconds,
                    "verdict": proof(target, ids, run.token_ids),
                    "repeated": loop.repeated,
                    "grams": loop.total,
                    "loops": loop.loops,
                }
            )
    result = {
        "schema": 1,
        "what": options.prompts or Path(options.records).name,
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "all": summary(rows),
        "without_loops": summary([r for r in rows if not r["loops"]]),
        "provenance": provenance.collect(vars(options)),
        "prompts": rows,
    }
    if options.json:
        files.write_json(Path(options.json), result)
    print(json.dumps({k: result[k] for k in ("what", "draft_tokens", "all", "without_loops")}, indent=2))
    if result["all"] and (result["all"]["wrong"] or result["all"]["ties"] > 0.02 * len(rows)):
        sys.exit("some answers are not the target's own")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="smollm2-eagle3")
    parser.add_argument("--prompts", help="a prompt set by name")
    parser.add_argument("--records", help="records whose first prompts are asked")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first N")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json")
    options = parser.parse_args()
    if bool(options.prompts) == bool(options.records):
        parser.error("pass one of --prompts and --records")
    return options


def questions(options: argparse.Namespace, target: Target) -> Iterator[tuple[str, list[int]]]:
    end = None if options.limit is None else options.skip + options.limit
    if options.prompts:
        renderer = Renderer(target.tokenizer, target.eos_ids())  # type: ignore[arg-type]
        for prompt in prompts.load(options.prompts)[options.skip : end]:
            yield prompt.id, renderer.ids(prompt.messages(), prompt=True)
    else:
        for record in records.read(Path(options.records), vocab_size=target.vocab_size)[options.skip : end]:
            yield record.id, record.input_ids[: record.spans()[0][0]].tolist()


@torch.inference_mode()
def proof(target: Target, prompt_ids: list[int], token_ids: list[int]) -> str:
    """equal, tie (equal up to a near tie), or wrong."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    states = target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 : -1]
    logits = target.logits(states)
    short = (logits.max(-1).values - logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]).numpy()
    off = np.flatnonzero(short > 0)
    if not len(off):
        return "equal"
    return "tie" if short[off[0]] < TIE else "wrong"


def summary(rows: list[dict]) -> dict | None:  # type: ignore[type-arg]
    if not rows:
        return None
    drafted, accepted = (np.array([r[key] for r in rows]) for key in ("drafted", "accepted"))
    rounds = np.array([r["rounds"] for r in rows])
    length = LengthCounts(drafted.shape[1], rounds, accepted.sum(1))
    low, high = length.interval()
    return {
        "prompts": len(rows),
        "tokens": sum(r["tokens"] for r in rows),
        "rounds": int(rounds.sum()),
        "accept_length": length.value,
        "low": low,
        "high": high,
        "joint": [Rate.over_records(accepted[:, k], rounds).rate for k in range(drafted.shape[1])],
        "repeated_8grams": sum(r["repeated"] for r in rows) / max(1, sum(r["grams"] for r in rows)),
        "equal": sum(r["verdict"] == "equal" for r in rows),
        "ties": sum(r["verdict"] == "tie" for r in rows),
        "wrong": sum(r["verdict"] == "wrong" for r in rows),
        "tokens_per_second": sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows),
    }


if __name__ == "__main__":
    main()
