"""Tiny targets, records and drafters as folders on disk, for the command line; and a way to call it in process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas import checkpoint, starts
from eyas import target as targets
from eyas.contract import declared
from eyas.target import Target
from eyas.vocab import DraftVocab

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 320  # 256 bytes, two special tokens, and rows to spare


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Bytes as tokens, so that every text has exactly one reading."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = template
    return made


def write_target(folder: Path, *, hidden: int = 48, vocab: int = VOCAB, template: str | None = CHATML) -> Path:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with targets.quiet():
        model.save_pretrained(folder)
        tokenizer(template).save_pretrained(folder)
    return folder


def write_drafter(folder: Path, target: Target, *, size: int = 64) -> Path:
    words = DraftVocab(torch.arange(size) * 2, target.vocab_size)
    drafter = starts.random(target, starts.config_for(target, (1, 2, 3), size), words, 0)
    contract = declared(
        taps=[1, 2, 3],
        depths=5,
        draft_vocab_size=size,
        rope=drafter.config.rope_parameters,
        target=target.identity(),
    )
    checkpoint.save(drafter, folder, contract, {}, dtype=torch.float32)
    return folder


def conversation(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """The command line in this process: exit code and what it printed. A traceback fails the test at once."""
    from eyas.cli import main

    before, sys.argv = sys.argv, ["eyas", *map(str, arguments)]
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "A bug in eyas" not in out + err, err
    return Ran(code, out, err)
