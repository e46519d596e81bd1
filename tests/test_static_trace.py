"""A static round traces whole and reads nothing: no step of it waits for the host, as far as a CPU can tell."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
from eyas import starts
from eyas.decode import static
from eyas.decode.static import StaticPasses
from eyas.decode.static_round import GreedyRounds, StaticChain
from eyas.drafter import Drafter
from eyas.target import Target
from stacks import same

KINDS = [kind for kind in tiny.KINDS if kind != "deepseek"]


def short(kind: str) -> tuple[Target, Drafter]:
    """Two layers and three, so that tracing takes seconds."""
    config = copy.deepcopy(tiny._config(kind))
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    target = Target(f"short-{kind}", None, model, None, config)
    return target, starts.random(target, starts.config_for(target, (0, 2), tiny.DRAFT_VOCAB), tiny.vocab(), 0)


@pytest.fixture
def traced() -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs that were traced, in order."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def tracing(graphs: list[torch.fx.GraphModule]) -> Callable[[static.Step], static.Step]:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_traces_whole_once(kind: str, traced: list[torch.fx.GraphModule]) -> None:
    target, _ = short(kind)
    ids = tiny.prompt(20)
    whole, eager = (StaticPasses(target, (0, 2), capacity=40, prepare=p) for p in (tracing(traced), static.as_it_is))
    for part in (slice(0, 3), slice(3, 7), slice(7, 11)):
        same(whole.forward(ids[part]), eager.forward(ids[part]))
    same(whole.forward(ids[:3], [-1, 0, 0]), eager.forward(ids[:3], [-1, 0, 0]))
    assert len(traced) == 1, "one graph for a number of rows, whatever is held and whoever follows whom"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_round_traces_whole_once(kind: str, traced: list[torch.fx.GraphModule]) -> None:
    target, drafter = short(kind)
    rounds = GreedyRounds(target, drafter, draft_tokens=3, capacity=60)
    expected = rounds.generate(tiny.prompt(9), 16)
    rounds.step = tracing(traced)(rounds._whole)
    found = rounds.generate(tiny.prompt(9), 16)
    assert (found.token_ids, found.accepted) == (expected.token_ids, expected.accepted)
    assert found.rounds > 3
    assert len(traced) == 1
    assert not asking(traced[0])


def asking(graph: torch.fx.GraphModule) -> list[str]:
    """What in a graph waits for the host or is made there. That it traced whole proves little: with ``fullgraph``
    torch 2.13 takes ``item()`` and masked indexing into the graph."""
    words = {"item", "tolist", "numpy", "cpu", "cuda", "nonzero", "tensor", "as_tensor", "from_numpy", "_assert_scalar"}
    named = [(node, getattr(node.target, "__name__", str(node.target))) for node in graph.graph.nodes]
    calls = [(node, name) for node, name in named if node.op.startswith("call")]
    return [f"{node}: {name}" for node, name in calls if name in words or "sym_" in name]


def asks_the_host(chain: StaticChain, K: int) -> Tensor:
    return torch.tensor([int(token) for token in StaticChain.draft(chain, K)])


def takes_what_is_marked(chain: StaticChain, K: int) -> Tensor:
    tokens = StaticChain.draft(chain, K)
    return tokens[tokens >= 0]


@pytest.mark.parametrize("planted", [asks_the_host, takes_what_is_marked])
def test_a_round_that_asks_the_host_is_found_out(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its graph, if it has one, and on ``meta``."""
    target, drafter = short("llama")
    graphs: list[torch.fx.GraphModule] = []
    rounds = GreedyRounds(target, drafter, draft_tokens=1, capacity=60)
    monkeypatch.setattr(rounds.chain, "draft", partial(planted, rounds.chain))
    torch._dynamo.reset()
    with torch.no_grad():
        try:
            tracing(graphs)(rounds._whole)()
        except torch._dynamo.exc.Unsupported:
            graphs.clear()
        assert not graphs or asking(graphs[0])
        bare = without_values(target, drafter, 1)
        monkeypatch.setattr(bare.chain, "draft", partial(planted, bare.chain))
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            bare._whole()


def without_values(target: Target, drafter: Drafter, K: int) -> GreedyRounds:
    """Rounds on ``meta``, where tensors have shapes and no values: what reads one raises."""
    bare = replace(target, model=copy.deepcopy(target.model).to("meta"))
    return GreedyRounds(bare, copy.deepcopy(drafter).to("meta"), draft_tokens=K, capacity=60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_reads_no_value_and_touches_one_device(kind: str) -> None:
    rounds = without_values(tiny.target(kind), tiny.drafter(kind, **tiny.SHAPES["everything"]), 3)
    with torch.no_grad():
        rounds._whole()
        with pytest.raises(NotImplementedError, match="meta"):
            _ = rounds.told.cpu()


def test_a_round_reads_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ``generate`` reads: the first token, and each round's outcome."""
    rounds = GreedyRounds(tiny.target(), tiny.drafter(), draft_tokens=3, capacity=60)
    reads: list[str] = []
    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "cpu", "numpy"):
        usual = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, usual: Any = usual, name: str = name, **kwargs: Any) -> Any:
            reads.append(name)
            return usual(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    done = rounds.generate(tiny.prompt(9), 12)
    assert reads == ["__int__", *["tolist"] * done.rounds]


def test_the_gpu_script_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    spec = importlib.util.spec_from_file_location("gpu_decode", Path(__file__).parents[1] / "runs" / "gpu_decode.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look themselves up
    spec.loader.exec_module(script)
    assert script.main([]) == 2
    assert capsys.readouterr().err == "No CUDA device here: run this on a GPU, or pass --device cpu for the dry run.\n"
