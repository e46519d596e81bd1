"""The served text: whether it is the target's own, and round by round which drafted token was kept."""

from __future__ import annotations

from typing import Any

import torch

from eyas.diagnose.reference import Reference
from eyas.diagnose.served import Served, matched, verified

TIES = {torch.float32: 1e-3}  # of the two best logits, within which rounding decides
HALF = 0.5  # the same for half precision, whose logits are that coarse
MOST = 32  # conversations that are written out


@torch.no_grad()
def compared(reference: Reference) -> dict[str, int]:
    """Answers that are the target's own greedy text, that part from it at a near tie, and that part elsewhere."""
    found = {"equal": 0, "near_ties": 0, "different": 0}
    tie = HALF if reference.near > 1e-3 else TIES[torch.float32]
    for i, text in enumerate(reference.texts):
        truth = reference.stock.truth(i)
        assert truth is not None
        first = text.prompt - 1
        said = torch.from_numpy(text.ids[text.prompt :])
        apart = (truth[first : first + len(said)] != said).nonzero().flatten()
        if not len(apart):
            found["equal"] += 1
            continue
        last = reference.stock.states(i, (reference.target.num_layers,))[first + int(apart[0])]
        logits = reference.target.logits(reference.target.norm(last.to(reference.target.dtype)))
        top = logits.float().topk(2).values
        found["near_ties" if float(top[0] - top[1]) < tie else "different"] += 1
    return found


def conversations(reference: Reference) -> list[dict[str, Any]]:
    return [_one(reference, text) for text in reference.texts[:MOST] if text.rounds]


def _one(reference: Reference, text: Served) -> dict[str, Any]:
    tokenizer = reference.target.tokenizer

    def word(token: int) -> str:
        return str(tokenizer.decode([token])) if tokenizer is not None else f"<{token}>"

    rounds: list[dict[str, Any]] = []
    for now, shown in verified(text):
        kept = shown if shown >= 0 else matched(text, now)
        drafted = []
        for k, token in enumerate(now.turn.draft_ids.tolist()):
            wanted = text.wanted(now.last, k) if k == kept else None
            ids = now.turn.top_ids[k].tolist() if k < len(now.turn.top_ids) else []
            drafted.append(
                {
                    "text": word(token),
                    "kept": k < kept,
                    "wanted": None if wanted is None else word(wanted),
                    "rank": ids.index(wanted) if wanted in ids else None,
                }
            )
        bonus = text.wanted(now.last, kept)
        rounds.append({"drafted": drafted, "bonus": "" if bonus is None else word(bonus)})
    prompt = str(tokenizer.decode(text.ids[: text.prompt].tolist())) if tokenizer is not None else ""
    first = word(int(text.ids[text.prompt])) if len(text.answer) else ""
    return {"id": text.request, "prompt": prompt, "first": first, "rounds": rounds}


def plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join("none" if v is None else str(v) for v in value)
    return str(value)
