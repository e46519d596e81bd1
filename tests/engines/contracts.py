"""Tiny targets and drafters of every contract, each config as an engine is to find it, and one run of vLLM over all.

Used by the tests here and by ``runs/vllm_taps.py``, which records what they see.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from eyas import checkpoint, inventory, starts
from eyas import target as targets
from eyas.contract import declared
from eyas.dialects import host, vllm
from eyas.dialects.wiring import Files, Launch, TargetFacts, Wiring
from eyas.drafter import Drafter
from eyas.target import Target
from eyas.vocab import DraftVocab

LAYERS, VOCAB, DRAFT_VOCAB, WIDTH = 8, 211, 97, 64
PROMPT = [int(i) for i in np.random.default_rng(7).integers(0, VOCAB, 19)]
TOKENS, K, LONGEST = 12, 3, 64
IDS = "eagle_aux_hidden_state_layer_ids"
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the narrowest that vLLM's attention on a CPU takes
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """``taps``: what the drafter is trained on. ``spelt``: engine keys put into the config instead of vLLM's own
    spelling. ``shape``: fields of DrafterConfig. ``stops``: a word of the error that is to come."""

    name: str
    taps: tuple[int, ...] = (1, 3, 6)
    kind: str = "llama"
    shape: Mapping[str, Any] = field(default_factory=dict)
    spelt: Mapping[str, Any] | None = None
    full: bool = False
    headless: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    stops: str | None = None


def inside(ids: Sequence[int]) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True}}


BACKEND: dict[str, Any] = {"options": {"model_impl": "transformers"}, "flags": ("--model-impl", "transformers")}
CASES = (
    Case("default taps", (2, 4, 5)),
    Case("no list at all", (2, 4, 5), spelt={}),
    Case("other taps"),
    Case("tap 0", (0, 3, 7)),
    Case("tap n", (2, 5, 8)),
    Case("one tap", (4,)),
    Case("five taps", (0, 1, 4, 6, 8)),
    Case("fc_norm", shape={"fc_norm": True}),
    Case("norm_before_fc", shape={"norm_before_fc": True}),
    Case("both norms", shape={"fc_norm": True, "norm_before_fc": True}),
    Case("norm_output", shape={"norm_output": True}),
    Case("norm_before_residual", shape={"norm_before_residual": True}),
    Case("attention bias", shape={"attention_bias": True}),
    Case("tied head", full=True, headless=True),
    Case("full vocabulary", full=True),
    Case("own embedding", shape={"own_embedding": True}),
    Case("three layers", shape={"num_hidden_layers": 3}),
    Case("everything", (0, 4, 8), shape={"fc_norm": True, "norm_before_fc": True, "norm_output": True,
         "norm_before_residual": True, "own_embedding": True, "attention_bias": True, "num_hidden_layers": 2}),
    Case("Qwen3 target", kind="qwen3"),
    Case("Qwen3 target, tap 0 and n", (0, 4, 8), "qwen3"),
    Case("SGLang's spelling alone", spelt=inside([0, 2, 5])),
    Case("SGLang's spelling, default taps", (2, 4, 5), spelt=inside([1, 3, 4])),
    Case("V2's spelling alone", spelt={"eagle_config": {"layer_ids": [1, 3, 6]}}),
    Case("unsorted", spelt={IDS: [6, 1, 3]}),
    Case("beyond the last layer", spelt={IDS: [1, 3, 9]}, stops="shape"),
    Case("twice the same", spelt={IDS: [1, 3, 3]}, stops="shape"),
    Case("Transformers backend", **BACKEND),
    Case("Transformers backend, unsorted", spelt={IDS: [6, 1, 3]}, **BACKEND),
    Case("Transformers backend, tap 0", spelt={IDS: [0, 3, 6]}, stops="KeyError", **BACKEND),
)  # fmt: skip


def file_name(case: Case) -> str:
    return case.name.replace(" ", "-").replace(",", "").replace("'", "")


# -- made -----------------------------------------------------------------------------------------------------


def write_target(folder: Path, kind: str) -> Path:
    config: PreTrainedConfig = Qwen3Config(**_SHAPE) if kind == "qwen3" else LlamaConfig(**_SHAPE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with targets.quiet():
        model.save_pretrained(folder)
    return folder


def load_target(folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Target(folder.name, folder, model, None, model.config)


def make_drafter(case: Case, target: Target) -> Drafter:
    """Random, its weights so large that its tokens depend on all it is fed."""
    generator = torch.Generator().manual_seed(3)
    size = VOCAB if case.full else DRAFT_VOCAB
    words = DraftVocab(torch.randperm(VOCAB, generator=generator)[:size].sort().values, VOCAB)
    made = starts.random(target, starts.config_for(target, case.taps, size, **case.shape), words, 0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        if case.headless:
            made.lm_head.weight.copy_(target.head.weight)
    return made.requires_grad_(False)


def write_drafter(folder: Path, case: Case, target: Target, facts: TargetFacts) -> Drafter:
    """As eyas saves it, then with vLLM's keys as its dialect writes them, or with those of ``case.spelt``."""
    made = make_drafter(case, target)
    contract = declared(taps=list(case.taps), **made.config.facts(), target=target.identity())
    checkpoint.save(made, folder, contract, {}, dtype=torch.float32)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if case.spelt is None:
        config = vllm.write(contract, config, facts, launch(case))
    else:
        config = {k: v for k, v in config.items() if k not in (IDS, "eagle_config")} | dict(case.spelt)
    path.write_text(json.dumps(config), encoding="utf-8")
    if case.headless:
        weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if k != "lm_head.weight"}
        checkpoint.write_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    return made


def launch(case: Case) -> Launch:
    return Launch(Version(vllm.VERSIONS[-1]), "v1", case.flags)


def told(case: Case, folder: Path, target: Path) -> Wiring:
    """What the table says, of the folder as it lies there."""
    found = inventory.read(folder)
    facts = host.from_config(json.loads((target / "config.json").read_text(encoding="utf-8")), "target")
    return vllm.wire(Files(found.config, found.tensors), facts, launch(case))


# -- run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One case in real vLLM. ``fed`` [T, C*D]: the rows handed to the drafter in the pass over the prompt."""

    case: Case
    wiring: Wiring
    target: Target
    drafter: Drafter
    answer: Mapping[str, Any]
    fed: np.ndarray | None

    @property
    def error(self) -> str | None:
        return self.answer.get("error")


def run(python: Path, out: Path, cases: Sequence[Case] = CASES, *, seconds: float = 3000) -> tuple[str, list[Seen]]:
    """Every case in one process of vLLM's; its version, and what was seen of each."""
    folders = {kind: write_target(out / f"target-{kind}", kind) for kind in {case.kind for case in cases}}
    loaded = {kind: load_target(folder) for kind, folder in folders.items()}
    jobs, drafters = [], {}
    for case in cases:
        config = json.loads((folders[case.kind] / "config.json").read_text(encoding="utf-8"))
        name = file_name(case)
        facts = host.from_config(config, "target")
        drafters[case.name] = write_drafter(out / f"eagle3-{name}", case, loaded[case.kind], facts)
        one = {"name": name, "target": str(folders[case.kind]), "drafter": str(out / f"eagle3-{name}")}
        jobs.append({**one, "options": dict(case.options)})
    settings = {"prompts": [PROMPT], "tokens": TOKENS, "k": K, "longest": LONGEST, "ignore_eos": True, "jobs": jobs}
    version = in_vllm(python, out, settings, seconds=seconds)
    seen = []
    for case in cases:
        name = file_name(case)
        answer = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        wiring = told(case, out / f"eagle3-{name}", folders[case.kind])
        fed = whole_prompt(out / f"{name}.npz", len(PROMPT)) if "error" not in answer else None
        seen.append(Seen(case, wiring, loaded[case.kind], drafters[case.name], answer, fed))
    return version, seen


def in_vllm(python: Path, out: Path, settings: Mapping[str, Any], *, seconds: float) -> str:
    """Put jobs to ``inside_vllm.py``; vLLM's version."""
    (out / "jobs.json").write_text(json.dumps(settings), encoding="utf-8")
    script = Path(__file__).parent / "inside_vllm.py"
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with open(out / "log.txt", "wb") as log:
        command = [str(python), str(script), str(out / "jobs.json"), str(out)]
        environment = {**kept, "PYTHONPATH": str(script.parent), "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=seconds, check=False)
    words = (out / "log.txt").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, words[-2000:]
    return str(json.loads((out / "version.json").read_text(encoding="utf-8")))


def whole_prompt(path: Path, length: int) -> np.ndarray | None:
    with np.load(path, allow_pickle=False) as kept:
        return next((kept[name] for name in sorted(kept.files) if len(kept[name]) == length), None)


def every_tap(target: Target, ids: Sequence[int]) -> np.ndarray:
    """[n+1, T, D] by transformers alone: ``hidden_states`` for 0..n-1, what the final norm is handed for n."""
    last: list[torch.Tensor] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda _m, args: last.append(args[0]))  # type: ignore[union-attr,operator]
    with torch.inference_mode():
        found = target.model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    hook.remove()
    return np.stack([*(h[0].float().numpy() for h in found[:-1]), last[0][0].float().numpy()])


def errors_by_tap(fed: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """[C, n+1]: the median over rows of |fed - tap| / |tap|, for every slot of what was fed and every tap."""
    _, _, width = taps.shape
    slots = fed.reshape(len(fed), -1, width).transpose(1, 0, 2)
    distance = np.linalg.norm(slots[:, None] - taps[None], axis=-1) / np.linalg.norm(taps, axis=-1)[None]
    return np.asarray(np.median(distance, axis=-1))
