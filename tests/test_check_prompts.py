"""Records against the chat template of their target: raw, another family's, another thought, another system prompt."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import templates
from eyas import provenance
from eyas.check import Case
from eyas.check.prompts import EMPTY_THOUGHT, look_at_prompts
from eyas.contract import declared
from eyas.records import Record

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n"
USER = "<|im_start|>user\nwhat is it?<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
THINKS = templates.CHATML.replace("assistant\n' }}", "assistant\n<think>\n\n</think>\n\n' }}")


def tokenizer(template: str | None = templates.CHATML) -> PreTrainedTokenizerFast:
    made = copy.copy(templates.tokenizer())
    made.chat_template = template
    return made


def record(head: str, answer: str = "it is a heron, a grey bird of shallow water") -> Record:
    words = templates.tokenizer()
    before, said = (words(text, add_special_tokens=False)["input_ids"] for text in (head, answer))
    ids = np.asarray([*before, *said], dtype=np.int32)
    return Record(ids, np.arange(len(ids)) >= len(before), "test")


def look(
    heads: list[str], template: str | None = templates.CHATML, declares: str | None = None, **more: Any
) -> tuple[dict[str, str], list[str]]:
    facts = declared(template_sha256=provenance.sha256_text(declares)) if declares else None
    case = Case("d", files=SimpleNamespace(contract=facts))  # type: ignore[arg-type]
    look_at_prompts(case, [record(head, **more) for head in heads], tokenizer(template))
    return {f.cause: f.severity for f in case.findings}, [n.what for n in case.not_checked]


GOOD = SYSTEM + USER + ANSWER
FAULTS = [
    ("template-missing", templates.CHATML, "what is it?\n"),
    ("template-other-family", templates.CHATML,
     "<|start_header_id|>user<|end_header_id|>\n\nwhat?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("think-block-added", templates.CHATML, GOOD + EMPTY_THOUGHT),
    ("think-block-dropped", THINKS, GOOD),
    ("thinking-newline-extra", templates.CHATML, GOOD + "\n"),
    ("thinking-newline-extra", THINKS, GOOD + EMPTY_THOUGHT + "\n"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "template", "head"), FAULTS)
def test_a_fault_of_the_prompt(cause: str, template: str, head: str) -> None:
    assert look([head] * 10, template) == ({cause: "note"}, [])
    assert look([head] * 10, template, template) == ({cause: "likely"}, [])
    assert look([head] * 10, template, "another template") == ({cause: "note"}, [])
    assert look([head] * 8 + [GOOD if template != THINKS else GOOD + EMPTY_THOUGHT] * 2, template, template) == ({}, [])


@pytest.mark.parametrize("head", [USER + ANSWER, SYSTEM.replace("helpful", "rude") + USER + ANSWER])
def test_another_system_prompt_is_a_note(head: str) -> None:
    assert look([head] * 10, templates.CHATML, templates.CHATML) == ({"system-prompt-unseen": "note"}, [])


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (templates.CHATML, GOOD),
        (templates.CHATML, SYSTEM + USER + ANSWER + "once<|im_end|>\n" + USER + ANSWER),
        (THINKS, GOOD + EMPTY_THOUGHT),
        (templates.QWEN3, USER + ANSWER),
        (templates.GEMMA,
         "<|begin_of_text|><start_of_turn>user\nwhat?<end_of_turn>\n<start_of_turn>model\n"),
        (None, "any text of a base model"),
    ],
)  # fmt: skip
def test_records_of_the_template_are_left_alone(template: str | None, head: str) -> None:
    assert look([head] * 10, template, template) == ({}, [])


def test_ids_of_another_tokenizer() -> None:
    case = Case("d", files=SimpleNamespace(contract=declared(tokenizer_sha256="x")))  # type: ignore[arg-type]
    wrong = record(GOOD)
    wrong.input_ids[3] = 100_000
    look_at_prompts(case, [wrong] * 4, tokenizer())
    assert [(f.cause, f.severity) for f in case.findings] == [("tokenizer-differs", "likely")]


def test_loops_are_no_quality() -> None:
    found, _ = look([GOOD] * 4, answer="on and on " * 20)
    assert found == {"text-loops": "note"}


def test_no_tokenizer_no_template_check() -> None:
    case = Case("d")
    look_at_prompts(case, [record(GOOD)], None)
    assert [n.what for n in case.not_checked] == ["prompts"]
