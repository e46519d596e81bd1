"""A setting in each engine's words, read back by what knows each engine's words."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from packaging.version import Version

from eyas.bench.flags import Spelled, spelled
from eyas.bench.settings import Setting
from eyas.dialects import sglang
from eyas.dialects.sglang import flags as sglang_flags
from eyas.dialects.sglang.releases import release
from eyas.dialects.vllm import flags as vllm_flags
from eyas.dialects.wiring import Launch
from eyas.engines.scrape.llamacpp import settings as llama_settings
from eyas.errors import UsageError


def by_engine(draft_tokens: int, top_k: int = 1, nodes: int | None = None) -> dict[str, Spelled]:
    return {each.engine: each for each in spelled(draft_tokens, top_k, nodes, "my drafter")}


@pytest.mark.parametrize("k", [1, 4])
def test_sglang_runs_with_what_is_written(k: int) -> None:
    flags = by_engine(k)["sglang"].flags
    assert flags is not None
    resolved = sglang_flags.resolve(shlex.split(flags), None, release(Version(sglang.VERSIONS[-1])))
    assert (resolved.refusals, resolved.warnings) == ([], [])
    values = [resolved.values[flag] for flag in (sglang_flags.STEPS, sglang_flags.TOPK, sglang_flags.TOKENS)]
    assert values == [k, 1, k + 1]
    assert resolved.values[sglang_flags.DRAFT] == "my drafter"
    changed = [note.flag for note in resolved.notes if note.requested != note.resolved]
    assert changed == ["--max-running-requests"]  # which says nothing of drafting


def test_a_tree_in_sglang_counts_its_root() -> None:
    flags = by_engine(4, 2, 8)["sglang"].flags
    assert flags is not None
    resolved = sglang_flags.resolve(shlex.split(flags), None, release(Version(sglang.VERSIONS[-1])))
    values = [resolved.values[flag] for flag in (sglang_flags.STEPS, sglang_flags.TOPK, sglang_flags.TOKENS)]
    assert (values, resolved.refusals, resolved.warnings) == ([4, 2, 9], [], [])


@pytest.mark.parametrize("k", [1, 4])
def test_vllm_takes_what_is_written(k: int) -> None:
    flags = by_engine(k)["vllm"].flags
    assert flags is not None
    read = vllm_flags.read(Launch(Version("0.32.0"), None, tuple(shlex.split(flags))), None)
    assert (read.method, read.refusals, read.warnings) == ("eagle3", (), ())
    config = json.loads(shlex.split(flags)[1])
    assert (config["num_speculative_tokens"], config["model"]) == (k, "my drafter")


def test_llama_cpp_logs_what_is_written() -> None:
    """Its server's line with its arguments is read by the log reader."""
    flags = by_engine(3)["llama.cpp"].flags
    assert flags is not None
    found = llama_settings(f"llama-server -m model.gguf {flags}")
    assert found is not None
    assert found.draft_tokens == 3


def test_tensorrt_llm_is_yaml() -> None:
    chain = yaml.safe_load(by_engine(3)["tensorrt-llm"].flags or "")["speculative_config"]
    assert chain == {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "my drafter"}
    tree = yaml.safe_load(by_engine(4, 2, 8)["tensorrt-llm"].flags or "")["speculative_config"]
    assert (tree["dynamic_tree_max_topK"], tree["max_total_draft_tokens"], tree["max_draft_len"]) == (2, 8, 4)


def test_what_drafts_chains_only_says_so() -> None:
    found = by_engine(4, 2, 8)
    for engine in ("vllm", "llama.cpp"):
        assert found[engine].flags is None
        assert "chains" in found[engine].why


def test_no_speculation_is_no_flags() -> None:
    assert all((each.flags, bool(each.why)) == ("", True) for each in by_engine(0).values())


def test_a_tree_has_at_least_its_depth_in_nodes() -> None:
    with pytest.raises(UsageError, match="not 4 deep"):
        Setting(4, 2, 3)
