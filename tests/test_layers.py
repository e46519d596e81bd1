"""Who may import whom, enforced; and what no file may lean on.

The table is the design's. A module may import what stands in its row's list, and nothing hides an import in a
function except the command line and the lazy package root.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "eyas"

FACTS = {"errors", "causes"}
ROW_1 = {"files", "provenance", "fetch", "contract", "dialects", "results", "report", "inventory", "prompts", "resolve"}
ROW_1 |= {"json_stream", "sources", "conversations", "answers", "endpoint", "journal", "promised"}
ROW_2 = {"records", "render", "preformatted", "convert", "batches", "vocab", "placement", "unpack", "target", "taps"}
ROW_2 |= {"target_ends", "widened", "states", "drafter", "checkpoint", "gguf_export"}
BELOW_3 = FACTS | ROW_1 | ROW_2

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "causes": set(),
    "answers": FACTS,
    "endpoint": FACTS | {"answers"},
    "files": FACTS,
    "journal": FACTS | {"files"},
    "provenance": FACTS,
    "contract": FACTS,
    "inventory": FACTS,
    "results": FACTS,
    "promised": FACTS | {"provenance", "results"},
    "dialects": FACTS | {"contract", "inventory"},
    "report": FACTS | {"results"},
    "fetch": FACTS | {"files", "provenance"},
    "prompts": FACTS | {"files", "fetch"},
    "resolve": FACTS | {"fetch", "provenance"},
    "json_stream": FACTS,
    "sources": FACTS | {"files", "json_stream", "prompts"},
    "conversations": FACTS,
    "records": FACTS | ROW_1,
    "render": FACTS | ROW_1 | {"records"},
    "preformatted": FACTS | ROW_1 | {"records", "render"},
    "convert": FACTS | ROW_1 | {"records", "render", "preformatted"},
    "batches": FACTS | ROW_1 | {"records"},
    "vocab": FACTS | ROW_1,
    "placement": FACTS,
    "unpack": FACTS | ROW_1,
    "widened": set(),
    "target_ends": FACTS | ROW_1 | {"widened"},
    "target": FACTS | ROW_1 | {"placement", "unpack", "target_ends"},
    "taps": FACTS | ROW_1 | {"target"},
    "states": FACTS | ROW_1 | {"taps", "target", "records", "batches"},
    "drafter": FACTS | ROW_1 | {"vocab"},
    "checkpoint": FACTS | ROW_1 | {"drafter", "vocab", "target", "widened"},
    "gguf_export": FACTS | ROW_1 | {"checkpoint", "vocab"},
    "objective": BELOW_3,
    "decode": BELOW_3,
    "prepare": BELOW_3,
    "answerers": BELOW_3 | {"decode"},
    "regenerate": BELOW_3 | {"decode", "answerers"},
    "starts": BELOW_3 | {"objective"},
    "curve": BELOW_3 | {"objective", "decode"},
    "slices": BELOW_3 | {"curve"},
    "variants": BELOW_3 | {"objective", "curve"},
    "compare": BELOW_3,
    "check": BELOW_3 | {"curve", "slices", "variants", "compare", "show", "bench"},
    "engines": FACTS | ROW_1,
    "diagnose": BELOW_3 | {"check", "variants", "compare", "engines", "curve", "decode"},
    "capture": BELOW_3 | {"engines"},
    "train": BELOW_3 | {"objective", "curve", "starts"},
    "show": FACTS | ROW_1 | {"engines"},
    "export": BELOW_3 | {"show", "gguf_export"},
    "serve": BELOW_3 | {"decode"},
    "bench": FACTS | ROW_1,
    "watch": FACTS | ROW_1 | {"engines"},
}
NO_TORCH = FACTS | ROW_1 | {"bench", "engines", "show", "watch"}
LATE_IMPORTS = {"cli", "__init__"}


def part_of(path: Path) -> str:
    """The row's name of a file: a module, or the package it lies in."""
    return path.relative_to(SRC).with_suffix("").parts[0]


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every imported name, dotted, and whether a function hides it."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node in inside


def ours(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "eyas" and len(parts) > 1 else None


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SRC)))
def test_a_module_imports_only_what_its_row_may(path: Path) -> None:
    part = part_of(path)
    if part in ("cli", "__init__", "__main__"):
        return
    assert part in MAY_IMPORT, f"{part} is in no row: add it to the table, downwards only"
    for name, hidden in imports(ast.parse(path.read_text(encoding="utf-8"))):
        imported = ours(name)
        if imported is None:
            continue
        assert not hidden, f"{path.name} hides the import of {name} in a function"
        assert imported == part or imported in MAY_IMPORT[part], f"{part} may not import {imported}"


def test_the_table_itself_points_downwards() -> None:
    """No cycle can hide in it: every module can be removed after those it may import."""
    left = dict(MAY_IMPORT)
    while left:
        free = [part for part, below in left.items() if not (below & set(left)) - {part}]
        assert free, f"a cycle among {sorted(left)}"
        for part in free:
            del left[part]


def test_the_test_sees_a_forbidden_import() -> None:
    found = dict(imports(ast.parse("from eyas import train\ndef f():\n    from eyas.decode import plain\n")))
    assert found == {"eyas.train": False, "eyas.decode.plain": True}
    assert "train" not in MAY_IMPORT["curve"]
    assert "decode" not in MAY_IMPORT["objective"]
    assert "objective" not in MAY_IMPORT["decode"]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SRC)))
def test_facts_know_no_torch(path: Path) -> None:
    if part_of(path) not in NO_TORCH:
        return
    heavy = {name.split(".")[0] for name, _ in imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert not heavy & {"torch", "transformers", "safetensors", "accelerate"}


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_eyas_loads_nothing_heavy() -> None:
    loaded = child("import sys, eyas; print('\\n'.join(sys.modules))").split()
    assert not {"torch", "transformers", "numpy", "rich"} & set(loaded)


def verbs() -> list[str]:
    return sorted(
        p.stem
        for p in (SRC / "cli").glob("*.py")
        if p.stem not in ("__init__", "answering", "common", "pairing", "turning")
    )


@pytest.mark.parametrize("verb", ["", *verbs()])
def test_help_loads_neither_torch_nor_transformers(verb: str) -> None:
    code = (
        f"import sys; sys.argv = ['eyas', *{verb!r}.split(), '--help']\n"
        "from eyas.cli import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "print('LOADED', *[m for m in ('torch', 'transformers', 'safetensors', 'matplotlib') if m in sys.modules])"
    )
    output = child(code)
    assert "Usage" in output
    assert output.strip().endswith("LOADED")


def test_public_names_exist() -> None:
    import eyas

    assert not [name for name in eyas.__all__ if getattr(eyas, name, None) is None]
    assert list(eyas.__all__) == sorted(eyas.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = eyas.nonsense


def test_nothing_leans_on_the_workplace() -> None:
    """A clone has only itself: no file may name a folder of the machine it was written on."""
    forbidden = ("../" + "shared", "/work/" + "shared", "/work/" + "main")
    looked_at = [
        *SRC.rglob("*"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "runs").glob("*"),
        *(ROOT / "docs").glob("*"),
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        ROOT / "README.md",
        ROOT / "pyproject.toml",
    ]
    for path in looked_at:
        if (
            path.is_file()
            and path.suffix in ("", ".py", ".sh", ".md", ".toml", ".jinja")
            and "__pycache__" not in path.parts
        ):
            text = path.read_text(encoding="utf-8")
            assert not [word for word in forbidden if word in text], path


def test_no_file_grows_past_what_one_reads() -> None:
    for path in files():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 420, path
