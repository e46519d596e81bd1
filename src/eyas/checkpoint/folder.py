"""What a drafter's files say before any weight is read: its shape, its contract, the names of its tensors.

Letters: H drafter width, D target width, C taps, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eyas import inventory
from eyas.contract import Contract
from eyas.dialects import hf, layouts, vllm
from eyas.drafter import DrafterConfig, switches
from eyas.errors import CheckpointError
from eyas.target import Target

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """``shape`` is the drafter's by its contract, ``spelled`` by the engines' keys alone; the same unless somebody
    edited one of them. ``tensors`` maps our names to the names in the files."""

    folder: Path
    inventory: inventory.Inventory
    shape: DrafterConfig
    spelled: DrafterConfig
    contract: Contract | None
    weights_sha256: str | None
    tensors: dict[str, str]

    @property
    def config(self) -> dict[str, Any]:
        return self.inventory.config


def twins(shape: DrafterConfig) -> dict[str, str]:
    """The one norm of each later layer under its second name, and under ours.

    vLLM and speculators apply ``input_layernorm`` there, SGLang ``hidden_norm`` (llama_eagle3.py of both); each fills
    the other with ones. Written twice it is the same layer to both.
    """
    later = range(1, shape.num_hidden_layers)
    return {f"layers.{i}.hidden_norm.weight": f"layers.{i}.input_layernorm.weight" for i in later}


def read(folder: Path) -> Checkpoint:
    """Config and headers of a drafter. Raises CheckpointError where they cannot be understood at all, and for a drafter
    with latent attention, which is not built here yet."""
    found = inventory.read(folder)
    hf.require_sane(found.config, str(folder))
    contract, digest = hf.read_contract(found.config, str(folder))
    layout = layouts.read(found.tensors, str(folder))
    tensors, by_names = layout.names, layout.facts()
    if by_names["attention"] == "mla":
        raise CheckpointError(
            f"{folder} is a drafter with latent attention (MLA: kv_a_proj_with_mqa); its forward is not built yet.",
            way_out="`eyas show` reads its files and says what an engine does with them.",
        )
    fc = found.tensors[tensors["fc.weight"]] if "fc.weight" in tensors else None
    taps = _taps(found.config, contract, fc.shape if fc else None)
    # What is in the files, or what the contract promises there.
    promised = {fact: contract[fact] for fact in contract} if contract is not None else {}
    fields = {
        **hf.read_shape(found.config, taps, str(folder)),
        "own_embedding": "own" in (by_names["embedding"], promised.get("embedding")),
        "qk_norm": by_names["qk_norm"] or promised.get("qk_norm") is True,
    }
    try:
        spelled = DrafterConfig(**fields)
        shape = DrafterConfig(**{**fields, **switches(contract)}) if contract is not None else spelled
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{folder}: config.json does not describe a drafter: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            way_out="Restore the config that was saved with these weights.",
        ) from error
    for theirs, ours in twins(shape).items():
        if ours not in tensors and theirs in tensors:
            tensors[ours] = tensors[theirs]
    return Checkpoint(folder, found, shape, spelled, contract, digest, tensors)


def _taps(config: dict[str, Any], contract: Contract | None, fc: tuple[int, ...] | None) -> tuple[int, ...]:
    """Taps as the contract declares them, else as vLLM's V1 runner would read the keys.

    Where neither says, only their number is known (from fc) until a target is: see ``shape_for``.
    """
    if contract is not None and "taps" in contract:
        return tuple(contract["taps"])
    if _names_taps(config):
        return tuple(vllm.captured(config, 0, "v1"))
    return tuple(range(fc[1] // fc[0] if fc and len(fc) == 2 and fc[0] else 3))


def _names_taps(config: dict[str, Any]) -> bool:
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return bool(config.get("eagle_aux_hidden_state_layer_ids") or inner)


def shares_head(checkpoint: Checkpoint) -> bool:
    """Whether a folder without a head says that the target's speaks: the vocabularies are equal, as vLLM asks, and the
    contract says so, or without one no size of a draft vocabulary is given, as SGLang asks."""
    shape, contract = checkpoint.shape, checkpoint.contract
    if HEAD in checkpoint.tensors or shape.draft_vocab_size != shape.vocab_size:
        return False
    if contract is not None and "head" in contract:
        return bool(contract["head"] == "target")
    return checkpoint.config.get("draft_vocab_size") is None


def shape_for(checkpoint: Checkpoint, target: Target) -> DrafterConfig:
    """The shape on this target: a drafter that names no taps gets those every engine defaults to."""
    named = checkpoint.contract is not None and "taps" in checkpoint.contract
    defaults = tuple(vllm.captured({}, target.num_layers, "v1"))
    if named or _names_taps(checkpoint.config) or len(defaults) != len(checkpoint.shape.taps):
        return checkpoint.shape
    return checkpoint.shape.model_copy(update={"taps": defaults})


def expected_shapes(shape: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a drafter of this shape is made of."""
    H, D, C = shape.hidden_size, shape.target_hidden_size, len(shape.taps)
    expected: dict[str, tuple[int, ...]] = {"fc.weight": (H, C * D)}
    if shape.norm_before_fc:
        expected["input_norm.weight"] = (C * D,)
    if shape.fc_norm:
        expected.update({f"fc_norm.{i}.weight": (D,) for i in range(C)})
    expected.update(_layer(shape, "midlayer", 2 * H))
    expected["midlayer.hidden_norm.weight"] = (H,)
    for i in range(1, shape.num_hidden_layers):
        expected.update(_layer(shape, f"layers.{i}", H))
    expected["norm.weight"] = (H,)
    expected["lm_head.weight"] = (shape.draft_vocab_size, H)
    if shape.own_embedding:
        expected[EMBEDDING] = (shape.vocab_size, H)
    return expected | {"d2t": (shape.draft_vocab_size,), "t2d": (shape.vocab_size,)}


def _layer(shape: DrafterConfig, name: str, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer whose attention reads rows ``width`` wide."""
    H, E, I_ = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q, kv = shape.num_attention_heads * E, shape.num_key_value_heads * E
    projections = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (H, q)}
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        **{f"self_attn.{p}.weight": size for p, size in projections.items()},
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (I_, H),
        "mlp.up_proj.weight": (I_, H),
        "mlp.down_proj.weight": (H, I_),
    }
    if shape.qk_norm:
        tensors.update({f"self_attn.{n}_norm.weight": (E,) for n in ("q", "k")})
    if shape.attention_bias:
        tensors.update({f"self_attn.{p}.bias": size[:1] for p, size in projections.items()})
    return {f"{name}.{n}": size for n, size in tensors.items()}
