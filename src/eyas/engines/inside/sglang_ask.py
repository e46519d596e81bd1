"""The installed SGLang's own word on a drafter. Runs in SGLang's environment: one JSON object in, one line of JSON out.

in   {"config": drafter's config.json, "target_config": target's, "flags": [words of the command line]}
out  {"engine", "version", "way", "taps": {"sglang": [...] or null}, "ids", "flags": [...], "said": [[level, text]],
      "why", "error"}

Its models import kernels that only a GPU has, so nothing is imported: the functions that decide are taken from the
installed source and run on stand-ins (``sglang_taps``, ``sglang_flags``). Imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sglang_flags  # type: ignore[import-not-found]
import sglang_taps  # type: ignore[import-not-found]

WAY = "its own source, on stand-ins"
_WHY = {
    "not registered": "no class of that name is registered",
    "no setter": "the target's class has no set_eagle3_layers_to_capture",
    "nothing was set": "the setter set no layer",
    "IndexError": "the setter marks a layer that is not there: IndexError",
    "TypeError": "tap 0 is kept as hidden + residual, and there is no residual yet: TypeError",
}


def main() -> None:
    request = json.loads(sys.stdin.read())
    root = installed()
    answer: dict[str, Any] = {"engine": "sglang", "version": version(root), "way": WAY, "taps": {"sglang": None}}
    try:
        answer |= taps(root, request["config"], request["target_config"])
        answer |= flags(root, request.get("flags") or [], request["target_config"])
    except Exception as error:
        answer["error"] = {"type": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))


def installed() -> Path:
    """The folder of the package, found without importing it."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'")
    return Path(next(iter(found.submodule_search_locations)))


def version(root: Path) -> str:
    for file in (root / "_version.py", root / "version.py"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        stated = re.search(r"^__version__(?:: \w+)? *(?:= *version *)?= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if stated:
            return stated[1]
    folders = sorted(root.parent.glob("sglang-*.dist-info"))
    return folders[-1].name.split("-")[1].removesuffix(".dist") if folders else "unknown"


def taps(root: Path, config: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    architecture = target["architectures"][0]
    text = {**target, **(target.get("text_config") or {})}
    chosen = sglang_taps.chosen(root / "srt", config)
    models = sglang_taps.Models(root / "srt" / "models")
    got = sglang_taps.captured(models, architecture, text["num_hidden_layers"], chosen["ids"])
    missing = got["asked"] - len(got["taps"]) if "taps" in got else 0
    return {
        "taps": {"sglang": got.get("taps")},
        "ids": chosen["ids"],
        "use_aux_hidden_state": chosen["aux"],
        "setter": sglang_taps.setter_at(models, architecture),
        "why": _WHY.get(got.get("error", ""))
        or (f"{missing} of {got['asked']} states are never reached" if missing else None),
    }


def flags(root: Path, words: list[str], target: Mapping[str, Any]) -> dict[str, Any]:
    types = sglang_flags.kinds(root / "srt")
    asked, environment = sglang_flags.given(words, types)
    if "speculative_algorithm" not in asked:
        words = [*words, "--speculative-algorithm", "EAGLE3"]
    said = sglang_flags.resolve(root / "srt", words, target["architectures"][0])
    notes = [
        {"flag": "--" + name.replace("_", "-"), "requested": asked.get(name), "resolved": value}
        for name, value in said["resolved"].items()
        if value is not None or name in asked
    ]
    unknown = sorted(set(asked) - set(types))
    return {
        "flags": notes,
        "unknown_flags": unknown,
        "environment": environment,
        "said": said["said"],
        "error": said["error"],
    }


if __name__ == "__main__":
    main()
