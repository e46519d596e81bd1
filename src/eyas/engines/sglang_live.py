"""An SGLang that serves: one we start in its own environment, or one that already runs. Never run against a real one.

Ours listens on the loopback and has the plugin (``sglang.probing``), which writes every round from the start on;
``probe`` takes those of its own requests. One of others is only read: /server_info, /model_info, /tokenize, and
/generate one request at a time. Its answers count rounds and kept drafts request by request, by depth from 0.5.10 on,
so no page of metrics is needed: SGLang's has no counts by depth.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.dialects.sglang import flags as dialect
from eyas.endpoint import KEYS
from eyas.engines import child, sglang, sglang_recording
from eyas.engines.child import Child
from eyas.engines.live import About, Answer, Counters
from eyas.engines.server import Server, port_of, told
from eyas.engines.sglang_bodies import Attach, Identity, answer, check, identify, request
from eyas.errors import InputError, UsageError
from eyas.provenance import publishable

START_SECONDS = 1800.0  # it loads, captures and warms up
PATIENCE = 30.0  # /health has it draft a token
DRAFT_TOKENS = 4
OURS = (
    "--host", "--port", "--model-path", "--model", "--served-model-name", "--api-key", "--admin-api-key",
    dialect.DRAFT, "--speculative-draft-model",
)  # fmt: skip
WHERE = ("--host", "--port", "--model-path")  # of a command line, what the tables do not look at
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
           "presence_penalty": 0.0}  # fmt: skip
USUAL = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_WAIT_POLICY": "passive"}
DTYPES = {"half": "float16", "float": "float32"}
UNTOLD = (
    "which taps its target captures: no body of SGLang says",
    "whether SGLANG_SIMULATE_ACC_LEN makes up what is kept: a variable of its environment",
)


@dataclass(frozen=True)
class Meant:
    """Who is thought to run at a URL: names or folders of target and drafter, and the target's class."""

    target: str
    drafter: str
    architecture: str | None = None


class Sglang(Server):
    """See ``eyas.engines.live.Engine``."""

    def __init__(
        self,
        talk: Attach,
        about: About,
        process: Child | None,
        concurrency: int,
        meant: Meant,
        probing: sglang.Probing | None,
        closing: ExitStack,
    ) -> None:
        super().__init__(talk.asker, about, process, concurrency)
        self._talk, self._meant = talk, meant
        self._probing, self._closing = probing, closing
        self._named = os.urandom(4).hex()  # ids of requests are an engine's own, and others may ask it too
        self._asked = 0
        self._steps = DRAFT_TOKENS
        self._counts: Counters | None = Counters(0, 0, (), 0)
        self._put_back: set[str] = set()
        self._lock = threading.Lock()

    # -- start ------------------------------------------------------------------------------------------------

    @classmethod
    def launch(
        cls,
        python: Path,
        target: Path,
        drafter: Path,
        *,
        draft_tokens: int | None,
        flags: Sequence[str] = (),
        port: int | None = None,
        concurrency: int = 8,
        most_bytes: int = sglang.LIMIT,
    ) -> Sglang:
        """Start a server of ``target`` with ``drafter``, probed up to ``most_bytes``; ``flags`` are the user's own."""
        given = _checked(flags)
        depth = draft_tokens or int(given.values.get(dialect.STEPS) or DRAFT_TOKENS)
        made = sglang.launch(
            python, str(target), str(drafter), port=port_of(port), draft_tokens=depth, flags=flags
        )  # fmt: skip
        around = {**USUAL, **_environment(), **made.environment}
        with ExitStack() as closing:
            probing = closing.enter_context(sglang.probing(most_bytes, around))
            process = Child(made.command, {**around, **probing.environment}, "SGLang")
            kept = closing.pop_all()
        about = About("sglang", "launched", command=told(made.command, (target, drafter)))
        about.flags = [*(f"{name}={value}" for name, value in made.environment.items()), *_served(made.command)]
        about.unseen.append("CUDA graphs, overlap and the prefix cache, which are off while it is probed")
        live = cls(
            Attach(made.url), about, process, concurrency, Meant(str(target), str(drafter)), probing, kept
        )  # fmt: skip
        live.notes = made.told
        return live

    @classmethod
    def attach(cls, url: str, meant: Meant, flags: Sequence[str] = ()) -> Sglang:
        """One that already runs; ``flags``: what it was started with, as the user knows it."""
        talk = Attach(url)
        about = About("sglang", "attached", url=talk.url, flags=flags)
        about.unseen += ("what the drafter is fed and drafts: only an engine that eyas starts is probed", *UNTOLD)
        return cls(talk, about, None, 1, meant, None, ExitStack())

    def ready(self, heard: Callable[[str], None] = lambda what: None) -> None:
        if self._process is not None:
            self._wait(heard, START_SECONDS, PATIENCE)
        with self._asking():
            info, model = self._talk.infos()
            who = identify(info, model)
        self.about.version = who.version
        self.about.resolved |= settings(info, who)
        doubts = check(who, self._meant.target, self._meant.drafter, self._meant.architecture)
        self._steps = who.steps or self._steps
        if self._process is None:
            self.about.unseen += doubts
            self.about.flags = [*self.about.flags, *_speculation(who)]  # its own words come last, and win
        # What is fused and fed is EAGLE-3's; which class drafts no body says.
        drafter = "Eagle3" if who.algorithm == "EAGLE3" else str(who.algorithm)
        self.about.model = {"drafter": drafter, "draft_tokens": self._steps}
        self._counts = Counters(0, 0, (0,) * self._steps, 0)

    # -- ask --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        heard: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        first, self._asked = self._asked, self._asked + len(prompts)
        answers = self._each(
            prompts, lambda number, ids: self._one(first + number, ids, max_tokens, temperature), heard
        )
        self._doubted([a for a in answers if len(a.token_ids) > 1])
        return answers

    def _one(self, number: int, ids: Sequence[int], max_tokens: int, temperature: float) -> Answer:
        name = f"eyas-{self._named}-{number}"
        asked = request(ids, max_tokens, name=name, sampling={**NEUTRAL, "temperature": temperature})
        began = time.monotonic()
        with self._asking():
            body = self._talk.generate(asked)
        seconds = time.monotonic() - began
        said = answer(body)
        if said.id != name or said.prompt_tokens != len(ids):
            raise InputError(
                f"The engine was asked {len(ids)} token ids as {name}, and answered {said.prompt_tokens} as {said.id}.",
                way_out="Something between changes the prompt: ask the engine itself, not a proxy.",
            )
        accepted = by_depth(said.histogram, self._steps) if said.rounds else (0,) * self._steps
        with self._lock:
            if body["meta_info"].get("num_retractions"):
                self._put_back.add(name)
            self._counts = None if self._counts is None or accepted is None else _plus(
                self._counts, Counters(said.rounds or 0, said.drafted or 0, accepted, len(said.token_ids))
            )  # fmt: skip
        return Answer(name, tuple(ids), said.token_ids, said.finish, seconds, said.rounds or 0, accepted)

    def _doubted(self, answers: Sequence[Answer]) -> None:
        """Raises InputError where there is nothing to compare."""
        if answers and not any(a.rounds for a in answers):
            raise InputError(
                f"The engine answered {len(answers)} texts and counts no round of drafts in any.",
                way_out="See in its log whether it drafts at all; a drafter may be turned off at a load.",
            )
        if any(a.accepted is None for a in answers):
            what = f"SGLang {self.about.version} does not say at which depth drafts were kept"
            if self._probing is None or not self._probing.loaded:
                raise InputError(f"{what}.", way_out="Ask one of 0.5.10 or later, or give its log to `eyas read`.")
            self.about.unseen.append(f"what its own answers count: {what}")

    def rendered(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...] | None:
        """A chat as the engine's own template renders it for a chat completion; None where it does not tell."""
        return self._tokenized({"messages": list(messages)})

    @contextmanager
    def probe(self, folder: Path, most_bytes: int) -> Iterator[Mapping[str, Any]]:
        """The plugin writes anyhow; what it wrote of the requests inside is moved into ``folder`` at the end."""
        assert self._probing is not None, "probes are for engines we started"
        sglang_recording.clear(self._probing.passes)
        summary: dict[str, Any] = {}
        yield summary
        got = sglang_recording.moved(self._probing.passes, folder, most_bytes, self._put_back)
        error = self._probing.stopped() or got.error
        if not self._probing.loaded:
            error = "this SGLang did not take the plugin up"
        summary |= {"passes": got.passes, "bytes": got.bytes, "error": error}
        for what, count in self._probing.left_out().items():
            self.about.unseen.append(f"{what}, {count} times or more")
        if self._put_back:
            self.about.unseen.append(f"rounds of {len(self._put_back)} requests that the engine began anew")

    def metrics(self) -> Counters | None:
        """What the answers so far count of themselves; None where they do not by depth."""
        return self._counts

    # -- end --------------------------------------------------------------------------------------------------

    def stop(self, keep_log: Path | None = None) -> None:
        with self._closing:
            super().stop(keep_log)


def by_depth(histogram: Sequence[int] | None, steps: int) -> tuple[int, ...] | None:
    """Of rounds in which j drafts were kept, j from 0 on: those in which depth k's was, k from 0 to ``steps`` - 1.

    A round that kept j has kept depths 0 … j-1. Raises InputError for rounds that kept more than is drafted.
    """
    if histogram is None:
        return None
    if any(histogram[steps + 1 :]):
        raise InputError(
            f"A round kept {len(histogram) - 1} drafts of {steps}.",
            way_out="Turn adaptive speculation off, under which the number of drafts changes as it runs.",
        )
    return tuple(sum(histogram[k + 1 :]) for k in range(steps))


def _plus(a: Counters, b: Counters) -> Counters:
    accepted = tuple(x + y for x, y in zip(a.accepted, b.accepted, strict=True))
    return Counters(a.rounds + b.rounds, a.drafted + b.drafted, accepted, (a.generated or 0) + (b.generated or 0))


# -- settings --------------------------------------------------------------------------------------------------------


def settings(info: Mapping[str, Any], who: Identity) -> dict[str, Any]:
    """What bears on speculation in /server_info, in the words of ``vllm_talk.settings``."""
    flat = {
        "model.quantization": "quantization", "max_model_len": "context_length", "cache.cache_dtype": "kv_cache_dtype",
        "cache.page_size": "page_size", "scheduler.max_num_seqs": "max_running_requests",
        "scheduler.max_num_batched_tokens": "chunked_prefill_size", "parallel.tensor_parallel_size": "tp_size",
        "parallel.pipeline_parallel_size": "pp_size", "parallel.data_parallel_size": "dp_size",
        "model.attention_backend": "attention_backend", "speculative.attention_mode": "speculative_attention_mode",
        "speculative.quantization": "speculative_draft_model_quantization",
        "speculative.accept_threshold_single": "speculative_accept_threshold_single",
        "speculative.accept_threshold_acc": "speculative_accept_threshold_acc",
    }  # fmt: skip
    known: dict[str, Any] = {
        "model": publishable(who.model_path),
        "model.dtype": DTYPES.get(who.dtype or "", who.dtype),
        "model.enforce_eager": None if who.graphs is None else not who.graphs,
        "speculative.method": who.algorithm.lower() if who.algorithm else None,
        "speculative.model": publishable(who.drafter),
        "speculative.num_speculative_tokens": who.steps,
        "speculative.top_k": who.top_k,
        "scheduler.async_scheduling": who.overlaps,
        "cache.enable_prefix_caching": who.caches_prefixes,
        "accept_length_so_far": who.accept_length,
    }
    plain = {word: info[name] for word, name in flat.items() if isinstance(info.get(name), str | int | float)}
    return {word: publishable(value) for word, value in {**known, **plain}.items() if value is not None}


def _speculation(who: Identity) -> list[str]:
    """The flags that its settings are, for the tables."""
    known = {
        dialect.ALGORITHM: who.algorithm, dialect.DRAFT: Path(who.drafter or "").name or None,
        dialect.STEPS: who.steps, dialect.TOPK: who.top_k, dialect.TOKENS: who.draft_tokens,
    }  # fmt: skip
    return [word for name, value in known.items() if value is not None for word in (name, str(value))]


def _checked(flags: Sequence[str]) -> dialect.Given:
    for flag in flags:
        if flag.split("=", 1)[0].replace("_", "-") in OURS:
            raise UsageError(f"{flag} is set by eyas.", way_out="Leave it out of --engine-flags.")
    return dialect.parse(flags)


def _environment() -> dict[str, str]:
    """Ours without what belongs to our Python, and without keys."""
    return {k: v for k, v in os.environ.items() if k not in (*child.OURS, *KEYS)}


def _served(words: Sequence[str]) -> list[str]:
    """The flags of a command line of ours that the tables know; the drafter by the name of its folder."""
    known: list[str] = []
    left = iter(words[3:])  # python -m module
    for word in left:
        if word in WHERE:
            next(left, None)
        else:
            known.append(Path(word).name if known and known[-1] == dialect.DRAFT else word)
    return known
