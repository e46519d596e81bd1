"""What vLLM's Qwen3 drafter says with a tiny drafter whose queries and keys are normed: the judge in test_qk_norm.py.

    python runs/qwen3_shape.py make OUT                   (where eyas is)
    VENV/bin/python runs/qwen3_shape.py vllm OUT          (where vLLM 0.32 is; a CPU will do)

As runs/engine_shapes.py does it for the Llama shapes: everything is vLLM's own (models/qwen3_eagle3.py) but the
attention kernel, and the folder is one that eyas saved.
"""

from __future__ import annotations

import argparse
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_shapes import LAYERS, Draft, OfVllm, RowsKept, chain, make_one, some_words, tiny_target, write_text
from safetensors.torch import load_file, save_file


def make(out: Path) -> None:
    torch.manual_seed(0)
    target = tiny_target(heads=4, key_value_heads=2)
    make_one(target, out / "qk_norm", (1, 4), some_words(), {"qk_norm": True, "num_hidden_layers": 2})
    write_text(target, out, 2)


@torch.no_grad()
def vllm(out: Path) -> None:
    from transformers import AutoConfig
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import qwen3
    from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM

    qwen3.Attention = RowsKept
    text = load_file(out / "text.safetensors")
    settings = VllmConfig()
    settings.compilation_config.mode = 0
    with set_current_vllm_config(settings):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29534", 0, "gloo")
        initialize_model_parallel(1, 1)
        draft = AutoConfig.from_pretrained(out / "qk_norm")
        target: Any = types.SimpleNamespace(
            dtype=torch.float32,
            head_dtype=torch.float32,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_vocab_size=lambda: 48,
        )
        spec = types.SimpleNamespace(draft_model_config=Draft(draft), parallel_drafting=False)
        object.__setattr__(settings, "model_config", target)
        object.__setattr__(settings, "speculative_config", spec)
        engine = Eagle3Qwen3ForCausalLM(vllm_config=settings)
        engine.load_weights(load_file(out / "qk_norm" / "model.safetensors").items())
        engine.model.embed_tokens.weight.data[:48].copy_(text["embedding"])
        for part in engine.modules():
            part.cpu_linear = F.linear
        said = chain(OfVllm(engine), text)
    save_file({"qk_norm": said}, out / "vllm.safetensors")
    print(said[:, :3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "vllm"])
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    {"make": make, "vllm": vllm}[options.what](options.out)


if __name__ == "__main__":
    main()
