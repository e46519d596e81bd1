"""How SGLang resolves speculative flags, by its own functions: the judge in tests/test_sglang_flags.py.

    python runs/sglang_arguments.py WHEEL... [--out tests/fixtures/engines/sglang-arguments.json]

A wheel is read as it is; how its functions are run is in src/eyas/engines/inside/sglang_flags.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src" / "eyas" / "engines" / "inside"))

import sglang_flags as own  # noqa: E402

CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1"
TREE = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
FLAGS = (
    "",
    "--speculative-num-steps 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1",
    "--speculative-num-steps 15 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1",
    "--speculative-num-steps 5 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1",
    CHAIN,
    TREE,
    "--speculative-num-steps 3",
    "--speculative-eagle-topk 1",
    "--speculative-num-draft-tokens 8",
    f"{CHAIN} --speculative-draft-model-path DRAFT",
    f"{CHAIN} --max-running-requests 8",
    f"{CHAIN} --quantization fp8",
    f"{CHAIN} --quantization fp8 --speculative-draft-model-quantization awq",
    f"{TREE} --attention-backend trtllm_mha",
    f"{TREE} --page-size 64 --attention-backend flashinfer",
    f"{TREE} --page-size 64 --attention-backend triton",
    f"{TREE} --page-size 64 --attention-backend flashmla",
    f"{CHAIN} --speculative-draft-window-size 2048",
    f"{CHAIN} --speculative-draft-window-size 0",
    f"{CHAIN} --speculative-use-rejection-sampling",
    f"{TREE} --speculative-use-rejection-sampling",
    f"{CHAIN} --speculative-use-rejection-sampling --speculative-accept-threshold-acc 0.5",
    f"{CHAIN} --speculative-use-block-verification",
    f"{CHAIN} --speculative-use-block-verification --device cpu",
    f"SGLANG_SIMULATE_ACC_LEN=3 {CHAIN}",
)
ALGORITHMS = ("EAGLE3", "eagle3", "NEXTN", "EAGLE")
TARGETS = ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM")


def cases() -> list[tuple[str, str]]:
    """(target, flags): every line for one target, ten for the others, one line under every name of the algorithm."""
    lines = [(t, FLAGS if t == TARGETS[0] else FLAGS[:10]) for t in TARGETS]
    found = [(t, f"{flags} --speculative-algorithm EAGLE3".strip()) for t, of_t in lines for flags in of_t]
    return found + [(TARGETS[0], f"{CHAIN} --speculative-algorithm {name}") for name in ALGORITHMS]


def record(wheel: Path) -> tuple[str, list[list[Any]]]:
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        wanted = ("sglang/srt/arg_groups/", "sglang/srt/server_args.py")
        archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(wanted)])
        root = Path(scratch) / "sglang" / "srt"
        answers = []
        for target, flags in cases():
            said = own.resolve(root, shlex.split(flags), target)
            resolved = {k: v for k, v in said["resolved"].items() if v is not None and v is not False}
            lines = [[level, text.split(".")[0][:60]] for level, text in said["said"]]
            error = said["error"]["type"] if said["error"] else None
            answers.append([target, flags, resolved, lines, error])
        return wheel.name.split("-")[1], answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "engines" / "sglang-arguments.json")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": f"python runs/sglang_arguments.py {' '.join(w.name for w in options.wheels)}",
        "date": date.today().isoformat(),
        "versions": dict(record(wheel) for wheel in options.wheels),
    }
    rows = ",\n".join(
        f"{json.dumps(version)}: [\n" + ",\n".join(json.dumps(a) for a in answers) + "\n]"
        for version, answers in found.pop("versions").items()
    )
    head = json.dumps(found)[:-1]
    options.out.write_text(f'{head}, "versions": {{\n{rows}\n}}}}\n', encoding="utf-8")
    print(options.out, options.out.stat().st_size)


if __name__ == "__main__":
    main()
