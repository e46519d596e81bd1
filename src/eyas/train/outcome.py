"""What a run leaves behind: the best checkpoint with its contract, its curves and what produced it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas import checkpoint, curve, provenance
from eyas.contract import Contract, declared
from eyas.drafter import Drafter
from eyas.records import Record
from eyas.target import Target
from eyas.train.config import Point, Progress, TrainConfig

JUDGED = 4  # drafted tokens at which checkpoints compete


def point(measured: curve.Measured, progress: Progress) -> Point:
    """A measurement as one number with its interval, and where in the run it was taken."""
    forced = measured.teacher_forced
    if measured.lengths:
        length = measured.lengths[JUDGED - 1]
        value, (low, high) = length.value or 1.0, length.interval()
    else:  # off-policy text cannot be walked; the product of conditional rates still ranks checkpoints
        rates = [forced.joint_rate(k).rate or 0.0 for k in range(JUDGED)]
        value, low, high = 1 + sum(rates), None, None
    conditional = [forced.conditional_rate(k).rate for k in range(forced.depths)]
    return Point(progress.step, progress.tokens, progress.seconds / 60, value, low, high, conditional)


class Outcome:
    """The folder a run fills, and everything but the weights that goes into it."""

    def __init__(
        self,
        out: Path,
        config: TrainConfig,
        target: Target,
        records: Sequence[Record],
        facts: dict[str, Any],
        arguments: dict[str, object],
    ) -> None:
        self.out, self._config, self._target, self._records = out, config, target, records
        self._facts, self._arguments = facts, arguments

    def save(
        self, drafter: Drafter, measured: curve.Measured, held_out: int, progress: Progress, points: Sequence[Point]
    ) -> None:
        curves = {
            "teacher_forced": measured.teacher_forced.to_json(),
            "walk": measured.walk.to_json() if measured.walk else None,
            "accept_length": [length.to_json() for length in measured.lengths],
            "held_out_records": held_out,
            "training": [p.to_json() for p in points],
        }
        source = {
            **provenance.collect(self._arguments),
            "config": provenance.publishable(self._config.model_dump(mode="json")),  # a start may be a path
            "data": {
                "records": len(self._records),
                "response_tokens": sum(r.n_response_tokens for r in self._records),
                "records_sha256": digest(self._records),
                "trained_tokens": progress.tokens,
                "trained_minutes": round(progress.seconds / 60, 2),
            },
        }
        extra: dict[str, object] = {"curves.json": curves, "provenance.json": source}
        checkpoint.save(drafter, self.out, self.contract(drafter), extra)

    def contract(self, drafter: Drafter) -> Contract:
        """What this drafter will need true, as this trainer made it."""
        shape, target = drafter.config, self._target
        return declared(
            taps=list(shape.taps),
            tap_state="stream",
            fc="applied",
            **shape.facts(),
            attention="gqa",
            head_norm=True,
            window=None,
            max_positions=shape.max_position_embeddings,
            vocab_map="offsets" if shape.draft_vocab_size < shape.vocab_size else "none",
            token_shift=1,
            position_offset=0,
            rope=shape.rope_parameters,
            head="own",
            draft_vocab_size=shape.draft_vocab_size,
            vocab_sha256=checkpoint.vocab_sha256(drafter.vocab),
            mask="token fed and token predicted are both response tokens",
            depths=self._config.depths,
            target=target.identity(),
            **self._facts,
        )


def digest(records: Sequence[Record]) -> str:
    """Which records, in which order."""
    return provenance.sha256_text("\n".join(r.id for r in records))
