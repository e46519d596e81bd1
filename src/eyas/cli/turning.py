from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.diagnose import Collected, Diagnosis
    from eyas.engines.vllm_live import Vllm
    from eyas.target import Target

    Turn = Callable[[Diagnosis, Collected, int, float], None]
    """After a diagnosis: what was collected for it, the tokens drafted, and the seconds that a start took."""


def turning(
    wanted: bool | None,
    target: Target,
    checkpoint: str,
    python: Path | None,
    flags: Sequence[str],
    concurrency: int,
) -> Turn:
    """Settings turned one at a time, where that is wanted, or where nothing else is left to look at."""
    from eyas import resolve
    from eyas.diagnose import toggles
    from eyas.engines import toggles as settings
    from eyas.engines.vllm_live import Vllm

    def begin(toggle: settings.Toggle, K: int) -> Vllm:
        assert python is not None, "only an engine of ours is turned"
        assert target.folder is not None, "a target that was loaded lies somewhere"
        return Vllm.launch(
            python.absolute(),
            target.folder,
            resolve.drafter(checkpoint).absolute(),
            draft_tokens=K,
            flags=[*flags, *toggle.flags],
            concurrency=toggle.concurrency or concurrency,
            probing=False,
        )

    def turn(found: Diagnosis, collected: Collected, K: int, start_seconds: float) -> None:
        if wanted is False or not (toggles.clean(found) and (wanted or toggles.short(found))):
            return
        engine = found.engine
        if python is None or engine is None or engine.name != "vllm" or not found.expected or collected.temperature:
            return common.note("settings are turned only on a vLLM that eyas starts, greedily.")
        prompts = [a.prompt_ids for a in collected.answers]
        choice = settings.of_vllm(flags, engine.resolved, [len(p) for p in prompts], concurrency)
        asking = toggles.Asking(prompts, collected.max_tokens, collected.answers, start_seconds, collected.seconds)
        names = ", ".join(t.name for t in choice if t.why_not is None)
        common.note(
            f"as served, then turned one at a time: {names}; {toggles.minutes(asking, choice):.0f} minutes at most."
        )
        with common.err.status("turning settings …") as status:
            tried = toggles.turned(
                lambda t: begin(t, K), choice, asking, found.expected, lambda what: status.update(what[:100])
            )
        toggles.settle(found, tried)

    return turn
