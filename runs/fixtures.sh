#!/usr/bin/env bash
# The test drafters under tests/fixtures/drafters: trained a little, on taps that are not the default ones, which
# would hide faults. Small on purpose: 4,096 draft tokens, narrow MLPs and heads, under 12 MB each.
#
#   SMOLLM2=records GEMMA3=records runs/fixtures.sh [OUT]     folders written by `eyas prepare` for each target
#
# SMOLLM2 was the first 700 training and 40 held-out records of the shipped drafter's mix. GEMMA3 (a base model):
#   eyas prepare PROMPTS --target gemma3-270m --raw --regenerate --max-new-tokens 80 --held-out 0.12 --out RECORDS
#
# Run it in an environment where eyas is installed. About 10 minutes a drafter on two cores; an interrupted run is
# begun again. ONLY=name makes one of them.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
fixtures="$repository/tests/fixtures/drafters"
out="${1:-out/fixtures}"
mkdir -p "$out" "$fixtures"

make_one() { # name, target, records, options of eyas train
    local name="$1" target="$2" records="$3"
    shift 3
    if [[ -n "${ONLY:-}" && "$ONLY" != "$name" ]]; then return; fi
    eyas train --records "$records" --target "$target" --out "$out/$name" --overwrite \
        --draft-vocab 4096 --freeze-head --batch 4 --later-share 0.4 --keep-states --seed 0 "$@"
}

keep() { # name: into the repository
    if [[ -n "${ONLY:-}" && "$ONLY" != "$1" ]]; then return; fi
    mkdir -p "$fixtures/$1"
    cp "$out/$1"/{config,provenance,curves}.json "$out/$1/model.safetensors" "$fixtures/$1/"
    local bytes
    bytes="$(stat -c %s "$fixtures/$1/model.safetensors")"
    if ((bytes > 12000000)); then
        echo "$1 has $bytes bytes, 12,000,000 are allowed" >&2
        exit 1
    fi
}

# Taps 0, 2, 15 of 30: the embedding among them, none from the top.
make_one smollm2-taps-0-2-15 smollm2 "${SMOLLM2:?}" --taps 0,2,15 --intermediate-size 512 \
    --steps 300 --measure-every 100 --measure-records 32
keep smollm2-taps-0-2-15

# EAGLE-3.1 with an embedding of its own: 57 MB of embedding, so it is made again from its seed and not committed.
make_one smollm2-eagle31 smollm2 "${SMOLLM2:?}" --taps 2,15,27 --intermediate-size 512 \
    --fc-norm --norm-output --own-embedding --steps 120 --measure-every 60

# Another architecture, a vocabulary of 262,144, sliding windows; heads of 64 where the target has 256.
make_one gemma3-taps-0-9-15 gemma3-270m "${GEMMA3:?}" --taps 0,9,15 --intermediate-size 512 --head-dim 64 \
    --steps 240 --measure-every 80
keep gemma3-taps-0-9-15
