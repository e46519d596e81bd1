"""What real vLLM captures, feeds and drafts under every contract: tests/fixtures/engines/vllm-taps.json and a table.

    PYTHONPATH=src:tests/engines .venv/bin/python runs/vllm_taps.py VENV/bin/python [--name "other taps" ...]

VENV is where vLLM is (`make engines`). Some minutes on two cores. The table goes to docs/engines-vllm.md, between the
lines that say so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import contracts
import numpy as np

ROOT = Path(__file__).parents[1]
START, END = "<!-- made by runs/vllm_taps.py -->", "<!-- end -->"


def row(one: contracts.Seen, config: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": one.case.name, "config": config, "flags": list(one.case.flags), "trained": list(one.case.taps),
        "kind": one.case.kind,
    }  # fmt: skip
    if one.error is not None:
        return told | {"error": one.error}
    assert one.fed is not None
    errors = contracts.errors_by_tap(one.fed, contracts.every_tap(one.target, contracts.PROMPT))
    nearest = [int(np.argmin(slot)) for slot in errors]
    return told | {
        "layers": one.answer["layers"],
        "fed": nearest,
        "error_of_fed": float(f"{max(errors[i, t] for i, t in enumerate(nearest)):.1e}"),
        "error_of_next": round(float(min(np.delete(errors[i], t).min() for i, t in enumerate(nearest))), 2),
        "counts": one.answer["counts"],
    }


def table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    made_by = f"vLLM {about['version']}, {about['runner']} runner on a CPU, {about['date']}, commit `{about['commit']}`"
    head = ("contract", "trained on", "model collects", "drafter is fed", "its error", "next tap's")
    lines = [START, "", f"{made_by}, `{about['command']}`.", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['name']} | {r['trained']} | stops: `{r['error'][:80]}` | | | |")
        else:
            shown = (r["name"], r["trained"], r["layers"], r["fed"], r["error_of_fed"], r["error_of_next"])
            lines.append("| " + " | ".join(map(str, shown)) + " |")
    return "\n".join([*lines, "", END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path)
    parser.add_argument("--name", action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [case for case in contracts.CASES if not options.name or case.name in options.name]
    out = options.out or Path(tempfile.mkdtemp(prefix="eyas-vllm-taps-"))
    out.mkdir(parents=True, exist_ok=True)
    version, seen = contracts.run(options.python, out, cases)
    configs = [json.loads((out / f"eagle3-{contracts.file_name(c)}" / "config.json").read_text("utf-8")) for c in cases]
    rows = [row(one, {k: v for k, v in c.items() if k != "eyas"}) for one, c in zip(seen, configs, strict=True)]
    for r in rows:
        print(json.dumps({k: v for k, v in r.items() if k != "config"}))
    if options.name:
        return
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    about = {"engine": "vllm", "version": version, "runner": "V1", "date": datetime.now(UTC).date().isoformat()}
    about |= {"commit": commit, "command": "runs/vllm_taps.py"}
    target = {"num_layers": contracts.LAYERS, "hidden_size": contracts.WIDTH, "vocab_size": contracts.VOCAB}
    told = ",\n".join(json.dumps(r) for r in rows)
    recorded = f'{json.dumps({**about, "target": target})[:-1]}, "cases": [\n{told}\n]}}\n'
    (ROOT / "tests" / "fixtures" / "engines" / "vllm-taps.json").write_text(recorded, encoding="utf-8")
    page = ROOT / "docs" / "engines-vllm.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    page.write_text(before + table(about, rows) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
