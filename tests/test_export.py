"""``eyas export``: what is written is wired as the contract says, or nothing is written and the fact is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import drafts
import folders
from eyas.dialects import engines
from eyas.dialects.wiring import CannotExpress, TargetFacts
from eyas.errors import CheckpointError, UsageError
from eyas.export import export
from eyas.show import show
from folders import call

KEY = "eagle_aux_hidden_state_layer_ids"
LLAMA = drafts.target()
DEEPSEEK = drafts.target("DeepseekV3ForCausalLM", 61)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def filled(folder: Path) -> Path:
    """Random weights in the place of zeros, so that one tensor cannot pass for another."""
    torch.manual_seed(0)
    held = {n: torch.randn(t.shape) if t.is_floating_point() else t for n, t in tensors(folder).items()}
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return filled(drafts.write(tmp_path / "drafter", drafts.shape((0, 2, 15)), LLAMA))


def ids(folder: Path) -> tuple[Any, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config.get("eagle_config", {}).get(KEY), config.get(KEY)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_edited_config_is_put_right_and_the_weights_are_the_same(drafter: Path, tmp_path: Path, engine: str) -> None:
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_config"][KEY] = config[KEY] = [2, 15, 27]
    (drafter / "config.json").write_text(json.dumps(config))
    asked = engines.asked(engine)
    assert show(drafter, [asked], target=LLAMA).miswired
    made = export(drafter, asked, tmp_path / "out", target=LLAMA)
    assert not show(tmp_path / "out", [asked], target=LLAMA).miswired
    assert (ids(tmp_path / "out")[0] if engine == "sglang" else ids(tmp_path / "out")[1]) == (
        [-1, 1, 14] if engine == "sglang" else [0, 2, 15]
    )
    before, after = tensors(drafter), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = (json.loads((d / "config.json").read_text())["eyas"] for d in (drafter, tmp_path / "out"))
    assert ours["contract"] == theirs["contract"]  # the engine's keys are rewritten, the contract never
    assert theirs["weights_sha256"]
    assert made.left_out == ()


def test_every_layout_is_written_under_the_usual_names(drafter: Path, tmp_path: Path) -> None:
    held = tensors(drafter)
    spelled = {("model." + n.replace("midlayer.", "layers.0.") if "." in n else n): t for n, t in held.items()}
    save_file(spelled, drafter / "model.safetensors")
    made = export(drafter, engines.asked("vllm"), tmp_path / "out", target=LLAMA)
    after = tensors(tmp_path / "out")
    assert after.keys() == held.keys()
    assert all(torch.equal(held[name], after[name]) for name in held)
    assert made.renamed["model.layers.0.mlp.up_proj.weight"] == "midlayer.mlp.up_proj.weight"


def test_the_maps_of_a_whole_vocabulary_are_left_out(tmp_path: Path) -> None:
    shape = drafts.shape((0, 2, 15), draft_vocab_size=drafts.VOCAB)
    maps = {"d2t": (drafts.VOCAB,), "t2d": (drafts.VOCAB,)}
    folder = drafts.write(tmp_path / "drafter", shape, LLAMA)
    held = {**tensors(folder), "d2t": torch.zeros(maps["d2t"], dtype=torch.int64), "t2d": torch.ones(drafts.VOCAB) > 0}
    save_file(held, folder / "model.safetensors")
    made = export(folder, engines.asked("vllm"), tmp_path / "out", target=LLAMA)
    assert made.left_out == ("d2t", "t2d")
    assert not {"d2t", "t2d"} & tensors(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("engine", "shape", "facts", "fact"),
    [
        ("sglang", {"norm_before_residual": True}, {}, "residual"),
        ("sglang", {"attention_bias": True}, {}, "attention_bias"),
        ("sglang", {}, {"head_norm": False}, "head_norm"),
        ("sglang", {"own_embedding": True}, {}, "embedding"),
        ("vllm", {}, {"head_norm": False}, "head_norm"),
        ("llama.cpp", {"norm_output": True}, {}, "feedback"),
        ("llama.cpp", {"fc_norm": True}, {}, "fc_norm"),
        ("tensorrt-llm", {"norm_before_residual": True}, {}, "residual"),
    ],
)
def test_what_an_engine_has_no_place_for_is_refused_by_name(
    tmp_path: Path, engine: str, shape: dict[str, Any], facts: dict[str, Any], fact: str
) -> None:
    taps = (2, 15, 27) if engine == "tensorrt-llm" else (0, 2, 15)
    folder = drafts.write(tmp_path / "drafter", drafts.shape(taps, **shape), LLAMA, facts=facts)
    out = tmp_path / ("out.gguf" if engine == "llama.cpp" else "out")
    with pytest.raises(CannotExpress) as caught:
        export(folder, engines.asked(engine), out, target=LLAMA, tokenizer=tmp_path)
    assert fact in [row.fact for row in caught.value.facts]
    assert caught.value.way_out
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_a_target_that_no_list_of_layers_reaches_is_refused_with_the_nearest(tmp_path: Path) -> None:
    folder = drafts.write(tmp_path / "drafter", drafts.shape((0, 15, 30)), LLAMA)
    with pytest.raises(CannotExpress, match="taps") as caught:
        export(folder, engines.asked("sglang"), tmp_path / "out", target=LLAMA)
    (row,) = [row for row in caught.value.facts if row.fact == "taps"]
    assert row.nearest is not None
    export(folder, engines.asked("vllm"), tmp_path / "out", target=LLAMA)


def test_onto_itself_is_refused(drafter: Path) -> None:
    before = (drafter / "config.json").read_bytes()
    for out in (drafter, drafter / ".", drafter / "inside"):
        with pytest.raises(UsageError, match="the drafter itself"):
            export(drafter, engines.asked("vllm"), out, target=LLAMA, overwrite=True)
    assert (drafter / "config.json").read_bytes() == before


def test_what_is_not_known_is_not_exported(drafter: Path, tmp_path: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    del config["eyas"]
    config["eagle_config"] = {KEY: [3, 9, 20]}
    del config[KEY]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not say how it was trained: taps may be"):
        export(drafter, engines.asked("vllm"), tmp_path / "out", target=LLAMA)


def test_a_config_without_weights_is_not_exported(drafter: Path, tmp_path: Path) -> None:
    (drafter / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        export(drafter, engines.asked("vllm"), tmp_path / "out", target=LLAMA)


def test_a_writer_that_errs_is_caught_by_reading_back(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.dialects import vllm

    right = vllm.write

    def wrong(*given: Any) -> dict[str, Any]:
        return right(*given) | {KEY: [2, 15, 27]}

    monkeypatch.setattr(vllm, "write", wrong)
    with pytest.raises(CheckpointError, match="would not wire what was written"):
        export(drafter, engines.asked("vllm"), tmp_path / "out", target=LLAMA)
    assert not (tmp_path / "out").exists()


def test_llama_cpp_reads_the_layers_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own converter always writes the default layers; the file of an export names the contract's."""
    from eyas import target as targets

    place = folders.write_target(tmp_path / "target")
    target = targets.load(str(place))
    spec = json.loads((place / "tokenizer.json").read_text())
    spec["model"]["vocab"]["ab"], spec["model"]["merges"] = 258, [["a", "b"]]
    (place / "tokenizer.json").write_text(json.dumps(spec))
    drafter = folders.write_drafter(tmp_path / "drafter", target)
    out = tmp_path / "drafter.gguf"
    ran = call(capsys, "export", drafter, "--to", "llama.cpp", "--target", place, "-o", out, "--json", "-")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["contract"]["taps"]["value"] == [1, 2, 3]
    fields = gguf.GGUFReader(out).fields
    (layers,) = [fields[name].contents() for name in fields if name.endswith("extract_layers")]
    assert list(layers) == [1, 2, 3]
    ran = call(capsys, "export", drafter, "--to", "llama.cpp", "-o", tmp_path / "other.gguf")
    assert ran.code == 2
    assert "tokenizer" in ran.err


def test_the_verb_writes_for_an_engine_and_refuses_an_output_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: Path
) -> None:
    out = tmp_path / "out"
    ran = call(capsys, "export", drafter, "--to", "sglang==0.5.23", "-o", out)
    assert ran.code == 0, ran.err
    assert call(capsys, "show", out, "-e", "sglang").code == 0
    ran = call(capsys, "export", drafter, "--to", "sglang==0.5.23", "-o", out)
    assert ran.code == 2
    assert "--overwrite" in ran.err
    assert call(capsys, "export", drafter, "--to", "sglang", "-o", out, "--overwrite").code == 0
    provenance = (out / "provenance.json").read_text()
    assert str(tmp_path) not in provenance


switches = st.fixed_dictionaries(
    {
        "norm_before_fc": st.booleans(),
        "fc_norm": st.booleans(),
        "norm_output": st.booleans(),
        "norm_before_residual": st.booleans(),
        "own_embedding": st.booleans(),
        "attention_bias": st.booleans(),
        "draft_vocab_size": st.sampled_from([drafts.DRAFT_VOCAB, drafts.VOCAB]),
        "num_hidden_layers": st.sampled_from([1, 1, 2]),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    taps=st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True).map(sorted),
    shape=switches,
    engine=st.sampled_from(["sglang", "vllm", "tensorrt-llm"]),
    host=st.sampled_from([LLAMA, DEEPSEEK, drafts.target("Qwen3ForCausalLM", 36)]),
)
def test_what_can_be_expressed_is_wired_as_it_was_made(
    tmp_path_factory: pytest.TempPathFactory, taps: list[int], shape: dict[str, Any], engine: str, host: TargetFacts
) -> None:
    place = tmp_path_factory.mktemp("export")
    both = {
        f"layers.{i}.hidden_norm.weight": (drafts.H,) for i in range(1, shape["num_hidden_layers"])
    }  # as eyas saves them
    folder = drafts.write(place / "drafter", drafts.shape(taps, **shape), host, tensors=both)
    asked = engines.asked(engine)
    try:
        export(folder, asked, place / "out", target=host)
    except CannotExpress as refused:
        may = {"taps", "residual", "embedding", "attention_bias", "fc", "fc_norm", "layers", "feedback", "later_norm"}
        if {row.fact for row in refused.facts} <= may:
            return
        raise
    shown = show(place / "out", [asked], target=host)
    for wiring in shown.engines:
        assert wiring.taps == tuple(taps)
    assert not shown.miswired
