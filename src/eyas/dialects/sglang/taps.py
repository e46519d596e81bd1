"""Which states SGLang's target classes capture for the ids of a drafter's config.

An id list goes to the target's ``set_eagle3_layers_to_capture``, which turns it into layers at whose entrance the
residual stream is kept: layer i gives tap i. Most add one first; some decide by the data. The list is a set, states
come in the order the layers run. An architecture that has no row has no such method, and the engine stops at start
(model_executor/model_runner_components/attention_backend_setup.py:55); the Transformers fallback has none either.

Rows were got by running the setters of every registered class (runs/sglang_setters.py), tests/fixtures/engines holds
what they said. Columns that differ in an older release are in ``CHANGES``, each with the first release that has the
row's own value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Literal

from packaging.version import Version

Rule = Literal["plus-one", "first-id", "last-id"]
"""k is tap k+1; the same only if the first id is 1, else tap k; the same unless the largest id is n."""


@dataclass(frozen=True)
class Capture:
    where: str
    rule: Rule = "plus-one"
    last: bool = False
    """Whether the forward pass looks once more after the last layer, so that tap n is reached."""
    marks: Literal["none", "checked", "counted"] = "none"
    """``counted``: layers are marked one by one, so an id past the last is an IndexError at start; and a negative one
    counts from the end. ``checked``: an IndexError too, but a list decides what is kept."""
    shift: int = 0
    """Added to the default taps [2, n//2, n-3]."""
    embedding: bool = True
    """False: keeping tap 0 adds the missing residual to it, a TypeError at the first forward."""
    branch: bool = False
    """Keeps hidden without the residual: what the last MLP adds, not the stream."""
    unread: bool = False
    """The setter writes a list that the forward pass never looks at."""


def _rows(how: Capture, *names: str) -> dict[str, Capture]:
    return dict.fromkeys(names, how)


_DEEPSEEK = {
    **_rows(
        Capture("models/deepseek_v2.py:3458", "first-id"),
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM",
    ),
    **_rows(Capture("models/glm4_moe_lite.py:805", "first-id"), "Glm4MoeLiteForCausalLM"),
    **_rows(Capture("models/kimi_k25.py:928", "first-id"), "KimiK25ForConditionalGeneration"),
}  # fmt: skip
_LLAMA = {
    **_rows(
        Capture("models/llama.py:929"),
        "LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM",
        "IQuestCoderForCausalLM", "TeleFLMForCausalLM", "Llama4ForCausalLM",
    ),
    **_rows(Capture("models/mllama4.py:971"), "Llama4ForConditionalGeneration"),
    **_rows(Capture("models/apertus.py:675"), "ApertusForCausalLM"),
    **_rows(Capture("models/exaone_moe.py:866"), "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    **_rows(Capture("models/glm4_moe.py:1269"), "Glm4MoeForCausalLM"),
    **_rows(Capture("models/longcat_flash.py:1112"), "LongcatFlashForCausalLM"),
}  # fmt: skip
_GPT_OSS = _rows(Capture("models/gpt_oss.py:1337", "last-id", last=True), "GptOssForCausalLM")
_PLAIN = {
    **_rows(Capture("models/qwen2.py:781"), "Qwen2ForCausalLM"),
    **_rows(Capture("models/qwen3.py:778"), "Qwen3ForCausalLM"),
    **_rows(Capture("models/qwen2_5_vl.py:990"), "Qwen2_5_VLForConditionalGeneration"),
    **_rows(Capture("models/qwen3_vl.py:1777"), "Qwen3VLForConditionalGeneration", "Cosmos3ForConditionalGeneration"),
    **_rows(
        Capture("models/bailing_moe.py:1098"),
        "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM",
    ),
    **_rows(Capture("models/minimax_m2.py:1067"), "MiniMaxM2ForCausalLM"),
    **_rows(Capture("models/glm5_next.py:1533"), "Glm5NextForConditionalGeneration"),
}  # fmt: skip
_VL_MOE = _rows(
    Capture("models/qwen3_vl.py:1777", marks="checked"),
    "Qwen3VLMoeForConditionalGeneration", "InternS1ProForConditionalGeneration",
)  # fmt: skip
_QWEN_35 = _rows(
    Capture("models/qwen3_vl.py:1777", marks="counted"),
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration", "InternS2MobiusForConditionalGeneration",
)  # fmt: skip
_MARKED = {
    **_rows(Capture("models/qwen2_moe.py:1418", marks="counted"), "Qwen2MoeForCausalLM"),
    **_rows(Capture("models/qwen3_moe.py:1128", marks="counted"), "Qwen3MoeForCausalLM", "MellumForCausalLM"),
    **_rows(Capture("models/qwen3_next.py:1286", marks="counted"), "Qwen3NextForCausalLM"),
    **_rows(Capture("models/qwen3_5_text.py:150", marks="counted"), "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
}
_GEMMA = {
    **_rows(
        Capture("models/gemma3_causal.py:917", last=True, branch=True), "Gemma3ForCausalLM", "EmbeddingGemmaModel"
    ),
    **_rows(Capture("models/gemma3_mm.py:543", last=True, branch=True), "Gemma3ForConditionalGeneration"),
    **_rows(Capture("models/gemma4_causal.py:1495", last=True), "Gemma4ForCausalLM"),
    **_rows(
        Capture("models/gemma4_mm.py:1155", last=True),
        "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    ),
}  # fmt: skip
_MINIMAX_M3 = {
    **_rows(Capture("models/minimax_m3.py:2056", last=True), "MiniMaxM3SparseForCausalLM"),
    **_rows(
        Capture("models/minimax_m3_vl.py:246", last=True, shift=1), "MiniMaxM3SparseForConditionalGeneration"
    ),
}  # fmt: skip

TARGETS: dict[str, Capture] = {
    **_DEEPSEEK, **_LLAMA, **_GPT_OSS, **_PLAIN, **_VL_MOE, **_QWEN_35, **_MARKED, **_GEMMA, **_MINIMAX_M3,
}  # fmt: skip
"""0.5.23, by architecture: the name in ``architectures`` of the target's outer config."""


@dataclass(frozen=True)
class Change:
    """In releases before ``since``, ``names`` had ``before`` instead of the row's own; None: no class or method."""

    since: Version
    names: tuple[str, ...]
    before: Mapping[str, object] | None


FIRST_ID_SINCE = Version("0.5.13")


def _since(version: str, names: Iterable[str], before: Mapping[str, object] | None) -> Change:
    return Change(Version(version), tuple(names), before)


_NO_EMBEDDING = {"embedding": False}
_EARLIER = (
    "Glm4MoeLiteForCausalLM", "Glm4MoeForCausalLM", "LongcatFlashForCausalLM",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration",
)  # fmt: skip
CHANGES = (
    _since("0.5.13", _DEEPSEEK, {"rule": "plus-one"}),  # pull request 25454
    _since("0.5.13", ["Gemma4UnifiedForConditionalGeneration"], None),
    _since("0.5.14", set(_DEEPSEEK) - {"Glm4MoeLiteForCausalLM"}, _NO_EMBEDDING),
    _since("0.5.16", ["MellumForCausalLM", "MiniMaxM3SparseForCausalLM"], None),
    _since("0.5.17", ["EmbeddingGemmaModel"], None),
    _since("0.5.17", _GPT_OSS, {"rule": "plus-one", "last": False, **_NO_EMBEDDING}),
    _since("0.5.18", ["MiniMaxM3SparseForCausalLM"], {"unread": True}),
    _since("0.5.18", ["MiniMaxM3SparseForConditionalGeneration", "InternS2MobiusForConditionalGeneration"], None),
    _since("0.5.20", ["Cosmos3ForConditionalGeneration", "Glm5NextForConditionalGeneration"], None),
    _since("0.5.20", ["Qwen4ExpForConditionalGeneration"], None),
    _since("0.5.21", _EARLIER, _NO_EMBEDDING),
    _since("0.5.22", set(_LLAMA) - set(_EARLIER), _NO_EMBEDDING),
    _since("0.5.22", _QWEN_35, {"unread": True}),
    _since("0.5.22", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "ExaoneMoeForCausalLM"], None),
    _since("0.5.22", _VL_MOE, {"marks": "none"}),
    _since("0.5.23", _MINIMAX_M3, {"last": False}),
)
"""Each was seen in the wheels on both sides, from 0.5.12.post1 on."""


@cache
def targets(version: Version) -> dict[str, Capture]:
    """The table of a release."""
    table = dict(TARGETS)
    for change in CHANGES:
        if version < change.since:
            for name in change.names:
                if change.before is None:
                    table.pop(name, None)
                elif name in table:
                    table[name] = replace(table[name], **change.before)  # type: ignore[arg-type]
    return table


# -- one list of ids -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """``asked``: layers the setter wrote. ``taps``: of these, those the forward pass reaches, as they are concatenated.

    ``stops``: the Python error with which the engine stops, "IndexError" at start or "TypeError" at the first forward.
    """

    asked: tuple[int, ...]
    taps: tuple[int, ...]
    stops: Literal["IndexError", "TypeError"] | None = None


def capture(how: Capture, n: int, ids: Sequence[int] | None) -> Captured:
    """What a target of ``n`` layers captures for ``ids``, None for a config without them."""
    asked = _asked(how, n, ids)
    if how.unread:
        return Captured(asked, ())
    if how.marks != "none" and any(not -n <= t < n for t in asked):
        return Captured(asked, (), "IndexError")
    kept = {t % n if how.marks == "counted" else t for t in asked}
    taps = tuple(sorted(t for t in kept if 0 <= t < n or (t == n and how.last)))
    if not how.embedding and 0 in taps:
        return Captured(asked, (), "TypeError")
    return Captured(asked, taps)


def _asked(how: Capture, n: int, ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return tuple(t + how.shift for t in (2, n // 2, n - 3))
    as_is = (how.rule == "first-id" and not (ids and ids[0] == 1)) or (
        how.rule == "last-id" and bool(ids) and max(ids) == n
    )
    return tuple(ids) if as_is else tuple(k + 1 for k in ids)


def spell(how: Capture, n: int, taps: Sequence[int]) -> list[int] | None:
    """Ids for which exactly ``taps`` arrive, in this order and none missing; None where no list does."""
    for offset in (1, 0):
        ids = [t - offset for t in taps]
        got = capture(how, n, ids)
        if got.stops is None and got.taps == tuple(taps) and len(got.asked) == len(taps):
            return ids
    return None


def nearest(how: Capture, n: int, taps: Sequence[int]) -> list[int] | None:
    """The taps most like ``taps`` that can be spelled: sorted, distinct, moved as little as it takes."""
    wanted = sorted(set(taps))
    candidates = _moved(wanted, n)
    return next((list(c) for c in candidates if spell(how, n, c) is not None), None)


def _moved(taps: Sequence[int], n: int) -> Iterable[tuple[int, ...]]:
    """Lists by how far they are from ``taps``: up to four of them moved by one or two, then all of them together."""
    base = [min(max(t, 0), n) for t in taps]
    moves = [
        tuple(zip(which, steps, strict=True))
        for several in range(min(len(base), 4) + 1)
        for which in combinations(range(len(base)), several)
        for steps in product((1, -1, 2, -2), repeat=several)
    ]
    for move in sorted(moves, key=lambda m: sum(abs(s) for _, s in m)):
        moved = list(base)
        for i, step in move:
            moved[i] += step
        if len(set(moved)) == len(moved) and all(0 <= t <= n for t in moved):
            yield tuple(sorted(moved))
    for step in (1, -1, 2, -2, 3, -3):
        if all(0 <= t + step <= n for t in base):
            yield tuple(t + step for t in base)
