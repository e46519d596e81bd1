"""What config, map, head and record ids say by themselves, found without an engine; and what no file is blamed for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import records, variants
from eyas.check import check, sweep
from eyas.check.case import Case
from eyas.check.losses import Loss
from eyas.check.placing import place
from eyas.check.states import look_at_states
from eyas.check.vocabulary import Maps, cause_of_map
from eyas.records import Record
from eyas.results import CheckResult, Difference, Finding, LengthCounts, judge
from folders import call
from stocks import CASE, case_live, case_target, rolled, stored

IDS = "eagle_aux_hidden_state_layer_ids"
LIMITS = variants.Limits(screen=400, confirm=1500)
Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


@cache
def held_out() -> tuple[Record, ...]:
    return tuple(records.read(CASE / "heldout.jsonl", limit=20))


def checked(
    folder: Path, edit: Edit, *, contract: bool = False, of: Sequence[Record] | None = None, **options: Any
) -> CheckResult:
    shutil.copytree(CASE / "trained", folder)
    config = json.loads((folder / "config.json").read_text())
    if not contract:
        del config["eyas"]
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return check(folder, case_target(), of or held_out(), limits=LIMITS, **options)


def causes(result: CheckResult) -> dict[str, str]:
    return {f.cause: f.severity for f in result.findings}


def nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    pass


DECLARED: dict[str, tuple[Edit, str]] = {
    "two lists": (lambda c, t: c["eagle_config"].update({IDS: [3, 6, 10]}), "keys-contradict"),
    "two bases": (lambda c, t: c.update(rope_theta=5e5), "keys-contradict"),
    "the target's quantisation": (
        lambda c, t: c.update(quantization_config={"quant_method": "fp8"}),
        "drafter-target-quantisation",
    ),
    "few positions": (lambda c, t: c.update(max_position_embeddings=48), "position-limit-short"),
}


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_what_config_says_by_itself_is_a_note(tmp_path: Path, name: str) -> None:
    edit, cause = DECLARED[name]
    assert causes(checked(tmp_path / "d", edit, sweeping="never"))[cause] == "note"


def test_a_sound_config_has_none_of_it(tmp_path: Path) -> None:
    found = causes(checked(tmp_path / "d", nothing, sweeping="never"))
    assert not found.keys() & ({cause for _, cause in DECLARED.values()} | {"ids-cast-wrong", "head-overwritten"})


def test_ids_of_twice_the_width_stop_the_check(tmp_path: Path) -> None:
    halved = [
        replace(
            r,
            input_ids=np.stack((r.input_ids, np.zeros_like(r.input_ids)), 1).ravel(),
            loss_mask=np.repeat(r.loss_mask, 2),
        )
        for r in held_out()
    ]
    result = checked(tmp_path / "d", nothing, of=halved)
    assert causes(result)["ids-cast-wrong"] == "fatal"
    assert result.confident
    assert any(n.what == "curves" for n in result.not_checked)


def test_a_head_of_the_targets_rows_is_told_but_not_held_against_it(tmp_path: Path) -> None:
    def lost(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = case_target().head_weight[ids].to(torch.bfloat16)

    assert causes(checked(tmp_path / "a", lost, sweeping="never"))["head-overwritten"] == "note"
    kept = causes(checked(tmp_path / "b", lost, contract=True, sweeping="never"))
    assert "head-overwritten" not in kept


def test_an_embedding_in_the_files_is_what_is_run_whatever_the_contract_says(tmp_path: Path) -> None:
    def noise(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def copy(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = case_target().embedding.bfloat16().clone()

    result = checked(tmp_path / "noise", noise, contract=True)
    assert result.verdict == "miswired"
    assert causes(result)["embedding-random"] in ("likely", "fatal")
    same = causes(checked(tmp_path / "copy", copy, contract=True, sweeping="always"))
    assert not same.keys() & {"embedding-random", "embedding-overwritten"}


@pytest.mark.parametrize("contract", [False, True])
def test_half_of_each_head_rotated_is_seen_in_the_config(tmp_path: Path, contract: bool) -> None:
    result = checked(
        tmp_path / "d", lambda c, t: c.update(partial_rotary_factor=0.5), contract=contract, sweeping="always"
    )
    assert causes(result)["rope-partial-ignored"] in ("likely", "fatal")


def test_no_cause_is_confident_where_the_drafter_stays_all_but_dead(tmp_path: Path) -> None:
    """States turned by a rotation that nothing here undoes: a gain may help by chance, and explains nothing."""

    def turned(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        Q = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]
        blocks = tensors["fc.weight"].float().split(64, -1)
        tensors["fc.weight"] = torch.cat([b @ Q for b in blocks], -1).bfloat16()

    assert not checked(tmp_path / "d", turned).confident


@pytest.mark.parametrize(("kept", "rivals"), [(0.2, ["quality-low"]), (1.2, [])])
def test_a_cause_has_a_rival_where_what_fits_is_hardly_alive(kept: float, rivals: list[str]) -> None:
    fitting, was = (SimpleNamespace(kept_per_slot=k, kept=[0] * 100) for k in (kept, kept / 2))
    loss = Loss(
        "rope_layout",
        "interleaved",
        "half-split",
        cast(Any, was),
        cast(Any, fitting),
        Difference(kept / 2, 0.05, 1.0),
        9.0,
        9.0,
        True,
    )
    stock = SimpleNamespace(taps=tuple(range(13)))
    swept = SimpleNamespace(passes=[], tried=50, by_record=True, confirm=SimpleNamespace(stock=stock, chunks=[]))
    told = SimpleNamespace(named=True, taps_by_reader={})
    found = sweep._finding("rope-interleaved", loss, cast(Any, swept), cast(Any, told), 12)
    assert [r.cause for r in found.rivals] == rivals


# -- causes of a map ----------------------------------------------------------------------------------------------


def map_of(ids: Tensor, true: Tensor) -> Maps:
    return Maps({"offsets": ids, "mask": true}, "offsets", {}, 0)


def test_a_map_of_the_right_tokens_in_another_order_is_shuffled() -> None:
    true = torch.arange(20) * 3
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert cause_of_map(map_of(true[order], true), "mask", 100) == "d2t-shuffled"
    assert cause_of_map(map_of(torch.arange(20) * 2 + 1, true), "mask", 100) == "d2t-stale"


def test_a_map_that_cannot_be_is_not_called_stale() -> None:
    true = torch.arange(20) * 3
    assert cause_of_map(map_of(true + 60, true), "mask", 100) == "vocab-map-inconsistent"


# -- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_the_ends_that_a_shift_pads_are_no_repeated_rows(by: int) -> None:
    case = Case("a case")
    stock = stored(case_live(), (0, 3, 7, 12), rolled(by))
    look_at_states(case, stock, place(stock, case_target(), None, True), case_target(), True)
    assert "states-repeated" not in {f.cause for f in case.findings}


def test_the_final_state_beside_tap_n_stands_where_a_tap_was_meant(tmp_path: Path) -> None:
    live = case_live()
    norm = case_target().norm

    def final(i: int, rows: Tensor, which: int) -> Tensor:
        with torch.no_grad():
            return norm(live.states(i, (12,))) if which == 2 else rows

    stock = stored(live, (0, 3, 7, 12), final)
    shutil.copytree(CASE / "trained", tmp_path / "d")
    result = check(tmp_path / "d", case_target(), live.records, states=stock, sweeping="never")
    assert causes(result)["taps-highest-final-state"] == "likely"
    sound = check(tmp_path / "d", case_target(), live.records, states=stored(live, (0, 3, 7, 12)), sweeping="never")
    assert "taps-highest-final-state" not in causes(sound)


# -- bad input ----------------------------------------------------------------------------------------------------


def test_a_drafter_without_config_is_named_beside_stored_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CASE / "trained", tmp_path / "d")
    (tmp_path / "d" / "config.json").unlink()
    ran = call(
        capsys, "check", tmp_path / "d", "--target", CASE / "target", "--states", CASE / "states",
        "--records", CASE / "train.jsonl", "--json", "-",
    )  # fmt: skip
    told = json.loads(ran.out)
    assert (ran.code, told["verdict"]) == (1, "broken")
    assert "no config.json" in told["findings"][0]["summary"]


def test_states_shorter_than_every_record_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "states").mkdir()
    whole = torch.load(CASE / "states" / "sample_0.pt", weights_only=True)
    torch.save([tensor[:5].clone() for tensor in whole], tmp_path / "states" / "sample_0.pt")
    ran = call(
        capsys, "check", CASE / "drafter", "--target", CASE / "target", "--states", tmp_path / "states",
        "--records", CASE / "train.jsonl",
    )  # fmt: skip
    assert ran.code == 2
    assert "no record has the length" in " ".join(ran.err.split())


# -- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "verdict"),
    [("bonus-dropped", "healthy"), ("engine-falls-short", "undecided"), ("taps-swapped", "miswired")],
)
def test_a_log_blames_no_file(cause: str, verdict: str) -> None:
    length = LengthCounts(4, np.full(8, 50), np.full(8, 60))
    assert judge([Finding(cause, "likely", "s")], length_at_4=length) == verdict
