"""Does llama.cpp load the GGUF files of eyas, and refuse what its dialect says it refuses? The word of its own loader.

    mkdir NODE && cd NODE && npm init -y && npm install node-llama-cpp@3.22.1        (a built llama.cpp 0.5.0, no GPU)
    python runs/llama_cpp.py NODE tests/fixtures/engines/llama_cpp.json

Tiny drafters of every shape that has a place in a GGUF are exported as ``eyas export`` does it; further files are
broken on purpose, one thing each. Recorded for each: its key-values and headers, whether it was loaded, and llama.cpp's
words where it was not. The model is loaded, not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import checkpoint, gguf_export, starts
from eyas.contract import Contract, declared
from eyas.dialects import llama_cpp
from eyas.dialects.wiring import Launch, TargetFacts
from eyas.target import Target
from eyas.vocab import DraftVocab

VOCAB, LAYERS = 320, 5
VERSION = "0.5.0"
LAUNCH = Launch(Version(VERSION))
FACTS = TargetFacts("LlamaForCausalLM", LAYERS, 32, VOCAB)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "joint norm": {"norm_before_fc": True},
    "residual after": {"norm_before_residual": True},
    "own embedding": {"own_embedding": True},
    "full vocabulary": {"draft_vocab_size": VOCAB},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
}
Parts = tuple[dict[str, Any], dict[str, torch.Tensor], list[gguf_export.KeyValue]]
BROKEN: dict[str, Callable[[Parts], Parts]] = {
    "two taps": lambda p: ({**p[0], "eagle3.target_layers": [1, 2]}, p[1], p[2]),
    "the older key alone": lambda p: ({k: v for k, v in p[0].items() if k != "eagle3.target_layers"}, p[1], p[2]),
    "no tokenizer": lambda p: (p[0], p[1], []),
    "a bias": lambda p: (p[0], {**p[1], "blk.0.attn_q.bias": torch.zeros(32)}, p[2]),
    "no hidden_norm": lambda p: (p[0], {k: v for k, v in p[1].items() if k != "blk.0.attn_norm_2.weight"}, p[2]),
    "no head": lambda p: (p[0], {k: v for k, v in p[1].items() if k != "output.weight"}, p[2]),
    "two layers": lambda p: ({**p[0], "eagle3.block_count": 2}, p[1], p[2]),
    "joint norm without its tensor": lambda p: ({**p[0], "eagle3.norm_before_fc": True}, p[1], p[2]),
}
LOAD = """
import {getLlama, LlamaLogLevel} from "node-llama-cpp";
let said = "";
const logger = (_, message) => { said += message; };
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.debug, logger});
for (const path of process.argv.slice(2)) {
  said = "";
  let loaded = true;
  try { await (await llama.loadModel({modelPath: path, gpuLayers: 0})).dispose(); } catch (_) { loaded = false; }
  await new Promise((done) => setTimeout(done, 200));
  console.log(JSON.stringify({path, loaded, said}));
}
process.exit(0);
"""


def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=None,
    )
    return Target("tiny", None, LlamaForCausalLM(config).eval(), None, config)


def write_tokenizer(folder: Path) -> None:
    letters = [chr(i) for i in range(0x100, 0x100 + VOCAB - 1)]
    words = {text: i for i, text in enumerate([*letters, letters[0] + letters[1]])}
    Tokenizer(models.BPE(words, [(letters[0], letters[1])])).save(str(folder / "tokenizer.json"))


def make(folder: Path) -> dict[str, Path]:
    of, files = target(), {}
    write_tokenizer(folder)
    for name, choices in SHAPES.items():
        size = choices.get("draft_vocab_size", 64)
        words = DraftVocab(torch.arange(size) * (VOCAB // size), VOCAB)
        rest = {k: v for k, v in choices.items() if k != "draft_vocab_size"}
        drafter = starts.random(of, starts.config_for(of, (0, 2, 4), size, **rest), words, 0)
        checkpoint.save(drafter, folder / name, contract(drafter.config, of), {})
        files[name] = folder / f"{name}.gguf"
        gguf_export.write(folder / name, files[name], contract(drafter.config, of), FACTS, LAUNCH, folder)
    usual = checkpoint.read(folder / "usual")
    assert usual.contract is not None
    for name, change in BROKEN.items():
        fields = llama_cpp.write(usual.contract, usual.config, FACTS, LAUNCH)
        del fields["tokenizer.ggml.model"]
        tensors = gguf_export.tensors_for(usual, fields, usual.contract)
        files[name] = folder / f"{name}.gguf"
        gguf_export.write_file(files[name], *change((fields, tensors, gguf_export.tokenizer_keys(folder, VOCAB))))
    return files


def contract(shape: Any, of: Target) -> Contract:
    size = shape.draft_vocab_size
    return declared(
        taps=list(shape.taps), **shape.facts(), rope=shape.rope_parameters, draft_vocab_size=size, target=of.identity()
    )


def words_of(said: str) -> str | None:
    found = re.findall(r"error loading model: [^\n]*?(?=llama_model_load|$)", said)
    return found[-1].strip() if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("node", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        files = make(Path(temporary))
        script = options.node / "load.mjs"
        script.write_text(LOAD, encoding="utf-8")
        command = ["node", "load.mjs", *map(str, files.values())]
        done = subprocess.run(command, cwd=options.node, capture_output=True, text=True, check=True, timeout=300)
        said = {Path(line["path"]): line for line in map(json.loads, done.stdout.splitlines())}
        recorded = {}
        for name, path in files.items():
            held = gguf_export.read(path)
            assert held.tensors is not None
            loaded = said[path]["loaded"]
            recorded[name] = {
                "loaded": loaded,
                "said": None if loaded else words_of(said[path]["said"]),
                "fields": {k: v for k, v in held.config.items() if not k.startswith(("eyas.p", "eyas.c", "eyas.s"))},
                "tensors": {t.name: [t.dtype, list(t.shape)] for t in held.tensors.values()},
            }
    about = {
        "engine": f"llama.cpp {VERSION} (node-llama-cpp 3.22.1)",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python runs/llama_cpp.py NODE tests/fixtures/engines/llama_cpp.json",
    }
    options.out.write_text(json.dumps({**about, "files": recorded}, indent=1) + "\n", encoding="utf-8")
    for name, row in recorded.items():
        print(f"{name:32} {'loaded' if row['loaded'] else row['said']}")


if __name__ == "__main__":
    main()
