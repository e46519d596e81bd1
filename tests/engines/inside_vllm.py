"""Runs in vLLM's environment: tiny drafters in real vLLM, one after another, and what the running model does with each.

    VENV/bin/python tests/engines/inside_vllm.py JOBS.json OUT

vLLM is imported once; every job is a fork that loads its models, answers one prompt and writes OUT/NAME.json and
OUT/NAME.npz: the layers the target's model collects, the rows handed to the drafter's ``combine_hidden_states`` in the
pass over the prompt, the tokens drafted in every round, the answer, and the counts of vLLM's own metrics. What stops
vLLM is written as its words.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np

MOST_PASSES = 40  # of which the rows are kept


class Watch:
    """Mixed into vLLM's worker and called by name: keeps what the drafter is fed and what it drafts (V1 runner)."""

    def eyas_watch(self) -> dict[str, Any]:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.fed: list[Any] = []
        self.drafted: list[Any] = []
        drafter, model = runner.drafter, runner.drafter.model
        combine, propose = model.combine_hidden_states, drafter.propose

        def combined(states: Any) -> Any:
            if len(self.fed) < MOST_PASSES:
                self.fed.append(states.detach().float().cpu().numpy())
            return combine(states)

        def proposed(*args: Any, **kwargs: Any) -> Any:
            tokens = propose(*args, **kwargs)
            self.drafted.append(tokens.tolist())
            return tokens

        model.combine_hidden_states, drafter.propose = combined, proposed
        target = runner.get_model()
        inner = getattr(target, "model", target)
        hooked = [int(k.rsplit("_", 1)[1]) for k in getattr(target, "_output_aux_hidden_states_kwargs", {})]
        return {
            "layers": list(getattr(inner, "aux_hidden_state_layers", ())) or hooked,
            "runner": type(runner).__module__,
        }

    def eyas_seen(self, folder: str, name: str) -> list[Any]:
        np.savez(Path(folder) / f"{name}.npz", **{f"pass-{i:04d}": rows for i, rows in enumerate(self.fed)})
        return self.drafted


def job(vllm: Any, settings: dict[str, Any], one: dict[str, Any], out: Path) -> dict[str, Any]:
    llm = vllm.LLM(
        model=one["target"],
        skip_tokenizer_init=settings["ignore_eos"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=settings["longest"],
        max_num_batched_tokens=settings["longest"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        worker_extension_cls="inside_vllm.Watch",
        speculative_config={"method": "eagle3", "model": one["drafter"], "num_speculative_tokens": settings["k"]},
        **one.get("options", {}),
    )
    told = llm.collective_rpc("eyas_watch")[0]
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=settings["tokens"], ignore_eos=settings["ignore_eos"], detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in settings["prompts"]]
    answers = [list(a.outputs[0].token_ids) for a in llm.generate(prompts, sampling, use_tqdm=False)]
    drafted = llm.collective_rpc("eyas_seen", args=(str(out), one["name"]))[0]
    return {**told, "answers": answers, "drafted": drafted, "counts": counts(llm, settings["k"])}


def counts(llm: Any, k: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": 0, "accepted": [0] * k}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["rounds"] += int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = [a + int(b) for a, b in zip(found["accepted"], metric.values, strict=True)]
    return found


def last_words(error: BaseException) -> str:
    """The innermost error's; vLLM wraps some."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> None:
    jobs, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).parent))
    import vllm  # type: ignore[import-not-found]
    from vllm.v1.engine import core  # type: ignore[import-not-found]  # noqa: F401  (imported before the forks)

    (out / "version.json").write_text(json.dumps(vllm.__version__), encoding="utf-8")
    for one in jobs["jobs"]:
        child = os.fork()
        if child == 0:
            code = 0
            try:
                found = job(vllm, jobs, one, out)
            except BaseException as error:  # it is the answer
                traceback.print_exc()
                found = {"error": last_words(error)}
            try:
                (out / f"{one['name']}.json").write_text(json.dumps(found), encoding="utf-8")
            except OSError:
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.waitpid(child, 0)
        print(f"{one['name']}: done", flush=True)


if __name__ == "__main__":
    main()
