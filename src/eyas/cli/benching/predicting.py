"""`eyas bench --predict`: step times given or measured here, accept lengths given, read, or left open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.bench.predict import Length, StepTimes

CONTEXT = 128  # tokens before the passes that are timed
MOST = 8  # drafted tokens looked at where none are named


def step_times(verify_ms: str, draft_ms: float) -> StepTimes:
    """``1=45,5=60`` and ``4``, in milliseconds."""
    from eyas.bench.predict import MAX_DRAFT_TOKENS, StepTimes
    from eyas.errors import UsageError

    verify = {}
    for part in verify_ms.split(","):
        rows, _, milliseconds = part.partition("=")
        try:
            verify[int(rows)] = float(milliseconds) / 1e3
        except ValueError as error:
            raise UsageError(
                f"--verify-ms {verify_ms!r}: {part!r} is not ROWS=MILLISECONDS.", way_out="Write it as 1=45,5=60."
            ) from error
    if max(verify) > MAX_DRAFT_TOKENS + 1:
        raise UsageError(
            f"--verify-ms has a pass of {max(verify)} rows.", way_out=f"At most {MAX_DRAFT_TOKENS + 1} are looked at."
        )
    return StepTimes(verify, draft_ms / 1e3)


def measured(
    spec: str,
    dtype: str,
    device: str,
    device_map: str | None,
    trust: bool,
    int8: bool,
    packed: bool,
    ks: Sequence[int],
    draft_vocab: int,
) -> StepTimes:
    """Timed on the target, the draft depth by a random drafter of the usual shape: weights cost the same, right or
    wrong."""
    common.quiet_threads()
    from contextlib import nullcontext

    import torch

    from eyas import starts
    from eyas.bench.predict import StepTimes
    from eyas.decode.cost import measure_cost
    from eyas.decode.pack import packed as pack
    from eyas.target import default_taps
    from eyas.vocab import DraftVocab

    target = common.load_target(spec, dtype, device, device_map, trust, int8)
    words = min(draft_vocab, target.vocab_size)
    config = starts.config_for(target, tuple(default_taps(target.num_layers)), words)
    drafter = starts.random(target, config, DraftVocab(torch.arange(words), target.vocab_size), seed=0)
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if int8:
        common.round_weights(drafter)
    ids = [1 + i % (target.vocab_size - 1) for i in range(min(CONTEXT, target.max_positions - max(ks) - 2))]
    with common.err.status("timing passes …"), pack(target, drafter) if packed else nullcontext():
        cost = measure_cost(target, drafter, ids, ks)
    return StepTimes({1: cost.plain, **{k + 1: seconds for k, seconds in cost.verify.items()}}, cost.draft)


def lengths(
    curve: Path | None, accept: str | None, accept_length: float | None
) -> tuple[dict[int, Length] | None, str | None]:
    """Accept lengths by drafted tokens and where they are from; none where nothing was given."""
    from eyas.bench import predict
    from eyas.errors import UsageError

    given = [value for value in (curve, accept, accept_length) if value is not None]
    if len(given) > 1:
        raise UsageError("--curve, --accept and --accept-length each say it all.", way_out="Give one of them.")
    if curve is not None:
        return predict.from_check(_object(curve), curve.name)
    if accept is not None:
        try:
            rates = [float(rate) for rate in accept.split(",")]
        except ValueError as error:
            raise UsageError(f"--accept {accept!r}: {error}.", way_out="Write it as 0.6,0.4,0.3.") from error
        return predict.from_rates(rates), "rates"
    if accept_length is not None:
        return predict.assumed(accept_length), "assumed"
    return None, None


def _object(path: Path) -> dict[str, Any]:
    """A bounded JSON object; the reader is that of checkpoints, its words are not."""
    from eyas.errors import CheckpointError, InputError
    from eyas.inventory.json_file import json_object

    try:
        return json_object(path)
    except CheckpointError as error:
        raise InputError(
            f"{path} is not the JSON of a check: {error.message}",
            way_out="Write one with eyas check … --json FILE.",
        ) from error
