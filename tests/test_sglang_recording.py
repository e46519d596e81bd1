"""Rounds that the plugin wrote, as they are moved and read back; bad ones, a limit, a full disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.engines import recording, sglang_recording
from eyas.errors import InputError


def a_round(**changes: Any) -> dict[str, np.ndarray]:
    """Two requests of two and three rows, K = 2 depths, H = 4, taps of 6 columns."""
    random = np.random.default_rng(0)
    floats = {
        name: random.normal(size=(2, 2, 4)).astype(np.float32) for name in ("depth_fed", "depth_post", "depth_pre")
    }
    return {
        "requests": np.array(["a", "b"]), "starts": np.array([0, 2, 5]), "positions": np.array([0, 1, 0, 1, 2]),
        "token_ids": np.array([3, 4, 5, 6, 7]), "taps": random.normal(size=(5, 6)).astype(np.float32),
        "taps_dtype": np.array("float32"), "fused": random.normal(size=(5, 4)).astype(np.float32),
        "sample": np.array([1, 3]), "next_token": np.array([4, 6]), "rejected": np.array([0, 1]),
        "draft_ids": np.array([[1, 2], [3, 4]]), "depth_token_ids": np.array([[4, 6], [1, 3]]),
        "depth_positions": np.array([[1, 1], [2, 2]]), **floats, "top_ids": np.ones((2, 2, 8), np.int64),
        "top_logits": np.ones((2, 2, 8), np.float32), **changes,
    }  # fmt: skip


def put(folder: Path, number: int = 0, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"pass-{number:09d}.npz"
    np.savez(path, **a_round(**changes))
    return path


def moved(tmp_path: Path, most: int = 10**6, put_back: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    (tmp_path / "to").mkdir(exist_ok=True)
    got = sglang_recording.moved(tmp_path / "from", tmp_path / "to", most, put_back)
    return got, recording.read(tmp_path / "to")


def test_rows_of_bf16_are_read_back(tmp_path: Path) -> None:
    values = a_round()["taps"]
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = put(tmp_path / "from", taps=bits, taps_dtype=np.array("bfloat16"))
    got, turns = moved(tmp_path)
    assert (got.passes, got.error) == (1, None)
    assert not path.exists()
    (b,) = turns["b"]
    np.testing.assert_array_equal(b.taps, (bits.astype(np.uint32) << 16).view(np.float32)[2:4])
    assert (b.token_ids.tolist(), b.rejected, b.rows, b.draft_ids.tolist()) == ([5, 6], 1, 3, [3, 4])
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "to").iterdir()} == {0o600}


def test_a_request_begun_anew_is_nobodys(tmp_path: Path) -> None:
    put(tmp_path / "from")
    _, turns = moved(tmp_path, put_back=("a",))
    assert set(turns) == {"b", sglang_recording.PUT_BACK}


def test_states_that_no_module_showed_are_told_from_those_that_are_nan(tmp_path: Path) -> None:
    empty = np.full((2, 2, 4), np.nan, np.float32)
    put(tmp_path / "from", depth_post=empty)
    got, turns = moved(tmp_path)
    assert (got.passes, turns) == (0, {})
    assert got.error == "the modules of this drafter show no states"
    put(tmp_path / "from", depth_post=empty, top_logits=np.full((2, 2, 8), np.nan, np.float32))
    got, turns = moved(tmp_path)
    assert (got.passes, got.error) == (1, None)
    assert np.isnan(turns["a"][0].post).all()


def test_the_limit_and_a_full_disk_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        size = put(tmp_path / "from", number).stat().st_size
    got, turns = moved(tmp_path, most=2 * size + 100)
    assert (got.passes, len(turns["a"])) == (2, 2)
    assert "the limit of" in got.error

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = sorted((tmp_path / "to").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", full)
        got, _ = moved(tmp_path)
    assert got.error == "No space left on device"
    assert sorted((tmp_path / "to").iterdir()) == before
    sglang_recording.clear(tmp_path / "from")
    assert list((tmp_path / "from").iterdir()) == []


def test_what_is_no_round(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "pass-000000000.npz").write_bytes(b"PK no zip")
    with pytest.raises(InputError, match="cannot be read"):
        moved(tmp_path)
