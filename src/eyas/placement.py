"""Where a target's weights lie and in what precision: words of a user checked, weights that wait elsewhere brought in.

accelerate may spread a model over devices (a device map) and keep parts of it on the disk until they run. Such a
module's own weight is then a placeholder on ``meta``; its hook knows where it computes and where the weight waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import (
    align_module_device,
    compute_module_sizes,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from torch import Tensor, nn

from eyas.errors import EnvironmentFault, UsageError, did_you_mean

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceMap = str | Mapping[str, Any]


def dtype(word: str) -> torch.dtype:
    """The precision a user means."""
    if word not in DTYPES:
        raise UsageError(f"--dtype {word!r} is not a precision.", way_out=did_you_mean(word, DTYPES))
    return DTYPES[word]


def require_roundable(dtype: str, device: str, device_map: str | None) -> None:
    """Raise UsageError where weights cannot be rounded to eight bits."""
    if dtype != "fp32" or device != "cpu" or device_map is not None:
        raise UsageError(
            f"--int8 rounds fp32 weights on the CPU; --dtype {dtype} on {device_map or device} was asked.",
            way_out="Leave out --dtype, --device and --device-map, or leave out --int8.",
        )


def require(device: str, device_map: DeviceMap | None = None) -> torch.device:
    """The device a user means, there and ready. Raises UsageError for a wrong word, EnvironmentFault for an absent one.

    A device map names its devices itself: of ``device`` only "cpu", which is also what nobody said, goes with one.
    """
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise UsageError(
            f"--device-map {device_map!r} is not known.",
            way_out=f"{did_you_mean(device_map, DEVICE_MAPS)} For a single device pass --device.",
        )
    if device_map is not None and device != "cpu":
        raise UsageError(
            f"--device {device} and --device-map {device_map} exclude each other: the map chooses the devices.",
            way_out="Pass one of them.",
        )
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if found.type not in present:
        raise UsageError(
            f"--device {device!r} is not a device to run on.", way_out="Pass cpu, cuda, cuda:1 (a number) or mps."
        )
    if (found.index or 0) >= present[found.type]:
        there = ", ".join(f"{n} {name}" for name, n in present.items() if n)
        raise EnvironmentFault(
            f"--device {device}: this PyTorch ({torch.__version__}) sees no such device here, only {there}.",
            way_out="Pass --device cpu, or install a PyTorch built for your GPU (pytorch.org) and its driver.",
        )
    return found


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, which is not where its weights wait if they are offloaded."""
    hook = getattr(module, "_hf_hook", None)
    computes = getattr(hook, "execution_device", None)
    if computes is not None:
        return torch.device(computes)
    return next(module.parameters()).device


def weight_of(module: nn.Module) -> Tensor:
    """``module.weight`` itself, or where it is offloaded a copy of it where the module computes."""
    with align_module_device(module):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight


def gigabytes(model: nn.Module, device_map: DeviceMap) -> dict[str, float]:
    """GB of weights each device would hold, of a model that may be on ``meta``. A map's word is asked of accelerate."""
    if isinstance(device_map, str):
        whole = getattr(model, "_no_split_modules", None)
        if device_map == "sequential":
            memory = get_max_memory()
        else:
            memory = get_balanced_memory(model, no_split_module_classes=whole, low_zero=device_map == "balanced_low_0")
        device_map = dict(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole))
    sizes, held = compute_module_sizes(model), dict[str, float]()
    for name, device in device_map.items():
        held[str(device)] = held.get(str(device), 0.0) + sizes[name] / 1e9
    return {device: round(gb, 3) for device, gb in held.items()}
