"""A GGUF is the drafter it was made of: read back, turned back and compared; and what llama.cpp's own loader said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny
from eyas import checkpoint, gguf_export
from eyas.contract import Contract, declared
from eyas.dialects import llama_cpp
from eyas.dialects.wiring import CannotExpress, Files, Launch, TargetFacts
from eyas.drafter import Drafter
from eyas.errors import CheckpointError, EnvironmentFault, TargetError
from eyas.inventory import TensorInfo
from test_checkpoint import edit_weights, speaks

torch.set_num_threads(1)

LAUNCH = Launch(Version(llama_cpp.VERSIONS[-1]))
TARGET = TargetFacts("LlamaForCausalLM", 5, 48, tiny.VOCAB)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SAID = json.loads((Path(__file__).parent / "fixtures" / "engines" / "llama_cpp.json").read_text())


def contract_for(drafter: Drafter) -> Contract:
    shape = drafter.config
    return declared(
        taps=list(shape.taps),
        **shape.facts(),
        rope=shape.rope_parameters,
        max_positions=shape.max_position_embeddings,
        draft_vocab_size=shape.draft_vocab_size,
        target=tiny.target("llama").identity(),
    )


def write_tokenizer(folder: Path, size: int = tiny.VOCAB) -> Path:
    letters = [chr(i) for i in range(0x100, 0x100 + size - 1)]
    words = {text: i for i, text in enumerate([*letters, letters[0] + letters[1]])}
    Tokenizer(models.BPE(words, [(letters[0], letters[1])])).save(str(folder / "tokenizer.json"))
    return folder


def exported(
    folder: Path, drafter: Drafter, *, dtype: torch.dtype = torch.bfloat16, tokenizer: Path | None = None
) -> Path:
    checkpoint.save(drafter, folder / "d", contract_for(drafter), {}, dtype=dtype)
    tokenizer = tokenizer or write_tokenizer(folder)
    gguf_export.write(folder / "d", folder / "d.gguf", contract_for(drafter), TARGET, LAUNCH, tokenizer)
    return folder / "d.gguf"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", ["usual", "norm_before_fc", "norm_before_residual", "own_embedding"])
def test_every_tensor_comes_back(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    drafter = tiny.drafter("llama", **tiny.SHAPES[shape])
    path = exported(tmp_path, drafter, dtype=dtype)
    source = load_file(tmp_path / "d" / "model.safetensors")
    back = gguf_export.source_tensors(path, 4, 2)
    assert back.keys() == source.keys() - {"t2d"}
    ids = source.pop("d2t") + torch.arange(tiny.DRAFT_VOCAB)
    assert torch.equal(back.pop("d2t"), ids)
    for name, tensor in back.items():
        wanted = source[name].float() if tensor.ndim == 1 else source[name]
        assert tensor.dtype == wanted.dtype, name
        assert torch.equal(tensor, wanted), name
    files = gguf_export.read(path)
    assert files.tensors is not None
    assert {n: t.shape for n, t in files.tensors.items()} == {
        n: tuple(t.shape) for n, t in gguf_export.read_tensors(path).items()
    }
    wired = llama_cpp.wire(files, TARGET, LAUNCH)
    assert list(contract_for(drafter).differences(wired.facts)) == []
    assert set(wired.facts) >= {"taps", "residual", "fc_norm", "rope", "embedding", "head", "draft_vocab_size"}
    assert wired.refusals == ()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["d", "d.gguf", "tokenizer.json"]


def test_pairs_of_neighbours_turned_are_halves_turned(tmp_path: Path) -> None:
    """Queries of the permuted rows under llama.cpp's rope are those of the source under ours, row by row."""
    drafter = tiny.drafter("llama")
    held = gguf_export.read_tensors(exported(tmp_path, drafter, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)
    mixed, positions = torch.randn(1, 7, 96, generator=generator), torch.arange(3, 10)[None]
    ours = drafter.queries(mixed, positions)[0]  # [N, S, E]
    rows = (mixed[0] @ held["blk.0.attn_q.weight"].T).view(7, 4, 6, 2).transpose(0, 1)  # [N, S, pair, 2]
    angles = positions[0, :, None] * 10000.0 ** (-torch.arange(6) / 6)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((rows[..., 0] * cos - rows[..., 1] * sin, rows[..., 1] * cos + rows[..., 0] * sin), -1)
    assert torch.allclose(torch.cat((turned[..., 0], turned[..., 1]), -1), ours, atol=1e-4)
    unpermuted = (mixed[0] @ drafter.midlayer.self_attn.q_proj.weight.T).view(7, 4, 6, 2).transpose(0, 1)
    assert not torch.allclose(unpermuted, rows, atol=0.1)


def test_what_was_read_back_is_the_same_drafter(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama", norm_before_fc=True)
    back = gguf_export.source_tensors(exported(tmp_path, drafter, dtype=torch.float32), 4, 2)
    ids = back.pop("d2t")
    other = tiny.drafter("llama", seed=5, norm_before_fc=True)
    other.load_state_dict(back, strict=True)
    assert torch.equal(ids, drafter.vocab.ids)
    assert torch.equal(speaks(other), speaks(drafter))


def test_llama3_lies_in_factors(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama", rope_parameters=LLAMA3)
    path = exported(tmp_path, drafter)
    factors = gguf_export.read_tensors(path)["rope_freqs.weight"]
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](drafter.config.as_llama(), torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 12, 2) / 12)
    assert torch.allclose(plain / factors, theirs, rtol=1e-5)
    assert 1.0 < float(factors.max()) <= 8.0
    assert llama_cpp.wire(gguf_export.read(path), TARGET, LAUNCH).facts["rope"] == LLAMA3


def test_provenance_travels_and_the_contract_with_it(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    held = gguf_export.read(exported(tmp_path, drafter)).config
    assert json.loads(held["eyas.contract"]) == contract_for(drafter).to_json()
    hashes = json.loads(held["eyas.source_sha256"])
    assert set(hashes) == {"config.json", "model.safetensors"}
    assert hashes["model.safetensors"] == checkpoint.read(tmp_path / "d").weights_sha256
    assert "llama.cpp==0.5.0" in held["eyas.provenance"]
    assert str(tmp_path) not in json.dumps(held)
    assert held["eagle3.target_layers"] == held["eagle3.extract_layers"] == [1, 2, 4]


def test_the_tokenizer_of_a_targets_gguf_is_copied(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    first = exported(tmp_path, drafter)
    (tmp_path / "two").mkdir()
    second = exported(tmp_path / "two", drafter, tokenizer=first)
    assert gguf_export.tokenizer_keys(first, tiny.VOCAB) == gguf_export.tokenizer_keys(second, tiny.VOCAB)
    assert gguf_export.tokenizer_keys(second, tiny.VOCAB) == gguf_export.tokenizer_keys(tmp_path, tiny.VOCAB)


def test_tokenizers_that_do_not_fit(tmp_path: Path) -> None:
    path = exported(tmp_path, tiny.drafter("llama"))
    with pytest.raises(TargetError, match="has 211 tokens; the drafter's target has 300"):
        gguf_export.tokenizer_keys(path, 300)
    with pytest.raises(TargetError, match="has a token 210; the drafter's target has 200"):
        gguf_export.tokenizer_keys(tmp_path, 200)
    with pytest.raises(TargetError, match="is no GGUF file"):
        gguf_export.tokenizer_keys(tmp_path / "tokenizer.json", 211)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        gguf_export.tokenizer_keys(tmp_path / "d", 211)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["byte_fallback"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TargetError, match="no byte-level BPE"):
        gguf_export.tokenizer_keys(tmp_path, 211)


@pytest.mark.parametrize(
    ("choices", "fact"),
    [
        ({"norm_output": True}, "feedback"),
        ({"fc_norm": True}, "fc_norm"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm"),
        ({"qk_norm": True}, "qk_norm"),
        ({"taps": (1, 2)}, "taps"),
        ({"taps": (1, 2, 5)}, "taps"),
    ],
)
def test_what_has_no_place_writes_nothing(tmp_path: Path, choices: dict[str, Any], fact: str) -> None:
    with pytest.raises(CannotExpress) as caught:
        exported(tmp_path, tiny.drafter("llama", **choices))
    assert [lost.fact for lost in caught.value.facts] == [fact]
    assert not (tmp_path / "d.gguf").exists()


def test_a_source_that_is_broken_writes_nothing(tmp_path: Path) -> None:
    drafter = tiny.drafter("llama")
    path = exported(tmp_path, drafter)
    before = path.read_bytes()
    edit_weights(tmp_path / "d", lambda tensors: tensors.pop("midlayer.hidden_norm.weight"))
    with pytest.raises(CheckpointError, match=r"hidden_norm\.weight is missing; \[48\] was expected"):
        gguf_export.write(tmp_path / "d", path, contract_for(drafter), TARGET, LAUNCH, tmp_path)
    assert path.read_bytes() == before
    other = TargetFacts("LlamaForCausalLM", 5, 48, 999)
    with pytest.raises(CheckpointError, match="counts 211 target tokens; the target has 999"):
        gguf_export.write(tmp_path / "d", path, contract_for(drafter), other, LAUNCH, tmp_path)


def test_a_file_that_comes_back_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny.drafter("llama")
    kept = gguf_export._bits
    monkeypatch.setattr(gguf_export, "_bits", lambda tensor: kept(tensor) * (0 if tensor.shape == (48, 144) else 1))
    with pytest.raises(EnvironmentFault, match=r"read back otherwise than written: fc\.weight\. Check"):
        exported(tmp_path, drafter, dtype=torch.float32)
    assert not (tmp_path / "d.gguf").exists()


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUG" + bytes(100))
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        gguf_export.read(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        gguf_export.read(tmp_path / "gone.gguf")


# -- llama.cpp's own word ---------------------------------------------------------------------------------------------


def test_it_was_asked_about_what_can_be_written_and_what_is_broken() -> None:
    assert SAID["engine"].startswith(f"llama.cpp {llama_cpp.VERSIONS[-1]} ")
    assert sum(row["loaded"] for row in SAID["files"].values()) == 8
    assert sum(not row["loaded"] for row in SAID["files"].values()) == 7


@pytest.mark.parametrize("name", SAID["files"])
def test_it_loads_what_the_dialect_says_it_loads(name: str) -> None:
    row = SAID["files"][name]
    tensors = {n: TensorInfo(n, dtype, tuple(shape), "x.gguf") for n, (dtype, shape) in row["tensors"].items()}
    target = TargetFacts("LlamaForCausalLM", 5, 32, 320)
    refusals = llama_cpp.wire(Files(row["fields"], tensors), target, LAUNCH).refusals
    assert bool(refusals) is not row["loaded"], row["said"]
    assert all(refusal.when == "start" and refusal.source.basis == "executed" for refusal in refusals)
