"""What SGLang's own setters capture, for every class of target: the judge in tests/test_dialect_sglang.py.

    python runs/sglang_setters.py WHEEL... [--out tests/fixtures/engines/sglang-setters.json]

The first and the last wheel are asked for targets of 30, 36, 61 and 94 layers, those between for 61.
A wheel is read as it is (pip download --no-deps sglang==X); nothing of it is installed. Its setters and the tests by
which its forward passes pick layers are run on stand-ins, see src/eyas/engines/inside/sglang_taps.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src" / "eyas" / "engines" / "inside"))

import sglang_taps as own  # noqa: E402

LAYERS = (30, 36, 61, 94)
# Classes of drafters register their names too; a target is none of them. MindSpore's models are not SGLang's.
NO_TARGET = re.compile(r"(NextN|MTP|Eagle3?)$|Assistant|^MindSpore")


def lists(n: int) -> list[list[int] | None]:
    """None; the default as layers and as taps; 0 and -1 in front; n-1, n, past n; unsorted; twice; below -1."""
    usual = [1, n // 2 - 1, n - 4]
    return [
        None, usual, [k + 1 for k in usual], [0, 3, n // 2], [-1, 2, n // 2], [3, n // 2, n - 2], [1, n // 2, n - 1],
        [2, n // 2, n - 1], [1, n // 2, n], [2, n // 2, n], [0, 1, n], [1, n // 2, n + 1], [n // 2, 1, n - 4],
        [n - 4, n // 2, 1], [2, 2, n // 2], [1, 1, n // 2], [-2, 3, 5], [1], [5], [1, 8, 15, n - 4], [-n - 2, 3, 5],
    ]  # fmt: skip


def record(wheel: Path, layers: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("sglang/srt/models/")]
        archive.extractall(scratch, members)
        models = own.Models(Path(scratch) / "sglang" / "srt" / "models")
        groups: dict[str, dict[str, Any]] = {}
        for architecture in sorted(models.registered):
            if NO_TARGET.search(architecture) or own.setter_at(models, architecture) is None:
                continue
            answers = [[own.captured(models, architecture, n, ids) for ids in lists(n)] for n in layers]
            said = [[a.get("taps", a.get("error")) for a in of_n] for of_n in answers]
            group = groups.setdefault(json.dumps(said), {"architectures": {}, "captured": said})
            group["architectures"][architecture] = own.setter_at(models, architecture)
    return version, {"registered": len(models.registered), "layers": list(layers), "groups": list(groups.values())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "engines" / "sglang-setters.json")
    options = parser.parse_args()
    found = {
        "command": f"python runs/sglang_setters.py {' '.join(w.name for w in options.wheels)}",
        "date": date.today().isoformat(),
        "ids": {n: lists(n) for n in LAYERS},
        "versions": dict(
            record(wheel, LAYERS if wheel in (options.wheels[0], options.wheels[-1]) else (61,))
            for wheel in options.wheels
        ),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1)
    text = re.sub(r"\[([^][{}]*)\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(options.out, {v: [len(g["architectures"]) for g in r["groups"]] for v, r in found["versions"].items()})


if __name__ == "__main__":
    main()
