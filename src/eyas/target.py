"""A target: the model being sped up, loaded through transformers, with the few parts a drafter leans on by name.

Letters: B batch, T positions, D target width, V target vocabulary, n decoder layers.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from eyas import placement, resolve, target_ends
from eyas.dialects.wiring import TargetFacts
from eyas.errors import TargetError, UsageError
from eyas.placement import DeviceMap, device_of, weight_of
from eyas.unpack import explained, materialise, quiet

PER_LAYER = ("layer_types", "mlp_layer_types")  # lists of a config that must be as long as it has layers


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
    ends_only: bool = False
    """Loaded without its decoder layers (``load_ends``): all is here but ``decoder``."""
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
    def device(self) -> torch.device:
        """Where token ids go in and all that is asked of the target comes out: where its head computes."""
        return device_of(self.head)

    @property
    def dtype(self) -> torch.dtype:
        """What states are computed in. A head too big for it may be held narrower (``widened``)."""
        has = any(True for _ in self.norm.parameters())
        return weight_of(self.norm if has else self.head).dtype

    @property
    def decoder(self) -> nn.Module:
        """The stack that owns ``embed_tokens``, ``layers`` and the final ``norm``."""
        if self.ends_only:
            raise UsageError(
                f"Target {self.spec!r} was loaded without its decoder layers, so it cannot run.",
                way_out="Load it whole, or use only stored states here.",
            )
        return decoder_of(self.model)

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        return decoder_of(self.model).norm  # type: ignore[return-value]

    @property
    def head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear)
        return head

    @property
    def head_weight(self) -> Tensor:
        """Rows of the head [V, D], also where accelerate keeps them elsewhere until the head runs."""
        return weight_of(self.head)

    @property
    def embedding(self) -> Tensor:
        """Raw rows [V, D]. Gemma scales them on the way in; a drafter norms them, so the scale is nothing to it."""
        return weight_of(self.model.get_input_embeddings())  # type: ignore[operator]

    @property
    def norm_gain(self) -> Tensor:
        """What the final norm multiplies a unit-RMS state by, [D] in fp32. Gemma stores the gain minus one."""
        unit = torch.ones(1, self.hidden_size, device=device_of(self.norm))
        with torch.no_grad():
            gain: Tensor = self.norm(unit)[0] * (1 + norm_eps(self.norm)) ** 0.5
            return gain.float().to(self.device)

    def logits(self, normed: Tensor, ids: Tensor | None = None) -> Tensor:
        """Final-normed states [..., D] -> logits [..., V] or of ``ids`` [W] alone, scale and soft cap included."""
        head = self.head
        if ids is None:
            logits: Tensor = head(normed)
        else:
            bias = None if head.bias is None else head.bias[ids].to(normed.dtype)
            logits = F.linear(normed, head.weight[ids].to(normed.dtype), bias)
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def eos_ids(self) -> frozenset[int]:
        return eos_ids(getattr(self.model, "generation_config", None), self.config, self.tokenizer)

    @property
    def facts(self) -> TargetFacts:
        return TargetFacts(self.architecture, self.num_layers, self.hidden_size, self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """Which target this is, as a contract and a store of states write it down."""
        return {
            "fingerprint": self.fingerprint(),
            "architecture": self.architecture,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    def fingerprint(self) -> str:
        """16 hex digits that change with the weights: shapes, 64 embedding rows and the final norm, read as bf16.

        Three tensors, so that a target too big to run can be identified too; bf16, so that the same weights loaded
        in fp32 and bf16 agree.
        """
        if not self._fingerprint:
            digest = hashlib.sha256(f"{self.num_layers}/{self.hidden_size}/{self.vocab_size}".encode())
            for rows in (self.embedding[:64], weight_of(self.norm)):
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


def load_text_side(spec: str, *, trust_remote_code: bool = False) -> TextSide:
    """Tokenizer and the few numbers that go with it."""
    place = materialise(resolve.target(spec))
    tokenizer = tokenizer_at(place, spec, trust_remote_code)
    if tokenizer is None:
        raise no_tokenizer(spec)
    with quiet(), explained(spec):
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code).get_text_config()
        try:
            generation = GenerationConfig.from_pretrained(place)
        except OSError:  # not every folder has one
            generation = None
    ends = eos_ids(generation, config, tokenizer)
    return TextSide(tokenizer, ends, int(config.vocab_size), int(config.max_position_embeddings))


def no_tokenizer(spec: str) -> TargetError:
    return TargetError(
        f"Target {spec!r} has no tokenizer files.",
        way_out="Put tokenizer.json and tokenizer_config.json beside it.",
    )


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


def load(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """A target by name, folder, GGUF file or hub id, ready to run.

    ``device_map`` (instead of ``device``) is accelerate's: "auto" and the like, or a dict of module to device, "cpu"
    or "disk". Raises TargetError, EnvironmentFault, or UsageError for a device that cannot be meant.
    """
    where = placement.require(device, device_map)
    source = resolve.target(spec)
    place = materialise(source)
    mapped = {} if device_map is None else {"device_map": device_map}
    with quiet(), explained(spec):
        model, told = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **mapped
        )
    require_whole(spec, told)
    if device_map is None:
        model = model.to(where)
    target = _target(source, place, model, model.config.get_text_config(), trust_remote_code)
    decoder_of(model)
    return target


def load_ends(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Target:
    """The same target without its decoder layers: embedding, final norm, head, configuration and tokenizer.

    A folder whose architecture transformers does not know, that is quantised, or that lacks shards is read by name
    (``target_ends``): only the shards that hold the three are opened and none of its code runs. Any other is read as
    a model of no layers at all, so transformers finds, renames, ties and casts the three as ever and no other tensor
    leaves the disk (of a hub id all files are fetched). Its ``decoder`` raises UsageError.
    """
    where = placement.require(device)
    source = resolve.target(spec)
    place = materialise(source)
    if not trust_remote_code and by_name(Path(place)):
        ends, told_config = target_ends.read(Path(place), dtype)
        return Target(
            spec=spec,
            folder=Path(place),
            model=ends.to(where).requires_grad_(False),
            tokenizer=_tokenizer_without_code(place, spec),
            config=told_config,
            ends_only=True,
        )
    with quiet(), explained(spec):
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        text = copy.deepcopy(config.get_text_config())
        text.dtype = dtype
        model, told = AutoModelForCausalLM.from_pretrained(
            place,
            config=without_layers(config),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    require_whole(spec, told)
    return _target(source, place, model.to(where), text, trust_remote_code, ends_only=True)


def _tokenizer_without_code(place: str, spec: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer as far as files alone give it; None where it is code of the target's own."""
    try:
        return tokenizer_at(place, spec)
    except (TargetError, OSError, ValueError, KeyError):
        if not (Path(place) / "tokenizer.json").is_file():
            return None
        with quiet(), explained(spec):
            return PreTrainedTokenizerFast.from_pretrained(place)


def by_name(folder: Path) -> bool:
    """Whether transformers cannot load the target in this folder as it is: its ends must be read by name."""
    index = folder / target_ends.INDEX
    if not (folder / "config.json").is_file() or not (index.is_file() or (folder / target_ends.SINGLE).is_file()):
        return False
    try:
        whole, text = target_ends.text_config(folder)
        absent = index.is_file() and any(not (folder / f).is_file() for f in set(target_ends.locate(folder).values()))
    except TargetError:
        return False  # transformers says what is wrong
    quantised = whole.get("quantization_config") or text.get("quantization_config")
    return bool(absent or quantised) or whole.get("model_type") not in CONFIG_MAPPING


def without_layers(config: Any) -> Any:
    """``config``, its text model left with no decoder layer."""
    text = config.get_text_config()
    text.num_hidden_layers = 0
    for name in PER_LAYER:
        if getattr(text, name, None) is not None:
            setattr(text, name, [])
    return config


def require_whole(spec: str, told: dict[str, Any]) -> None:
    """Raise TargetError where files lacked a weight: transformers makes up random numbers in its place."""
    missing = sorted(told["missing_keys"])
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise TargetError(
            f"The files of target {spec!r} lack {shown}.",
            way_out="Fetch them again whole; all shards named in model.safetensors.index.json must be there.",
        )


def _target(
    source: resolve.TargetSource,
    place: str,
    model: nn.Module,
    text: Any,
    trust_remote_code: bool,
    ends_only: bool = False,
) -> Target:
    return Target(
        spec=source.spec,
        folder=Path(place) if source.kind != "hub" else None,
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer_at(place, source.spec, trust_remote_code),
        config=text,
        gguf_sha256=source.sha256,
        ends_only=ends_only,
    )


def tokenizer_at(place: str, spec: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the target ``spec`` that lies at ``place``, or None where its folder has none."""
    with quiet(), explained(spec):
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError):
            if Path(place).is_dir() and not list(Path(place).glob("*token*")):
                return None
            raise


def describe(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """What a target is and where it lies, from its configuration alone: no weights are read into memory.

    ``weights_gb`` is what they take in ``dtype``, device by device.
    """
    where = placement.require(device, device_map)
    source = resolve.target(spec)
    place = materialise(source)
    with quiet(), explained(spec):
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    n = int(text.num_hidden_layers)
    return {
        "schema": 1,
        "name": spec,
        "path": place if source.kind != "hub" else None,
        "kind": source.kind,
        "gguf_sha256": source.sha256,
        "architecture": type(model).__name__,
        "num_layers": n,
        "hidden_size": int(text.hidden_size),
        "vocab_size": int(text.vocab_size),
        "max_positions": int(text.max_position_embeddings),
        "default_taps": default_taps(n),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_gb": placement.gigabytes(model, device_map or {"": where}),
    }


def default_taps(num_layers: int) -> list[int]:
    """The triple every trainer and engine falls back to: [2, n//2, n-3] (SGLang, vLLM, EAGLE; engine-conventions)."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
