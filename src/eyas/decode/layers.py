"""What the compact way needs of a target, looked up once: its layers' weights by what they do, and rope by position.

Letters: S rows, D target width, H query heads, G key/value heads, E head width, I inner width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.decode import kernel, pages
from eyas.decode.sight import Sight
from eyas.target import Target, norm_eps

# The decoders whose arithmetic is the one written down in ``compact``, by transformers' names.
DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Gemma3TextModel")
ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the text's length
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Kind:
    """Layers that look back equally far and turn by the same rope; ``name`` is what the rope module calls them."""

    name: str | None
    window: int | None


@dataclass(frozen=True, eq=False)
class Layer:
    """Gains [D] or [E], None where the architecture has no such norm; linear layers [S, in] -> [S, out]."""

    kind: Kind
    scaling: float
    before_attention: Tensor
    query: Tensor | None
    key: Tensor | None
    after_attention: Tensor | None
    before_mlp: Tensor
    after_mlp: Tensor | None
    into: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    rise: Callable[[Tensor], Tensor]
    fall: Callable[[Tensor], Tensor]


class Stack:
    """The layers of a target that ``unsuited`` finds nothing against."""

    def __init__(self, target: Target) -> None:
        decoder, config = target.decoder, target.config
        attention = decoder.layers[0].self_attn  # type: ignore[index, union-attr]
        self.device = target.device
        self.embed: nn.Module = decoder.embed_tokens  # type: ignore[assignment]
        self.kinds: list[Kind] = []
        self._rope: nn.Module = decoder.rotary_emb  # type: ignore[assignment]
        self._turns: dict[Kind, tuple[Tensor, Tensor]] = {}
        # Alive as long as a structure points at them, even if a parameter is given other memory meanwhile.
        self._weights = [weight.detach() for weight in weights(decoder)]
        self._addresses = [weight.data_ptr() for weight in self._weights]
        self.eps = norm_eps(target.norm)
        self.last_gain = gain(target.norm)
        self.activate = ACTIVATIONS[activation(config)]
        self.layers = [self._layer(module) for module in decoder.layers]  # type: ignore[union-attr]
        E = int(attention.head_dim)
        self.shape = kernel.Shape(
            layers=len(self.layers),
            D=target.hidden_size,
            H=attention.q_proj.out_features // E,
            G=attention.k_proj.out_features // E,
            E=E,
            I=decoder.layers[0].mlp.up_proj.out_features,  # type: ignore[index, union-attr]
            gelu=activation(config) != "silu",
            eps=self.eps,
        )
        self.kernel = kernel.load()[0] if E % kernel.LANES == 0 else None
        self.structures = self._structures(decoder.layers)  # type: ignore[arg-type]

    def is_current(self, target: Target) -> bool:
        """Whether the weights still lie where they lay; new values in the same place are seen without further ado."""
        return [weight.data_ptr() for weight in weights(target.decoder)] == self._addresses

    def empty_cache(self, capacity: int) -> tuple[Tensor, Tensor]:
        shape = (self.shape.layers, self.shape.G, capacity, self.shape.E)
        return pages.empty(*shape), pages.empty(*shape)

    def normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """RMSNorm over the last dimension; x itself where there is no norm."""
        return x if gain is None else torch.rms_norm(x, gain.shape, gain, self.eps)

    def turn(self, kind: Kind, held: int, sees: Sight) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, E] of the rows' positions, contiguous."""
        end = held + int(sees.depths[-1] if sees.chained else sees.depths.max()) + 1
        cos, sin = self._turns.get(kind, (self.last_gain.new_empty(0, 0),) * 2)
        if cos.shape[0] < end:
            cos, sin = self._turns[kind] = self._rope_rows(kind, max(2 * cos.shape[0], end))
        if sees.chained:
            return cos[held:end], sin[held:end]
        return cos[held + sees.depths], sin[held + sees.depths]

    def _rope_rows(self, kind: Kind, positions: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(positions, device=self.device)[None]
        like = torch.empty(1, 1, 1, device=self.device)
        cos, sin = self._rope(like, at, kind.name) if kind.name else self._rope(like, at)
        return cos[0].contiguous(), sin[0].contiguous()

    def _layer(self, module: Any) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        sandwiched = hasattr(module, "pre_feedforward_layernorm")  # Gemma: a norm behind either half too
        before_mlp = module.pre_feedforward_layernorm if sandwiched else module.post_attention_layernorm
        return Layer(
            kind=self._kind(attention),
            scaling=float(attention.scaling),
            before_attention=gain(module.input_layernorm),
            query=gain(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key=gain(attention.k_norm) if hasattr(attention, "k_norm") else None,
            after_attention=gain(module.post_attention_layernorm) if sandwiched else None,
            before_mlp=gain(before_mlp),
            after_mlp=gain(module.post_feedforward_layernorm) if sandwiched else None,
            into=side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            out=side_by_side(attention.o_proj),
            rise=side_by_side(mlp.gate_proj, mlp.up_proj),
            fall=side_by_side(mlp.down_proj),
        )

    def _kind(self, attention: Any) -> Kind:
        config = attention.config
        window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ == "MistralAttention":  # which asks its config at every call
            window = config.sliding_window
        kind = Kind(attention.layer_type if hasattr(self._rope, "layer_types") else None, window)
        if kind not in self.kinds:
            self.kinds.append(kind)
        return kind

    def _structures(self, modules: Sequence[Any]) -> ctypes.Array[kernel.Layer]:
        made = (kernel.Layer * len(self.layers))()
        for structure, layer, module in zip(made, self.layers, modules, strict=True):
            for name in kernel.Layer.GAINS:
                setattr(structure, name, kernel.address(getattr(layer, name)))
            q, k, v, o, gate, up, down = map(kernel.Linear.of, linears(module))
            structure.into, structure.rise = (kernel.Linear * 3)(q, k, v), (kernel.Linear * 2)(gate, up)
            structure.out, structure.fall = o, down
            structure.scaling, structure.kind = layer.scaling, self.kinds.index(layer.kind)
        return made


def unsuited(target: Target) -> str | None:
    """Why the target cannot go the compact way, or None."""
    decoder, config = target.decoder, target.config
    name = type(decoder).__name__
    if name not in DECODERS or not type(decoder).__module__.startswith("transformers.models."):
        return f"{name} is none of {', '.join(DECODERS)}"
    if target.device.type != "cpu" or target.dtype != torch.float32:
        return f"the target is {str(target.dtype).removeprefix('torch.')} on {target.device.type}, not float32 on cpu"
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in decoder.parameters()):
        return "not all of its weights are float32 on cpu"
    if activation(config) not in ACTIVATIONS:
        return f"activation {activation(config)!r} is none of {', '.join(ACTIVATIONS)}"
    if other := sorted(set(ropes(config)) - set(ROPES)):
        return f"rope of type {other[0]!r} is none of {', '.join(ROPES)}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    layers: Any = decoder.layers
    if any(type(linear) is not nn.Linear for layer in layers for linear in linears(layer)):
        return "its linear layers are not plain ones"
    if len({norm_eps(norm) for norm in norms(decoder)}) != 1:
        return "its norms have several epsilons"
    if any(
        "forward" in vars(module) for module in (decoder, *layers, *(part for x in layers for part in x.children()))
    ):
        return "somebody replaced the forward of its modules"
    return None


def weights(model: nn.Module) -> list[Tensor]:
    """All that structures point at."""
    return [*model.parameters(), *model.buffers()]


def activation(config: Any) -> str:
    """The name of the MLP's activation, under either key."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def ropes(config: Any) -> list[str]:
    """Rope types; some architectures have one for each kind of layer."""
    told = config.rope_parameters
    each = [told] if "rope_type" in told else [of for of in told.values() if of]
    return [str(of["rope_type"]) for of in each]


def linears(layer: Any) -> list[nn.Linear]:
    """A layer's linear layers, in the order of LINEARS."""
    return [getattr(layer.mlp if hasattr(layer.mlp, name) else layer.self_attn, name) for name in LINEARS]


def norms(decoder: nn.Module) -> Iterator[nn.Module]:
    return (module for module in decoder.modules() if type(module).__name__.endswith("RMSNorm"))


def gain(norm: nn.Module) -> Tensor:
    """What a norm multiplies by. Gemma stores the gain minus one."""
    weight = norm.weight
    assert isinstance(weight, Tensor), "a norm has a gain"
    weight = weight.detach()
    return (1.0 + weight).contiguous() if type(norm).__name__.startswith("Gemma") else weight


def side_by_side(*modules: nn.Linear) -> Callable[[Tensor], Tensor]:
    """[S, in] through all of them -> [S, sum of out]; the modules themselves, so ``pack`` has its say."""
    if len(modules) == 1:
        return modules[0]
    return lambda x: torch.cat([module(x) for module in modules], dim=-1)
