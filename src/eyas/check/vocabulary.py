"""Which target ids the draft ids mean: every reading of the map that the files allow, and what speaks for it.

The map is algebra before it is measurement: ids must lie in the vocabulary, be distinct, and be those that t2d marks.
And a head that was started from the target's, as most are, still has rows that look like the rows of the tokens they
mean: that recovers a map which the files no longer hold.

Letters: W draft vocabulary, V target vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.results import Evidence, Finding
from eyas.target import Target

SAMPLE = 128
CLEAR = 0.02  # a row's nearest token counts where no other is within this much of its cosine
SURE = 32  # rows with a clear nearest token, at least, to start from what they say
LIKE = 0.9  # share of sampled rows with a clear nearest token from which a head is one that was started so
OPERATIONS = 2e12  # multiplications that recovering a whole map may cost


@dataclass(frozen=True, eq=False)
class Maps:
    """``ids`` [W] by reading; ``written`` names the one that engines follow (offsets where there is a d2t). ``alike``
    is the share of sampled head rows whose nearest token the reading names, of ``clear`` rows with a clear one."""

    ids: dict[str, Tensor]
    written: str
    alike: dict[str, float]
    clear: int

    def trouble(self, which: str, V: int) -> str | None:
        ids = self.ids[which]
        outside = int(((ids < 0) | (ids >= V)).sum())
        if outside:
            return f"{outside} of {len(ids)} draft ids point outside the target's {V} tokens"
        double = len(ids) - len(torch.unique(ids))
        return f"{double} of {len(ids)} draft ids point at a token that another points at too" if double else None


def read(tensors: Mapping[str, Tensor], target: Target) -> Maps:
    """Every reading, the one as written first, without those that say the same."""
    W = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else target.vocab_size
    every = torch.arange(W)
    ids: dict[str, Tensor] = {}
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and len(d2t) == W:
        ids["offsets"] = d2t.to(torch.int64) + every
        ids["ids"] = d2t.to(torch.int64)
    ids["none"] = every
    if t2d is not None and int(t2d.bool().sum()) == W and len(t2d) <= target.vocab_size:
        ids["mask"] = t2d.bool().nonzero().flatten()
    written = next(iter(ids))
    head = tensors.get("lm_head.weight")
    alike: dict[str, float] = {}
    clear = 0
    if head is not None and head.shape[1] == target.hidden_size:
        rows = torch.linspace(0, W - 1, min(SAMPLE, W)).long()
        nearest, sure = _nearest(head[rows].float(), target.head_weight)
        clear = int(sure.sum())
        alike = {name: float((nearest == known[rows])[sure].float().mean()) if clear else 0.0
                 for name, known in ids.items()}  # fmt: skip
        cost = float(W) * target.vocab_size * target.hidden_size
        if clear > LIKE * len(rows) and max(alike.values()) < LIKE and cost < OPERATIONS:
            ids["head rows"] = torch.cat(
                [_nearest(part.float(), target.head_weight)[0] for part in torch.split(head, 1024)]
            )
            alike["head rows"] = 1.0
    kept: dict[str, Tensor] = {}
    for name, known in ids.items():
        if not any(torch.equal(known, other) for other in kept.values()):
            kept[name] = known
    return Maps(kept, written, alike, clear)


def _nearest(rows: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The token whose row of the target's head points most nearly the same way, and whether no other comes close."""
    unit = F.normalize(rows, dim=-1)
    best = torch.full((len(rows), 2), -1.0)
    which = torch.zeros(len(rows), dtype=torch.int64)
    for start in range(0, len(head), 8192):
        part = F.normalize(head[start : start + 8192].float(), dim=-1)
        top = (unit @ part.T).topk(2, -1)
        newer = top.values[:, 0] > best[:, 0]
        which = torch.where(newer, top.indices[:, 0] + start, which)
        best = torch.cat((best, top.values), -1).topk(2, -1).values
    return which, (best[:, 0] - best[:, 1] > CLEAR) & (best[:, 0] > 0.3)


def proven(maps: Maps, V: int) -> str:
    """The reading to start from: as written, unless that cannot be and head rows or t2d show what it is."""
    written = maps.alike.get(maps.written, 0.0)
    others = [n for n in maps.ids if n != maps.written and maps.alike.get(n, 0.0) > LIKE]
    if maps.clear >= SURE and written < 1 - LIKE and others:
        return max(others, key=lambda n: maps.alike[n])
    if maps.trouble(maps.written, V) is not None:
        sound = [n for n in ("mask", "ids") if n in maps.ids and maps.trouble(n, V) is None]
        return sound[0] if sound else maps.written
    return maps.written


def judge(tensors: Mapping[str, Tensor], maps: Maps, V: int) -> list[Finding]:
    """What the map says of itself: as written it cannot be, or t2d marks other tokens. Engines do not read t2d;
    trainers that go on from these files do. What the map was trained as, measurement says."""
    written = maps.ids[maps.written]
    findings = []
    if maps.written == "offsets" and (trouble := maps.trouble("offsets", V)):
        findings.append(
            Finding(
                "vocab-map-inconsistent",
                "fatal",
                f"The vocabulary map contradicts itself: read as offsets (id + d2t[id]), {trouble}.",
                [Evidence("draft ids", trouble, "distinct ids inside the vocabulary", "d2t")],
            )
        )
    t2d = tensors.get("t2d")
    if t2d is None or maps.written != "offsets":
        return findings
    marked, W = int(t2d.bool().sum()), len(written)
    tokens = t2d.bool().nonzero().flatten()
    if torch.equal(tokens, written.sort().values):
        return findings
    if torch.equal(tokens, maps.ids["ids"].sort().values if "ids" in maps.ids else written):
        cause, said = "d2t-read-as-ids", "exactly the tokens that d2t names if its entries are ids, not offsets"
    elif marked != W:
        cause, said = ("t2d-too-few" if marked < W else "vocab-map-inconsistent"), f"{marked} tokens"
    elif torch.equal(tokens, torch.arange(W)):
        cause, said = "t2d-first-ids", f"the first {W} ids"
    else:
        only = len(set(tokens.tolist()) - set(written.tolist()))
        cause, said = "vocab-map-inconsistent", f"{only} tokens that d2t does not name"
    findings.append(
        Finding(
            cause,
            "fatal" if cause == "d2t-read-as-ids" else "likely",
            f"t2d marks {said}; the head has {W} rows, and as offsets d2t names {len(torch.unique(written))} tokens.",
            [Evidence("tokens marked by t2d", marked, W, "checkpoint")],
        )
    )
    return findings


def cause_of_map(maps: Maps, found: str, V: int) -> str:
    """Which fault it is that a drafter whose map is read as ``maps.written`` was trained with ``found``."""
    if maps.written == "none":
        return "d2t-missing"
    if found == "ids":
        return "d2t-read-as-ids"
    W = len(maps.ids["offsets"])
    every = torch.arange(W)
    written, true = maps.ids["offsets"] - every, maps.ids[found] - every
    if not bool(written.any()):
        return "d2t-missing"
    if torch.equal(written, every):
        return "d2t-ramp"
    same = any(
        torch.equal(a.sort().values, b.sort().values) for a, b in ((written, true), (written + every, true + every))
    )
    if same or float((written == true).float().mean()) > 0.5:
        return "d2t-shuffled"
    return "vocab-map-inconsistent" if maps.trouble(maps.written, V) else "d2t-stale"
