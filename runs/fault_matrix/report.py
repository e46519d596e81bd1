"""Rows, and the table made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs.fault_matrix.rows import ROWS, Row

ROOT = Path(__file__).parents[2]
KEPT = (
    "faults", "kind", "drafter", "engine", "outcome", "accept_length", "expected_length", "expected", "first", "second",
    "confident", "verdict", "right", "divergence", "evidence", "seconds",
)  # fmt: skip


def row(row: Row, result: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    grave = [f for f in result["findings"] if f["severity"] != "note"]
    order = [f["cause"] for f in grave]
    first = order[0] if order else result["verdict"]
    second = order[1] if len(order) > 1 else None
    observed, expected = result.get("observed"), result.get("expected")
    engine = result.get("engine") or {}
    return {
        "faults": row.name,
        "kind": row.kind if not row.equivalent else "equivalent",
        "drafter": row.bed,
        "engine": f"{engine.get('name')} {engine.get('version') or ''}".strip(),
        "outcome": f"stopped: {found['died'].message[-200:]}" if "died" in found else "served",
        "accept_length": None if not observed else round(observed["accept_length"]["value"] or 0, 3),
        "expected_length": None if not expected else round(expected["accept_length"]["value"] or 0, 3),
        "expected": [list(slugs) for slugs in row.expected],
        "first": first,
        "second": second,
        "all": order,
        "confident": bool(grave) and not grave[0]["rivals"],
        "verdict": result["verdict"],
        "right": right(row, order, result["verdict"]),
        "divergence": (result.get("divergence") or {}).get("stage"),
        "evidence": [e["measure"] + ": " + str(e["value"])[:80] for e in (grave[0]["evidence"] if grave else [])][:2],
        "seconds": found["seconds"],
    }


def right(row: Row, order: Sequence[str], verdict: str) -> bool:
    """The cause first; of a pair both among the first two; nothing at all where nothing is wrong."""
    if row.equivalent or not row.expected:
        cleared = verdict in ("healthy", "weak")
        return (cleared and not order) or (bool(row.expected) and order[:1] == [row.expected[0][0]])
    if len(row.expected) == 1:
        return bool(order) and order[0] in row.expected[0]
    return len(order) >= 2 and all(any(cause in slugs for cause in order[:2]) for slugs in row.expected)


def read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {one["faults"]: one for one in rows}


def write(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps({key: one.get(key) for key in KEPT}, ensure_ascii=False) for one in rows]
    (ROOT / "docs" / "fault-matrix.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (ROOT / "docs" / "fault-matrix.md").write_text(markdown(rows), encoding="utf-8")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    told = ["# Fault matrix: real vLLM, faults put in, what `eyas diagnose` names", ""]
    told += [
        "Made by `make fault-matrix` (`python -m runs.fault_matrix --report` writes it); rows: `fault-matrix.jsonl`.",
        "`without it` is the accept length that the reference gives on the same text. Rows serve different amounts",
        "of it (6 prompts of 32 tokens for most; 10 of 40 to clear one; 14 of 48 where files are swept), so lengths",
        "compare within a row only.",
        "",
    ]
    for kind, title in (
        ("single", "Single faults"),
        ("pair", "Pairs"),
        ("equivalent", "Faults that change nothing"),
        ("healthy", "Healthy"),
    ):
        these = [r for r in rows if r["kind"] == kind]
        if not these:
            continue
        good = sum(bool(r["right"]) for r in these)
        sure = [r for r in these if r["confident"] and not r["right"]]
        told += [f"## {title}: {good} of {len(these)} right, {len(sure)} confident and wrong", ""]
        told += [
            "| fault | drafter | vLLM | accept length | without it | parts at | first | second | right |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for r in these:
            cells = [r["faults"], r["drafter"], r["outcome"].split(":")[0], r["accept_length"], r["expected_length"],
                     r["divergence"] or "", r["first"], r["second"] or "", "yes" if r["right"] else "no"]  # fmt: skip
            told.append("| " + " | ".join("" if c is None else str(c).replace("|", "\\|") for c in cells) + " |")
        told.append("")
    owed = [row.name for row in ROWS if row.name not in {r["faults"] for r in rows}]
    if owed:
        told += [f"## Not run yet: {len(owed)}", "", "; ".join(owed) + ".", ""]
    return "\n".join(told)
