"""Runs in vLLM's worker, not in ours: what the drafter is fed in every round, and what it drafts.

vLLM mixes ``Probe`` into its worker (``worker_extension_cls``); its methods are called by name through
``collective_rpc`` with strings, so nothing is ever pickled. Until ``eyas_probe_start`` nothing is hooked; after
``eyas_probe_stop`` nothing is hooked any more.

One ``propose`` of the V1 runner (v1/spec_decode/llm_base_proposer.py, 0.32) is one pass of the drafter over the rows
the target has just done, for all requests of the batch at once, and K - 1 passes over one row a request after it:

    rows of a request   t0 … t0+n-1   first pass: fed fused taps of t, token x[t+1], position t
    sample row          the last that was kept; behind it lie rows of rejected tokens, which nothing may read
    depth k             one row: fed the state of depth k-1 and the token drafted there

Each is written as pass-NNNNNNNNN.npz (mode 0600) into the folder named at the start; see ``Pass.save`` for the arrays.
B requests, T rows, C*D tap width, H drafter width, K drafted tokens, N top logits kept.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TOP = 8
_NONE = -1


class Probe:
    """Methods for vLLM's worker; they take and give what JSON can hold."""

    def eyas_probe_facts(self) -> dict[str, Any]:
        """What the running model says of itself. Reads, changes nothing."""
        try:
            return self._eyas_facts()
        except Exception as error:  # an error of a worker's method ends the engine
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}

    def _eyas_facts(self) -> dict[str, Any]:
        worker: Any = self
        runner = worker.model_runner
        drafter = _drafter(runner)
        found: dict[str, Any] = {"runner": type(runner).__module__, "rank": int(getattr(worker, "rank", 0))}
        target = runner.get_model()
        inner = getattr(target, "model", target)
        hooked = [int(k.rsplit("_", 1)[1]) for k in getattr(target, "_output_aux_hidden_states_kwargs", {})]
        found["taps"] = [int(t) for t in getattr(inner, "aux_hidden_state_layers", ())] or hooked
        if drafter is None:
            return {**found, "drafter": None}
        model = drafter.model
        config = getattr(model, "config", None)
        body = getattr(model, "model", model)
        return {
            **found,
            "drafter": type(model).__name__,
            "method": str(getattr(drafter, "method", "")),
            "draft_tokens": int(getattr(drafter, "num_speculative_tokens", 0)),
            "dtype": str(getattr(drafter, "dtype", "")).replace("torch.", ""),
            "norm_output": bool(getattr(body, "norm_output", False)),
            "norm_before_fc": bool(getattr(body, "norm_before_fc", False)),
            "fc_norm": getattr(body, "fc_norm", None) is not None,
            "layers": len(getattr(body, "layers", ())),
            "rope": _plain(getattr(config, "rope_parameters", None)),
            "max_positions": int(getattr(config, "max_position_embeddings", 0) or 0),
            "shares_embedding": _same(getattr(body, "embed_tokens", None), getattr(inner, "embed_tokens", None)),
            "shares_head": _same(getattr(model, "lm_head", None), getattr(target, "lm_head", None)),
            "parameters": {name: _about(value) for name, value in model.named_parameters()},
        }

    def eyas_probe_start(self, settings: str) -> dict[str, Any]:
        """``settings``: JSON of {"folder", "most_bytes"}. Hooks the drafter; a second start is an error."""
        worker: Any = self
        if getattr(worker, "_eyas_recorder", None) is not None:
            return {"error": "a probe is already running"}
        if int(getattr(worker, "rank", 0)) != 0:
            return {"started": False}
        asked = json.loads(settings)
        drafter = _drafter(worker.model_runner)
        if drafter is None or not hasattr(drafter, "propose"):
            return {"error": "this worker has no drafter that proposes tokens"}
        if not hasattr(drafter.model, "combine_hidden_states"):
            return {"error": f"{type(drafter.model).__name__} is no EAGLE-3 drafter: it fuses no taps"}
        recorder = Recorder(worker.model_runner, drafter, Path(asked["folder"]), int(asked["most_bytes"]))
        try:
            recorder.hook()
        except Exception as error:  # an error of a worker's method ends the engine
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        worker._eyas_recorder = recorder
        return {"started": True}

    def eyas_probe_stop(self) -> dict[str, Any]:
        """Unhooks; how much was written and what went wrong."""
        worker: Any = self
        recorder, worker._eyas_recorder = getattr(worker, "_eyas_recorder", None), None
        if recorder is None:
            return {"passes": 0}
        recorder.unhook()
        return {
            "passes": recorder.number,
            "bytes": recorder.bytes,
            "dropped": recorder.dropped,
            "error": recorder.error,
            "seconds": round(recorder.seconds, 3),
        }


def _drafter(runner: Any) -> Any:
    """V1 keeps it as ``drafter``, V2 as ``speculator``."""
    found = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return found if found is not None and hasattr(found, "model") else None


def _same(a: Any, b: Any) -> bool | None:
    if a is None or b is None:
        return None
    return a is b or getattr(a, "weight", None) is getattr(b, "weight", 0)


def _about(value: Any) -> dict[str, Any]:
    """Shape, dtype and size of a weight: enough to see that it was never filled."""
    told = {"shape": list(value.shape), "dtype": str(value.dtype).replace("torch.", "")}
    if not value.numel():  # on a CPU a packed linear layer keeps an empty one
        return told
    rows = value.detach().reshape(value.shape[0], -1)[: 1 << 12].float()
    return {**told, "mean": float(rows.mean()), "rms": float(rows.square().mean().sqrt())}


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


class Recorder:
    """Wraps four functions of the drafter and its model while it is hooked."""

    def __init__(self, runner: Any, drafter: Any, folder: Path, most_bytes: int) -> None:
        self.runner, self.drafter, self.model = runner, drafter, drafter.model
        self.folder, self.most_bytes = folder, most_bytes
        self.number = self.bytes = self.dropped = 0
        self.seconds = 0.0
        self.error: str | None = None
        self.now: Pass | None = None
        self._handle: Any = None

    def hook(self) -> None:
        propose, combine, compute = self.drafter.propose, self.model.combine_hidden_states, self.model.compute_logits

        def combined(states: Any) -> Any:
            fused = combine(states)
            self._safely(lambda this: this.fused(states, fused))
            return fused

        def computed(states: Any) -> Any:
            logits = compute(states)
            self._safely(lambda this: this.said(logits))
            return logits

        def proposed(*args: Any, **kwargs: Any) -> Any:
            self._begin(args, kwargs)
            drafted = propose(*args, **kwargs)
            self._end(drafted)
            return drafted

        # Set on the objects, over the methods of their classes, so that unhooking is to forget them.
        self.drafter.propose = proposed
        self.model.combine_hidden_states = combined
        self.model.compute_logits = computed
        self._handle = self.model.register_forward_hook(self._passed, with_kwargs=True)

    def unhook(self) -> None:
        for owner, name in (
            (self.drafter, "propose"),
            (self.model, "combine_hidden_states"),
            (self.model, "compute_logits"),
        ):
            owner.__dict__.pop(name, None)
        self._handle.remove()

    def _passed(self, _module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._safely(lambda this: this.passed(kwargs, output))

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.error or self.bytes >= self.most_bytes:
            self.dropped += 1
            return
        self.now = Pass()
        self._safely(lambda this: this.begin(self.runner, self.drafter, args, kwargs))

    def _end(self, drafted: Any) -> None:
        this, self.now = self.now, None
        if this is None or self.error:
            return
        began = time.perf_counter()
        try:
            this.drafted(drafted)
            self.bytes += this.save(self.folder, self.number)
            self.number += 1
        except Exception as error:  # the engine goes on, whatever becomes of the probe
            self.error = f"{type(error).__name__}: {str(error)[:300]}"
        self.seconds += time.perf_counter() - began

    def _safely(self, what: Any) -> None:
        if self.now is None:
            return
        began = time.perf_counter()
        try:
            what(self.now)
        except Exception as error:  # as above
            self.error = f"{type(error).__name__}: {str(error)[:300]}"
            self.now = None
        self.seconds += time.perf_counter() - began


class Pass:
    """What one ``propose`` was given and gave."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.depths: list[dict[str, Any]] = []

    def begin(self, runner: Any, drafter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _named(drafter, args, kwargs)
        metadata = given["common_attn_metadata"]
        starts = metadata.query_start_loc.cpu().numpy().astype(np.int64)
        sample, rejected = given.get("token_indices_to_sample"), given.get("num_rejected_tokens_gpu")
        B = len(starts) - 1
        self.rows = {
            "requests": np.array([str(r) for r in runner.input_batch.req_ids[:B]]),
            "starts": starts,
            "sample": starts[1:] - 1 if sample is None else _ints(sample),
            "next_token": _ints(given["next_token_ids"])[:B],
            "rejected": np.full(B, _NONE) if rejected is None else _ints(rejected)[:B],
        }

    def fused(self, states: Any, fused: Any) -> None:
        self.rows |= _floats("taps", states) | _floats("fused", fused)

    def passed(self, kwargs: dict[str, Any], output: Any) -> None:
        """One pass of the drafter: the first has all rows, a later one a row a request."""
        post, pre = output if isinstance(output, tuple) else (output, output)
        n = int(self.rows["starts"][-1]) if not self.depths else len(self.rows["sample"])
        ids, positions = kwargs["input_ids"], kwargs["positions"]
        positions = positions[0] if positions.ndim == 2 else positions  # M-RoPE: text has one in all three
        ids, positions, fed = ids[:n], positions[:n], kwargs["hidden_states"][:n]
        post, pre = post[:n], pre[:n]
        if not self.depths:
            self.rows |= {"token_ids": _ints(ids), "positions": _ints(positions)}
            at = self.rows["sample"].tolist()
            ids, positions, fed, post, pre = ids[at], positions[at], fed[at], post[at], pre[at]
        self.depths.append(
            {
                "token_ids": _ints(ids),
                "positions": _ints(positions),
                "fed": _float(fed),
                "post": _float(post),
                "pre": _float(pre),
            }
        )

    def said(self, logits: Any) -> None:
        if logits is None or not self.depths:
            return
        values, ids = logits[: len(self.rows["sample"])].float().topk(TOP, dim=-1)
        self.depths[-1] |= {"top_ids": _ints(ids), "top_logits": values.detach().cpu().numpy()}

    def drafted(self, tokens: Any) -> None:
        self.rows["draft_ids"] = _ints(tokens)

    def save(self, folder: Path, number: int) -> int:
        """Writes the pass; bytes of the file.

        requests [B], starts [B+1], sample [B], next_token [B], rejected [B] (-1: not told), token_ids [T],
        positions [T], taps [T, C*D], fused [T, H], draft_ids [B, K]; of the sample rows by depth: depth_token_ids,
        depth_positions [K, B], depth_fed, depth_post (after the last norm), depth_pre (what is fed back) [K, B, H],
        top_ids, top_logits [K, B, N]. Tensors of bf16 are kept as uint16 bits, and ``bf16`` names them.
        """
        arrays = dict(self.rows)
        for name in ("token_ids", "positions", "fed", "post", "pre", "top_ids", "top_logits"):
            got = [depth[name] for depth in self.depths if name in depth]
            key = name if name.startswith("top") else f"depth_{name}"
            if got:
                arrays[key] = np.stack(got)
        path = folder / f"pass-{number:09d}.npz"
        part = path.with_suffix(".part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
            np.savez(handle, **arrays)
        os.replace(part, path)
        return path.stat().st_size


def _named(drafter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``propose`` by name, given by position or not."""
    signature = inspect.signature(type(drafter).propose)
    return dict(signature.bind(drafter, *args, **kwargs).arguments)


def _ints(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.detach().cpu().numpy().astype(np.int64)
    return found


def _float(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.detach().float().cpu().numpy().astype(np.float32)
    return found


def _floats(name: str, tensor: Any) -> dict[str, np.ndarray]:
    """Rows as narrow as the engine has them: bf16 as its bits under NAME_bf16."""
    if str(tensor.dtype) == "torch.bfloat16":
        bits = sys.modules["torch"].uint16  # vLLM's own torch
        return {f"{name}_bf16": tensor.detach().cpu().view(bits).numpy()}
    return {name: _float(tensor)}
