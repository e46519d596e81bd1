"""What we ask of a vLLM and make of its answers, with a stand-in of vLLM; the real one is compared by hand (docs)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eyas.engines.server import last_error
from eyas.engines.vllm import Engine
from eyas.errors import EnvironmentFault

WIDTH = 3
# As much of vLLM as the script uses. A token i has tap t = [i, t, position]; every second text is run once more.
STAND_IN = """
import os, sys
import numpy as np
__version__ = "0.0.stand-in"

class T:
    def __init__(self, values): self.values = np.asarray(values)
    def float(self): return self
    def cpu(self): return self
    def numpy(self): return self.values

class Model:
    def set_aux_hidden_state_layers(self, layers): self.layers = layers
    def register_forward_hook(self, hook, with_kwargs): self.hook = hook
    def __call__(self, ids):
        aux = [T([[i, t, p] for p, i in enumerate(ids)]).values.astype(np.float32) for t in sorted(self.layers)]
        out = self.hook(self, (), {"input_ids": T(ids)}, ("hidden", [T(a) for a in aux]))
        assert out == "hidden"

class LLM:
    def __init__(self, model, worker_extension_cls, **options):
        if model == "absent": sys.exit("no such model\\n")
        assert options["enforce_eager"] and options["max_num_seqs"] == 1 and not options["enable_prefix_caching"]
        self.longest = options["max_num_batched_tokens"] - 1
        module, name = worker_extension_cls.rsplit(".", 1)
        import importlib
        extension = getattr(importlib.import_module(module), name)
        class Runner: get_model = lambda self: model_
        model_ = self.model = Model()
        self.worker = type("Worker", (extension,), {"rank": 0, "model_runner": Runner()})()
        self.asked = 0
    def collective_rpc(self, name, args): return [getattr(self.worker, name)(*args)]
    def generate(self, prompts, sampling, use_tqdm):
        print("noise on standard output")
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            if ids == [13]: os._exit(7)
            self.asked += 1
            if self.asked % 2 == 0: self.model([0])
            if len(ids) > self.longest: ids = ids[:self.longest]  # as chunked prefill would
            self.model(ids)

class SamplingParams:
    def __init__(self, temperature, max_tokens): assert max_tokens == 1
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has the stand-in."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "vllm.py").write_text(STAND_IN)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/stub" exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@pytest.fixture
def engine(python: Path) -> Iterator[Engine]:
    with Engine(python, "some/model", (2, 5), width=WIDTH, longest=6) as made:
        yield made


def test_taps_come_back_text_by_text_in_ascending_order(engine: Engine) -> None:
    assert engine.version == "0.0.stand-in"
    for ids in ([7, 8, 9], [4], [1, 2, 3, 4, 5, 6]):
        wanted = [[i, 2, p, i, 5, p] for p, i in enumerate(ids)]
        found = engine.states(ids)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.array(wanted))


def test_a_text_that_was_not_run_whole_is_refused(engine: Engine) -> None:
    with pytest.raises(EnvironmentFault, match="ran no pass over a text of 7 tokens as a whole"):
        engine.states([1, 2, 3, 4, 5, 6, 7])


def test_taps_of_another_width_are_refused(python: Path) -> None:
    with Engine(python, "some/model", (2, 5), width=WIDTH + 1, longest=6) as made, pytest.raises(EnvironmentFault):
        made.states([1, 2])


def test_an_engine_that_dies_is_told_with_its_last_words(python: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"vLLM ended with 1\. Its last words: no such model"):
        Engine(python, "absent", (2,), width=WIDTH, longest=6)
    made = Engine(python, "some/model", (2,), width=WIDTH, longest=6)
    with pytest.raises(EnvironmentFault, match="vLLM ended with 7"):
        made.states([13])


def test_an_environment_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="could not be started") as caught:
        Engine(tmp_path / "nowhere", "m", (2,), width=WIDTH, longest=6)
    assert "--engine-python" in caught.value.way_out
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="No module named"):
        Engine(bare, "m", (2,), width=WIDTH, longest=6)


def test_nothing_is_left_behind(python: Path) -> None:
    with Engine(python, "some/model", (2,), width=WIDTH, longest=6) as made:
        made.states([1, 2])
        folder, process = made._folder, made._process
        assert folder.exists()
        assert not list(folder.glob("pass-*"))
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_the_error_that_points_at_another_is_not_the_last_word() -> None:
    """As vLLM 0.32 ends where a drafter's weight has no place."""
    lines = [
        "(EngineCore pid=1) ERROR ValueError: There is no module or parameter named 'q_prj' in EagleLlama.",
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above. Failed: {'E': 1}",
    ]
    assert "q_prj" in last_error(lines)
    assert "initialization" in last_error(lines[1:])
    assert last_error(["one", "two"]) == "two"
