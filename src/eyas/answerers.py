"""Who answers: the target in this process, or a server that says it is the target and is not believed unchecked."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from eyas.answers import Answer, Ask, IdsFrom, Refusal, Sampling
from eyas.decode import batch, pack
from eyas.decode.batch import Batch
from eyas.endpoint import Endpoint, Reply
from eyas.errors import UsageError
from eyas.render import Renderer
from eyas.target import Target

TIMED_PASSES = 6


class Answerer(Protocol):
    """Opened with ``with``; asks go in as long as it ``wants`` some, answers come out in any order."""

    def __enter__(self) -> Answerer: ...
    def __exit__(self, *_: object) -> None: ...

    @property
    def model(self) -> str: ...

    @property
    def wants(self) -> int:
        """How many more asks it has a use for now."""
        ...

    def submit(self, ask: Ask) -> None: ...

    def take(self) -> list[Answer | Refusal]:
        """Wait until something is answered; nothing only where nothing was asked."""
        ...

    def pins(self) -> dict[str, Any]:
        """What a run that goes on with the same answers must share."""
        ...

    def rate(self, ask: Ask) -> float | None:
        """Tokens a second by a short timing, or None where that is not ours to try."""
        ...


class InProcess:
    """The target itself, batched (``decode.batch``)."""

    def __init__(
        self,
        target: Target,
        *,
        max_new_tokens: int,
        batch_size: int = batch.BATCH,
        sampling: Sampling | None = None,
        kv_bytes: int = batch.KV_BYTES,
    ) -> None:
        self.target, self.batch_size = target, batch_size
        self.max_new_tokens, self.sampling, self.kv_bytes = max_new_tokens, sampling or Sampling(), kv_bytes
        self._running = self._batch()
        self._open = ExitStack()

    def _batch(self) -> Batch:
        return Batch(
            self.target,
            max_new_tokens=self.max_new_tokens,
            batch=self.batch_size,
            sampling=self.sampling,
            kv_bytes=self.kv_bytes,
        )

    def __enter__(self) -> InProcess:
        self._open.enter_context(pack.packed(self.target, rows=self.batch_size))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def model(self) -> str:
        return self.target.spec

    @property
    def wants(self) -> int:
        return max(0, batch.WINDOW * self.batch_size - self._running.waiting)

    def submit(self, ask: Ask) -> None:
        self._running.submit(ask)

    def take(self) -> list[Answer | Refusal]:
        done: list[Answer | Refusal] = []
        while not done and (self._running.running or self._running.waiting):
            done += self._running.step()
        return done

    def pins(self) -> dict[str, Any]:
        return {
            "target": self.target.fingerprint(),
            "max_new_tokens": self.max_new_tokens,
            "sampling": asdict(self.sampling),
        }

    def rate(self, ask: Ask) -> float:
        """A few passes of a full batch of one prompt; prompts of other lengths and long answers cost more."""
        trial = self._batch()
        for i in range(self.batch_size):
            trial.submit(Ask(f"{ask.id}/{i}", ask.prompt_ids))
            if i == 1 or i == self.batch_size - 1:
                trial.step()  # the first two show what all begin with, so the others are nearly free
        began, tokens = time.perf_counter(), 0
        for _ in range(TIMED_PASSES):
            tokens += trial.running
            trial.step()
        return tokens / (time.perf_counter() - began)


class Remote:
    """An endpoint under the target's own name: its prompts, ids and texts are compared with ours.

    ``renderer`` and ``vocab_size`` are the target's. Raises UsageError where the endpoint renders prompts otherwise
    or says ids that the target does not have; single answers whose text and ids disagree are refused.
    """

    def __init__(self, endpoint: Endpoint, renderer: Renderer, vocab_size: int) -> None:
        self.endpoint, self.renderer, self.vocab_size = endpoint, renderer, vocab_size
        self.tokenizer: PreTrainedTokenizerBase = renderer.tokenizer
        self._asked: dict[str, Ask] = {}
        self._end = end_token(renderer)

    def __enter__(self) -> Remote:
        self.endpoint.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.__exit__()

    @property
    def model(self) -> str:
        return self.endpoint.model or "the endpoint's"

    @property
    def wants(self) -> int:
        return max(0, 2 * self.endpoint.concurrency - self.endpoint.owed)

    def submit(self, ask: Ask) -> None:
        self._asked[ask.id] = ask
        self.endpoint.submit(ask)

    def take(self) -> list[Answer | Refusal]:
        return [self._checked(reply, self._asked.pop(reply.id)) for reply in self.endpoint.take()]

    def pins(self) -> dict[str, Any]:
        return {
            "target": self.endpoint.model,
            "max_new_tokens": self.endpoint.max_new_tokens,
            "sampling": asdict(self.endpoint.sampling),
        }

    def rate(self, ask: Ask) -> None:
        return None

    def _checked(self, reply: Reply | Refusal, ask: Ask) -> Answer | Refusal:
        if isinstance(reply, Refusal):
            return reply
        if reply.prompt_ids is not None and reply.prompt_ids != ask.prompt_ids:
            raise self._other_template(reply.prompt_ids, ask.prompt_ids)
        if reply.finish_reason not in ("stop", "length"):
            return Refusal(ask.id, f"the endpoint ended it with finish_reason {reply.finish_reason!r}")
        cut = reply.finish_reason == "length"
        if reply.token_ids is None:
            ids, came = self._tokenised(reply.text, ask, cut=cut)
            return Answer(ask.id, ids, "length" if cut else "stop", reply.text, came)
        if (largest := max(reply.token_ids, default=0)) >= self.vocab_size or min(reply.token_ids, default=0) < 0:
            raise UsageError(
                f"{self.endpoint.shown} says token id {largest}, and the target's vocabulary ends at "
                f"{self.vocab_size - 1}: it serves another model.",
                way_out="Serve the target itself, or name the target that is served.",
            )
        if not self._same(self.tokenizer.decode(reply.token_ids, skip_special_tokens=True), reply.text):
            return Refusal(ask.id, "the endpoint's text is not what its token ids say in the target's vocabulary")
        return Answer(ask.id, self._ended(reply.token_ids, cut=cut), "length" if cut else "stop")

    def _ended(self, ids: tuple[int, ...], *, cut: bool) -> tuple[int, ...]:
        """With the end token that the target said; some servers keep it to themselves."""
        hidden = not cut and self._end is not None and (not ids or ids[-1] not in self.renderer.eos_ids)
        return (*ids, self._end) if hidden and self._end is not None else ids

    def _tokenised(self, text: str, ask: Ask, *, cut: bool) -> tuple[tuple[int, ...], IdsFrom]:
        """Ids of a text: as the template renders it, else by itself, whichever gives the text back."""
        said = {"role": "assistant", "content": text}
        whole = tuple(self.renderer.ids([*ask.messages, said], prompt=False))
        rendered: tuple[int, ...] | None = None
        if whole[: len(ask.prompt_ids)] == ask.prompt_ids:
            turn = whole[len(ask.prompt_ids) :]
            ends = [i for i, token in enumerate(turn) if token in self.renderer.eos_ids]
            rendered = turn[: ends[-1]] if ends else turn
        alone = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        for ids in (rendered, alone):
            if ids is not None and self.tokenizer.decode(ids, skip_special_tokens=True) == text:
                return self._ended(ids, cut=cut), "text"
        return self._ended(alone if rendered is None else rendered, cut=cut), "text-differs"

    def _same(self, mine: str, theirs: str) -> bool:
        """Equal but for white space at the ends and a character that the limit cut in two."""
        return mine.strip().rstrip("\ufffd") == theirs.strip().rstrip("\ufffd")

    def _other_template(self, theirs: tuple[int, ...], ours: tuple[int, ...]) -> UsageError:
        at = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
        )
        return UsageError(
            f"{self.endpoint.shown} renders prompts otherwise than the target's template: at position {at} it has "
            f"{self._token(theirs, at)}, we have {self._token(ours, at)}.",
            way_out="Serve the target with its own chat template, or pass the endpoint's with --template FILE.",
        )

    def _token(self, ids: tuple[int, ...], at: int) -> str:
        return f"{ids[at]} {self.tokenizer.decode([ids[at]])!r}" if at < len(ids) else "nothing"


def end_token(renderer: Renderer) -> int | None:
    """The token with which this template ends an answer, if it has one."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = renderer.ids(messages, prompt=False)
    return next((token for token in reversed(ids) if token in renderer.eos_ids), None)
