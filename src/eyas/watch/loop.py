"""Ask, wait, ask again: the only part that knows a clock and a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from eyas.engines import scrape
from eyas.engines.scrape import page, sampled
from eyas.engines.scrape.sampled import Sampled
from eyas.errors import EnvironmentFault, InputError
from eyas.results import Finding
from eyas.watch.watcher import Event, Watcher

LONGEST_WAIT = 60.0  # seconds between tries of an engine that is away; --every where that is longer
MOST = 8 << 20  # bytes of a page


def address(text: str) -> str:
    """The URL of the page; ``http://`` and ``/metrics`` are added where they are left out."""
    return page.address(text if page.is_url(text) else f"http://{text}")


def read(url: str, seconds: float) -> tuple[Sampled, list[Finding]]:
    """One reading. EnvironmentFault where nobody answers, InputError for an answer that is no page."""
    body = page.fetch(url, seconds=seconds, most=MOST)
    sampled.refuse_llama_cpp(body, url)
    findings = scrape.read([body], url).findings  # and says what is wrong with a body that is none
    return sampled.page(body, url), findings


def patience(every: float) -> float:
    """Seconds an answer may take: an interval, but not less than two, nor more than a page ever needs."""
    return min(page.SECONDS, max(2.0, every))


def watch(
    url: str,
    watcher: Watcher,
    *,
    seconds: float | None = None,
    first: tuple[Sampled, list[Finding]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[Event]]:
    """What there is to say after each try, without end or for ``seconds``. ``first`` was read just now."""
    start, tries = clock(), 0
    yield watcher.take(first[0], 0.0, first[1])
    due = 0.0
    while seconds is None or due < seconds:
        due = _next(due, clock() - start, watcher.every, tries)
        due = due if seconds is None else min(due, seconds)
        sleep(max(0.0, start + due - clock()))
        try:
            reading, findings = read(url, patience(watcher.every))
        except (EnvironmentFault, InputError) as error:
            tries += 1
            yield watcher.down(clock() - start, error.message)
        else:
            tries = 0
            yield watcher.take(reading, clock() - start, findings)


def _next(due: float, now: float, every: float, tries: int) -> float:
    """When to ask again: on the beat, those that were missed left out; later and later while nobody answers."""
    if tries:
        return now + min(every * 2.0 ** min(tries - 1, 30), max(every, LONGEST_WAIT))
    return due + every * (int(max(0.0, now - due) / every) + 1)
