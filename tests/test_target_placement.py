"""Precision, device and device map of a target, and a drafter that follows it; devices that are not here are named.

One machine without a GPU can show this much: precisions, weights that wait on the disk until they are needed (where
``module.weight`` is a placeholder, as it is for parts that wait in memory for a GPU), and every refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from eyas import batches, checkpoint, placement, starts, taps
from eyas import target as targets
from eyas.decode.loop import generate
from eyas.decode.pack import packed
from eyas.decode.plain import plain
from eyas.decode.ties import TIE, first_difference, measured_tie
from eyas.errors import EnvironmentFault, UsageError
from eyas.target import Target
from folders import call, write_drafter, write_lines, write_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Target:
    return targets.load(str(folder))


# -- words ---------------------------------------------------------------------------------------------------------


def test_words_for_precision() -> None:
    assert [placement.dtype(w) for w in ("fp32", "bf16", "fp16")] == [torch.float32, torch.bfloat16, torch.float16]
    with pytest.raises(UsageError, match="'float16' is not a precision") as caught:
        placement.dtype("float16")
    assert "bf16, fp16, fp32" in caught.value.way_out


@pytest.mark.parametrize("word", ["gpu", "meta", "cuda:x", "", "xla"])
def test_what_is_no_device(word: str) -> None:
    with pytest.raises(UsageError, match="is not a device to run on"):
        placement.require(word)


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.require("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentFault, match="sees no such device here, only 1 cpu") as caught:
        placement.require("cuda")
    assert caught.value.exit_code == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert placement.require("cuda:1") == torch.device("cuda:1")
    with pytest.raises(EnvironmentFault, match=r"cuda:2.*only 1 cpu, 2 cuda"):
        placement.require("cuda:2")


def test_a_map_and_a_device_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert placement.require("cpu", "auto") == torch.device("cpu")
    with pytest.raises(UsageError, match="exclude each other"):
        placement.require("cuda", "auto")
    with pytest.raises(UsageError, match="'balancd' is not known") as caught:
        placement.require("cpu", "balancd")
    assert "Did you mean 'balanced'?" in caught.value.way_out


VERBS = {
    "target": ["target", "TARGET"],
    "train": ["train", "-r", "RECORDS", "-o", "OUT", "--target", "TARGET"],
    "check": ["check", "DRAFTER", "-r", "RECORDS", "--target", "TARGET"],
    "generate": ["generate", "hello", "--target", "TARGET", "--plain", "-n", "3"],
    "bench": ["bench", "-p", "PROMPTS", "--target", "TARGET", "--drafter", "DRAFTER", "-n", "4", "-k", "1"],
}


@pytest.fixture
def words(folder: Path, whole: Target, tmp_path: Path) -> dict[str, Path]:
    rows = [{"input_ids": [i, *range(30)], "loss_mask": [0] * 11 + [1] * 20} for i in range(12)]
    held = write_lines(tmp_path / "heldout.jsonl", list(rows[:4]))
    assert held.exists()
    return {
        "TARGET": folder,
        "RECORDS": write_lines(tmp_path / "train.jsonl", list(rows)),
        "PROMPTS": write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two"}]),
        "DRAFTER": write_drafter(tmp_path / "drafter", whole),
        "OUT": tmp_path / "out",
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_tensor_verb_refuses_what_cannot_be(
    verb: str,
    words: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    arguments = [words.get(word, word) for word in VERBS[verb]]
    for flags, code, said in (
        (("--dtype", "fp64"), 2, "not a precision"),
        (("--device", "tpu"), 2, "not a device"),
        (("--device", "cuda"), 4, "sees no such device"),
        (("--device-map", "even"), 2, "not known"),
    ):
        ran = call(capsys, *arguments, *flags)
        assert (ran.code, said in ran.err) == (code, True), (flags, ran.err)
    assert not words["OUT"].exists()


@pytest.mark.parametrize("flags", [("--dtype", "bf16"), ("--device-map", "auto"), ("--device", "cpu")])
@pytest.mark.parametrize("verb", VERBS)
def test_every_tensor_verb_runs_with_each(
    verb: str, flags: tuple[str, str], words: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more: tuple[object, ...] = ()
    if verb == "train":
        more = ("--steps", 2, "--draft-vocab", 64, "--depths", 2, "--ridge-tokens", 100, "--taps", "1,2,3")
    ran = call(capsys, *(words.get(word, word) for word in VERBS[verb]), *more, *flags, "--json", tmp_path / "r.json")
    assert ran.code in ((0, 3) if verb == "check" else (0,)), ran.err
    assert ("note" in ran.err and "bf16" in ran.err) is (flags[1] == "bf16")
    told = json.loads((tmp_path / "r.json").read_text())
    if verb == "target":
        parameters = told["parameters"]
        assert told["weights_gb"] == {"cpu": round(parameters * (2 if flags[1] == "bf16" else 4) / 1e9, 3)}
    if verb == "bench" and flags[1] == "bf16":
        counts = told["ties"]["sides"]["chain 1"]
        assert counts["differ"] == counts["excused"]
        assert told["ties"]["tie"] >= TIE
    if verb == "check":
        assert told["curves"]["teacher_forced"]["depths"][0]["joint"]["n"] > 0


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_of_lower_precision_and_the_drafter_on_it(folder: Path, whole: Target, dtype: torch.dtype) -> None:
    """The drafter stays fp32; texts are the oracle's up to ties as this precision makes them."""
    target = targets.load(str(folder), dtype=dtype)
    assert target.embedding.dtype == target.head_weight.dtype == dtype
    assert target.norm_gain.dtype == torch.float32
    assert target.fingerprint() == whole.fingerprint() or dtype == torch.float16
    drafter = followed(target)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    ids, gaps = list(range(60)), list[float]()
    tie = measured_tie(target, ids)
    assert TIE <= tie < 1.0
    with packed(target, drafter) as packing:
        assert packing.reason is not None
        oracle = list(plain(target, ids, max_new_tokens=24, gaps=gaps))
        run = generate(target, drafter, ids, max_new_tokens=24, draft_tokens=4).finish()
    parted = first_difference(oracle, run.token_ids, gaps, tie)
    assert parted is None or parted.excused


def test_the_tie_is_measured_only_below_fp32(folder: Path, whole: Target) -> None:
    ids = list(range(40))
    assert measured_tie(whole, ids) == TIE
    target = targets.load(str(folder), dtype=torch.bfloat16)
    fed = torch.tensor([ids])

    def logits(rows: int) -> torch.Tensor:
        """The last 30 tokens in passes of ``rows``, on a cache of transformers' own making."""
        from transformers import DynamicCache

        cache, parts = DynamicCache(), []
        for start, stop in [(0, 10), *((i, i + rows) for i in range(10, 40, rows))]:
            with torch.no_grad():
                out = target.model(input_ids=fed[:, start:stop], past_key_values=cache, use_cache=True)
            parts.append(out.logits[0].float())
        return torch.cat(parts[1:])

    wanted = 2 * float((logits(1) - logits(5)).abs().max())
    assert wanted > TIE, "a model that rounds alike in both proves nothing"
    assert measured_tie(target, ids) == wanted


def test_a_start_is_fp32_whatever_the_target(folder: Path, whole: Target) -> None:
    """Regression rows and weights of a bf16 target: fp32, and near those of the fp32 one."""
    rough = targets.load(str(folder), dtype=torch.bfloat16)
    made = {}
    for name, target in (("fp32", whole), ("bf16", rough)):
        rows = starts.sample_rows(target, (1, 2, 3), sample())
        assert {r.dtype for r in rows} == {torch.float32, torch.int64}
        made[name] = starts.ridge(target, starts.config_for(target, (1, 2, 3), 64), words_of(target), rows, 0)
    one, other = made["fp32"].fc.weight, made["bf16"].fc.weight
    assert one.dtype == other.dtype == torch.float32
    assert float((one - other).norm() / one.norm()) < 0.1


# -- weights that wait on the disk -----------------------------------------------------------------------------------

HERE_ALL = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
MAPS: dict[str, dict[str, Any]] = {
    "all here": {"": "cpu"},
    "ends away": HERE_ALL | {"model.embed_tokens": "disk", "model.norm": "disk", "lm_head": "disk"},
    "layers away": HERE_ALL | {"model.layers": "disk", "lm_head": "cpu"},
}


@pytest.mark.parametrize("name", [*MAPS, "auto"])
def test_a_target_that_is_partly_elsewhere_says_the_same(folder: Path, whole: Target, name: str) -> None:
    target = targets.load(str(folder), device_map=MAPS.get(name, "auto"))
    away = [n for n, p in target.model.named_parameters() if p.device.type == "meta"]
    assert bool(away) is name.endswith("away")
    assert target.device == torch.device("cpu")
    assert torch.equal(target.embedding, whole.embedding)
    assert torch.equal(target.head_weight, whole.head_weight)
    assert torch.equal(target.norm_gain, whole.norm_gain)
    assert target.fingerprint() == whole.fingerprint()
    batch = batches.collate(tiny.tiny_records(3), range(3))
    n = target.num_layers
    ours, theirs = (taps.run(t, batch.input_ids, batch.lengths, range(n + 1)) for t in (target, whole))
    assert torch.equal(ours.taps, theirs.taps)
    assert torch.equal(target.logits(ours.last), whole.logits(theirs.last))
    ids = list(range(50))
    said = {t.spec: generate(t, followed(t), ids, max_new_tokens=20, draft_tokens=3).finish() for t in (target, whole)}
    assert list(plain(target, ids, max_new_tokens=20)) == list(plain(whole, ids, max_new_tokens=20))
    assert said[target.spec].token_ids == list(plain(whole, ids, max_new_tokens=20))
    assert [n for n, p in target.model.named_parameters() if p.device.type == "meta"] == away, "nothing stays behind"


def test_a_drafter_of_a_target_that_is_elsewhere_has_weights(folder: Path, whole: Target, tmp_path: Path) -> None:
    target = targets.load(str(folder), device_map=MAPS["ends away"])
    drafter = checkpoint.load(checkpoint.read(write_drafter(tmp_path / "d", whole)), target)
    assert torch.equal(drafter.embedding, whole.embedding)
    assert {t.device.type for t in (*drafter.parameters(), *drafter.buffers())} == {"cpu"}
    shape = starts.config_for(target, (1, 2, 3), 64)
    made = [starts.ridge(t, shape, words_of(t), starts.sample_rows(t, (1, 2, 3), sample()), 0) for t in (target, whole)]
    for one, other in zip(*(d.parameters() for d in made), strict=True):
        assert torch.equal(one, other)


def test_what_a_map_would_hold_where() -> None:
    model = tiny.target("llama").model
    whole = placement.gigabytes(model, {"": "cpu"})
    assert whole == {"cpu": round(sum(p.numel() for p in model.parameters()) * 4 / 1e9, 3)}
    parts = placement.gigabytes(model, {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": "cpu"})
    assert list(parts) == ["0", "1", "cpu"]


def followed(target: Target) -> Any:
    return starts.random(target, starts.config_for(target, (1, 2, 3), 64), words_of(target), 0)


def words_of(target: Target) -> Any:
    from eyas.vocab import DraftVocab

    return DraftVocab(torch.arange(64) * 2, target.vocab_size)


def sample() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    batch = batches.collate(tiny.tiny_records(12), range(12))
    return [(batch.input_ids, batch.lengths, batch.loss_mask)]
