"""Which layers vLLM captures for a drafter. Its ids are taps.

Two runners, two functions, two sets of keys, each in order of preference; the first list that is not empty wins:

    V1  v1/worker/gpu_model_runner.py:5251                  V2  v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100
    eagle_aux_hidden_state_layer_ids                        eagle_aux_hidden_state_layer_ids
    eagle_config.eagle_aux_hidden_state_layer_ids           dflash_config.target_layer_ids, each + 1
    dflash_config.target_layer_ids, each + 1                dspark_target_layer_ids, each + 1
        (only where there is no eagle_config)               target_layer_ids, each + 1
                                                            dflash_config.layer_ids, then eagle_config.layer_ids

Failing all, the target's class decides: [2, n//2, n-3] for every class (model_executor/models/interfaces.py:1712).
A list is then a set: sorted and made distinct (interfaces.py:1578), except on the Transformers backend, which keeps
the config's order (model_executor/models/transformers/base.py:828). A number that no layer has is never matched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.dialects.vllm.source import at, ran
from eyas.dialects.vllm.targets import MEAN_OF_STREAMS, NO_LAST_TAP, NO_TAP_0, OTHERS, SUPPORTING
from eyas.dialects.wiring import Refusal, Runner, TargetFacts

TOP = "eagle_aux_hidden_state_layer_ids"
V1 = "v1/worker/gpu_model_runner.py:5251"
V2 = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100"
SELECTION: dict[Runner, str] = {"v1": V1, "v2": V2}


def _after(ids: object) -> object:
    """Ids of layers after which to look, as taps."""
    return [i + 1 for i in ids] if isinstance(ids, list) else None


def _inner(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


# What the V1 runner tries, if the drafter has an eagle_config and if not; what V2 tries. Key -> its list in taps.
_Row = tuple[str, Callable[[Mapping[str, Any]], object]]
_TOP: _Row = (TOP, lambda c: c.get(TOP))
_EAGLE: _Row = (f"eagle_config.{TOP}", lambda c: _inner(c, "eagle_config").get(TOP))
_DFLASH: _Row = ("dflash_config.target_layer_ids", lambda c: _after(_inner(c, "dflash_config").get("target_layer_ids")))
KEYS: dict[Runner, tuple[_Row, ...]] = {
    "v1": (_TOP, _EAGLE, _DFLASH),
    "v2": (
        _TOP,
        _DFLASH,
        ("dspark_target_layer_ids", lambda c: _after(c.get("dspark_target_layer_ids"))),
        ("target_layer_ids", lambda c: _after(c.get("target_layer_ids"))),
        ("dflash_config.layer_ids", lambda c: _inner(c, "dflash_config").get("layer_ids")),
        ("eagle_config.layer_ids", lambda c: _inner(c, "eagle_config").get("layer_ids")),
    ),
}
ALL_KEYS = tuple(dict.fromkeys(name for rows in KEYS.values() for name, _ in rows))


def chosen(config: Mapping[str, Any], runner: Runner) -> tuple[str, list[int]] | None:
    """The key that decides and its list in taps, as the runner's function gives it; None where none decides."""
    for name, ids in KEYS[runner]:
        if name == _DFLASH[0] and runner == "v1" and _inner(config, "eagle_config"):
            continue  # an eagle_config overwrites it, with nothing if it has no ids
        found = ids(config)
        if found and isinstance(found, list):
            return name, found
    return None


def default(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def captured(config: Mapping[str, Any], num_layers: int, runner: Runner) -> list[int]:
    """Layers the model is told to capture for a drafter's config, in concatenation order (native classes)."""
    found = chosen(config, runner)
    return sorted(set(found[1])) if found else sorted(set(default(num_layers)))


def spell(taps: Sequence[int]) -> list[int]:
    """The top-level ids that make both runners capture ``taps``."""
    return list(taps)


@dataclass(frozen=True)
class Capture:
    """``taps`` as they arrive at the drafter; ``wanted`` as the model was told, before what no layer matches."""

    key: str | None
    wanted: tuple[int, ...]
    taps: tuple[int, ...]
    refusals: tuple[Refusal, ...]


def backend(architecture: str, transformers: bool) -> str:
    """Who runs the target: native, transformers, or none where vLLM has a class that cannot serve a drafter."""
    if transformers or architecture not in SUPPORTING | OTHERS:
        return "transformers"
    return "native" if architecture in SUPPORTING else "none"


def capture(
    config: Mapping[str, Any], target: TargetFacts | None, runner: Runner, transformers: bool
) -> Capture | None:
    """What reaches the drafter; None where the target decides and is not known."""
    found = chosen(config, runner)
    if found is None and target is None:
        return None
    key, ids = found if found else (None, default(target.num_layers if target else 0))
    by = backend(target.architecture, transformers) if target else "native"
    wanted = tuple(dict.fromkeys(ids)) if by == "transformers" else tuple(sorted(set(ids)))
    if target is None:
        return Capture(key, wanted, wanted, ())
    taps, n = wanted, target.num_layers
    refusals = []
    if by == "none":
        refusals.append(
            Refusal(
                "engine-cannot-express",
                f"its class of {target.architecture} does not hand over layers (RuntimeError: Model does not support "
                "EAGLE3 interface); --model-impl transformers runs another class, which does",
                "start",
                ran("v1/worker/gpu_model_runner.py:5236"),
            )
        )
    elif by == "transformers":
        refusals += [_no_such_layer(t, n) for t in wanted if not 1 <= t <= n]
    else:
        last = n - 1 if target.architecture in NO_LAST_TAP else n
        taps = tuple(t for t in wanted if 0 <= t <= last)
        if 0 in wanted and target.architecture in NO_TAP_0:
            why = f"{target.architecture} adds a residual to tap 0 that is not there yet (TypeError)"
            refusals.append(
                Refusal(
                    "engine-cannot-express",
                    why,
                    "first forward",
                    at("model_executor/models/deepseek_v2.py:1562", "inferred"),
                )
            )
    return Capture(key, wanted, taps, tuple(refusals))


def _no_such_layer(tap: int, n: int) -> Refusal:
    why = f"the Transformers backend looks for the layer before tap {tap} of {n} and finds none (KeyError)"
    return Refusal("taps-too-few", why, "start", ran("model_executor/models/transformers/base.py:841"))


def is_stream(architecture: str) -> bool:
    return architecture not in MEAN_OF_STREAMS
