"""An engine in miniature: rounds as vLLM's V1 runner plays them, recorded as its probe records them.

The clean reference is ``decode.chain``, which shares no line with the replay that it tests; every fault is put in by
hand, where an engine would have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas import taps
from eyas.decode.chain import Chain
from eyas.engines.live import Answer
from eyas.engines.recording import Turn
from eyas.records import Record
from eyas.target import Target
from eyas.variants import Facts, Parts, build

TOP = 8


@dataclass
class Faults:
    """``facts``: the reading that the engine runs. The rest is what no reading is."""

    facts: Facts
    feedback: str = "own"  # own, target, before
    step: int = 1
    offset: int = 0
    after_prompt: int = 0  # added to positions of every pass but the prompt's
    rotate: Tensor | None = None
    map_to: Tensor | None = None  # target id said for each draft id
    keep: int | None = None  # tokens kept in every round, whatever the target says
    stop_at: int | None = None  # no draft from slots past it
    clamp: int | None = None  # positions of a draft past it become 0, as vLLM's do at its limit
    tokens_shifted: int = 1
    wipe: bool = False  # the cache is forgotten before every pass
    seen: list[int] = field(default_factory=list)


class Engine(Chain):
    """A chain that can go wrong."""

    def __init__(self, drafter: Any, faults: Faults) -> None:
        super().__init__(drafter)
        self.faults = faults

    def extend(self, fed: Tensor, next_tokens: Sequence[int], first_slot: int) -> None:
        """As ``Chain.extend`` with the faults' positions, which need not be the slots."""
        if self.faults.wipe:
            for cache in self.caches:
                cache.truncate(0)
        else:
            self.truncate(first_slot)
        n = fed.shape[1]
        tokens = torch.tensor([list(next_tokens)])
        self.positions = torch.arange(first_slot, first_slot + n) + self.faults.offset
        self.positions += self.faults.after_prompt * (first_slot > 0)
        self.fused = self.drafter.fuse(fed)
        self.state = self._through(self.fused, tokens, self.positions[None])
        self.slot = first_slot + n - 1
        self.committed = self.length


def play(
    target: Target, parts: Parts, texts: Sequence[Record], tokens: int, draft_tokens: int, faults: Faults
) -> tuple[list[Answer], dict[str, list[Turn]]]:
    """``texts`` are the target's own; of each answer ``tokens`` are served."""
    drafter = build(parts, faults.facts)
    assert drafter is not None
    answers, turns = [], {}
    for number, record in enumerate(texts):
        name = f"r{number}"
        ids, prompt = record.input_ids.tolist(), record.seq_len - record.n_response_tokens
        assert record.n_response_tokens >= tokens + draft_tokens + 1, "the text must go on past what is served"
        answers.append(Answer(name, tuple(ids[:prompt]), tuple(ids[prompt : prompt + tokens]), "length", 0.0))
        turns[name] = list(_turns(target, drafter, ids, prompt, tokens, draft_tokens, faults))
    return answers, turns


@torch.inference_mode()
def _turns(
    target: Target, drafter: Any, text: Sequence[int], prompt: int, tokens: int, K: int, faults: Faults
) -> list[Turn]:
    ids = torch.tensor([list(text)])
    wanted = list(faults.facts["taps"])
    held = taps.run(target, ids, torch.tensor([len(text)]), sorted(set(wanted))).taps
    by_tap = dict(zip(sorted(set(wanted)), torch.split(held, target.hidden_size, -1), strict=True))
    states = torch.cat([by_tap[t] for t in wanted], -1)
    if faults.rotate is not None:
        states = torch.cat([b @ faults.rotate for b in torch.split(states, target.hidden_size, -1)], -1)
    engine = Engine(drafter, faults)
    found: list[Turn] = []
    first, last, rejected = 0, prompt - 1, -1
    before: Tensor | None = None
    while last + 1 < prompt + tokens:
        if faults.stop_at is not None and last > faults.stop_at:
            break
        fed = states[:, first : last + 1]
        beside = [text[s + faults.tokens_shifted] for s in range(first, last + 1)]
        engine.extend(fed, beside, first)
        rows: dict[str, list[Any]] = {k: [] for k in ("ids", "at", "fed", "post", "pre", "top_ids", "top", "said")}
        hidden, token, position = engine.fused[0, -1], beside[-1], int(engine.positions[-1])
        for k in range(K):
            if k:
                fed_state = {"own": drafter.feedback(engine.state[0, 0]), "target": engine.fused[0, -1],
                             "before": before}[faults.feedback]  # fmt: skip
                token, position, hidden = rows["said"][-1], position + faults.step, fed_state
                if faults.clamp is not None and position > faults.clamp:
                    position = 0
                before = engine.state[0, 0]
                engine.state = engine._through(hidden[None, None], torch.tensor([[token]]), torch.tensor([[position]]))
            elif before is None or faults.feedback == "before":
                before = engine.fused[0, -1]
            pre = engine.state[0, 0]
            post = drafter.norm(pre) if getattr(drafter, "head_norm", True) else pre
            values, rank = drafter.logits(pre).topk(TOP)
            mapping = drafter.draft_to_target if faults.map_to is None else faults.map_to
            for name, value in (("ids", token), ("at", position), ("fed", hidden), ("post", post),
                                ("pre", post if drafter.config.norm_output else pre), ("top_ids", mapping[rank]),
                                ("top", values), ("said", int(mapping[rank[0]]))):  # fmt: skip
                rows[name].append(value)
        engine.truncate(engine.committed)
        found.append(_turn(len(found), beside, engine, fed[0], text[last + 1], rejected, rows))
        right = 0
        while right < K and last + 2 + right < len(text) and rows["said"][right] == text[last + 2 + right]:
            right += 1
        kept = right if faults.keep is None else min(faults.keep, K)
        first, last, rejected = last + 1, last + 1 + kept, K - kept
    return found


def _turn(
    number: int, ids: Sequence[int], engine: Engine, fed: Tensor, following: int, rejected: int, rows: dict[str, Any]
) -> Turn:
    def stacked(name: str) -> np.ndarray:
        return np.asarray(torch.stack(rows[name]).numpy())

    return Turn(
        number, np.array(ids), engine.positions.numpy().copy(), fed.numpy().copy(), engine.fused[0].numpy().copy(),
        following, rejected, len(ids), np.array(rows["said"]), np.array(rows["ids"]), np.array(rows["at"]),
        stacked("fed"), stacked("post"), stacked("pre"), stacked("top_ids"), stacked("top"),
    )  # fmt: skip
