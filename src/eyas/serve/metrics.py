"""What the server counts, as Prometheus reads it. A registry of its own, so that two servers in a process are two.

Names and meanings are listed in docs/serve.md; accept length over any time is
``increase(eyas_serve_accepted_total) / increase(eyas_serve_rounds_total) + 1``.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eyas.serve.answering import Piece
from eyas.serve.player import Job

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """``running`` and ``waiting`` are asked for when the page is."""

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"eyas_serve_{name}", meaning, labels, registry=registry)

        def gauge(name: str, meaning: str, value: Callable[[], float]) -> None:
            Gauge(f"eyas_serve_{name}", meaning, registry=registry).set_function(value)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"eyas_serve_{name}_seconds", meaning, buckets=buckets, registry=registry)

        self._rounds = counter("rounds", "Rounds of draft and verify.")
        self._drafted = counter("drafted_at_depth", "Rounds that drafted this depth.", ("depth",))
        self._accepted_at = counter("accepted_at_depth", "Rounds that kept this depth.", ("depth",))
        self._accepted = counter("accepted", "Drafted tokens kept, bonus tokens not among them.")
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self.prompts = counter("prompt_tokens", "Tokens of prompts that were read to their end.")
        self.requests = counter("requests", "Requests by how they ended.", ("outcome",))
        self.first = histogram("first_token", "From a request's arrival to its first token.", _FIRST)
        self.between = histogram("between_tokens", "Between the tokens of an answer; a round's share evenly.", _BETWEEN)
        self.whole = histogram("request", "From a request's arrival to its end.", _FIRST)
        gauge("running", "Answers whose rounds are played in turn.", running)
        gauge("waiting", "Answers in the queue.", waiting)
        gauge("accept_length", "Accepted drafted tokens of a round, and 1; since the start.", self._accept_length)
        self._sums = [0, 0]

    def heard(self, job: Job, piece: Piece) -> None:
        """A step of ``job``, whose counts do not hold it yet. In the player's thread."""
        before, now = job.counts, piece.counts
        if job.tokens == 0:
            self.prompts.inc(len(job.request.prompt_ids))
        self._generated.inc(len(piece.token_ids))
        self._rounds.inc(now.rounds - before.rounds)
        accepted = sum(now.accepted) - sum(before.accepted)
        self._accepted.inc(accepted)
        self._sums = [self._sums[0] + now.rounds - before.rounds, self._sums[1] + accepted]
        for depth, (drafted, kept) in enumerate(zip(now.drafted, now.accepted, strict=True)):
            earlier = depth < len(before.drafted)
            self._drafted.labels(str(depth)).inc(drafted - (before.drafted[depth] if earlier else 0))
            self._accepted_at.labels(str(depth)).inc(kept - (before.accepted[depth] if earlier else 0))

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def mean_seconds(self) -> float | None:
        """What a request has taken so far, from its arrival to its end; None before the first."""
        found = {s.name.rpartition("_")[2]: s.value for m in self.whole.collect() for s in m.samples}
        return found["sum"] / found["count"] if found["count"] else None

    def _accept_length(self) -> float:
        rounds, accepted = self._sums
        return 1 + accepted / rounds if rounds else float("nan")
