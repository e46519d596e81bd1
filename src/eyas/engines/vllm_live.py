"""A vLLM that serves: one we start in its own environment, or one that already runs.

Ours listens on the loopback, in vLLM's developer mode, so that ``/collective_rpc`` and ``/server_info`` are there
(entrypoints/serve/dev, 0.32); the probe's methods are called by name with strings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.engines.child import Child
from eyas.engines.http import Asker
from eyas.engines.live import About, Answer, Counters
from eyas.engines.scrape import page
from eyas.engines.server import Server, port_of, told
from eyas.engines.vllm_talk import (
    INSIDE,
    answered,
    command,
    counters,
    environment,
    served_with,
    settings,
)
from eyas.errors import EnvironmentFault, InputError, UsageError
from eyas.provenance import publishable

PROBE = "vllm_probe.Probe"
START_SECONDS = 900.0  # a large model takes minutes to load
PATIENCE = 5.0  # seconds that an answer to /health may take


class Vllm(Server):
    """See ``eyas.engines.live.Engine``."""

    def __init__(self, url: str, about: About, process: Child | None, concurrency: int) -> None:
        super().__init__(Asker(url, "vLLM"), about, process, concurrency)
        self._model = "target"

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
        extension: tuple[str, Path] = (PROBE, INSIDE),
        probing: bool = True,
    ) -> Vllm:
        """Start ``vllm serve`` of ``target`` with ``drafter``; ``flags`` are the user's own.

        ``extension`` is the class mixed into its workers and the folder it lies in. Unless ``probing`` is off, graphs
        and the prefix cache are: a hook fires in eager mode only, and a cached row is never fed.
        """
        chosen = port_of(port)
        words = command(python, target, drafter, chosen, draft_tokens, flags, extension[0], probing)
        process = Child(words, environment(extension[1]), "vLLM")
        about = About("vllm", "launched", url=None, command=told(words, (target, drafter)), flags=served_with(words))
        if probing:
            about.unseen.append("graphs and the prefix cache, which are off while it is probed")
        return cls(f"http://127.0.0.1:{chosen}", about, process, concurrency)

    @classmethod
    def attach(cls, url: str) -> Vllm:
        address = page.address(url).removesuffix("/metrics").removesuffix("/v1").rstrip("/")
        about = About("vllm", "attached", url=address)
        about.unseen.append("what the drafter is fed and drafts: only an engine that eyas starts is probed")
        return cls(address, about, None, 1)

    def ready(self, heard: Callable[[str], None] = lambda what: None) -> None:
        if self._process is not None:
            self._wait(heard, START_SECONDS, PATIENCE)
        self.about.version = self._version()
        self._models()
        if self._process is not None:
            self._look_inside()

    def _version(self) -> str | None:
        """Who is there. An engine of another kind is a UsageError."""
        found = self.asker.text("/version")
        with suppress(ValueError, TypeError, AttributeError):
            if (version := json.loads(found or "").get("version")) is not None:
                return str(version)
        raise UsageError(
            f"{self.asker.url} does not say that it is vLLM (no /version).",
            way_out="Check the address; name the engine it is with --engine.",
        )

    def _models(self) -> None:
        listed = self.asker.ask("/v1/models", seconds=20.0)
        try:
            first = listed["data"][0]
            self._model = str(first["id"])
            root = str(publishable(str(first.get("root", first["id"]))))
            self.about.resolved |= {"model": root, "max_model_len": first.get("max_model_len")}
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{self.asker.url}/v1/models lists no model.", way_out="Wait until the engine has loaded one."
            ) from error

    def _look_inside(self) -> None:
        with suppress(InputError, EnvironmentFault):
            info = self.asker.ask("/server_info?config_format=json", seconds=60.0)
            self.about.resolved |= settings(info.get("vllm_config") or {})
        with suppress(InputError, EnvironmentFault):
            self.about.model = self.call("eyas_probe_facts")
            runner = str(self.about.model.get("runner", ""))
            self.about.runner = "v2" if ".gpu.model_runner" in runner else "v1"

    # -- ask --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        heard: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        return self._each(prompts, lambda number, ids: self._one(number, ids, max_tokens, temperature), heard)

    def _one(self, number: int, ids: Sequence[int], max_tokens: int, temperature: float) -> Answer:
        before = self.metrics() if self._concurrency == 1 else None
        began = time.monotonic()
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": 0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "request_id": f"eyas-{number}",
        }
        with self._asking():
            told = self.asker.ask("/v1/completions", body)
        seconds = time.monotonic() - began
        answer = answered(told, f"cmpl-eyas-{number}-0", tuple(ids), seconds)
        after = self.metrics() if before is not None else None
        if before is None or after is None:
            return answer
        counts = after.since(before)  # one request at a time: what grew is its own
        return replace(answer, rounds=counts.rounds, accepted=counts.accepted)

    def rendered(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...] | None:
        """A chat as the engine's own template renders it, in token ids; None where it does not tell."""
        return self._tokenized({"model": self._model, "messages": list(messages), "add_generation_prompt": True})

    def call(self, method: str, *args: str) -> dict[str, Any]:
        """A method of the probe, of the first worker; only on an engine of ours."""
        assert self._process is not None, "probes are for engines we started"
        told = self.asker.ask("/collective_rpc", {"method": method, "args": list(args)}, seconds=120.0)
        results = [r for r in (told or {}).get("results", []) if isinstance(r, dict)]
        if not results:
            raise InputError(f"vLLM's workers say nothing to {method}.", way_out="Report this version of vLLM.")
        return next((r for r in results if r.get("started") is not False), results[0])

    @contextmanager
    def probe(self, folder: Path, most_bytes: int) -> Iterator[Mapping[str, Any]]:
        told = self.call("eyas_probe_start", json.dumps({"folder": str(folder), "most_bytes": most_bytes}))
        if "error" in told:
            raise InputError(
                f"vLLM cannot be probed: {told['error']}.", way_out="Check --engine-flags: method must be eagle3."
            )
        summary: dict[str, Any] = {}
        try:
            yield summary
        except KeyboardInterrupt:  # the engine is about to end, and may not listen any more
            raise
        except BaseException:
            self._unprobe(summary)
            raise
        self._unprobe(summary)

    def _unprobe(self, summary: dict[str, Any]) -> None:
        with suppress(EnvironmentFault, InputError):
            summary |= self.call("eyas_probe_stop")

    def metrics(self) -> Counters | None:
        text = self.asker.text("/metrics")
        return counters(text) if text is not None else None
