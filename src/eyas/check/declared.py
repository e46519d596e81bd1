"""What config.json says by itself: against itself, against the weights it lies beside and the text it will meet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from eyas.check.case import Case
from eyas.dialects.wiring import Files
from eyas.errors import CheckpointError
from eyas.records import Record
from eyas.results import Evidence, Finding
from eyas.show import keys
from eyas.target import Target

SCALES = ("scale", "scale_inv", "weight_packed", "qweight", "zero_point", "qzeros")


def look_at_config(case: Case, target: Target, records: Sequence[Record]) -> None:
    """Notes: what of it does harm depends on who reads it, or is measured."""
    assert case.files is not None
    config, tensors = case.files.config, case.files.inventory.tensors
    host = target.facts
    with suppress(CheckpointError):  # a value of another type than its key is for is said where it is read
        case.findings += keys.two_places(Files(config, tensors), host)
    said = config.get("quantization_config")
    if said and not any(name.endswith(SCALES) for name in tensors):
        case.findings.append(
            Finding(
                "drafter-target-quantisation",
                "note",
                f"config.json says that the drafter is quantised ({_method(said)}), its tensors are plain numbers: an "
                "engine that believes it looks for scales and packed weights that are not there.",
                [Evidence("quantization_config", said, "none, for plain weights", "config.json")],
            )
        )
    longest, limit = max((r.seq_len for r in records), default=0), config.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        beyond = sum(r.seq_len > limit for r in records)
        case.findings.append(
            Finding(
                "position-limit-short",
                "note",
                f"max_position_embeddings is {limit}; {beyond} of {len(records)} records are longer, up to {longest} "
                "tokens. Engines stop there, clamp positions or draft no more.",
                [Evidence("max_position_embeddings", limit, f"at least {longest}", "config.json")],
            )
        )


def _method(said: object) -> object:
    return said.get("quant_method", "some method") if isinstance(said, dict) else said


def look_at_ids(case: Case, records: Sequence[Record]) -> None:
    """64-bit ids read as 32-bit ones have a zero after every token."""
    halved = [r for r in records if r.seq_len >= 8 and not r.input_ids[1::2].any()]
    if records and len(halved) > len(records) / 2:
        case.findings.append(
            Finding(
                "ids-cast-wrong",
                "fatal",
                f"In {len(halved)} of {len(records)} records every other token is 0, as where 64-bit ids are read as "
                "32-bit ones.",
                [Evidence("records of which every other id is 0", len(halved), 0, f"{len(records)} records")],
            )
        )
