"""Masks from chat templates, records from JSON lines, and every way either can be wrong.

Tokenizers are built here: byte-level, no merges, so one byte is one token and each special token is one too.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from eyas import records
from eyas.conversations import messages_of
from eyas.errors import InputError, RecordsError, TemplateError
from eyas.records import Record, record_of
from eyas.render import Renderer
from templates import CHATML, LLAMA3, STRIPS_THINKING, tokenizer


def token(text: str) -> int:
    return int(tokenizer().convert_tokens_to_ids(text))


def renderer(template: str = CHATML, *ends: str) -> Renderer:
    return Renderer(tokenizer(), frozenset(map(token, ends or ("<|im_end|>",))), template)


def said(*turns: str) -> list[dict[str, str]]:
    """Turns that alternate from the user's on; a first one with "system: " in front is the system's."""
    system = [{"role": "system", "content": turns[0][8:]}] if turns[0].startswith("system: ") else []
    rest = turns[len(system) :]
    return system + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(rest)]


def made(messages: list[dict[str, str]], template: str = CHATML, *ends: str, cut: bool = False) -> Record:
    return renderer(template, *ends).record(messages, "test", cut=cut, where="chat.jsonl, line 3")


def supervised(record: Record) -> list[str]:
    return [tokenizer().decode(record.input_ids[a : b + 1].tolist()) for a, b in record.spans()]


def whole(record: Record) -> str:
    return str(tokenizer().decode(record.input_ids.tolist()))


# -- masks ----------------------------------------------------------------------------------------------------


def test_chatml_supervises_the_answer_and_its_end() -> None:
    record = made(said("Hi", "Hello there"))
    assert supervised(record) == ["Hello there<|im_end|>"]
    assert whole(record) == (
        "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>"
    )
    assert record.input_ids.dtype == np.int32
    assert record.loss_mask.dtype == np.bool_
    assert record.n_response_tokens == len("Hello there") + 1
    assert record.source == "test"


def test_every_assistant_turn_is_supervised_and_nothing_between() -> None:
    """The newline after an end token is the template's: no engine ever generates it."""
    record = made(said("system: Be brief", "Hi", "Hello", "More?", "No."))
    assert supervised(record) == ["Hello<|im_end|>", "No.<|im_end|>"]
    assert whole(record).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi")
    first, second = record.spans()
    between = tokenizer().decode(record.input_ids[first[1] + 1 : second[0]].tolist())
    assert between == "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    assert record.loss_mask[-1]


def test_llama_3_supervises_to_its_own_end_token() -> None:
    record = made(said("system: Be brief", "Hi", " Hello ", "More?", "No."), LLAMA3, "<|eot_id|>")
    assert supervised(record) == ["Hello<|eot_id|>", "No.<|eot_id|>"]
    assert record.input_ids[0] == token("<|begin_of_text|>")
    assert int((record.input_ids == token("<|begin_of_text|>")).sum()) == 1


def test_the_text_is_the_templates_to_the_byte() -> None:
    text = "Grüße, 世界 🙂"
    record = made(said("?", text))
    assert supervised(record) == [text + "<|im_end|>"]
    assert record.n_response_tokens == len(text.encode()) + 1


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert whole(made(said("Hi", "Hello", "Unanswered"))) == whole(made(said("Hi", "Hello")))


def test_an_answer_cut_by_a_length_limit_has_no_end() -> None:
    record = made(said("Hi", "Hello", "More?", "And so o"), cut=True)
    assert supervised(record) == ["Hello<|im_end|>", "And so o"]  # the cut is the last turn's alone
    assert whole(record).endswith("And so o")
    assert supervised(made(said("Hi", "Hell"), LLAMA3, "<|eot_id|>", cut=True)) == ["Hell"]


def test_without_end_tokens_a_turn_is_supervised_whole() -> None:
    record = Renderer(tokenizer(), frozenset(), CHATML).record(said("Hi", "Hello"), "test", cut=False, where="")
    assert supervised(record) == ["Hello<|im_end|>\n"]


def test_an_end_token_inside_the_answer_does_not_end_it() -> None:
    assert supervised(made(said("Hi", "a<|im_end|>b"))) == ["a<|im_end|>b<|im_end|>"]


def test_a_template_that_strips_earlier_thinking_is_refused_by_the_turn() -> None:
    thought = "<think>hm</think>Hello"
    assert supervised(made(said("Hi", thought), STRIPS_THINKING)) == [thought + "<|im_end|>"]
    assert supervised(made(said("Hi", "Hello", "More?", thought), STRIPS_THINKING))[1] == thought + "<|im_end|>"
    with pytest.raises(TemplateError, match=r"chat\.jsonl, line 3, turn 2: .* not prefix-stable"):
        made(said("Hi", thought, "More?", "No."), STRIPS_THINKING)
    with pytest.raises(TemplateError, match=r"line 3, turn 4: .* not prefix-stable"):
        made(said("Hi", "Hello", "More?", thought, "And?", "No."), STRIPS_THINKING)


def test_a_template_with_another_generation_prompt_is_refused() -> None:
    """Rendered answers start otherwise than the prompt the engine would send."""
    unlike = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>' }}")
    with pytest.raises(TemplateError, match=r"turn 2: .* not prefix-stable"):
        made(said("Hi", "Hello"), unlike)


def test_a_template_that_refuses_a_conversation_says_why() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first!') }}{% endif %}" + CHATML
    assert supervised(made(said("Hi", "Hello"), strict)) == ["Hello<|im_end|>"]
    with pytest.raises(TemplateError, match="The chat template refuses this conversation: user first!"):
        made(said("system: S", "Hi", "Hello"), strict)


def test_no_template_is_an_error_and_one_of_the_tokenizer_is_used() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Renderer(tokenizer(), frozenset())
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, chat_template=CHATML)
    assert Renderer(own, frozenset()).text(said("Hi"), prompt=True) == renderer().text(said("Hi"), prompt=True)


@pytest.mark.parametrize("messages", [said("Hi"), said("system: S", "Hi"), said("system: S")])
def test_no_answer_is_nothing_to_learn_from(messages: list[dict[str, str]]) -> None:
    with pytest.raises(RecordsError, match="line 3: no assistant turn"):
        made(messages)


def test_an_empty_answer_is_its_end_token_and_if_cut_nothing() -> None:
    assert supervised(made(said("Hi", ""))) == ["<|im_end|>"]
    with pytest.raises(RecordsError, match="every assistant turn is empty"):
        made(said("Hi", ""), cut=True)


def test_prompts_end_where_the_first_answer_begins() -> None:
    prompt = renderer().ids(said("Hi"), prompt=True)
    record = made(said("Hi", "Hello"))
    assert record.input_ids[: record.spans()[0][0]].tolist() == prompt
    assert record.prompt_hash == made(said("Hi", "Quite another answer")).prompt_hash
    assert record.prompt_hash != made(said("Ho", "Hello")).prompt_hash


def test_hashes_tell_templates_and_tokenizers_apart() -> None:
    ours = renderer().hashes()
    assert ours == renderer().hashes()
    assert set(ours) == {"template_sha256", "tokenizer_sha256"}
    other = renderer(LLAMA3).hashes()
    assert other["template_sha256"] != ours["template_sha256"]
    assert other["tokenizer_sha256"] == ours["tokenizer_sha256"]
    more = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    more.add_special_tokens(["<|one_more|>"])
    third = Renderer(PreTrainedTokenizerFast(tokenizer_object=more), frozenset(), CHATML).hashes()
    assert third["tokenizer_sha256"] != ours["tokenizer_sha256"]


# -- conversations --------------------------------------------------------------------------------------------


def test_sharegpt_and_openai_are_the_same_conversation() -> None:
    turns = [("system", "S"), ("human", "Hi"), ("gpt", "Hello"), ("user", "More?"), ("chatgpt", "No"), ("model", "X")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "id": 7}
    assert messages_of(row, "") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "More?"},
        {"role": "assistant", "content": "No"},
        {"role": "assistant", "content": "X"},
    ]
    assert messages_of({"conversations": [{"from": "GPT", "value": ""}]}, "") == [{"role": "assistant", "content": ""}]
    mixed = {"messages": [{"role": "user", "content": "Hi", "name": "ada"}]}
    assert messages_of(mixed, "") == [{"role": "user", "content": "Hi", "name": "ada"}]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "no conversation in it. Its keys are none."),
        ({"text": "x", "id": 3}, "no conversation in it. Its keys are text, id."),
        ({"mesages": [], "id": 3}, "Its keys are mesages, id; 'mesages' is nearest to 'messages'."),
        ({"conversation": []}, "'conversation' is nearest to 'conversations'."),
        ({"messages": []}, "'messages' is list of length 0, a non-empty list of turns was expected"),
        ({"messages": "Hi"}, "'messages' is str of length 0, a non-empty list"),
        ({"messages": ["Hi"]}, "turn 1: str where an object was expected"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"text": "y"}]},
            "turn 2: neither role/content nor from/value",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "turn 1: role 'user' and content of type NoneType"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content of type list; both must be text"),
        ({"messages": [{"content": "x"}]}, "turn 1: role None and content of type str"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 1: speaker 'narrator' is not one we know"),
        ({"conversations": [{"value": "x"}]}, "turn 1: speaker None is not one we know"),
        ({"conversations": [{"from": "human", "value": 3}]}, "content of type int"),
    ],
)
def test_a_malformed_conversation_is_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(RecordsError, match=re.escape("f.jsonl, line 9")) as caught:
        messages_of(row, "f.jsonl, line 9")
    assert told in caught.value.message
    assert caught.value.way_out


def test_an_unknown_speaker_is_told_who_is_known() -> None:
    with pytest.raises(RecordsError) as caught:
        messages_of({"conversations": [{"from": "narrator", "value": "x"}]}, "")
    assert (
        caught.value.way_out
        == "Known: assistant, chatgpt, function_call, gpt, human, model, observation, system, tool, user."
    )


# -- records --------------------------------------------------------------------------------------------------

ROW = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0], "source": "s"}


def test_a_record_comes_back_from_json() -> None:
    record = made(said("Hi", "Hello", "More?", "No."))
    row = json.loads(json.dumps(record.to_json()))
    assert list(row) == list(records.KEYS)
    assert row["seq_len"] == len(row["input_ids"]) == row["n_prompt_tokens"] + row["n_response_tokens"]
    assert row["n_response_tokens"] == sum(row["loss_mask"])
    back = record_of(row, "", None)
    assert back.input_ids.tolist() == record.input_ids.tolist()
    assert back.loss_mask.tolist() == record.loss_mask.tolist()
    assert (back.id, back.source) == (record.id, record.source)
    assert (back.input_ids.dtype, back.loss_mask.dtype) == (np.int32, np.bool_)


def test_the_id_is_frozen() -> None:
    """First 16 hex digits of the sha256 of [1, 2, 3] as little-endian int64, by hashlib and struct."""
    record = Record(np.array([1, 2, 3], dtype=np.int32), np.array([False, True, True]), "")
    assert record.id == "e2e2033ae7e19d68"
    assert Record(record.input_ids.astype(np.int64), record.loss_mask, "x").id == record.id


def test_spans_are_first_and_last_positions() -> None:
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=bool)
    record = Record(np.arange(9, dtype=np.int32), mask, "")
    assert record.spans() == [(0, 1), (3, 3), (6, 8)]


@pytest.mark.parametrize("ids", ["token_ids", "ids", "tokens"])
def test_other_names_of_the_keys_are_understood(ids: str) -> None:
    record = record_of({ids: [5, 6], "mask": [0, 1]}, "", 10)
    assert record.input_ids.tolist() == [5, 6]
    assert record.loss_mask.tolist() == [False, True]
    assert record.source == "unknown"


def test_the_proper_name_wins() -> None:
    assert record_of({**ROW, "tokens": ["five"], "mask": 3}, "", 10).input_ids.tolist() == ROW["input_ids"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_ids": None}, "input_ids is NoneType, a list of integers was expected"),
        ({"input_ids": "5 6 7"}, "input_ids is str, a list of integers was expected"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [5.0, 6, 7, 8, 9]}, "input_ids holds more than integers"),
        ({"input_ids": ["5", 6, 7, 8, 9]}, "input_ids holds more than integers"),
        ({"input_ids": [5, None, 7, 8, 9]}, "input_ids holds more than integers"),
        ({"input_ids": [[5, 6, 7, 8, 9]]}, "input_ids holds more than integers"),
        ({"input_ids": [5, 6, 7, 8, 2**70]}, "input_ids holds more than integers"),
        ({"loss_mask": [0, 1]}, "loss_mask has 2 entries for 5 tokens"),
        ({"loss_mask": [0, 0, 0, 0, 0]}, "loss_mask is zero everywhere"),
        ({"loss_mask": [0, 0, 2, 1, 0]}, "loss_mask holds values other than 0 and 1"),
        ({"loss_mask": [0, 0, -1, 1, 0]}, "loss_mask holds values other than 0 and 1"),
        ({"seq_len": 6}, "seq_len says 6, input_ids has 5 tokens: the line was cut or mixed up"),
        ({"seq_len": "5"}, "seq_len says '5', input_ids has 5 tokens"),
        ({"input_ids": [5, 6, 7, 8, 10]}, "token id 10 is outside the target's vocabulary (0 to 9)"),
        ({"input_ids": [5, -6, 7, 8, 10]}, "token id -6 is outside the target's vocabulary (0 to 9)"),
    ],
)
def test_a_malformed_record_is_refused(changes: dict[str, Any], told: str) -> None:
    assert record_of(ROW, "f.jsonl, line 9", 10).spans() == [(2, 3)]
    with pytest.raises(RecordsError, match=re.escape("f.jsonl, line 9")) as caught:
        record_of({**ROW, **changes}, "f.jsonl, line 9", 10)
    assert told in caught.value.message
    assert caught.value.way_out


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"loss_mask": [1]}, "no 'input_ids'. Its keys are loss_mask."),
        ({"input_idz": [1], "loss_mask": [1]}, "no 'input_ids'. Its keys are input_idz, loss_mask; 'input_idz' is"),
        (
            {"input_ids": [1], "los_mask": [1]},
            "no 'loss_mask'. Its keys are input_ids, los_mask; 'los_mask' is nearest",
        ),
        ({"text": "x"}, "no 'input_ids'. Its keys are text."),
        ({}, "no 'input_ids'. Its keys are none."),
    ],
)
def test_a_missing_key_is_named_with_those_present(row: dict[str, Any], told: str) -> None:
    with pytest.raises(RecordsError, match=re.escape(told)):
        record_of(row, "f.jsonl, line 9", None)


def test_a_ragged_list_is_refused() -> None:
    with pytest.raises(RecordsError, match="input_ids holds more than integers"):
        record_of({**ROW, "input_ids": [[5, 6], [7], 8, 9, 9]}, "f.jsonl, line 9", 10)


def test_an_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RecordsError):
        record_of({**ROW, "input_ids": [5, 6, 7, 8, 2**32 + 9]}, "f.jsonl, line 9", None)


def test_a_negative_id_without_a_vocabulary_is_told_sensibly() -> None:
    with pytest.raises(RecordsError, match="token id -6") as caught:
        record_of({**ROW, "input_ids": [5, -6, 7, 8, 9]}, "f.jsonl, line 9", None)
    assert "0 to -1" not in caught.value.message


# -- files ----------------------------------------------------------------------------------------------------


def lines(path: Path, *rows: object, mode: str = "plain") -> Path:
    data = b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if mode == "gzip" else data)
    return path


def test_lines_are_read_with_blanks_between(tmp_path: Path) -> None:
    rows = [{**ROW, "input_ids": [i] * 5} for i in range(4)]
    path = lines(tmp_path / "r.jsonl", rows[0], b"\n", rows[1], b"  \n", rows[2], json.dumps(rows[3]).encode())
    assert [r.input_ids[0] for r in records.read(path, vocab_size=10)] == [0, 1, 2, 3]
    assert [r.input_ids[0] for r in records.read(path, limit=2)] == [0, 1]
    zipped = lines(tmp_path / "r.jsonl.gz", *rows, mode="gzip")
    assert [r.input_ids[0] for r in records.read(zipped)] == [0, 1, 2, 3]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", ROW, b"{broken\n")
    assert len(records.read(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b'{"input_ids": [1, 2\n', "line 3: broken JSON, "),
        (b'{"input_ids": [1]} extra\n', "line 3: broken JSON, Extra data at column 20"),
        (b'{"source": "caf\xe9"}\n', "line 3: not UTF-8 (byte 0xe9 at offset 15)"),
        (b"[1, 2]\n", "line 3: a JSON list where an object was expected"),
        (b"3\n", "line 3: a JSON int where an object was expected"),
        (b"{}\n", "line 3: no 'input_ids'"),
        (json.dumps({**ROW, "input_ids": [5, 6, 7, 8, 10]}).encode() + b"\n", "line 3: token id 10 is outside"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, told: str) -> None:
    path = lines(tmp_path / "r.jsonl", ROW, b"\n", bad, ROW)
    with pytest.raises(InputError, match=re.escape(f"{path}, {told}")) as caught:
        records.read(path, vocab_size=10)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", [b"", b"\n\n  \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(RecordsError, match="holds no records"):
        records.read(lines(tmp_path / "r.jsonl", text))


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl does not exist"):
        records.read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder, a file was expected"):
        records.read(tmp_path)


def test_a_truncated_gzip_is_an_error(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl.gz", *[{**ROW, "source": str(i)} for i in range(50)], mode="gzip")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="is not a whole gzip file"):
        records.read(path)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(InputError, match="is not a whole gzip file"):
        records.read(path)


def test_a_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl.gz", *[{**ROW, "source": str(i)} for i in range(50)], mode="gzip")
    data = bytearray(path.read_bytes())
    data[12:20] = b"\xff" * 8
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="gzip"):
        records.read(path)


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}"], ids=["nested", "long-number"])
def test_json_that_python_gives_up_on_is_an_error(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(InputError, match="line 1"):
        records.read(lines(tmp_path / "r.jsonl", line + b"\n"))


def test_fit_cuts_and_drops_what_is_left_without_supervision() -> None:
    long, late = record_of(ROW, "", None), record_of({**ROW, "loss_mask": [0, 0, 0, 1, 1]}, "", None)
    found = list(records.fit([long, late], 3))
    assert [r.input_ids.tolist() for r in found] == [[5, 6, 7]]
    assert found[0].loss_mask.tolist() == [False, False, True]
    assert [r.seq_len for r in records.fit([long, late], 9)] == [5, 5]
