"""A config's keys, each checked for its type when it is asked for: foreign files are data, and may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.contract import Fact
from eyas.errors import CheckpointError

WHERE = "config.json"


class Keys:
    """Keys of one object of a config. A key that is null counts as absent, as it does to every reader of these files.

    Each method raises CheckpointError where the value is not of the type the key is for.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "") -> None:
        self.config = config
        self.path = path

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None

    def flag(self, key: str, default: bool = False) -> Fact:
        """True or false as a fact: declared, or the default of who writes this file."""
        value = self.config.get(key)
        if value is None:
            return Fact(default, "defaulted")
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return Fact(value, "declared")

    def count(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is not None and not (type(value) is int and value > 0):
            raise self._wrong(key, "a number above zero")
        return value

    def text(self, key: str) -> str | None:
        value = self.config.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of layer numbers, in the order written; None where there is none, or an empty one."""
        value = self.config.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and all(type(item) is int for item in value)):
            raise self._wrong(key, "a list of layer numbers")
        return tuple(value) or None

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.config.get(key)
        if value is None:
            return ()
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._wrong(key, "a list of names")
        return tuple(value)

    def inside(self, key: str) -> Keys:
        """The keys of an object within; none where it is absent."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Keys(value or {}, f"{self.path}{key}.")

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}{key} of {WHERE} is {self.config[key]!r}; {expected} was expected.",
            way_out="Restore the config that was saved with these weights.",
        )
