"""The ends of a target read by name: against the whole model, and each number format against a decoder of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from eyas import target as targets
from eyas import target_ends
from eyas.errors import TargetError
from eyas.target import Target


def sharded(folder: Path, kind: str) -> Target:
    model = tiny.model(kind)
    model.save_pretrained(folder, max_shard_size="20KB")
    return Target(str(folder), folder, model, None, model.config.get_text_config())


def drop_layers(folder: Path) -> None:
    """Remove every shard that holds nothing but layers."""
    where = json.loads((folder / target_ends.INDEX).read_text())["weight_map"]
    keep = {f for n, f in where.items() if ".layers." not in n}
    gone = set(where.values()) - keep
    assert gone
    for file in gone:
        (folder / file).unlink()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_ends_are_those_of_the_whole_target_though_the_layers_are_absent(kind: str, tmp_path: Path) -> None:
    whole = sharded(tmp_path, kind)
    drop_layers(tmp_path)
    ends = targets.load_ends(str(tmp_path))
    assert ends.ends_only
    assert ends.identity() == whole.identity()
    states = torch.randn(3, 7, whole.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.norm(states), whole.norm(states))
    assert torch.equal(ends.logits(ends.norm(states)), whole.logits(whole.norm(states)))
    torch.testing.assert_close(ends.norm_gain, whole.norm_gain)


def test_an_architecture_nobody_knows_in_a_wrapper_and_none_of_its_code(tmp_path: Path) -> None:
    whole = sharded(tmp_path / "a", "llama")
    folder = tmp_path / "b"
    folder.mkdir()
    config = json.loads((tmp_path / "a/config.json").read_text())
    outer = {"model_type": "nobody", "architectures": ["LlamaForCausalLM"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer | {"auto_map": {"AutoConfig": "evil.Config"}}))
    (folder / "evil.py").write_text("raise SystemExit(3)")
    tensors = {}
    for file in (tmp_path / "a").glob("*.safetensors"):
        tensors |= load_file(file)
    save_file({f"language_model.{n}": t for n, t in tensors.items()}, folder / "model.safetensors")
    assert targets.load_ends(str(folder)).identity() == whole.identity()


def test_missing_shard_and_missing_name_are_said(tmp_path: Path) -> None:
    sharded(tmp_path, "llama")
    drop_layers(tmp_path)
    index = json.loads((tmp_path / target_ends.INDEX).read_text())
    file = tmp_path / index["weight_map"]["lm_head.weight"]
    shutil.move(file, tmp_path / "away")
    with pytest.raises(TargetError, match=r"holds lm_head.weight, is not there"):
        targets.load_ends(str(tmp_path))
    del index["weight_map"]["lm_head.weight"]
    (tmp_path / target_ends.INDEX).write_text(json.dumps(index))
    with pytest.raises(TargetError, match=r"no head .* model.norm.weight"):
        targets.load_ends(str(tmp_path))


def test_blocks_against_every_element() -> None:
    stored = torch.randn(150, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    found = target_ends.by_blocks(stored, scales, (128, 128))
    wide = stored.float()
    expected = torch.tensor([[wide[i, j] * scales[i // 128, j // 128] for j in range(200)] for i in range(150)])
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="expected for blocks"):
        target_ends.by_blocks(stored, scales[:1], (128, 128))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_against_every_element(asymmetric: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (16, 64), generator=generator)
    zeros = torch.randint(0, 16, (16, 2), generator=generator) if asymmetric else torch.full((16, 2), 8)
    scales = torch.rand(16, 2, generator=generator)

    def word(eight: list[int]) -> int:
        unsigned = sum(v << (4 * i) for i, v in enumerate(eight))
        return unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned

    packed = torch.tensor(
        [[word(row[i : i + 8]) for i in range(0, 64, 8)] for row in values.tolist()], dtype=torch.int32
    )
    down = torch.tensor([[word(c[i : i + 8]) for c in zeros.T.tolist()] for i in range(0, 16, 8)], dtype=torch.int32)
    found = target_ends.unpack_int4(packed, scales, [16, 64], down if asymmetric else None)
    expected = [[(values[i, j] - zeros[i, j // 32]) * scales[i, j // 32] for j in range(64)] for i in range(16)]
    assert torch.equal(found, torch.tensor(expected))


def quantised(folder: Path, stem: str, parts: dict[str, torch.Tensor], method: str = "any") -> None:
    """``stem`` of the target in ``folder`` stored as ``parts``, all else in one file."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / target_ends.INDEX).unlink(missing_ok=True)
    del tensors[f"{stem}.weight"]
    save_file(tensors | {f"{stem}.{n}": t for n, t in parts.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize("scales", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_head_is_its_values_times_its_scales(tmp_path: Path, scales: str, dtype: torch.dtype) -> None:
    whole = sharded(tmp_path, "llama")
    stored = (torch.randn(whole.vocab_size, whole.hidden_size) * 20).to(dtype)
    scale = torch.rand(whole.vocab_size, 1) + 0.1 if scales == "channel" else torch.tensor(0.3)
    quantised(tmp_path, "lm_head", {"weight": stored, "weight_scale": scale})
    assert torch.equal(targets.load_ends(str(tmp_path)).head_weight, stored.float() * scale)


def test_unknown_numbers_and_nan_are_said(tmp_path: Path) -> None:
    whole = sharded(tmp_path, "llama")
    words = torch.zeros(whole.vocab_size, 6, dtype=torch.int32)
    quantised(tmp_path, "lm_head", {"weight": words}, "exotic")
    with pytest.raises(TargetError, match=r"lm_head .*int32.* 'exotic'"):
        targets.load_ends(str(tmp_path))
    quantised(tmp_path, "lm_head", {"weight": torch.full((whole.vocab_size, whole.hidden_size), torch.nan)})
    with pytest.raises(TargetError, match=r"lm_head .* holds NaN"):
        targets.load_ends(str(tmp_path))
    quantised(tmp_path, "lm_head", {"weight": torch.zeros(whole.vocab_size - 1, whole.hidden_size)})
    with pytest.raises(TargetError, match=r"head .* \[210, 48\], \[211, 48\] was expected"):
        targets.load_ends(str(tmp_path))


def test_a_layer_of_terabytes_in_the_same_shard_is_not_read(tmp_path: Path) -> None:
    """The shard is a sparse file whose layer could not be held in memory."""
    whole = sharded(tmp_path, "llama")
    huge = 1 << 36
    entries: dict[str, dict[str, object]] = {}
    data = b""
    for name, tensor in whole.model.state_dict().items():
        if ".layers." not in name:
            raw = tensor.numpy().tobytes()
            entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data + raw)]}
            data += raw
    ends = [len(data), len(data) + huge]
    entries["model.layers.0.mlp.up_proj.weight"] = {"dtype": "U8", "shape": [huge], "data_offsets": ends}
    header = json.dumps(entries).encode()
    for file in tmp_path.glob("model*"):
        file.unlink()
    with open(tmp_path / "model.safetensors", "wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header + data)
        handle.truncate(8 + len(header) + ends[1])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nobody"}))
    assert targets.load_ends(str(tmp_path)).fingerprint() == whole.fingerprint()
