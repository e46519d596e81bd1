"""Many prompts answered at once: what ``plain`` says one prompt at a time, several times faster.

    pending ──── admit ───> cohort ─┐
                            cohort ─┼─ one pass: prompts of new cohorts, one token of every other row ─> tokens
                            cohort ─┘        rows that end leave, and their answers go out

At large batch a pass costs its matrix products, so every row of them must be worth something: no padding goes
through the model, a row that ended leaves at once, as many prompts as rows left come in while the others go on, and
what all prompts begin with (a template's system turn) is computed once. Answers are ``plain``'s up to ties
(``ties``): sums of many rows may round differently.

Letters: B rows, T tokens of a pass, D target width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from eyas.answers import Answer, Ask, FinishReason, Sampling
from eyas.decode import cohort, pack
from eyas.decode.cohort import Beginning, Cohort, Part, Prefill, Row, Step
from eyas.decode.plain import require_room
from eyas.decode.sample import choose, require_unadjusted
from eyas.target import Target

BATCH = 96
KV_BYTES = 4 * 2**30
PREFILL_TOKENS = 2048  # of one pass; a longer prompt has a pass to itself
SHARES = 8  # a batch is refilled when one part in so many is free: cohorts of some size, few calls a layer
WORTH_SHARING = 8  # tokens
WINDOW = 8  # batches of prompts looked ahead at, to admit prompts of one length together


class Batch:
    """At most ``batch`` prompts being answered, and those waiting.

    Keys and values take at most ``kv_bytes`` (a single prompt that needs more is answered alone), whatever the
    number of prompts; the passes' own tensors come to a few hundred MB at most. Raises UsageError for a ``sampling``
    with penalties or a bias.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_new_tokens: int,
        batch: int = BATCH,
        sampling: Sampling | None = None,
        kv_bytes: int = KV_BYTES,
    ) -> None:
        self.target = target
        self.batch, self.kv_bytes = batch, kv_bytes
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling or Sampling()
        require_unadjusted(self.sampling)
        self._ends = target.eos_ids()
        self._row_bytes = kv_bytes_per_token(target)
        self._pending: list[Ask] = []
        self._cohorts: list[Cohort] = []
        self._beginning: Beginning | None = None

    @property
    def waiting(self) -> int:
        return len(self._pending)

    @property
    def running(self) -> int:
        return sum(len(held.rows) for held in self._cohorts)

    @property
    def held_bytes(self) -> int:
        """What the keys and values of the running cohorts take."""
        return sum(self._bytes(held.admitted, held.capacity) for held in self._cohorts)

    def submit(self, ask: Ask) -> None:
        """Queue one prompt. Raises UsageError for one that is empty or leaves no room for an answer."""
        require_room(self.target, ask.prompt_ids, 1)
        self._pending.append(ask)

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """One pass, and the answers it finished."""
        new = self._admit()
        parts: list[Part] = [*(Step(held) for held in self._cohorts), *(Prefill(held) for held in new)]
        if not parts:
            return []
        self._cohorts += new
        states = cohort.forward(self.target, parts)
        draws = [] if self.sampling.greedy else [row.draws.random() for held in self._cohorts for row in held.rows]
        tokens = choose(self.target.logits(states), self.sampling, draws)
        if new and self._beginning is None:
            self._beginning = self._shared(new[0])
        return list(self._settle(tokens))

    def _settle(self, tokens: Sequence[int]) -> Iterator[Answer]:
        rest = iter(tokens)
        for held in self._cohorts:
            for row in held.settle(list(islice(rest, len(held.rows))), self._ends):
                reason: FinishReason = "stop" if row.token_ids[-1] in self._ends else "length"
                yield Answer(row.ask.id, tuple(row.token_ids), reason)
        self._cohorts = [held for held in self._cohorts if held.rows]

    # -- who comes in ----------------------------------------------------------------------------------------

    def _admit(self) -> list[Cohort]:
        """New cohorts, when enough rows are free to be worth it."""
        free = self.batch - self.running
        if not self._pending or (self._cohorts and free < max(1, self.batch // SHARES)):
            return []
        new: list[Cohort] = []
        fed = 0
        left = self.kv_bytes - self.held_bytes
        while free and self._pending and fed < PREFILL_TOKENS:
            chosen = self._choose(min(free, max(1, self.batch // SHARES)), PREFILL_TOKENS - fed, left)
            if not chosen and (new or self._cohorts):
                break
            chosen = chosen or self._pending[:1]
            made = Cohort([self._row(ask) for ask in chosen], self._beginning)
            new.append(made)
            taken = set(map(id, chosen))
            self._pending = [ask for ask in self._pending if id(ask) not in taken]
            free -= len(chosen)
            fed += sum(self._fed(ask) for ask in chosen)
            left -= self._bytes(made.admitted, made.capacity)
        return new

    def _choose(self, most: int, most_tokens: int, most_bytes: int) -> list[Ask]:
        """The prompt that waits longest and those nearest to it in length, as many as fit."""
        first = len(self._pending[0].prompt_ids)
        near = sorted(self._pending[1:], key=lambda ask: abs(len(ask.prompt_ids) - first))
        chosen: list[Ask] = []
        columns = tokens = 0
        for ask in [self._pending[0], *near][:most]:
            columns = max(columns, len(ask.prompt_ids))
            tokens += self._fed(ask)
            if tokens > most_tokens or self._bytes(len(chosen) + 1, columns + self.max_new_tokens) > most_bytes:
                break
            chosen.append(ask)
        return chosen

    def _fed(self, ask: Ask) -> int:
        """Tokens of its prompt that go through the model."""
        return len(ask.prompt_ids) - (self._beginning.skip(ask) if self._beginning else 0)

    def _row(self, ask: Ask) -> Row:
        room = min(self.max_new_tokens, self.target.max_positions - len(ask.prompt_ids))
        return Row(ask, room, self.sampling.draws(ask.id))

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self._row_bytes

    def _shared(self, first: Cohort) -> Beginning | None:
        """What every prompt known now begins with, if it is worth keeping."""
        known = [row.ask.prompt_ids for held in self._cohorts for row in held.rows]
        known += [ask.prompt_ids for ask in self._pending]
        least, most = min(known), max(known)  # all begin with what these two begin with
        shared = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
        shared = min(shared, *(len(ids) - 1 for ids in known))
        return first.take_beginning(shared) if shared >= WORTH_SHARING and len(known) > 1 else None


def answer(
    target: Target,
    prompts: Iterable[Ask],
    *,
    max_new_tokens: int,
    batch: int = BATCH,
    sampling: Sampling | None = None,
    kv_bytes: int = KV_BYTES,
) -> Iterator[Answer]:
    """The target's answers, each when it is finished, so not in the order asked. ``prompts`` is read as needed."""
    running = Batch(target, max_new_tokens=max_new_tokens, batch=batch, sampling=sampling, kv_bytes=kv_bytes)
    rest = iter(prompts)
    with pack.packed(target, rows=batch):
        while True:
            for ask in islice(rest, max(0, WINDOW * batch - running.waiting)):
                running.submit(ask)
            if not running.waiting and not running.running:
                return
            yield from running.step()


def kv_bytes_per_token(target: Target) -> int:
    """What one token's keys and values take over all layers."""
    config = target.config
    heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):  # DeepSeek's latent keys are held expanded
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or target.hidden_size // heads
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return target.num_layers * int(width) * target.embedding.element_size()
