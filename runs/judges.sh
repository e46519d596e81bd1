#!/usr/bin/env bash
# Outside judges: trainers' own drafter classes, each in an environment of its own, say what tests/test_judges.py holds
# us to. `make judges` calls it; environments come to .engines/judges (about 2 GB), from PyPI.
#
#   runs/judges.sh                                        build what is missing, judge, record
#   VLLM_PYTHON=VENV/bin/python runs/judges.sh            vLLM 0.32 too, which also judges folders saved again here
#   FIXTURES=make runs/judges.sh                          make the drafters again first (they come from seeds)
#
# Packages are pinned without their dependencies where those are for something else: SpecForge's ask for an SGLang with
# CUDA, speculators' for torchvision and torchaudio.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository"
python="${PYTHON:-python3}"
torch="${TORCH:-torch==2.13.0}"
home=.engines/judges
export OMP_WAIT_POLICY=passive

build() { # name, pinned packages taken alone, then what they need
    local name="$1" alone="$2"
    shift 2
    if [[ -e "$home/$name/installed" ]]; then return; fi
    echo "building $home/$name"
    "$python" -m venv "$home/$name"
    # shellcheck disable=SC2086
    if ! { "$home/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" "$@" &&
        "$home/$name/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $alone; }; then
        echo "The judge $name could not be installed: pip needs PyPI ($alone). Nothing was recorded;" >&2
        echo "with a network run it again, it goes on where it stopped." >&2
        exit 1
    fi
    touch "$home/$name/installed"
}

build speculators "speculators==0.9.0 hs-connectors==0.9.0" "transformers==5.19.0" "datasets>=4,<=5.1.0" \
    "loguru==0.7.3" openai pydantic-settings httpx psutil typer rich aiohttp
build specforge "specforge==0.2.0" "transformers==5.8.1" "numpy>=2"

if [[ "${FIXTURES:-}" == make ]]; then
    .venv/bin/python runs/judges.py make tests/fixtures/judges
fi
"$home/specforge/bin/python" runs/judges.py specforge tests/fixtures/judges
for folder in tests/fixtures/judges tests/fixtures/shapes; do
    "$home/speculators/bin/python" runs/judges.py speculators "$folder"
done
if [[ -n "${VLLM_PYTHON:-}" ]]; then
    copies="$(mktemp -d)"
    trap 'rm -rf "$copies"' EXIT
    .venv/bin/python runs/judges.py copies "$copies" --of tests/fixtures/judges
    "$VLLM_PYTHON" runs/engine_shapes.py vllm "$copies"
    cp "$copies/vllm.safetensors" tests/fixtures/judges/
fi
