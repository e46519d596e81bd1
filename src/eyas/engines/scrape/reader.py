"""Lines of a text into runs of engines: which reader a line is for, and where one run ends and the next begins.

A run ends where a start-up line comes after numbers, a counter falls, or the number of drafted tokens changes. Nothing
is kept of a line but its sums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from eyas.engines.scrape import bodies, llamacpp, pages, sglang, vllm
from eyas.engines.scrape.identities import Printed
from eyas.engines.scrape.tally import Garbled, Settings, Tally
from eyas.results import Evidence, Finding
from eyas.results.observed import Counts

NUMBERS: tuple[bytes, ...] = (
    b"SpecDecoding", b"accept len", b"draft acceptance", b"acc tokens", b"acc per pos", b"spec_decode_num_",
    b"sglang:spec_", b"spec_verify_ct", b"avg_spec_accept_length", b"acceptance_histogram", b"draft_n_accepted",
    b"specDecodingStats", b"numRequestsWithDraftTokens",
)  # fmt: skip
STARTS: tuple[bytes, ...] = (
    b"server_args", b"LLM engine (v", "█  version ".encode(), b"server version", b"num_spec_tokens",
    b"num_speculative_tokens", b"rejection_sample_method", b"SIMULATE_ACC_LEN", b"speculative", b"build: ",
    b"build_info", b"loading model", b"draft-max", b"draft-n-max",
)  # fmt: skip
LOOKED_FOR = (
    "vLLM's 'SpecDecoding metrics:' lines or vllm:spec_decode_num_* counters, SGLang's 'accept len:' lines, "
    "sglang:spec_* gauges or spec_verify_ct fields, llama.cpp's 'draft acceptance' or 'statistics' lines or draft_n "
    "fields, TensorRT-LLM's specDecodingStats"
)
LONGEST = 1 << 20  # bytes of a line that are read
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
MOST_RUNS = 1000
_T = TypeVar("_T", bound=Tally)


class Reader:
    """Feed it the lines that hold a marker, then ``finish``."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.counts: list[Counts] = []
        self.findings: list[Finding] = []
        self.garbled = 0
        self._first_garbled = ""
        self._tallies: dict[tuple[str, ...], Any] = {}
        self._settings: dict[str, Settings] = {}
        self._left_out = 0

    # -- input -----------------------------------------------------------------------------------------------

    def line(self, number: int, raw: bytes) -> None:
        text = raw[:LONGEST].decode("utf-8", errors="replace").rstrip("\r\n")
        if "\x1b" in text:
            text = _COLOURS.sub("", text)
        at = f"line {number}"
        try:
            if len(raw) > LONGEST:
                raise Garbled
            self._line(text, at)
        except Garbled:
            self.garbled += 1
            self._first_garbled = self._first_garbled or f"{at}: {text[:120]}"

    def document(self, value: Any, at: str = "") -> None:
        """A body, or a list of them."""
        for found in bodies.walk(value):
            try:
                self._body(found, at)
            except Garbled:
                self.garbled += 1
                self._first_garbled = self._first_garbled or f"a body with {found.kind} fields"

    def _line(self, text: str, at: str) -> None:
        if pages.is_sample(text):
            self._sample(text, at)
        elif "SpecDecoding" in text:
            if "SpecDecoding metrics" in text:
                self._adding(("vllm", "lines"), lambda: vllm.Lines(self.where, at), lambda t: t.add(text, at))
        elif "Decode batch" in text and "accept len" in text:
            self._tally(("sglang", "lines"), lambda: sglang.Means(self.where, at, "log lines")).add_line(text)
        elif "statistics" in text and "acc tokens" in text:
            name = llamacpp.Drafter.name_of(text)
            self._adding(
                ("llama.cpp", "drafter", name),
                lambda: llamacpp.Drafter(self.where, at, name),
                lambda t: t.add(text, at),
            )
        elif "draft acceptance" in text or "acc per pos" in text:
            self._tally(("llama.cpp", "requests"), lambda: llamacpp.Requests(self.where, at, "log lines")).add_line(
                text, at
            )
        elif any(name in text for name in ("spec_verify_ct", "acceptance_histogram", "draft_n_accepted",
                                           "numRequestsWithDraftTokens", "avg_spec_accept_length")):  # fmt: skip
            self._fields(text, at)
        else:
            self._start(text)

    def _fields(self, text: str, at: str) -> None:
        start = text.find("{")
        if start >= 0:
            try:
                value = json.loads(text[start:])
            except (ValueError, RecursionError):
                value = None
            if value is not None:
                self.document(value, at)
                return
        if "spec_verify_ct" not in text:
            raise Garbled
        fields = bodies.printed_fields(text)
        self._tally(("sglang", "requests"), lambda: sglang.Requests(self.where, at)).add(fields, at)

    def _sample(self, text: str, at: str) -> None:
        name, labels, value = pages.sample(text)
        if name.startswith(pages.VLLM):
            self._adding(("vllm", "page"), lambda: pages.VllmPage(self.where, at), lambda t: t.add(name, labels, value))
        else:
            key = ("sglang", "page", pages.rank(labels))
            self._adding(key, lambda: pages.SglangPage(self.where, at), lambda t: t.add(name, value))

    def _body(self, found: bodies.Found, at: str) -> None:
        where, fields = self.where, found.fields
        if found.kind == "vllm":
            self._adding(
                ("vllm", "requests"),
                lambda: vllm.Exact(where, at, "request fields"),
                lambda t: t.add_body(fields, found.emitted, at),
            )
        elif found.kind == "sglang":
            self._tally(("sglang", "requests"), lambda: sglang.Requests(where, at)).add(fields, at)
        elif found.kind == "llama.cpp":
            if "draft_n" not in fields:
                raise Garbled
            self._tally(("llama.cpp", "timings"), lambda: llamacpp.Requests(where, at, "request fields")).add_timings(
                fields, at
            )
        elif found.kind == "tensorrt-llm":
            self._tally(("tensorrt-llm", "iterations"), lambda: bodies.Iterations(where, at)).add(fields, at)
        elif found.kind == "sglang settings":
            self._set("sglang", bodies.settings(fields))
        elif found.kind == "sglang info":
            self._info(fields, at)

    def _info(self, fields: Any, at: str) -> None:
        from_server = fields["avg_spec_accept_length"]
        if isinstance(from_server, int | float) and not isinstance(from_server, bool) and from_server > 0:
            tally = self._tally(("sglang", "info"), lambda: sglang.Means(self.where, at, "server info"))
            tally.add(Printed(float(from_server), 1e-6 * from_server), None)

    # -- runs ------------------------------------------------------------------------------------------------

    def _start(self, text: str) -> None:
        """Settings of a start-up line, for the engine whose line it is."""
        for engine, said in (
            ("vllm", vllm.settings(text)),
            ("sglang", None if "num_speculative_tokens" in text else sglang.settings(text)),
            ("llama.cpp", llamacpp.settings(text)),
        ):
            if said is not None:
                self._set(engine, said)
        if llamacpp.loads(text) and any(key[0] == "llama.cpp" for key in self._tallies):
            self._end("llama.cpp")

    def _set(self, engine: str, said: Settings) -> None:
        kinds = [key for key in self._tallies if key[0] == engine and key[1] not in ("page", "info")]
        if any(self._tallies[key].seen for key in kinds):
            self._end(engine)
            self._settings.pop(engine, None)
        self._settings[engine] = self._settings.get(engine, Settings()).updated(said)

    def _end(self, engine: str) -> None:
        if any(key[:2] == ("llama.cpp", "drafter") for key in self._tallies) and engine == "llama.cpp":
            self._tallies.pop(("llama.cpp", "requests"), None)  # the same rounds, told twice
        for key in [key for key in self._tallies if key[0] == engine]:
            self._close(key)

    def _tally(self, key: tuple[str, ...], make: Callable[[], _T]) -> _T:
        if key not in self._tallies:
            self._tallies[key] = make()
        tally: _T = self._tallies[key]
        return tally

    def _adding(self, key: tuple[str, ...], make: Callable[[], _T], add: Callable[[_T], bool]) -> None:
        """Add to the run that is there, or to a new one where it says that this is another run's."""
        if not add(self._tally(key, make)):
            self._close(key)
            add(self._tally(key, make))

    def _close(self, key: tuple[str, ...]) -> None:
        tally = self._tallies.pop(key)
        if not tally.seen:
            return
        if len(self.counts) >= MOST_RUNS:
            self._left_out += 1
            return
        counts, findings = tally.finish(self._settings.get(key[0], Settings()))
        self.counts.append(counts)
        self.findings += [one for one in findings if one not in self.findings]

    def finish(self) -> None:
        for engine in dict.fromkeys(key[0] for key in self._tallies):
            self._end(engine)
        self._about_the_text()

    def _about_the_text(self) -> None:
        if self.garbled:
            evidence = Evidence("unreadable lines", self.garbled, 0, self.where)
            summary = (
                f"Lines about speculation that are cut or garbled were left out; the first is {self._first_garbled}"
            )
            self.findings.append(Finding("log-damaged", "note", summary, (evidence,)))
        for engine in {counts.engine for counts in self.counts}:
            runs = [c for c in self.counts if c.engine == engine and c.kind == "log lines" and c.drafter is None]
            if len(runs) > 1:
                evidence = Evidence("runs", len(runs), 1, self.where)
                summary = f"{len(runs)} runs of {engine} are in one text; they are kept apart."
                if self._left_out:
                    summary += f" {self._left_out:,} more were left out."
                self.findings.append(Finding("runs-mixed", "note", summary, (evidence,)))
            ks = sorted({c.draft_tokens for c in runs if c.draft_tokens})
            if len(ks) > 1:
                evidence = Evidence("draft tokens", ks, "one number", self.where)
                summary = "The runs draft different numbers of tokens: their rates and lengths do not compare."
                self.findings.append(Finding("rates-at-different-k", "note", summary, (evidence,)))
