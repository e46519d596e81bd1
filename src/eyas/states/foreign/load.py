"""One file of states, read as data: nothing in it is run, and nothing in it can grow without bound."""

from __future__ import annotations

import gzip
import pickle
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas import files
from eyas.errors import InputError
from eyas.inventory.safetensors_header import read_header

MAX_UNPACKED = 8 * 2**30  # a sample of 32,768 tokens and four taps of width 7168 in fp32 is 3.8 GB
AGAIN = "Fetch or write the file again, or take it out of the folder."
_CHUNK = 2**20
_ZIP = b"PK\x03\x04"


def read(path: Path) -> Any:
    """What a file holds, its tensors memory-mapped. Raises InputError on anything that is not plain data."""
    if path.name.endswith(".safetensors"):
        return _safetensors(path)
    return _unpacked(path) if path.suffix == ".gz" else _torch(path, path)


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    read_header(path, path.name)  # says in our words what is wrong with it
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}.", way_out=AGAIN) from error


def _unpacked(path: Path) -> Any:
    """Through a temporary file, which is gone as soon as it is mapped; never more than MAX_UNPACKED bytes."""
    with tempfile.NamedTemporaryFile(prefix="eyas-", suffix=".ckpt") as handle:
        size = 0
        try:
            with gzip.open(path, "rb") as packed:
                while chunk := packed.read(_CHUNK):
                    size += len(chunk)
                    if size > MAX_UNPACKED:
                        raise InputError(
                            f"{path} unpacks to more than {MAX_UNPACKED / 2**30:.3g} GiB.",
                            way_out="Unpack it by hand if that is right for one sample, and name the unpacked file.",
                        )
                    try:
                        handle.write(chunk)
                    except OSError as error:
                        raise files.explain_os_error(error, Path(handle.name)) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}).", way_out=AGAIN) from error
        except FileNotFoundError as error:
            raise InputError(f"{path} does not exist.", way_out="Check the path.") from error
        handle.flush()
        return _torch(Path(handle.name), path)


def _torch(path: Path, named: Path) -> Any:
    """``path`` is what is read, ``named`` what the user calls it."""
    try:
        with open(path, "rb") as handle:
            start = handle.read(8)
        if not start.startswith(_ZIP):
            raise InputError(f"{named} {_instead(start)}", way_out=AGAIN)
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise InputError(f"{named} is a compressed zip file, which torch.save does not write.", way_out=AGAIN)
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{named} holds more than tensors, numbers, texts, lists and dictionaries; loading it could run code, so "
            f"it is refused ({_reason(error)}).",
            way_out="Write it again with tensors in plain lists or dictionaries alone.",
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"{named} does not exist.", way_out="Check the path.") from error
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{named} is damaged or cut short ({_reason(error)}).", way_out=AGAIN) from error
    except zipfile.BadZipFile as error:
        raise InputError(f"{named} is damaged or cut short ({error}).", way_out=AGAIN) from error
    return held


def _instead(start: bytes) -> str:
    if not start:
        return "is empty."
    if start[:1] == b"\x80":
        return "is a bare pickle, as torch wrote before 1.6; only its zip format is read."
    if start.startswith(b"version "):
        return "is a Git LFS pointer, not the states."
    return f"is no file of torch.save: it begins with {start!r}."


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Unsupported global" in line or "GLOBAL" in line]
    return ((named or lines)[0] if lines else type(error).__name__)[:160]
