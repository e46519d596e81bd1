"""Every error a user can meet, and the exit code each carries.

    EyasError
    ├── UsageError (ValueError)          2   the command as given cannot be carried out
    │   └── InputError                   2   a file, folder or value handed to us is not what it must be
    │       ├── RecordsError             2   conversations or records
    │       ├── TemplateError            2   chat template missing or not prefix-stable
    │       ├── TargetError              2   a target that cannot be loaded or does not fit
    │       └── CheckpointError          2   a drafter's files (``check`` turns this one into the verdict `broken`)
    ├── EnvironmentFault (OSError)       4   network, disk, an engine that died
    └── Interrupted                    130

A message says what is wrong, with the value and what was expected; ``way_out`` is the next command or the thing
to change, and is required: an error without one is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_UNDECIDED = 3
EXIT_ENVIRONMENT = 4
EXIT_INTERRUPTED = 130


class EyasError(Exception):
    """Root of the family. ``str(error)`` is the message; the way out is kept apart so that it can be styled."""

    exit_code = EXIT_FAULT

    def __init__(self, message: str, *, way_out: str) -> None:
        super().__init__(message)
        self.message = message
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.message} {self.way_out}"


class UsageError(EyasError, ValueError):
    exit_code = EXIT_USAGE


class InputError(UsageError):
    pass


class RecordsError(InputError):
    pass


class TemplateError(InputError):
    pass


class TargetError(InputError):
    pass


class CheckpointError(InputError):
    pass


class EnvironmentFault(EyasError, OSError):
    exit_code = EXIT_ENVIRONMENT

    def __str__(self) -> str:  # OSError would otherwise print its own arguments
        return f"{self.message} {self.way_out}"


class Interrupted(EyasError):
    exit_code = EXIT_INTERRUPTED


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known word and lists them all."""
    words = sorted(known)
    close = nearest(word, words)
    listed = ", ".join(words) or "none"
    return f"Did you mean {close!r}? Known: {listed}." if close else f"Known: {listed}."
