"""What ``sglang_probe`` saw, as arrays and files. Runs in SGLang's process; imports only numpy.

Letters as there: B requests, T rows, C taps, D target width, H drafter width, K depths.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

TOP = 8


@dataclass
class Pass:
    """One forward pass of the drafter: tokens and positions [N], what was fed [N, .], and what modules showed."""

    requests: list[str]
    ids: np.ndarray
    positions: np.ndarray
    fed: np.ndarray
    fed_dtype: str
    seen: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Held:
    """What one request's last extend showed: rows, and depth 0 at the last accepted one."""

    rows: dict[str, np.ndarray]
    taps_dtype: str
    sample: int
    rejected: int
    depth: dict[str, np.ndarray]
    prompt: bool
    """Whether it was an extend over a prompt, which may come in chunks without a draft between them."""

    @property
    def size(self) -> int:
        return sum(value.nbytes for value in (*self.rows.values(), *self.depth.values()))

    def goes_on_in(self, new: Held) -> bool:
        last, first = self.rows["positions"][-1], new.rows["positions"][0]
        return self.prompt and new.prompt and int(last) + 1 == int(first)

    def with_rows_of(self, new: Held) -> Held:
        rows = {name: np.concatenate([self.rows[name], value]) for name, value in new.rows.items()}
        return replace(new, rows=rows, sample=new.sample + len(self.rows["positions"]))


def split(one: Pass, lengths: list[int], sample: list[int], rejected: list[int], prompt: bool) -> dict[str, Held]:
    """An extend's rows by request."""
    found, start = {}, 0
    for at, (request, length) in enumerate(zip(one.requests, lengths, strict=True)):
        here = slice(start, start + length)
        rows = {"positions": one.positions[here], "token_ids": one.ids[here], "taps": one.fed[here]}
        if "fused" in one.seen:
            rows["fused"] = one.seen["fused"][here]
        depth = {name: value[at] for name, value in one.seen.items() if name != "fused"}
        found[request] = Held(rows, one.fed_dtype, sample[at] - start, rejected[at], depth, prompt)
        start += length
    return found


class Done(Exception):
    """No more is to be written; its words say why."""


class NotOurs(Done):
    """The folder is somebody else's: nothing at all is written there."""


class Folder:
    """Where rounds are written: 0700, one process, no more than ``limit`` bytes."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.passes = self.written = 0
        self._ours = False

    def check(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise NotOurs(f"{self.path} is open to others")

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """One round, whole or not at all. Raises Done, or OSError where the disk does not take it."""
        self._claim()
        if self.written + sum(value.nbytes for value in arrays.values()) > self.limit:
            raise Done(f"the limit of {self.limit:,} bytes is reached")
        path, part = (self.path / f"{kind}-{self.passes:09d}.npz" for kind in ("pass", "part"))
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            self.written += part.stat().st_size
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self.passes += 1

    def say(self, name: str, value: object) -> None:
        """A small file of JSON, whole or not at all."""
        part = self.path / f"{name}.{os.getpid()}"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(part, self.path / name)

    def _claim(self) -> None:
        """The ranks of one model would all write the same: the first that has something does."""
        if self._ours:
            return
        try:
            os.close(os.open(self.path / "writer", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            raise NotOurs("another process of this engine writes") from None
        self._ours = True


def whole(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().cpu().numpy(), dtype=np.int64)  # a copy: positions are counted up in place


def floats(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().float().cpu().numpy())


def stored(tensor: Any) -> tuple[np.ndarray, str]:
    """bf16 as its bits, the upper half of fp32; everything else in fp32."""
    values = floats(tensor)
    if str(tensor.dtype) != "torch.bfloat16":
        return values, "float32"
    return (values.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"


def padded(values: np.ndarray, fill: float) -> np.ndarray:
    """``TOP`` columns, also of a vocabulary that has fewer."""
    return np.pad(values, [(0, 0), (0, TOP - values.shape[1])], constant_values=fill)


def gathered(
    requests: list[str], held: list[Held], passes: list[Pass], drafts: np.ndarray, chosen: list[int]
) -> dict[str, np.ndarray]:
    """The arrays of one file; NaN for what no module showed."""
    starts = np.cumsum([0, *(len(one.rows["positions"]) for one in held)])
    rows = {name: np.concatenate([one.rows[name] for one in held]) for name in ("positions", "token_ids", "taps")}
    sample = starts[:-1] + np.array([one.sample for one in held])
    width = _width(held, passes)
    fused = _filled([one.rows.get("fused") for one in held], [len(one.rows["positions"]) for one in held], width)
    later = [{name: value[chosen] for name, value in one.seen.items()} for one in passes]

    def per_depth(name: str) -> np.ndarray:
        first = np.stack([one.depth.get(name, np.full(width, np.nan, np.float32)) for one in held])
        return np.stack([first, *(one.get(name, np.full(first.shape, np.nan, np.float32)) for one in later)])

    fed = [fused[sample], *(one.seen.get("fused", _asfloats(one))[chosen] for one in passes)]
    return {
        "requests": np.array(requests, dtype=np.str_),
        "starts": starts.astype(np.int64),
        **rows,
        "taps_dtype": np.array(held[0].taps_dtype),
        "fused": fused,
        "sample": sample.astype(np.int64),
        "next_token": rows["token_ids"][sample],
        "rejected": np.array([one.rejected for one in held], dtype=np.int64),
        "draft_ids": drafts[chosen],
        "depth_token_ids": np.stack([rows["token_ids"][sample], *(one.ids[chosen] for one in passes)]),
        "depth_positions": np.stack([rows["positions"][sample], *(one.positions[chosen] for one in passes)]),
        "depth_fed": np.stack(fed),
        "depth_post": per_depth("post"),
        "depth_pre": per_depth("pre"),
        "top_ids": per_depth("top_ids"),
        "top_logits": per_depth("top_logits"),
    }


def _width(held: list[Held], passes: list[Pass]) -> int:
    """H: of any state of the drafter that was seen."""
    for one in held:
        if "fused" in one.rows:
            return int(one.rows["fused"].shape[1])
    return int(passes[0].fed.shape[1]) if passes else 0


def _filled(parts: Iterable[np.ndarray | None], lengths: list[int], width: int) -> np.ndarray:
    missing = (np.full((length, width), np.nan, np.float32) for length in lengths)
    return np.concatenate([other if part is None else part for part, other in zip(parts, missing, strict=True)])


def _asfloats(one: Pass) -> np.ndarray:
    if one.fed_dtype != "bfloat16":
        return one.fed
    return (one.fed.astype(np.uint32) << 16).view(np.float32)
