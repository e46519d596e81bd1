"""The files of a checkpoint: config.json, and weights as safetensors or as what ``torch.save`` wrote, in shards or not.

``read`` wants all of it. ``glance`` takes what is there: a lone config.json, a hub folder copied without its weights
(links to nothing, or an index whose shards were left behind).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eyas.errors import CheckpointError
from eyas.inventory.json_file import FETCH_AGAIN, json_object
from eyas.inventory.safetensors_header import read_header
from eyas.inventory.tensor import TensorInfo
from eyas.inventory.torch_zip import read_zip

CONFIG = "config.json"
SINGLE = ("model.safetensors", "pytorch_model.bin")
PICKLED = (".bin", ".pt", ".pth")
# What trainers leave beside weights in the same format: never a drafter's tensors.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")


@dataclass(frozen=True)
class Inventory:
    """``bytes`` counts tensor data, without headers."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    bytes: int


@dataclass(frozen=True)
class Glance:
    """What can be told of a checkpoint that may lack its weights.

    ``tensors`` is None where no header is here, and ``missing`` then says what is not. ``names`` are those in the
    headers, else those that an index of shards promises, else None.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] | None
    names: frozenset[str] | None
    missing: str | None


def read(folder: Path) -> Inventory:
    """config.json and every tensor of the checkpoint in ``folder``."""
    folder = _folder(Path(folder))
    config = json_object(folder / CONFIG)
    return _inventory(folder, config, _weight_files(folder))


def glance(path: Path) -> Glance:
    """The checkpoint in a folder, or at its config.json. What weights are there are read as strictly as by ``read``.

    Raises CheckpointError where config.json is not there or what is there contradicts itself.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else _folder(path)
    config = json_object(path if path.is_file() else path / CONFIG)
    if path.is_file() and path.name != CONFIG:  # a config kept under another name: what lies beside it is not its
        return Glance(folder, config, None, None, f"{path.name} alone was named")
    index = _index(folder)
    if index is not None and not _single(folder):
        absent = _absent(folder, index)
        if absent:
            names = frozenset(name for promised in index.values() for name in promised)
            return Glance(folder, config, None, names, f"{len(absent)} of {len(index)} shards, e.g. {absent[0]}")
    if index is None and not _single(folder) and not _loose(folder):
        links = [name for name in _entries(folder) if _weighty(name) and (folder / name).is_symlink()]
        missing = f"what {', '.join(links)} links to" if links else "the weights"
        return Glance(folder, config, None, None, missing)
    found = _inventory(folder, config, _weight_files(folder))
    return Glance(folder, config, found.tensors, frozenset(found.tensors), None)


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file, a folder was expected" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}.", way_out="Name the folder that holds config.json.")
    return folder


def _inventory(folder: Path, config: dict[str, Any], files: dict[str, set[str]]) -> Inventory:
    tensors: dict[str, TensorInfo] = {}
    total = 0
    for file, promised in files.items():
        reader = read_zip if file.endswith(PICKLED) else read_header
        found, size = reader(folder / file, file)
        _compare_with_index(folder, file, promised, found)
        for name in found.keys() & tensors.keys():
            raise CheckpointError(
                f"{folder}: the tensor {name} is in {tensors[name].file} and in {file}.",
                way_out="Keep one of the two files, or rewrite the index.",
            )
        tensors |= found
        total += size
    return Inventory(folder, config, tensors, total)


def _weight_files(folder: Path) -> dict[str, set[str]]:
    """The files to read, as loaders prefer them, each with the tensors that an index promises in it.

    Safetensors before pickles, and of each kind the single file, the index, then whatever is there.
    """
    if single := _single(folder):
        return {single: set()}
    if (index := _index(folder)) is not None:
        if missing := _absent(folder, index):
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing)} of the {len(index)} files in its index.",
                way_out="Fetch the missing files into the folder.",
            )
        return index
    if loose := _loose(folder):
        return {file: set() for file in loose}
    broken = [name for name in _entries(folder) if (folder / name).is_symlink() and not (folder / name).exists()]
    if broken:
        raise CheckpointError(
            f"{folder} holds no weights: {', '.join(broken)} links to a file that is not there.",
            way_out="Copy the folder with its links followed (cp -rL), or fetch it again.",
        )
    raise CheckpointError(
        f"{folder} holds no weights, only {', '.join(_entries(folder)[:20])}.",
        way_out="Put model.safetensors beside config.json, or name the folder that has both.",
    )


def _single(folder: Path) -> str | None:
    """The one file that needs no index; a pickled one only where no safetensors of any kind is."""
    safetensors, pickled = SINGLE
    if (folder / safetensors).is_file():
        return safetensors
    others = any((folder / name).is_file() for name in _entries(folder) if name.endswith(".safetensors"))
    indexed = (folder / f"{safetensors}.index.json").is_file()
    return pickled if (folder / pickled).is_file() and not others and not indexed else None


def _loose(folder: Path) -> list[str]:
    """Weights under any other name: every safetensors file, or where there is none every pickled one."""
    names = [name for name in _entries(folder) if _weighty(name) and (folder / name).exists()]
    return [n for n in names if n.endswith(".safetensors")] or [n for n in names if n.endswith(PICKLED)]


def _weighty(name: str) -> bool:
    return name.endswith((".safetensors", *PICKLED)) and not name.startswith(NOT_WEIGHTS)


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _index(folder: Path) -> dict[str, set[str]] | None:
    """Files and the tensors promised in each, from the index of shards; None where there is none."""
    present = [folder / f"{single}.index.json" for single in SINGLE]
    index = next((path for path in present if path.is_file()), None)
    if index is None:
        return None
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensors to files.", way_out=FETCH_AGAIN)
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise CheckpointError(
                f"{index} says that {name} lies in {file!r}; a file inside the folder was expected.",
                way_out="Do not load this checkpoint unless you trust it; mend the weight_map.",
            )
        shards.setdefault(file, set()).add(name)
    return shards


def _absent(folder: Path, shards: dict[str, set[str]]) -> list[str]:
    return sorted(file for file in shards if not (folder / file).is_file())


def _stays_inside(file: str) -> bool:
    # By its spelling, not by resolving: in the hub's own cache every file is a link out of the folder.
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


def _compare_with_index(folder: Path, file: str, promised: set[str], found: dict[str, TensorInfo]) -> None:
    if absent := sorted(promised - found.keys()):
        raise CheckpointError(
            f"{folder / file} lacks {len(absent)} of the tensors that its index promises, e.g. {absent[0]}.",
            way_out="The index and the file belong to different checkpoints: fetch both again.",
        )
