"""The same prompts through real vLLM on the CPU: does it accept what our loop accepts?

Run with the Python of vLLM's own environment, on what runs/measure.py wrote with --json:

    VENV/bin/python runs/vllm_accept.py --measured measured.json --target TARGET_DIR --drafter DRAFTER_DIR

Prints both sides' rounds, accept length and joint rates by depth, and how many texts are equal. The V1 runner is what
a CPU gets. Neither eyas nor its dependencies are imported here.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    with open(options.measured, encoding="utf-8") as handle:
        measured = json.load(handle)
    rows, k = measured["prompts"][: options.limit], measured["draft_tokens"]
    llm = LLM(
        model=options.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": options.drafter, "num_speculative_tokens": k},
    )
    sampling = SamplingParams(temperature=0, max_tokens=measured["max_new_tokens"])
    answers = llm.generate([{"prompt_token_ids": row["prompt_ids"]} for row in rows], sampling)
    equal = sum(list(a.outputs[0].token_ids) == r["token_ids"] for a, r in zip(answers, rows, strict=True))

    rounds = accepted = 0
    by_depth = [0] * k
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            rounds += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            accepted += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            by_depth = [a + b for a, b in zip(by_depth, metric.values, strict=True)]
    ours_rounds = sum(row["rounds"] for row in rows)
    ours = [sum(row["accepted"][d] for row in rows) for d in range(k)]
    told = {
        "prompts": len(rows),
        "equal_texts": equal,
        "vllm": {"rounds": rounds, "accept_length": 1 + accepted / rounds, "joint": [a / rounds for a in by_depth]},
        "eyas": {
            "rounds": ours_rounds,
            "accept_length": 1 + sum(ours) / ours_rounds,
            "joint": [a / ours_rounds for a in ours],
        },
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
