"""Text that a template rendered already, calls and thinking, and templates that are not prefix-stable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import RecordsError, TemplateError
from eyas.preformatted import Preformatted
from eyas.records import Record
from eyas.render import RAW_TEMPLATE, Renderer
from templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, STRIPS_THINKING, tokenizer

ENDS = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", GEMMA: "<end_of_turn>", MISTRAL: "<|im_end|>", QWEN3: "<|im_end|>"}
TEMPLATES = pytest.mark.parametrize("template", ENDS, ids=["chatml", "llama3", "gemma", "mistral", "qwen3"])


def renderer(template: str, *ends: str) -> Renderer:
    names = ends or (ENDS.get(template, "<|im_end|>"),)
    return Renderer(tokenizer(), frozenset(int(tokenizer().convert_tokens_to_ids(e)) for e in names), template)


def chat(*turns: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def supervised(record: Record) -> list[str]:
    return [tokenizer().decode(record.input_ids[a : b + 1].tolist()) for a, b in record.spans()]


def same(one: Record, other: Record) -> bool:
    return np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.loss_mask, other.loss_mask)


def from_text(template: str, text: str, *, cut: bool = False, ends: tuple[str, ...] = ()) -> Record:
    return Preformatted(renderer(template, *ends)).record(text, "s", cut=cut, where="f, row 1")


# -- preformatted ---------------------------------------------------------------------------------------------


@TEMPLATES
@pytest.mark.parametrize("turns", [("Hi", "Hello"), ("Hi", "Hello", "More?", "No."), ("Hi", "Hello", "Unanswered")])
@pytest.mark.parametrize("cut", [False, True])
def test_a_text_gives_the_record_of_its_conversation(template: str, turns: tuple[str, ...], cut: bool) -> None:
    made = renderer(template)
    text = made.text(chat(*turns), prompt=False)
    assert same(from_text(template, text, cut=cut), made.record(chat(*turns), "s", cut=cut, where=""))


@TEMPLATES
@given(
    turns=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<[|"), max_size=8), min_size=2, max_size=6)
)
@settings(max_examples=40, deadline=None)
def test_any_conversation_and_its_text_give_one_record(template: str, turns: list[str]) -> None:
    made = renderer(template)
    text = made.text(chat(*turns), prompt=False)
    record = made.record(chat(*turns), "s", cut=False, where="")
    assert same(from_text(template, text), record)
    # Whatever is said: every answer and nothing of the user's is supervised, and the last token is.
    trims = template in (LLAMA3, GEMMA)
    space = " " if template == MISTRAL else ""
    wanted = [space + (t.strip() if trims else t) + ENDS[template] for t in turns[1::2]]
    decoded = [tokenizer().decode(record.input_ids[a : b + 1].tolist()) for a, b in record.spans()]
    assert decoded == wanted or trims  # Jinja and Python trim different white space
    assert len(decoded) == len(turns) // 2
    assert record.loss_mask[-1]


@TEMPLATES
def test_a_text_cut_in_its_last_answer_is_supervised_to_its_end(template: str) -> None:
    made = renderer(template)
    text = made.text(chat("Hi", "Hello", "More?", "And so on"), prompt=False)
    record = from_text(template, text[: text.index("o on")])
    assert [s.strip() for s in supervised(record)] == ["Hello" + ENDS[template], "And s"]
    assert record.loss_mask[-1]


def test_a_template_with_two_end_tokens_and_one_without_any() -> None:
    two = CHATML.replace("message['content'] + '<|im_end|>'", "message['content'] + '<|eot_id|><|im_end|>'")
    for ends in (("<|im_end|>",), ("<|eot_id|>", "<|im_end|>"), ()):
        made = Renderer(tokenizer(), renderer(two, *ends).eos_ids if ends else frozenset(), two)
        text = made.text(chat("Hi", "Hello", "More?", "No."), prompt=False)
        record = Preformatted(made).record(text, "s", cut=False, where="")
        assert same(record, made.record(chat("Hi", "Hello", "More?", "No."), "s", cut=False, where=""))


def test_plain_text_and_other_templates_are_refused_by_name() -> None:
    with pytest.raises(RecordsError, match=r"f, row 1: its 'text' holds no generation prompt") as caught:
        from_text(CHATML, "Once upon a time")
    assert "--raw" in caught.value.way_out
    for template, told in ((LLAMA3, "Llama 3"), (GEMMA, "Gemma"), (MISTRAL, "Llama 2 or Mistral")):
        text = renderer(template).text(chat("Hi", "Hello"), prompt=False)
        with pytest.raises(RecordsError, match=told):
            from_text(CHATML, text)
    mixed = renderer(CHATML).text(chat("Hi", "Hello"), prompt=False) + "[INST] Hi [/INST]"
    with pytest.raises(RecordsError, match="Mistral"):
        from_text(CHATML, mixed)


def test_an_answer_that_does_not_end_before_the_next_is_refused() -> None:
    text = renderer(CHATML).text(chat("Hi", "Hello", "More?", "No."), prompt=False)
    with pytest.raises(RecordsError, match="does not end before the next one"):
        from_text(CHATML, text.replace("Hello<|im_end|>", "Hello").replace("More?<|im_end|>", "More?"))


def test_only_a_generation_prompt_holds_no_answer() -> None:
    with pytest.raises(RecordsError, match="every answer is empty"):
        from_text(CHATML, renderer(CHATML).text(chat("Hi"), prompt=True))


def test_marks_that_are_no_whole_tokens_are_refused() -> None:
    """A tokenizer that joins what ends the generation prompt with what begins the answer."""
    made = renderer(CHATML)
    preformatted = Preformatted(made)
    plain = made.plain_ids
    made.plain_ids = lambda text: plain(text.replace("assistant\nH", "assistant\x00"))  # type: ignore[method-assign]
    text = made.text(chat("Hi", "Hello", "More?", "No."), prompt=False)
    with pytest.raises(RecordsError, match="2 answers begin in its text, 1 in its tokens"):
        preformatted.record(text, "s", cut=False, where="f, row 1")


def test_a_template_that_marks_nothing_cannot_be_read_back() -> None:
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(TemplateError, match="does not mark where an answer begins"):
        Preformatted(renderer(bare))


# -- not prefix-stable ----------------------------------------------------------------------------------------


def test_thinking_that_is_stripped_later_gives_a_record_a_turn() -> None:
    """Each as the engine sees it at that turn: earlier thinking gone, this turn's supervised."""
    made = renderer(STRIPS_THINKING)
    turns = chat("Hi", "<think>a</think>One", "More?", "<think>b</think>Two", "And?", "Three")
    records = made.records(turns, "s", cut=False, where="")
    assert [supervised(r) for r in records] == [
        ["<think>a</think>One<|im_end|>"],
        ["<think>b</think>Two<|im_end|>"],
        ["Three<|im_end|>"],
    ]
    for i, record in zip((1, 3, 5), records, strict=True):
        first = record.spans()[0][0]
        assert record.input_ids[:first].tolist() == made.ids(turns[:i], prompt=True)
    cut = made.records(turns, "s", cut=True, where="")
    assert [supervised(r)[0] for r in cut] == [
        "<think>a</think>One<|im_end|>",
        "<think>b</think>Two<|im_end|>",
        "Three",
    ]


def test_a_stable_conversation_stays_one_record() -> None:
    assert len(renderer(STRIPS_THINKING).records(chat("Hi", "One", "More?", "Two"), "s", cut=False, where="")) == 1


def test_a_turn_not_behind_its_own_prompt_is_refused_however_it_is_cut() -> None:
    unlike = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>' }}")
    for turns in (("Hi", "Hello"), ("Hi", "Hello", "More?", "No.")):
        with pytest.raises(TemplateError, match="not prefix-stable"):
            renderer(unlike).records(chat(*turns), "s", cut=False, where="")


# -- tools and thinking ---------------------------------------------------------------------------------------

CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Graz"}}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    {"role": "tool", "content": "wind", "tool_call_id": "c1"},
    {"role": "assistant", "content": "No.", "reasoning_content": "it is dry"},
]


def test_a_template_that_knows_tools_renders_them_itself() -> None:
    made = renderer(QWEN3)
    assert (made.knows.calls, made.knows.results, made.knows.thinking) == (True, True, True)
    record = made.record(TOOL_TURNS, "s", cut=False, where="", tools=[{"name": "weather"}])
    call = '<tool_call>\nweather {"city": "Graz"}\n</tool_call>'
    assert supervised(record) == [
        f"<think>\nlook it up\n</think>\n\n\n{call}\n{call}<|im_end|>",
        "<think>\nit is dry\n</think>\n\nNo.<|im_end|>",
    ]
    whole = tokenizer().decode(record.input_ids.tolist())
    assert whole.startswith('<|im_start|>system\n# Tools\n{"name": "weather"}')
    assert "<tool_response>\nsun\n</tool_response>" in whole


def test_thinking_has_two_names_among_templates() -> None:
    other = renderer(QWEN3.replace("reasoning_content", "thinking"))
    assert other.knows.thinking
    for made in (renderer(QWEN3), other):
        assert supervised(made.record(TOOL_TURNS, "s", cut=False, where=""))[1].startswith("<think>\nit is dry\n")


def test_what_a_template_does_not_know_is_written_into_the_text() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
    said = [
        f"<think>\nlook it up\n</think>\n\n\n{call}\n{call}",
        "<think>\nit is dry\n</think>\n\nNo.",
    ]
    made = renderer(CHATML)  # it knows the role of a tool as it knows any role, and no calls
    assert (made.knows.calls, made.knows.results, made.knows.thinking) == (False, True, False)
    record = made.record(TOOL_TURNS, "s", cut=False, where="")
    assert supervised(record) == [text + "<|im_end|>" for text in said]
    assert "<|im_start|>tool\nsun<|im_end|>" in tokenizer().decode(record.input_ids.tolist())
    strict = renderer(GEMMA)  # it refuses the role, and two users in a row
    assert not strict.knows.results
    record = strict.record(TOOL_TURNS, "s", cut=False, where="")
    assert supervised(record) == [text + "<end_of_turn>" for text in said]
    results = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
    assert f"<start_of_turn>user\n{results}<end_of_turn>" in tokenizer().decode(record.input_ids.tolist())


def test_messages_are_not_changed_by_rendering() -> None:
    import copy

    before = copy.deepcopy(TOOL_TURNS)
    for template in (CHATML, GEMMA, QWEN3):
        renderer(template).records(TOOL_TURNS, "s", cut=False, where="")
    assert before == TOOL_TURNS


# -- no template ----------------------------------------------------------------------------------------------


def raw(bos: bool) -> Renderer:
    """With a tokenizer that puts its token for the beginning before any text, or with one that does not."""
    from tokenizers.processors import TemplateProcessing

    made = tokenizer.__wrapped__()
    if bos:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", made.bos_token_id)]
        )
    return Renderer(made, frozenset({int(made.eos_token_id)}), RAW_TEMPLATE)


@pytest.mark.parametrize("bos", [False, True])
def test_raw_text_is_supervised_but_for_its_first_token(bos: bool) -> None:
    record = raw(bos).raw_text("Once", "s", "")
    start = "<|begin_of_text|>" if bos else ""
    assert tokenizer().decode(record.input_ids.tolist()) == start + "Once"
    assert record.loss_mask.tolist() == [False] + [True] * (len(record.input_ids) - 1)
    with pytest.raises(RecordsError, match="f, row 1: 0 tokens" if not bos else "f, row 1: 1 tokens"):
        raw(bos).raw_text("", "s", "f, row 1")


@pytest.mark.parametrize("bos", [False, True])
def test_a_completion_stands_right_behind_its_prompt(bos: bool) -> None:
    made = raw(bos)
    start = "<|begin_of_text|>" if bos else ""
    record = made.completion("1 + 1 =", " 2", "s", cut=False, where="")
    assert tokenizer().decode(record.input_ids.tolist()) == start + "1 + 1 = 2<|im_end|>"
    assert supervised(record) == [" 2<|im_end|>"]
    assert supervised(made.completion("1 + 1 =", " 2", "s", cut=True, where="")) == [" 2"]
    turns = made.record(chat("Hi", "Hello"), "s", cut=False, where="")
    assert tokenizer().decode(turns.input_ids.tolist()) == start + "Hi\nHello<|im_end|>"
