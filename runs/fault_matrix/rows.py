"""The rows of the matrix: what is broken, where, and the cause that should be named first.

A fault of the files is one of the mutation bench (``runs/mutations``), served; one of the engine is put into the
running vLLM (``vllm_faults``); one of the command line is passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runs.mutations import norms, taps, weights
from runs.mutations.subject import IDS, Bed, Change, Subject, chain, drop, keys, tensors, unchanged

SHIPPED, OTHER = "smollm2-eagle3", "smollm2-taps-0-2-15"


@dataclass(frozen=True)
class Row:
    """``expected``: for each fault the slugs that name it; none for what must be cleared. ``equivalent``: it changes
    neither what is fed nor what is drafted, so healthy with a note is right."""

    name: str
    expected: tuple[tuple[str, ...], ...] = ()
    bed: str = SHIPPED
    files: Change = unchanged
    engine: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    speculative: Mapping[str, Any] = field(default_factory=dict)
    keeps_contract: bool = True
    equivalent: bool = False
    prompts: str = "mt-bench"
    first: int = 0
    count: int = 6
    tokens: int = 32
    draft_tokens: int = 4
    temperature: float = 0.0
    template: str | None = None

    @property
    def kind(self) -> str:
        return "healthy" if not self.expected else "single" if len(self.expected) == 1 else "pair"


def one(*slugs: str) -> tuple[tuple[str, ...], ...]:
    return (slugs,)


def ids(pick: Callable[[Bed], Sequence[int]]) -> Change:
    """The key that vLLM reads first, and that alone: an edit by hand, the contract as it was."""

    def run(bed: Bed, subject: Subject) -> Subject:
        config = {k: v for k, v in subject.config.items() if k != "eagle_config"}
        return replace(subject, config=config | {IDS: list(pick(bed))})

    return run


def inner(pick: Callable[[Bed], Sequence[int]]) -> Change:
    """Only inside ``eagle_config``, as SGLang is told."""

    def run(bed: Bed, subject: Subject) -> Subject:
        config = {k: v for k, v in subject.config.items() if k != IDS}
        return replace(subject, config=config | {"eagle_config": {IDS: list(pick(bed))}})

    return run


def no_ids(bed: Bed, subject: Subject) -> Subject:
    config = {k: v for k, v in subject.config.items() if k not in (IDS, "eagle_config")}
    return replace(subject, config=config)


def v2_keys(bed: Bed, subject: Subject) -> Subject:
    """As the V2 runner is told, which a CPU does not have."""
    config = {k: v for k, v in subject.config.items() if k not in (IDS, "eagle_config")}
    return replace(subject, config=config | {"eagle_config": {"layer_ids": list(bed.taps)}})


def contradiction(bed: Bed, subject: Subject) -> Subject:
    """One list at top level, another inside."""
    config = subject.config | {IDS: [t + 1 for t in bed.taps], "eagle_config": {IDS: [t - 1 for t in bed.taps]}}
    return replace(subject, config=config)


def scaled(by: float) -> Change:
    return tensors(lambda bed, held: {"fc.weight": (held["fc.weight"].float() * by).to(held["fc.weight"].dtype)})


def rope(**values: Any) -> Change:
    def run(bed: Bed, subject: Subject) -> Subject:
        known = dict(subject.config.get("rope_parameters") or {"rope_type": "default"})
        theta = {k: v for k, v in values.items() if k == "rope_theta"}
        config = subject.config | {"rope_parameters": known | values} | theta
        return replace(subject, config=config)

    return run


def plus(by: int) -> Callable[[Bed], Sequence[int]]:
    return lambda bed: [t + by for t in bed.taps]


TAPS = [
    Row("ids + 1", one("taps-off-by-one"), files=ids(plus(1))),
    Row("ids - 1", one("taps-off-by-minus-one"), files=ids(plus(-1))),
    Row("ids + 1, no contract", one("taps-off-by-one", "taps-ambiguous"), files=ids(plus(1)), keeps_contract=False,
        count=48, tokens=64),
    Row("ids of other layers", one("taps-differ"), files=ids(lambda bed: [4, 12, 25])),
    Row("ids missing", one("taps-key-missing", "taps-engine-default"), bed=OTHER, files=no_ids),
    Row("ids missing, trained on the default", equivalent=True, files=no_ids, count=10, tokens=40),
    Row("ids as SGLang counts, inside", one("taps-off-by-minus-one", "taps-off-by-one"), files=inner(plus(-1))),
    Row("ids as the V2 runner reads them", one("taps-engine-default", "taps-key-missing", "taps-differ"), bed=OTHER,
        files=v2_keys),
    Row("two lists that contradict", one("taps-off-by-one"), files=contradiction),
    Row("ids in another order", equivalent=True, files=ids(lambda bed: bed.taps[::-1]), count=10, tokens=40),
    Row("fc trained on its taps in another order", one("taps-reversed", "taps-swapped", "weights-changed"),
        files=taps.blocks(2, 1, 0), count=24, tokens=64),
    Row("taps swapped in the engine", one("taps-swapped"), engine=("taps swapped",)),
    Row("taps reversed in the engine", one("taps-reversed"), engine=("taps reversed",)),
    Row("the case: trained on 0, 2, 15, served on 2, 15, 27", one("taps-engine-default", "taps-differ"), bed=OTHER,
        files=ids(lambda bed: [2, 15, 27])),
]  # fmt: skip

STATES = [
    Row("states rotated", one("states-rotated"), engine=("states rotated",)),
    Row("states rounded to 8 bits", one("target-quantised"), engine=("states rounded to 8 bits",), equivalent=True,
        count=10, tokens=40),
    Row("states one row late", one("token-shift-two", "states-rows-shuffled"), engine=("states one row late",)),
    Row("first tap is zeros", one("states-zero", "taps-too-few"), engine=("first tap zeros",)),
    Row("rows of the first request for all", one("gather-first-request", "states-of-other-request"),
        engine=("rows of the first request",)),
    Row("tokens not shifted", one("token-shift-missing"), engine=("tokens not shifted",)),
]  # fmt: skip

WEIGHTS = [
    Row("head is noise", one("head-random"), files=tensors(weights.head_as_noise)),
    Row("head is the target's", one("head-overwritten"), files=tensors(weights.targets_head), equivalent=True),
    Row("embedding is noise", one("embedding-random"), files=tensors(weights.embedding_as_noise)),
    Row("norm of hidden dropped", one("norm-weight-missing", "weights-missing"), files=drop(weights.FIRST_NORM)),
    Row("fc dropped", one("weights-missing"), files=drop("fc.weight")),
    Row("fc times 0.3", one("weights-changed"), files=scaled(0.3)),
    Row("one projection misnamed", one("weights-missing", "layer-renamed", "weights-unexpected"),
        files=weights.rename("midlayer.self_attn.q_proj.", "midlayer.self_attn.query.")),
    Row("d2t all zeros", one("d2t-missing", "d2t-stale", "vocab-map-inconsistent"),
        files=weights.offsets(weights.first_n)),
    Row("d2t shuffled", one("d2t-shuffled", "vocab-map-inconsistent"), files=weights.offsets(weights.shuffled(1.0))),
    Row("d2t holds ids", one("d2t-read-as-ids", "vocab-map-inconsistent"),
        files=tensors(lambda bed, held: {weights.D2T: bed.ids})),
    Row("d2t dropped", one("d2t-missing", "weights-missing"), files=drop(weights.D2T, weights.T2D)),
    Row("map zeroed in the engine", one("d2t-missing"), engine=("map zeroed",)),
    Row("map shuffled in the engine", one("d2t-stale", "d2t-shuffled"), engine=("map shuffled",)),
]  # fmt: skip

NORMS = [
    Row("norm_output on", one("feedback-post-norm"), files=keys(norm_output=True)),
    Row("norm_before_residual on", one("norm-before-residual-ignored"), files=keys(norm_before_residual=True)),
    Row(
        "a norm before fc that training had not",
        one("fc-norm-added"),
        files=norms.norm_before_fc(each=False),
        count=14,
        tokens=48,
    ),
    Row("all gains + 1", one("norm-gain-plus-one"), files=norms.gains(1.0), count=14, tokens=48),
    Row("last norm skipped before the head", one("head-norm-skipped"), engine=("head norm skipped",)),
]

LATER = [
    Row("rope base 500000", one("rope-base-wrong"), files=rope(rope_theta=500000.0)),
    Row("rope base 1000", one("rope-base-wrong"), files=rope(rope_theta=1000.0)),
    Row("rope scaling added", one("rope-scaling-added"), files=rope(rope_type="linear", factor=8.0)),
    Row("max_position_embeddings 64", one("position-limit-short"), files=keys(max_position_embeddings=64), tokens=64),
    Row("feedback frozen", one("feedback-target-state"), engine=("feedback frozen",)),
    Row("feedback stale", one("feedback-stale"), engine=("feedback stale",)),
    Row("positions + 1 everywhere", equivalent=True, engine=("positions +1 everywhere",), count=10, tokens=40),
    Row("positions + 1 after the prompt", one("positions-off-by-one"), engine=("positions +1 after the prompt",)),
    Row("step positions frozen", one("step-positions-frozen"), engine=("step positions frozen",)),
    Row("draft cache empty", one("draft-cache-empty"), engine=("draft cache empty",)),
    Row("draft cache not refreshed", one("draft-cache-not-refreshed"), engine=("draft cache not refreshed",)),
    Row("NaN in one pass of ten", one("nan-logits"), engine=("NaN in one pass of ten",)),
]

FLAGS = [
    Row("method eagle", one("algorithm-eagle"), speculative={"method": "eagle"}),
    Row("every draft kept", one("acceptance-faked"), engine=("every draft kept",)),
    # vLLM 0.32 on a CPU: the temperatures of a verify pass stay what the memory held (utils/cpu_triton_utils.py:390).
    Row("temperature 0.8, on a CPU", one("sampling-differs"), temperature=0.8, count=10, tokens=40),
    Row("synthetic acceptance", one("acceptance-faked"), speculative={"rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0}),
    Row("another chat template", one("template-differs"),
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
]  # fmt: skip

HEALTHY = [
    Row("healthy"),
    Row("healthy, trained on 0, 2, 15", bed=OTHER),
    Row("healthy, no contract", keeps_contract=False, count=48, tokens=64),
    Row("healthy, code prompts", prompts="humaneval"),
    Row("healthy, arithmetic prompts", prompts="gsm8k"),
    Row("healthy, other prompts", first=40, count=14, tokens=40),
    Row("healthy, temperature 0.8", temperature=0.8, engine=("temperature expanded",), count=10, tokens=40),
    Row("healthy, long answers", count=6, tokens=120),
    Row("healthy, two drafted tokens", draft_tokens=2),
]

PAIRS = [
    Row("other ids, feedback after the norm", (("taps-engine-default", "taps-differ"), ("feedback-post-norm",)),
        bed=OTHER, files=chain(ids(lambda bed: [2, 15, 27]), keys(norm_output=True))),
    Row("other ids, feedback frozen", (("taps-engine-default", "taps-differ"), ("feedback-target-state",)), bed=OTHER,
        files=ids(lambda bed: [2, 15, 27]), engine=("feedback frozen",)),
    Row("ids + 1, rope base 500000", (("taps-off-by-one",), ("rope-base-wrong",)),
        files=chain(ids(plus(1)), rope(rope_theta=500000.0))),
    Row("ids - 1, draft cache empty", (("taps-off-by-minus-one",), ("draft-cache-empty",)), files=ids(plus(-1)),
        engine=("draft cache empty",)),
    Row("map zeroed, step positions frozen", (("d2t-missing",), ("step-positions-frozen",)),
        engine=("map zeroed", "step positions frozen")),
    Row("residual moved, feedback stale", (("norm-before-residual-ignored",), ("feedback-stale",)),
        files=keys(norm_before_residual=True), engine=("feedback stale",)),
    Row("taps swapped, rope base 1000", (("taps-swapped",), ("rope-base-wrong",)), files=rope(rope_theta=1000.0),
        engine=("taps swapped",)),
]  # fmt: skip

# To be cleared takes 200 rounds; files to be doubted are swept, which takes more text still.
HEALTHY = [replace(row, count=10, tokens=40) if row.count == 6 and row.tokens == 32 else row for row in HEALTHY]
WEIGHTS = [replace(row, count=14, tokens=48) if row.files is not unchanged else row for row in WEIGHTS]
LONG = [row for row in (*TAPS, *HEALTHY) if row.count > 20]  # last, for they take minutes
ROWS = [*HEALTHY[:2], *TAPS, *STATES, *LATER, *FLAGS, *PAIRS, *NORMS, *HEALTHY[2:], *WEIGHTS]
ROWS = [*(row for row in ROWS if row not in LONG), *LONG]
assert len({row.name for row in ROWS}) == len(ROWS)
