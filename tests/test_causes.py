"""The table of causes is complete, of the right kinds, and docs/causes.md is made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas import causes

# The mutations of the fault taxonomy, written out by hand: kind -> number in its list -> slugs.
MUTATIONS: dict[str, dict[int, list[str]]] = {
    "taps": {
        1: ["taps-off-by-one", "taps-off-by-minus-one"],
        2: ["taps-swapped", "taps-reversed"],
        3: ["taps-engine-default"],
        4: ["taps-highest-final-state"],
        5: ["taps-too-few"],
        6: ["taps-key-missing"],
    },
    "weights": {
        1: ["head-missing"],
        2: ["head-random"],
        3: ["embedding-random"],
        4: ["embedding-overwritten", "head-overwritten"],
        5: ["layer-renamed"],
        6: ["head-tied-wrongly"],
        7: ["norm-weight-missing"],
    },
    "vocab": {
        1: ["d2t-missing"],
        2: ["d2t-read-as-ids"],
        3: ["d2t-ramp"],
        4: ["d2t-shuffled"],
        5: ["t2d-first-ids"],
        6: ["d2t-stale"],
        7: ["t2d-too-few"],
    },
    "norm": {
        1: ["tap-post-norm"],
        2: ["fc-norm-skipped", "input-norm-skipped"],
        3: ["head-norm-skipped"],
        4: ["norm-gain-plus-one", "norm-gain-minus-one", "norm-gain-one-layer"],
        5: ["residual-dropped"],
        6: ["fc-norm-joint"],
    },
    "feedback": {
        1: ["feedback-post-norm", "feedback-pre-norm"],
        2: ["feedback-target-state"],
        3: ["feedback-stale"],
        4: ["second-layer-no-residual"],
        5: ["feedback-teacher-tokens"],
    },
    "rope": {
        1: ["rope-base-wrong"],
        2: ["rope-base-unread"],
        3: ["rope-interleaved"],
        4: ["rope-scaling-dropped", "rope-scaling-added"],
        5: ["position-limit-short"],
        6: ["positions-off-by-one", "step-positions-frozen"],
        7: ["window-from-target"],
        8: ["rope-partial-ignored"],
    },
    "shift": {
        1: ["token-shift-missing", "token-shift-two"],
        2: ["training-shift-twice"],
        3: ["chunk-tail-predicted"],
        4: ["gather-first-request"],
        5: ["ids-cast-wrong"],
    },
    "data": {
        1: ["states-zero"],
        2: ["states-of-other-request"],
        3: ["states-rows-shuffled"],
        4: ["states-off-by-one-layer"],
        5: ["mask-empty", "mask-full", "mask-shifted"],
        6: ["mask-empty-think"],
        7: ["states-truncated"],
    },
    "prompt": {
        1: ["think-block-dropped", "think-block-added"],
        2: ["template-other-family"],
        3: ["template-missing"],
        4: ["thinking-newline-extra"],
        5: ["system-prompt-unseen"],
    },
    "precision": {
        1: ["states-rotated"],
        2: ["target-quantised"],
        3: ["drafter-quantised"],
        4: ["drafter-target-quantisation"],
    },
    "engine": {
        1: ["draft-cache-empty"],
        2: ["draft-cache-not-refreshed"],
        3: ["block-table-wrong-group"],
        4: ["gather-later-requests"],
        5: ["nan-logits"],
        6: ["handover-states-random"],
        7: ["cache-drift"],
    },
    "flags": {
        1: ["algorithm-eagle"],
        2: ["draft-tokens-lowered"],
        3: ["draft-tokens-below-steps"],
        4: ["draft-sampling-unset"],
        5: ["draft-quantisation-ignored"],
        6: ["recipe-flag-not-saved"],
    },
    "metric": {
        1: ["tokens-after-end-counted"],
        2: ["rate-definition-old"],
        3: ["bonus-dropped"],
        4: ["rates-padded"],
        5: ["rates-at-different-k"],
    },
    "quality": {
        1: ["training-too-little"],
        2: ["language-unseen"],
        3: ["temperature-greedy-drafts"],
        4: ["sparse-target-batch-one"],
        5: ["overfit"],
    },
}

FIRST_CHECK = [
    "checkpoint-unreadable", "weights-missing", "weights-unexpected", "weights-nan", "weights-shape",
    "vocab-map-inconsistent", "hidden-size-mismatch", "target-vocab-mismatch", "contract-missing",
    "contract-edited", "weights-changed", "target-differs", "template-differs", "tokenizer-differs",
    "off-policy-records", "records-too-few", "coverage-low", "quality-low",
]  # fmt: skip


def test_every_mutation_has_its_cause_and_kind() -> None:
    seen: set[str] = set()
    for kind, numbered in MUTATIONS.items():
        assert list(numbered) == list(range(1, len(numbered) + 1))
        for slugs in numbered.values():
            for slug in slugs:
                assert causes.cause(slug).kind == kind, slug
                assert slug not in seen, slug
                seen.add(slug)
    assert [len(numbered) for numbered in MUTATIONS.values()] == [6, 7, 7, 6, 5, 8, 5, 7, 5, 4, 7, 6, 5, 5]


def test_check_has_its_causes() -> None:
    assert [slug for slug in FIRST_CHECK if slug not in causes.CAUSES] == []


def test_every_kind_is_used_and_named() -> None:
    assert tuple(MUTATIONS) == causes.KINDS
    assert {c.kind for c in causes.CAUSES.values()} == set(causes.KINDS) == set(causes.KIND_MEANINGS)


@pytest.mark.parametrize("slug", list(causes.CAUSES))
def test_cause_is_well_formed(slug: str) -> None:
    cause = causes.CAUSES[slug]
    assert cause.slug == slug
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)
    for text in (cause.sentence, cause.fix):
        assert text.endswith((".", '."'))
        assert text[0].isupper() or text.startswith(("d2t", "tie_word_embeddings"))
        assert "\n" not in text
        assert "  " not in text
    assert len(cause.sentence) <= 110


def test_unknown_slug_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="taps-of-by-one"):
        causes.cause("taps-of-by-one")
    with pytest.raises(KeyError):
        causes.cause("")


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ("[tapes]\na-b: C.\n  D.", "unknown kind"),
        ("a-b: C.\n  D.", "no kind"),
        ("[taps]\na-b: C.\n  D.\na-b: E.\n  F.", "twice"),
        ("[taps]\na-b\n  D.", "no sentence"),
    ],
)
def test_slips_in_the_table_are_caught(table: str, wrong: str) -> None:
    with pytest.raises(AssertionError):
        causes._parse(table)


def test_document_is_made_from_the_table() -> None:
    document = Path(__file__).parents[1] / "docs" / "causes.md"
    assert document.read_text(encoding="utf-8") == causes.as_markdown(), (
        "write eyas.causes.as_markdown() to docs/causes.md again"
    )
