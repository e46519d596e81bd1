"""`eyas diagnose` on real vLLM: a sound drafter, the case with two faults, one attached to, and what an engine says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas import prompts, resolve
from eyas import target as targets
from eyas.diagnose import toggles
from eyas.diagnose.curves import Counted
from eyas.engines.toggles import Toggle, of_vllm
from eyas.engines.vllm_live import Vllm
from eyas.render import Renderer

FAULTS = Path(__file__).parents[2] / "runs" / "fault_matrix"
DRAFTERS = Path(__file__).parents[1] / "fixtures" / "drafters"
CASE = DRAFTERS / "smollm2-taps-0-2-15"  # trained on taps 0, 2, 15: no engine's default
FLAGS = "--dtype float32 --max-model-len 1024"
IDS = "eagle_aux_hidden_state_layer_ids"


def ran(*arguments: object, code: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "diagnose", *map(str, arguments), "--json", "-"],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def grave(told: dict[str, Any]) -> list[str]:
    return [f["cause"] for f in told["findings"] if f["severity"] != "note"]


def test_a_sound_drafter_is_cleared(vllm_python: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    told = ran("smollm2-eagle3", "--engine-python", vllm_python, "--engine-flags", FLAGS, "--log", log, "--html",
               tmp_path / "page.html", code=0)  # fmt: skip
    assert told["verdict"] == "healthy"
    assert grave(told) == []
    assert told["divergence"] is None
    assert told["served"]["equal"] == 16
    assert abs(told["gap"]["value"]) <= 0.02
    assert max(min(row) for row in told["probes"]["taps"]["error"]) < 1e-4
    assert max(d["error"] for d in told["probes"]["states"]["depths"]) < 1e-4
    assert "vLLM" in log.read_text(errors="replace") or log.stat().st_size > 1000
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert told["served"]["seconds"]["total"] < 240


def test_the_case_both_faults_and_what_the_repair_is_worth(vllm_python: Path, tmp_path: Path) -> None:
    """Trained on (0, 2, 15), served on (2, 15, 27), and behind that the feedback normed."""
    served = tmp_path / "eagle3-served"
    shutil.copytree(CASE, served)
    config = json.loads((served / "config.json").read_text(encoding="utf-8"))
    config |= {IDS: [2, 15, 27], "norm_output": True}
    config.pop("eagle_config", None)
    (served / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arguments = ("--engine-python", vllm_python, "--engine-flags", FLAGS)
    told = ran(served, *arguments, code=1)
    first = [cause for cause in grave(told) if cause != "contract-edited"]
    assert set(first[:2]) == {"taps-engine-default", "feedback-post-norm"}
    steps = told["repairs"]
    assert [s["cause"] for s in steps] == first[:2]
    assert steps[-1]["reaches"] == pytest.approx(told["expected"]["accept_length"]["value"])
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "export", served, "--to", "vllm", "-o", tmp_path / "eagle3-mended"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = ran(tmp_path / "eagle3-mended", *arguments, code=0)
    assert grave(again) == []
    reached, promised = again["observed"]["accept_length"]["value"], told["expected"]["accept_length"]["value"]
    assert abs(reached - promised) <= 0.02
    assert told["observed"]["accept_length"]["value"] < promised - 0.1


def test_one_that_already_runs_is_only_read(vllm_python: Path) -> None:
    target = targets.load("smollm2")
    assert target.folder is not None
    live = Vllm.launch(
        vllm_python,
        target.folder,
        resolve.drafter("smollm2-eagle3"),
        draft_tokens=4,
        flags=FLAGS.split(),
        probing=False,
    )
    try:
        live.ready()
        told = ran("smollm2-eagle3", "--url", live.asker.url, "--limit", 6, "-n", 48, code=3)
        assert told["probes"] is None
        assert told["observed"]["source"] == "metrics"
        assert abs(told["gap"]["value"]) <= 0.03
        assert "engine-falls-short" not in grave(told)
        assert told["engine"]["mode"] == "attached"
    finally:
        live.stop()


def test_a_drafter_that_vllm_refuses(vllm_python: Path, tmp_path: Path) -> None:
    """A weight under another name: the engine dies, and the files say why."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(CASE, tmp_path / "eagle3-odd")
    weights = tmp_path / "eagle3-odd" / "model.safetensors"
    held = {name.replace("q_proj", "q_prj"): tensor for name, tensor in load_file(weights).items()}
    save_file(held, weights, metadata={"format": "pt"})
    told = ran(tmp_path / "eagle3-odd", "--engine-python", vllm_python, "--engine-flags", FLAGS, code=1)
    assert told["verdict"] == "broken"
    assert grave(told)[0] == "weights-missing"
    assert "q_prj" in json.dumps(told["not_checked"])


class Breaking(Vllm):
    """A vLLM that swaps taps as long as its prefix cache is on."""

    def ready(self, heard: Callable[[str], None] = lambda what: None) -> None:
        super().ready(heard)
        if self.about.resolved["cache.enable_prefix_caching"]:
            assert "error" not in self.call("eyas_break", json.dumps(["taps swapped"]))


def test_a_setting_that_costs_is_found_by_turning_it(vllm_python: Path) -> None:
    target = targets.load("smollm2")
    folder = target.folder
    assert folder is not None
    flags = [*FLAGS.split(), "--enforce-eager"]
    drafter = resolve.drafter("smollm2-eagle3")
    chats = [p.messages() for p in prompts.load("mt-bench", 12)]
    renderer = Renderer(target.tokenizer, target.eos_ids())
    ids = [renderer.ids(chat, prompt=True) for chat in chats]

    def begin(toggle: Toggle) -> Vllm:
        return Breaking.launch(
            vllm_python, folder, drafter, draft_tokens=4, flags=[*flags, *toggle.flags], probing=False,
            concurrency=toggle.concurrency or 8, extension=("vllm_faults.FaultyProbe", FAULTS),
        )  # fmt: skip

    sound = Vllm.launch(vllm_python, folder, drafter, draft_tokens=4, flags=flags, probing=False)
    try:
        sound.ready()
        answers = sound.generate(ids, 48)
        page = sound.metrics()
        resolved = dict(sound.about.resolved)
    finally:
        sound.stop()
    assert page is not None
    expected = Counted(np.array([page.rounds]), np.array([page.accepted]), "metrics")
    choice = of_vllm(flags, resolved, [len(i) for i in ids], 8)
    tried = toggles.turned(begin, choice, toggles.Asking(ids, 48, answers, 50.0, 20.0), expected)
    told = {t.toggle.name: t.outcome for t in tried}
    assert [t.toggle.name for t in tried if t.helps] == ["prefix cache"], told
    assert told["graphs"] == "not tried: it runs eager already"
    assert told["batch"] == "no difference"
    (finding,) = toggles.findings(tried)
    assert finding.cause == "setting-costs"
    assert "--no-enable-prefix-caching" in (finding.fix or "")
