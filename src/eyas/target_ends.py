"""Embedding, final norm and head of a target, read by name out of its safetensors: no other tensor, no code of its.

Of a checkpoint in shards only those that hold the three are opened; the others may be absent.

Letters: D target width, V target vocabulary, G groups of a quantised row.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import CheckpointError, TargetError
from eyas.inventory.safetensors_header import read_header
from eyas.widened import BIG, Widened, narrow

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 200_000_000
STACKS = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "language_model.",
    "transformer.",
    "",
)
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")
NORMS = ("norm", "final_layernorm", "ln_f")
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head", "model.language_model.lm_head")
ONE_PLUS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next")  # model types whose norm stores the gain minus 1
UNKNOWN_NORM = ("nemotron",)  # LayerNorm of 1 + w
TIED = ("gemma", "cohere")  # model types tied unless their config says otherwise
PARTS = ("weight_scale_inv", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}
FP8_BLOCK = (128, 128)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Norm(nn.Module):
    """RMSNorm, with the gain stored as it is or minus one: x / sqrt(mean x^2 + eps) * gain, in fp32."""

    def __init__(self, weight: Tensor, eps: float, plus: float) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = nn.Parameter(weight, requires_grad=False), eps, plus

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.plus:  # Gemma multiplies in fp32 and rounds once, Llama rounds before it multiplies
            return (unit * (self.weight.float() + self.plus)).to(states.dtype)
        return self.weight * unit.to(states.dtype)


class Stack(nn.Module):
    """The decoder without its layers."""

    def __init__(self, embedding: nn.Embedding, norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embedding, nn.ModuleList(), norm


class Ends(nn.Module):
    """What a ``Target`` asks of a model that cannot run."""

    def __init__(self, stack: Stack, head: nn.Linear) -> None:
        super().__init__()
        self.model, self.lm_head = stack, head

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


def text_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and the part of it that describes the text model."""
    whole = _json(folder / "config.json")
    nested = whole.get("text_config") or whole.get("llm_config") or whole.get("language_config")
    text = dict(nested) if isinstance(nested, Mapping) else dict(whole)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if type(text.get(name)) is not int or text[name] < 1:
            raise TargetError(
                f"{folder / 'config.json'} gives {name} as {text.get(name)!r}, a whole number from 1 was expected.",
                way_out="Fetch the target's config.json again.",
            )
    text.setdefault("max_position_embeddings", 0)
    return whole, text


def read(folder: Path, dtype: torch.dtype) -> tuple[Ends, SimpleNamespace]:
    """The three in ``dtype``, and the text configuration. Memory: embedding and head in fp32 one after the other.

    Raises TargetError for a shard or name that is not there, a quantisation not known here, a shape that does not
    fit, or values that are no numbers.
    """
    whole, text = text_config(folder)
    where = locate(folder)
    width, rows = text["hidden_size"], text["vocab_size"]
    embedding_name = _named(where, [f"{s}{e}" for s in STACKS for e in EMBEDDINGS], "embedding", folder)
    stack = embedding_name.rpartition(".")[0]
    norms = [f"{stack}.{n}" if stack else n for n in NORMS]
    norm_name = _named(where, norms, "final norm", folder)
    quantisation = whole.get("quantization_config") or text.get("quantization_config") or {}
    embedding = _as(_weight(folder, where, embedding_name, quantisation), dtype)
    tied = whole.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None:  # a config leaves out what is its class's default
        tied = str(text.get("model_type", "")).startswith(TIED)
    head = embedding
    if not tied or any(f"{h}.weight" in where or f"{h}.weight_packed" in where for h in HEADS):
        head_name = _named(where, list(HEADS), "head", folder)
        head = embedding if tied else _as(_weight(folder, where, head_name, quantisation), dtype)
    gain = _weight(folder, where, norm_name, {}).to(dtype)
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tensor.ndim != 2 or tensor.shape[1] != width or tensor.shape[0] < rows:
            raise _misfit(folder, name, tensor, f"[{rows}, {width}]")
    if tuple(gain.shape) != (width,):
        raise _misfit(folder, "final norm", gain, f"[{width}]")
    bias = _tensor(folder, where, f"{norm_name}.bias").to(dtype) if f"{norm_name}.bias" in where else None
    linear = Widened(head) if head.dtype != dtype else nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(head, requires_grad=False)
    table = nn.Embedding(embedding.shape[0], width, _weight=embedding, _freeze=True)
    if head is embedding:
        linear.weight = table.weight
    name = str((whole.get("architectures") or ["Ends"])[0])
    kind = type(name, (Ends,), {})  # its class name is the target's architecture
    return kind(Stack(table, _norm(folder, text, gain, bias)), linear).eval(), SimpleNamespace(**text)


def _as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In ``dtype``, unless that is fp32 and would take gigabytes: then as narrow as it is stored, widened as it is
    used."""
    return weight if dtype == torch.float32 and narrow(weight) and 4 * weight.numel() > BIG else weight.to(dtype)


def _norm(folder: Path, text: Mapping[str, Any], gain: Tensor, bias: Tensor | None) -> nn.Module:
    kind = str(text.get("model_type", ""))
    rms = text.get("rms_norm_eps")
    if kind in UNKNOWN_NORM or (rms is None and not any(k.startswith("layer_norm_eps") for k in text)):
        raise TargetError(
            f"What the final norm of {folder} computes is not known: model_type {kind!r} gives no rms_norm_eps or "
            "layer_norm_eps that is known here.",
            way_out="Use a transformers version that knows this architecture, with every shard there.",
        )
    if rms is not None and bias is None:
        return Norm(gain, float(rms), 1.0 if kind in ONE_PLUS else 0.0)
    eps = text.get("layer_norm_eps", text.get("layer_norm_epsilon", rms))
    norm = nn.LayerNorm(len(gain), eps=float(eps), dtype=gain.dtype)
    norm.weight.data.copy_(gain)
    norm.bias.data.copy_(bias if bias is not None else torch.zeros_like(gain))
    return norm.requires_grad_(False)


def locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index or from the header of the single file."""
    if (folder / INDEX).is_file():
        found = _json(folder / INDEX).get("weight_map")
        if not isinstance(found, dict) or not all(
            isinstance(v, str) and v == Path(v).name and v.endswith(".safetensors") for v in found.values()
        ):
            raise TargetError(
                f"{folder / INDEX} has no weight_map of tensor names to safetensors files beside it.",
                way_out="Fetch it again.",
            )
        return found
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_header(folder / SINGLE), SINGLE)
    raise TargetError(
        f"{folder} has neither {INDEX} nor {SINGLE}.", way_out="Fetch the target in safetensors, with its index."
    )


def _named(where: Mapping[str, str], stems: list[str], what: str, folder: Path) -> str:
    for stem in stems:
        if f"{stem}.weight" in where or f"{stem}.weight_packed" in where:
            return stem
    near = [n for n in where if ".layers." not in n and ".h." not in n and "vision" not in n]
    raise TargetError(
        f"{folder} has no {what} under a name known here ({', '.join(stems[:3])}, …). Outside its layers it has: "
        f"{', '.join(sorted(near)[:12]) or 'nothing'}.",
        way_out="Report these names, or fetch the index again if it is cut short.",
    )


def _weight(folder: Path, where: Mapping[str, str], stem: str, quantisation: Mapping[str, Any]) -> Tensor:
    """The numbers of ``stem``.weight, whatever they are stored as."""
    parts = {p: _tensor(folder, where, f"{stem}.{p}") for p in PARTS if f"{stem}.{p}" in where}
    packed = f"{stem}.weight_packed" in where
    stored = _tensor(folder, where, f"{stem}.weight_packed" if packed else f"{stem}.weight")
    try:
        weight = _dequantised(stored, parts, packed, quantisation)
    except (ValueError, KeyError, RuntimeError) as error:
        have = ", ".join(f"{n} {t.dtype} {list(t.shape)}" for n, t in parts.items()) or "no scales"
        raise TargetError(
            f"{stem} of {folder} is quantised in a way not known here ({error}): {stored.dtype} "
            f"{list(stored.shape)} with {have}; quant_method {quantisation.get('quant_method')!r}.",
            way_out="Known: fp8 with block, channel or tensor scales, int8, and int4 packed by compressed-tensors.",
        ) from error
    # row blocks: a mask of the whole would be a copy of it
    if not all(bool(torch.isfinite(b).all()) for b in torch.split(weight, 8192)):
        raise TargetError(f"{stem} of {folder} holds NaN or infinite values.", way_out="Fetch its shard again.")
    if weight is stored and stored.nbytes > BIG:  # mapped anew, so that what was looked through is not held
        return _tensor(folder, where, f"{stem}.weight")
    return weight


def _dequantised(stored: Tensor, parts: Mapping[str, Tensor], packed: bool, said: Mapping[str, Any]) -> Tensor:
    if "weight_g_idx" in parts:
        raise ValueError("groups in activation order")
    if packed:
        return unpack_int4(
            stored, parts["weight_scale"], parts["weight_shape"].tolist(), parts.get("weight_zero_point")
        )
    if stored.dtype in FLOATS:
        if parts:
            raise ValueError("scales beside plain floats")
        return stored
    if stored.dtype not in (*FP8, torch.int8):
        raise ValueError(f"values of {stored.dtype}")
    if (blocks := parts.get("weight_scale_inv")) is not None and blocks.ndim == 2:
        size = said.get("weight_block_size") or FP8_BLOCK
        return by_blocks(stored, blocks, (int(size[0]), int(size[1])))
    scale = parts.get("weight_scale", blocks)
    if scale is None:
        raise ValueError("no scale")
    scale = scale.float()
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.numel() == len(stored):
        scale = scale.reshape(-1, 1)
    else:
        raise ValueError(f"scales {list(scale.shape)} for {list(stored.shape)}")
    values = stored.float()
    if (zero := parts.get("weight_zero_point")) is not None:
        values -= zero.float().reshape(-1, 1)
    return values.mul_(scale)


def by_blocks(stored: Tensor, scales: Tensor, size: tuple[int, int]) -> Tensor:
    """fp8 [V, D] times one scale a block; the last block of a row or column may be cut. As DeepSeek-V3 stores it."""
    expected = (math.ceil(stored.shape[0] / size[0]), math.ceil(stored.shape[1] / size[1]))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales {list(scales.shape)}, {list(expected)} expected for blocks of {list(size)}")
    values = stored.float()
    for i, row in enumerate(scales.float()):
        values[i * size[0] : (i + 1) * size[0]] *= row.repeat_interleave(size[1])[: stored.shape[1]]
    return values


def unpack_int4(packed: Tensor, scales: Tensor, shape: list[int], zeros: Tensor | None) -> Tensor:
    """int32 [V, D/8], lowest four bits first, stored plus eight; scales [V, G] -> [V, D].

    Zero points are packed the same way, but down the rows: [V/8, G].
    """
    rows, columns = shape
    if packed.dtype != torch.int32 or tuple(packed.shape) != (rows, math.ceil(columns / 8)):
        raise ValueError(f"packed {packed.dtype} {list(packed.shape)} for weight_shape {shape}, int4 expected")
    groups = scales.shape[-1]
    if tuple(scales.shape) != (rows, groups) or columns % groups:
        raise ValueError(f"scales {list(scales.shape)} for weight_shape {shape}")
    values = _nibbles(packed)[:, :columns]
    if zeros is None:
        values = values - 8
    else:
        if zeros.dtype != torch.int32 or tuple(zeros.shape) != (math.ceil(rows / 8), groups):
            raise ValueError(f"zero points {zeros.dtype} {list(zeros.shape)}, int32 packed down the rows expected")
        unpacked = _nibbles(zeros.T.contiguous()).T[:rows]
        values = values - unpacked.repeat_interleave(columns // groups, dim=1)
    return values.float().mul_(scales.float().repeat_interleave(columns // groups, dim=1))


def _nibbles(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.int8).flatten(-2)


def _tensor(folder: Path, where: Mapping[str, str], name: str) -> Tensor:
    path = folder / where[name]
    if not path.is_file():
        raise TargetError(
            f"{path}, which holds {name}, is not there.", way_out="Fetch this shard; those of the layers may stay away."
        )
    if name not in _header(path):
        raise TargetError(
            f"{path} has no {name}, though the index places it there.", way_out="Fetch index and shard again."
        )
    return _bytes_of(path, name)


def _bytes_of(path: Path, name: str) -> Tensor:
    """One tensor, its bytes alone read: mapping the whole shard fails where memory may not be overcommitted. A big one
    is mapped by itself, for reading only: of an embedding few rows are ever asked for."""
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(length))[name]
        if entry["dtype"] not in DTYPES:
            raise TargetError(f"{name} in {path} is of dtype {entry['dtype']}.", way_out=f"Known: {', '.join(DTYPES)}.")
        begin, end = entry["data_offsets"]
        begin, end = begin + 8 + length, end + 8 + length
        dtype = DTYPES[entry["dtype"]]
        if end - begin <= BIG:
            handle.seek(begin)
            return torch.frombuffer(bytearray(handle.read(end - begin)), dtype=dtype).reshape(entry["shape"])
        first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(handle.fileno(), end - first, access=mmap.ACCESS_READ, offset=first)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes to a target
        return torch.frombuffer(mapped, dtype=dtype, offset=begin - first).reshape(entry["shape"])


def _header(path: Path) -> Mapping[str, object]:
    try:
        return read_header(path, path.name)[0]
    except CheckpointError as error:
        raise TargetError(error.message, way_out=error.way_out) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} cannot be read: {error}.", way_out="Fetch it again.") from error


def _misfit(folder: Path, what: str, tensor: Tensor, expected: str) -> TargetError:
    return TargetError(
        f"The {what} of {folder} is {list(tensor.shape)}, {expected} was expected by its config.json.",
        way_out="Fetch config.json and weights of one and the same target.",
    )
