"""M, and what of F only an engine's numbers show: a log beside a drafter that is good.

The numbers are the drafter's own walk over these records, told as vLLM or SGLang tells them (the forms are those of
tests/fixtures/engines, which engines' own code printed), then made to break one rule.

Letters: R records, K depths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from runs.mutations import naive
from runs.mutations.subject import Bed, Change, Mutation, Subject, fields, healthy

PARTS = 5  # log lines that the records are shared out over


@dataclass(frozen=True)
class Rounds:
    """What an engine counted: rounds, and those in which depths 0..k all hit, for each k."""

    rounds: int
    hits: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return sum(self.hits)

    @property
    def length(self) -> float:
        return 1 + self.accepted / self.rounds

    def drafted(self, k: int | None = None) -> int:
        return self.rounds * (k or len(self.hits))


def rounds(histogram: np.ndarray) -> Rounds:
    """Of rounds by tokens kept, [K + 1]."""
    above = histogram[::-1].cumsum()[::-1]
    return Rounds(int(above[0]), tuple(int(h) for h in above[1:]))


def played(bed: Bed, subject: Subject) -> list[Rounds]:
    """The walk of what the engine runs, in as many parts as there are log lines. ``feedback`` of the subject counts."""
    if subject.feedback is None:
        histograms = naive.play_healthy(bed, subject.records).histograms
    else:
        runs = replace(healthy(bed), feedback=subject.feedback)
        histograms = naive.play(naive.engine(runs, bed), bed.bank, subject.records).histograms
    parts = [rounds(part.sum(0)) for part in np.array_split(histograms, min(PARTS, len(histograms)))]
    return [part for part in parts if part.rounds]


def vllm_line(part: Rounds, *, pad: int = 0, bonus: float = 0.0, rates: Sequence[float] | None = None) -> str:
    """One line of vLLM's; ``pad`` zeros more than depths, ``bonus`` added to the length, other ``rates``."""
    told = [hit / part.rounds for hit in part.hits] + [0.0] * pad if rates is None else list(rates)
    share = 100 * part.accepted / part.drafted()
    return (
        "INFO 11-30 01:00:00 [metrics.py:100] SpecDecoding metrics: "
        f"Mean acceptance length: {part.length + bonus:.2f}, Accepted throughput: {part.accepted / 10:.2f} tokens/s, "
        f"Drafted throughput: {part.drafted() / 10:.2f} tokens/s, "
        f"Accepted: {part.accepted} tokens, Drafted: {part.drafted()} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in told)}, "
        f"Avg Draft acceptance rate: {share:.1f}%"
    )


def sglang_line(part: Rounds, *, old: bool = False, throughput: float = 123.46) -> str:
    verified = len(part.hits) + 1
    rate = part.length / verified if old else (part.length - 1) / (verified - 1)
    return (
        "[2026-11-30 01:00:00] Decode batch, #running-req: 1, #token: 412, token usage: 0.01, "
        f"accept len: {part.length:.2f}, accept rate: {rate:.2f}, cuda graph: True, "
        f"gen throughput (token/s): {throughput}, #queue-req: 0"
    )


def body(part: Rounds, *, emitted: int = 0, rate: float | None = None) -> str:
    """The fields of one response of SGLang's; ``emitted`` tokens more than rounds and drafts give."""
    meta = {
        "completion_tokens": 1 + part.accepted + part.rounds + emitted,
        "spec_accept_rate": part.accepted / part.drafted() if rate is None else rate,
        "spec_accept_length": part.length,
        "spec_num_correct_drafts": part.accepted,
        "spec_num_proposed_drafts": part.drafted(),
        "spec_verify_ct": part.rounds,
    }
    return json.dumps({"text": "…", "meta_info": meta})


def started(topk: int = 1, tokens: int = naive.DRAFT_TOKENS + 1, steps: int = naive.DRAFT_TOKENS) -> str:
    return (
        f"server_args=ServerArgs(speculative_algorithm='EAGLE3', speculative_eagle_topk={topk}, "
        f"speculative_num_draft_tokens={tokens}, speculative_num_steps={steps})"
    )


Tell = Callable[[list[Rounds]], list[str]]


def log(tell: Tell, *, engine: str | None = None, **changes: str) -> Change:
    """``tell`` gives the lines of a log from the walk of these records; ``changes`` are fields of the subject."""

    def run(bed: Bed, subject: Subject) -> Subject:
        subject = fields(**changes)(bed, subject)
        return replace(subject, log="\n".join(tell(played(bed, subject))) + "\n", engine=engine)

    return run


def lines(**how: object) -> Tell:
    return lambda parts: [vllm_line(part, **how) for part in parts]  # type: ignore[arg-type]


def thinned(parts: list[Rounds], share: float = 0.15) -> list[Rounds]:
    """As at temperature 1: of the drafts that greedy decoding kept only some are kept."""
    return [Rounds(p.rounds, tuple(round(h * share ** (k + 1)) for k, h in enumerate(p.hits))) for p in parts]


def cut(part: Rounds, k: int) -> Rounds:
    return Rounds(part.rounds, part.hits[:k])


def rising(parts: list[Rounds]) -> list[str]:
    """Rates that grow with depth; their sum is right."""
    return [vllm_line(p, rates=sorted(h / p.rounds for h in p.hits)) for p in parts]


def above_one(parts: list[Rounds]) -> list[str]:
    return [vllm_line(p, rates=[1.2, *(h / p.rounds for h in p.hits[1:])]) for p in parts]


def bonus_first(parts: list[Rounds]) -> list[str]:
    """As an old script counts: the first entry is the token that is always there."""
    return [vllm_line(p, rates=[1.0, *(h / p.rounds for h in p.hits)], bonus=0.0) for p in parts]


def torn(parts: list[Rounds]) -> list[str]:
    told = [vllm_line(part) for part in parts]
    return [*told[:-1], told[-1][: len(told[-1]) * 2 // 3]]


def one_and_eight(parts: list[Rounds]) -> list[str]:
    """A run with one drafted token and one with more, in one text."""
    return [*(vllm_line(cut(part, 1)) for part in parts), "(EngineCore) Initializing a V1 LLM engine (v0.32.0) with "
            "num_speculative_tokens=4", *(vllm_line(part) for part in parts)]  # fmt: skip


def seventy_three(parts: list[Rounds]) -> list[str]:
    """The first rounds alone, with the rates of all of them."""
    whole = Rounds(sum(p.rounds for p in parts), tuple(np.sum([p.hits for p in parts], axis=0).tolist()))
    few = Rounds(73, tuple(round(73 * hit / whole.rounds) for hit in whole.hits))
    return [vllm_line(few)]


METRICS: list[Mutation] = [
    Mutation("log of vLLM", "H", "healthy", log(lines())),
    Mutation("log of SGLang", "H", "healthy", log(lambda ps: [started(), *map(sglang_line, ps)])),
    Mutation("responses of SGLang", "H", "healthy", log(lambda ps: [started(), *map(body, ps)])),
    Mutation("bonus token dropped", "M", "bonus-dropped", log(lines(bonus=-1.0)), inventory=True),
    Mutation("length that is not the rates' sum", "M", "counts-inconsistent", log(lines(bonus=0.4)), inventory=True),
    Mutation("rate above 1", "M", "counts-inconsistent", log(above_one), inventory=True),
    Mutation("rates that rise with depth", "M", "counts-inconsistent", log(rising), inventory=True),
    Mutation("rates padded to more depths", "M", "rates-padded", log(lines(pad=2)), inventory=True),
    Mutation("SGLang's old accept rate", "M", "rate-definition-old",
             log(lambda ps: [started(), *(sglang_line(p, old=True) for p in ps)]), inventory=True),
    Mutation("rate over the nodes of a tree", "M", "tree-denominator",
             log(lambda ps: [started(topk=4, tokens=16), *(re.sub(r"rate: \S+", f"rate: {(p.length - 1) / 15:.2f},",
                 sglang_line(p)) for p in ps)]), inventory=True),
    Mutation("tokens behind the end counted", "M", "tokens-after-end-counted",
             log(lambda ps: [started(), *(body(p, emitted=-3) for p in ps)]), inventory=True),
    Mutation("more tokens than rounds can give", "M", "counts-inconsistent",
             log(lambda ps: [started(), *(body(p, emitted=50) for p in ps)]), inventory=True),
    Mutation("a line torn", "M", "log-damaged", log(torn), inventory=True),
    Mutation("one drafted token against four", "M", "rates-at-different-k", log(one_and_eight), inventory=True,
             also=("runs-mixed",)),
]  # fmt: skip

ENGINES: list[Mutation] = [
    Mutation("engine feeds the target's state again", "F", None, log(lines(), feedback="target"),
             also=("feedback-target-state",)),
    Mutation("engine feeds the state before last", "F", None, log(lines(), feedback="stale"),
             also=("feedback-stale",)),
    Mutation("engine feeds zeros", "F", None, log(lines(), feedback="zero")),
]  # fmt: skip

CONTROLS: list[Mutation] = [
    Mutation("trailing zero slots", "X", "healthy", log(lines(pad=3)), also=("rates-padded",)),
    Mutation("first entry 1.00 in an old script", "X", "healthy", log(bonus_first),
             also=("counts-inconsistent", "bonus-dropped", "rates-padded")),
    Mutation("sparse target slow at batch 1", "X", "healthy",
             log(lambda ps: [started(), *(sglang_line(p, throughput=7.31) for p in ps)]),
             also=("sparse-target-batch-one",)),
    Mutation("log at temperature 1 with greedy drafts", "X", "healthy", log(lambda ps: lines()(thinned(ps))),
             also=("temperature-greedy-drafts", "engine-falls-short")),  # the one is a rival of the other
    Mutation("depth 0 at one drafted token", "X", "healthy", log(lambda ps: [vllm_line(cut(p, 1)) for p in ps]),
             also=("rates-at-different-k",)),
    Mutation("seventy-three drafts", "X", "healthy", log(seventy_three), also=("records-too-few",)),
]  # fmt: skip

MUTATIONS = METRICS + ENGINES + CONTROLS
