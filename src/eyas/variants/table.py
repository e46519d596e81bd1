"""What is tried: every way, of those the files allow, in which one fact may differ from the reading at hand.

The list is that of the faults seen in the field. What cannot be tried here: a draft cache that keeps the drafter's own
states for accepted tokens (it depends on the rounds played), and everything that an engine does beside the drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from torch import Tensor

from eyas.states.stock import Stock, Tap
from eyas.variants.parts import NORMS, SHUFFLES, Facts, Parts
from eyas.variants.scores import FINAL

BASES = (1e4, 1e5, 5e5, 1e6, 5e6)
FC_NORMS = ("none", "joint", "each", "joint, then each")
MAX_PERMUTED = 4  # taps; of more only neighbours change places


def candidates(base: Facts, parts: Parts, stock: Stock, num_layers: int) -> Iterator[dict[str, Any]]:
    """Changes to ``base``, each a mapping of one fact to another value. None is the base itself."""
    for fact, values in (
        ("taps", tap_lists(base["taps"], stock, num_layers)),
        ("vocab_map", parts.maps),
        ("embedding", _embeddings(parts)),
        ("head", ("own", "target")),
        ("fc_norm", _fc_norms(parts)),
        ("residual", ("before hidden_norm", "after hidden_norm")),
        ("residual_kept", (True, False)),
        ("head_norm", (True, False)),
        ("norm_gain", _gains(parts)),
        ("feedback", ("before the last norm", "after the last norm", "the target's state", "the state before")),
        ("token_shift", (0, 1, 2)),
        ("position_step", (0, 1)),
        ("rope_layout", ("half-split", *SHUFFLES)),
        ("rope", _ropes(base, parts)),
        ("window", _windows(base, parts, stock)),
    ):
        for value in values:
            if _plain(value) != _plain(base.get(fact)):
                yield {fact: value}


def tap_lists(taps: Sequence[Any], stock: Stock, n: int) -> Iterator[tuple[Any, ...]]:
    """Other lists of as many taps: moved by a layer, the engines' default, other orders, one missing. Never a tap
    twice: no engine can feed it."""
    for found in _tap_lists(taps, stock, n):
        fed = [t for t in found if t is not None]
        if len(set(fed)) == len(fed):
            yield found


def _tap_lists(taps: Sequence[Any], stock: Stock, n: int) -> Iterator[tuple[Any, ...]]:
    there = set(stock.taps)
    taps = tuple(taps)
    if all(isinstance(t, int) for t in taps):
        shifted = (tuple(t + by for t in taps) for by in (1, -1))
        default = (2, n // 2, n - 3)
        yield from (c for c in (*shifted, default) if len(c) == len(taps) and set(c) <= there)
    yield from neighbours(taps, stock)
    known = [t for t in stock.taps if isinstance(t, int)]
    if len(stock.taps) <= len(taps) + 2:  # a stored sample: any choice in its order may be meant
        yield from _choices(stock.taps, len(taps))
    if len(taps) <= MAX_PERMUTED:
        yield from permutations(taps)
    else:
        yield tuple(reversed(taps))
        yield from ((*taps[:i], taps[i + 1], taps[i], *taps[i + 2 :]) for i in range(len(taps) - 1))
    for i in range(len(taps)):
        yield (*taps[:i], None, *taps[i + 1 :])
    if stock.last is not None and known:
        highest = max(range(len(taps)), key=lambda i: taps[i] if isinstance(taps[i], int) else -1)
        for other in (FINAL, stock.last):
            yield (*taps[:highest], other, *taps[highest + 1 :])


def neighbours(taps: Sequence[Any], stock: Stock) -> Iterator[tuple[Any, ...]]:
    """The same with one slot a stored tap lower or higher; never a tap twice."""
    for slot, tap in enumerate(taps):
        if tap not in stock.taps:
            continue
        at = stock.taps.index(tap)
        for beside in (at - 1, at + 1):
            if 0 <= beside < len(stock.taps) and stock.taps[beside] not in taps:
                yield (*taps[:slot], stock.taps[beside], *taps[slot + 1 :])


def _choices(taps: Sequence[Tap], count: int) -> Iterator[tuple[Tap, ...]]:
    if count == 0:
        yield ()
        return
    for i in range(len(taps) - count + 1):
        for rest in _choices(taps[i + 1 :], count - 1):
            yield (taps[i], *rest)


def _embeddings(parts: Parts) -> Iterator[str]:
    yield "target"
    own = parts.tensors.get("embed_tokens.weight")
    if own is not None and not same_rows(own, parts.target.embedding):
        yield "own"


def same_rows(own: Tensor, theirs: Tensor) -> bool:
    """By every 97th row: a copy in another precision is still a copy."""
    if own.shape != theirs.shape:
        return False
    a, b = own[::97].float(), theirs[::97].float().to(own.device)
    return bool((a - b).norm() < 0.01 * b.norm())


def _fc_norms(parts: Parts) -> Iterator[str]:
    """Those whose weights are in the files; and a norm of each tap or of all with gains of one, as an exporter that
    dropped its weights would leave it."""
    yield from FC_NORMS[:3]
    if "input_norm.weight" in parts.tensors and "fc_norm.0.weight" in parts.tensors:
        yield FC_NORMS[3]


def _gains(parts: Parts) -> Iterator[Mapping[str, float]]:
    yield {}
    yield {"all": 1.0}
    yield {"all": -1.0}
    for name in NORMS:
        if f"{name}.weight" in parts.tensors:
            yield {name: 1.0}
            yield {name: -1.0}


def _ropes(base: Facts, parts: Parts) -> Iterator[Mapping[str, Any]]:
    rope = dict(base.get("rope") or parts.shape.rope_parameters)
    theirs = getattr(parts.target.config, "rope_parameters", None) or {}
    theirs = theirs.get("full_attention", theirs)  # Gemma-3 has one a kind of layer
    bases = {*BASES, float(theirs["rope_theta"])} if "rope_theta" in theirs else set(BASES)
    yield from ({**rope, "rope_theta": theta} for theta in sorted(bases))
    yield {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if theirs.get("rope_type", "default") != "default":
        yield dict(theirs)
    yield {**rope, "partial_rotary_factor": 0.5}


def _windows(base: Facts, parts: Parts, stock: Stock) -> Iterator[int | None]:
    """Only those that the longest text could tell from none."""
    longest = max((r.seq_len for r in stock.records), default=0)
    theirs = getattr(parts.target.config, "sliding_window", None)
    yield None
    yield from sorted({w for w in (2048, theirs) if isinstance(w, int) and w < longest})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else dict(value) if isinstance(value, Mapping) else value


def name_of(changes: Mapping[str, Any]) -> str:
    """A change in words: ``taps 3, 16, 28``."""
    return "; ".join(f"{fact} {_shown(value)}" for fact, value in changes.items())


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join("none" if v is None else str(v) for v in value)
    if isinstance(value, Mapping):
        parts = (f"{k} {v:+g}" if isinstance(v, float) and k != "rope_theta" else f"{k} {v}" for k, v in value.items())
        return ", ".join(parts) or "as stored"
    return str(value)
