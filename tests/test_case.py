"""The case, re-enacted: a drafter trained on the embedding and two layers, served with three other layers.

tests/fixtures/drafters/tiny-deepseek-taps-0-3-7 (its README and runs/case.py say how it was made) holds what the team
had: a target of DeepSeek-V3 layout, a drafter without a contract, records, and four stored tensors of one of them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor

import folders
from eyas import checkpoint, curve, records, resolve, taps
from eyas import target as targets
from eyas.check import check
from eyas.contract import declared
from eyas.dialects import host, sglang, vllm
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts
from eyas.drafter import Drafter
from eyas.records import KEYS, Record
from eyas.results import CheckResult
from eyas.states.embedded import with_embedding
from eyas.states.stock import Tap
from eyas.target import Target

ROOT = Path(__file__).resolve().parents[1]
CASE = ROOT / "tests" / "fixtures" / "drafters" / "tiny-deepseek-taps-0-3-7"
DRAFTER, TARGET, SAMPLE = CASE / "drafter", CASE / "target", CASE / "states" / "sample_0.pt"
MEASURED = json.loads((CASE / "measured.json").read_text(encoding="utf-8"))
IDS = "eagle_aux_hidden_state_layer_ids"
TRAINED, SERVED, STORED = (0, 3, 7), (3, 7, 10), (0, 3, 7, 10)
THEN, PATCHED, NEWEST = "0.5.12.post1", "0.5.12.post1+minus-one", "0.5.23"
Capture = pytest.CaptureFixture[str]


@cache
def target() -> Target:
    return targets.load(str(TARGET))


@cache
def held_out() -> tuple[Record, ...]:
    return tuple(records.read(CASE / "heldout.jsonl", vocab_size=target().vocab_size))


def drafter(fed: Sequence[int] = TRAINED) -> Drafter:
    found = checkpoint.load(checkpoint.read(DRAFTER), target())
    found.config = found.config.model_copy(update={"taps": tuple(fed)})
    return found


def feeding(wanted: Sequence[int]) -> taps.Run:
    """The target's states, these taps in this order, whatever the drafter asks for."""

    def run(of: Target, input_ids: Tensor, lengths: Tensor, _asked: Sequence[int]) -> taps.States:
        found = taps.run(of, input_ids, lengths, sorted(wanted))
        parts = dict(zip(sorted(wanted), found.taps.split(of.hidden_size, dim=-1), strict=True))
        return taps.States(torch.cat([parts[t] for t in wanted], dim=-1), found.last)

    return run


@cache
def accept_length(wanted: tuple[int, ...]) -> float:
    measured = curve.measure(drafter(), target(), held_out(), depths=4, run=feeding(wanted))
    value = measured.lengths[3].value
    assert value is not None
    return value


# -- what was built --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MEASURED if name != "as trained"])
def test_another_wiring_costs_a_tenth_of_accept_length(name: str) -> None:
    """Each pair of taps swapped, and the taps it was served with."""
    right, wrong = (accept_length(tuple(MEASURED[which]["taps"])) for which in ("as trained", name))
    assert wrong <= 0.9 * right


@pytest.mark.parametrize("name", MEASURED)
def test_accept_lengths_are_those_of_the_readme(name: str) -> None:
    value = MEASURED[name]["accept_length"][0]
    assert accept_length(tuple(MEASURED[name]["taps"])) == pytest.approx(value, abs=0.01)
    (row,) = [line for line in (CASE / "README.md").read_text().splitlines() if line.startswith(f"| {name} |")]
    assert f"| {value:.2f} " in row


def test_the_records_have_the_six_keys_and_are_the_targets_own_text() -> None:
    rows = [json.loads(line) for line in (CASE / "train.jsonl").read_text().splitlines()]
    assert all(tuple(row) == KEYS for row in rows)
    agreed, slots = curve.measure(drafter(), target(), held_out(), depths=1).agreement
    assert slots > 3000
    assert agreed / slots > 0.995


def test_four_tensors_are_stored_and_none_of_them_is_the_targets_end() -> None:
    stored = torch.load(SAMPLE, weights_only=True)
    (sample, *_) = records.read(CASE / "train.jsonl", vocab_size=target().vocab_size)
    ids = torch.from_numpy(sample.input_ids).long()[None]
    every = taps.run(target(), ids, torch.tensor([sample.seq_len]), range(target().num_layers + 1)).taps[0]
    by_tap = every.split(target().hidden_size, dim=-1)
    assert [tuple(tensor.shape) for tensor in stored] == [(sample.seq_len, 64)] * 4
    for tensor, tap in zip(stored, STORED, strict=True):
        distances = [float((tensor.float() - there).norm() / there.norm()) for there in by_tap]
        assert min(range(len(distances)), key=distances.__getitem__) == tap
        assert distances[tap] < 0.01  # bf16
    assert torch.equal(stored[0], target().embedding.bfloat16()[ids[0]])
    assert target().num_layers not in STORED


def test_the_checkpoint_is_as_the_team_had_it() -> None:
    config = json.loads((DRAFTER / "config.json").read_text())
    assert "eyas" not in config
    assert IDS not in config
    assert config["eagle_config"] == {IDS: [2, 6, 9], "use_aux_hidden_state": True}
    tensors = load_file(DRAFTER / "model.safetensors")
    words, width = config["draft_vocab_size"], config["hidden_size"]
    assert {name.split(".")[0] for name in tensors} == {
        "fc", "midlayer", "norm", "lm_head", "embed_tokens", "d2t", "t2d",
    }  # fmt: skip
    assert tensors["fc.weight"].shape == (width, 3 * width)
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    offsets = torch.arange(words) + tensors["d2t"]
    assert torch.equal(offsets, tensors["t2d"].nonzero()[:, 0])
    assert len(set(tensors["d2t"].tolist())) < words, "read as ids, many draft tokens are one"
    assert torch.equal(tensors["embed_tokens.weight"], target().embedding.bfloat16())


def test_the_recipe_is_of_this_target() -> None:
    spec = importlib.util.spec_from_file_location("runs_case", ROOT / "runs" / "case.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    tokenizer, text = recipe.tokenizer_and_text()
    committed = target().tokenizer
    assert committed is not None
    assert tokenizer.get_vocab() == committed.get_vocab()
    assert committed.decode(text[:40]) == tokenizer.decode(text[:40])
    ours, theirs = recipe.shape().to_dict(), target().config.to_dict()
    unlike = {key for key in ours if ours[key] != theirs[key]}
    assert unlike <= {"architectures", "dtype", "_name_or_path", "transformers_version"}
    assert recipe.TRAINED == TRAINED
    assert json.loads((DRAFTER / "config.json").read_text())["eagle_config"][IDS] == recipe.SERVED_IDS


def test_it_is_small() -> None:
    sizes = {path: path.stat().st_size for path in CASE.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 6_000_000
    assert sizes[TARGET / "model.safetensors"] < 3_000_000


# -- what the ids mean, and how the taps it was trained on are spelled ------------------------------------------

KIMI = TargetFacts("KimiK25ForConditionalGeneration", 61, 7168, 163840)
TINY = host.read(TARGET / "config.json")
LAYERS = [
    pytest.param(TINY, (2, 6, 9), TRAINED, SERVED, id="12 layers"),
    pytest.param(KIMI, (2, 30, 58), (0, 3, 31), (3, 31, 59), id="61 layers"),
]


def config(of: TargetFacts, ids: Sequence[int]) -> dict[str, Any]:
    """The drafter's config, on a target of this size."""
    ours = json.loads((DRAFTER / "config.json").read_text())
    sizes = {"hidden_size": of.hidden_size, "vocab_size": of.vocab_size}
    return {**ours, **sizes, "eagle_config": {IDS: list(ids), "use_aux_hidden_state": True}}


def launch(version: str, runner: Any = None) -> Launch:
    return Launch(Version(version), runner)


@pytest.mark.parametrize(("of", "ids", "trained", "served"), LAYERS)
def test_what_each_engine_made_of_the_ids(
    of: TargetFacts, ids: tuple[int, ...], trained: tuple[int, ...], served: tuple[int, ...]
) -> None:
    files = Files(config(of, ids))
    assert sglang.wire(files, of, launch(THEN)).taps == served
    assert sglang.wire(files, of, launch(PATCHED)).taps == served
    assert sglang.wire(files, of, launch(NEWEST)).taps == ids
    assert ids == (2, of.num_layers // 2, of.num_layers - 3), "and so vLLM's default, which V2 takes"
    for runner in ("v1", "v2"):
        assert vllm.wire(files, of, launch(vllm.VERSIONS[-1], runner)).taps == ids
    assert trained[1:] == served[:2]


@pytest.mark.parametrize(("of", "ids", "trained", "served"), LAYERS)
def test_how_each_engine_is_told_the_right_taps(
    of: TargetFacts, ids: tuple[int, ...], trained: tuple[int, ...], served: tuple[int, ...]
) -> None:
    now, wanted = config(of, ids), declared(taps=list(trained))
    for version, spelled in ((PATCHED, [t - 1 for t in trained]), (NEWEST, list(trained))):
        made = sglang.write(wanted, now, of, launch(version))
        assert made["eagle_config"][IDS] == spelled
        assert sglang.wire(Files(made), of, launch(version)).taps == trained
    for write, version, words in (
        (sglang.write, THEN, "tap 0 is added to is missing, a TypeError"),
        (vllm.write, vllm.VERSIONS[-1], "TypeError"),
    ):
        with pytest.raises(CannotExpress, match=words) as refused:
            write(wanted, now, of, launch(version))
        assert [(fact.fact, fact.wanted) for fact in refused.value.facts] == [("taps", list(trained))]
    elsewhere = TargetFacts("LlamaForCausalLM", of.num_layers, of.hidden_size, of.vocab_size)
    assert vllm.write(wanted, now, elsewhere, launch(vllm.VERSIONS[-1]))[IDS] == list(trained)


def test_show_leaves_open_what_the_ids_leave_open(capsys: Capture) -> None:
    """From the files alone nobody can tell how it was trained; what each engine will do with them can be told."""
    asked = [f"sglang=={version}" for version in (THEN, PATCHED, NEWEST)] + ["vllm"]
    ran = folders.call(capsys, "show", DRAFTER, "--target", TARGET, *(x for e in asked for x in ("-e", e)),
                       "--json", "-")  # fmt: skip
    told = json.loads(ran.out)
    assert "taps" not in told["contract"]
    assert told["contract"]["vocab_map"] == {"value": "offsets", "origin": "defaulted"}
    assert [e["taps"] for e in told["engines"]] == [[3, 7, 10], [3, 7, 10], [2, 6, 9], [2, 6, 9], [2, 6, 9]]
    assert "taps-ambiguous" in {f["cause"] for f in told["findings"]}
    assert all(f["severity"] == "note" or f["rivals"] for f in told["findings"]), "nothing here is proven"


# -- what check finds ------------------------------------------------------------------------------------------


class Stored:
    """Stored tensors of some records, each tap where it is known to be."""

    def __init__(self, samples: Sequence[Record], held: Sequence[Sequence[Tensor]], at: Sequence[int]) -> None:
        self.records, self.taps, self.last = samples, tuple(at), None
        self._held = [dict(zip(at, tensors, strict=True)) for tensors in held]

    def states(self, index: int, wanted: Sequence[Tap]) -> Tensor:
        return torch.cat([self._held[index][int(tap)].float() for tap in wanted], dim=-1)

    def truth(self, index: int) -> None:
        return None


def store(of: Target, samples: Sequence[Record], at: Sequence[int]) -> Stored:
    """Those taps of the target, in bf16 as the team kept them."""
    held = []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()[None]
        tapped = taps.run(of, ids, torch.tensor([sample.seq_len]), at).taps[0].bfloat16()
        held.append(tapped.split(of.hidden_size, dim=-1))
    return Stored(samples, held, at)


def named(result: CheckResult, trained: Sequence[int]) -> None:
    """That a check is sure of the taps and the map, and of nothing else that would be wrong."""
    told = json.loads(json.dumps(result.to_json()))
    assert told["verdict"] == "miswired"
    assert told["found"]["contract"]["taps"]["value"] == list(trained)
    assert told["found"]["contract"]["vocab_map"]["value"] == "offsets"
    assert [change["fact"] for change in told["found"]["changes"]] == ["taps"]
    (grave,) = [f for f in told["findings"] if f["severity"] != "note"]
    assert grave["cause"].startswith("taps-")
    assert grave["rivals"] == []
    tried = [v for p in told["sweep"]["passes"] for v in p["variants"] if v["facts"] == {"vocab_map": "ids"}]
    assert tried
    assert {v["outcome"] for v in tried} <= {"worse", "screened out"}


def test_check_names_taps_and_map_from_one_stored_sample() -> None:
    """Without the target's layers, and without its end among the states."""
    (sample, *_) = records.read(CASE / "train.jsonl", vocab_size=target().vocab_size)
    stock = Stored([sample], [torch.load(SAMPLE, weights_only=True)], STORED)
    named(check(DRAFTER, targets.load_ends(str(TARGET)), [sample], states=stock), TRAINED)


def test_check_names_them_from_several_samples() -> None:
    samples = list(records.read(CASE / "train.jsonl", vocab_size=target().vocab_size, limit=8))
    stock = store(target(), samples, STORED)
    named(check(DRAFTER, targets.load_ends(str(TARGET)), samples, states=stock), TRAINED)


def test_without_a_stored_embedding_the_targets_own_is_there() -> None:
    """The taps it was served with, stored: what it was trained on is among them only with the target's embedding."""
    samples = list(records.read(CASE / "train.jsonl", vocab_size=target().vocab_size, limit=1))
    ends = targets.load_ends(str(TARGET))
    stock = store(target(), samples, SERVED)
    whole = with_embedding(stock, ends)
    assert whole.taps == (0, *SERVED)
    ids = torch.from_numpy(samples[0].input_ids).long()[None]
    run = taps.run(target(), ids, torch.tensor([samples[0].seq_len]), STORED).taps[0]
    assert torch.equal(
        whole.states(0, (7, 0, 3)).bfloat16(), torch.cat([run.split(64, -1)[i] for i in (2, 0, 1)], -1).bfloat16()
    )
    assert with_embedding(whole, ends) is whole
    named(check(DRAFTER, ends, samples, states=stock), TRAINED)


def test_check_names_them_on_the_running_target() -> None:
    named(check(DRAFTER, target(), held_out()[:8]), TRAINED)


# -- and on a real target --------------------------------------------------------------------------------------

SMOLLM2 = ROOT / "tests" / "fixtures" / "drafters" / "smollm2-taps-0-2-15"
SMOLLM2_TRAINED, SMOLLM2_SERVED = (0, 2, 15), (2, 15, 27)
SMOLLM2_FACTS = TargetFacts("LlamaForCausalLM", 30, 576, 49152)


def served_elsewhere(folder: Path) -> Path:
    """The drafter of taps (0, 2, 15) without its contract, its keys written for taps (2, 15, 27)."""
    folder.mkdir()
    ours = json.loads((SMOLLM2 / "config.json").read_text())
    ours.pop("eyas")
    ours[IDS] = list(SMOLLM2_SERVED)
    ours["eagle_config"] = {IDS: [t - 1 for t in SMOLLM2_SERVED], "use_aux_hidden_state": True}
    (folder / "config.json").write_text(json.dumps(ours))
    (folder / "model.safetensors").symlink_to(SMOLLM2 / "model.safetensors")
    return folder


@pytest.mark.real
@pytest.mark.parametrize("count", [1, 4])
def test_check_names_the_taps_of_a_real_targets_drafter(tmp_path: Path, count: int) -> None:
    """From one stored sample, the longest, and from several; tap 30 is stored of none."""
    held = records.read(resolve.drafter("smollm2-eagle3") / "heldout.jsonl.gz", vocab_size=49152)
    samples = sorted(held, key=lambda r: -r.n_response_tokens)[:count]
    stock = store(targets.load("smollm2"), samples, (0, 2, 15, 27))
    result = check(served_elsewhere(tmp_path / "drafter"), targets.load_ends("smollm2"), samples, states=stock)
    named(result, SMOLLM2_TRAINED)


def test_how_each_engine_is_told_the_taps_of_a_llama(tmp_path: Path) -> None:
    """The embedding of a Llama could be had of SGLang from 0.5.22 on."""
    now = json.loads((served_elsewhere(tmp_path / "drafter") / "config.json").read_text())
    wanted, of = declared(taps=list(SMOLLM2_TRAINED)), SMOLLM2_FACTS
    for version in (THEN, PATCHED, NEWEST):
        assert sglang.wire(Files(now), of, launch(version)).taps == SMOLLM2_SERVED
    for runner in ("v1", "v2"):
        assert vllm.wire(Files(now), of, launch(vllm.VERSIONS[-1], runner)).taps == SMOLLM2_SERVED
    for version in (THEN, PATCHED):
        with pytest.raises(CannotExpress, match="TypeError"):
            sglang.write(wanted, now, of, launch(version))
    assert sglang.write(wanted, now, of, launch(NEWEST))["eagle_config"][IDS] == [-1, 1, 14]
    assert vllm.write(wanted, now, of, launch(vllm.VERSIONS[-1]))[IDS] == [0, 2, 15]
