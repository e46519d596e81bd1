"""Runs in SGLang's process, not in ours: what an EAGLE-3 drafter is fed there and what it drafts, written per round.

A plugin of SGLang (entry point in the group ``sglang.srt.plugins``), laid out by ``eyas.engines.sglang.probing``. Its
``--forward-hooks`` see outputs of modules alone; tokens, positions, logits and drafts are reached only by wrapping
functions. Without the file that ``EYAS_SGLANG_PROBE`` names, ``install`` does nothing.

One file is one round, rows as the drafter saw them. Letters: B requests, T rows, C taps, D target width, H drafter
width, K depths, W = K + 1 tokens verified in a round.

    the target's pass over rows 0..L-1 | extend: token of row p+1 beside the state of row p -> draft 0
    the next round                     | K-1 passes of one row: draft 0 at position L, ... -> drafts 1..K-1
    after verification                 | extend over all W rows, those behind the last accepted one included

The extend and the passes after it are two calls; what the first showed is held until the second. No engine code is
called but what was wrapped, and nothing raised here reaches the engine.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import sglang_rounds as rounds  # type: ignore[import-not-found]

VARIABLE = "EYAS_SGLANG_PROBE"
_WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
HOOKS = {
    f"{_WORKER}._draft_extend_for_prefill": "prefill",
    f"{_WORKER}._draft_extend_for_decode": "decode",
    f"{_WORKER}.draft_forward": "draft",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": "forward",
}
# File under sglang/srt, class: what is read of it. runs/sglang_probe.py looks each up in a wheel.
READS: dict[tuple[str, str], tuple[str, ...]] = {
    ("speculative/eagle_worker_v2.py", "EagleDraftWorker"): (
        "topk", "speculative_num_steps", "speculative_num_draft_tokens", "hot_token_id",
    ),
    ("model_executor/model_runner.py", "ModelRunner"): ("is_draft_worker", "model"),
    ("model_executor/model_runner.py", "ModelRunnerOutput"): ("logits_output",),
    ("layers/logits_processor.py", "LogitsProcessorOutput"): ("next_token_logits",),
    ("model_executor/forward_batch_info.py", "ForwardBatch"): (
        "input_ids", "positions", "spec_info", "rids", "forward_mode",
    ),
    ("model_executor/forward_batch_info.py", "ForwardMode"): ("is_idle",),
    ("speculative/eagle_info.py", "EagleDraftInput"): ("hidden_states",),
    ("speculative/eagle_info.py", "EagleDraftExtendInput"): ("hidden_states",),
    ("managers/schedule_batch.py", "ScheduleBatch"): ("extend_lens", "forward_mode"),
    ("managers/utils.py", "GenerationBatchResult"): ("accept_lens",),
    ("models/llama_eagle3.py", "LlamaModel"): ("layers", "norm"),
    ("models/llama_eagle3.py", "LlamaForCausalLMEagle3"): ("model",),
    ("models/kimi_k25_eagle3.py", "Eagle3MLAModel"): ("midlayer", "norm"),
    ("models/kimi_k25_eagle3.py", "Eagle3DeepseekV2ForCausalLM"): ("model",),
}  # fmt: skip
# Functions by parameter, where one is found by its name or its place.
PARAMETERS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("speculative/eagle_worker_v2.py", "EagleDraftWorker", "_draft_extend_for_prefill"): ("self", "batch"),
    ("speculative/eagle_worker_v2.py", "EagleDraftWorker", "_draft_extend_for_decode"): (
        "self", "batch", "batch_result",
    ),
    ("speculative/eagle_worker_v2.py", "EagleDraftWorker", "draft_forward"): ("self", "forward_batch"),
    ("model_executor/model_runner.py", "ModelRunner", "forward"): ("self", "forward_batch"),
    ("models/llama_eagle3.py", "LlamaDecoderLayer", "forward"): ("hidden_states",),
    ("models/kimi_k25_eagle3.py", "Eagle3MLADecoderLayer", "forward"): ("hidden_states",),
}  # fmt: skip


def install() -> None:
    """The entry point. SGLang calls it in each of its processes; only the one that drafts ever writes."""
    settings = os.environ.get(VARIABLE)
    if not settings or not Path(settings).is_file():
        return
    asked = json.loads(Path(settings).read_text(encoding="utf-8"))
    probe = Probe(rounds.Folder(Path(asked["folder"]), int(asked["limit_bytes"])))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    for target, name in HOOKS.items():
        HookRegistry.register(target, getattr(probe, name), HookType.AROUND)
    probe.say("loaded.json", {"hooks": sorted(HOOKS)})


@dataclass
class Stage:
    """A wrapped call under way. ``sample``: the row of each request from which drafting goes on, None for all rows."""

    worker: Any
    prompt: bool = False
    lengths: list[int] = field(default_factory=list)
    sample: list[int] | None = None
    rejected: list[int] = field(default_factory=list)
    batch: Any = None
    passes: list[Any] = field(default_factory=list)


class Probe:
    """``forward`` and the three around it are what SGLang calls, each with the function it wraps in front."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.left_out: dict[str, int] = {}
        self.stopped: str | None = None
        self._held: dict[str, Any] = {}
        self._stage: Stage | None = None
        self._seen: dict[str, np.ndarray] | None = None
        self._watched: set[int] = set()
        self._quietly(folder.check)

    # -- what SGLang calls ------------------------------------------------------------------------------------------

    def prefill(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._quietly(_prefill_stage, args, kwargs)
        return self._around(stage, self._extended, original, args, kwargs)

    def decode(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._quietly(_decode_stage, args, kwargs)
        return self._around(stage, self._extended, original, args, kwargs)

    def draft(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._quietly(_draft_stage, args, kwargs)
        return self._around(stage, self._drafted, original, args, kwargs)

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self._stage
        kept = self._quietly(self._before, args, kwargs) if stage is not None else None
        out = original(*args, **kwargs)
        self._seen = None
        if kept is not None and stage is not None:
            self._quietly(self._after, stage, kept, out)
        return out

    def _around(
        self, stage: Stage | None, then: Callable[[Stage, Any], None], original: Callable[..., Any], args: Any, kw: Any
    ) -> Any:
        self._stage = stage
        try:
            out = original(*args, **kw)
        finally:
            self._stage = self._seen = None
        if stage is not None:
            self._quietly(then, stage, out)
        return out

    def _quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function``, or None; whatever goes wrong ends the recording and never the engine."""
        if self.stopped is not None or _capturing():
            return None
        try:
            return function(*args)
        except rounds.NotOurs as elsewhere:
            self.stopped = str(elsewhere)
            self._held.clear()
        except rounds.Done as done:
            self._stop(str(done))
        except OSError as error:
            self._stop(error.strerror or str(error))
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        return None

    def say(self, name: str, value: object) -> None:
        self._quietly(self.folder.say, name, value)

    def _stop(self, why: str) -> None:
        """No more is recorded. ``stopped.json`` says why, where the disk still takes it."""
        self.stopped = why
        self._held.clear()
        try:
            self.folder.say("stopped.json", {"why": why, "passes": self.folder.passes, "bytes": self.folder.written})
        except OSError:
            print(f"eyas: recording stopped: {why}", file=sys.stderr)

    def _leave_out(self, what: str) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + 1
        if self.left_out[what].bit_count() == 1:  # said at the first, second, fourth, …
            self.folder.say("left-out.json", self.left_out)

    # -- one pass of the drafter ------------------------------------------------------------------------------------

    def _before(self, args: Any, kwargs: Any) -> Any:
        runner, batch = args[0], _argument(args, kwargs, 1, "forward_batch")
        if not runner.is_draft_worker or batch.rids is None:
            return None
        self._watch(runner.model)
        fed, dtype = rounds.stored(batch.spec_info.hidden_states)
        kept = rounds.Pass(list(batch.rids), rounds.whole(batch.input_ids), rounds.whole(batch.positions), fed, dtype)
        self._seen = kept.seen
        return kept

    def _after(self, stage: Stage, kept: Any, out: Any) -> None:
        logits = out.logits_output.next_token_logits
        if stage.sample is not None and len(logits) != len(stage.sample):  # after verification every row has logits
            logits = logits[stage.sample]
        values, ids = logits.detach().float().topk(min(rounds.TOP, logits.shape[-1]))
        hot = stage.worker.hot_token_id
        ids = ids if hot is None else hot[ids]
        kept.seen["top_ids"] = rounds.padded(rounds.whole(ids), -1)
        kept.seen["top_logits"] = rounds.padded(rounds.floats(values), np.nan)
        for name in ("post", "pre"):
            if stage.sample is not None and name in kept.seen:
                kept.seen[name] = kept.seen[name][stage.sample]
        stage.passes.append(kept)

    def _watch(self, model: Any) -> None:
        """Once a model: the state that enters its first layer, and what its last norm takes and gives."""
        if id(model) in self._watched:
            return
        self._watched.add(id(model))
        inner = model.model
        layer = getattr(inner, "midlayer", None)
        layer = inner.layers[0] if layer is None else layer
        place = list(inspect.signature(layer.forward).parameters).index("hidden_states")

        def entering(_module: Any, args: Any, kwargs: Any) -> None:
            self._quietly(self._see, "fused", kwargs["hidden_states"] if "hidden_states" in kwargs else args[place])

        def leaving(_module: Any, _args: Any, out: Any) -> None:
            if isinstance(out, tuple) and len(out) == 2:  # (normed, residual stream)
                self._quietly(self._see, "post", out[0])
                self._quietly(self._see, "pre", out[1])

        layer.register_forward_pre_hook(entering, with_kwargs=True)
        inner.norm.register_forward_hook(leaving)

    def _see(self, name: str, value: Any) -> None:
        if self._seen is not None:  # copied at once: the layers write into these very tensors
            self._seen[name] = rounds.floats(value)

    # -- an extend is held, a draft is written ----------------------------------------------------------------------

    def _extended(self, stage: Stage, _out: Any) -> None:
        one = stage.passes[0] if len(stage.passes) == 1 else None
        rows, requests = sum(stage.lengths), len(stage.lengths)
        if (
            one is None
            or stage.sample is None
            or (len(one.requests), len(one.ids), len(one.fed)) != (requests, rows, rows)
        ):
            self._leave_out("an extend whose rows could not be told apart")
            return
        for request, new in rounds.split(one, stage.lengths, stage.sample, stage.rejected, stage.prompt).items():
            old = self._held.pop(request, None)
            self._held[request] = old.with_rows_of(new) if old is not None and old.goes_on_in(new) else new
        while sum(held.size for held in self._held.values()) > self.folder.limit // 4:
            self._held.pop(next(iter(self._held)))  # the oldest: most likely a request that has ended
            self._leave_out("a request whose rows were let go to stay within the limit")

    def _drafted(self, stage: Stage, out: Any) -> None:
        depths, requests = stage.worker.speculative_num_steps, list(stage.batch.rids)
        if stage.worker.topk != 1:
            self._leave_out("a tree of drafts")
            return
        drafts = rounds.whole(out[2])
        alike = all(one.requests == requests and len(one.ids) == len(requests) for one in stage.passes)
        if drafts.shape != (len(requests), depths) or len(stage.passes) != depths - 1 or not alike:
            self._leave_out("a draft whose rows could not be told apart")
            return
        chosen = [at for at, request in enumerate(requests) if request in self._held]
        if len(chosen) < len(requests):
            self._leave_out("a request whose extend was not seen")
        if chosen:
            held = [self._held.pop(requests[at]) for at in chosen]
            self.folder.write(rounds.gathered([requests[at] for at in chosen], held, stage.passes, drafts, chosen))


# -- calls -----------------------------------------------------------------------------------------------------------


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs[name]


def _prefill_stage(args: Any, kwargs: Any) -> Stage | None:
    batch = _argument(args, kwargs, 1, "batch")
    if batch.forward_mode.is_idle():
        return None
    lengths = [int(length) for length in batch.extend_lens]
    return Stage(args[0], True, lengths, [int(end) - 1 for end in np.cumsum(lengths)], [0] * len(lengths))


def _decode_stage(args: Any, kwargs: Any) -> Stage | None:
    """``accept_lens`` has the bonus token in it: the last accepted row of W is the one before that many."""
    batch, result = _argument(args, kwargs, 1, "batch"), _argument(args, kwargs, 2, "batch_result")
    if batch.forward_mode.is_idle():
        return None
    kept, width = result.accept_lens.tolist(), args[0].speculative_num_draft_tokens
    sample = [at * width + accepted - 1 for at, accepted in enumerate(kept)]
    return Stage(args[0], False, [width] * len(kept), sample, [width - accepted for accepted in kept])


def _draft_stage(args: Any, kwargs: Any) -> Stage | None:
    batch = _argument(args, kwargs, 1, "forward_batch")
    return None if batch.rids is None or batch.forward_mode.is_idle() else Stage(args[0], batch=batch)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, when nothing may be read."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())
