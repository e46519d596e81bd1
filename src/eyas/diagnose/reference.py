"""What an engine is compared with: our own target and drafter on the text that it served.

Letters: T positions, D target width, C taps, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas import variants
from eyas.compare import median_error
from eyas.diagnose.served import Served
from eyas.states.live import LiveStock
from eyas.target import Target
from eyas.variants import Facts, Parts
from eyas.variants.scores import FINAL

# Relative error of a tensor that is the same but for rounding: measured 1e-6 in fp32 (vLLM on a CPU against us), and
# an engine in half precision against a reference in fp32 is off by its own rounding, layer upon layer.
NEAR: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
MOST_ROWS = 2048  # rows whose taps are compared with every tap


@dataclass(frozen=True, eq=False)
class Reference:
    """``facts`` is how the drafter was trained, ``spelled`` how the files say that it is run, ``texts`` what was
    served, in the order of ``stock.records``; ``near`` the relative error that counts as equal."""

    target: Target
    parts: Parts
    facts: Facts
    spelled: Facts
    stock: LiveStock
    texts: Sequence[Served]
    near: float
    cache: dict[Any, Any] = field(default_factory=dict)

    def drafter(self, **changes: Any) -> variants.parts.Altered | None:
        """The drafter as trained but for ``changes``."""
        return variants.build(self.parts, {**self.facts, **changes})

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """(text, round) of the rows that are compared with every tap: whole passes, the first texts first, until there
        are enough of them; passes after the prompt's take half of the room."""
        if "chosen" not in self.cache:
            self.cache["chosen"] = _chosen(self.texts)
        found: list[tuple[int, int]] = self.cache["chosen"]
        return found

    def truths(self) -> list[np.ndarray]:
        """Of each text [T]: the target's own token after every position of the answer, -1 elsewhere."""
        found = []
        for i in range(len(self.texts)):
            truth = self.stock.truth(i)
            assert truth is not None
            found.append(truth.numpy())
        return found

    def fed(self) -> Tensor:
        """Rows [R, C*D] that the engine fed, of the chosen passes."""
        if "fed" not in self.cache:
            self.cache["fed"] = torch.from_numpy(
                np.concatenate([self.texts[i].rounds[r].turn.taps for i, r in self.chosen])
            )
        rows: Tensor = self.cache["fed"]
        return rows

    def fused(self) -> Tensor:
        return torch.from_numpy(np.concatenate([self.texts[i].rounds[r].turn.fused for i, r in self.chosen]))

    def live(self, tap: Any) -> Tensor:
        """The same rows of a tap [R, D] of our own target."""
        if ("tap", tap) not in self.cache:
            number = self.target.num_layers if tap == FINAL else int(tap)
            rows = []
            for i, r in self.chosen:
                now = self.texts[i].rounds[r]
                rows.append(self.stock.states(i, (number,))[now.first : now.last + 1])
            found = torch.cat(rows)
            if tap == FINAL:
                found = self.target.norm(found.to(self.target.device, self.target.dtype)).float().cpu()
            self.cache["tap", tap] = found
        got: Tensor = self.cache["tap", tap]
        return got


def _chosen(texts: Sequence[Served]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for is_prompt in (False, True):
        rows = 0
        for i, text in enumerate(texts):
            for r, now in enumerate(text.rounds):
                early = now.last <= text.prompt - 1
                if early != is_prompt or now.turn.taps is None or now.turn.fused is None:
                    continue
                if now.last >= len(text.ids):
                    continue  # rows past the text, which a cut answer leaves
                size = len(now.turn.token_ids)
                if rows + size > MOST_ROWS // 2 and rows:
                    break
                rows += size
                found.append((i, r))
    return sorted(found)


def error(got: Tensor, meant: Tensor) -> float:
    """Median over rows [R, D] of |got - meant| / |meant|; infinite where a number is none."""
    return float(median_error(got, meant)) if len(got) else float("inf")
