#!/usr/bin/env bash
# From pinned PyPI wheels to the shipped drafter, on a CPU.
#
#   runs/cpu.sh [OUT]                       default out/smollm2
#   ANSWERS=answers.jsonl runs/cpu.sh OUT   start from answers that exist already
#
# Run it in an environment where eyas is installed. Minutes are for two cores. A run that was interrupted goes on
# with the answers it has; remove $OUT/records and $OUT/drafter to make those again.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-out/smollm2}"
answers="${ANSWERS:-$out/answers.jsonl}"
mkdir -p "$out"

# 90 minutes: 111 MB of prompts and 93 MB of SmolLM2-135M are fetched, 3,716 prompts answered with some 560,000
# tokens. Prompts stay under 256 tokens: longer ones cost time, and a target this small makes little of them.
if [[ -z "${ANSWERS:-}" ]]; then
    python "$repository/runs/answer.py" --target smollm2 --out "$answers" --max-prompt-tokens 256
fi

# 1 minute: chat template, loss masks, a held-out part.
eyas prepare "$answers" --target smollm2 --out "$out/records"

# 110 minutes and 3.3 GB of memory for the states: 1,320 steps of 4 conversations. (That of 2026-11-29 was stopped at
# step 990 for want of time.)
eyas train --records "$out/records" --target smollm2 --out "$out/first" \
    --steps 1320 --lr 6e-4 --depths 5 --batch 4 --freeze-head --keep-states --measure-every 165

# 35 minutes and 3.4 GB of disk: the target's states, once; then 45 to 85 minutes for two passes over them.
eyas capture --records "$out/records" --target smollm2 --out "$out/states" --resume
eyas train --states "$out/states" --records "$out/records" --target smollm2 --init "$out/first" --out "$out/drafter" \
    --steps 1700 --lr 5e-4 --depths 5 --batch 4 --freeze-head --later-share 0.4 --measure-every 340 --seed 7

# 3 minutes: what the drafter is worth on conversations it has not seen.
eyas check "$out/drafter" --target smollm2 --records "$out/records/heldout.jsonl"
