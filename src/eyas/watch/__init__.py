"""A running engine watched from outside: its metrics page read at intervals, nothing sent to it, nothing that grows.

``loop.watch`` asks and waits, ``Watcher`` takes readings and knows what stands, ``reasons`` says what is wrong,
``expected`` what the drafter's own curve promises, ``sums`` is what is kept, ``export`` tells Prometheus.
"""

from __future__ import annotations

from eyas.watch.expected import Expected
from eyas.watch.watcher import Event, Watcher

__all__ = ["Event", "Expected", "Watcher"]
