"""Forty-one ways in which a drafter that trained well is served wrong in silence, each with the verb that names it.

A row builds the drafter as files, asks ``show`` about one engine, and expects a cause; the same drafter put right must
not have it. ``basis`` is how the rule is known: executed and read rules may be grave, an inferred one is a note. What
needs weights, states, text or a running engine is a strict expected failure that names what will turn it.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import drafts
import folders
from eyas import records, taps
from eyas import target as targets
from eyas.dialects import engines
from eyas.dialects.wiring import TargetFacts
from eyas.records import Record
from eyas.results import Finding
from eyas.show import show
from folders import call
from test_diagnose import FEW, Faults, grave, healthy, judged, texts

LLAMA = drafts.target()
DEEPSEEK = drafts.target("DeepseekV3ForCausalLM", 61)
GPT_OSS = drafts.target("GptOssForCausalLM", 36)
KEY = "eagle_aux_hidden_state_layer_ids"
NESTED, OUTER = f"eagle_config.{KEY}", KEY


@dataclass(frozen=True)
class Trap:
    """``wrong`` and ``right`` are what ``drafts.write`` changes; a trap of flags has them instead."""

    number: int
    engine: str
    cause: str
    grave: bool = True
    taps: tuple[int, ...] = (0, 2, 15)
    host: TargetFacts = LLAMA
    shape: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] | None = None
    runner: Any = None
    flags: str = ""
    right_flags: str | None = None
    right_engine: str | None = None


TRAPS = [
    # 1 the same ids, counted in two ways
    Trap(1, "vllm", "taps-off-by-minus-one", taps=(2, 15, 27), runner="v1",
         wrong={"config": drafts.inner([1, 14, 26]), "remove": [OUTER]}, right={}),
    Trap(1, "sglang", "taps-off-by-one", taps=(2, 15, 27), wrong={"config": drafts.inner([2, 15, 27])}, right={}),
    # 2 vLLM's V2 runner does not look inside eagle_config
    Trap(2, "vllm", "taps-engine-default", runner="v2", wrong={"remove": [OUTER]}, right={}),
    # 3 SGLang does not look at top level
    Trap(3, "sglang", "taps-engine-default", wrong={"remove": ["eagle_config"]}, right={}),
    # 4 DeepSeek: the first id decides how all are counted
    Trap(4, "sglang", "taps-off-by-minus-one", taps=(1, 30, 59), host=DEEPSEEK,
         wrong={"config": drafts.inner([0, 29, 58])}, right={}),
    # 5 gpt-oss: the largest id decides
    Trap(5, "sglang", "taps-differ", taps=(2, 18, 36), host=GPT_OSS,
         wrong={"config": drafts.inner([1, 17, 36])}, right={}),
    # 6 MiniMax-M3-VL shifts its default too
    Trap(6, "sglang", "taps-engine-default", taps=(2, 15, 27),
         host=drafts.target("MiniMaxM3SparseForConditionalGeneration"), wrong={"remove": ["eagle_config"]}, right={}),
    # 7 Gemma-3 in SGLang hands over a branch
    Trap(7, "sglang", "taps-branch", host=drafts.target("Gemma3ForCausalLM"), right_engine="vllm"),
    # 9 llama.cpp's converter never reads the ids
    Trap(9, "llama.cpp", "taps-engine-default", right={}, wrong={}, right_engine="vllm"),
    # 11 norm_output means two things
    Trap(11, "sglang", "feedback-post-norm", wrong={"config": {"norm_output": True}}, right={}),
    Trap(11, "sglang", "head-norm-added", wrong={"facts": {"head_norm": False}}, right={}),
    # 12 norm_before_residual
    Trap(12, "sglang", "norm-before-residual-ignored", shape={"norm_before_residual": True}, right_engine="vllm"),
    Trap(12, "tensorrt-llm", "norm-before-residual-ignored", shape={"norm_before_residual": True},
         right_engine="vllm"),
    # 13 a tied head
    Trap(13, "sglang", "head-overwritten", wrong={"config": {"tie_word_embeddings": True}}, right={}),
    # 14 an embedding of its own
    Trap(14, "sglang", "embedding-overwritten", shape={"own_embedding": True}, right_engine="vllm"),
    # 15 draft_vocab_size: null
    Trap(15, "sglang", "head-overwritten", wrong={"config": {"draft_vocab_size": None}}, right={}),
    # 16 no head in the file
    Trap(16, "sglang", "head-missing", wrong={"drop": ["lm_head.weight"]}, right={}),
    # 17 no map in the file
    Trap(17, "sglang", "d2t-missing", wrong={"drop": ["d2t"]}, right={}),
    Trap(17, "vllm", "d2t-missing", runner="v1", wrong={"drop": ["d2t"]}, right={}),
    # 20 weights this engine drops without a word
    Trap(20, "sglang", "qk-norm-dropped",
         wrong={"facts": {"qk_norm": True},
                "tensors": {"midlayer.self_attn.q_norm.weight": (4,), "midlayer.self_attn.k_norm.weight": (4,)}},
         right={}),
    Trap(20, "sglang", "attention-bias-dropped", shape={"attention_bias": True}, right_engine="vllm"),
    # 21 weights that are not there stay random
    Trap(21, "sglang", "weights-missing", wrong={"drop": ["fc.weight"]}, right={}),
    Trap(21, "vllm", "weights-missing", runner="v1", wrong={"drop": ["midlayer.mlp.up_proj.weight"]}, right={}),
    # 22 fc is skipped where widths coincide
    Trap(22, "sglang", "fc-skipped", taps=(2,), right_engine="vllm"),
    # 23 later layers are normed by another weight
    Trap(23, "sglang", "later-norm-differs", shape={"num_hidden_layers": 2}, right={
        "tensors": {"layers.1.hidden_norm.weight": (drafts.H,)}}),
    # 24 norm_before_fc where this engine does not look
    Trap(24, "tensorrt-llm", "input-norm-skipped", taps=(2, 15, 27), shape={"norm_before_fc": True},
         wrong={}, right={"config": {"eagle_config": {KEY: [1, 14, 26], "norm_before_fc": True}}}),
    # 25 the rotary base lost
    Trap(25, "sglang", "rope-base-wrong", wrong={"remove": ["rope_parameters", "rope_theta"]}, right={}),
    # 26 the rotary scaling lost
    Trap(26, "vllm", "rope-scaling-dropped", runner="v1",
         wrong={"facts": {"rope": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0}}}, right={}),
    # 27 a window that this engine does not read
    Trap(27, "sglang", "window-from-target", wrong={"facts": {"window": 2048}}, right={}),
    # 28 the target's quantisation inherited
    Trap(28, "sglang", "drafter-target-quantisation", grave=False, flags="--quantization fp8",
         right_flags="--quantization fp8 --speculative-draft-model-quantization unquant"),
    # 29 another precision than it was saved in
    Trap(29, "sglang", "drafter-dtype-forced", grave=False, flags="--dtype float16", right_flags="--dtype auto"),
    # 30 a path that names another method
    Trap(30, "vllm", "algorithm-eagle", runner="v1",
         flags="""--speculative-config '{"model": "some/eagle-3-llama", "num_speculative_tokens": 3}'""",
         right_flags="""--speculative-config '{"model": "a/b", "method": "eagle3", "num_speculative_tokens": 3}'"""),
    # 31 no draft path: the target's own MTP head is drafted with
    Trap(31, "sglang", "draft-path-defaulted", host=DEEPSEEK, flags="--speculative-algorithm EAGLE3",
         right_flags="--speculative-algorithm EAGLE3 --speculative-draft-model-path here"),
    # 32 a tree cut to a chain
    Trap(32, "sglang", "draft-tokens-lowered",
         flags="--speculative-num-steps 1 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1",
         right_flags="--speculative-num-steps 15 --speculative-num-draft-tokens 16 --speculative-eagle-topk 1"),
    # 33 greedy verification, whatever the temperature
    Trap(33, "sglang", "verify-greedy", grave=False, flags="--device cpu", right_flags="--device cuda"),
    # 34 acceptance that is made up
    Trap(34, "sglang", "acceptance-faked", grave=False, flags="SGLANG_SIMULATE_ACC_LEN=3 --speculative-num-steps 3 "
         "--speculative-num-draft-tokens 4 --speculative-eagle-topk 1",
         right_flags="--speculative-num-steps 3 --speculative-num-draft-tokens 4 --speculative-eagle-topk 1"),
    # 39 layers that run elsewhere
    Trap(39, "sglang", "taps-too-few", grave=False, flags="--enable-two-batch-overlap", right_flags=""),
    Trap(39, "sglang", "taps-too-few", grave=False, flags="--pp-size 2", right_flags="--pp-size 1"),
    # 40 use_aux_hidden_state: false
    Trap(40, "vllm", "engine-cannot-express", grave=False, runner="v2",
         wrong={"config": drafts.inner([1, 1, 14], use_aux_hidden_state=False)}, right={}),
    # 41 ids out of order
    Trap(41, "sglang", "taps-swapped", taps=(15, 2, 27),
         wrong={"config": drafts.inner([14, 1, 26])}, right_engine=None),
]  # fmt: skip


def found(trap: Trap, folder: Path, changes: dict[str, Any], *, flags: str, engine: str) -> list[Finding]:
    drafts.write(folder, drafts.shape(trap.taps, **trap.shape), trap.host, **changes)
    asked = engines.asked(engine, trap.runner if engine == trap.engine else "v1", tuple(shlex.split(flags)))
    return list(show(folder, [asked], target=trap.host).findings)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.number}-{trap.engine}-{trap.cause}")
def test_show_names_the_trap_and_not_its_cure(trap: Trap, tmp_path: Path) -> None:
    wrong = found(trap, tmp_path / "wrong", trap.wrong, flags=trap.flags, engine=trap.engine)
    named = [finding for finding in wrong if finding.cause == trap.cause]
    assert named, [(f.cause, f.summary) for f in wrong]
    assert any(finding.severity != "note" for finding in named) == trap.grave, named
    assert all(finding.fix for finding in named)
    if trap.right_flags is not None:
        right = found(trap, tmp_path / "right", trap.wrong, flags=trap.right_flags, engine=trap.engine)
    elif trap.right_engine is not None:
        right = found(trap, tmp_path / "right", trap.wrong, flags="", engine=trap.right_engine)
    elif trap.right is not None:
        right = found(trap, tmp_path / "right", trap.right, flags=trap.flags, engine=trap.engine)
    else:
        return
    assert trap.cause not in [finding.cause for finding in right], [(f.cause, f.summary) for f in right]


# -- traps that other verbs name ------------------------------------------------------------------------------


def test_trap_10_one_list_of_ids_from_two_dumps(capsys: pytest.CaptureFixture[str]) -> None:
    """ModelOpt's two dumps count differently and write the same key: both readings are shown, neither is chosen."""
    config = Path(__file__).parent / "fixtures" / "configs" / "nvidia-kimi-k2.5.json"
    ran = call(capsys, "show", config, "-e", "vllm", "--runner", "v1", "--json", "-")
    (named,) = [f for f in json.loads(ran.out)["findings"] if f["cause"] == "taps-ambiguous"]
    assert named["severity"] == "note"
    assert named["evidence"][0]["expected"] == [[2, 30, 58], [1, 29, 57]]


def checked(capsys: pytest.CaptureFixture[str], drafter: Path, target: Path, records: Path) -> list[str]:
    ran = call(capsys, "check", drafter, "--target", target, "--records", records, "--json", "-")
    return [finding["cause"] for finding in json.loads(ran.out)["findings"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a drafter on it and records of the target's own text."""
    folder = tmp_path_factory.mktemp("traps")
    target = targets.load(str(folders.write_target(folder / "target")))
    folders.write_drafter(folder / "drafter", target)
    rows = []
    for seed in range(4):
        ids = [2 * seed + 5, 7, 11]
        while len(ids) < 40:
            ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(Record(np.array(ids, dtype=np.int32), np.arange(40) >= 3, f"own/{seed}").to_json())
    folders.write_lines(folder / "records.jsonl", rows)
    return folder


def altered(place: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    shutil.copytree(place / "drafter", out)
    save_file(change(load_file(out / "model.safetensors")), out / "model.safetensors")
    return out


def test_trap_18_ids_in_the_place_of_offsets(capsys: pytest.CaptureFixture[str], place: Path, tmp_path: Path) -> None:
    def absolute(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return held | {"d2t": held["d2t"] + torch.arange(len(held["d2t"]))}

    wrong = altered(place, tmp_path / "wrong", absolute)
    causes = checked(capsys, wrong, place / "target", place / "records.jsonl")
    assert {"vocab-map-inconsistent", "d2t-read-as-ids"} & set(causes)
    right = checked(capsys, place / "drafter", place / "target", place / "records.jsonl")
    assert not {"vocab-map-inconsistent", "d2t-read-as-ids"} & set(right)


def test_trap_35_rates_over_other_denominators(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "Decode batch, #running-req: 1, accept len: 3.10, accept rate: 0.14, cuda graph: True\n"
    for topk, named in ((4, True), (1, False)):
        tokens, rate = (16, "0.14") if topk > 1 else (4, "0.70")
        start = f"server_args=ServerArgs(speculative_eagle_topk={topk}, speculative_num_draft_tokens={tokens}, "
        log = tmp_path / f"{topk}.log"
        log.write_text(start + "speculative_num_steps=3)\n" + line.replace("0.14", rate))
        ran = call(capsys, "read", log, "--json", "-")
        causes = [finding["cause"] for finding in json.loads(ran.out)["findings"]]
        assert ("tree-denominator" in causes) == named


CASE = Path(__file__).parent / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"


def skilled(out: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Path:
    """A drafter that has learnt something, on taps (0, 3, 7) of 12, without its contract and changed: what is wrong
    with it can only be measured."""
    shutil.copytree(CASE / "trained", out)
    config = json.loads((out / "config.json").read_text())
    del config["eyas"]
    tensors = load_file(out / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


def test_trap_8_an_override_that_was_not_exported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Trained on (0, 3, 7), no ids in the config and no contract: engines take their default."""

    def lost(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del config["eagle_config"], config[KEY]

    wrong = checked(capsys, skilled(tmp_path / "wrong", lost), CASE / "target", CASE / "heldout.jsonl")
    assert {"taps-engine-default", "taps-key-missing"} & set(wrong)
    right = checked(
        capsys, skilled(tmp_path / "right", lambda config, tensors: None), CASE / "target", CASE / "heldout.jsonl"
    )
    assert not {"taps-engine-default", "taps-key-missing"} & set(right)


def test_trap_19_a_map_of_another_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def stale(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        ids = torch.arange(512)[-len(tensors["d2t"]) :]
        mask = torch.zeros_like(tensors["t2d"])
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}

    causes = checked(capsys, skilled(tmp_path / "d", stale), CASE / "target", CASE / "heldout.jsonl")
    assert "d2t-stale" in causes


@pytest.mark.parametrize("normed", [True, False])
def test_trap_38_a_teacher_made_of_the_wrong_tensor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, normed: bool
) -> None:
    """Stored states whose last tensor is what the head reads, where trainers expect the stream before the norm."""
    target = targets.load(str(CASE / "target"))
    (tmp_path / "states").mkdir()
    for i, record in enumerate(records.read(CASE / "heldout.jsonl", limit=4)):
        ids = torch.from_numpy(record.input_ids.astype(np.int64))
        states = taps.run(target, ids[None], torch.tensor([len(ids)]), (0, 3, 7, 12))
        *lower, end = states.taps[0].split(target.hidden_size, -1)
        held = [t.clone() for t in (*lower, states.last[0] if normed else end)]
        mask = torch.from_numpy(record.loss_mask.astype(np.int64))
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": held}, tmp_path / "states" / f"{i}.pt")
    drafter = skilled(tmp_path / "d", lambda config, tensors: None)
    ran = call(capsys, "check", drafter, "--target", CASE / "target", "--states", tmp_path / "states", "--json", "-")
    assert ("tap-post-norm" in [f["cause"] for f in json.loads(ran.out)["findings"]]) == normed


def test_trap_36_a_draft_position_clamped_near_the_limit() -> None:
    """Only the last tokens suffer, and only a running engine shows it."""
    limit = max(len(r.input_ids) - r.n_response_tokens for r in texts()[:FEW]) + 20
    told = judged(Faults(healthy(), clamp=limit))
    assert grave(told)[:1] == ["position-limit-short"], told["findings"]
    assert told["divergence"]["stage"] == "positions"
    assert len(told["probes"]["positions"]["steps"]) > 1


@pytest.mark.xfail(strict=True, reason="image taps are seen in a running engine only, and no image is served yet")
def test_traps_of_a_running_engine_on_images() -> None:
    importlib.import_module("eyas.diagnose.images")


def test_every_trap_has_a_row() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    other = {int(n) for n in re.findall(r"def test_trap_(\d+)_", here)} | {37}
    assert {trap.number for trap in TRAPS} | other == set(range(1, 42))
