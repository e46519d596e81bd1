"""The probe inside SGLang, on stand-ins; with EYAS_SGLANG_WHEEL (a wheel, or where one is unpacked) on its own code.

That the stand-ins are shaped as the engine is, tests/fixtures/engines/sglang-probe.json says, recorded from wheels.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import inspect
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sglang_standins as small
from eyas.engines import sglang
from sglang_standins import DRAFTED, C, D, H, K, W

ROOT = Path(__file__).parents[1]
RECORDED = json.loads((ROOT / "tests" / "fixtures" / "engines" / "sglang-probe.json").read_text(encoding="utf-8"))
WHEEL = os.environ.get("EYAS_SGLANG_WHEEL")
PROMPTS = {"one": [3, 1, 4, 1, 5], "two": [9, 2, 6]}


def recorder() -> Any:
    spec = importlib.util.spec_from_file_location("runs_sglang_probe", ROOT / "runs" / "sglang_probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runs = recorder()
own = runs.own
rounds = own.rounds


class Engine:
    """Rounds as a scheduler plays them, on stand-ins into which the probe was put by its own entry point."""

    def __init__(self, worker: Any, dtype: torch.dtype = torch.float32) -> None:
        self.worker, self.dtype = worker, dtype
        self.random = torch.Generator().manual_seed(5)
        self.log = worker.draft_runner.log

    def states(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, C * D, generator=self.random).to(self.dtype)

    def prefill(self, parts: dict[str, list[int]], done: dict[str, int] | None = None, *, last: bool = True) -> Any:
        reqs = [SimpleNamespace(rid=rid) for rid in parts]
        lengths = [len(ids) for ids in parts.values()]
        ends = [length + (done or {}).get(rid, 0) for rid, length in zip(parts, lengths, strict=True)]
        ids = torch.tensor([token for part in parts.values() for token in part])
        batch = small.Batch(reqs, ids, torch.tensor(ends), lengths)
        if not last:
            batch.chunked_req, batch.chunked_req_next_prompt_token = reqs[0], 33
        following = torch.arange(len(reqs)) + 20
        self.spec = self.worker._draft_extend_for_prefill(batch, self.states(len(ids)), following)
        self.lengths = torch.tensor(ends)
        return following

    def draft(self, rids: list[str], mode: str = "decode") -> torch.Tensor:
        made = small.forward_batch(rids, None, self.lengths, self.spec.hidden_states, slice(None), mode)
        made.spec_info = self.spec
        return self.worker.draft_forward(made)[2]  # type: ignore[no-any-return]

    def verified(self, rids: list[str], accepted: list[int]) -> None:
        """``accepted`` without the bonus token, a request each."""
        rows = len(rids) * W
        predicted = torch.randint(0, small.VOCAB, (rows,), generator=self.random)
        batch = small.Batch([SimpleNamespace(rid=rid) for rid in rids], None, self.lengths, [])
        result = SimpleNamespace(
            accept_lens=torch.tensor(accepted) + 1, next_token_ids=predicted, prepared_draft_extend_inputs=None,
            logits_output=SimpleNamespace(hidden_states=self.states(rows)), next_draft_input=SimpleNamespace(),
            new_seq_lens=None,
        )  # fmt: skip
        self.worker._draft_extend_for_decode(batch, result)
        self.spec, self.lengths = result.next_draft_input, self.lengths + result.accept_lens


Started = Callable[..., Engine]


@pytest.fixture(params=["stand-in", "wheel"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    if request.param == "wheel" and not WHEEL:
        pytest.skip("EYAS_SGLANG_WHEEL names no wheel")
    source = runs.Source(Path(WHEEL)) if request.param == "wheel" else None  # type: ignore[arg-type]

    def start(*, limit: int = 10**8, hot: bool = True, dtype: torch.dtype = torch.float32) -> Engine:
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps({"folder": str(tmp_path / "passes"), "limit_bytes": limit}))
        monkeypatch.setenv(own.VARIABLE, str(settings))
        found, worker, registry = small.modules(source)
        for name, module in found.items():
            monkeypatch.setitem(sys.modules, name, module)
        own.install()
        registry.apply_hooks()
        return Engine(worker(hot), dtype)

    return start


def written(folder: Path) -> list[dict[str, np.ndarray]]:
    found = []
    for path in sorted((folder / "passes").glob("pass-*.npz")):
        with np.load(path, allow_pickle=False) as kept:
            found.append(dict(kept))
    return found


def logged(one: dict[str, Any], name: str, rows: Any = slice(None)) -> np.ndarray:
    return np.asarray(one[name][rows].numpy())


def test_a_prompts_round_is_written_as_it_was(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill(PROMPTS)
    drafts = run.draft(["one", "two"])
    [kept] = written(tmp_path)
    extend, *later = run.log
    assert len(later) == K - 1
    assert kept["requests"].tolist() == ["one", "two"]
    assert kept["starts"].tolist() == [0, 5, 8]
    assert kept["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert kept["token_ids"].tolist() == [1, 4, 1, 5, 20, 2, 6, 21]
    assert kept["sample"].tolist() == [4, 7]
    assert kept["next_token"].tolist() == [20, 21]
    assert kept["rejected"].tolist() == [0, 0]
    assert str(kept["taps_dtype"]) == "float32"
    np.testing.assert_array_equal(kept["taps"], logged(extend, "fed"))
    np.testing.assert_array_equal(kept["fused"], logged(extend, "fused"))
    np.testing.assert_array_equal(kept["draft_ids"], drafts.numpy())
    assert kept["depth_positions"].tolist() == [[4, 2], [5, 3], [6, 4]]
    np.testing.assert_array_equal(kept["depth_token_ids"][1:], drafts.numpy().T[:-1])
    sample = [4, 7]
    for name in ("post", "pre"):
        np.testing.assert_array_equal(kept[f"depth_{name}"][0], logged(extend, name, sample))
        np.testing.assert_array_equal(kept[f"depth_{name}"][1:], np.stack([logged(one, name) for one in later]))
    np.testing.assert_array_equal(kept["depth_fed"][0], kept["fused"][sample])
    np.testing.assert_array_equal(kept["depth_fed"][1:], np.stack([logged(one, "fed") for one in later]))
    np.testing.assert_array_equal(kept["depth_fed"][1:], kept["depth_pre"][:-1])
    logits = np.stack([logged(extend, "logits", sample), *(logged(one, "logits") for one in later)])
    np.testing.assert_array_equal(kept["top_ids"], np.argsort(-logits, axis=-1)[..., :8] + 11)
    np.testing.assert_array_equal(kept["top_logits"], -np.sort(-logits, axis=-1)[..., :8])
    np.testing.assert_array_equal(kept["top_ids"][..., 0], kept["draft_ids"].T)


def test_after_verification_the_rows_behind_the_last_kept_are_marked(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill(PROMPTS)
    run.draft(["one", "two"])
    run.verified(["one", "two"], [2, 0])
    run.draft(["one", "two"])
    run.verified(["one", "two"], [3, 1])
    drafts = run.draft(["one", "two"])
    _, second, third = written(tmp_path)
    assert second["positions"].tolist() == [5, 6, 7, 8, 3, 4, 5, 6]
    assert second["sample"].tolist() == [2, 4]
    assert second["rejected"].tolist() == [1, 3]
    assert second["depth_positions"].tolist() == [[7, 3], [8, 4], [9, 5]]
    assert third["sample"].tolist() == [3, 5]
    assert third["rejected"].tolist() == [0, 2]
    assert third["positions"].tolist() == [8, 9, 10, 11, 4, 5, 6, 7]
    extend = run.log[-K]
    np.testing.assert_array_equal(third["taps"], logged(extend, "fed"))
    np.testing.assert_array_equal(third["next_token"], logged(extend, "ids", [3, 5]))
    np.testing.assert_array_equal(third["depth_post"][0], logged(extend, "post", [3, 5]))
    np.testing.assert_array_equal(third["draft_ids"], drafts.numpy())
    assert (third["top_ids"][..., 0] == third["draft_ids"].T).all()


def test_a_whole_vocabulary_has_its_own_ids(engine: Started, tmp_path: Path) -> None:
    run = engine(hot=False)
    run.prefill(PROMPTS)
    drafts = run.draft(["one", "two"])
    [kept] = written(tmp_path)
    assert kept["top_ids"].max() < DRAFTED
    np.testing.assert_array_equal(kept["top_ids"][..., 0], drafts.numpy().T)


def test_bf16_is_kept_bit_by_bit(engine: Started, tmp_path: Path) -> None:
    run = engine(dtype=torch.bfloat16)
    run.prefill(PROMPTS)
    run.draft(["one", "two"])
    [kept] = written(tmp_path)
    assert (str(kept["taps_dtype"]), kept["taps"].dtype) == ("bfloat16", np.uint16)
    bits = run.log[0]["fed"].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(kept["taps"], bits)


def test_a_prompt_in_chunks_is_one_round(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill({"one": [3, 1, 4]}, last=False)
    run.prefill({"one": [33, 5]}, {"one": 3})
    run.draft(["one"])
    [kept] = written(tmp_path)
    assert kept["positions"].tolist() == [0, 1, 2, 3, 4]
    assert kept["token_ids"].tolist() == [1, 4, 33, 5, 20]
    assert kept["sample"].tolist() == [4]
    np.testing.assert_array_equal(kept["taps"], np.concatenate([logged(one, "fed") for one in run.log[:2]]))


def test_a_prompt_done_again_replaces_its_first_doing(engine: Started, tmp_path: Path) -> None:
    """A request that was put back is prefilled anew; its rows do not go on where the old ones ended."""
    run = engine()
    run.prefill({"one": [3, 1, 4]})
    run.prefill({"one": [3, 1, 4, 1]})
    run.draft(["one"])
    [kept] = written(tmp_path)
    assert kept["positions"].tolist() == [0, 1, 2, 3]


def test_requests_that_meet_later(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill({"one": PROMPTS["one"]})
    first, start = run.spec, run.lengths
    run.prefill({"two": PROMPTS["two"]})
    for name in ("topk_index", "hidden_states", "bonus_tokens"):
        setattr(first, name, torch.cat([getattr(run.spec, name), getattr(first, name)]))
    first.topk_p = torch.ones(2, 1)
    run.spec, run.lengths = first, torch.cat([run.lengths, start])
    drafts = run.draft(["two", "one"])
    [kept] = written(tmp_path)
    assert kept["requests"].tolist() == ["two", "one"]
    assert kept["starts"].tolist() == [0, 3, 8]
    np.testing.assert_array_equal(kept["taps"], np.concatenate([logged(run.log[at], "fed") for at in (1, 0)]))
    np.testing.assert_array_equal(kept["draft_ids"], drafts.numpy())


def test_an_unknown_request_is_left_out_and_said(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill({"one": PROMPTS["one"], "two": PROMPTS["two"]})
    drafts = run.draft(["stranger", "two"])
    [kept] = written(tmp_path)
    assert kept["requests"].tolist() == ["two"]
    np.testing.assert_array_equal(kept["draft_ids"], drafts.numpy()[1:])
    np.testing.assert_array_equal(kept["depth_post"][1:], np.stack([logged(one, "post", [1]) for one in run.log[1:]]))
    assert left_out(tmp_path) == {"a request whose extend was not seen": 1}


def left_out(folder: Path) -> Any:
    return json.loads((folder / "passes" / "left-out.json").read_text())


def test_no_extend_is_drafted_from_twice(engine: Started, tmp_path: Path) -> None:
    """Where the next extend ran unseen, in a graph, the rows of the one before are not its."""
    run = engine()
    run.prefill({"one": PROMPTS["one"]})
    run.draft(["one"])
    index = run.spec.topk_index
    run.spec = SimpleNamespace(topk_p=torch.ones(1, 1), topk_index=index, hidden_states=torch.ones(1, H))
    run.draft(["one"])
    assert len(written(tmp_path)) == 1
    assert left_out(tmp_path) == {"a request whose extend was not seen": 1}


def test_a_pass_outside_the_wrapped_calls_is_not_looked_at(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill(PROMPTS)
    run.draft(["one", "two"])
    states = torch.ones(1, H)
    made = small.forward_batch(["x"], torch.tensor([1]), torch.tensor([0]), states, slice(None), "decode")
    made.rids = 5  # would stop the recording
    run.worker.draft_runner.forward(made)
    assert not (tmp_path / "passes" / "stopped.json").exists()


def test_a_tree_and_an_idle_rank_are_left_out(tmp_path: Path) -> None:
    probe = own.Probe(rounds.Folder(tmp_path / "passes", 10**6))
    tree = SimpleNamespace(topk=4, speculative_num_steps=K, hot_token_id=None)
    made = small.forward_batch(["one"], None, torch.zeros(1), None, None, "decode")
    assert probe.draft(lambda *_: (None, None, torch.zeros(1, 7), None), tree, made)[2].shape == (1, 7)
    assert json.loads((tmp_path / "passes" / "left-out.json").read_text()) == {"a tree of drafts": 1}
    idle = small.forward_batch([], None, torch.zeros(0), None, None, "idle")
    assert probe.draft(lambda *_: (None,) * 4, tree, idle) == (None,) * 4
    warm_up = small.forward_batch([], None, torch.zeros(0), None, None, "decode")
    warm_up.rids = None
    assert probe.draft(lambda *_: "drafts", tree, warm_up) == "drafts"
    assert (probe.stopped, probe.left_out) == (None, {"a tree of drafts": 1})


def test_nothing_is_read_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    probe = own.Probe(rounds.Folder(tmp_path / "passes", 10**6))
    assert probe.draft(lambda *_: "drafts", "no worker", "no batch") == "drafts"
    assert (probe.stopped, probe.left_out) == (None, {})


def test_files_are_private(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill(PROMPTS)
    run.draft(["one", "two"])
    folder = tmp_path / "passes"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["loaded.json", "pass-000000000.npz", "writer"]


def test_a_folder_open_to_others_is_not_written(engine: Started, tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir(mode=0o755)
    os.chmod(tmp_path / "passes", 0o755)
    run = engine()
    run.prefill(PROMPTS)
    assert run.draft(["one", "two"]).shape == (2, K)
    assert not list((tmp_path / "passes").iterdir())


def test_a_second_process_writes_nothing(engine: Started, tmp_path: Path) -> None:
    run = engine()
    (tmp_path / "passes" / "writer").touch()
    run.prefill(PROMPTS)
    assert run.draft(["one", "two"]).shape == (2, K)
    assert sorted(path.name for path in (tmp_path / "passes").iterdir()) == ["loaded.json", "writer"]


def test_the_limit_ends_it(engine: Started, tmp_path: Path) -> None:
    run = engine(limit=9000)
    run.prefill(PROMPTS)
    for _ in range(6):
        assert run.draft(["one", "two"]).shape == (2, K)
        run.verified(["one", "two"], [1, 1])
    files = list((tmp_path / "passes").glob("pass-*"))
    assert files
    assert sum(path.stat().st_size for path in files) <= 9000 + 2 * len(files) * 2000  # less the zip's own headers
    said = json.loads((tmp_path / "passes" / "stopped.json").read_text())
    assert said["why"] == "the limit of 9,000 bytes is reached"
    assert said["passes"] == len(files)


def test_rows_never_drafted_from_do_not_pile_up(engine: Started, tmp_path: Path) -> None:
    run = engine(limit=40_000)
    for number in range(40):
        run.prefill({f"gone {number}": PROMPTS["one"]})
    run.prefill({"here": PROMPTS["one"]})
    run.draft(["here"])
    [kept] = written(tmp_path)
    assert kept["requests"].tolist() == ["here"]
    said = json.loads((tmp_path / "passes" / "left-out.json").read_text())
    assert "a request whose rows were let go to stay within the limit" in said


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), ValueError("odd")])
def test_no_fault_of_ours_reaches_the_engine(
    engine: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    run = engine()
    run.prefill(PROMPTS)
    run.draft(["one", "two"])
    run.verified(["one", "two"], [1, 1])

    def full(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(np, "savez", full)
    assert run.draft(["one", "two"]).shape == (2, K)
    monkeypatch.undo()
    run.verified(["one", "two"], [1, 1])
    assert run.draft(["one", "two"]).shape == (2, K)
    assert len(written(tmp_path)) == 1
    assert not list((tmp_path / "passes").glob("part-*"))
    why = json.loads((tmp_path / "passes" / "stopped.json").read_text())["why"]
    assert why in ("No space left on device", "ValueError: odd")


def test_a_drafter_without_the_known_modules_stops_the_recording_only(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.worker.draft_runner.model.model.__dict__["midlayer"] = SimpleNamespace(forward=lambda odd: odd)
    run.prefill(PROMPTS)
    assert run.draft(["one", "two"]).shape == (2, K)
    assert "hidden_states" in json.loads((tmp_path / "passes" / "stopped.json").read_text())["why"]


def test_a_fault_of_the_engine_stays_its_own(engine: Started, tmp_path: Path) -> None:
    run = engine()
    run.prefill(PROMPTS)
    good = run.worker.draft_runner.model.head
    run.worker.draft_runner.model.head = None
    with pytest.raises(TypeError, match="not callable"):
        run.draft(["one", "two"])
    run.worker.draft_runner.model.head = good
    run.prefill({"three": [1, 2]})
    run.draft(["three"])
    [kept] = written(tmp_path)
    assert kept["requests"].tolist() == ["three"]


def test_recording_changes_no_token(engine: Started, tmp_path: Path) -> None:
    def played(worker: Any) -> list[list[int]]:
        run = Engine(worker)
        run.prefill(PROMPTS)
        found = [run.draft(["one", "two"]).tolist()]
        run.verified(["one", "two"], [1, 2])
        return [*found, run.draft(["one", "two"]).tolist()]

    assert played(engine().worker) == played(small.EagleDraftWorker())


def test_no_variable_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own.VARIABLE, raising=False)
    own.install()  # would import sglang otherwise
    monkeypatch.setenv(own.VARIABLE, "/nowhere/settings.json")
    own.install()


# -- the stand-ins are shaped as the engine --------------------------------------------------------------------------


@pytest.mark.parametrize("version", RECORDED["versions"])
def test_every_name_the_probe_touches_is_there(version: str) -> None:
    said = RECORDED["versions"][version]
    assert set(said["reads"]) == {f"{of}.{one}" for (_, of), names in own.READS.items() for one in names}
    assert all(said["reads"].values())
    for (_, of, name), needed in own.PARAMETERS.items():
        found = said["functions"][f"{of}.{name}"]["parameters"]
        if name != "forward" or of == "ModelRunner":
            assert tuple(found[: len(needed)]) == needed
        assert set(needed) <= set(found)
    assert said["register"] == ["cls", "target", "hook", "hook_type", "*", "source"]
    assert any(at.startswith("managers/scheduler.py:") for at in said["loads"])


def test_the_stand_ins_have_the_engines_parameters() -> None:
    newest = RECORDED["versions"]["0.5.23"]
    for name in (*small.METHODS,):
        of_ours = inspect.signature(getattr(small.EagleDraftWorker, name)).parameters.values()
        words: list[str] = []
        for one in of_ours:
            words += ["*", one.name] if one.kind is one.KEYWORD_ONLY and "*" not in words else [one.name]
        assert words == newest["functions"][f"EagleDraftWorker.{name}"]["parameters"]
    assert (
        list(inspect.signature(small.Layer.forward).parameters)
        == (newest["functions"]["LlamaDecoderLayer.forward"]["parameters"])
    )
    assert list(inspect.signature(small.Registry.register).parameters) == [
        one for one in newest["register"] if one not in ("cls", "*")
    ]


@pytest.mark.skipif(not WHEEL, reason="EYAS_SGLANG_WHEEL names no wheel")
def test_the_recording_is_the_wheels() -> None:
    source = runs.Source(Path(str(WHEEL)))
    if source.version not in RECORDED["versions"]:
        pytest.skip(f"{source.version} is not recorded")
    assert runs.record(source) == RECORDED["versions"][source.version]


# -- the plugin as SGLang finds it -----------------------------------------------------------------------------------


@pytest.fixture
def laid_out() -> Iterator[sglang.Probing]:
    with sglang.probing(12345, {"PYTHONPATH": "/theirs", "SGLANG_PLUGINS": "mine"}) as probing:
        yield probing


def test_the_plugin_is_found_without_being_installed(laid_out: sglang.Probing) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "[one] = entry_points(group='sglang.srt.plugins')\n"
        "print(one.name, one.dist.name, one.load().__module__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": laid_out.environment["PYTHONPATH"]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [sglang.NAME, sglang.NAME, "sglang_probe"]


def test_what_was_laid_out_goes() -> None:
    with sglang.probing(12345, {"SGLANG_PLUGINS": "mine", "PYTHONPATH": "/theirs"}) as probing:
        folder = probing.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert probing.environment["SGLANG_PLUGINS"] == f"mine,{sglang.NAME}"
        assert probing.environment["PYTHONPATH"].endswith(":/theirs")
        assert json.loads(Path(probing.environment[own.VARIABLE]).read_text())["limit_bytes"] == 12345
        assert not probing.loaded
        assert (probing.stopped(), probing.left_out()) == (None, {})
        (probing.passes / "stopped.json").write_text('{"why": "full"}')
        assert probing.stopped() == "full"
    assert not folder.exists()
    with sglang.probing(1, {}) as probing:
        assert "SGLANG_PLUGINS" not in probing.environment


def test_the_two_sides_say_one_variable() -> None:
    assert own.VARIABLE == sglang.VARIABLE
    for name in sglang.PLUGIN:
        assert (sglang.INSIDE / name).is_file()
