"""What stands, as Prometheus reads it: a page on 127.0.0.1, or a file for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas import files
from eyas.errors import EnvironmentFault, UsageError
from eyas.watch.watcher import REASONS

HOST = "127.0.0.1"
Json = Mapping[str, Any]


class Export:
    """``to`` is ``:PORT`` or a file. ``tell`` after each reading; ``close`` lets go of the port."""

    def __init__(self, to: str, told: Json) -> None:
        self._collector = _Collector(told)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        self._server: Any = None
        self.path: Path | None = None
        self.failed = False
        if to.startswith(":"):
            self._server = _serve(to, self._registry)
        else:
            self.path = Path(to)
            self.tell(told)

    def tell(self, told: Json) -> None:
        """EnvironmentFault where the file cannot be written."""
        self._collector.told = told
        if self.path is not None:
            files.write_text(self.path, generate_latest(self._registry).decode("utf-8"))

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            with suppress(OSError):
                server.shutdown()
                server.server_close()
            thread.join(timeout=2)


def _serve(to: str, registry: CollectorRegistry) -> Any:
    if not to[1:].isdigit() or not 1 <= int(to[1:]) <= 65535:
        raise UsageError(f"--prometheus {to}: no port.", way_out="Write it like :9505, or name a file.")
    try:
        return start_http_server(int(to[1:]), addr=HOST, registry=registry)
    except OSError as error:
        raise EnvironmentFault(
            f"Port {to[1:]} of {HOST} cannot be used: {error.strerror or error}.",
            way_out="Name another port, or a file for node_exporter.",
        ) from error


class _Collector(Collector):
    """Everything is of one reading: ``told`` is changed whole."""

    def __init__(self, told: Json) -> None:
        self.told = told

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        told = self.told
        length = GaugeMetricFamily(
            "eyas_watch_accept_length", "Accept length: accepted drafted tokens of a round, and 1.", labels=["window"]
        )
        for label, key in (("interval", "interval"), ("window", "newest"), ("first", "first")):
            value = (told[key] or {}).get("accept_length")
            if value is not None:
                length.add_metric([label], value)
        yield length
        if told["expected"] and told["expected"]["value"] is not None:
            yield GaugeMetricFamily(
                "eyas_watch_expected_accept_length",
                "Accept length that the drafter's curve or --expect gives.",
                told["expected"]["value"],
            )
        joint = GaugeMetricFamily(
            "eyas_watch_joint_rate", "Rounds of the newest window whose depths 0 to this all hit.", labels=["depth"]
        )
        for depth, rate in enumerate(told["newest"]["joint"] or ()):
            joint.add_metric([str(depth)], rate)
        yield joint
        yield CounterMetricFamily("eyas_watch_rounds", "Rounds seen since watching began.", told["rounds"])
        warning = GaugeMetricFamily("eyas_watch_warning", "1 while a warning stands.", labels=["reason"])
        for reason in REASONS:
            warning.add_metric([reason], float(reason in told["standing"]))
        yield warning
        yield GaugeMetricFamily("eyas_watch_up", "1 while the engine answers.", float(told["up"]))
