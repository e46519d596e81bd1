"""An SGLang in small, for the probe: its draft worker, its model runner and a drafter, on CPU tensors.

``Worker``'s three methods do what the engine's do to a chain; with a wheel, the engine's own take their place
(``of_wheel``). The drafter writes into the tensors it is given, as the engine's fused norms do.
Letters: B requests, T rows, C taps, D target width, H drafter width, K depths, W = K + 1.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

D, C, H, VOCAB, DRAFTED, K = 6, 3, 8, 40, 24, 3
W = K + 1
PROBED = "sglang.srt.speculative.eagle_worker_v2"


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "idle"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * H, H)

    def forward(
        self, positions: Any, embeds: Any, hidden_states: Any, forward_batch: Any, residual: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.mix(torch.cat([embeds, hidden_states], -1)) + torch.sin(positions[:, None] * torch.arange(1, H + 1))
        return out, hidden_states.add_(out)  # in place


class Norm(nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(hidden)
        return hidden.copy_(residual / residual.pow(2).mean(-1, keepdim=True).sqrt()), residual


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.fc = nn.Embedding(VOCAB, H), nn.Linear(C * D, H)
        self.layers, self.norm = nn.ModuleList([Layer()]), Norm()

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        states = forward_batch.spec_info.hidden_states.float()
        states = self.fc(states) if states.shape[-1] != H else states
        self.entering = states.clone()
        hidden, residual = self.layers[0](positions, self.embed_tokens(input_ids), states, forward_batch, None)
        post, pre = self.norm(hidden, residual)
        return post, [pre]


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Inner(), nn.Linear(H, DRAFTED)


class ModelRunner:
    """``log`` is what happened, kept apart from the probe."""

    def __init__(self, is_draft_worker: bool = True) -> None:
        torch.manual_seed(3)
        self.is_draft_worker, self.model = is_draft_worker, Drafter()
        self.model_config = SimpleNamespace(
            model_is_mrope=False, hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle3"])
        )
        self.canary_manager = None
        self.log: list[dict[str, Any]] = []

    @torch.no_grad()
    def forward(self, forward_batch: Any, skip_attn_backend_init: Any = None, **_: Any) -> Any:
        fed = forward_batch.spec_info.hidden_states
        one = {"ids": forward_batch.input_ids, "positions": forward_batch.positions, "fed": fed}
        one = {name: value.clone() for name, value in one.items()}
        post, [pre] = self.model.model(forward_batch.input_ids, forward_batch.positions, forward_batch)
        one |= {"fused": self.model.model.entering, "post": post.clone(), "pre": pre.clone()}
        one["logits"] = self.model.head(one["post"])
        self.log.append(one)
        rows = forward_batch.last
        out = SimpleNamespace(next_token_logits=one["logits"][rows].clone(), hidden_states=pre[rows].clone())
        return SimpleNamespace(logits_output=out)


@dataclass
class Batch:
    """Stands for ScheduleBatch; ``forward_batch`` makes a ForwardBatch of it."""

    reqs: list[Any]
    input_ids: Any
    seq_lens: Any
    extend_lens: list[int]
    forward_mode: Mode = field(default_factory=lambda: Mode("extend"))
    spec_info: Any = None
    chunked_req: Any = None
    chunked_req_next_prompt_token: int | None = None
    sampling_info: Any = None


def forward_batch(rids: list[str], ids: Any, positions: Any, states: Any, last: Any, mode: str) -> Any:
    return SimpleNamespace(
        rids=list(rids), input_ids=ids, positions=positions.clone(), spec_info=SimpleNamespace(hidden_states=states),
        last=last, forward_mode=Mode(mode), batch_size=len(rids), out_cache_loc=torch.zeros(len(rids) * K),
        sampling_info=SimpleNamespace(is_all_greedy=True), return_logprob=False,
    )  # fmt: skip


class EagleDraftWorker:
    def __init__(self, hot: bool = True) -> None:
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = 1, K, W
        self.hot_token_id = torch.arange(DRAFTED) + 11 if hot else None
        self.draft_runner = ModelRunner()
        self._rest()

    def _rest(self) -> None:
        """What only the engine's own methods look at."""
        self.device, self.plan_stream, self.plan_stream_ctx = "cpu", None, contextlib.nullcontext()
        self.index_share_for_mtp_iteration = self.seed_dsa_topk_from_draft_extend = False
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        self.speculative_algorithm = SimpleNamespace(is_standalone=lambda: False)
        self.server_args = SimpleNamespace(speculative_use_rejection_sampling=False)
        self.draft_attn_backend = SimpleNamespace(attn_backends=[None] * K)
        self._topk1_parents_prealloc = self._topk1_score_indices_prealloc = torch.zeros(64, K, dtype=torch.int64)

    def _draft_extend_for_prefill(
        self,
        batch: Any,
        target_hidden_states: Any,
        next_token_ids: Any,
        mm_input_embeds: Any = None,
        kv_loc_plan: Any = None,
    ) -> Any:
        parts, rows = batch.input_ids.split(batch.extend_lens), []
        tails = next_token_ids.clone()
        for at, req in enumerate(batch.reqs):
            if req is batch.chunked_req and batch.chunked_req_next_prompt_token is not None:
                tails[at] = batch.chunked_req_next_prompt_token
        for part, tail in zip(parts, tails, strict=True):
            rows += [part[1:], tail[None]]
        batch.input_ids = torch.cat(rows)
        batch.spec_info = SimpleNamespace(hidden_states=target_hidden_states)
        out = self.draft_runner.forward(prefill_batch(batch)).logits_output
        return SimpleNamespace(
            topk_p=None,
            topk_index=out.next_token_logits.argmax(-1, keepdim=True),
            hidden_states=out.hidden_states,
            bonus_tokens=next_token_ids,
        )

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, *, kv_loc_plan: Any = None) -> None:
        wide = SimpleNamespace(hidden_states=batch_result.logits_output.hidden_states)
        made = decode_batch(wide, batch, batch_result.next_token_ids)
        out = self.draft_runner.forward(made).logits_output
        chosen = torch.arange(len(batch.reqs)) * W + batch_result.accept_lens - 1
        following = batch_result.next_draft_input
        following.topk_index = out.next_token_logits[chosen].argmax(-1, keepdim=True)
        following.topk_p, following.hidden_states = torch.ones(len(batch.reqs), 1), out.hidden_states[chosen]

    def draft_forward(self, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_idle():
            return None, None, None, None
        spec = forward_batch.spec_info
        index, states = spec.topk_index, spec.hidden_states
        drafts = []
        for depth in range(K):
            index = index if self.hot_token_id is None else self.hot_token_id[index]
            drafts.append(index)
            if depth == K - 1:
                break
            forward_batch.input_ids, spec.hidden_states = index.flatten(), states
            out = self.draft_runner.forward(forward_batch).logits_output
            index, states = out.next_token_logits.argmax(-1, keepdim=True), out.hidden_states
            forward_batch.positions.add_(1)  # in place
        return None, None, torch.cat(drafts, 1), None


def prefill_batch(batch: Any, *_: Any, **__: Any) -> Any:
    """Positions of a prompt's part: up to the length that stands in ``seq_lens``."""
    spans = [
        torch.arange(int(end) - length, int(end)) for end, length in zip(batch.seq_lens, batch.extend_lens, strict=True)
    ]
    last = torch.tensor(batch.extend_lens).cumsum(0) - 1
    rids = [req.rid for req in batch.reqs]
    return forward_batch(rids, batch.input_ids, torch.cat(spans), batch.spec_info.hidden_states, last, "extend")


def decode_batch(extend: Any, batch: Any, predicted: Any, *_: Any, **__: Any) -> Any:
    positions = torch.cat([torch.arange(int(start), int(start) + W) for start in batch.seq_lens])
    rids = [req.rid for req in batch.reqs]
    return forward_batch(rids, predicted, positions, extend.hidden_states, slice(None), "draft_extend")


class Registry:
    """As the engine's own, for one AROUND hook a target."""

    hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any = None, *, source: Any = None) -> None:
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks.items():
            module, of, name = target.rsplit(".", 2)
            owner = getattr(sys.modules[module], of)
            original = getattr(owner, name)
            setattr(owner, name, lambda *a, _h=hook, _o=original, **kw: _h(_o, *a, **kw))
        cls.hooks.clear()


def modules(source: Any = None) -> tuple[dict[str, types.ModuleType], type, Any]:
    """Modules by name to stand in ``sys.modules``, a fresh class of worker, and the registry. With a wheel's
    ``source``, its registry and its three methods."""
    worker = type("EagleDraftWorker", (EagleDraftWorker,), {})
    runner = type("ModelRunner", (ModelRunner,), {})
    worker.__init__ = lambda self, hot=True: _made(self, runner, hot)  # type: ignore[misc]
    names = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.speculative", "sglang.srt.model_executor")
    found = {name: types.ModuleType(name) for name in names}
    for name in names:
        found[name].__path__ = []
    hooks = types.ModuleType("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry, hooks.HookType = Registry, SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    if source is not None:
        exec(compile(source.text("plugins/hook_registry.py"), hooks.__name__, "exec"), vars(hooks))
        of_wheel(source, worker)
    places = types.ModuleType(PROBED), types.ModuleType("sglang.srt.model_executor.model_runner")
    places[0].EagleDraftWorker, places[1].ModelRunner = worker, runner  # type: ignore[attr-defined]
    found |= {module.__name__: module for module in (hooks, *places)}
    for name, module in found.items():
        if parent := found.get(name.rpartition(".")[0]):
            setattr(parent, name.rpartition(".")[2], module)
    return found, worker, vars(hooks)["HookRegistry"]


def _made(worker: Any, runner: type, hot: bool) -> None:
    EagleDraftWorker.__init__(worker, hot)
    worker.draft_runner = runner()


METHODS = ("_draft_extend_for_prefill", "_draft_extend_for_decode", "draft_forward")


def of_wheel(source: Any, worker: type) -> None:
    """The engine's own three methods, and the helpers that pick tokens, with what surrounds them made small."""
    within: dict[str, Any] = _surroundings()
    for file, wanted in (
        ("speculative/eagle_utils.py", ("_eagle_prefill_tail_tokens", "per_step_draft_out_cache_loc")),
        (
            "speculative/spec_utils.py",
            ("_select_top_k_tokens_first", "_select_top_k_tokens_later", "select_top_k_tokens"),
        ),
    ):
        for node in source.tree(file).body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                _run(node, within)
    for node in source.classes("speculative/eagle_worker_v2.py")["EagleDraftWorker"].body:
        if isinstance(node, ast.FunctionDef) and node.name in (*METHODS, "_draft_forward_idle"):
            _run(node, within)
            setattr(worker, node.name, within[node.name])


def _run(node: ast.FunctionDef, within: dict[str, Any]) -> None:
    node.decorator_list = []
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([node], []), "<sglang>", "exec", flags=flags, dont_inherit=True), within)


def _surroundings() -> dict[str, Any]:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    def around(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    made = SimpleNamespace(init_new=prefill_batch)
    return {
        "torch": torch, "contextlib": contextlib, "ForwardBatch": made, "ForwardContext": SimpleNamespace,
        "forward_context": around, "context_tuple": around, "prepare_for_draft_extend": decode_batch,
        "IndexTopKShareState": SimpleNamespace(mtp_iteration=around),
        "CaptureHiddenMode": SimpleNamespace(NULL=0, LAST=1, FULL=2),
        "EagleDraftInput": SimpleNamespace, "EagleDraftExtendInput": SimpleNamespace,
        "get_spec": lambda: SimpleNamespace(speculative_use_rejection_sampling=False),
        "renorm_draft_probs": lambda logits, *_: logits.softmax(-1), "fast_topk": torch.topk,
        "organize_draft_results": nothing, "sample_draft_proposal": nothing, "fast_sample": nothing,
        "maybe_detect_nan": nothing, "maybe_detect_inf": nothing, "maybe_detect_oob": nothing,
        "_is_cuda": False, "_is_hip": False,
    }  # fmt: skip
