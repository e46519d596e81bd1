"""Runs in vLLM's environment, not in ours: feeds prompts of token ids and writes the taps that vLLM itself collects.

Started by ``eyas.engines.vllm``. The class is mixed into vLLM's worker (``worker_extension_cls``) and turns on the
model's own collection for EAGLE-3 drafters (``set_aux_hidden_state_layers``; vLLM's layer ids are taps, see
``eyas.dialects.vllm``). One prompt is one pass: one sequence at a time, prefill not chunked, one token generated.

Lines of JSON in: {"ids": [...], "file": "..."}; lines of JSON out, on a descriptor of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


class TapsExtension:
    """Methods for vLLM's worker; called by name through ``collective_rpc``."""

    def eyas_watch(self, taps: list[int], folder: str) -> None:
        """From now on write every pass: ids [T] and taps [T, C*D] in fp32, taps in ascending order."""
        worker: Any = self
        model = worker.model_runner.get_model()
        model.set_aux_hidden_state_layers(tuple(taps))
        number = 0

        def keep(_module: Any, _args: Any, kwargs: dict[str, Any], output: tuple[Any, list[Any]]) -> Any:
            nonlocal number
            hidden, aux = output
            if worker.rank == 0:
                rows = np.concatenate([tap.float().cpu().numpy() for tap in aux], axis=1)
                path = Path(folder, f"pass-{number:09d}")
                np.savez(path.with_suffix(".part.npz"), ids=kwargs["input_ids"].cpu().numpy(), taps=rows)
                os.replace(path.with_suffix(".part.npz"), path.with_suffix(".npz"))
            number += 1
            return hidden  # what the runner expects of a model that collects nothing

        model.register_forward_hook(keep, with_kwargs=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--taps", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--reply", type=int, required=True)
    options = parser.parse_args()
    reply = os.fdopen(options.reply, "w", encoding="utf-8")

    def say(value: dict[str, Any]) -> None:
        reply.write(json.dumps(value) + "\n")
        reply.flush()

    import vllm  # type: ignore[import-not-found]  # here, in its environment

    longest = options.longest + 1  # one token is generated
    llm = vllm.LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=1,
        enable_prefix_caching=False,
        worker_extension_cls="vllm_taps.TapsExtension",
    )
    llm.collective_rpc("eyas_watch", args=([int(t) for t in options.taps.split(",")], options.folder))
    say({"version": vllm.__version__})
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1)
    for line in sys.stdin:
        ids = json.loads(line)["ids"]
        llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        say({"passes": sorted(p.name for p in Path(options.folder).glob("pass-*[0-9].npz"))})


if __name__ == "__main__":
    main()
