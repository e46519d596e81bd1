"""A drafter as a GGUF file that llama.cpp loads, and such a file read back.

Key-values are the dialect's (``dialects/llama_cpp.write``), tensors keep the bits of the source; vectors become fp32,
as llama.cpp keeps its norms. Two things are not as in the source: rows of q_proj and k_proj, since llama.cpp turns
pairs of neighbours where Hugging Face turns halves, and d2t, which holds target ids.

    row of a head in a folder    0 1 … E/2-1 | E/2 … E-1          turned together: i and i + E/2
    the same in a GGUF           0 E/2 1 E/2+1 …                  turned together: 2i and 2i + 1

llama.cpp refuses a file without a tokenizer, and the drafter's is the target's: its keys are copied from the target's
GGUF, or made from its tokenizer.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from eyas import checkpoint, files, provenance, vocab
from eyas.checkpoint import Checkpoint
from eyas.contract import Contract
from eyas.dialects import llama_cpp
from eyas.dialects.wiring import Files, Launch, TargetFacts
from eyas.errors import CheckpointError, EnvironmentFault, TargetError
from eyas.inventory import TensorInfo
from eyas.inventory.json_file import json_object

Array = np.ndarray[Any, Any]

TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.int64: gguf.GGMLQuantizationType.I64,
}
KeyValue = tuple[str, Any, gguf.GGUFValueType, gguf.GGUFValueType | None]
UNUSED, NORMAL, CONTROL, USER_DEFINED = (
    gguf.TokenType.UNUSED,
    gguf.TokenType.NORMAL,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
)


def write(source: Path, out: Path, contract: Contract, target: TargetFacts, launch: Launch, tokenizer: Path) -> None:
    """The drafter in ``source`` as the file ``out``, wired by llama.cpp as ``contract`` says; whole or not at all.

    ``tokenizer``: the target's GGUF, or the folder with its tokenizer.json. Raises CannotExpress where llama.cpp has no
    place for a fact, CheckpointError where the source is broken, TargetError where the tokenizer cannot be carried
    over. What was written is read back and compared before it takes its name.
    """
    drafter = checkpoint.read(source)
    if drafter.shape.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{source} counts {drafter.shape.vocab_size} target tokens; the target has {target.vocab_size}.",
            way_out="Name the target that this drafter was trained on.",
        )
    fields = llama_cpp.write(contract, drafter.config, target, launch)
    del fields["tokenizer.ggml.model"]
    fields |= _provenance(drafter, contract, launch)
    tensors = tensors_for(drafter, fields, contract)
    words = tokenizer_keys(tokenizer, target.vocab_size)
    with files.written_whole(out) as temporary:
        write_file(temporary, fields, tensors, words)
        _compare(temporary, fields, tensors)


def write_file(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], words: Iterable[KeyValue]) -> None:
    """The file itself, unasked: ``fields``, the tokenizer's keys ``words``, ``tensors``."""
    writer = gguf.GGUFWriter(path, llama_cpp.ARCH)
    try:
        for key, value in fields.items():
            if key != llama_cpp.IS_GGUF:  # the writer's own
                _add(writer, key, value)
        for key, value, kind, of in words:
            writer.add_key_value(key, value, kind, of)
        for name, tensor in tensors.items():
            writer.add_tensor(name, _bits(tensor), raw_shape=tuple(tensor.shape), raw_dtype=TYPES[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


# -- what is written --------------------------------------------------------------------------------------------------


def tensors_for(drafter: Checkpoint, fields: Mapping[str, Any], contract: Contract) -> dict[str, Tensor]:
    """Tensors by llama.cpp's names: what its loader makes, no more and no less."""
    held = checkpoint.read_tensors(drafter)
    shape = drafter.shape
    wanted = checkpoint.expected_shapes(shape)
    made = {}
    for ours, theirs in llama_cpp.TENSORS.items():
        if ours not in wanted or ours == "d2t":
            continue
        if ours not in held or tuple(held[ours].shape) != wanted[ours]:
            is_there = list(held[ours].shape) if ours in held else "missing"
            raise CheckpointError(
                f"{drafter.folder}: {ours} is {is_there}; {list(wanted[ours])} was expected.",
                way_out="Run `eyas check` on it first.",
            )
        tensor = held[ours] if held[ours].dtype in TYPES else held[ours].float()
        made[theirs] = tensor.float() if tensor.ndim == 1 else tensor
    for part, heads in (("q", shape.num_attention_heads), ("k", shape.num_key_value_heads)):
        name = f"blk.0.attn_{part}.weight"
        made[name] = neighbours(made[name], heads)
    if "d2t" in held and shape.draft_vocab_size < shape.vocab_size:
        made["d2t"] = vocab.from_checkpoint(held["d2t"], held.get("t2d"), shape.vocab_size).ids.to(torch.int64)
    if "eyas.rope.rope_type" in fields:
        made[llama_cpp.ROPE_FREQS] = rope_factors(contract, drafter)
    return {name: tensor.contiguous() for name, tensor in made.items()}


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * E, ...] from halves to pairs: row i + E/2 comes behind row i."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halves(rows: Tensor, heads: int) -> Tensor:
    """The way back."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def rope_factors(contract: Contract, drafter: Checkpoint) -> Tensor:
    """llama3's rope as llama.cpp wants it: by how much each frequency [E / 2] is divided."""
    known = contract.facts.get("rope")
    turns = known.value if known is not None else drafter.shape.rope_parameters
    width, base = drafter.shape.head_dim, float(turns["rope_theta"])
    low, high = float(turns["low_freq_factor"]), float(turns["high_freq_factor"])
    factor, original = float(turns["factor"]), float(turns["original_max_position_embeddings"])
    factors = []
    for i in range(0, width, 2):
        turned = original * base ** (-i / width) / (2 * math.pi)  # how often in the original length
        share = min(max((turned - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - share) / factor + share))
    return torch.tensor(factors, dtype=torch.float32)


def _provenance(drafter: Checkpoint, contract: Contract, launch: Launch) -> dict[str, Any]:
    made = provenance.collect({"checkpoint": drafter.folder, "to": f"{llama_cpp.NAME}=={launch.version}"})
    return {
        "general.name": drafter.folder.resolve().name,
        "eyas.provenance": json.dumps(made, ensure_ascii=False),
        "eyas.contract": json.dumps(contract.to_json(), ensure_ascii=False),
        "eyas.source_sha256": json.dumps(
            {
                file: provenance.sha256_file(drafter.folder / file)
                for file in sorted({t.file for t in drafter.inventory.tensors.values()} | {"config.json"})
            }
        ),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list | tuple):
        writer.add_array(key, list(value))
    else:
        writer.add_string(key, value)


def _bits(tensor: Tensor) -> Array:
    """The tensor's bytes as the writer takes them."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.view(np.uint16) if tensor.dtype == torch.bfloat16 else array


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def tokenizer_keys(path: Path, size: int) -> list[KeyValue]:
    """The keys of the target's tokenizer, of ``size`` tokens: name, value, type, type of an array's entries."""
    if path.is_dir():
        return list(_of_folder(path, size))
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"{path} is no GGUF file ({error}).",
            way_out="Name the target's GGUF, or the folder with its tokenizer.json.",
        ) from error
    found = []
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            kinds = [*field.types, None]
            found.append((key, field.contents(), kinds[0], kinds[1]))
    tokens = next((len(value) for key, value, *_ in found if key == "tokenizer.ggml.tokens"), 0)
    if tokens != size:
        raise TargetError(
            f"{path} has {tokens} tokens; the drafter's target has {size}.",
            way_out="Name the GGUF of the target that this drafter was trained on.",
        )
    return found


def _of_folder(folder: Path, size: int) -> Iterator[KeyValue]:
    """Keys of a byte-level BPE tokenizer. Of how text is split before merging nothing is said, and llama.cpp warns of
    it: the drafter is handed tokens, never text."""
    spec = json_object(folder / "tokenizer.json")
    model = spec.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("byte_fallback") or not model["merges"]:
        raise TargetError(
            f"{folder}: its tokenizer is no byte-level BPE, the only kind written here.",
            way_out="Convert the target with llama.cpp first and name its GGUF: the tokenizer is copied from there.",
        )
    tokens = {index: (text, NORMAL) for text, index in model["vocab"].items()}
    for added in spec.get("added_tokens", ()):
        tokens[added["id"]] = (added["content"], CONTROL if added.get("special") else USER_DEFINED)
    if tokens and max(tokens) >= size:
        raise TargetError(
            f"{folder}: its tokenizer has a token {max(tokens)}; the drafter's target has {size} tokens.",
            way_out="Name the folder of the target that this drafter was trained on.",
        )
    every = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    string, array, int32 = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
    yield "tokenizer.ggml.model", "gpt2", string, None
    yield "tokenizer.ggml.tokens", [text for text, _ in every], array, string
    yield "tokenizer.ggml.token_type", [int(kind) for _, kind in every], array, int32
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    yield "tokenizer.ggml.merges", merges, array, string
    special = gguf.SpecialVocab(folder, load_merges=False, n_vocab=size)
    for name, index in special.special_token_ids.items():
        yield f"tokenizer.ggml.{name}_token_id", index, gguf.GGUFValueType.UINT32, None


# -- reading back -----------------------------------------------------------------------------------------------------


def read(path: Path) -> Files:
    """A GGUF as its key-values and headers, the tokenizer's lists left out: what ``llama_cpp.wire`` is asked about."""
    reader = _reader(path)
    config = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith(("tokenizer.", "GGUF.")) or key == "tokenizer.ggml.model"
    }
    tensors = {
        t.name: TensorInfo(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), path.name)
        for t in reader.tensors
    }
    return Files(config, tensors)


def _reader(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is no GGUF file ({error}).", way_out="Fetch or write it again.") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a GGUF written here, by its name there and with its bits."""
    found = {}
    kinds = {kind: dtype for dtype, kind in TYPES.items()}
    for tensor in _reader(path).tensors:
        dtype = kinds.get(tensor.tensor_type)
        if dtype is None:
            raise CheckpointError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}; only whole types are read.",
                way_out="Name the file as it was before it was quantised.",
            )
        data = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.uint8).copy()).view(-1)
        found[tensor.name] = data.view(dtype).reshape([int(n) for n in reversed(tensor.shape)])
    return found


def _compare(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The file on the disk says what was meant, tensor by tensor and key by key."""
    back, held = read_tensors(path), read(path).config
    other = [
        n for n in back.keys() | tensors.keys() if n not in back or n not in tensors or not _same(back[n], tensors[n])
    ]
    other += [key for key, value in fields.items() if not _told(held.get(key), value)]
    if other:
        raise EnvironmentFault(
            f"{path} was read back otherwise than written: {', '.join(sorted(other)[:6])}.",
            way_out="Check the disk and the installed gguf package, and run the same command again.",
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _told(there: Any, meant: Any) -> bool:
    if isinstance(meant, float) and isinstance(there, float):
        return llama_cpp.short(there) == llama_cpp.short(meant)
    return bool(there == (list(meant) if isinstance(meant, tuple) else meant))


def source_tensors(path: Path, heads: int, key_value_heads: int) -> dict[str, Tensor]:
    """The tensors of a GGUF under our names, q and k with halves again."""
    theirs = {name: ours for ours, name in llama_cpp.TENSORS.items()}
    found = {theirs[name]: tensor for name, tensor in read_tensors(path).items() if name in theirs}
    for part, count in (("q", heads), ("k", key_value_heads)):
        name = f"midlayer.self_attn.{part}_proj.weight"
        found[name] = halves(found[name], count)
    return found
