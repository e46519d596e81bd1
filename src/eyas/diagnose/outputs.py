"""What was said of the drafter's states and fed back from them: the last norm, the head, the map, the feedback.

Every one is looked at by itself, from the engine's own tensor before it.

    pre ──norm──▶ post ──head──▶ logits ──map──▶ drafted         fed at depth k+1 ◀── pre or post of depth k

Letters: R rounds, K depths, H drafter width, N top logits kept, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.diagnose import served
from eyas.diagnose.inputs import AHEAD, Status, _short
from eyas.diagnose.reference import Reference, error
from eyas.diagnose.served import Round, Served
from eyas.diagnose.stage_findings import APART
from eyas.engines.recording import Turn

SAID = 512  # chains whose logits are looked at
MOST = 0.98

FEEDBACKS = ("before the last norm", "after the last norm", "the target's state", "the state before", "zeros")


@dataclass(frozen=True, eq=False)
class Feedback:
    """``fed``: in the words of the contract's fact, None where it is none of them; ``normed``: whether what is recorded
    before the last norm already is after it (vLLM's norm_output)."""

    status: Status
    fed: str | None
    errors: dict[str, float]
    normed: bool
    tokens: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "fed": self.fed, "errors": {k: _short(v) for k, v in self.errors.items()},
                "tokens": list(self.tokens)}  # fmt: skip


def feedback(reference: Reference) -> Feedback | None:
    """What depth k + 1 was fed, against every state there was by then; and whether its token is the one drafted."""
    turns = [r.turn for t in reference.texts for r in t.rounds if r.last >= t.prompt - 1 and r.turn.depths > 1]
    if not turns:
        return None
    fed = _stack(turn.fed[1:] for turn in turns)
    known = {
        "before the last norm": _stack(turn.pre[:-1] for turn in turns),
        "after the last norm": _stack(turn.post[:-1] for turn in turns),
        "the target's state": _stack(np.repeat(turn.fed[:1], turn.depths - 1, 0) for turn in turns),
        "the state before": _stack(np.concatenate((turn.fed[:1], turn.pre[:-2])) for turn in turns),
        "zeros": torch.zeros_like(fed),
    }
    errors = {name: error(fed, state) for name, state in known.items() if name != "zeros"}
    errors["zeros"] = 0.0 if not bool(fed.any()) else float("inf")
    alike = error(known["before the last norm"], known["after the last norm"]) <= 1e-6
    normed = alike and _unit(reference, known["after the last norm"])
    best = min(errors, key=lambda name: errors[name])
    found = best if errors[best] <= reference.near else None
    if normed and found == "before the last norm":
        found = "after the last norm"
    same = sum(int((turn.fed_ids[1:] == turn.draft_ids[:-1]).sum()) for turn in turns)
    count = sum(turn.depths - 1 for turn in turns)
    right = found == reference.facts.get("feedback", "before the last norm") and same == count
    return Feedback("equal" if right else "differs", found, errors, normed, (same, count))


def _unit(reference: Reference, states: Tensor) -> bool:
    """Whether states [R, H] come out of the last norm: without its gain, as it is or one more or none, they have RMS 1.

    Where what is recorded on both sides of the norm is alike, both are after it (norm_output) or it was skipped.
    """
    drafter = reference.drafter()
    if drafter is None:
        return True
    gain = drafter.norm.weight.float()
    rms = [(states.float() / g).square().mean(-1).sqrt() for g in (gain, gain + 1, torch.ones_like(gain))]
    return any(bool(((r - 1).abs() < 0.02).float().mean() > MOST) for r in rms)


@dataclass(frozen=True, eq=False)
class Said:
    """From the engine's own states: ``norm`` and ``head`` are relative errors, ``map_equal`` of ``map_n`` top ids are
    the reference's; ``matched`` what else gives the engine's."""

    status: Status
    norm: float | None
    head: float | None
    map_equal: int
    map_n: int
    matched: dict[str, Any] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)
    """Which of norm, head, map differ."""
    nan: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "norm": None if self.norm is None else _short(self.norm),
            "head": None if self.head is None else _short(self.head),
            "ids": {"equal": self.map_equal, "n": self.map_n},
            "matched": self.matched,
            "odd": self.odd,
            "nan": self.nan,
        }


def said(reference: Reference, normed: bool) -> Said | None:
    drafter = reference.drafter()
    turns = _spread([r.turn for t in reference.texts for r in t.rounds if r.last >= t.prompt - 1])
    if drafter is None or not turns:
        return None
    pre, post = _stack(t.pre for t in turns), _stack(t.post for t in turns)
    nan = int((~torch.isfinite(post)).any(-1).sum())
    odd: list[str] = []
    found: dict[str, Any] = {}
    norm = None
    if not normed:
        norm = error(drafter.norm(pre), post)
        if norm > reference.near:
            odd.append("norm")
            found |= _norm(reference, pre, post)
    values, ids = _stack(t.top_logits for t in turns), _stack(t.top_ids for t in turns)
    head, told = _head(reference, post, values)
    if head > reference.near and "norm" not in odd:
        odd.append("head")
        found |= told
    equal, n, told = _map(reference, post, ids, {**reference.facts, **found})
    if equal < MOST * n and "head" not in odd:
        odd.append("map")
        found |= told
    return Said("differs" if odd or nan else "equal", norm, head, equal, n, found, odd, nan)


def _norm(reference: Reference, pre: Tensor, post: Tensor) -> dict[str, Any]:
    """What else than the last norm makes ``post`` of ``pre``."""
    if error(pre, post) <= reference.near:
        return {"head_norm": False}
    for gain in (1.0, -1.0):
        other = reference.drafter(norm_gain={"norm": gain})
        if other is not None and error(other.norm(pre), post) <= reference.near:
            return {"norm_gain": {"norm": gain}}
    return {}


@torch.no_grad()
def _head(reference: Reference, post: Tensor, values: Tensor) -> tuple[float, dict[str, Any]]:
    """How far the top logits are from those the head gives; and the head that gives them."""
    own = reference.facts.get("head", "own")
    found: dict[str, float] = {}
    for head in dict.fromkeys((own, "own", "target")):
        drafter = reference.drafter(head=head)
        if drafter is not None:
            top = drafter.lm_head(post).float().topk(values.shape[-1]).values
            found[head] = error(top, values)
    best = min(found, key=lambda name: found[name])
    other = best != own and found[best] <= reference.near and found[best] * AHEAD < found[own]
    return found[own], {"head": best} if other else {}


@torch.no_grad()
def _map(reference: Reference, post: Tensor, ids: Tensor, facts: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """How many of the first ids are those the map gives; and the map that gives them."""
    drafter = reference.drafter(head=facts.get("head", "own"))
    assert drafter is not None
    rows = drafter.lm_head(post).argmax(-1)
    first = ids[:, 0].long()
    trained = str(reference.facts["vocab_map"])
    equal = {which: int((map_[rows] == first).sum()) for which, map_ in reference.parts.maps.items()}
    best = max(equal, key=lambda which: equal[which])
    other = best != trained and equal[best] >= MOST * len(first) and equal[best] > equal[trained]
    return equal[trained], len(first), {"vocab_map": best} if other else {}


@dataclass(frozen=True)
class Drafted:
    """Of the rounds whose depths before k drafted what the reference drafts, those that do at k too: [K]."""

    status: Status
    equal: list[int]
    n: list[int]

    def to_json(self) -> dict[str, Any]:
        depths = [{"depth": k, "equal": e, "n": n} for k, (e, n) in enumerate(zip(self.equal, self.n, strict=True))]
        return {"status": self.status, "depths": depths}


def drafted(
    texts: Sequence[Served], chains: Sequence[Sequence[Sequence[int]]], ties: Sequence[Sequence[bool]]
) -> Drafted:
    """``chains`` are what the reference drafts in each round that drafts; where its two first choices tie (``ties``)
    the round is left out."""
    K = max((r.turn.depths for t in texts for r in t.rounds), default=0)
    equal, n = [0] * K, [0] * K
    for text, theirs, tied in zip(texts, chains, ties, strict=True):
        for (now, _), ours, tie in zip(drafting(text), theirs, tied, strict=True):
            if tie:
                continue
            for k, (a, b) in enumerate(zip(now.draft_ids.tolist(), ours, strict=False)):
                n[k] += 1
                equal[k] += a == b
                if a != b:
                    break
    return Drafted("equal" if equal == n else "differs", equal, n)


def drafting(text: Served) -> list[tuple[Turn, int]]:
    """The turns that draft, with the slot they draft from."""
    return [(r.turn, r.last) for r in text.rounds if r.last >= text.prompt - 1 and r.last + 1 < len(text.ids)]


@dataclass(frozen=True)
class Acceptance:
    """Rounds whose kept tokens are the leading ones of the target's own (``as_greedy``), more, or fewer. Of a sampled
    text instead, by depth, tokens ``kept`` of those reached and how many the target's own probabilities make likely;
    ``z`` is how far the two are apart in standard errors, ``text_z`` how far the text is from a sample of them."""

    status: Status
    rounds: int
    as_greedy: int = 0
    more: int = 0
    fewer: int = 0
    sampled: list[dict[str, Any]] = field(default_factory=list)
    z: float | None = None
    text_z: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, "rounds": self.rounds, "as_greedy": self.as_greedy, "more": self.more,
                "fewer": self.fewer, "sampled": self.sampled,
                "z": None if self.z is None else round(self.z, 2),
                "text_z": None if self.text_z is None else round(self.text_z, 2)}  # fmt: skip


def acceptance(texts: Sequence[Served], truths: Sequence[np.ndarray]) -> Acceptance:
    """``truths`` [T] of each text: the target's own token after each position, -1 where it is not known."""
    same = more = fewer = 0
    for text, truth in zip(texts, truths, strict=True):
        for now, kept in shown(text):
            right = 0
            for k, token in enumerate(now.turn.draft_ids.tolist()):
                at = now.last + 1 + k
                if at >= len(truth) or truth[at] < 0:
                    right = max(right, kept)  # past the text: nobody can tell
                    break
                if truth[at] != token:
                    break
                right += 1
            same += kept == right
            more += kept > right
            fewer += kept < right
    rounds = same + more + fewer
    if not rounds:
        return Acceptance("not seen", 0)
    return Acceptance("equal" if same >= MOST * rounds else "differs", rounds, same, more, fewer)


@torch.no_grad()
def sampled(reference: Reference, temperature: float) -> Acceptance:
    """A drafted token that was not sampled is kept with the target's own probability of it (Leviathan and others 2023,
    with a draft that puts all on one token): summed over the chains that came so far, against how many were kept."""
    K = max((r.turn.depths for t in reference.texts for r in t.rounds), default=0)
    reached, hits = np.zeros(K, int), np.zeros(K, int)
    likely, spread = np.zeros(K), np.zeros(K)
    rounds = 0
    for i, text in enumerate(reference.texts):
        states = reference.stock.states(i, (reference.target.num_layers,))
        for now, kept in shown(text):
            rounds += 1
            ids = now.turn.draft_ids[: kept + 1]
            rows = states[now.last + 1 : now.last + 1 + len(ids)]
            ids = ids[: len(rows)]
            logits = reference.target.logits(reference.target.norm(rows.to(reference.target.dtype))).float()
            p = (logits / temperature).softmax(-1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()
            n = len(ids)
            reached[:n] += 1
            hits[:n] += np.arange(n) < kept
            likely[:n] += p
            spread[:n] += p * (1 - p)
    if not rounds:
        return Acceptance("not seen", 0)
    z = float((hits.sum() - likely.sum()) / max(np.sqrt(spread.sum()), 1e-9))
    table = [{"depth": k, "reached": int(reached[k]), "kept": int(hits[k]), "likely": round(float(likely[k]), 2)}
             for k in range(K)]  # fmt: skip
    text_z = surprise(reference, temperature)
    equal = max(abs(z), abs(text_z)) <= APART
    return Acceptance("equal" if equal else "differs", rounds, sampled=table, z=z, text_z=text_z)


@torch.no_grad()
def surprise(reference: Reference, temperature: float) -> float:
    """How much less likely the answers are than samples of the target's law at this temperature, in standard errors.

    A sampled token x has -log p(x) of mean H(p), the entropy of its row, and of a known spread, whatever came before.
    """
    over = spread = 0.0
    for i, text in enumerate(reference.texts):
        states = reference.stock.states(i, (reference.target.num_layers,))
        rows = states[text.prompt - 1 : len(text.ids) - 1]  # row t speaks of the token at t + 1
        logits = reference.target.logits(reference.target.norm(rows.to(reference.target.dtype))).double()
        logp = (logits / temperature).log_softmax(-1)
        p = logp.exp()
        entropy = -torch.xlogy(p, p).sum(-1)
        said = torch.from_numpy(np.asarray(text.ids[text.prompt :]))[: len(rows), None]
        over += float((-logp.gather(1, said)[:, 0] - entropy).sum())
        spread += float(((p * logp.square()).nan_to_num(nan=0.0).sum(-1) - entropy.square()).sum())
    return over / float(np.sqrt(max(spread, 1e-9)))


def shown(text: Served) -> Iterator[tuple[Round, int]]:
    """Rounds whose draft a later pass shows to be kept so far."""
    return ((now, kept) for now, kept in served.verified(text) if kept >= 0)


def stopped(texts: Sequence[Served]) -> list[int]:
    """Slots after which nothing was drafted although the text goes on; the prompt's last where nothing ever was."""
    found = []
    for text in texts:
        if not text.rounds:
            found.append(text.prompt - 1)
        else:
            last = text.rounds[-1]
            if last.last + 2 + last.turn.depths + 1 < len(text.ids):
                found.append(last.last)
    return found


def counted(
    texts: Sequence[Served], draft_tokens: int, truths: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds [texts] and drafted tokens kept by depth [texts, K], as the passes show. What the last round of a text
    kept no pass shows: ``truths``, or the text alone, tell it."""
    rounds = np.zeros(len(texts), dtype=np.int64)
    hits = np.zeros((len(texts), draft_tokens), dtype=np.int64)
    for i, text in enumerate(texts):
        for now, shown in served.verified(text):
            rounds[i] += 1
            truth = truths[i] if truths is not None else None
            kept = shown if shown >= 0 else served.matched(text, now, truth)
            hits[i, : min(kept, draft_tokens)] += 1
    return rounds, hits


def _stack(rows: Iterator[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(list(rows)))


def _spread(turns: Sequence[Turn]) -> list[Turn]:
    """So many turns that there are SAID chains at most, from all over."""
    step = max(1, len(turns) // SAID)
    return list(turns[::step])
