"""Metrics pages: samples of vLLM's counters and SGLang's gauges, one engine (set of labels) at a time.

A text may hold several pages one after the other; counters then show their newest state, and where one falls the
server was started again.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from eyas.engines.scrape import sglang, vllm
from eyas.engines.scrape.identities import Printed
from eyas.engines.scrape.tally import Garbled, Settings, count
from eyas.results import Finding
from eyas.results.observed import Counts

VLLM, SGLANG = "vllm:spec_decode_num_", "sglang:spec_"
_VLLM_NAMES = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
Labels = frozenset[tuple[str, str]]


def sample(line: str) -> tuple[str, dict[str, str], float]:
    """Name, labels and value of one line. Garbled where it is none."""
    try:
        (family,) = text_string_to_metric_families(line + "\n")
        (one,) = family.samples
        return one.name, dict(one.labels), float(one.value)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise Garbled from error


class VllmPage:
    """Counters of every engine behind one address, with and without ``_total``."""

    def __init__(self, where: str, at: str) -> None:
        self.where, self.at = where, at
        self.seen = 0
        self._values: dict[tuple[str, Labels], int] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> bool:
        """False where a counter fell."""
        short = name.removeprefix(VLLM).removesuffix("_total")
        if short.endswith("_created"):
            return True
        if short not in _VLLM_NAMES:
            raise Garbled
        key, new = (short, frozenset(labels.items())), count(value)
        if new < self._values.get(key, 0):
            return False
        self._values[key] = new
        self.seen += 1
        return True

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        """Sums over the engines; each label set is one."""
        totals = {name: sum(v for (n, _), v in self._values.items() if n == name) for name in _VLLM_NAMES}
        hits: dict[int, int] = {}
        for (name, labels), value in self._values.items():
            position = dict(labels).get("position")
            if name == "accepted_tokens_per_pos" and position is not None and position.isdigit():
                hits[int(position)] = hits.get(int(position), 0) + value
        whole = sorted(hits) == list(range(len(hits)))
        tally = vllm.Exact(self.where, self.at, "metrics page")
        tally.set_page(
            totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"],
            [hits[k] for k in sorted(hits)] if whole else [],
        )  # fmt: skip
        return tally.finish(settings)


class SglangPage:
    """Gauges of one rank: the newest reading of each; they are means of the last log interval."""

    def __init__(self, where: str, at: str) -> None:
        self.where, self.at = where, at
        self.seen = 0
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float) -> bool:
        """False where the counter of rounds fell."""
        short = name.removeprefix(SGLANG).removesuffix("_total")
        if short == "verify_calls" and value < self._values.get(short, 0):
            return False
        self._values[short] = value
        self.seen += 1
        return True

    def finish(self, settings: Settings) -> tuple[Counts, list[Finding]]:
        tally = sglang.Means(self.where, self.at, "metrics page")
        length, rate = self._values.get("accept_length", 0.0), self._values.get("accept_rate", 0.0)
        verified = self._values.get("num_draft_tokens", 0.0)
        tally.gauged = int(verified) if verified >= 2 else None
        tally.rounds = int(self._values["verify_calls"]) if "verify_calls" in self._values else None
        if length > 0:  # 0 is a gauge that was never set
            exact = 1e-6 * length
            tally.add(Printed(length, exact), Printed(rate, 1e-6) if rate > 0 else None)
        return tally.finish(settings)


def rank(labels: Mapping[str, str]) -> str:
    """Which of SGLang's schedulers a gauge is of."""
    return ",".join(f"{k}={v}" for k, v in sorted(labels.items()) if k.endswith("_rank") or k == "engine_type")


def is_sample(line: str) -> bool:
    return line.startswith((VLLM, SGLANG))
