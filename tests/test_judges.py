"""Trainers as outside judges: drafters of every shape, said by speculators' and SpecForge's own classes.

``runs/judges.py`` recorded the logits; ``fixtures/judges`` holds drafters with three taps, ``fixtures/shapes`` those
with two that the engines judge too. What a judge cannot wire is as much its word as what it can: where it wires
another drafter, it is said which one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import checkpoint, objective, resolve
from eyas.drafter import SWITCHES, Drafter
from shapes import APART, CLOSE, DEPTHS, Text, apart, decoded, rewired, target, unrolled

torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"
JUDGES, SHAPES = FIXTURES / "judges", FIXTURES / "shapes"
TEXT = {folder: load_file(folder / "text.safetensors") for folder in (JUDGES, SHAPES)}
THREE = sorted(path.parent.name for path in JUDGES.glob("*/config.json"))
TWO = sorted(path.parent.name for path in SHAPES.glob("*/config.json"))
SPECULATORS = {folder: load_file(folder / "speculators.safetensors") for folder in (JUDGES, SHAPES)}
SPECFORGE = load_file(JUDGES / "specforge.safetensors")
VLLM = load_file(JUDGES / "vllm.safetensors")
EVERY = [(JUDGES, name) for name in THREE] + [(SHAPES, name) for name in TWO]


def notes(folder: Path, judge: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"{judge}.json").read_text(encoding="utf-8"))
    return told


def load(folder: Path, shape: str) -> Drafter:
    return checkpoint.load(checkpoint.read(folder / shape), target(TEXT[folder])).requires_grad_(False)


def label(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


# -- speculators ----------------------------------------------------------------------------------------------


def test_every_shape_was_judged() -> None:
    assert set(SPECULATORS[JUDGES]) >= {*THREE, "shipped"}
    assert set(SPECULATORS[SHAPES]) >= set(TWO)
    assert set(SPECFORGE) == {*THREE, "shipped", "plain, norm_output false"}
    for said in (*SPECULATORS.values(), SPECFORGE):
        assert all(bool(torch.isfinite(logits).all()) and float(logits.std()) > 0.3 for logits in said.values())


@pytest.mark.parametrize(("folder", "shape"), EVERY, ids=label)
def test_speculators_says_what_the_unroll_and_the_chain_say(folder: Path, shape: str) -> None:
    drafter = load(folder, shape)
    assert apart(unrolled(drafter, TEXT[folder]), SPECULATORS[folder][shape]) < CLOSE
    assert apart(decoded(drafter, TEXT[folder]), SPECULATORS[folder][shape]) < CLOSE


@pytest.mark.parametrize(("folder", "shape"), EVERY, ids=label)
def test_speculators_finds_every_weight_it_has_a_place_for(folder: Path, shape: str) -> None:
    drafter, told = load(folder, shape), notes(folder, "speculators")["shapes"][shape]
    theirs = {"verifier_lm_head.weight", "verifier_norm.weight"}  # the target's, to train by
    if not drafter.config.own_embedding:
        theirs.add("embed_tokens.weight")
    assert set(told["missing"]) == theirs
    # The norm of a later layer is saved under SGLang's name too.
    assert told["unexpected"] == [f"layers.{n}.hidden_norm.weight" for n in range(1, drafter.config.num_hidden_layers)]


def test_speculators_refuses_the_two_norms_before_fc_together_and_nothing_else() -> None:
    refused = {shape for folder, shape in EVERY if notes(folder, "speculators")["shapes"][shape]["refused"]}
    assert refused == {"both_norms", "everything"}


@pytest.mark.parametrize("shape", [s for s in THREE if s not in ("plain", "full_vocab", "llama3")])
def test_every_norm_says_something_of_its_own(shape: str) -> None:
    """Each drafter without its switches is another one: the comparison can fail."""
    stripped = rewired(load(JUDGES, shape), TEXT[JUDGES]["embedding"], **dict.fromkeys(SWITCHES, False))
    assert apart(unrolled(stripped, TEXT[JUDGES]), SPECULATORS[JUDGES][shape]) > APART


def test_the_scaled_rope_says_something_of_its_own() -> None:
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    other = rewired(load(JUDGES, "llama3"), TEXT[JUDGES]["embedding"], rope_parameters=plain)
    assert apart(unrolled(other, TEXT[JUDGES]), SPECULATORS[JUDGES]["llama3"]) > APART


# -- speculators' converter -----------------------------------------------------------------------------------


def converter(folder: Path, shape: str) -> dict[str, Any]:
    told: dict[str, Any] = notes(folder, "speculators")["shapes"][shape]["converter"]
    return told


@pytest.mark.parametrize("shape", [*THREE, "shipped"])
def test_the_converter_takes_our_folder_and_loses_but_the_norms_before_fc(shape: str) -> None:
    """The class it converts through has none (convert/eagle/eagle3_legacy_model.py), though it copies the switches."""
    folder = resolve.drafter("smollm2-eagle3") if shape == "shipped" else JUDGES / shape
    config, told = checkpoint.read(folder).shape, converter(JUDGES, shape)
    before_fc = [f"fc_norm.{n}.weight" for n in range(3)] if config.fc_norm else []
    before_fc += ["input_norm.weight"] if config.norm_before_fc else []
    own = [] if config.own_embedding else ["embed_tokens.weight"]
    assert told["refused"] is None
    assert told["lost"] == before_fc
    assert told["gained"] == []
    assert told["missing"] == sorted([*before_fc, *own, "verifier_lm_head.weight", "verifier_norm.weight"])
    assert told["switches"] == {key: getattr(config, key) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    assert told["rope"] == config.rope_parameters


@pytest.mark.parametrize("shape", THREE)
def test_what_it_makes_of_our_folder_says_the_same_unless_it_lost_a_norm(shape: str) -> None:
    away = apart(unrolled(load(JUDGES, shape), TEXT[JUDGES]), SPECULATORS[JUDGES][f"{shape}, converted"])
    assert away > APART if converter(JUDGES, shape)["lost"] else away < CLOSE


@pytest.mark.parametrize("shape", TWO)
def test_the_converter_takes_three_taps_only(shape: str) -> None:
    refused = converter(SHAPES, shape)["refused"]
    assert "size mismatch for fc.weight" in refused or "mutually exclusive" in refused


# -- vLLM, on folders with other names in them ------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(VLLM))
def test_vllm_says_the_same_of_a_folder_read_under_other_names_and_saved(name: str) -> None:
    drafter = load(JUDGES, name.split(", from ")[0])
    assert apart(unrolled(drafter, TEXT[JUDGES]), VLLM[name]) < CLOSE
    assert apart(decoded(drafter, TEXT[JUDGES]), VLLM[name]) < CLOSE


def test_vllm_was_shown_both_spellings() -> None:
    assert set(VLLM) == {*THREE, *(f"{s}, from {spelling}" for s in ("plain", "all_each") for spelling in SPELLINGS)}


SPELLINGS = {"layers.0": ("midlayer.", "layers.0."), "model.": ("", "model.")}


@pytest.mark.parametrize("shape", ["plain", "all_each"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_folder_under_other_names_is_saved_as_it_was(shape: str, spelling: str, tmp_path: Path) -> None:
    there, theirs = SPELLINGS[spelling]
    shutil.copytree(JUDGES / shape, tmp_path / "theirs")
    tensors = load_file(JUDGES / shape / "model.safetensors")
    kept = ("d2t", "t2d", "lm_head.weight")
    renamed = {n if n in kept else n.replace(there, theirs, 1): t for n, t in tensors.items()}
    assert set(renamed) != set(tensors)
    save_file(renamed, tmp_path / "theirs" / "model.safetensors")
    found = checkpoint.read(tmp_path / "theirs")
    assert found.contract is not None
    drafter = checkpoint.load(found, target(TEXT[JUDGES]))
    checkpoint.save(drafter, tmp_path / "ours", found.contract, {}, dtype=torch.float32)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (JUDGES / shape / file).read_bytes()


# -- SpecForge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", THREE)
def test_specforge_says_the_same_but_for_what_its_class_does_not_read(shape: str) -> None:
    """It has no norm over the joined taps, starts the residual before the norm, and never feeds a normed state back."""
    drafter, text = load(JUDGES, shape), TEXT[JUDGES]
    unread = {"norm_before_fc": False, "norm_before_residual": False, "norm_output": False}
    as_there = rewired(drafter, text["embedding"], **unread)
    assert apart(unrolled(as_there, text), SPECFORGE[shape]) < CLOSE
    if as_there.config == drafter.config:
        assert apart(decoded(drafter, text), SPECFORGE[shape]) < CLOSE
    else:
        assert apart(unrolled(drafter, text), SPECFORGE[shape]) > APART


def test_what_specforge_can_express_are_these() -> None:
    same = {s for s in THREE if apart(unrolled(load(JUDGES, s), TEXT[JUDGES]), SPECFORGE[s]) < CLOSE}
    assert same == {"plain", "fc_norm", "full_vocab", "llama3"}


@pytest.mark.parametrize("shape", THREE)
def test_specforge_finds_every_weight_but_those_it_knows_nothing_of(shape: str) -> None:
    config, told = load(JUDGES, shape).config, notes(JUDGES, "specforge")["shapes"][shape]
    whole = config.draft_vocab_size == config.vocab_size  # it has maps even then, of its own making
    assert told["missing"] == (["d2t"] if whole else []) + ([] if config.own_embedding else ["embed_tokens.weight"]) + (
        ["t2d"] if whole else []
    )
    assert told["unexpected"] == (["input_norm.weight"] if config.norm_before_fc else [])


def test_norm_output_false_takes_the_norm_before_the_head_away_in_specforge() -> None:
    """Why a config says norm_output only where it is on: that key means two things."""
    drafter, text = load(JUDGES, "plain"), TEXT[JUDGES]
    without = SPECFORGE["plain, norm_output false"]
    assert "norm_output" not in json.loads((JUDGES / "plain" / "config.json").read_text(encoding="utf-8"))
    assert apart(unrolled(drafter, text), without) > APART
    assert apart(headed_without_norm(drafter, text), without) < CLOSE


@torch.no_grad()
def headed_without_norm(drafter: Drafter, text: Text) -> Tensor:
    taps = torch.cat((text["taps"], text["taps"].new_zeros(1, DEPTHS, text["taps"].shape[2])), dim=1)
    slot = text["taps"].shape[1] - 1
    slots = objective.Slots(torch.tensor([[slot]]), torch.ones(1, 1, DEPTHS, dtype=torch.bool))
    states = objective.unroll(drafter, taps, text["input_ids"], slots)
    return torch.stack([drafter.lm_head(state[0, 0]) for state in states])


# -- the shipped drafter --------------------------------------------------------------------------------------


def test_both_judges_say_of_the_shipped_drafter_what_we_say() -> None:
    text = load_file(JUDGES / "shipped-text.safetensors")
    folder = resolve.drafter("smollm2-eagle3")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text["embedding"] = torch.zeros(config["vocab_size"], config["hidden_size"])
    text["embedding"][text["input_ids"][0]] = text["rows"]
    drafter = checkpoint.load(checkpoint.read(folder), target(text, layers=30)).requires_grad_(False)
    ours = unrolled(drafter, text)
    for said in (SPECULATORS[JUDGES], SPECFORGE):
        theirs = said["shipped"]
        assert apart(ours[:, : theirs.shape[1]], theirs) < CLOSE
        assert apart(decoded(drafter, text)[:, : theirs.shape[1]], theirs) < CLOSE
