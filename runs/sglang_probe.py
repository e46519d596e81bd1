"""Where in SGLang's source stand the names that the probe touches: the judge of tests/test_sglang_probe.py.

    python runs/sglang_probe.py WHEEL... [--out tests/fixtures/engines/sglang-probe.json]

A wheel, or a folder that one was unpacked to, is read as it is; nothing of it runs. Which names those are is said by
src/eyas/engines/inside/sglang_probe.py (``HOOKS``, ``READS``, ``PARAMETERS``). For each: file and line, or null.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src" / "eyas" / "engines" / "inside"))

import sglang_probe as own  # noqa: E402


class Source:
    """A wheel's files under sglang/srt, parsed as they are asked for."""

    def __init__(self, place: Path) -> None:
        self.archive = None if place.is_dir() else zipfile.ZipFile(place)
        self.place = place
        self._trees: dict[str, ast.Module] = {}

    @property
    def version(self) -> str:
        if self.archive is not None:
            return self.place.name.split("-")[1]
        return next(self.place.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist")

    def text(self, file: str) -> str:
        if self.archive is None:
            path = self.place / "sglang" / "srt" / file
            return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
        name = f"sglang/srt/{file}"
        return self.archive.read(name).decode("utf-8-sig") if name in self.archive.namelist() else ""

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def classes(self, file: str) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree(file).body if isinstance(node, ast.ClassDef)}


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """As written; those after a star with the star before the first."""
    said = function.args
    keyword = [arg.arg for arg in said.kwonlyargs]
    return [arg.arg for arg in said.args] + (["*", *keyword] if keyword else [])


def attribute(of: ast.ClassDef, name: str) -> int | None:
    """The line that makes it: a field, a method or property, or what a method sets on ``self``."""
    for node in of.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node.lineno
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node.lineno
    for node in ast.walk(of):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        parts = [part for t in targets if t is not None for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
        if isinstance(node, ast.Assign | ast.AnnAssign) and f"self.{name}" in [ast.unparse(part) for part in parts]:
            return node.lineno
    return None


def record(source: Source) -> dict[str, Any]:
    reads: dict[str, Any] = {}
    for (file, name), wanted in own.READS.items():
        of = source.classes(file).get(name)
        for one in wanted:
            line = attribute(of, one) if of is not None else None
            reads[f"{name}.{one}"] = f"{file}:{line}" if line else None
    functions: dict[str, Any] = {}
    for file, name, method in own.PARAMETERS:
        of = source.classes(file).get(name)
        found = methods(of).get(method) if of is not None else None
        functions[f"{name}.{method}"] = (
            {"at": f"{file}:{found.lineno}", "parameters": parameters(found)} if found is not None else None
        )
    registry = source.classes("plugins/hook_registry.py").get("HookRegistry")
    register = methods(registry).get("register") if registry is not None else None
    return {
        "reads": reads,
        "functions": functions,
        "register": parameters(register) if register is not None else None,
        "loads": [
            f"{file}:{number}"
            for file in ("managers/scheduler.py", "entrypoints/engine.py", "managers/detokenizer_manager.py")
            for number, line in enumerate(source.text(file).splitlines(), 1)
            if re.search(r"^\s+load_plugins\(\)", line)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "fixtures" / "engines" / "sglang-probe.json")
    options = parser.parse_args()
    sources = [Source(wheel) for wheel in options.wheels]
    found = {
        "command": f"python runs/sglang_probe.py {' '.join(w.name for w in options.wheels)}",
        "date": date.today().isoformat(),
        "versions": {source.version: record(source) for source in sources},
    }
    text = re.sub(r"\[([^][{}]*)\]", lambda m: "[" + " ".join(m[1].split()) + "]", json.dumps(found, indent=1))
    options.out.write_text(text + "\n", encoding="utf-8")
    for version, said in found["versions"].items():
        missing = [name for name, at in {**said["reads"], **said["functions"]}.items() if at is None]
        print(version, "missing:", ", ".join(missing) or "nothing", "| loads:", said["loads"])


if __name__ == "__main__":
    main()
