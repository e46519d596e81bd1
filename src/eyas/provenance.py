"""What produced a result: versions, machine and arguments, fit to be published.

Secrets are masked and absolute paths shortened, so that it can travel with a checkpoint or into an issue.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "numpy", "safetensors")
MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Whole words only: `tokenizer` is no secret, and neither is a count such as `draft_tokens` (see _is_secret).
_SECRET_WORD = re.compile(r"(?:token|keys?|secrets?|passwords?|authorization)$")
_SECRET_FLAG = re.compile(r"--?[\w-]*(?:token|key|secret|password|authorization)$", re.IGNORECASE)
_IN_TEXT = (
    (re.compile(r"(?<![\w-])(?:hf_|sk-)[\w-]{6,}"), MASK),
    (re.compile(r"(\w://)[^\s/@]+@"), rf"\1{MASK}@"),
    (
        re.compile(
            r"((?:(?:token|key|secret|password|authorization)[\"']?\s*[=:]\s*"
            r"|--[\w-]*(?:token|key|secret|password|authorization)\s+)[\"']?(?:bearer\s+)?)[^\s&,;\"']+",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(bearer\s+)[^\s\"']+", re.IGNORECASE), rf"\1{MASK}"),
)
# The second slash of `http://` is no path, nor is the one in `a/b`.
_PATH_IN_TEXT = re.compile(r"(?<![\w/.~-])(?:/(?!/)|~)[^\s,;:=\"']*")


def collect(arguments: Mapping[str, object]) -> dict[str, object]:
    """Everything needed to say later what made a result; plain JSON, nothing personal in it."""
    return {
        "eyas": _version("eyas"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "arguments": publishable(arguments),
    }


def sha256_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "os": f"{platform.system()} {platform.release()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.machine()


def publishable(value: object) -> object:
    """``value`` as plain JSON, without secrets, absolute paths or non-finite numbers."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): MASK if _is_secret(str(key), item) else publishable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _publishable_list(value)
    if isinstance(value, set | frozenset):
        return _publishable_list(sorted(value, key=str))
    if isinstance(value, os.PathLike):
        return _short_path(os.fspath(value))
    return _clean_text(str(value))


def _publishable_list(values: Iterable[object]) -> list[object]:
    """A list that may be an argv: what follows `--api-key` is as secret as what stands under that key."""
    cleaned: list[object] = []
    after_secret_flag = False
    for value in values:
        cleaned.append(MASK if after_secret_flag else publishable(value))
        after_secret_flag = isinstance(value, str) and _SECRET_FLAG.match(value) is not None
    return cleaned


def _is_secret(key: str, value: object) -> bool:
    if value is None:
        return False
    words = [word.lower() for word in _WORD.findall(key)]
    if any(_SECRET_WORD.search(word) for word in words):
        return True
    is_count = isinstance(value, int | float)
    return not is_count and any(word.endswith("tokens") for word in words)


def _clean_text(text: str) -> str:
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    home = _home()
    if home != "/":  # before the pattern, which sees neither file:///home/... nor a blank in a folder's name
        text = text.replace(home, "~")
    return _PATH_IN_TEXT.sub(lambda match: _short_path(match.group()), text)


def _short_path(path: str) -> str:
    """Relative to the working directory, or only the last component: neither tells where anyone's home is."""
    if not path.startswith(("/", "~")):
        return path
    full = os.path.normpath(os.path.expanduser(path))
    here = os.getcwd()
    if full == here or full.startswith(here.rstrip("/") + "/"):
        return os.path.relpath(full, here)
    if full == _home():
        return "~"  # its last component is most often the user's name
    return os.path.basename(full) or path


def _home() -> str:
    return os.path.normpath(os.path.expanduser("~"))
