"""Where a bench's result goes: files, the terminal, a journal that outlives an interruption; and what it will cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.bench import Fault, SideResult
    from eyas.decode.cost import PassCost
    from eyas.prompts import Prompt

Json = Mapping[str, Any]


def cost_json(cost: PassCost) -> dict[str, Any]:
    return {
        "plain_seconds": cost.plain,
        "verify_seconds": {str(k): seconds for k, seconds in cost.verify.items()},
        "draft_depth_seconds": cost.draft,
    }


@dataclass
class Where:
    """Where results go: the terminal, and what files were asked for."""

    json: Path | None
    markdown: Path | None
    html: Path | None

    def write(self, told: dict[str, Any]) -> None:
        from eyas.report import bench_text

        bench_text.print_bench(told, common.console_for(self.json))
        self._files(told, bench_text.bench_markdown, "bench_page")

    def write_prediction(self, told: dict[str, Any]) -> None:
        from eyas.report import bench_text

        bench_text.print_prediction(told, common.console_for(self.json))
        self._files(told, bench_text.prediction_markdown, "prediction_page")

    def _files(self, told: dict[str, Any], as_markdown: Callable[..., str], page: str) -> None:
        from eyas import files

        common.write_result(told, self.json)
        if self.markdown is not None:
            files.write_text(self.markdown, as_markdown(told))
        if self.html is not None:
            from eyas.report import bench as pages  # draws pictures, which takes a second to load

            files.write_text(self.html, getattr(pages, page)(told))


def require_places(*places: Path | None) -> None:
    """Before anything is timed: a file that cannot be written would cost the whole run."""
    from eyas.errors import UsageError

    for place in places:
        if place is not None and str(place) != "-" and (place.is_dir() or not place.parent.is_dir()):
            what = "is a folder" if place.is_dir() else f"cannot be written: there is no folder {place.parent}"
            raise UsageError(f"{place} {what}.", way_out="Name a file in a folder that is there.")


def header(chosen: Sequence[Prompt], shared: Mapping[str, object]) -> dict[str, object]:
    """What all turns of a journal share; another command or another machine is refused."""
    from eyas import provenance
    from eyas.results import eyas_version

    asked = json.dumps([[p.id, *p.turns] for p in chosen], ensure_ascii=False).encode()
    told: dict[str, object] = {
        "journal": "eyas bench 1",
        "eyas": eyas_version(),
        "machine": provenance.collect({})["machine"],
        "prompts_sha256": hashlib.sha256(asked).hexdigest(),
    }
    return told | dict(shared)


def weights_sha256(folder: Path) -> str:
    """Of all weights of a drafter's folder."""
    from eyas import provenance

    found = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    return hashlib.sha256("".join(map(provenance.sha256_file, found)).encode()).hexdigest()


class Told:
    """Says on standard error what a run is about to cost and what goes wrong in it; a ``bench.Listener``."""

    def __init__(self, max_new_tokens: int, progress: Callable[[int], None]) -> None:
        self.max_new_tokens, self._progress = max_new_tokens, progress

    def warmed_up(self, results: Mapping[str, SideResult], turns_left: int) -> None:
        if not results:
            return
        turn = sum(result.seconds / max(result.tokens, 1) for result in results.values()) * self.max_new_tokens
        common.note(
            f"{turns_left} turns × {len(results)} sides, {self.max_new_tokens} new tokens at most: about "
            f"{spoken(turn * turns_left)} at the speed of the warm-up, less where answers end early. Ctrl-C keeps what "
            "is measured by then."
        )

    def turn_done(self, done: int) -> None:
        self._progress(done)

    def failed(self, fault: Fault) -> None:
        end = " It is not asked again." if fault.given_up else ""
        common.note(f"{fault.side} did not answer {fault.prompt_id}: {fault.why}{end}")


def spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
