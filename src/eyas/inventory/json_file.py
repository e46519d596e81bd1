"""A JSON object out of a file that somebody else wrote: bounded, UTF-8, no name twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # config.json and the index of shards
FETCH_AGAIN = "Fetch or write the file again."


def json_object(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as handle:
            data = handle.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}.",
            way_out="Name the folder that holds config.json and the weights.",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be read: {error.strerror}.", way_out="Check the file and its permissions."
        ) from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is longer than {MAX_JSON_BYTES} bytes.", way_out=FETCH_AGAIN)
    return parse(data, str(path))


def parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}).",
            way_out=FETCH_AGAIN,
        ) from error
    except (ValueError, RecursionError) as error:  # the latter when nested without end
        raise CheckpointError(f"{where} is broken JSON ({error}).", way_out=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}, an object was expected.", way_out=FETCH_AGAIN
        )
    return value


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice!r} stands there twice")
    return value
