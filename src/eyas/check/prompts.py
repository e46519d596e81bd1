"""Were the records written by this target's chat template? Read from their heads, the tokens before the first answer.

A template is known by what it renders for words that stand nowhere else: around a user's word it writes

    [default system prompt] [opening] WORD [closing, and the opening of the answer]

Heads are decoded and held against these pieces; the pieces' own tokens decide whether a head is the template's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eyas import bench, provenance
from eyas.check.case import Case
from eyas.errors import TemplateError
from eyas.records import Record
from eyas.render import Renderer
from eyas.results import Evidence, Finding, NotChecked, Severity

LOOKED_AT = 64  # records
MOST = 0.9  # share of the records that must show the same for a cause to be named
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
MARKERS: Mapping[str, tuple[str, ...]] = {
    "ChatML": ("<|im_start|>",),
    "Llama 3": ("<|start_header_id|>",),
    "Gemma": ("<start_of_turn>",),
    "Mistral": ("[INST]",),
    "DeepSeek": ("<｜User｜>", "<｜Assistant｜>"),
    "Phi and GLM": ("<|user|>", "<|assistant|>"),
    "Harmony": ("<|start|>",),
}
_SYSTEM, _USER, _AGAIN, _ANSWER = "quillsystem", "quilluser", "quillagain", "quillanswer"


@dataclass(frozen=True)
class Pieces:
    """What a template writes around words. ``system``: its own system turn, empty where it has none."""

    system: str
    opening: str
    answer: str
    system_opening: str | None
    family: str | None


def look_at_prompts(
    case: Case,
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase | None,
    manifest: Mapping[str, Any] | None = None,
) -> None:
    """Heads of the records against the template of ``tokenizer``; answers that loop. A fault is more than a note only
    where the contract declares this very template."""
    _loops(case, records)
    if tokenizer is None:
        case.not_checked.append(NotChecked("prompts", "the target has no tokenizer"))
        return
    heads = [r.input_ids[: int(r.loss_mask.argmax())].tolist() for r in records[:LOOKED_AT]]
    heads = [head for head in heads if len(head) > 1]
    if not heads or not _ids_fit(case, heads, tokenizer):
        return
    if not tokenizer.chat_template or (manifest or {}).get("template") == "raw":
        return
    try:
        pieces = pieces_of(tokenizer)
    except TemplateError as error:
        case.not_checked.append(NotChecked("prompts", f"the chat template renders no plain turn: {error.message}"))
        return
    seen = Counter(_fault(str(tokenizer.decode(head)), pieces) for head in heads)
    cause, count = seen.most_common(1)[0]
    if cause is None or count < MOST * len(heads):
        return
    declared = _declares(case, tokenizer)
    severity: Severity = "likely" if declared and cause != "system-prompt-unseen" else "note"
    first = next(head for head in heads if _fault(str(tokenizer.decode(head)), pieces) == cause)
    text = str(tokenizer.decode(first))
    case.findings.append(
        Finding(
            cause,
            severity,
            _SAID[cause].format(count=count, n=len(heads))
            + (" The drafter was trained on this template's text." if declared else ""),
            [
                Evidence("records that show it", count, 0, f"heads of {len(heads)} records"),
                Evidence("head of a record", _short(text), _short(_wanted(pieces)), "chat template of the tokenizer"),
            ],
        )
    )


_SAID = {
    "template-missing": "{count} of {n} records are raw text: no turn is marked as this target's chat template does.",
    "template-other-family": "{count} of {n} records carry the marks of another family's chat template.",
    "think-block-added": "{count} of {n} records have an empty think block before the answer; not so the template.",
    "think-block-dropped": "{count} of {n} records lack the empty think block the template writes before answers.",
    "thinking-newline-extra": "{count} of {n} records have a newline more before the answer than the template writes.",
    "system-prompt-unseen": "{count} of {n} records do not begin with the system prompt that the template writes.",
}


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Raises TemplateError where the template refuses a plain conversation or loses its words."""
    renderer = Renderer(tokenizer, frozenset())
    user = {"role": "user", "content": _USER}
    single = renderer.text([user], prompt=True)
    several = renderer.text(
        [user, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _AGAIN}], prompt=True
    )
    if _USER not in single or _ANSWER not in several or _AGAIN not in several:
        raise TemplateError(
            "A word of the conversation is not in its rendering.", way_out="Look at the chat template of the target."
        )
    before, _, after = single.partition(_USER)
    between = several.partition(_ANSWER)[2].partition(_AGAIN)[0]
    shared = 0
    while shared < min(len(before), len(between)) and before[-1 - shared] == between[-1 - shared]:
        shared += 1
    opening = before[len(before) - shared :]
    if (turn := max((opening.rfind(m) for marks in MARKERS.values() for m in marks), default=-1)) > 0:
        opening = opening[turn:]  # the end of the turn before is no part of it
    try:
        with_system = renderer.text([{"role": "system", "content": _SYSTEM}, user], prompt=True)
        system_opening = with_system.partition(_SYSTEM)[0] if _SYSTEM in with_system else None
    except TemplateError:
        system_opening = None
    return Pieces(before[: len(before) - len(opening)], opening, after, system_opening, _family(single))


def _family(text: str) -> str | None:
    return next((name for name, marks in MARKERS.items() if any(mark in text for mark in marks)), None)


def _fault(text: str, pieces: Pieces) -> str | None:
    """What sets the head of one record apart from the template's; None where nothing does."""
    family = _family(text)
    if family != pieces.family:
        return "template-missing" if family is None else "template-other-family"
    if pieces.opening and pieces.opening not in text:
        return "template-missing" if family is None else None
    if not text.endswith(pieces.answer):
        bare = pieces.answer.removesuffix(EMPTY_THOUGHT)
        if text.endswith(pieces.answer + EMPTY_THOUGHT):
            return "think-block-added"
        if text.endswith(pieces.answer + "\n"):
            return "thinking-newline-extra"
        if bare != pieces.answer and text.endswith(bare):
            return "think-block-dropped"
        return None
    if pieces.system and not text.startswith(pieces.system):
        return "system-prompt-unseen"
    if not pieces.system and pieces.system_opening and pieces.system_opening != pieces.opening:
        return "system-prompt-unseen" if text.startswith(pieces.system_opening) else None
    return None


def _ids_fit(case: Case, heads: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Ids the tokenizer has, and the ones it gives for the text they spell."""
    size = len(tokenizer)
    beyond = [max(head) for head in heads if max(head) >= size]
    again = sum(tokenizer(str(tokenizer.decode(h)), add_special_tokens=False)["input_ids"] == h for h in heads)
    if not beyond and again >= (1 - MOST) * len(heads):
        return True
    contract = case.files.contract if case.files else None
    declared = contract is not None and "tokenizer_sha256" in contract
    what = f"{len(beyond)} hold ids from {size} on" if beyond else f"the text of {len(heads) - again} gives other ids"
    case.findings.append(
        Finding(
            "tokenizer-differs",
            "likely" if declared else "note",
            f"Of {len(heads)} records {what}: they were cut by another tokenizer than the target's.",
            [Evidence("heads that come back from text as they were", again, len(heads), "records")],
        )
    )
    return False


def _declares(case: Case, tokenizer: PreTrainedTokenizerBase) -> bool:
    contract = case.files.contract if case.files else None
    if contract is None or "template_sha256" not in contract or contract.facts["template_sha256"].origin != "declared":
        return False
    return bool(contract["template_sha256"] == provenance.sha256_text(str(tokenizer.chat_template)))


def _loops(case: Case, records: Sequence[Record]) -> None:
    looping = [bench.repeats(r.input_ids[r.loss_mask].tolist()) for r in records]
    count = sum(one.loops for one in looping)
    if count * 2 > len(records):
        repeated, total = sum(one.repeated for one in looping), sum(one.total for one in looping)
        case.findings.append(
            Finding(
                "text-loops",
                "note",
                f"{count} of {len(records)} answers repeat themselves; what is measured on loops is no quality.",
                [Evidence("8-grams that occurred before", round(repeated / max(total, 1), 3), "<= 0.3", "records")],
            )
        )


def _wanted(pieces: Pieces) -> str:
    return f"{pieces.system}{pieces.opening}…{pieces.answer}"


def _short(text: str) -> str:
    return text if len(text) <= 240 else f"{text[:120]}…{text[-120:]}"
