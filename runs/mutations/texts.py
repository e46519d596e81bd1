"""D and P in the records: masks, and prompts that are not those of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from runs.mutations.subject import SAMPLES, Bed, Change, Mutation, Subject, both

from eyas.answers import Sampling
from eyas.decode.cache import TargetCache, as_row
from eyas.decode.plain import last_logits
from eyas.decode.sample import choose
from eyas.records import Record

Ints = np.ndarray


def of_each(change: Callable[[Bed, Record], Record | None]) -> Change:
    """``change`` on every record; one that it cannot be done to is left out."""

    def run(bed: Bed, subject: Subject) -> Subject:
        made = [change(bed, record) for record in subject.records]
        return replace(subject, records=[record for record in made if record is not None])

    return run


# -- masks ------------------------------------------------------------------------------------------------------


def masked(change: Callable[[Ints], Ints]) -> Change:
    return of_each(lambda bed, record: replace(record, loss_mask=change(record.loss_mask)))


def shifted(by: int) -> Callable[[Ints], Ints]:
    """Entry t is what stood at t - by; what enters is unsupervised."""

    def run(mask: Ints) -> Ints:
        found = np.zeros_like(mask)
        if by > 0:
            found[by:] = mask[:-by]
        else:
            found[:by] = mask[-by:]
        return found

    return run


# -- prompts ----------------------------------------------------------------------------------------------------


def encode(bed: Bed, text: str) -> list[int]:
    tokenizer: Any = bed.target.tokenizer
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(bed: Bed, ids: Ints) -> str:
    tokenizer: Any = bed.target.tokenizer
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def prompt(change: Callable[[Bed, str], str | None]) -> Change:
    """The text before the first answer rewritten; what follows stays as it is, token by token."""

    def one(bed: Bed, record: Record) -> Record | None:
        first = record.spans()[0][0]
        text = change(bed, decode(bed, record.input_ids[:first]))
        if text is None:
            return None
        head = np.array(encode(bed, text), dtype=np.int32)
        if not len(head):
            return None
        ids = np.concatenate((head, record.input_ids[first:]))
        mask = np.concatenate((np.zeros(len(head), dtype=bool), record.loss_mask[first:]))
        return replace(record, input_ids=ids, loss_mask=mask)

    return of_each(one)


def turns(text: str) -> list[tuple[str, str]]:
    """(role, content) of a ChatML text; a last empty turn of the assistant's is left out."""
    parts = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:]]
    split = [part.partition("\n") for part in parts]
    return [(role, content) for role, _, content in split if not (role == "assistant" and not content)]


def llama3(bed: Bed, text: str) -> str:
    said = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>" for role, content in turns(text)
    )
    return f"<|begin_of_text|>{said}<|start_header_id|>assistant<|end_header_id|>\n\n"


def raw(bed: Bed, text: str) -> str:
    return "\n".join(content for role, content in turns(text) if role == "user") + "\n"


def without_system(bed: Bed, text: str) -> str | None:
    if not text.startswith("<|im_start|>system"):
        return None
    return text[text.index("<|im_end|>") + len("<|im_end|>") :].lstrip("\n")


def strange_system(bed: Bed, text: str) -> str:
    rest = without_system(bed, text) or text
    said = "You answer as a pirate of the Caribbean would, in rhymes, and never mention ships."
    return f"<|im_start|>system\n{said}<|im_end|>\n{rest}"


THINK = "<think>\n\n</think>\n\n"


def supervised_think(bed: Bed, record: Record) -> Record:
    """An empty think block at the head of each answer, supervised."""
    ids, mask, at = [], [], 0
    block = np.array(encode(bed, THINK), dtype=np.int32)
    for first, _ in record.spans():
        ids += [record.input_ids[at:first], block]
        mask += [record.loss_mask[at:first], np.ones(len(block), dtype=bool)]
        at = first
    ids.append(record.input_ids[at:])
    mask.append(record.loss_mask[at:])
    return replace(record, input_ids=np.concatenate(ids), loss_mask=np.concatenate(mask))


def high_halves(bed: Bed, record: Record) -> Record:
    """64-bit ids read as 32-bit ones: every other token is 0."""
    ids = np.stack((record.input_ids, np.zeros_like(record.input_ids)), axis=1).ravel()
    return replace(record, input_ids=ids, loss_mask=np.repeat(record.loss_mask, 2))


def sampled(bed: Bed, subject: Subject) -> Subject:
    """Answers drawn by the target at temperature 1 to the first prompts, with a seed."""
    return replace(subject, records=[_drawn(bed, record) for record in subject.records[: SAMPLES // 2]])


@torch.inference_mode()
def _drawn(bed: Bed, record: Record, length: int = 32) -> Record:
    first = record.spans()[0][0]
    rng = np.random.default_rng(first)
    cache, fed, said = TargetCache(bed.target), record.input_ids[:first].tolist(), []
    for _ in range(length):
        logits = last_logits(bed.target, cache.forward(as_row(fed, bed.target)))
        fed = choose(logits[None], Sampling(temperature=1.0), [rng.random()])
        said += fed
    whole = np.concatenate((record.input_ids[:first], np.array(said, dtype=np.int32)))
    return Record(whole, np.arange(len(whole)) >= first, record.source)


def few(bed: Bed, subject: Subject) -> Subject:
    return replace(subject, records=subject.records[:1])


def manifest(**values: str) -> Change:
    return lambda bed, subject: replace(subject, manifest={**subject.manifest, **values})


def chat(bed: Bed) -> bool:
    return bed.chat


MUTATIONS: list[Mutation] = [
    Mutation("mask all 0", "D", "mask-empty", masked(np.zeros_like), inventory=True),
    *both(Mutation("mask all 1", "D", "mask-full", masked(np.ones_like), inventory=True)),
    Mutation("mask one later", "D", "mask-shifted", masked(shifted(1)), applies=chat),
    Mutation("mask one earlier", "D", "mask-shifted", masked(shifted(-1)), applies=chat),
    Mutation("empty think blocks supervised", "D", "mask-empty-think", of_each(supervised_think), applies=chat),
    Mutation("ids read at half their width", "S", "ids-cast-wrong", of_each(high_halves),
             also=("off-policy-records",), inventory=True),
    Mutation("no chat template", "P", "template-missing", prompt(raw), applies=chat),
    Mutation("Llama 3 template", "P", "template-other-family", prompt(llama3), applies=chat),
    Mutation("empty think block in the prompt", "P", "think-block-added", prompt(lambda bed, text: text + THINK),
             applies=chat),
    Mutation("a newline more before the answer", "P", None, prompt(lambda bed, text: text + "\n"),
             also=("thinking-newline-extra",), applies=chat),
    Mutation("system prompt left out", "P", None, prompt(without_system),
             also=("system-prompt-unseen", "template-differs"), applies=chat),
    Mutation("system prompt never seen", "P", None, prompt(strange_system), also=("system-prompt-unseen",),
             applies=chat),
    Mutation("records of another template, contract kept", "P", "template-differs",
             manifest(template_sha256="0" * 64), inventory=True, keeps_contract=True, applies=chat),
    Mutation("records of another tokenizer, contract kept", "P", "tokenizer-differs",
             manifest(tokenizer_sha256="0" * 64), inventory=True, keeps_contract=True,
             applies=lambda bed: "tokenizer_sha256" in bed.config["eyas"]["contract"]),
    Mutation("one record", "H", None, few),
    Mutation("answers drawn at temperature 1", "X", "healthy", sampled,
             also=("off-policy-records", "temperature-greedy-drafts")),
]  # fmt: skip
