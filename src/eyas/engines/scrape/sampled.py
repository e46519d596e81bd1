"""One reading of a metrics page, kept apart by label set so that the next can be compared with it.

``page`` gives vLLM's counters and SGLang's gauges; ``began_anew`` says whether the engine was started between two
readings, ``grown`` what was counted between them. Names and labels as in ``pages``; the requests running are
``vllm:num_requests_running`` and ``sglang:num_running_reqs``. SGLang counts verify calls as a request ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.engines.scrape import pages
from eyas.engines.scrape.tally import Garbled, count
from eyas.errors import InputError

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
MOST = 20_000  # samples of speculation on a page; an engine has a few dozen
_CREATED = "_created"
Key = tuple[str, pages.Labels]


@dataclass(frozen=True)
class Gauge:
    """What one rank of SGLang says: means of its last log interval, no counts."""

    length: float
    rate: float | None


@dataclass(frozen=True)
class Sampled:
    """``counters``: vLLM's four, or SGLang's verify calls. ``draft_tokens`` is K where the page tells it."""

    engine: str
    counters: Mapping[Key, int] = field(default_factory=dict)
    created: Mapping[Key, float] = field(default_factory=dict)
    gauges: Mapping[str, Gauge] = field(default_factory=dict)
    draft_tokens: int | None = None
    running: float | None = None

    def total(self, name: str) -> int:
        return sum(value for (one, _), value in self.counters.items() if one == name)


@dataclass(frozen=True)
class Grown:
    """Counts between two readings, summed over label sets. ``hits`` is empty where positions are not all there."""

    rounds: int
    drafted: int
    accepted: int
    hits: tuple[int, ...]


def page(body: bytes, where: str) -> Sampled:
    """InputError where a sample of speculation is cut, or the page has none."""
    counters: dict[Key, int] = {}
    created: dict[Key, float] = {}
    gauged: dict[str, dict[str, float]] = {}
    running: float | None = None
    for line in _lines(body, where):
        try:
            name, labels, value = pages.sample(line)
            if name in RUNNING:
                running = (running or 0.0) + value
            elif name.endswith(_CREATED):
                created[name, frozenset(labels.items())] = value
            elif name.startswith(pages.VLLM):
                counters[_short(name, pages.VLLM), frozenset(labels.items())] = count(value)
            elif _short(name, pages.SGLANG) == "verify_calls":
                counters["verify_calls", frozenset(labels.items())] = count(value)
            else:
                gauged.setdefault(pages.rank(labels), {})[_short(name, pages.SGLANG)] = value
        except Garbled as error:
            raise InputError(
                f"{where} is cut or garbled: {line[:100]!r}.", way_out="Look at the page yourself (curl)."
            ) from error
    if any(name == "drafts" for name, _ in counters):
        kept = {key: value for key, value in counters.items() if key[0] != "verify_calls"}
        return Sampled("vllm", kept, created, {}, _positions(kept), running)
    gauges = {rank: _gauge(values) for rank, values in gauged.items() if "accept_length" in values}
    if not gauges:
        raise InputError(
            f"{where} is no metrics page with speculation.", way_out="Give the page itself (…/metrics), not a log."
        )
    return Sampled("sglang", counters, created, gauges, _chain(gauged), running)


def _lines(body: bytes, where: str) -> list[str]:
    marks = (pages.VLLM, pages.SGLANG, *RUNNING)
    found = [line for line in body.decode("utf-8", errors="replace").splitlines() if line.startswith(marks)]
    if len(found) > MOST:
        raise InputError(f"{where} has {len(found):,} samples of speculation.", way_out="Name one engine's own page.")
    return found


def _short(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).removesuffix("_total")


def _gauge(values: Mapping[str, float]) -> Gauge:
    rate = values.get("accept_rate", 0.0)
    return Gauge(values["accept_length"], rate if rate > 0 else None)


def _positions(counters: Mapping[Key, int]) -> int | None:
    """K: how many positions there are, less zeros behind the last that was ever drafted."""
    sums: dict[str, int] = {}
    for (name, labels), value in counters.items():
        place = dict(labels).get("position", "") if name == "accepted_tokens_per_pos" else name
        sums[place] = sums.get(place, 0) + value
    rounds, drafted = sums.get("drafts", 0), sums.get("draft_tokens", 0)
    listed = sum(place.isdigit() for place in sums)
    real = drafted // rounds if rounds and drafted % rounds == 0 else listed
    padded = 0 < real < listed and not any(sums.get(str(k)) for k in range(real, listed))
    return (real if padded else listed) or None


def _chain(gauged: Mapping[str, Mapping[str, float]]) -> int | None:
    """K of a chain: the gauges do not give top-k, but a chain verifies one token more than it has steps."""
    told = {(v.get("num_steps", 0.0), v.get("num_draft_tokens", 0.0)) for v in gauged.values() if "num_steps" in v}
    if len(told) != 1:
        return None
    ((steps, verified),) = told
    return int(steps) if steps >= 1 and verified == steps + 1 else None


def refuse_llama_cpp(body: bytes, where: str) -> None:
    if b"\nllamacpp:" in body and b"\nvllm:" not in body:
        raise InputError(
            f"{where} is llama.cpp's, whose metrics page has no rounds.",
            way_out="It counts them in its log: give that to `eyas read`.",
        )


# -- two readings ---------------------------------------------------------------------------------------------


def began_anew(before: Sampled, now: Sampled) -> str | None:
    """Why nothing can be counted from ``before`` to ``now``; None where it can."""
    if before.engine != now.engine:
        return f"{now.engine} answers where {before.engine} did"
    if set(before.counters) - set(now.counters):
        return "a counter is gone"
    if any(value < before.counters.get(key, 0) for key, value in now.counters.items()):
        return "a counter fell"
    if any(before.created.get(key, at) != at for key, at in now.created.items()):
        return "its counters were created anew"
    if now.engine == "sglang" and before.draft_tokens != now.draft_tokens:  # vLLM's counters would be others
        return f"it drafts {now.draft_tokens} tokens, {before.draft_tokens} before"
    return None


def grown(before: Sampled | None, now: Sampled) -> Grown:
    """From ``before`` to ``now``, or all there is in ``now``. A label set that is new began at 0."""
    base = {} if before is None else before.counters
    sums: dict[str, int] = {}
    hits: dict[int, int] = {}
    for (name, labels), value in now.counters.items():
        more = value - base.get((name, labels), 0)
        sums[name] = sums.get(name, 0) + more
        position = dict(labels).get("position", "")
        if name == "accepted_tokens_per_pos" and position.isdigit():
            hits[int(position)] = hits.get(int(position), 0) + more
    whole = sorted(hits) == list(range(len(hits)))
    listed = tuple(hits[k] for k in sorted(hits))[: now.draft_tokens] if whole else ()
    rounds = sums.get("drafts", sums.get("verify_calls", 0))
    return Grown(rounds, sums.get("draft_tokens", 0), sums.get("accepted_tokens", 0), listed)
