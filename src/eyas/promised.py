"""Whether the weights in a folder are those its contract was written for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from eyas import provenance
from eyas.results import Evidence, Finding

FILE = "model.safetensors"  # the one file whose hash a contract holds
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def weights_changed(folder: Path, promised: str | None) -> Finding | None:
    """A note where the weights have another hash, or lie in other files than the one that was hashed."""
    if promised is None or not folder.is_dir():
        return None
    single = folder / FILE
    if not single.is_file() and not any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return None  # a config alone: nothing to compare
    actual = _sha256(single, single.stat().st_mtime_ns, single.stat().st_size) if single.is_file() else None
    if actual == promised:
        return None
    what = "are not those" if actual else f"are not in {FILE}, the file"
    return Finding(
        "weights-changed",
        "note",
        f"The weights {what} the contract was written for; every fact in it is only inferred.",
        [Evidence(f"sha256 of {FILE}", actual, promised, "contract")],
    )


@lru_cache(maxsize=16)
def _sha256(path: Path, written: int, size: int) -> str:
    """Of a file as it was at that time: a check asks twice."""
    return provenance.sha256_file(path)
